"""Cache policies on one recorded trace: share of row accesses that miss, for several cache sizes.

    python -m tools.bench.sampled.cache_policies STORE --fanout 10,10 --batches 100 --plot policies.png

The trace is the node ids of the batches of `tools.bench.sampled.steps`, recomputed (see `tools.bench.sampled.trace`), each node
once per batch; with --unit pages their 4 KiB pages. Policies:

- none: every access misses.
- LRU, SIEVE (Zhang et al., NSDI 2024): one access at a time, knowing the past.
- look-ahead: `ooc`'s planner (`ooc.loading.superbatch_plan`, `ooc.loading.feature_cache`) with exactly that many rows of
  memory: superbatches sampled ahead, each row read once, rows carried over if memory allows.
- Belady (1966, MIN): knows the whole trace and evicts the farthest next use; optimal.

Every access puts the row into the cache. Prints JSON.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.read_strategy import ReadStrategy
from ooc.loading.superbatch import Superbatches
from ooc.loading.superbatch_plan import SuperbatchPlanner
from ooc.stores.jit import kernel
from tools.bench.lib.chart import Panel, lines
from tools.bench.lib.machine import describe

Trace = NDArray[np.int32]
"""int32[t]: the id of every access, batch after batch"""
POLICIES = ("none", "LRU", "SIEVE", "look-ahead", "Belady")
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)


def joined(batches: Iterable[NDArray[Any]]) -> Trace:
    """Concatenate batches of ids to a trace."""
    parts = [ids.astype(np.int32) for ids in batches]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


@kernel
def lru(trace: Trace, ids: int, capacity: int) -> int:
    """Misses of a least-recently-used cache of `capacity` >= 1; all ids are below `ids`."""
    newer, older = np.full(ids + 1, -1, np.int32), np.full(ids + 1, -1, np.int32)
    newer[ids] = older[ids] = ids  # a ring; `ids` stands between the newest and the oldest; newer < 0: not in the cache
    held = misses = 0
    for v in trace:
        if newer[v] >= 0:
            older[newer[v]], newer[older[v]] = older[v], newer[v]
        else:
            misses += 1
            if held == capacity:
                oldest = newer[ids]
                newer[ids] = newer[oldest]
                older[newer[oldest]] = ids
                newer[oldest] = -1
            else:
                held += 1
        newest = older[ids]
        older[v], newer[v] = newest, ids
        newer[newest] = older[ids] = v
    return misses


@kernel
def sieve(trace: Trace, ids: int, capacity: int) -> int:
    """Misses of SIEVE: a queue in order of arrival and a hand that moves from old to new, sparing rows used again.

    A hit only marks its row; the hand removes marks as it passes and evicts the first unmarked row, and continues from there
    next time, after the newest with the oldest.
    """
    newer, older = np.full(ids + 1, -1, np.int32), np.full(ids + 1, -1, np.int32)
    newer[ids] = older[ids] = ids  # as in `lru`
    used = np.zeros(ids, np.bool_)
    held = misses = 0
    hand = ids
    for v in trace:
        if newer[v] >= 0:
            used[v] = True
            continue
        misses += 1
        if held == capacity:
            if hand == ids:
                hand = newer[ids]
            while used[hand]:
                used[hand] = False
                hand = newer[hand]
                if hand == ids:
                    hand = newer[ids]
            gone = hand
            hand = newer[gone]
            older[newer[gone]], newer[older[gone]] = older[gone], newer[gone]
            newer[gone] = -1
        else:
            held += 1
        newest = older[ids]
        older[v], newer[v] = newest, ids
        newer[newest] = older[ids] = v
    return misses


@kernel
def next_uses(trace: Trace, ids: int) -> NDArray[np.int32]:
    """int32[t]: when the id of each access is accessed next; len(trace) if never."""
    after = np.empty(len(trace), np.int32)
    last = np.full(ids, len(trace), np.int32)
    for t in range(len(trace) - 1, -1, -1):
        after[t] = last[trace[t]]
        last[trace[t]] = t
    return after


@kernel
def _put(bits: NDArray[np.uint64], first: NDArray[np.int64], key: int) -> None:
    """Put a key into a set of keys: a tree of bit maps, each bit saying whether a word of the level below is not 0."""
    for level in range(len(first)):
        word = first[level] + (key >> 6)
        known = bits[word] != 0
        bits[word] |= np.uint64(1) << np.uint64(key & 63)
        if known:
            return
        key >>= 6


@kernel
def _remove(bits: NDArray[np.uint64], first: NDArray[np.int64], key: int) -> None:
    for level in range(len(first)):
        word = first[level] + (key >> 6)
        bits[word] &= ~(np.uint64(1) << np.uint64(key & 63))
        if bits[word] != 0:
            return
        key >>= 6


@kernel
def _largest(bits: NDArray[np.uint64], first: NDArray[np.int64]) -> int:
    """The largest key of a set that is not empty."""
    key = 0
    for level in range(len(first) - 1, -1, -1):
        word, bit = bits[first[level] + key], 0
        for step in (32, 16, 8, 4, 2, 1):
            if word >> np.uint64(step) != 0:
                word >>= np.uint64(step)
                bit += step
        key = key << 6 | bit
    return key


@kernel
def _belady(trace: Trace, after: NDArray[np.int32], ids: int, capacity: int, first: NDArray[np.int64], words: int) -> int:
    bits = np.zeros(words, np.uint64)  # the next uses of what is in the cache and used again
    cached = np.zeros(ids, np.bool_)
    over = np.empty(capacity, np.int32)  # what is in the cache and never used again
    held = misses = num_over = 0
    for t in range(len(trace)):
        v = trace[t]
        if cached[v]:
            _remove(bits, first, t)
        else:
            misses += 1
            if held < capacity:
                held += 1
            elif num_over:
                num_over -= 1
                cached[over[num_over]] = False
            else:
                farthest = _largest(bits, first)
                _remove(bits, first, farthest)
                cached[trace[farthest]] = False
            cached[v] = True
        if after[t] < len(trace):
            _put(bits, first, after[t])
        else:
            over[num_over] = v
            num_over += 1
    return misses


def belady(trace: Trace, ids: int, capacity: int) -> int:
    """Misses of Belady's MIN with `capacity` >= 1; ids: all are below it. Takes 4 bytes an access besides the trace.

    Raises ValueError for a trace of 2**31 accesses.

    >>> belady(np.array([1, 2, 3, 1, 2], np.int32), ids=4, capacity=2)
    4
    """
    if len(trace) >= 2**31 - 1:
        raise ValueError(f"a trace of {len(trace)} accesses: fewer than 2**31 - 1 are possible; take fewer batches")
    sizes = [max(1, -(-len(trace) // 64))]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 64))
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return int(_belady(trace, next_uses(trace, ids), ids, min(capacity, max(1, len(trace))), first[:-1], int(first[-1])))


@dataclass(frozen=True)
class FixedRoom(SuperbatchPlanner):
    """The planner with a given number of rows in memory, whatever else a loader holds."""

    rows: int = 0

    def rows_limits(self, kept: int, batch: int, active: int, drawing: int) -> list[int]:
        return [self.rows]


def look_ahead(batches: Iterable[NDArray[Any]], strategy: ReadStrategy, capacity: int) -> int | None:
    """Misses of `ooc`'s planner: rows that its superbatches read; None where one of a single batch takes more than `capacity`.

    strategy: of any loader of superbatches; the batches are read as they are, whatever that loader's are.
    """
    nothing = np.empty(0, np.int64)
    drawn = (
        SampledBatch(
            step, True, nothing, Subgraph(ids.astype(np.int64), np.zeros(1, np.int64), nothing, nothing, (len(ids),), ())
        )
        for step, ids in enumerate(batches)
    )
    misses = 0
    assert isinstance(strategy, Superbatches)
    planner = FixedRoom(strategy.stages, strategy.memory, 0, (CachedNodes.none(),), first_bytes=2**62, rows=capacity)
    for superbatch in planner.plan(drawn):
        (rows,) = superbatch.arrays
        if rows.used.limit > capacity:
            return None
        misses += len(rows.missing)
    return misses


def miss_ratios(batches: list[NDArray[np.int32]], ids: int, capacity: int, strategy: ReadStrategy) -> dict[str, float | None]:
    """The share of accesses that miss, of every policy; batches: the ids of each, all below `ids`."""
    trace = joined(batches)
    misses: dict[str, int | None] = {
        "none": len(trace),
        "LRU": int(lru(trace, ids, capacity)),
        "SIEVE": int(sieve(trace, ids, capacity)),
        "look-ahead": look_ahead(batches, strategy, capacity),
        "Belady": belady(trace, ids, capacity),
    }
    return {name: None if count is None else count / len(trace) for name, count in misses.items()}


def replay(a: argparse.Namespace) -> dict[str, Any]:
    """Draw the trace, run every policy at every size."""
    from tools.bench.lib.pages import PAGE_BYTES, pages_of
    from tools.bench.sampled.trace import Trace as Run
    from tools.bench.sampled.trace import settings

    with Run.of(a.store, settings(a.store, a.fanout, a.batches, a.batch_size, a.seed)) as run:
        row_bytes, count = run.row_bytes, run.ds.num_nodes
        nodes = run.nodes()
        if a.unit == "pages":
            nodes, count = (pages_of(np.sort(ids), row_bytes) for ids in nodes), -(-count * row_bytes // PAGE_BYTES)
        batches = [ids.astype(np.int32) for ids in nodes]
        found = [
            {"share": share, "capacity": capacity, **miss_ratios(batches, count, capacity, run.strategy)}
            for share in a.shares
            for capacity in [max(1, round(share * count))]
        ]
    accesses = sum(map(len, batches))
    return {"unit": a.unit, "batches": len(batches), "accesses": accesses, "of": count, "miss_ratios": found}


def plot(results: dict[str, Any], path: Path) -> None:
    """Miss ratio over the size of the cache, a line a policy."""
    sizes = [each["share"] for each in results["miss_ratios"]]
    series = {name: [each[name] for each in results["miss_ratios"]] for name in POLICIES}
    lines(path, [Panel(sizes, series, f"cache, share of all {results['unit']}", "miss ratio")])


def main() -> None:
    """Parse the command line, replay, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unit", choices=["rows", "pages"], default="rows")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="sizes, as shares of all rows or pages")
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    results = replay(a)
    if a.plot:
        plot(results, a.plot)
    print(json.dumps({"machine": describe(), "store": a.store.name, "fanout": a.fanout, **results}))


if __name__ == "__main__":
    main()
