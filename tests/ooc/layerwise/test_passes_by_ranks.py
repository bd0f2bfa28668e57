"""Passes by several processes, each for a range of the nodes: the bits of one process, also where they are killed."""

import os
import signal
from contextlib import closing
from hashlib import sha256
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_geometric.nn import GraphSAGE

from ooc.layerwise import edge_tiles
from ooc.layerwise import executor as layerwise_executor
from ooc.layerwise import full_neighbor_pass as neighbors
from ooc.layerwise import pass_plan as layerplan
from ooc.layerwise.exact_pass import exact_pass
from ooc.layerwise.full_neighbor_pass import FullNeighborPass
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.layerwise.node_ranges import even_ranges, node_ranges
from ooc.layerwise.pass_notes import start_of
from ooc.models.builders import build_model
from ooc.runtime.ranks import ALONE, Ranks, joined_ranks
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from tests.conftest import MakeStore
from tests.ooc.graphs import hub_graph
from tests.ooc.process_groups import GlooProcesses, in_processes

N, F, SEEDS = 12_000, 12, 1024
"""three ranges of pages; eleven batches and a part of one"""
ROOM = {"sage": 100_000, "gcn": 100_000, "gcnii": 100_000, "gat": 16_000_000}


def small_parts() -> None:
    """Small chunks and pieces, in a process of its own, so that a small graph has many."""
    for module, name, value in (
        (layerplan, "CHUNK_ROWS", 64),
        (layerwise_executor, "CHUNK_ROWS", 64),
        (layerwise_executor, "UNIT_CELLS", 3),
        (edge_tiles, "_LEAST_PIECE_ROWS", 512),
        (edge_tiles, "PIECE_BYTES", 1),
        (neighbors, "SEEDS", SEEDS),
    ):
        mock.patch.object(module, name, value).start()


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return GraphSAGE(F, 8, 2, 5) if name == "pyg" else build_model(name, F, 16, 5, 3, heads=2)


def rows_of(name: str, ds: Dataset, folder: Path, ranks: Ranks, progress: Any = None) -> np.ndarray:
    """All rows of a pass, as this rank reads them."""
    settings: dict[str, Any] = {} if name == "pyg" else {"room": ROOM[name]}
    kind: Any = FullNeighborPass if name == "pyg" else LayerwisePass
    with closing(kind(make(name), ds, folder, ranks=ranks, **settings)) as whole:
        rows = whole.run(*([] if progress is None else [progress]))
        out = np.empty(rows.shape, rows.dtype)
        rows.read(np.arange(rows.shape[0]), out)
        return out


def passes(store: Path, folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """The rows of several models, by the ranks that there are."""
    small_parts()
    with joined_ranks() as ranks, Dataset.open(store) as ds:
        return {name: rows_of(name, ds, folder / name, ranks) for name in names}


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    src, dst = hub_graph(N).numpy()
    x = np.random.default_rng(2).standard_normal((N, F), dtype=np.float32)
    return make_store(num_nodes=N, src=src, dst=dst, weight=True, x=x)


def alone(store: Path, folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    """The rows of one process."""
    found: dict[str, np.ndarray] = in_processes(1, passes, store, folder, names)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_the_rows_of_one_process(store: Path, tmp_path: Path, size: int) -> None:
    """To the bit where layers sum; a layer that gathers has other ranges of nodes together, as with another memory."""
    expected = alone(store, tmp_path / "one", [*ROOM, "pyg"])
    for rank, found in enumerate(in_processes(size, passes, store, tmp_path / "ranks", [*ROOM, "pyg"])):
        for name, rows in found.items():
            if name == "gat":
                np.testing.assert_allclose(rows, expected[name], atol=1e-5, err_msg=f"rank {rank}")
            else:
                np.testing.assert_array_equal(rows, expected[name], err_msg=f"{name}, rank {rank}")


def killed(store: Path, folder: Path, name: str, victim: int) -> str | None:
    """The digest of a pass whose rank `victim` is killed behind a range, where it has one."""
    small_parts()
    with joined_ranks() as ranks, Dataset.open(store) as ds:

        def progress(what: str, done: int, total: int) -> None:
            if ranks.rank == victim and what != "edges":
                os.kill(os.getpid(), signal.SIGKILL)

        return sha256(rows_of(name, ds, folder, ranks, progress).tobytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "gcnii", "pyg"])
def test_a_killed_pass_goes_on_with_any_number_of_ranks(store: Path, tmp_path: Path, name: str) -> None:
    expected, kills = alone(store, tmp_path / "one", [name])[name], 0
    for size, victim in cycle([(2, 1), (2, 0), (3, 2), (1, 0), (4, 1), (3, 0)]):
        with GlooProcesses(size, killed, store, tmp_path / "killed", name, victim) as group:
            codes = group.wait()
            assert None not in codes, "nobody waits for one that is gone"
            if codes == [0] * size:
                found = set(group.results())
                break
            assert codes[victim] == -signal.SIGKILL
            kills += 1
    assert kills > (0 if name == "pyg" else 2)
    assert found == {sha256(expected.tobytes()).hexdigest()}


def begun(store: Path, folder: Path) -> tuple[bool, bool]:
    """(whether a pass of a folder was begun, whether one of another model was)."""
    small_parts()
    found = []
    with joined_ranks() as ranks, Dataset.open(store) as ds:
        rows_of("sage", ds, folder, ranks)
        for name in ("sage", "gcn"):
            with closing(exact_pass(make(name), ds, folder, ranks=ranks)) as whole:
                found.append(whole.was_begun())
        with closing(exact_pass(make("gcn"), ds, folder, ranks=ranks)) as whole:
            whole.lock()
            whole.discard()
    return found[0], found[1]


@pytest.mark.slow
def test_ranks_agree_on_what_was_begun_and_one_removes_it(store: Path, tmp_path: Path) -> None:
    assert in_processes(2, begun, store, tmp_path / "pass") == [(True, False)] * 2
    assert not (tmp_path / "pass").exists()


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 9))
def test_even_ranges_cut_at_multiples(count: int, unit: int, size: int) -> None:
    ranges = even_ranges(count, unit, size)
    assert len(ranges) == size
    assert [first for first, _ in ranges] + [count] == [0] + [stop for _, stop in ranges]
    assert all(first % unit == 0 or first == count for first, _ in ranges)
    units = [-(-stop // unit) - -(-first // unit) for first, stop in ranges]
    assert max(units) - min(units) <= 1


@given(st.lists(st.integers(0, 6), min_size=0, max_size=60), st.integers(1, 9))
def test_ranges_of_nodes_have_as_much_work_as_each_other(degrees: list[int], size: int) -> None:
    """No cut can be moved by a unit to make the work before it more even."""
    unit = 4
    with mock.patch.object(layerplan, "CHUNK_ROWS", unit), mock.patch("ooc.layerwise.node_ranges.PAGE_BYTES", unit):
        count = len(degrees)
        indptr = np.concatenate([[0], np.cumsum(np.array(degrees, np.int64))]).astype(np.int64)
        graph = Graph(indptr, np.zeros(int(indptr[-1]), np.int32))
        ranges = node_ranges(graph, size)
    assert [first for first, _ in ranges] + [count] == [0] + [stop for _, stop in ranges]
    if size == 1:
        return
    work = np.arange(count + 1) / max(1, count) + indptr / max(1, int(indptr[-1]))
    borders = [*range(0, count, unit), count]
    for rank, (first, _) in enumerate(ranges):
        assert first in borders
        wanted = work[-1] * rank / size
        assert abs(work[first] - wanted) <= min(abs(work[each] - wanted) for each in borders) + 1e-9


Done = list[tuple[int, int, int, int]]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3), st.data(), st.integers(0, 10), st.integers(0, 10)
)
def test_what_is_noted_is_not_done_again_and_the_rest_is(
    lengths: list[int], op: int, data: st.DataObject, first: int, length: int
) -> None:
    """Whatever ranks had done of an op, another number of ranks goes on in front of what is not done of its own range."""
    cuts = np.cumsum([0, *lengths]).tolist()
    notes, done = [], set[int]()
    for begin, end in pairwise(cuts):
        ahead = len(lengths) > 1 and data.draw(st.booleans())
        upto = begin if ahead else data.draw(st.integers(begin, end))
        done |= set(range(begin, upto))
        notes.append({"stage": op, "next": upto, "first": begin, "stop": end})
    own = (min(first, cuts[-1]), min(first + length, cuts[-1]))
    found = start_of(notes, own)
    if len(notes) > 1 and len(done) == cuts[-1]:
        assert found == (op + 1, own[0])
        return
    assert found.op == op
    assert own[0] <= found.node <= own[1]
    assert set(range(own[0], found.node)) <= done
    assert found.node == own[1] or found.node not in done


def test_a_rank_that_waits_for_the_next_op_has_done_the_one_before() -> None:
    notes = [{"stage": 1, "next": 50, "first": 0, "stop": 50}, {"stage": 2, "next": 60, "first": 50, "stop": 90}]
    assert [start_of(notes, own) for own in ((0, 50), (50, 90), (0, 90))] == [(2, 0), (2, 60), (2, 0)]
    assert ALONE.alone
