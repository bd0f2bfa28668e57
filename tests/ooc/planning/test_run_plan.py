"""Plans: windows replayed are the windows trained on, and the laws of time, memory and bytes hold."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ooc.loading import choose_read_strategy as choose_strategy
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.packed import PackSession
from ooc.models.builders import build_model
from ooc.models.pre_aggregation import pre_aggregation_of
from ooc.planning.measure import batches_of, lengths_of
from ooc.planning.run_plan import RunFacts, advise, plan
from ooc.planning.run_profile import RunProfile, model_of
from ooc.planning.simulate_scans import ScanLoad, SimulatedScans, simulate_timeline
from ooc.planning.simulate_superbatches import (
    AggregationSpeed,
    ArrayLoad,
    BatchCosts,
    SimulatedSuperbatches,
    SuperbatchLoad,
    simulate,
)
from ooc.runtime.memory_plan import plan_memory
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.graph import Graph
from ooc.stores.io.read_plan import ReadCost
from ooc.training.checkpoint import read_plan
from ooc.training.loop import plan as plan_of
from ooc.training.loop import train
from tests.conftest import MakeStore, random_edges
from tests.ooc.runs import configure, curve
from tests.waiting import eventually, no_threads

N, E, F = 8000, 40000, 256


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    x = np.random.default_rng(0).standard_normal((N, F), dtype=np.float32)
    path = write_store(tmp_path_factory.mktemp("plans") / "test.ooc", Graph.from_edges(*random_edges(N, E), N), x=x)
    with Dataset.open(path) as opened:
        yield opened


def replayed(loader: NeighborLoader, pool_bytes: int, steps: int | None = None) -> Any:
    strategy = loader.strategy.apart()
    drawn = list(batches_of(strategy, 0, steps or len(loader)))
    model = model_of(strategy, pool_bytes)
    assert model is not None
    return model.simulate(drawn, lengths_of(strategy))


@pytest.mark.cases(1)
@pytest.mark.parametrize("room", [1.6, 3.0, 100.0])
def test_what_is_replayed_is_what_is_read(ds: Dataset, room: float) -> None:
    """In as many windows, to the row, whether one batch fits or all of them."""
    probe = NeighborLoader(ds, [3, 3], batch_size=64, shuffle=True, seed=1)
    largest = max(probe.strategy.memory.nbytes(drawn) for drawn in batches_of(probe.strategy, 0, len(probe)))
    budget = dataclasses.replace(plan_memory(ds), max_batch=int(largest * room), in_flight=2 * int(largest * room))
    with Dataset.open(ds.path) as fresh:
        loader = NeighborLoader(fresh, [3, 3], batch_size=64, shuffle=True, seed=1, budget=budget)
        found = replayed(loader, budget.batches)
        asked = sum(batch.num_nodes for batch in loader)
        assert sum(load.rows_read for load in found.loads) == loader.rows_read
        assert sum(int(load.asked.sum()) for load in found.loads) == asked == loader.rows_asked
        assert len(found.loads) == loader.times()["read"]["items"]
        assert sum(load.nbytes for load in found.loads) == pytest.approx(loader.bytes_read, rel=0.05)
    if room == 1.6:
        assert len(found.loads) > 5


def test_sweeps_are_replayed_to_the_row_too(ds: Dataset) -> None:
    """Where a model's first layer sums, and the rows do not fit."""
    pre_aggregation = pre_aggregation_of(build_model("sage", F, 16, 3, 2))
    options: dict[str, Any] = {
        "batch_size": 64,
        "shuffle": True,
        "seed": 1,
        "pre_aggregation": pre_aggregation,
        "edge_ids": False,
    }
    budget = dataclasses.replace(plan_memory(ds), max_batch=2 * 10**6, in_flight=4 * 10**6)
    with Dataset.open(ds.path) as fresh:
        loader = NeighborLoader(fresh, [3, 3], budget=budget, **options)
        pool = loader.strategy.pool(budget)
        found = replayed(loader, pool)
        assert isinstance(found, SimulatedScans)
        assert len(found.scans) > 2
        some = replayed(loader, pool, int(2.5 * found.scans[0].batches))
        assert loader.rows_read == loader.rows_asked == 0, "what is replayed is not read"
        steps = sum(1 for _ in loader)
        assert sum(scan.batches for scan in found.scans) == steps
        assert sum(scan.rows_read for scan in found.scans) == loader.rows_read
        assert sum(scan.asked for scan in found.scans) == loader.rows_asked
        assert sum(scan.nbytes for scan in found.scans) == pytest.approx(loader.bytes_read, rel=0.05)
    whole = found.epoch(sweep_costs(), steps)
    assert whole.rows_read == loader.rows_read
    assert some.epoch(sweep_costs(), steps).rows_read == pytest.approx(loader.rows_read, rel=0.05)
    assert found.epoch(sweep_costs(), 2 * steps).nbytes == pytest.approx(2 * loader.bytes_read, rel=0.1)


@settings(max_examples=20, deadline=None)
@example(pool=9_280_064, more=27_071_936)
@given(pool=st.integers(2 * 10**6, 40 * 10**6), more=st.integers(0, 40 * 10**6))
def test_more_memory_reads_no_more_than_each_row_once_a_window(ds: Dataset, pool: int, more: int) -> None:
    loader = NeighborLoader(ds, [3, 3], input_nodes=np.arange(0, N, 4), batch_size=64, shuffle=True, seed=1)
    small, large = replayed(loader, pool), replayed(loader, pool + more)
    assert len(large.loads) <= len(small.loads)
    least = sum(load.rows_read for load in small.loads)
    assert sum(load.rows_read for load in large.loads) <= max(1.02 * least, N), "a file that fits may be read whole, once"
    for found in (small, large):
        rows = sum(load.rows_read for load in found.loads)
        assert len(found.residents[0].node) <= rows <= sum(int(load.asked.sum()) for load in found.loads)


def load(batches: int, rows_read: int, freed: list[int], limit: int, idle: int = 0) -> SuperbatchLoad:
    asked = np.full(batches, max(1, rows_read // batches))
    return SuperbatchLoad(
        asked, 1000, (ArrayLoad(False, 512, rows_read, rows_read, rows_read * 512, limit, 0, idle, np.array(freed)),)
    )


def costs(step_s: float = 0.1, read_s: float = 1e-6, **other: float) -> BatchCosts:
    base: dict[str, Any] = {"sample_s": 0.01, "group_s": 0.0, "collate_s": 0.01, "cpu_s": 0.0, "read_cpu": 0.0, "cores": 2}
    return BatchCosts(step_s=step_s, together_s=step_s, read=ReadCost(read_s, 1e-18), **{**base, **other})


def windows_of(count: int, batches: int, rows: int) -> list[SuperbatchLoad]:
    """`count` windows of the same size that share nothing; each fills the memory by half."""
    last = [[0] * batches] * (count == 1) or [[rows // batches] * batches] * (count - 1) + [[0] * batches]
    return [load(batches, rows, freed, limit=2 * rows) for freed in last]


def test_a_slow_model_hides_the_disk_and_a_slow_disk_the_model() -> None:
    loads = windows_of(6, 10, 100_000)
    model = simulate(loads, costs(step_s=1.0, read_s=1e-6), (0,)).done[-1]
    assert model == pytest.approx(60, rel=0.02), "the model is never waited for"
    disk = simulate(loads, costs(step_s=0.001, read_s=1e-4), (0,)).done[-1]
    assert disk == pytest.approx(60, rel=0.02), "the disk never waits"
    both = simulate(loads, costs(step_s=1.0, read_s=1e-4), (0,)).done[-1]
    assert 69 < both < 75, "they overlap, but for the first window"


def test_without_room_reading_waits_for_the_model() -> None:
    """Memory for one window: its rows make room at the model's pace, and the last of the next can only be read at the end."""
    freed = [0] * 9 + [100_000]
    tight = [load(10, 100_000, freed, limit=100_000), load(10, 100_000, [0] * 10, limit=100_000)]
    found = simulate(tight, costs(step_s=1.0, read_s=1e-5), (0,))
    assert found.done[9] == pytest.approx(1 + 10, abs=0.3)
    assert found.done[10] == pytest.approx(1 + 9 + 1 + 1, abs=0.3), "reads once the tenth batch is gathered"
    assert found.peak_rows == (100_000,)


costs_drawn = st.builds(
    costs,
    step_s=st.floats(1e-4, 1),
    read_s=st.floats(0, 1e-4),
    sample_s=st.floats(0, 0.5),
    group_s=st.floats(0, 0.5),
    collate_s=st.floats(0, 0.5),
    cpu_s=st.floats(0, 2),
)


@given(found=costs_drawn, count=st.integers(1, 6), batches=st.integers(1, 8), rows=st.integers(8, 200_000))
def test_no_stage_is_faster_than_its_work_and_all_are_no_slower_than_one_after_the_other(
    found: BatchCosts, count: int, batches: int, rows: int
) -> None:
    loads = windows_of(count, batches, rows // batches * batches)
    line = simulate(loads, found, (0,))
    n = count * batches
    reading = sum(found.read_s(each) for each in loads)
    computing = sum(found.batch_s(each) * each.batches for each in loads)
    assert (np.diff(line.done) >= 0).all()
    least = max(reading, computing, n * found.collate_s, n * max(found.sample_s, found.group_s))
    most = reading + computing + n * (found.collate_s + max(found.sample_s, found.group_s))
    assert least * (1 - 1e-9) <= line.done[-1] <= most * (1 + 1e-9) + 1e-9


def test_an_epoch_goes_on_like_its_windows() -> None:
    loads = windows_of(8, 10, 100_000)
    found = SimulatedSuperbatches((*loads, load(3, 30_000, [0] * 3, 200_000)), (0,), (CachedNodes.none(),))
    disk = costs(step_s=0.001, read_s=1e-4)
    epoch = found.epoch(disk, steps=1000)
    assert epoch.steps == pytest.approx(1000)
    assert epoch.rows_read == pytest.approx(1000 * 10_000)
    assert epoch.seconds == pytest.approx(1000, rel=0.02)
    exact = SimulatedSuperbatches(tuple(loads), (0,), (CachedNodes.none(),)).epoch(disk, steps=80)
    assert exact.seconds == pytest.approx(simulate(loads, disk, (0,)).done[-1])


def sweep_costs(batch_s: float = 0.1, byte_s: float = 1e-9, beside: float = 1.0) -> BatchCosts:
    """`beside`: how much slower both are side by side."""
    alone = byte_s / 1e-9
    pace = AggregationSpeed(alone, alone * beside, batch_s * beside, reading=1.0, pre_aggregation=0.5)
    return dataclasses.replace(costs(batch_s), sample_s=0.001, pace=pace)


def scan(batches: float, nbytes: float = 1e9) -> ScanLoad:
    return ScanLoad(
        batches=batches,
        asked=100 * batches,
        rows_read=50 * batches,
        nbytes=nbytes,
        read_s=nbytes * 1e-9,
        sums=1000 * batches,
        pair=1500 * batches,
        rests=10 * batches,
        entries=20 * batches,
        table=25 * batches,
    )


def test_sweeps_are_made_beside_the_one_that_serves() -> None:
    scans = [scan(10)] * 6
    model = simulate_timeline(scans, sweep_costs(batch_s=1.0, byte_s=1e-9)).done
    assert model[-1] == pytest.approx(0.01 + 1 + 60), "the first is waited for, the others are there in time"
    disk = simulate_timeline(scans, sweep_costs(batch_s=0.01, byte_s=1e-8)).done
    assert disk[-1] == pytest.approx(0.01 + 60 + 0.1), "made one after the other, and the last serves alone"
    slow = simulate_timeline(scans, sweep_costs(batch_s=1.0, byte_s=1e-9, beside=2.0)).done
    assert slow[-1] == pytest.approx(0.01 + 1 + 60 + 5, abs=0.01), "each second of making costs a batch half a second"


@given(
    batches=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    batch_s=st.floats(1e-3, 1),
    byte_s=st.floats(1e-11, 1e-8),
    beside=st.floats(1, 3),
)
def test_sweeps_take_no_less_than_either_and_no_more_than_one_after_the_other(
    batches: list[int], batch_s: float, byte_s: float, beside: float
) -> None:
    found = sweep_costs(batch_s, byte_s, beside)
    scans = [scan(count, 1e7 * count) for count in batches]
    line = simulate_timeline(scans, found)
    serving, making, drawing = sum(batches) * batch_s, sum(each.nbytes for each in scans) * byte_s, sum(batches) * 0.001
    assert len(line.done) == len(scans)
    assert (np.diff(line.done) >= 0).all()
    assert max(serving, making) * (1 - 1e-9) <= line.done[-1] <= (beside * (serving + making) + drawing) * (1 + 1e-9)
    assert making * (1 - 1e-9) <= sum(line.making) <= beside * making * (1 + 1e-9)


def test_half_the_batches_read_more_than_half_the_bytes(ds: Dataset) -> None:
    """And twice as many less than twice: the pages of a file are wanted more than once."""
    rows = ds.stored("x")
    whole = rows.shape[0] * rows.row_bytes
    batch_bytes = [scan(10, nbytes=whole / 2).part(batches, rows).nbytes for batches in (1, 5, 10, 20, 100)]
    assert batch_bytes[2] == pytest.approx(whole / 2)
    assert batch_bytes[1] == pytest.approx(whole * (1 - 0.5**0.5))
    assert batch_bytes[3] == pytest.approx(whole * 0.75)
    assert batch_bytes == sorted(batch_bytes)
    assert batch_bytes[-1] <= whole


def test_what_sweeps_hold_grows_to_three_of_them(ds: Dataset) -> None:
    """Two with sums, of which one fills what the other gives back, and one whose entries are put in order."""
    rows = ds.stored("x")
    peaks = [SimulatedScans((scan(10),) * count, 10, rows).peak_bytes(sweep_costs(), 10 * count, 0) for count in (1, 2, 3, 9)]
    assert peaks == sorted(peaks)
    assert peaks[2] == peaks[3] == 15_000 + 3 * 100 + 250 + 2 * 200
    assert SimulatedScans((scan(10),), 10, rows).peak_bytes(sweep_costs(), 1000, 0) == peaks[3], (
        "also where the sample ended in the first"
    )


def profile_of(loads: list[SuperbatchLoad], found: BatchCosts, **others: SimulatedSuperbatches) -> RunProfile:
    return RunProfile(
        steps=sum(each.batches for each in loads),
        costs=found,
        simulated=(SimulatedSuperbatches(tuple(loads), (0,), (CachedNodes.none(),)),),
        others=others,
        asked=1000.0,
        evaluations={},
        sampled_nbytes=0.0,
        unmapped=0,
        resident=10**9,
        seconds=1.0,
    )


def test_a_plan_names_the_bottleneck_and_what_would_help(ds: Dataset) -> None:
    loads, run = windows_of(4, 10, 100_000), RunFacts(40, 40, 512, {})
    half = SimulatedSuperbatches(tuple(windows_of(4, 10, 50_000)), (0,), (CachedNodes.none(),))
    made = plan(profile_of(loads, costs(0.01, 1e-4), **{"9 GB of memory": half}), plan_memory(ds), run)
    assert made.prediction.bottleneck == "read"
    assert "Reading takes" in made.advice
    assert "9 GB of memory" in made.advice
    assert made.others["9 GB of memory"] == pytest.approx(made.prediction.seconds_per_epoch / 2, rel=0.1)
    assert made.prediction.read_amplification == pytest.approx(1)
    slow = plan(profile_of(loads, costs(5.0, 1e-6), **{"9 GB of memory": half}), plan_memory(ds), run)
    assert slow.prediction.bottleneck == "consumer"
    assert "memory" not in slow.advice
    assert json.loads(json.dumps(slow.asdict()))["prediction"]["bottleneck"] == "consumer"


def test_advice_is_only_what_pays() -> None:
    assert "with 4 GB of memory" in advise({"read": 9.0, "consumer": 1.0}, 10.0, 10.0, {"4 GB of memory": 6.0})
    assert "4 GB" not in advise({"read": 9.0, "consumer": 1.0}, 10.0, 10.0, {"4 GB of memory": 9.5})


def test_training_is_the_same_with_and_without_a_plan(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    planned = train(configure(store, tmp_path / "a", dropout=0.5, norm="batch", plan=True))
    plain = train(configure(store, tmp_path / "b", dropout=0.5, norm="batch", plan=False))
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    assert planned["metrics"] == plain["metrics"]
    assert (planned["rows_read"], planned["rows_asked"]) == (plain["rows_read"], plain["rows_asked"])
    assert plain["plan"]["predicted"] is None
    assert read_plan(tmp_path / "b") is None
    assert planned["plan"]["predicted"]["rows_asked"] > 0


@pytest.mark.parametrize("limit", [{"max_steps": 3}, {"epochs": 1}, {"epochs": 3}])
def test_a_runs_rows_are_predicted_to_the_row(make_store: MakeStore, tmp_path: Path, limit: dict[str, int]) -> None:
    summary = train(configure(make_store(), tmp_path / "run", eval_splits=["test"], plan=True, **limit))
    predicted, actual = summary["plan"]["predicted"], summary["plan"]["actual"]
    assert predicted["rows_read"] == pytest.approx(actual["rows_read"], rel=0.1)
    if limit != {"epochs": 3}:  # in later epochs some rows are there from the validation in between
        assert predicted["rows_read"] == actual["rows_read"]
        assert predicted["rows_asked"] == actual["rows_asked"]
        assert predicted["bytes_read"] == actual["bytes_read"]
        assert predicted["hit_rate"] == actual["hit_rate"]
    assert set(predicted["stages"]) == set(actual["stages"]) == {"sample", "group", "read", "collate", "consumer"}
    assert summary["plan"]["advice"].endswith(".")


@pytest.mark.cases(1)
@pytest.mark.parametrize("sampler", [{}, {"sampler": "labor", "batch_dependency": 8}])
def test_the_bytes_of_edges_on_disk_are_those_of_the_batches_drawn(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: dict[str, Any]
) -> None:
    """They are drawn four and more at a time; a sample may end between them."""
    monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
    store, given = make_store(num_edges=4000), {"epochs": 1, "eval_splits": [], "plan": True, "batch_size": 8, **sampler}
    whole = train(configure(store, tmp_path / "whole", **given))["plan"]
    assert whole["predicted"]["bytes_read"] == whole["actual"]["bytes_read"]
    assert whole["predicted"]["edge_bytes_read"] == whole["actual"]["edge_bytes_read"] > 0
    monkeypatch.setattr("ooc.runtime.memory_plan._TRIAL_BYTES", 1)
    part = train(configure(store, tmp_path / "part", **given))["plan"]
    assert part["predicted"]["edge_bytes_read"] < 4 * part["actual"]["edge_bytes_read"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "sampler",
    [
        {},
        {"sampler": "labor", "layer_dependency": True, "batch_dependency": 64},
        {"sampler": "ladies", "fanout": [30, 40], "eval_fanout": [4, 4]},
    ],
)
def test_a_plan_of_sweeps_makes_some_and_leaves_nothing_behind(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: dict[str, Any]
) -> None:
    monkeypatch.setattr(choose_strategy, "scan_pays", lambda rows, pool: True)
    config = configure(make_store(), tmp_path / "run", model="sage", max_steps=3, eval_splits=["test"], plan=True, **sampler)
    summary = train(config)
    predicted, actual = summary["plan"]["predicted"], summary["plan"]["actual"]
    for name in ("rows_read", "rows_asked", "bytes_read", "hit_rate"):
        assert predicted[name] == actual[name]
    assert set(predicted["stages"]) == set(actual["stages"]) == {"sample", "group", "read", "sum", "collate", "consumer"}
    assert predicted["evaluate_seconds"] > 0
    assert eventually(no_threads)
    plain = config.model_copy(update={"out": tmp_path / "plain", "plan": False})
    train(plain)
    assert curve(config.out) == curve(plain.out)


@pytest.mark.slow
def test_a_plan_of_packed_batches_writes_nothing(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_strategy, "scan_pays", lambda rows, pool: True)
    store = make_store()
    config = configure(store, tmp_path / "run", model="sage", max_steps=3, eval_splits=["test"], plan=True, pack="10MB")
    summary = train(config)
    predicted, actual = summary["plan"]["predicted"], summary["plan"]["actual"]
    for name in ("rows_read", "rows_asked", "bytes_read", "packed_bytes_written", "hit_rate"):
        assert predicted[name] == actual[name]
    assert set(predicted["stages"]) == set(actual["stages"]) == {"sample", "group", "read", "pack", "collate", "consumer"}
    assert predicted["seconds_per_epoch"] > 0
    assert 0 < summary["packed_bytes_written"] < summary["bytes_read"]
    assert eventually(no_threads)
    scans = config.model_copy(update={"out": tmp_path / "scans", "plan": False, "pack": None})
    train(scans)
    assert curve(config.out) == curve(scans.out)
    monkeypatch.setattr(PackSession, "__init__", None)  # nor is a file opened
    assert plan_of(config.model_copy(update={"out": tmp_path / "planned"})).prediction.bytes_read == predicted["bytes_read"]


_TRAINING = """
import json, sys
from pathlib import Path
from ooc.stores.process import resident_bytes
from ooc.training.loop import train
from tests.ooc.runs import configure

store, out = map(Path, sys.argv[1:])
before = resident_bytes()[0]
settings = {"model": "gat", "batch_size": 4096, "fanout": [3, 2], "max_steps": 8, "eval_splits": ["val"], "plan": True}
plan = train(configure(store, out, **settings))["plan"]
print(json.dumps([plan[each]["peak_rss_bytes"] - before for each in ("predicted", "actual")]))
"""


@pytest.mark.alone
def test_the_peak_is_predicted_beyond_what_stood_before(make_store: MakeStore, tmp_path: Path) -> None:
    """Rows of 60 MB pass through the memory, all of them kept; a process of its own, as freed memory is used again."""
    nodes = 60_000
    x = np.random.default_rng(1).standard_normal((nodes, 256), np.float32)
    store = make_store(num_nodes=nodes, num_edges=3 * nodes, x=x, splits={"train": np.arange(nodes)})
    command = [sys.executable, "-c", _TRAINING, str(store), str(tmp_path / "run")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    predicted, actual = json.loads(done.stdout.splitlines()[-1])
    assert actual > 60e6
    assert predicted == pytest.approx(actual, rel=0.3)


def test_rows_in_memory_are_planned_too(make_store: MakeStore, tmp_path: Path) -> None:
    summary = train(configure(make_store(), tmp_path / "run", in_memory=True, plan=True))
    predicted, actual = summary["plan"]["predicted"], summary["plan"]["actual"]
    for name in ("hit_rate", "read_amplification", "read_bytes_per_second"):
        assert predicted[name] is None
        assert actual[name] is None
    assert predicted["bytes_read"] == actual["bytes_read"] == 0


def test_a_resumed_run_keeps_its_plan(make_store: MakeStore, tmp_path: Path) -> None:
    config = configure(make_store(), tmp_path / "run", max_steps=3, plan=True)
    train(config)
    before = (tmp_path / "run" / "plan.json").read_bytes()
    summary = train(config.model_copy(update={"max_steps": 6}), resume=True)
    assert (tmp_path / "run" / "plan.json").read_bytes() == before
    assert summary["plan"]["predicted"] == json.loads(before)["prediction"]
    (tmp_path / "run" / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan\.json: not valid JSON"):
        read_plan(tmp_path / "run")


def test_a_plan_writes_nothing_and_refuses_too_little_memory(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    made = plan_of(configure(store, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert made.prediction.evaluate_seconds > 0
    with pytest.raises(BudgetError, match="give at least"):
        plan_of(configure(store, tmp_path / "run", memory="100MB"))
