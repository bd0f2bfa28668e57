"""Samplers compared at equal bytes: the made graph, the nodes a layer, and a comparison of one seed."""

from pathlib import Path

import numpy as np
import pytest

from tools.scores import samplers
from tools.scores.stores import ingest


@pytest.fixture
def store(tmp_path: Path) -> Path:
    ingest(samplers.heterophilous(tmp_path / "made.npz", num_nodes=2000), tmp_path / "made.ooc")
    return tmp_path / "made.ooc"


def test_the_made_graph_has_its_edges_from_the_class_before(tmp_path: Path) -> None:
    made = np.load(samplers.heterophilous(tmp_path / "made.npz", num_nodes=2000, told=0.5))
    source, target = made["y"][made["edge_index"]]
    assert abs((source == (target - 1) % 8).mean() - (0.5 + 0.5 / 8)) < 0.02
    assert (source == target).mean() < 0.1


@pytest.mark.parametrize("sampler", ["ladies", "fastgcn", "gradient", "learned"])
def test_batches_want_as_many_rows_as_those_of_neighbor_sampling(store: Path, sampler: str) -> None:
    rows = samplers._rows(store, "heterophilous", "neighbor", (3, 3))
    nodes = samplers._nodes(store, "heterophilous", sampler)
    found = samplers._rows(store, "heterophilous", sampler, tuple(nodes))
    assert abs(sum(found) - sum(rows)) < 0.02 * sum(rows)


@pytest.mark.slow
def test_scores_are_compared_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "SAMPLERS", {name: samplers.SAMPLERS[name] for name in ("neighbor", "ladies")})
    case = samplers.CASES["heterophilous"]
    short = samplers.Case(case.metric, (3, 3), case.settings | {"epochs": 2, "eval_every": 1})
    monkeypatch.setattr(samplers, "CASES", {"heterophilous": short})
    (tmp_path / "out").mkdir()
    lines = samplers.scores(tmp_path, tmp_path / "out", [0, 1], None)
    base, ladies = lines["heterophilous/neighbor"], lines["heterophilous/ladies"]
    assert base["above_neighbor"] == 0
    assert ladies["above_neighbor"] == pytest.approx(ladies["mean"] - base["mean"], abs=0.011)
    assert abs(ladies["megabytes_an_epoch"] / base["megabytes_an_epoch"] - 1) < 0.05
    monkeypatch.setattr(samplers, "_trained", None)
    assert samplers.scores(tmp_path, tmp_path / "out", [0, 1], None) == lines
