"""Plans of batches of parts, of random subgraphs and of histories: what they say is read and written is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.cli.main import main
from ooc.config.nodes import TrainConfig
from ooc.graph.blocks import Subgraph
from ooc.history.rows import most_asked
from ooc.loading.collate import SampledBatch
from ooc.planning.simulate_history import HistoryShape, simulate_exchange
from ooc.stores.io.pages import PAGE_BYTES
from ooc.stores.io.read_plan import ReadCost, plan_reads
from ooc.training.loop import plan as plan_of
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import configure, curve

N = 3000
MODES: dict[str, dict[str, Any]] = {
    "cluster": {"mode": "cluster", "parts_per_batch": 2},
    "saint": {"mode": "saint", "roots": 100, "saint_coverage": 4.0},
    "history": {"mode": "history", "parts_per_batch": 1},
    "lag": {"mode": "history", "parts_per_batch": 1, "history_lag": 2, "history_dtype": "float32"},
    "refresh": {"mode": "history", "parts_per_batch": 1, "refresh": 1},
}


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    """Neighbors are near, mostly."""
    rng = np.random.default_rng(1)
    dst = rng.integers(0, N, 10 * N)
    src = np.where(rng.random(10 * N) < 0.8, (dst + rng.integers(-100, 100, 10 * N)) % N, rng.integers(0, N, 10 * N))
    x = rng.standard_normal((N, 64), dtype=np.float32)
    return make_store(num_nodes=N, src=src, dst=dst, parts=np.arange(13) * N // 12, x=x)


def a_run(store: Path, out: Path, mode: dict[str, Any], **more: Any) -> Any:
    shape = {"fanout": [], "layers": 3, "hidden": 16, "evaluate": "layerwise", "plan": True}
    return configure(store, out, **{**shape, **mode, **more})


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("mode", "where"), [(mode, "mapped") for mode in MODES] + [(mode, "edges on disk") for mode in ("cluster", "saint", "lag")]
)
def test_what_a_mode_reads_is_predicted(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, where: str
) -> None:
    if where == "edges on disk":
        monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 2**62)
    summary = train(a_run(store, tmp_path / "run", MODES[mode]))
    predicted, actual = summary["plan"]["predicted"], summary["plan"]["actual"]
    neighbor = 0.0 if mode != "saint" else 0.05  # whose later epochs are other subgraphs
    for name in ("bytes_read", "edge_bytes_read", "rows_read", "rows_asked", "read_amplification"):
        assert predicted[name] == pytest.approx(actual[name], rel=neighbor), name
    assert (predicted["edge_bytes_read"] > 0) == (where == "edges on disk")
    assert predicted["history_bytes_read"] == pytest.approx(actual["history_bytes_read"], rel=0.05)
    assert predicted["history_bytes_written"] == pytest.approx(actual["history_bytes_written"], rel=0.02)
    assert (actual["history_bytes_read"] > 0) == (MODES[mode]["mode"] == "history")
    assert predicted["peak_rss_bytes"] == pytest.approx(actual["peak_rss_bytes"], rel=0.15)
    assert set(predicted["stages"]) == set(actual["stages"])


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["history", "saint"])
def test_training_is_the_same_with_and_without_a_plan(store: Path, tmp_path: Path, mode: str) -> None:
    train(a_run(store, tmp_path / "a", MODES[mode], dropout=0.5, epochs=2))
    train(a_run(store, tmp_path / "b", MODES[mode], dropout=0.5, epochs=2, plan=False))
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


def test_a_plan_makes_neither_histories_nor_counts(store: Path, tmp_path: Path) -> None:
    made = {mode: plan_of(a_run(store, tmp_path / "run", MODES[mode])) for mode in ("history", "saint")}
    assert not (tmp_path / "run").exists()
    found = json.loads(json.dumps(made["history"].asdict()))["prediction"]
    assert found["history_bytes_written"] > 3 * 2 * 2 * 16 * N * 0.99, "two layers of float16, three epochs"
    assert "histories" in str(made["history"])
    assert made["saint"].prediction.beforehand_seconds > 0


def drawn_of(own: list[int], halo: list[int]) -> SampledBatch:
    empty = np.empty(0, np.int64)
    node = np.array([*own, *halo], np.int64)
    subgraph = Subgraph(node, np.zeros(len(own) + 1, np.int64), empty, empty, (len(own), len(halo)), (0,))
    return SampledBatch(0, True, np.zeros(1, np.int64), subgraph)


def shape_of(num_nodes: int, hot_bytes: int) -> HistoryShape:
    def lengths(ids: Any, row_bytes: int) -> Any:
        return plan_reads(ids, row_bytes, count=num_nodes, alignment=PAGE_BYTES, gap_bytes=0).length

    cost = ReadCost(1e-5, 1e-9)
    return HistoryShape(num_nodes, (PAGE_BYTES,), hot_bytes, lag=0, ahead=2, widest=0, lengths=lengths, cost=cost)


@given(
    st.lists(st.sets(st.integers(0, 39), min_size=1, max_size=20), min_size=1, max_size=8),
    st.integers(0, 45),
)
@settings(max_examples=60, deadline=None)
def test_pulls_are_counted_as_a_history_keeps_them(halos: list[set[int]], hot: int) -> None:
    """Rows of a page each: bytes are pages, and later epochs read what is asked for beyond the rows most asked for."""
    drawn = [drawn_of([50, 51], sorted(halo)) for halo in halos]
    found = simulate_exchange(shape_of(64, hot * (PAGE_BYTES + 8)), drawn, whole=True)
    asked = np.bincount([node for halo in halos for node in halo], minlength=64)
    kept = {int(node) for node in np.argsort(asked, kind="stable")[64 - hot :] if asked[node]}
    assert found.first.nbytes * len(halos) == pytest.approx(PAGE_BYTES * int(asked.sum()))
    assert found.later.nbytes * len(halos) == pytest.approx(PAGE_BYTES * sum(len(halo - kept) for halo in halos))
    assert found.hot.nbytes == PAGE_BYTES * len(kept)
    assert found.resident_hot == (PAGE_BYTES + 8) * len(kept)
    assert found.written == 2 * PAGE_BYTES + PAGE_BYTES, "two rows, and the page of their steps"


def test_what_the_batches_of_an_optimizer_step_push_is_counted_together() -> None:
    """Twice: the rows pushed, which wait for the next pull, and those of float32 that wait for the step's end."""
    drawn, one = [drawn_of(list(range(100)), [])], shape_of(200, 0)
    apart = simulate_exchange(one, drawn, whole=True).memory
    four = simulate_exchange(replace(one, together=4, mine=2), drawn, whole=True).memory
    assert four - apart == 100 * ((8 - 3) * (PAGE_BYTES + 8) + 2 * PAGE_BYTES)


def test_processes_send_each_other_what_they_push(make_store: MakeStore, tmp_path: Path) -> None:
    """Rows of 8 columns in float16, with their ids, of a quarter of the nodes."""
    settings: dict[str, Any] = {"mode": "history", "parts": 4, "layers": 2, "hidden": 8, "accumulate": 2}
    config = TrainConfig(store=make_store(num_nodes=4000), out=tmp_path / "plan", **settings)
    found = plan_of(config, nproc=3, bandwidth=10**9).ranks
    rows = 2 * 1000 * (8 * 2 + 8)
    assert (found.push_bytes, found.push_memory) == (2 * rows, 3 * rows)


def test_a_part_of_the_batches_tells_of_the_others() -> None:
    """Nodes asked for by all batches are hot, and the rest at random: what half the batches choose serves the other half."""
    rng = np.random.default_rng(3)
    halos = [sorted({*range(100), *rng.integers(100, 20_000, 100).tolist()}) for _ in range(40)]
    shape = shape_of(20_000, 150 * (PAGE_BYTES + 8))
    whole = simulate_exchange(shape, [drawn_of([0], halo) for halo in halos], whole=True)
    some = simulate_exchange(shape, [drawn_of([0], halo) for halo in halos[:20]], whole=False)
    assert some.later.nbytes == pytest.approx(whole.later.nbytes, rel=0.05)
    assert some.first.nbytes == pytest.approx(whole.first.nbytes, rel=0.03)


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(0, 45))
def test_the_nodes_most_asked_for_are_those_of_a_stable_sort(asked: list[int], most: int) -> None:
    array = np.array(asked, np.uint16)
    count = min(int(np.count_nonzero(array)), most)
    wanted = np.sort(np.argsort(array, kind="stable")[len(array) - count :])
    assert np.array_equal(most_asked(array, most), wanted)


def test_a_printed_plan_has_what_a_mode_does_besides(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    besides = {"history": ("histories read", "histories written"), "saint": ("before the first batch",), "cluster": ()}
    for mode, words in besides.items():
        assert main(["plan", str(store), "--layers", "2", "--hidden", "8", "--threads", "1", "--mode", mode]) == 0
        shown = capsys.readouterr().out
        for text in ("histories read", "histories written", "before the first batch"):
            assert (text in shown) == (text in words), (mode, text)
