"""Waiting batches -> sweeps -> pieces: entries by row and in order, every row once, within the bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc import sweepplan
from ooc.budget import SweepSize
from ooc.buffers import Buffers
from ooc.loaders import NeighborLoader
from ooc.loading import PIECE_BYTES, PIECES
from ooc.order import Cursor
from ooc.sums import Summing
from ooc.sweepplan import Rest, Sweep, Waiting, make_sweep, pieces, sweeps, waiting
from stores.build import write_store
from stores.dataset import Dataset
from stores.graph import Graph
from stores.lmdb_rows import write_lmdb_rows
from tests.conftest import random_edges
from tests.ooc.test_gather import write_features
from tests.ooc.test_windows import foreign_features

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


def waits_of(ds: Dataset, fanout: list[int], batch_size: int) -> tuple[Any, list[Waiting]]:
    """The work of a loader, and its batches, all sampled."""
    loader = NeighborLoader(ds, fanout, batch_size=batch_size, shuffle=True, summing=Summing("expanded", 8))
    work = loader._work
    return work, [waiting(work, work.sample(Cursor(0, step))) for step in range(len(loader))]


def drawn_at_random(rng: Any, size: int, top: int, weighed: bool) -> Waiting:
    """A batch of `size` edges and 1 to 4 destinations that wants rows below `top`."""
    d = int(rng.integers(1, 5))
    row = rng.integers(0, top, size + d).astype(np.int64 if top > 2**31 else np.int32)
    target = np.concatenate([np.sort(rng.integers(0, d, size)), ~np.arange(d)]).astype(np.int32)
    edge = rng.random(size + d if weighed and size else 0).astype(np.float32)
    drawn: Any = type("Drawn", (), {"subgraph": type("Nodes", (), {"node": np.arange(d)})})
    return Waiting(Rest(drawn, np.ones(d, np.float32)), row, target, edge, SweepSize(d, len(row), size, 1))


def values(edge: Any, entries: int) -> Any:
    return edge if len(edge) else np.ones(entries, np.float32)


def equal(one: Sweep, other: Sweep) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("start", "row", "first", "target")]
    pairs.append((values(one.edge, len(one.target)), values(other.edge, len(one.target))))
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    top=st.sampled_from([1, 50, 5000, 2**30, 2**40]),
    seed=st.integers(0, 99),
    weighed=st.booleans(),
)
def test_entries_stand_by_row_and_in_order(sizes: list[int], top: int, seed: int, weighed: bool) -> None:
    """int32 and int64 rows, batches without edges, with factors and without; one batch of them by itself."""
    rng = np.random.default_rng(seed)
    batches = [drawn_at_random(rng, size, top, weighed) for size in sizes]
    sweep = make_sweep([*batches])
    start = np.cumsum([0, *(batch.rest.num_rows for batch in batches)]).tolist()
    row = np.concatenate([batch.row for batch in batches])
    edge = np.concatenate([values(batch.edge, len(batch.row)) for batch in batches])
    target = [
        ~(~to + base) if to < 0 else to + base
        for batch, base in zip(batches, start[:-1], strict=True)
        for to in batch.target.tolist()
    ]
    order = np.argsort(row, kind="stable")
    assert sweep.start.tolist() == start
    assert sweep.num_rows == start[-1]
    assert np.array_equal(sweep.row, np.unique(row))
    assert np.array_equal(np.repeat(sweep.row, np.diff(sweep.first)), row[order])
    assert np.array_equal(sweep.target, np.array(target)[order])
    assert np.array_equal(values(sweep.edge, len(row)), edge[order])
    assert all(equal(sweep.only(k), make_sweep([batch])) for k, batch in enumerate(batches))
    assert sweep.size == SweepSize(start[-1], len(row), max(sizes), 1)


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
        sweep = make_sweep(waits_of(ds, [1], 3)[1][:20])
        assert 20 < len(sweep.row) < N
        done: list[int] = []
        for piece in pieces(sweep, rows, piece_bytes):
            found, nbytes = piece.read(rows, Buffers(1))
            assert nbytes > 0
            assert (piece.plan is None) == (source in ("lmdb", "foreign"))
            for row, at in zip(piece.row, piece.row_at, strict=True):
                assert np.array_equal(found[at : at + F].view(rows.dtype), stored[row])
            assert np.array_equal(piece.first, sweep.first[len(done) : len(done) + len(piece.row) + 1])
            done += piece.row.tolist()
        assert done == sweep.row.tolist()


@settings(deadline=None, max_examples=30)
@given(batch_size=st.integers(1, 60), pool=st.integers(10**5, 10**7))
def test_sweeps_hold_all_batches_in_order_within_their_bytes(path: Path, batch_size: int, pool: int) -> None:
    with Dataset.open(path) as ds:
        work, waits = waits_of(ds, [4, 3], batch_size)
    made = list(sweeps(iter(waits), pool))
    assert [id(batch) for sweep in made for batch in sweep.batches] == [id(batch.rest) for batch in waits]
    at = 0
    for sweep in made:
        own = waits[at : at + len(sweep.batches)]
        at += len(own)
        entries = sum(batch.row.nbytes + batch.target.nbytes + batch.edge.nbytes for batch in own)
        sums = 2 * 4 * sweep.num_rows * F
        need = 2 * sums + 4 * entries + max(batch.share.activations for batch in own) + PIECES * work.piece_bytes
        assert len(own) == 1 or need <= sweep.size.nbytes <= pool
        assert sweep.size.sums > sums
        assert sweep.size.entries >= entries


def test_a_failure_comes_after_the_sweep_before_it(path: Path) -> None:
    with Dataset.open(path) as ds:
        waits = waits_of(ds, [4, 3], 20)[1]

    def failing() -> Any:
        yield from waits[:2]
        raise ZeroDivisionError("mine")

    found = sweeps(failing(), 10**9)
    assert len(next(found).batches) == 2
    with pytest.raises(ZeroDivisionError, match="mine"):
        next(found)
    assert list(sweeps(iter([]), 10**9)) == []
