"""GraphSAINT's normalization (Zeng et al., 2020), estimated from subgraphs sampled in advance.

Each edge of a subgraph is weighted by C_v / C_uv in aggregations (C: number of subgraphs with the node or edge) and each node
by M / C_v of M subgraphs in the loss, so both are unbiased. The current batch is counted too, which keeps the quotients finite.
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
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.range_io import ahead
from ooc.sampling.saint import SaintSampler
from stores.arrays.rows import ArrayRows, Ids, Rows
from stores.arrays.segment_rows import SegmentRows
from stores.errors import StoreError
from stores.io.atomic import disk_errors, partial_path, publish, write_file
from stores.io.segments import Segments
from stores.jit import kernel

ABOUT, NODES, EDGES = "counts.json", "nodes.npy", "edges.bin"
MAPPED_BYTES = 64 * 2**20
"""limit on mapped edge counts while counting; larger counts are read by plan during training"""
_PAGE, _THREADS = mmap.PAGESIZE, 2


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


_MOST = np.iinfo(np.uint16).max


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
