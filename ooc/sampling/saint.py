"""GraphSAINT (Zeng et al., 2020): sample a set of nodes and take every edge between them; and the normalization of that.

Samples are counter-based, so a subgraph is a function of its key. A random walk reads one batch of slots per step, and the
subgraph reads its nodes' runs of slots.

The normalization is estimated from subgraphs sampled in advance. Each edge of a subgraph is weighted by C_v / C_uv in
aggregations (C: number of subgraphs with the node or edge) and each node by M / C_v of M subgraphs in the loss, so both are
unbiased. The current batch is counted too, which keeps the quotients finite.
"""

import itertools
import json
import mmap
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import words_for
from ooc.runtime.range_io import ahead
from ooc.sampling.cluster import PIECE_SLOTS, Edges, InducedSubgraph, Limit, Words, edges_of, members, need_of, ones
from ooc.sampling.kernels import stream_of, uniform
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows
from ooc.stores.arrays.segment_rows import SegmentRows
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.stores.graph import Graph
from ooc.stores.io.atomic import disk_errors, partial_path, publish, write_file
from ooc.stores.io.segments import Segments
from ooc.stores.jit import kernel

Kind = Literal["walk", "node", "edge"]
DAMAGED = "a slot holds no valid node id, or indptr decreases: the store is damaged; run `ooc verify` on it"
ABOUT, NODES, EDGES = "counts.json", "nodes.npy", "edges.bin"
MAPPED_BYTES = 64 * 2**20
"""limit on mapped edge counts while counting; larger counts are read by plan during training"""
_PAGE, _THREADS = mmap.PAGESIZE, 2
_MOST = np.iinfo(np.uint16).max


class Draw(NamedTuple):
    """What to sample for a subgraph, always with replacement.

    "walk": `draws` uniform roots of walks of `length` steps along in-edges. "edge": `draws` edges, as walks of one step.
    "node": `draws` nodes in proportion to in-degree + 1.
    """

    kind: Kind
    draws: int
    length: int = 1

    @property
    def most_nodes(self) -> int:
        return self.draws * (1 if self.kind == "node" else 1 + self.length)


def check(draw: Draw) -> Draw:
    """Return `draw` if it is valid. Raises ConfigError otherwise."""
    if draw.kind not in ("walk", "node", "edge"):
        raise ConfigError(f"GraphSAINT sampler {draw.kind!r} is unknown: use walk, node or edge")
    if draw.draws < 1 or draw.length < 1 or (draw.kind == "edge" and draw.length != 1):
        raise ConfigError(
            f"a {draw.kind} sampler with {draw.draws} draws and {draw.length} steps: give at least 1 (edge: 1 step)"
        )
    return draw


def sample_nodes(graph: Graph, draw: Draw, key: int, indices: Rows) -> tuple[Ids, int]:
    """Return the distinct sampled nodes, int64[n] ascending, and the bytes read.

    An edge (u, v) is sampled in proportion to 1 / (in-degree of v); in a symmetric graph, where its reverse counts too, this is
    1/deg(u) + 1/deg(v) as in the paper. Nodes are sampled by in-degree + 1, so that every node can occur (the paper uses
    squared column norms of the adjacency, PyG the degree).
    """
    indptr, stream = np.asarray(graph.indptr), np.uint64(key & (2**64 - 1))
    first = np.empty(draw.draws, np.int64)
    if draw.kind == "node":
        _by_degree(indptr, stream, first)
        return np.unique(first), 0
    _uniformly(len(indptr) - 1, stream, first)
    visited, nbytes = [first], 0
    for step in range(draw.length):
        at, slot = visited[-1], np.empty(draw.draws, np.int64)
        moving = slot[: _step(indptr, at, stream, step, slot)]
        values = np.empty(len(moving), indices.dtype)
        nbytes += indices.read(moving, values)
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < len(indptr) - 1:
            raise StoreError(DAMAGED)
        visited.append(_moved(indptr, at, values))
    return np.unique(np.concatenate(visited)), nbytes


def induce(
    graph: Graph,
    node: Ids,
    edges: Edges | None = None,
    max_bytes: int | None = None,
    row_bytes: int = 0,
    edge_bytes: int = 0,
) -> InducedSubgraph:
    """Return the subgraph of `node` (int64[n], ascending, distinct) with every edge between them, as `cluster.cut` does.

    Reads all their in-edges, PIECE_SLOTS at a time, with memory for one piece and N/4 bytes.
    """
    edges, indptr, limit = edges or edges_of(graph), np.asarray(graph.indptr), (max_bytes, row_bytes, edge_bytes)
    start = np.zeros(len(node) + 1, np.int64)  # of each node's in-edges, which are read as one sequence of positions
    np.cumsum(indptr[node + 1] - indptr[node], out=start[1:])
    if (np.diff(start) < 0).any():
        raise StoreError(DAMAGED)
    seen = np.zeros(-(-graph.num_nodes // 64), np.uint64)
    _mark(node, seen)
    before, out = members(seen)[1], np.zeros(len(node) + 1, np.int64)
    total = int(start[-1])
    size = row = nbytes = 0
    if max_bytes is not None and need_of(limit, edges, len(node), 0) > max_bytes:
        raise _too_large(limit, edges, node, _count_from(0, indptr, node, start, edges.indices, seen))
    source, kept = np.empty(total, np.int64), np.empty(total, np.int64)
    for begin in range(0, total, PIECE_SLOTS):
        slot = np.empty(min(PIECE_SLOTS, total - begin), np.int64)
        _slots(indptr, node, start, row, begin, slot)
        values = np.empty(len(slot), edges.indices.dtype)
        nbytes += edges.indices.read(slot, values)
        place = start, begin, row
        row, size = _keep(values, slot, place, len(indptr) - 1, seen, before, source, kept, size, out)
        if row < 0:
            raise StoreError(DAMAGED)
        if max_bytes is not None and need_of(limit, edges, len(node), size) > max_bytes:
            size += _count_from(begin + PIECE_SLOTS, indptr, node, start, edges.indices, seen)
            raise _too_large(limit, edges, node, size)
    out[row + 1 :] = size
    source.resize(size, refcheck=False)
    kept.resize(size, refcheck=False)
    columns = {}
    for name, rows in edges.columns.items():
        columns[name] = np.empty(size, rows.dtype)
        nbytes += rows.read(kept, columns[name])
    return InducedSubgraph(Subgraph(node, out, source, kept, (len(node),), (size,), columns=columns), nbytes)


def _too_large(limit: Limit, edges: Edges, node: Ids, num_edges: int) -> BudgetError:
    assert limit[0] is not None
    words = words_for(need_of(limit, edges, len(node), num_edges), limit[0])
    advice = "sample fewer roots, nodes or edges, use shorter walks, or more memory"
    return BudgetError(f"a subgraph of {len(node)} nodes and {num_edges} edges needs {words}; {advice}")


def _count_from(begin: int, indptr: Ids, node: Ids, start: Ids, indices: Rows, seen: Words) -> int:
    """How many in-edges from position `begin` on come from marked nodes: all are named where a subgraph does not fit."""
    count = 0
    for first in range(begin, int(start[-1]), PIECE_SLOTS):
        slot = np.empty(min(PIECE_SLOTS, int(start[-1]) - first), np.int64)
        _slots(indptr, node, start, int(np.searchsorted(start, first, "right")) - 1, first, slot)
        values = np.empty(len(slot), indices.dtype)
        indices.read(slot, values)
        count += int((seen[values >> 6] >> (values & 63).astype(np.uint64) & np.uint64(1)).sum())
    return count


class SaintSampler(NamedTuple):
    """Samples one subgraph per key; for `max_bytes`, `row_bytes` and `edge_bytes` see `induce`."""

    graph: Graph
    how: Draw
    edges: Edges | None = None
    max_bytes: int | None = None
    row_bytes: int = 0
    edge_bytes: int = 0

    def draw(self, key: int) -> InducedSubgraph:
        """Return the subgraph of `key`. Raises BudgetError if it does not fit, StoreError if the topology is damaged."""
        edges = self.edges or edges_of(self.graph)
        node, nbytes = sample_nodes(self.graph, self.how, key, edges.indices)
        result = induce(self.graph, node, edges, self.max_bytes, self.row_bytes, self.edge_bytes)
        return result._replace(nbytes=nbytes + result.nbytes)


class SaintCounts:
    """In how many of `samples` subgraphs each node (uint32[N], in memory) and each slot (uint16, saturating) occurred."""

    def __init__(self, samples: int, nodes: NDArray[np.uint32], edges: Rows, about: dict[str, Any]) -> None:
        self.samples, self.nodes, self.edges, self.about = samples, nodes, edges, about

    @classmethod
    def open(cls, folder: Path, engine: str = "auto") -> Self:
        """Open the counts in `folder`. Raises StoreError if they are damaged."""
        try:
            meta = json.loads((folder / ABOUT).read_bytes())
            nodes = np.load(folder / NODES)
            path, slots = folder / EDGES, int(meta["slots"])
            size = path.stat().st_size
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"{folder}: GraphSAINT's normalization counts are damaged ({error}); delete the folder") from None
        if size <= MAPPED_BYTES:
            edges: Rows = ArrayRows(np.fromfile(path, np.uint16, slots))
        else:
            edges = SegmentRows((slots,), np.dtype(np.uint16), Segments((path,), np.array([size])), engine)
        return cls(int(meta["samples"]), nodes, edges, meta["about"])

    def stands_for(self, subgraph: Subgraph) -> tuple[NDArray[np.float32], int]:
        """Return C_v / C_uv of each edge, float32[e], counting the subgraph itself, and the bytes read."""
        edge = np.empty(len(subgraph.slot), np.uint16)
        nbytes = self.edges.read(subgraph.slot, edge)
        node = np.repeat(self.nodes[subgraph.node[: len(subgraph.indptr) - 1]], np.diff(subgraph.indptr))
        node = np.where(edge == _MOST, np.minimum(node, _MOST), node)  # a saturated edge counts for one
        return (node.astype(np.float32) + 1) / (edge.astype(np.float32) + 1), nbytes

    def weights(self, node: Ids) -> NDArray[np.float32]:
        """Return the loss weight M / C_v of each node, float32[n], counting the subgraph itself."""
        return np.float32(self.samples + 1) / (self.nodes[node].astype(np.float32) + 1)

    def close(self) -> None:
        self.edges.close()


def count(sampler: SaintSampler, folder: Path, seed: int, coverage: float, about: dict[str, Any]) -> int:
    """Sample subgraphs until they have `coverage` times N nodes in total, and publish the counts in `folder` atomically.

    Needs 4 bytes per node, MAPPED_BYTES of edge counts and a few subgraphs. `about` identifies what was counted and is stored
    with the counts. Returns the bytes of edges read.
    """
    graph, partial = sampler.graph, partial_path(folder)
    with disk_errors(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        size = max(_PAGE, -(-2 * graph.num_edges // _PAGE) * _PAGE)
        with (partial / EDGES).open("wb") as file:
            file.truncate(size)
        edges = np.memmap(partial / EDGES, np.uint16, "r+")
        nodes, samples, remaining = np.zeros(graph.num_nodes, np.uint32), 0, coverage * graph.num_nodes
        touched = nbytes = 0
        keys = (key(seed, Purpose.NORMALISE, step=step) for step in itertools.count())
        with ThreadPoolExecutor(_THREADS, "ooc-saint") as pool:
            for subgraph, read_bytes in ahead(pool, sampler.draw, keys, _THREADS):
                nbytes += read_bytes
                _add(subgraph.node, subgraph.slot, nodes, edges)
                samples, remaining = samples + 1, remaining - len(subgraph.node)
                touched += len(subgraph.slot)
                if size > MAPPED_BYTES and touched * _PAGE > MAPPED_BYTES:
                    touched = 0
                    edges._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]  # unmaps them; the file is unchanged
                if remaining <= 0:
                    break
        edges.flush()
        np.save(partial / NODES, nodes)
    del edges
    write_file(partial / ABOUT, json.dumps({"samples": samples, "slots": graph.num_edges, "about": about}).encode())
    publish(partial, folder)
    return nbytes


@kernel
def _add(node: Ids, slot: Ids, nodes: NDArray[np.uint32], edges: NDArray[np.uint16]) -> None:
    for i in range(len(node)):
        nodes[node[i]] += np.uint32(1)
    for i in range(len(slot)):
        if edges[slot[i]] < np.uint16(65535):
            edges[slot[i]] += np.uint16(1)


@dataclass
class Normalisation:
    """The counts in `folder`, computed on first use by one thread; `read` is called with the bytes read."""

    sampler: SaintSampler
    folder: Path
    seed: int
    coverage: float
    about: dict[str, Any]
    engine: str
    read: Callable[[int], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: SaintCounts | None = None

    def counts(self) -> SaintCounts:
        """Return the counts. Raises StoreError if they are damaged, BudgetError if a subgraph does not fit."""
        with self._lock:
            if self._counts is None:
                if not (self.folder / ABOUT).exists():
                    self.read(count(self.sampler, self.folder, self.seed, self.coverage, self.about))
                counts = SaintCounts.open(self.folder, self.engine)
                if counts.about != self.about:
                    raise StoreError(f"{self.folder} has the counts of another sampler, seed or store: delete it")
                self._counts = counts
            return self._counts

    def close(self) -> None:
        with self._lock:
            if self._counts is not None:
                self._counts.close()


@kernel
def _uniformly(num_nodes: int, key: np.uint64, out: Ids) -> None:
    for i in range(len(out)):
        out[i] = int(uniform(stream_of(key, i), 0) * num_nodes)


@kernel
def _by_degree(indptr: Ids, key: np.uint64, out: Ids) -> None:
    """Sample nodes in proportion to in-degree + 1: node v has positions indptr[v] + v .. indptr[v + 1] + v of E + N."""
    num_nodes = len(indptr) - 1
    total = indptr[num_nodes] + num_nodes
    for i in range(len(out)):
        place = int(uniform(stream_of(key, i), 0) * total)
        low, high = 0, num_nodes
        while high - low > 1:
            middle = (low + high) // 2
            if indptr[middle] + middle <= place:
                low = middle
            else:
                high = middle
        out[i] = low


@kernel
def _step(indptr: Ids, at: Ids, key: np.uint64, step: int, slot: Ids) -> int:
    """Sample one slot of each node that has in-edges; returns their number."""
    size = 0
    for i in range(len(at)):
        degree = indptr[at[i] + 1] - indptr[at[i]]
        if degree > 0:
            slot[size] = indptr[at[i]] + int(uniform(stream_of(key, i), step + 1) * degree)
            size += 1
    return size


@kernel
def _moved(indptr: Ids, at: Ids, values: AnyArray) -> Ids:
    """New positions of the walks; those at nodes without in-edges stay."""
    out, k = at.copy(), 0
    for i in range(len(at)):
        if indptr[at[i] + 1] > indptr[at[i]]:
            out[i] = values[k]
            k += 1
    return out


@kernel
def _mark(node: Ids, seen: Words) -> None:
    for i in range(len(node)):
        seen[node[i] >> 6] |= np.uint64(1) << np.uint64(node[i] & 63)


@kernel
def _slots(indptr: Ids, node: Ids, start: Ids, row: int, begin: int, slot: Ids) -> None:
    """Slots at positions begin.. of the nodes' concatenated in-edges; `row` is the first node with one there."""
    i = 0
    while i < len(slot):
        while start[row + 1] <= begin + i:
            row += 1
        for place in range(begin + i, min(start[row + 1], begin + len(slot))):
            slot[i] = indptr[node[row]] + place - start[row]
            i += 1


@kernel
def _keep(
    values: AnyArray,
    slot: Ids,
    place: tuple[Ids, int, int],
    num_nodes: int,
    seen: Words,
    before: Ids,
    source: Ids,
    kept: Ids,
    size: int,
    out: Ids,
) -> tuple[int, int]:
    """Keep the edges whose source is in `seen`; returns (next row, edges so far), or (-1, 0) for an invalid source."""
    start, begin, row = place
    for i in range(len(values)):
        while start[row + 1] <= begin + i:
            row += 1
            out[row] = size
        u = int(values[i])
        if u < 0 or u >= num_nodes:
            return -1, 0
        bit = np.uint64(1) << np.uint64(u & 63)
        if seen[u >> 6] & bit != np.uint64(0):
            source[size] = before[u >> 6] + ones(seen[u >> 6] & (bit - np.uint64(1)))
            kept[size] = slot[i]
            size += 1
    return row, size
