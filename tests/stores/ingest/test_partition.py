"""Partitioning against plain loops, and node arrays in another order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.build import judge
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.graph import Graph
from ooc.stores.ingest import partition as module
from ooc.stores.ingest.arrange import Arranging, in_input_order
from ooc.stores.ingest.duck import silent
from ooc.stores.ingest.partition import Neighbors, by_degree, count_cut, count_of, method_of, numbering, partition, stream


def neighbors_of(folder: Path, src: Any, dst: Any, num_nodes: int) -> Neighbors:
    """The undirected graph in files, by numpy."""
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    edge = np.arange(len(src))
    keep = src != dst
    ends = np.concatenate([np.stack([src, dst, edge])[:, keep], np.stack([dst, src, edge])[:, keep]], axis=1)
    ends = ends[:, np.lexsort([ends[2], ends[1]])]
    folder.mkdir(parents=True, exist_ok=True)
    ends[0].astype(np.int32).tofile(folder / "indices")
    np.concatenate([[0], np.cumsum(np.bincount(ends[1], minlength=num_nodes))]).astype(np.int64).tofile(folder / "indptr")
    return Neighbors(folder, num_nodes)


def communities(num_nodes: int, count: int, degree: int, inside: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Edges of a stochastic block model, its communities scattered over the ids."""
    rng = np.random.default_rng(seed)
    member = rng.permutation(num_nodes).reshape(count, -1)
    of, place = np.empty(num_nodes, np.int64), member.shape[1]
    of[member] = np.arange(count)[:, None]
    src, dst = rng.integers(0, num_nodes, (2, num_nodes * degree // 2))
    own = rng.random(len(src)) < inside
    dst[own] = member[of[src[own]], rng.integers(0, place, int(own.sum()))]
    return src, dst


def plain_stream(neighbors: Neighbors, count: int, passes: int) -> list[int]:
    """Restreamed LDG, as the papers have it."""
    indptr, indices = neighbors.indptr, np.fromfile(neighbors.folder / "indices", np.int32)
    num_nodes = neighbors.num_nodes
    part, room = [-1] * num_nodes, int(np.ceil(1.05 * num_nodes / count))
    for _ in range(passes):
        size, least, moved = [0] * count, 0, 0
        for v in range(num_nodes):
            near = [part[u] for u in indices[indptr[v] : indptr[v + 1]] if part[u] >= 0]
            score = {p: near.count(p) * (1 - size[p] / room) for p in dict.fromkeys(near)}
            most = max(score.values(), default=0.0)
            if most > 0:
                ties = [p for p in score if score[p] == most]
                best = min(ties, key=lambda p: (size[p], ties.index(p)))
            else:
                best = least
                while size[best] * count > v:
                    best = (best + 1) % count
                least = (best + 1) % count
            moved += part[v] != best
            part[v] = best
            size[best] += 1
        if moved * module.STILL < num_nodes:
            break
    return part


node_lists = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.one_of(st.just(0), st.integers(0, n - 1))), max_size=90)
    )
)


@settings(deadline=None)
@given(node_lists, st.integers(2, 6), st.integers(1, 4), st.sampled_from([1, 7, 2**22]))
def test_streaming_is_the_plain_loop(
    tmp_path_factory: pytest.TempPathFactory, graph: tuple[int, list[tuple[int, int]]], count: int, passes: int, piece: int
) -> None:
    num_nodes, edges = graph
    count = min(count, num_nodes)
    neighbors = neighbors_of(tmp_path_factory.mktemp("n"), [u for u, _ in edges], [v for _, v in edges], num_nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_SLOTS", piece)
        found = stream(neighbors, count, silent, passes)
    assert found.tolist() == plain_stream(neighbors, count, passes)
    assert np.bincount(found, minlength=count).max() <= np.ceil(1.05 * num_nodes / count)


@pytest.mark.parametrize("method", ["metis", "stream"])
def test_communities_are_found(tmp_path: Path, method: Any) -> None:
    src, dst = communities(20_000, 40, 16, 0.8)
    neighbors = neighbors_of(tmp_path, src, dst, 20_000)
    part = partition(neighbors, 40, method, silent)
    assert np.array_equal(part, partition(neighbors, 40, method, silent))
    size = np.bincount(part)
    assert (len(size), bool(size.max() <= 1.06 * size.mean())) == (40, True)
    cut = float((part[src] != part[dst]).mean())
    assert cut < 0.25  # 0.2 of the edges go anywhere; at random it would be 0.975


@pytest.mark.parametrize("method", ["metis", "stream"])
def test_parts_are_never_empty(tmp_path: Path, method: Any) -> None:
    star = neighbors_of(tmp_path, np.zeros(9, np.int64), np.arange(1, 10), 10)
    for count in range(1, 11):
        part = partition(star, count, method, silent)
        assert np.bincount(part).min() > 0
        assert part.max() < count


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(1, 12))
@settings(deadline=None)
def test_nodes_by_degree_as_a_stable_sort_gives_them(degrees: list[int], most: int) -> None:
    degree = np.array(degrees, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_DEGREE", most)
        found = by_degree(degree)
    assert found.tolist() == np.argsort(-np.minimum(degree, most), kind="stable").tolist()
    part = (degree % 3).astype(np.int32)
    new, _ = numbering(part, found)
    assert new[np.lexsort((np.arange(len(degree)), -np.minimum(degree, most), part))].tolist() == list(range(len(degree)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
@settings(deadline=None)
def test_numbers_follow_the_parts_and_the_old_order(of: list[int]) -> None:
    part = np.unique(of, return_inverse=True)[1].astype(np.int32)
    new, parts = numbering(part)
    order = np.argsort(part, kind="stable")
    assert np.array_equal(new[order], np.arange(len(part)))
    assert parts.tolist() == [0, *np.cumsum(np.bincount(part))]


@settings(deadline=None)
@given(node_lists, st.integers(1, 30), st.data())
def test_the_cut_is_counted_in_pieces(graph: tuple[int, list[tuple[int, int]]], piece: int, data: st.DataObject) -> None:
    num_nodes, edges = graph
    inner = data.draw(st.sets(st.integers(1, num_nodes - 1), max_size=4))
    parts = np.array([0, *sorted(inner), num_nodes])
    made = Graph.from_edges([u for u, _ in edges], [v for _, v in edges], num_nodes, parts=parts)
    cut = node = 0
    for first in range(0, made.num_edges, piece):
        found, node = count_cut(made.indptr, made.indices[first : first + piece], first, parts, node)
        cut += found
    assert cut / max(1, made.num_edges) == judge(made, parts, "given").cut


def test_how_many_parts_and_by_which_method(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [count_of("auto", n) for n in (3, 5000, 50_000, 10**9)] == [3, 16, 50, 2**15]
    assert count_of(7, 7) == 7
    with pytest.raises(ConfigError, match="`parts=8`: 7 nodes cannot"):
        count_of(8, 7)
    assert method_of("auto", 1000, 10_000, 10**9) == "metis"
    assert method_of("auto", 1000, 10**8, 10**9) == "stream"
    assert method_of("stream", 1000, 10_000, 10**9) == "stream"
    with pytest.raises(BudgetError, match=r"give `memory='8\.7GB'`, or use `partitioner='stream'`"):
        method_of("metis", 1000, 10**8, 10**9)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert method_of("auto", 1000, 10_000, 10**9) == "stream"
    with pytest.raises(ConfigError, match=r"needs the extra ooc\[metis\]: pip install 'ooc\[metis\]'"):
        method_of("metis", 1000, 10_000, 10**9)


@settings(deadline=None, max_examples=30)
@given(
    st.permutations(range(37)), st.sampled_from([(), (3,), (2, 2)]), st.sampled_from([1, 40, 100, 10**6]), st.integers(1, 40)
)
def test_rows_are_arranged(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], shape: tuple[int, ...], max_bytes: int, block: int
) -> None:
    path, new = tmp_path_factory.mktemp("a"), np.array(order)
    values = np.random.default_rng(0).integers(-9, 9, (37, *shape)).astype(np.int16)
    stale = path / "stage/node-x"
    stale.mkdir(parents=True)
    (stale / "000000.rows").write_bytes(b"of a step that was killed")
    with Arranging(new, path / "stage", max_bytes).sink(path, "node/x", shape, np.int16, count=37) as sink:
        for first in range(0, 37, block):
            sink.append(values[first : first + block])
    found = open_zarr_rows(path, "node/x", "mmap").map()
    assert np.array_equal(found[new], values)
    assert not list(stale.iterdir())


def test_an_array_that_failed_is_not_there(tmp_path: Path) -> None:
    sink = Arranging(np.arange(4), tmp_path / "stage", 100).sink(tmp_path, "x", (), np.int8, count=4)
    with pytest.raises(AssertionError, match="more rows than announced"), sink:
        sink.append(np.zeros(5, np.int8))
    assert not (tmp_path / "x/zarr.json").exists()


def test_training_rows_in_the_order_of_the_input() -> None:
    flags = np.array([True, False, False, True])  # by new row
    training = in_input_order(lambda first, last: flags[first:last], np.array([3, 2, 1, 0]))
    assert training(0, 2).tolist() == [True, False]
    assert training(2, 4).tolist() == [False, True]
