"""Partitioning that keeps edges within parts: METIS if the graph fits memory, else streaming passes.

Both treat the graph as undirected and unweighted, without self-loops.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.graph import index_dtype
from ooc.stores.ingest import edges as csc
from ooc.stores.ingest.duck import OUTSIDE_BYTES, Duck, Progress
from ooc.stores.jit import kernel

Ints = NDArray[np.int64]
Parts = NDArray[np.int32]
Method = Literal["metis", "stream"]

SLACK = 0.05
"""the largest part may exceed the mean by this share"""
PASSES = 10
"""of streaming, which ends earlier if fewer than one node in STILL moves"""
STILL = 200
PIECE_SLOTS = 2**22
MOST_DEGREE = 2**20
"""hubs with at least this many edges count as equal, so that few counters sort the nodes"""
METIS_SLOT_BYTES, METIS_NODE_BYTES = 80, 240
"""memory of METIS, measured at 64 and 200 on a graph of 1 M nodes and 16 M slots"""
AUTO_NODES, AUTO_LEAST, AUTO_MOST = 1000, 16, 2**15
"""`--parts auto`: nodes per part, and the minimum and maximum number of parts"""


@dataclass(frozen=True)
class Neighbors:
    """The undirected graph in two files: the neighbors of node v are entries indptr[v]:indptr[v+1] of `indices`.

    Only `indptr` is ever completely in memory.
    """

    folder: Path
    num_nodes: int

    @property
    def indptr(self) -> Ints:
        return np.fromfile(self.folder / "indptr", np.int64)

    @property
    def num_slots(self) -> int:
        return (self.folder / "indices").stat().st_size // index_dtype(self.num_nodes).itemsize

    @classmethod
    def write(cls, duck: Duck, relation: str, folder: Path, num_nodes: int, num_edges: int, progress: Progress) -> "Neighbors":
        """Sort the edges of `relation` (SQL: src, dst, edge_id) into the two files; needs memory for a batch and indptr."""
        folder.mkdir(parents=True, exist_ok=True)
        count, done = np.zeros(num_nodes + 1, np.int64), 0
        slots = csc.directed(relation, undirected=True, drop_self_loops=True, rest=())
        with (folder / "indices").open("wb") as file:
            for dst, src, _, _ in csc.sorted_slots(duck, slots, num_nodes, num_edges, 2 * num_edges, rest={}):
                first = int(dst[0]) if len(dst) else 0
                found = np.bincount(dst - first)
                count[first + 1 : first + 1 + len(found)] += found
                file.write(np.ascontiguousarray(src, index_dtype(num_nodes)).data)
                done += len(dst)
                progress("sort neighbors", done, 2 * num_edges)
        np.cumsum(count, out=count)
        count.tofile(folder / "indptr")
        return cls(folder, num_nodes)

    def pieces(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (first slot, neighbors) sequentially, PIECE_SLOTS slots at a time."""
        with (self.folder / "indices").open("rb") as file:
            for first in range(0, self.num_slots, PIECE_SLOTS):
                yield first, np.fromfile(file, index_dtype(self.num_nodes), PIECE_SLOTS)


def count_of(parts: int | Literal["auto"], num_nodes: int) -> int:
    """Return the number of parts: `parts`, or for about AUTO_NODES nodes each. Raises ConfigError for more parts than nodes."""
    if parts == "auto":
        return min(num_nodes, max(AUTO_LEAST, min(AUTO_MOST, num_nodes // AUTO_NODES)))
    if parts > num_nodes:
        raise ConfigError(f"`parts={parts}`: {num_nodes} nodes cannot make so many parts; give fewer")
    return parts


def method_of(asked: Literal["auto", "metis", "stream"], num_nodes: int, num_slots: int, memory: int) -> Method:
    """Return METIS if requested, or if installed and it fits `memory` bytes (`Duck.limit`); else streaming.

    Raises ConfigError if METIS is requested but not installed, BudgetError if it does not fit.
    """
    need = METIS_SLOT_BYTES * num_slots + METIS_NODE_BYTES * num_nodes
    fits = need <= memory and num_slots < 2**31
    installed = find_spec("pymetis") is not None
    if asked == "metis" and not installed:
        raise ConfigError(
            "`partitioner='metis'` needs the extra ooc[metis]: pip install 'ooc[metis]', or use `partitioner='stream'`"
        )
    if asked == "metis" and not fits:
        raise BudgetError(
            f"METIS would take about {need / 1e9:.1f} GB (and holds 2**31 edges at most): give "
            f"`memory='{(need + OUTSIDE_BYTES) / 1e9 + 0.1:.1f}GB'`, or use `partitioner='stream'`"
        )
    return "metis" if asked != "stream" and installed and fits else "stream"


def partition(neighbors: Neighbors, count: int, method: Method, progress: Progress) -> Parts:
    """Return the part of each node, int32[N] of 0..P-1 with P <= `count` non-empty parts. Deterministic."""
    if count == 1:
        return np.zeros(neighbors.num_nodes, np.int32)
    part = _metis(neighbors, count, progress) if method == "metis" else stream(neighbors, count, progress)
    there = np.zeros(count, np.int32)
    there[part] = 1
    return (np.cumsum(there, dtype=np.int32) - 1)[part] if not there.all() else part


def _metis(neighbors: Neighbors, count: int, progress: Progress) -> Parts:
    """Multilevel k-way partitioning (Karypis and Kumar, 1998)."""
    from pymetis import CSRAdjacency, Options, part_graph

    progress("partition", 0, 1, "graphs")
    indices = np.fromfile(neighbors.folder / "indices", np.int32)
    graph = CSRAdjacency(neighbors.indptr.astype(np.int32), indices)
    found = part_graph(count, graph, recursive=False, options=Options(seed=0, ufactor=round(1000 * SLACK)))
    progress("partition", 1, 1, "graphs")
    return np.array(found.vertex_part, np.int32)


def stream(neighbors: Neighbors, count: int, progress: Progress, passes: int = PASSES) -> Parts:
    """Linear deterministic greedy partitioning, repeatedly streamed (Stanton and Kliot, 2012; Nishimura and Ugander, 2013).

    Each node in order goes to the part with most of its neighbors, weighted by the free capacity there; neighbors count where
    this pass, or else the last one, placed them. A part holds at most (1 + SLACK) N / P nodes. Needs 12 bytes per node; a pass
    reads the edges sequentially.
    """
    indptr, part = neighbors.indptr, np.full(neighbors.num_nodes, -1, np.int32)
    room = int(np.ceil((1 + SLACK) * neighbors.num_nodes / count))
    tally, touched = np.zeros(count, np.int64), np.empty(count, np.int32)
    for number in range(passes):
        size, state = np.zeros(count, np.int64), np.zeros(4, np.int64)
        for first, values in neighbors.pieces():
            _assign(indptr, values, first, part, size, room, tally, touched, state)
            progress("partition", number * neighbors.num_slots + first + len(values), passes * neighbors.num_slots, "edges")
        _assign(indptr, np.empty(0, index_dtype(neighbors.num_nodes)), int(indptr[-1]), part, size, room, tally, touched, state)
        if state[_MOVED] * STILL < neighbors.num_nodes:
            break
    return part


_NODE, _TOUCHED, _LEAST, _MOVED = range(4)
"""indices of `state`: current node, parts in its tally, where to search for an empty part, nodes that moved"""


@kernel
def _assign(
    indptr: Ints,
    values: NDArray[Any],
    begin: int,
    part: Parts,
    size: Ints,
    room: int,
    tally: Ints,
    touched: Parts,
    state: Ints,
) -> None:
    """Assign the nodes whose last neighbor is in slots begin:begin+len(values); the next node's tally is carried over."""
    v, seen, stop = state[0], state[1], begin + len(values)
    while v < len(part):
        for s in range(max(indptr[v], begin), min(indptr[v + 1], stop)):
            p = part[values[s - begin]]
            if p >= 0:
                if tally[p] == 0:
                    touched[seen] = p
                    seen += 1
                tally[p] += 1
        if indptr[v + 1] > stop:
            break
        best, most = -1, 0.0
        for i in range(seen):
            p = touched[i]
            score = tally[p] * (1.0 - size[p] / room)
            if score > most or (score == most and best >= 0 and size[p] < size[best]):
                best, most = p, score
            tally[p] = 0
        if best < 0:  # no neighbor's part has capacity: any part below the mean
            best = state[2]
            while size[best] * len(size) > v:
                best = (best + 1) % len(size)
            state[2] = (best + 1) % len(size)
        state[3] += part[v] != best
        part[v] = best
        size[best] += 1
        v, seen = v + 1, 0
    state[0], state[1] = v, seen


def numbering(part: Parts, order: NDArray[Any] | None = None) -> tuple[NDArray[Any], Ints]:
    """Return the new id of each node (int32|int64[N]) and the first new id of each part and N (int64[P+1]).

    `order` (int[N]) is the order of the nodes within a part; None: by id.

    >>> numbering(np.array([1, 0, 1], np.int32))
    (array([1, 0, 2], dtype=int32), array([0, 1, 3]))
    """
    parts = np.zeros(int(part.max(initial=0)) + 2, np.int64)
    np.cumsum(np.bincount(part, minlength=len(parts) - 1), out=parts[1:])
    new = np.empty(len(part), index_dtype(len(part)))
    _number(part, np.empty(0, new.dtype) if order is None else order, parts[:-1].copy(), new)
    return new, parts


@kernel
def _number(part: Parts, order: NDArray[Any], at: Ints, new: NDArray[Any]) -> None:
    """`order` is empty for ascending ids."""
    for i in range(len(part)):
        v = order[i] if len(order) > 0 else i
        new[v] = at[part[v]]
        at[part[v]] += 1


def by_degree(degree: Parts) -> NDArray[Any]:
    """Return the nodes by descending degree (int32[N]), ties by id, int32|int64[N]; degrees of MOST_DEGREE and more are equal.

    >>> by_degree(np.array([1, 5, 0, 5], np.int32))
    array([1, 3, 0, 2], dtype=int32)
    """
    order = np.empty(len(degree), index_dtype(len(degree)))
    _by_degree(degree, np.zeros(min(int(degree.max(initial=0)), MOST_DEGREE) + 2, np.int64), order)
    return order


@kernel
def _by_degree(degree: Parts, at: Ints, order: NDArray[Any]) -> None:
    """A counting sort; `at` is zeros, one more than there are degrees."""
    top = len(at) - 2
    for v in range(len(degree)):
        at[top - min(degree[v], top) + 1] += 1
    for k in range(top + 1):
        at[k + 1] += at[k]
    for v in range(len(degree)):
        k = top - min(degree[v], top)
        order[at[k]] = v
        at[k] += 1


@kernel
def count_ends(nodes: NDArray[Any], degree: Parts) -> None:
    """Add 1 to degree[v] for each of `nodes`, saturating at int32's maximum."""
    for v in nodes:
        degree[v] += int(degree[v] < 2**31 - 1)


@kernel
def count_cut(indptr: Ints, values: NDArray[Any], begin: int, parts: Ints, node: int) -> tuple[int, int]:
    """Return the edges between parts among slots begin:begin+len(values), and the next node; nodes are numbered by parts.

    `node` is the first with a slot there.
    """
    cut, stop = 0, begin + len(values)
    own = np.searchsorted(parts, node, side="right") - 1
    while node < len(indptr) - 1:
        while node >= parts[own + 1]:
            own += 1
        for s in range(max(indptr[node], begin), min(indptr[node + 1], stop)):
            u = values[s - begin]
            cut += u < parts[own] or u >= parts[own + 1]
        if indptr[node + 1] > stop:
            break
        node += 1
    return cut, node
