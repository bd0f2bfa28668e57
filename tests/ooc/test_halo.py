"""Training from histories: exact where they are fresh, the same to the bit after a crash, and zeros where asked for."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc import layerplan, refresh, sweepshape, sweepstages
from ooc.compose import open_job
from ooc.config import TrainConfig
from ooc.evaluate import evaluating
from ooc.layers import run_model
from ooc.layerwise import LayerSweep
from ooc.models import full_blocks
from ooc.progress import Watchers
from ooc.refresh import Drift, Refresher
from ooc.report import write_report
from ooc.run import Job
from ooc.train import train, train_epoch
from ooc.upkeep import end_of_epoch
from stores.errors import ConfigError
from tests.conftest import MakeStore
from tests.ooc.graphs import hub_graph
from tests.ooc.runs import KillAt, Killed, curve, tight

MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"layers": 3},
    "sage": {"layers": 3, "norm": "layer", "residual": True},
    "gat": {"layers": 3, "heads": 2},
    "gin": {"layers": 2},
    "gcnii": {"layers": 8},
    "appnp": {"layers": 4},
    "sgc": {"layers": 3},
    "tests.ooc.test_halo:Own": {"layers": 3},
}
HISTORY: dict[str, Any] = {
    "mode": "history", "parts": 6, "hidden": 8, "dropout": 0.0, "seed": 2, "threads": 1, "history_dtype": "float32",
    "parts_per_batch": 2, "epochs": 4, "checkpoint_every": 2, "plan": False,
}  # fmt: skip


class Own(torch.nn.Module):
    """A user's own list of layers."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, num_layers: int) -> None:
        super().__init__()
        from ooc.convs import BlockSAGEConv

        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.layers = torch.nn.ModuleList(BlockSAGEConv(a, b) for a, b in pairwise(widths))


def configure(store: Path, out: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(store=store, out=out, **{**HISTORY, **settings})


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    """A hub, isolated nodes, self-loops, duplicates; weights too."""
    edges = hub_graph(60).numpy()
    return make_store(num_nodes=60, src=edges[0], dst=edges[1], weight=True)


def exact(job: Job) -> torch.Tensor:
    """The model's rows of all nodes, in RAM."""
    graph, ds = job.dataset.graph, job.dataset
    target = np.repeat(np.arange(ds.num_nodes), np.diff(graph.indptr))
    edges = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
    x = np.empty((ds.num_nodes, ds.num_features), np.float32)
    ds.rows("x").read(np.arange(ds.num_nodes), x)
    weight = torch.from_numpy(np.array(graph.columns["weight"]))
    blocks = full_blocks(edges, ds.num_nodes, job.config.layers, weight)
    with evaluating(job.model):
        found: torch.Tensor = run_model(job.model, torch.from_numpy(x), blocks)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_with_fresh_histories_a_batch_is_exact(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Also after it has pushed: at learning rate 0 (here: no step at all) nothing changes."""
    config = configure(store, tmp_path / "run", model=model, refresh=1, **MODELS[model])
    with open_job(config, False, Watchers([])) as job:
        train_epoch(job)
        line = end_of_epoch(job)
        assert line is not None
        assert line["refreshed"]
        assert len(line["drift"]) == job.config.layers - 1
        wanted = exact(job)
        job.state.epoch, job.state.step = 1, 0
        for _ in range(2):
            with evaluating(job.model), job.batches() as batches:
                for batch in batches:
                    rows = job.forward(batch)
                    torch.testing.assert_close(rows, wanted[batch.n_id[: batch.batch_size]], rtol=1e-5, atol=1e-5)
            assert job.halo is not None
            assert job.halo.history is not None
            job.halo.history.end_epoch()
            job.state.epoch += 1
        for edges in (2**12, 1):  # anew from the features; from the histories below
            monkeypatch.setattr(refresh, "FIELD_EDGES", (edges, edges))
            found = Drift(job.model, job.dataset, job.halo.history, job.device, "fp32").measure(7, 2**30)
            assert len(found) == len(job.halo.widths) > 0
            assert max(found) < 1e-5


@pytest.mark.parametrize("edges", [2**12, 1])
def test_drift_is_the_relative_error(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edges: int) -> None:
    """A layer's own, where its field is small enough to go back to the features."""
    monkeypatch.setattr(refresh, "FIELD_EDGES", (edges, edges))
    with open_job(configure(store, tmp_path / "run", layers=3, refresh=1), False, Watchers([])) as job:
        train_epoch(job)
        end_of_epoch(job)
        assert job.halo is not None
        history = job.halo.history
        assert history is not None
        every = np.arange(60)
        rows = np.empty((60, 8), np.float32)
        history.rows[0].read(every, rows)
        history.overwrite(0, every, 3 * rows)
        first, second = Drift(job.model, job.dataset, history, job.device, "fp32").measure(7, 2**30)
        assert first == pytest.approx(2.0, rel=1e-4)
        assert second < 1e-5 if edges > 1 else second > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"history_lag": 0, "dropout": 0.5},
        {"history_lag": 2, "history_dtype": "float16", "refresh": 2},
        {"refresh": "auto", "drift_tolerance": 1e-6, "model": "gcnii", "layers": 4},
    ],
    ids=["no lag", "lag", "auto"],
)
def test_a_killed_run_resumes_to_the_bit(store: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = train(configure(store, tmp_path / "whole", **settings))
    for at in (1, 4, 8):
        out = tmp_path / f"cut{at}"
        with pytest.raises(Killed):
            train(configure(store, out, **settings), watcher=KillAt(at))
        found = train(configure(store, out, **settings), resume=True)
        assert curve(out) == curve(tmp_path / "whole")
        assert found["metrics"] == whole["metrics"]
    lines = [json.loads(line) for line in curve(tmp_path / "whole").splitlines()]
    refreshed = [line["epoch"] for line in lines if line.get("refreshed")]
    assert refreshed == {None: [], 2: [1, 3], "auto": [0, 1, 2, 3]}[settings.get("refresh")]
    assert all(len(line["drift"]) == settings.get("layers", 2) - 1 for line in lines if "step" not in line)


def test_a_refresh_goes_on_where_it_was_killed(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a layer stand on disk, and the second one is under way."""
    monkeypatch.setattr("ooc.refresh.LayerSweep", partial(LayerSweep, room=1500))
    for module in (layerplan, sweepstages):
        monkeypatch.setattr(module, "CHUNK_ROWS", 16)
    monkeypatch.setattr(sweepshape, "_LEAST_PIECE_ROWS", 32)
    monkeypatch.setattr(sweepshape, "PIECE_BYTES", 1)
    settings: dict[str, Any] = {"layers": 3, "refresh": "auto", "drift_tolerance": 1e-6, "checkpoint_every": 1, "epochs": 2}
    train(configure(store, tmp_path / "whole", **settings))
    seen: list[tuple[int, int]] = []
    rows = Refresher.rows

    def killing(self: Refresher, layer: int, first: int, values: Any) -> None:
        rows(self, layer, first, values)
        seen.append((layer, self.at.notes))
        if layer == 1:
            self.history.overwrite(0, np.arange(60), np.full((60, 8), 99, np.float32))  # not committed
            raise Killed

    def noting(self: Refresher, layer: int, first: int, values: Any) -> None:
        rows(self, layer, first, values)
        seen.append((layer, self.at.notes))

    monkeypatch.setattr(Refresher, "rows", killing)
    with pytest.raises(Killed):
        train(configure(store, tmp_path / "cut", **settings))
    before = len(seen)
    monkeypatch.setattr(Refresher, "rows", noting)
    train(configure(store, tmp_path / "cut", **settings), resume=True)
    assert seen[0] == (0, 0)
    assert seen[before] == seen[before - 1] == (1, seen[before][1])  # not from the beginning
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert not (tmp_path / "cut/refresh").exists()


def test_what_a_run_tells_of_its_histories(store: Path, tmp_path: Path) -> None:
    kept = train(configure(store, tmp_path / "kept", layers=3, refresh="auto", drift_tolerance=100.0))["histories"]
    assert 0.3 < kept["share_pulled"] < 1
    assert kept["share_unwritten"] < 0.2
    assert kept["age_steps"] >= 1
    assert kept["bytes_written"] > 0
    records = 3 * 2 * 4096  # of two layers and the steps: a page each, with a head
    assert kept["bytes_logged"] >= 4 * records, "every epoch overwrites what the one before left"
    assert kept["bytes_logged"] % records == 0
    page = write_report(tmp_path / "kept").read_text()
    assert "rows from histories" in page
    assert "Drift of the histories" in page
    zero = train(configure(store, tmp_path / "zero", layers=3, history="zero", history_dtype="float16"))
    assert zero["histories"]["share_pulled"] == 0
    assert not (tmp_path / "zero/history").exists()
    assert curve(tmp_path / "zero") != curve(tmp_path / "kept")


def test_neither_memory_nor_engine_nor_timing_changes_a_loss(store: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"layers": 3, "history_lag": 1, "refresh": 3, "dropout": 0.3}
    ways: list[dict[str, Any]] = [{}, {"memory": tight(), "engine": "mmap"}, {"in_memory": True, "engine": "pread"}]
    found = []
    for number, way in enumerate(ways):
        train(configure(store, tmp_path / str(number), **settings, **way))
        found.append(curve(tmp_path / str(number)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": None}, "the store has no parts"),
        ({"fanout": [5, 5]}, "fanout means nothing in mode history"),
        ({"replace": True}, "replace means nothing in mode history"),
        ({"mode": "sampled", "history_dtype": "float16"}, "parts means nothing in mode sampled"),
        ({"history": "zero"}, "history_dtype means nothing where zeros"),
        ({"drift_tolerance": 0.1}, "give that too"),
        ({"model": "tests.ooc.test_halo:Whole"}, "histories act between layers, and Whole has its own forward"),
    ],
)
def test_settings_that_do_not_fit_are_refused(store: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        train(configure(store, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


class Whole(torch.nn.Module):
    """A PyG module with a forward of its own."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.lin(x)  # type: ignore[no-any-return]
