"""The comparison with PyG in RAM on a small graph shaped as ACM."""

from pathlib import Path

import numpy as np
import pytest

from tools.scores import hetero


def small_acm(folder: Path, papers: int = 60) -> Path:
    """Features and subjects that follow the classes."""
    rng = np.random.default_rng(0)
    y = np.arange(papers) % 3
    numbers = rng.permutation(papers)
    arrays = {
        "paper_x": (rng.random((papers, 9)) < 0.2 + 0.6 * (np.arange(9) % 3 == y[:, None])).astype(np.uint8),
        "author_x": rng.integers(0, 2, (20, 9)).astype(np.uint8),
        "paper_y": y,
        "paper_author": np.stack([np.repeat(np.arange(papers), 2), rng.integers(0, 20, 2 * papers)]),
        "paper_subject": np.stack([np.arange(papers), y * 2 + rng.integers(0, 2, papers)]),
    }
    splits = {f"{name}_60": part for name, part in zip(("train", "val", "test"), np.split(numbers, [20, 40]), strict=True)}
    np.savez(folder / "acm.npz", **arrays, **splits)
    return folder


@pytest.mark.slow
def test_both_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: {**settings, "hidden": 8, "epochs": 15, "lr": 0.02} for name, settings in hetero.MODELS.items()}
    monkeypatch.setattr(hetero, "MODELS", small)
    data = hetero.acm(small_acm(tmp_path))
    assert data["subject"].num_nodes == 6
    assert "x" not in data["subject"]
    found = hetero.scores(data, tmp_path, [0])
    assert list(found) == ["rsage", "rsage, PyG in RAM", "hgt", "hgt, PyG in RAM"]
    assert all(score > 60 for each in found.values() for score in each)
