"""Waiting batches -> sweeps -> pieces: entries by row and in order, every row once, within the bytes."""

from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ooc.graph.aggregation import PreAggregation
from ooc.loading import shared_scan_plan as sweepplan
from ooc.loading.batch_bytes import FEW, PIECE_BYTES, PIECES, ScanBytes, ScanSize
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.read_strategy import grouped
from ooc.loading.shared_scan import SharedScans
from ooc.loading.shared_scan_plan import BatchRemainder, ScanDraft, SharedScan, WaitingBatch, pieces
from ooc.loading.shared_sums import LEAST_SHARED, digests_of
from ooc.runtime.buffers import Buffers
from ooc.runtime.keyed_random import Cursor
from ooc.stores.arrays.lmdb_rows import write_lmdb_rows
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.loading.test_feature_gather import write_features
from tests.ooc.loading.test_superbatch import foreign_features

N, E, F = 300, 3000, 21


@pytest.fixture(scope="module")
def features(tmp_path_factory: Any) -> dict[str, Path]:
    """The same features written by ours and others, by name."""
    folder = tmp_path_factory.mktemp("features")
    x = np.random.default_rng(0).standard_normal((N, F), dtype=np.float32)
    write_lmdb_rows(folder / "lmdb", x)
    foreign_features(folder / "foreign", x)
    own = {kind: write_features(folder / kind, kind, x)[0] for kind in ("float32", "float16")}
    return {**own, "lmdb": folder / "lmdb", "foreign": folder / "foreign"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> Path:
    graph = Graph.from_edges(*random_edges(N, E), N)
    x = np.zeros((N, F), np.float32)
    return write_store(tmp_path_factory.mktemp("plan") / "t.ooc", graph, x=x)


def shared_scans(batches: Any, pool: int, self_row_bytes: int, reserved: int = 0) -> Any:
    return grouped(batches, (ScanDraft(pool, self_row_bytes, reserved) for _ in repeat(None)))


def waits_of(ds: Dataset, fanout: list[int], batch_size: int) -> tuple[Any, list[WaitingBatch]]:
    """The work of a loader, and its batches, all sampled."""
    loader = NeighborLoader(ds, fanout, batch_size=batch_size, shuffle=True, pre_aggregation=PreAggregation("expanded", 8))
    strategy = loader.strategy
    memory = strategy.memory if isinstance(strategy.memory, ScanBytes) else ScanBytes(10**6, strategy.memory)
    scans, sample = SharedScans(strategy.stages, memory), strategy.stages.sample
    return memory, [scans.waiting(sample.sample(Cursor(0, step))) for step in range(len(loader))]


def drawn_at_random(rng: Any, size: int, top: int, weighed: bool) -> WaitingBatch:
    """A batch of `size` edges and 1 to 4 destinations that wants rows below `top`."""
    d = min(int(rng.integers(1, 5)), top)
    row = rng.integers(0, top, size).astype(np.int64 if top > 2**31 else np.int32)
    target = np.sort(rng.integers(0, d, size)).astype(np.int32)
    edge = rng.random(size if weighed else 0).astype(np.float32)
    node = rng.choice(min(top, 50), d).astype(np.int64)  # seeds may repeat
    drawn: Any = type("Drawn", (), {"subgraph": type("Nodes", (), {"node": node})})
    rest, share = BatchRemainder(drawn, d), ScanSize(3 * d, 3 * d, d, size + d, size, 1, largest=3 * d)
    return WaitingBatch(rest, row, target, edge, np.ones(d, np.float32), node, share)


@pytest.mark.parametrize(("top", "weighed"), [(1000, False), (1000, True), (2**40, True)])
def test_entries_are_the_same_in_pages_of_their_own(top: int, weighed: bool) -> None:
    batch = drawn_at_random(np.random.default_rng(0), 33, top, weighed)
    moved = batch.in_own_pages()
    for name in ("row", "target", "edge", "scale"):
        was, now = getattr(batch, name), getattr(moved, name)
        assert now.dtype == was.dtype
        assert np.array_equal(now, was)
        assert not np.shares_memory(now, was)


def sweep_of(batches: list[WaitingBatch], self_row_bytes: int = 3) -> SharedScan:
    draft = ScanDraft(1 << 60, self_row_bytes)
    assert all(draft.add(batch) for batch in batches)
    return draft.finish()


def entries_of(scan: SharedScan) -> list[tuple[int, int, float]]:
    """(row, sum, factor) of each edge, in order."""
    factor = scan.edge if len(scan.edge) else np.ones(len(scan.target), np.float32)
    row = np.repeat(scan.row, np.diff(scan.first))
    return [(r, to, f) for r, to, f in zip(row.tolist(), scan.target.tolist(), factor.tolist(), strict=True) if to >= 0]


def kept_by(scan: SharedScan) -> dict[int, int]:
    """The row in each place that keeps one."""
    row = np.repeat(scan.row, np.diff(scan.first)).tolist()
    kept = [(~to, r) for r, to in zip(row, scan.target.tolist(), strict=True) if to < 0]
    assert len(dict(kept)) == len(kept)
    return dict(kept)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    top=st.sampled_from([1, 50, 5000, 2**30, 2**40]),
    seed=st.integers(0, 99),
    weighed=st.booleans(),
)
@example(sizes=[0], top=50, seed=71, weighed=False)  # a seed twice in one batch
def test_entries_stand_by_row_and_in_order(sizes: list[int], top: int, seed: int, weighed: bool) -> None:
    """int32 and int64 rows, batches without edges, with factors and without; one batch of them by itself."""
    rng = np.random.default_rng(seed)
    batches = [drawn_at_random(rng, size, top, weighed) for size in sizes]
    scan = sweep_of(batches)
    start = np.cumsum([0, *(batch.rest.num_rows for batch in batches)]).tolist()
    node = np.concatenate([batch.rest.drawn.subgraph.node for batch in batches])
    wanted = []
    for batch, base in zip(batches, start[:-1], strict=True):
        factor = batch.edge if len(batch.edge) else np.ones(len(batch.row), np.float32)
        wanted.append(list(zip(batch.row.tolist(), (batch.target + base).tolist(), factor.tolist(), strict=True)))
    assert entries_of(scan) == sorted([entry for each in wanted for entry in each], key=lambda entry: entry[0])
    assert scan.start.tolist() == start
    assert scan.num_rows == start[-1]
    assert scan.row.tolist() == sorted({*node.tolist(), *(row for each in wanted for row, _, _ in each)})
    assert [kept_by(scan)[place] for place in scan.own.tolist()] == node.tolist()
    assert scan.num_self_rows == len(kept_by(scan)) == len(set(node.tolist()))
    sums, most = 3 * start[-1], 3 * max(batch.rest.num_rows for batch in batches)
    entries = sum(sizes) + start[-1]
    assert scan.size == ScanSize(sums, 3 * scan.num_self_rows, start[-1], entries, max(sizes), 1, 0, most, len(sizes))
    if scan.in_file_order:
        assert [kept_by(scan)[place] for place in range(scan.num_self_rows)] == sorted(set(node.tolist()))
    for k in range(len(batches)):
        alone = scan.only(k)
        assert entries_of(alone) == sorted(wanted[k], key=lambda entry: entry[0])
        places = scan.own[scan.own_start[k] : scan.own_start[k + 1]].tolist()
        assert [kept_by(alone)[place] for place in places] == node[start[k] : start[k + 1]].tolist()
        assert scan.made_for(k).tolist() == list(range(start[k], start[k + 1]))


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    contents=st.integers(1, 12),
    seed=st.integers(0, 99),
    weighed=st.booleans(),
)
def test_aggregates_that_add_the_same_are_made_once(sizes: list[int], contents: int, seed: int, weighed: bool) -> None:
    """Batches of aggregates out of a few kinds, beside a scan of the same batches that share none."""
    rng = np.random.default_rng(seed)
    kinds = [rng.integers(0, 40, rng.integers(0, 5)) for _ in range(contents)]
    factors = [rng.random(len(kind)).astype(np.float32) for kind in kinds]
    alone = []
    for size in sizes:
        mine = [int(kind) for kind in rng.integers(0, contents, size)]
        row = np.concatenate([np.empty(0, int), *(kinds[kind] for kind in mine)]).astype(np.int32)
        target = np.repeat(np.arange(size, dtype=np.int32), [len(kinds[kind]) for kind in mine])
        edge = np.concatenate([np.empty(0, np.float32), *(factors[kind] for kind in mine if weighed)])
        scale = np.array([1 + kind % 3 for kind in mine], np.float32)
        share = ScanSize(3 * size, 0, 0, len(row) + 1, 0, 0)
        drawn: Any = None
        alone.append(WaitingBatch(BatchRemainder(drawn, size), row, target, edge, scale, np.zeros(1, np.int64), share))
    batches = [
        replace(each, digest=digests_of(each.row, each.target, each.edge, each.scale, len(each.scale))) for each in alone
    ]
    scan, apart = sweep_of(batches), sweep_of(alone)

    def content(scan: SharedScan) -> list[Any]:
        of: list[list[Any]] = [[] for _ in range(scan.num_rows)]
        for row, to, factor in entries_of(scan):
            of[to].append((row, factor))
        return list(zip(of, scan.scale.tolist(), strict=True)) if len(scan.scale) else [(each, 1.0) for each in of]

    found, want = content(scan), content(apart)
    done, made = set(), 0
    for k, size in enumerate(sizes):
        mine, before = want[slice(*apart.start[k : k + 2])], want[: apart.start[k]]
        ends = range(*scan.start[k : k + 2].tolist())
        places = list(ends) if scan.sums[k] is None else scan.sums[k].tolist()
        assert [found[place] for place in places] == mine
        assert not done.intersection(places)
        done.update(ends)  # which no batch after needs
        repeated = sum(each in before for each in mine)
        shares = repeated > 0 and repeated * LEAST_SHARED >= size
        new = {str(each) for each in mine if each not in before} if shares else mine
        assert len(scan.made_for(k)) == len(new)
        made += len(new)
        alone = content(scan.only(k))
        assert [alone[place] for place in scan.made_for(k)] == [found[place] for place in scan.made_for(k)]
    assert scan.num_rows == made
    assert scan.size.sums == 3 * made
    assert scan.size.entries == np.count_nonzero(scan.target >= 0) + len(sizes)


@pytest.mark.parametrize("source", ["float32", "float16", "lmdb", "foreign"])
@pytest.mark.parametrize(("piece_bytes", "plan_rows"), [(PIECE_BYTES, 2**18), (4096, 2**18), (9000, 70), (1, 1)])
def test_pieces_hold_every_row_once_in_order(
    path: Path, features: Any, monkeypatch: pytest.MonkeyPatch, source: str, piece_bytes: int, plan_rows: int
) -> None:
    monkeypatch.setattr(sweepplan, "PLAN_ROWS", plan_rows)
    with Dataset.open(path, features={"x": features[source]}) as ds:
        rows = ds.stored("x")
        stored = np.empty((N, F), rows.dtype)
        rows.read(np.arange(N), stored)
        scan = sweep_of(waits_of(ds, [1], 3)[1][:20])
        assert 20 < len(scan.row) < N
        done: list[int] = []
        for piece in pieces(scan.row, scan.first, rows, piece_bytes):
            found, nbytes = piece.read(Buffers(1))
            assert nbytes > 0
            assert (piece.plan is None) == (source in ("lmdb", "foreign"))
            for row, at in zip(piece.row, piece.row_at, strict=True):
                assert np.array_equal(found[at : at + F].view(rows.dtype), stored[row])
            assert np.array_equal(piece.first, scan.first[len(done) : len(done) + len(piece.row) + 1])
            done += piece.row.tolist()
        assert done == scan.row.tolist()


@settings(deadline=None, max_examples=30)
@given(batch_size=st.integers(1, 60), pool=st.integers(10**5, 10**7))
def test_sweeps_hold_all_batches_in_order_within_their_bytes(path: Path, batch_size: int, pool: int) -> None:
    with Dataset.open(path) as ds:
        memory, waits = waits_of(ds, [4, 3], batch_size)
    made = list(shared_scans(iter(waits), pool, memory.self_row_bytes))
    assert [id(batch) for scan in made for batch in scan.batches] == [id(batch.rest) for batch in waits]
    at = 0
    for scan in made:
        own = waits[at : at + len(scan.batches)]
        at += len(own)
        entries = sum(batch.row.nbytes + batch.target.nbytes + batch.edge.nbytes for batch in own)
        held = max(4 * F * batch.rest.num_rows for batch in own) * 3
        given_back = max(0, 4 * F * min(scan.num_rows, scan.num_self_rows) - held) if len(own) > FEW else 0
        rows = 8 * (scan.num_rows + scan.num_self_rows) * F - given_back
        need = rows + 3 * entries + max(batch.size.activations for batch in own) + PIECES * memory.piece_bytes
        assert len(own) == 1 or need <= scan.size.nbytes <= pool
        assert scan.size.rows == rows
        assert scan.size.sums == 4 * scan.num_rows * F
        assert scan.size.self_rows == 4 * scan.num_self_rows * F
        assert scan.size.entries >= entries


def test_a_failure_comes_after_the_sweep_before_it(path: Path) -> None:
    with Dataset.open(path) as ds:
        waits = waits_of(ds, [4, 3], 20)[1]

    def failing() -> Any:
        yield from waits[:2]
        raise ZeroDivisionError("mine")

    found = shared_scans(failing(), 10**9, 4 * F)
    assert len(next(found).batches) == 2
    with pytest.raises(ZeroDivisionError, match="mine"):
        next(found)
    assert list(shared_scans(iter([]), 10**9, 4 * F)) == []


def test_two_batches_take_what_freed_blocks_were_to_have_and_more_do_not() -> None:
    """And copies of destinations' rows: none of one batch, one of two, two of three and more."""
    rng = np.random.default_rng(0)
    one = drawn_at_random(rng, 10, 50, False)
    share = ScanSize(sums=100, self_rows=0, rests=0, entries=0, activations=50, besides=5, copied=10)
    batch = replace(one, size=share)
    sizes = []
    joined = share
    for _ in range(3):
        sizes.append(joined.nbytes)
        joined = joined.joined(share, 0)
    assert sizes == [255, 465, 675]
    for pool, blocks, want in ((465, 0, 2), (465, 400, 2), (464, 0, 1), (675, 0, 3), (675, 1, 2), (676, 1, 3)):
        made = shared_scans(iter([batch] * 3), pool, 0, blocks)
        assert len(next(made).batches) == want, (pool, blocks)
