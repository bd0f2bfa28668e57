"""The sampler's kernels: count, draw, gather, relabel.

A hop is four passes over flat arrays instead of one loop over nodes. Each pass has one kind of cache miss (indptr, indices,
hash table), which software prefetching hides.

Randomness is counter-based (splitmix64, Steele et al., 2014): number j of a node is a function of (key, node, j). Offsets are
int64; `indices` may be int32 or int64, memory-mapped or not.
"""

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import mix64
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.jit import kernel
from ooc.stores.prefetch import AHEAD, prefetch

Ranks = NDArray[np.float64]
Factors = NDArray[np.float32]
"""of sampled edges: how many edges of the graph each stands for"""

LOCAL_BITS = 40
"""a table entry is (node id, stamp << LOCAL_BITS | local id); entries with another stamp are empty"""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 by the golden ratio: the factor of Fibonacci hashes, and the step of splitmix64"""
_S11, _S32 = np.uint64(11), np.uint64(32)
_UNIT = 2.0**-53
_LOCAL_MASK = (1 << LOCAL_BITS) - 1
_SMALL = 48
_DENSE = 4


@kernel
def stream_of(key: np.uint64, node: int) -> np.uint64:
    """Start of the random stream of (key, node)."""
    return mix64(key ^ mix64(np.uint64(node)))


@kernel
def uniform(stream: np.uint64, counter: int) -> float:
    """Number `counter` of a stream, in [0, 1): 53 random bits."""
    return float(np.int64(mix64(stream + np.uint64(counter) * GOLDEN) >> _S11) * _UNIT)


@kernel
def num_drawn(degree: int, fanout: int, replace: bool) -> int:
    """Edges sampled at a node of `degree` in-edges (an upper bound if edges of weight 0 are skipped)."""
    if fanout < 0 or degree == 0:
        return degree
    return fanout if replace or degree > fanout else degree


@kernel
def count_edges(indptr: Ids, node: Ids, start: int, stop: int, fanout: int, replace: bool) -> tuple[int, int, int]:
    """Return (edges, hub, degree): edges sampled at `node[start:stop]`, and the node there with the most in-edges.

    `edges` is -1 if indptr decreases at `hub` (a damaged store).
    """
    edges, hub, largest = 0, -1, -1
    for i in range(start, stop):
        if i + AHEAD < stop:
            prefetch(indptr, node[i + AHEAD])
        degree = indptr[node[i] + 1] - indptr[node[i]]
        if degree < 0:
            return -1, node[i], degree
        if degree > largest:
            hub, largest = node[i], degree
        edges += num_drawn(degree, fanout, replace)
    return edges, hub, largest


@kernel
def sort_slots(slot: Ids, start: int, stop: int) -> None:
    """Sort `slot[start:stop]` in place; short runs by insertion."""
    if stop - start > _SMALL:
        slot[start:stop].sort()
        return
    for i in range(start + 1, stop):
        value = slot[i]
        j = i
        while j > start and slot[j - 1] > value:
            slot[j] = slot[j - 1]
            j -= 1
        slot[j] = value


@kernel
def draw_distinct(stream: np.uint64, first: int, degree: int, count: int, slot: Ids, start: int) -> None:
    """Sample `count` < `degree` distinct slots of `first:first+degree`, ascending and uniformly, in O(count) draws.

    Small ratios use branch-free selection sampling (Knuth's algorithm S); others draw, sort and remove duplicates until `count`
    are distinct, which gives the first `count` distinct numbers of one sequence.
    """
    counter = 0
    at, stop = start, start + count
    if degree <= _DENSE * count:
        while at < stop:
            slot[at] = first + counter
            at += int(uniform(stream, counter) * (degree - counter) < stop - at)
            counter += 1
        return
    while at < stop:
        for i in range(at, stop):
            slot[i] = first + int(uniform(stream, counter) * degree)
            counter += 1
        sort_slots(slot, start, stop)
        at = start + 1
        for i in range(start + 1, stop):
            slot[at] = slot[i]
            at += int(slot[i] != slot[at - 1])


@kernel
def draw_uniform(
    indptr: Ids, node: Ids, start: int, stop: int, fanout: int, replace: bool, key: np.uint64, slot: Ids, edge_indptr: Ids
) -> None:
    """Sample slots of `node[start:stop]` into `slot` from `edge_indptr[start]` on; fills `edge_indptr[start+1:stop+1]`."""
    at = edge_indptr[start]
    for i in range(start, stop):
        if i + AHEAD < stop:
            prefetch(indptr, node[i + AHEAD])
        first = indptr[node[i]]
        degree = indptr[node[i] + 1] - first
        count = num_drawn(degree, fanout, replace)
        if fanout < 0 or (count == degree and not replace):
            for j in range(degree):
                slot[at + j] = first + j
        elif replace:
            stream = stream_of(key, node[i])
            for j in range(count):
                slot[at + j] = first + int(uniform(stream, j) * degree)
            sort_slots(slot, at, at + count)
        else:
            draw_distinct(stream_of(key, node[i]), first, degree, count, slot, at)
        at += count
        edge_indptr[i + 1] = at


@kernel
def keep_smallest(rank: Ranks, slot: Ids, start: int, size: int, value: float, item: int) -> None:
    """Replace the root of a max-heap by (value, item): ranks `rank[:size]`, items `slot[start:start+size]`."""
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and rank[child + 1] > rank[child]:
            child += 1
        if rank[child] <= value:
            break
        rank[i], slot[start + i] = rank[child], slot[start + child]
        i = child
    rank[i], slot[start + i] = value, item


@kernel
def push(rank: Ranks, slot: Ids, start: int, size: int, value: float, item: int) -> None:
    """Add (value, item) to the max-heap of `size` entries."""
    i = size
    while i > 0 and rank[(i - 1) // 2] < value:
        parent = (i - 1) // 2
        rank[i], slot[start + i] = rank[parent], slot[start + parent]
        i = parent
    rank[i], slot[start + i] = value, item


@kernel
def draw_keys(
    weight: AnyArray, stream: np.uint64, first: int, last: int, count: int, rank: Ranks, slot: Ids, at: int, stands_for: Factors
) -> int:
    """Sample up to `count` distinct slots by weight (Efraimidis and Spirakis, 2006); returns their number.

    Every slot of positive weight w gets the key Exp(1) / w and the `count` smallest keys win, in one pass and O(count) memory.
    Given the other keys, a winner was selected with probability 1 - exp(-w tau), tau being the smallest losing key;
    `stands_for` is its inverse (rank conditioning; Cohen and Kaplan, "Summarizing data using bottom-k sketches", 2007).
    """
    if count == 0:
        return 0  # `rank` is empty
    size, tau = 0, np.inf
    for s in range(first, last):
        w = np.float64(weight[s])
        if w > 0:
            value = -np.log(1.0 - uniform(stream, s - first)) / w
            if size < count:
                push(rank, slot, at, size, value, s)
                size += 1
            elif value < rank[0]:
                tau = rank[0]  # the largest selected key is below all that lost before
                keep_smallest(rank, slot, at, size, value, s)
            else:
                tau = min(tau, value)
    sort_slots(slot, at, at + size)
    for e in range(at, at + size):
        stands_for[e] = -1.0 / np.expm1(-tau * np.float64(weight[slot[e]]))
    return size


@kernel
def draw_cumulative(
    weight: AnyArray, stream: np.uint64, first: int, last: int, count: int, rank: Ranks, slot: Ids, at: int, stands_for: Factors
) -> int:
    """Sample `count` slots by weight with replacement; none if the weights sum to 0.

    Sorted thresholds are matched in one pass over the running sum, so memory is O(count), not O(degree). A slot is expected
    count * w / total times, the inverse of `stands_for` (Hansen and Hurwitz, 1943).
    """
    total = 0.0
    for s in range(first, last):
        total += np.float64(weight[s])
    if total <= 0:
        return 0
    for j in range(count):
        rank[j] = uniform(stream, j) * total
    rank[:count].sort()
    running, j = 0.0, 0
    for s in range(first, last):
        running += np.float64(weight[s])
        while j < count and rank[j] < running:
            slot[at + j] = s
            stands_for[at + j] = total / (count * np.float64(weight[s]))
            j += 1
    return j


@kernel
def draw_weighted(
    indptr: Ids,
    weight: AnyArray,
    node: Ids,
    start: int,
    stop: int,
    fanout: int,
    replace: bool,
    key: np.uint64,
    rank: Ranks,
    slot: Ids,
    edge_indptr: Ids,
    stands_for: Factors,
) -> int:
    """`draw_uniform` by weight (fan-out >= 0); returns -1, or the first slot whose weight is invalid or missing.

    `rank` is scratch, float64 of at least the most edges sampled at one node. Fills `stands_for` in parallel to `slot`.
    """
    at = edge_indptr[start]
    for i in range(start, stop):
        first, last = indptr[node[i]], indptr[node[i] + 1]
        if first < 0 or last > weight.shape[0]:
            return weight.shape[0]
        for s in range(first, last):
            if not (weight[s] >= 0 and weight[s] < np.inf):
                return s
        count = num_drawn(last - first, fanout, replace)
        stream = stream_of(key, node[i])
        if replace:
            at += draw_cumulative(weight, stream, first, last, count, rank, slot, at, stands_for)
        else:
            at += draw_keys(weight, stream, first, last, count, rank, slot, at, stands_for)
        edge_indptr[i + 1] = at
    return -1


@kernel
def gather(indices: AnyArray, slot: Ids, start: int, stop: int, num_nodes: int, source: Ids) -> int:
    """Set source[e] = indices[slot[e]] for e in start:stop; returns -1, or the first slot without a valid node id."""
    for e in range(start, stop):
        if e + AHEAD < stop:
            prefetch(indices, slot[e + AHEAD])
        if slot[e] < 0 or slot[e] >= indices.shape[0]:
            return slot[e]
        neighbor = int(indices[slot[e]])
        if neighbor < 0 or neighbor >= num_nodes:
            return slot[e]
        source[e] = neighbor
    return -1


@kernel
def home(node: int, mask: int) -> int:
    """Where probing for a node starts: the upper half of a multiplicative (Fibonacci) hash."""
    return int(np.int64((np.uint64(node) * GOLDEN) >> _S32)) & mask


@kernel
def relabel(table: Ids, stamp: int, ids: Ids, start: int, stop: int, node: Ids, size: int) -> int:
    """Replace `ids[start:stop]` by local ids, appending new ids to `node[:size]`; returns the new size.

    `table` is int64[capacity, 2] with a power of two above the number of nodes, open addressing with linear probing. Id and
    value share a cache line; entries of another stamp are empty, so the table need not be cleared.
    """
    mask = table.shape[0] - 1
    for e in range(start, stop):
        if e + AHEAD < stop:
            prefetch(table, 2 * home(ids[e + AHEAD], mask))
        at = home(ids[e], mask)
        while table[at, 1] >> LOCAL_BITS == stamp and table[at, 0] != ids[e]:
            at = (at + 1) & mask
        if table[at, 1] >> LOCAL_BITS != stamp:
            table[at, 0] = ids[e]
            table[at, 1] = (stamp << LOCAL_BITS) | size
            node[size] = ids[e]
            size += 1
        ids[e] = table[at, 1] & _LOCAL_MASK
    return size


@kernel
def insert(table: Ids, stamp: int, node: Ids, size: int) -> None:
    """Insert `node[:size]` with their positions; the first of equal ids wins."""
    mask = table.shape[0] - 1
    for i in range(size):
        if i + AHEAD < size:
            prefetch(table, 2 * home(node[i + AHEAD], mask))
        at = home(node[i], mask)
        while table[at, 1] >> LOCAL_BITS == stamp and table[at, 0] != node[i]:
            at = (at + 1) & mask
        if table[at, 1] >> LOCAL_BITS != stamp:
            table[at, 0] = node[i]
            table[at, 1] = (stamp << LOCAL_BITS) | i
