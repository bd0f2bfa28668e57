"""A graph of ogbn-papers100M's shape that is never stored: edges, features and labels are made as slices of them are read.

    python -m tools.graphs.papers OUT.ooc --scale 0.01 --memory 4GB

At scale 1: 111,059,956 nodes, 1,615,685,872 edges (RMAT .57 .19 .19 .05, ids scattered), 128 x float16, 172 classes, and labels
of 1,207,179, 125,265 and 214,338 nodes to train on, to validate and to test. Edge i is a function of (seed, i), and a row of
features of (seed, node) alone, so any slice can be read at any time, by any number of threads. Features are noise around one of
two values in each column, by the node's class, so that classes can be learned.
"""

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import mix64
from ooc.stores.jit import kernel
from tools.bench.lib.machine import limit_memory

NODES, EDGES, WIDTH, CLASSES = 111_059_956, 1_615_685_872, 128, 172
SPLITS = {"train": 1_207_179, "val": 125_265, "test": 214_338}
SHIFT = 0.25
"""distance of a column's two values from 0, in deviations of the noise"""
_LEVELS = 1024
_SCATTER = 0x9E3779B1
_B, _C, _D = 37356, 49807, 62259
"""0.57, 0.76 and 0.95 of 2**16"""
_S16, _S32 = np.uint64(16), np.uint64(32)
_LOW10, _LOW16 = np.uint64(_LEVELS - 1), np.uint64(0xFFFF)


@dataclass(frozen=True)
class Shape:
    """Sizes of the graph at a scale."""

    nodes: int
    edges: int
    splits: dict[str, int]

    @classmethod
    def at(cls, scale: float) -> "Shape":
        """The sizes at `scale`, at least 1,000 nodes."""
        return cls(
            max(1000, round(NODES * scale)),
            max(10_000, round(EDGES * scale)),
            {name: max(10, round(count * scale)) for name, count in SPLITS.items()},
        )


class Edges:
    """Edges [2, E] as int32, made where they are read. Slices alone: `edges[:, a:b]`."""

    dtype = np.dtype(np.int32)

    def __init__(self, nodes: int, edges: int, seed: int) -> None:
        self.shape, self._nodes, self._seed = (2, edges), nodes, seed

    def __getitem__(self, key: tuple[slice, slice]) -> NDArray[np.int32]:
        ends, part = key
        first, last, _ = part.indices(self.shape[1])
        out, levels = np.empty((2, last - first), np.int32), max(1, (self._nodes - 1).bit_length())

        def fill(low: int, high: int) -> None:
            _rmat(np.uint64(self._seed), first + low, self._nodes, levels, out[:, low:high])

        _in_threads(last - first, fill)
        return out[ends]


class Features:
    """Features [N, 128] as float16, made where they are read."""

    dtype = np.dtype(np.float16)

    def __init__(self, nodes: int, seed: int) -> None:
        self.shape, self._seed = (nodes, WIDTH), seed
        rng = np.random.default_rng([seed, 2])
        self._signs = rng.integers(0, 2, (CLASSES, WIDTH), np.uint8)
        noise = np.sort(rng.standard_normal(_LEVELS))
        self._levels = np.stack([noise - SHIFT, noise + SHIFT]).astype(np.float16).view(np.uint16)

    def __getitem__(self, rows: slice) -> NDArray[np.float16]:
        first, last, _ = rows.indices(self.shape[0])
        out, classes, seed = (
            np.empty((last - first, WIDTH), np.uint16),
            classes_of(first, last, self._seed),
            np.uint64(self._seed),
        )
        looked_up = self._signs, self._levels

        def fill(low: int, high: int) -> None:
            _noise(seed, first + low, classes[low:high], *looked_up, out[low:high])

        _in_threads(last - first, fill)
        return out.view(np.float16)


class Labels:
    """Classes [N] as int16, -1 for nodes that are in no split."""

    dtype = np.dtype(np.int16)

    def __init__(self, nodes: int, seed: int, labelled: NDArray[np.int64]) -> None:
        self.shape, self._seed, self._labelled = (nodes,), seed, np.sort(labelled)

    def __getitem__(self, rows: slice) -> NDArray[np.int16]:
        first, last, _ = rows.indices(self.shape[0])
        low, high = np.searchsorted(self._labelled, [first, last])
        here = self._labelled[low:high] - first
        found = np.full(last - first, -1, np.int16)
        found[here] = classes_of(first, last, self._seed)[here]
        return found


def _in_threads(count: int, fill: Callable[[int, int], None]) -> None:
    """Call fill(low, high) for ranges that are all of 0..count-1, at once, one for each core."""
    threads = len(os.sched_getaffinity(0))
    bounds = [count * number // threads for number in range(threads + 1)]
    for _ in _pool(threads).map(fill, bounds[:-1], bounds[1:]):
        pass


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "papers")


def classes_of(first: int, last: int, seed: int) -> NDArray[np.int16]:
    """int16[last - first]: the classes of nodes first..last-1."""
    found = np.empty(last - first, np.int16)
    _classes(np.uint64(seed), first, found)
    return found


def split_ids(shape: Shape, seed: int) -> dict[str, NDArray[np.int64]]:
    """Name -> ids of a split's nodes, drawn without replacement."""
    rng, count = np.random.default_rng([seed, 4]), sum(shape.splits.values())
    drawn = np.unique(rng.integers(0, shape.nodes, count + count // 16 + 64))
    ids = rng.permutation(drawn)[:count]
    return dict(zip(shape.splits, np.split(ids, np.cumsum([*shape.splits.values()])[:-1]), strict=True))


def papers(scale: float = 1.0, seed: int = 0) -> Any:
    """A PyG `Data` of the graph, for `ooc.from_data`; holds little but the ids of the splits."""
    from torch_geometric.data import Data

    shape = Shape.at(scale)
    splits = split_ids(shape, seed)
    return Data(
        x=Features(shape.nodes, seed),
        edge_index=Edges(shape.nodes, shape.edges, seed),
        y=Labels(shape.nodes, seed, np.concatenate([*splits.values()])),
        **{f"{name}_idx": ids for name, ids in splits.items()},
    )


@kernel
def _rmat(seed: np.uint64, first: int, nodes: int, levels: int, out: NDArray[np.int32]) -> None:
    mask, stream, rounds = (1 << levels) - 1, mix64(seed), -(-levels // 4)
    for i in range(out.shape[1]):
        state = mix64(stream ^ np.uint64(first + i))
        src, dst = np.int64(0), np.int64(0)
        for step in range(rounds):
            bits = mix64(state + np.uint64(step))
            for _ in range(4):
                draw = np.int64(bits & _LOW16)
                bits >>= _S16
                low = draw >= _C
                src = np.int64(2 * src + low)
                dst = np.int64(2 * dst + (((draw >= _B) & (not low)) | (draw >= _D)))
        out[0, i] = _scattered(src, mask, nodes)
        out[1, i] = _scattered(dst, mask, nodes)


@kernel
def _scattered(node: np.int64, mask: int, nodes: int) -> np.int64:
    """An odd multiplier is a bijection modulo a power of two, of which more than half are nodes."""
    found = (node & mask) * _SCATTER & mask
    return found - nodes if found >= nodes else found


@kernel
def _classes(seed: np.uint64, first: int, out: NDArray[np.int16]) -> None:
    stream = mix64(seed + np.uint64(1))
    for i in range(len(out)):
        out[i] = (mix64(stream ^ np.uint64(first + i)) >> _S32) % np.uint64(CLASSES)


@kernel
def _noise(
    seed: np.uint64,
    first: int,
    label: NDArray[np.int16],
    signs: NDArray[np.uint8],
    levels: NDArray[np.uint16],
    out: NDArray[np.uint16],
) -> None:
    stream = mix64(seed + np.uint64(2))
    for i in range(len(out)):
        state = mix64(stream ^ np.uint64(first + i))
        for column in range(0, WIDTH, 4):
            bits = mix64(state + np.uint64(column))
            for each in range(4):
                out[i, column + each] = levels[signs[label[i], column + each], bits & _LOW10]
                bits >>= _S16


def main() -> None:
    """Parse the command line and build the store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--limit", default="", help="of memory, page cache counted; needs root")
    a = parser.parse_args()
    if a.limit:
        limit_memory(a.limit)
    import ooc  # after the limit: memory counts where it is first touched

    with ooc.from_data(papers(a.scale, a.seed), a.out, dtype="float16", edge_ids=False, memory=a.memory) as ds:
        print(ds)


if __name__ == "__main__":
    main()
