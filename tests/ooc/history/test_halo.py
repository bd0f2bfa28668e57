"""Training from histories: exact where they are fresh, the same to the bit after a crash, and zeros where asked for."""

import json
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.config.nodes import TrainConfig
from ooc.history import drift
from ooc.history.drift import Drift
from ooc.history.halo import Halo, HaloLoader
from ooc.history.history import History
from ooc.history.refresh import Refresher
from ooc.layerwise import edge_tiles
from ooc.layerwise import executor as layerwise_executor
from ooc.layerwise import pass_plan as layerplan
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.models.builders import full_blocks
from ooc.models.layers import evaluating, run_model
from ooc.report.page import write_report
from ooc.stores.errors import ConfigError, StoreError
from ooc.training.history_mode import HistoryMode
from ooc.training.loop import train, train_epoch
from ooc.training.open_run import open_run
from ooc.training.run import Run
from ooc.training.watchers import Watchers
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
    "tests.ooc.history.test_halo:Own": {"layers": 3},
}
HISTORY: dict[str, Any] = {
    "mode": "history", "parts": 6, "hidden": 8, "dropout": 0.0, "seed": 2, "threads": 1, "history_dtype": "float32",
    "parts_per_batch": 2, "epochs": 4, "checkpoint_every": 2, "plan": False,
}  # fmt: skip


class Own(torch.nn.Module):
    """A user's own list of layers."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, num_layers: int) -> None:
        super().__init__()
        from ooc.models.convs import BlockSAGEConv

        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.layers = torch.nn.ModuleList(BlockSAGEConv(a, b) for a, b in pairwise(widths))


def configure(store: Path, out: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(store=store, out=out, **{**HISTORY, **settings})


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    """A hub, isolated nodes, self-loops, duplicates; weights too."""
    edges = hub_graph(60).numpy()
    return make_store(num_nodes=60, src=edges[0], dst=edges[1], weight=True)


def exact(run: Run) -> torch.Tensor:
    """The model's rows of all nodes, in RAM."""
    graph, ds = run.dataset.graph, run.dataset
    target = np.repeat(np.arange(ds.num_nodes), np.diff(graph.indptr))
    edges = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
    x = np.empty((ds.num_nodes, ds.num_features), np.float32)
    ds.rows("x").read(np.arange(ds.num_nodes), x)
    weight = torch.from_numpy(np.array(graph.columns["weight"]))
    blocks = full_blocks(edges, ds.num_nodes, run.config.layers, weight)
    with evaluating(run.model):
        found: torch.Tensor = run_model(run.model, torch.from_numpy(x), blocks)
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("model", MODELS)
def test_with_fresh_histories_a_batch_is_exact(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Also after it has pushed: at learning rate 0 (here: no step at all) nothing changes."""
    config = configure(store, tmp_path / "run", model=model, refresh=1, **MODELS[model])
    with open_run(config, False, Watchers([])) as run:
        train_epoch(run)
        line = run.mode.end_epoch(False)
        assert line["refreshed"]
        assert len(line["drift"]) == run.config.layers - 1
        wanted = exact(run)
        run.state.epoch, run.state.step = 1, 0
        for _ in range(2):
            with evaluating(run.model), closing(run.mode.batches(run.state.epoch, 0, run.mode.steps_per_epoch)) as batches:
                for batch in batches:
                    rows = run.mode.forward(batch)
                    torch.testing.assert_close(rows, wanted[batch.n_id[: batch.batch_size]], rtol=1e-5, atol=1e-5)
            assert run.mode.halo is not None
            assert run.mode.halo.history is not None
            run.mode.halo.history.end_epoch()
            run.state.epoch += 1
        for edges in (2**12, 1):  # anew from the features; from the histories below
            monkeypatch.setattr(drift, "FIELD_EDGES", (edges, edges))
            found = Drift(run.model, run.dataset, run.mode.halo.history, run.mode.device, "fp32").measure(7, 2**30).drift
            assert len(found) == len(run.mode.halo.widths) > 0
            assert max(found) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"history_lag": 0, "dropout": 0.5},
        pytest.param({"history_lag": 2, "history_dtype": "float16", "refresh": 2}, marks=pytest.mark.slow),
        pytest.param({"refresh": "auto", "drift_tolerance": 1e-6, "model": "gcnii", "layers": 4}, marks=pytest.mark.slow),
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


REFRESHED: dict[str, Any] = {
    "layers": 3, "refresh": "auto", "drift_tolerance": 1e-6, "checkpoint_every": 1, "epochs": 2
}  # fmt: skip


def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of these graphs do not fit the memory."""
    for module in ("training.history_mode", "layerwise.scores"):
        monkeypatch.setattr(f"ooc.{module}.LayerwisePass", partial(LayerwisePass, room=1500))
    for changed in (layerplan, layerwise_executor):
        monkeypatch.setattr(changed, "CHUNK_ROWS", 16)
    monkeypatch.setattr(edge_tiles, "_LEAST_PIECE_ROWS", 32)
    monkeypatch.setattr(edge_tiles, "PIECE_BYTES", 1)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("evaluate", ["sampled", "layerwise"])
def test_a_refresh_goes_on_where_it_was_killed(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: str
) -> None:
    """The rows of a layer stand on disk, and the second one is under way."""
    on_disk(monkeypatch)
    settings = {**REFRESHED, "evaluate": evaluate}
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


@pytest.mark.cases(1)
@pytest.mark.parametrize("room", ["disk", "ram"])
@pytest.mark.parametrize("evaluate", ["sampled", "layerwise"])
def test_a_refresh_is_final_before_scores(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluate: str, room: str
) -> None:
    """Killed while it scores, a run does not refresh anew; scores by passes are of the refresh's own."""
    if room == "disk":
        on_disk(monkeypatch)
    settings, whole, validate = {**REFRESHED, "evaluate": evaluate}, LayerwisePass.run, HistoryMode.evaluate
    observed: list[bool] = []

    def counting(self: LayerwisePass, *arguments: Any, **options: Any) -> Any:
        observed.append(options["observer"] is not None)
        return whole(self, *arguments, **options)

    def killing(self: HistoryMode) -> Any:
        raise Killed

    monkeypatch.setattr(LayerwisePass, "run", counting)
    train(configure(store, tmp_path / "whole", **settings))
    assert observed[:2] == [True, True]
    assert len(observed) <= 3, "the last is of the best model, where that is not of the last epoch"
    monkeypatch.setattr(HistoryMode, "evaluate", killing)
    with pytest.raises(Killed):
        train(configure(store, tmp_path / "cut", **settings))
    monkeypatch.setattr(HistoryMode, "evaluate", validate)
    observed.clear()
    train(configure(store, tmp_path / "cut", **settings), resume=True)
    assert observed.count(True) == 1
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_histories_free_their_memory_for_a_pass(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hot rows are freed, pushes that wait for the lag are counted, and the memory of a pass is freed before an epoch."""
    whole, forward = LayerwisePass.run, Halo.forward
    in_passes, trained = [], []

    def running(self: LayerwisePass, *arguments: Any, **options: Any) -> Any:
        in_passes.append(histories[0]._hot)
        return whole(self, *arguments, **options)

    def training(self: Halo, *arguments: Any) -> Any:
        assert self.history is not None
        histories[:] = [self.history]
        trained.append(self.history._hot)
        return forward(self, *arguments)

    histories: list[History] = []
    monkeypatch.setattr(LayerwisePass, "run", running)
    monkeypatch.setattr(Halo, "forward", training)
    settings: dict[str, Any] = {"evaluate": "layerwise", "history_lag": 1, "epochs": 3}
    train(configure(store, tmp_path / "run", **settings))
    assert len(trained) == 9
    assert trained[:3] == [None] * 3
    assert None not in trained[3:], "read anew after the scores"
    assert in_passes == [None] * len(in_passes)
    assert len(in_passes) >= 3
    with (
        open_run(configure(store, tmp_path / "a", **settings), False, Watchers([])) as lagging,
        open_run(configure(store, tmp_path / "b", **{**settings, "history_lag": 0}), False, Watchers([])) as run,
    ):
        assert run.mode.exact is not None
        assert lagging.mode.exact is not None
        assert isinstance(lagging.mode.loader, HaloLoader)
        assert (run.mode.exact.beside, lagging.mode.exact.beside) == (0, lagging.mode.loader.kept_bytes)
        train_epoch(run)
        assert run.mode.score("val", 0) is not None
        files = run.mode.exact._pass.files
        assert files._rows
        run.state.epoch, run.state.step = 1, 0
        train_epoch(run)
        assert not files._rows


def test_an_error_says_what_to_do_without_histories(store: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(configure(store, tmp_path / "run"), watcher=KillAt(4))
    (tmp_path / "run/history").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="put the folder back, or start another run"):
        train(configure(store, tmp_path / "run"), resume=True)
    (tmp_path / "elsewhere").rename(tmp_path / "run/history")
    assert train(configure(store, tmp_path / "run"), resume=True)["epochs"] == 4


@pytest.mark.slow
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


@pytest.mark.slow
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
        ({"fanout": [5, 5]}, "fanout does not apply to mode history"),
        ({"replace": True}, "replace does not apply to mode history"),
        ({"mode": "sampled", "history_dtype": "float16"}, "parts does not apply to mode sampled"),
        ({"history": "zero"}, "history_dtype does not apply to history = zero"),
        ({"drift_tolerance": 0.1}, "set that too"),
        ({"model": "tests.ooc.history.test_halo:Whole"}, "histories act between layers, and Whole has its own forward"),
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
