"""A run drawn again: its batches, windows and rows are those that were read; the matrix and what it concludes."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.runtime.memory_plan import RUNTIME_BYTES, divide
from tools.bench.lib.disk_rates import Disk, Rates
from tools.bench.lib.stores import make_store
from tools.bench.sampled import cache_policies as policies
from tools.bench.sampled import peers as compare
from tools.bench.sampled import soak, steps
from tools.bench.sampled.cost import beside_bound, short_of
from tools.bench.sampled.trace import Trace
from tools.graphs.make_graph import make_graph

NODES, WIDTH, BATCHES, SEEDS = 20_000, 128, 60, 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "graph.ooc"
    make_store(path, nodes=NODES, edges=10 * NODES, width=WIDTH, kind="uniform", seed=2)
    return path


@pytest.fixture(scope="module")
def run(store: Path) -> dict[str, Any]:
    """What `tools.bench.sampled.steps` prints, of a run with little memory for windows."""
    budget = divide(6_000_000 + RUNTIME_BYTES, baseline=0)
    with ooc.open(store) as ds:
        seeds = steps.seeds_of_run(NODES, SEEDS, BATCHES, 0)
        loader = steps.loader_of(ds, seeds, [5, 4], SEEDS, budget)
        nodes = [batch.n_id.numpy() for batch in loader]
        windows = loader.times()["read"]["items"]
    return {
        "nodes": nodes,
        "budget": asdict(budget),
        "fanout": [5, 4],
        "batches": BATCHES,
        "batch_size": SEEDS,
        "seed": 0,
        "windows": windows,
        "rows_read": loader.rows_read,
        "bytes_read": loader.bytes_read,
        "seconds_per_batch": 0.5,
    }


@pytest.mark.slow
def test_batches_are_drawn_again(store: Path, run: dict[str, Any]) -> None:
    with Trace.of(store, run) as trace:
        again = list(trace.nodes())
    assert len(again) == BATCHES
    for ids, nodes in zip(again, run["nodes"], strict=True):
        np.testing.assert_array_equal(ids, nodes)


@pytest.mark.slow
def test_the_windows_are_the_runs(store: Path, run: dict[str, Any]) -> None:
    with Trace.of(store, run) as trace:
        planned = trace.planned()
        row_bytes = trace.row_bytes
    assert row_bytes == 4 * WIDTH
    assert planned["windows"] == run["windows"] > 3
    assert planned["rows"] == run["rows_read"]
    assert len({v for nodes in run["nodes"] for v in nodes.tolist()}) <= planned["rows"] < sum(map(len, run["nodes"]))
    assert 0 <= planned["scans"] <= planned["windows"]
    assert planned["rows"] * row_bytes <= planned["page_bytes"] <= run["bytes_read"]
    assert planned["page_bytes"] <= planned["span_bytes"] <= planned["windows"] * NODES * row_bytes


def test_scans_are_told(store: Path, run: dict[str, Any]) -> None:
    """Batches of few seeds want few rows of 10 MB; all nodes at once want every page."""
    few, every = {**run, "fanout": [1], "batch_size": 4}, {**run, "fanout": [1], "batch_size": NODES, "batches": 1}
    for settings_of_run, scans in ((few, 0), (every, 1)):
        budget = {"budget": asdict(divide(2**31, baseline=0))}
        with Trace.of(store, settings_of_run | budget) as trace:
            planned = trace.planned()
        assert (planned["windows"], planned["scans"]) == (1, scans)


def test_the_sweeps_are_the_runs(store: Path, run: dict[str, Any]) -> None:
    with ooc.open(store) as ds:
        seeds = steps.seeds_of_run(NODES, SEEDS, BATCHES, 0)
        loader = steps.loader_of(ds, seeds, [5, 4], SEEDS, divide(6_000_000 + RUNTIME_BYTES, baseline=0), sums=16)
        for batch in loader:
            assert batch.x.neighbor.shape == (len(batch.n_id), WIDTH)
    assert steps.windows_of(loader) > 1
    with Trace.of(store, {**run, "sums": 16}) as trace:
        planned = trace.planned()
    assert planned["windows"] == steps.windows_of(loader)
    assert planned["rows"] == loader.rows_read
    assert planned["page_bytes"] <= loader.bytes_read


def test_beside_the_bound(store: Path, run: dict[str, Any]) -> None:
    disk = Disk(sequential_bytes_per_s=1e6, random_pages_per_s=1e9)
    found = beside_bound(store, run, disk)
    bound = found["bound"]
    assert bound["batches"] == BATCHES
    assert bound["windows_scanned"] == 0
    assert bound["seconds_per_batch"] == pytest.approx(bound["page_bytes"] / 4096 / 1e9 / BATCHES)
    assert found["seconds_of_bound"] == pytest.approx(0.5 / bound["seconds_per_batch"])
    assert found["belady_miss_ratio"] <= found["miss_ratio"] <= 1
    assert found["miss_ratio"] == run["rows_read"] / sum(map(len, run["nodes"]))
    assert found["bytes_read_of_planned_pages"] >= 1


def test_the_bound_of_another_run_is_refused(store: Path, run: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="not the run's"):
        beside_bound(store, {**run, "seed": 1}, Disk(1e9, 1e5))


def test_a_store_is_what_ingest_makes_of_the_same_files(store: Path, tmp_path: Path) -> None:
    make_graph(tmp_path, nodes=NODES, edges=10 * NODES, features=WIDTH, kind="uniform", seed=2)
    with ooc.open(store) as ds:
        found = np.empty((NODES, WIDTH), np.float32)
        ds.rows("x").read(np.arange(NODES), found)
        np.testing.assert_array_equal(found, np.load(tmp_path / "x.npy"))
        np.testing.assert_array_equal(ds.labels, np.load(tmp_path / "y.npy"))
        np.testing.assert_array_equal(ds.split("val"), np.load(tmp_path / "val.npy"))
        assert ds.num_edges == 10 * NODES
    assert [path.name for path in store.parent.iterdir()] == [store.name]


def test_short_runs_are_told() -> None:
    assert short_of({"windows": 20, "batches": 300}) == []
    assert short_of({"windows": 19, "batches": 300}) == ["19 windows of 20"]


def test_rates_without_fio(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    rates = Rates(store, seconds=1e-6)
    rates.measure()
    rates.complete()
    assert len(rates.taken) == 5
    assert rates.asdict()["by"] == "ooc's engine"
    assert rates.median().random_pages_per_s == sorted(each.random_pages_per_s for each in rates.taken)[2]
    assert rates.median().sequential_bytes_per_s == sorted(each.sequential_bytes_per_s for each in rates.taken)[2]
    assert min(each.sequential_bytes_per_s for each in rates.taken) > 0


def test_ratios_of_the_matrix() -> None:
    runs = {
        "ooc-ram": [{"seconds_per_batch": s} for s in (0.1, 0.3, 0.2)],
        "ooc-disk": [{"seconds_per_batch": 0.4}],
        "pyg-ram": [{"seconds_per_batch": 0.8}],
        "pyg-memmap": [{"seconds_per_batch": 4.0}],
        "graphbolt-memmap": [{"failed": -9, "error": []}],
    }
    seconds = compare.medians(runs)
    assert seconds == {"ooc-ram": 0.2, "ooc-disk": 0.4, "pyg-ram": 0.8, "pyg-memmap": 4.0}
    found = compare.ratios(seconds, 0.25)
    assert found["ooc-disk / larger of ooc-ram and bound"] == pytest.approx(1.6)
    assert found["pyg-ram / ooc-disk"] == pytest.approx(2)
    assert found["best memmap / ooc-disk"] == pytest.approx(10)
    del seconds["ooc-ram"]
    assert compare.ratios(seconds, 0.25)["ooc-disk / larger of bound"] == pytest.approx(1.6)
    assert "ooc-disk / bound" not in compare.ratios(seconds, None)


def test_losses_are_compared_to_the_bit() -> None:
    one, other = {"losses": [1.0, 2.0]}, {"losses": [1.0, np.nextafter(2.0, 3.0)]}
    assert compare.same_losses({"ooc-ram": [one, one], "ooc-disk": [one]}) == {"first": True, "all": True}
    assert compare.same_losses({"ooc-ram": [one], "ooc-disk": [other]}) == {"first": True, "all": False}
    assert compare.same_losses({"ooc-ram": [one, one], "ooc-disk": [{"failed": 1}]}) is None


def test_peers_get_the_same_limit_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"compare {tmp_path} --peers {tmp_path} --graphbolt-python python --limit 2GB --fanout 15,10,5"
    monkeypatch.setattr(sys, "argv", words.split())
    a = compare.parse()
    found = compare.commands(a, tmp_path / "graph.ooc")
    assert list(found) == ["ooc-ram", "ooc-disk", "graphbolt-ram", "graphbolt-memmap"]
    for arm in ("ooc-disk", "graphbolt-memmap"):
        assert found[arm][found[arm].index("--limit") + 1] == "2000000000"
        assert found[arm][found[arm].index("--fanout") + 1] == "15,10,5"
    assert "memmap-random" in found["graphbolt-memmap"]
    assert "--limit" not in found["graphbolt-ram"]


@pytest.mark.slow
def test_policies_from_the_command_line(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"policies {store} --fanout 4,3 --batches 20 --batch-size 50 --unit pages --shares 0.1 1 --plot {tmp_path}/p.png"
    monkeypatch.setattr(sys, "argv", words.split())
    policies.main()
    found = json.loads(capsys.readouterr().out)
    assert found["of"] == NODES * WIDTH * 4 // 4096
    small, whole = found["miss_ratios"]
    assert whole["LRU"] == whole["SIEVE"] == whole["Belady"] == whole["look-ahead"] < small["Belady"] < small["LRU"]
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_growth_is_the_slope_of_the_later_samples() -> None:
    at = list(range(10, 1010, 10))
    noise = np.random.default_rng(0).normal(0, 100, 100)
    steady = [10**6 - 10**5 * (k < 10) + int(e) for k, e in enumerate(noise)]
    assert abs(soak.growth(at, steady)["growth_bytes"]) < 300
    leaking = [size + 50 * done for size, done in zip(steady, at, strict=True)]
    assert soak.growth(at, leaking)["bytes_per_batch"] == pytest.approx(50, rel=0.02)


@pytest.mark.slow
def test_a_soak_leaves_nothing(store: Path) -> None:
    a = argparse.Namespace(store=store, memory="4GB", fanout="3,3", hidden=8, batch_size=50, batches=60, every=5, rows=False)
    found = soak.soak(a)
    assert found["batches"] == 60
    assert len(found["at"]) == len(found["rss_bytes"]) == 12
    assert found["windows"] >= 1
    assert found["bytes_read"] > 0
    assert (found["left"]["threads"], found["left"]["files"]) == ([], [])
    assert found["left"]["tasks"] <= 0  # a thread of an earlier test may have ended meanwhile
