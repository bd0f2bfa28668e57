"""The comparison of deep and shallow models, on a small copy of its settings."""

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import random_edges
from tools.scores import deep


@pytest.mark.slow
def test_both_models_are_trained_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, nodes = np.random.default_rng(0), 200
    masks = {f"{name}_mask": np.arange(nodes) % 3 == number for number, name in enumerate(("train", "val", "test"))}
    (tmp_path / "tolokers").mkdir()
    edges = np.stack(random_edges(nodes, 800))
    x, y = rng.standard_normal((nodes, 6), np.float32), rng.integers(0, 2, nodes)
    np.savez(tmp_path / "tolokers" / "tolokers.npz", x=x, y=y, edge_index=edges, **masks)
    monkeypatch.setattr(deep, "INGEST", {"undirected": True, "parts": 4})
    monkeypatch.setattr(deep, "COMMON", deep.COMMON | {"parts_per_batch": 2, "epochs": 1, "eval_every": 1, "lr_warm_up": 0.5})
    found = deep.scores(tmp_path, tmp_path / "out", [0, 1])
    assert found.keys() == deep.MODELS.keys()
    assert all(len(each["scores"]) == 2 for each in found.values())
    monkeypatch.setattr(deep, "trained", None)  # what is kept is not trained again
    assert deep.scores(tmp_path, tmp_path / "out", [0, 1]) == found
