"""The modes' scores on a graph of two communities: what is reported, that nothing is trained twice, that batches are small."""

from pathlib import Path

import numpy as np
import pytest

from ooc.config.nodes import TrainConfig
from ooc.sampling.saint import Draw
from tests.scale import few
from tools.scores import modes

NODES = {"pubmed.npz": 19_717, "tolokers.npz": 11_758}


def communities(path: Path, num_nodes: int = 80) -> None:
    """Edges within two halves, features that tell them apart, three masks."""
    rng = np.random.default_rng(0)
    half = num_nodes // 2
    ends = rng.integers(0, half, (2, 300)) + half * rng.integers(0, 2, 300)
    y = np.arange(num_nodes) // half
    masks = np.eye(3, dtype=bool)[rng.integers(0, 3, num_nodes)].T
    path.parent.mkdir(parents=True, exist_ok=True)
    x = (rng.normal(size=(num_nodes, 4)) + 2 * y[:, None]).astype(np.float32)
    np.savez(path, x=x, y=y, edge_index=ends, train_mask=masks[0], val_mask=masks[1], test_mask=masks[2])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    communities(tmp_path / "two/two.npz")
    settings = {
        "cluster": {"parts_per_batch": 2},
        "saint": {"roots": 4, "saint": "edge"},
        "history": {"parts_per_batch": 2, "refresh": 2},
    }
    common = {"model": "gcn", "hidden": 4, "layers": 2, "epochs": few(8, 20), "lr": 0.1, "dropout": 0.0}
    case = modes._case("two/two.npz", {"parts": 20}, "accuracy", common, {}, settings)
    monkeypatch.setattr(modes, "CASES", {"two": case})
    return tmp_path


@pytest.mark.slow
def test_all_that_is_asked_is_reported(small: Path) -> None:
    seeds = few([0], [0, 1])
    found = modes.modes(small, small / "out", seeds, None)
    assert list(found) == ["two/full", "two/cluster", "two/saint", "two/history", "two/zero"]
    full, line = found["two/full"], found["two/history"]
    assert full["largest_batch"] == 1
    assert full["batches_an_epoch"] == 1
    assert line["mean"] == round(sum(line["scores"]) / len(seeds), 2)
    assert len(line["scores"]) == len(seeds)
    assert line["full_batch"] == full["mean"]
    assert line["below_full_batch"] == round(full["mean"] - line["mean"], 2)
    assert line["histories_zeroed"] == found["two/zero"]["mean"]
    assert 0 < line["share_pulled"] < 1
    assert line["largest_batch"] < line["with_halo"] < 1
    assert line["batches_an_epoch"] == 10
    assert line["largest_batch"] >= 0.1
    assert found["two/saint"]["batches_an_epoch"] == 10
    assert found["two/saint"]["largest_batch"] == 0.1
    assert full["mean"] > 90  # the features alone tell the halves apart


@pytest.mark.slow
def test_what_is_done_is_not_done_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = modes.modes(small, small / "out", [0], "two/history")
    assert list(first) == ["two/full", "two/history", "two/zero"]

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(modes, "trained", refuse)
    assert modes.modes(small, small / "out", [0], "two/history") == first
    modes.CASES["two"].modes["history"]["lr"] = 0.2
    with pytest.raises(AssertionError, match="trained again"):
        modes.modes(small, small / "out", [0], "two/history")


@pytest.mark.parametrize("name", modes.CASES)
def test_batches_are_an_eighth_of_the_nodes_at_most(name: str, tmp_path: Path) -> None:
    case = modes.CASES[name]
    nodes = NODES[Path(case.npz).name]
    assert {"cluster", "saint", "history", "zero"} == set(case.modes) or name == "gcnii"
    for mode, settings in case.modes.items():
        config = TrainConfig(store=tmp_path / "s", out=tmp_path / "r", **settings)
        parts = case.parts.get(mode, case.ingest["parts"])
        assert config.mode == ("history" if mode == "zero" else mode)
        if config.mode == "saint":
            most = Draw(config.saint, config.roots, config.walk_length if config.saint == "walk" else 1).most_nodes
            assert nodes / most >= 9 + 1e-9
            assert most <= nodes / 8
        else:
            assert parts / config.parts_per_batch >= 10
            assert 1.1 * config.parts_per_batch / parts <= 1 / 8
