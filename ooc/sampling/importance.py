"""LABOR with importance iterations: sources that many destinations of a batch have in common are drawn more often.

A destination with more in-edges than its fan-out k would take each with probability min(1, c * weight), where c is such that k
are expected, and one with at most k in-edges takes all of them; weights are all 1 unless edges are drawn by weight. After the
first iteration a source's importance is the largest of these probabilities. With it a destination would have to take its
in-edges with probabilities min(1, c * importance), where c is such that their weighted sum has the variance of before; an
iteration sets the importance of each source to the largest of these, which lowers the expected number of distinct sources
(Balin and Catalyurek, 2023, section 3.2). A destination then takes the k in-edges with the smallest ratios of random number to
priority: at most k as in uniform sampling, never none. An in-edge's priority is the importance of its source. Drawn by weight,
that would let a destination miss its own heavy edges for light ones that others need, as it takes k however many are
important: edges of probability 1 are always taken then, and the priority of others is at most `MOST_RISE` times their own
probability. Given the numbers of the others an in-edge is taken with probability min(1, tau * priority), tau being the smallest
ratio that was not taken, and stands for the inverse of it, so sums are unbiased (priority sampling: Duffield et al., 2007;
Cohen and Kaplan, 2007).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import mix64
from ooc.sampling.edge_split import is_held_out
from ooc.sampling.kernels import Factors, Ranks, keep_smallest, push, sort_slots, uniform
from ooc.sampling.left_out import is_left_out
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.jit import kernel

CONVERGED = 1e-4
"""The iterations "*" end where one lowers the expected number of sources by a smaller share"""
MOST = 64
"""iterations at most"""
BYTES_A_SLOT = 16
"""of an in-edge: its slot and its source"""
BYTES_A_WEIGHT = 8
"""more of an in-edge that is drawn by weight"""
BYTES_A_SOURCE = 40
"""its id, importance, that of the iteration under way, random number, and the node it was met at last"""
BYTES_A_DESTINATION = 8
"""its variance"""
MOST_RISE = 4.0
"""by which factor others' need raises the priority of an in-edge that is drawn by weight"""
CERTAIN = 1 - 1e-9
"""a probability of 1 but for rounding"""
LEAST = 1e-100
"""of a weight, by its destination's largest one: squares of smaller ones are 0"""
Floats = NDArray[np.float64]


class InEdges(NamedTuple):
    """All in-edges of the nodes that a hop expands, but those left out and of weight 0."""

    indptr: Ids
    """int64[n + 1]"""
    slot: Ids
    """int64[m]"""
    source: Ids
    """int64[m]: positions among `node`"""
    node: Ids
    """int64[u]: the distinct sources"""
    weight: Floats = np.empty(0)
    """float64[m], all above 0; empty where edges are drawn alike"""


def importance_of(edges: InEdges, fanout: int, iterations: int | None) -> Floats:
    """The importance of the sources after so many iterations, float64[u]; None: until these change little."""
    importance, scratch = np.zeros(len(edges.node)), np.empty(len(edges.node))
    variance = np.empty(len(edges.indptr) - 1)
    before = begin(edges.indptr, edges.source, edges.weight, fanout, variance, importance)
    for _ in range(1, MOST if iterations is None else iterations):
        expected = iterate(edges.indptr, edges.source, edges.weight, fanout, variance, importance, scratch)
        if iterations is None and expected > before * (1 - CONVERGED):
            break
        before = expected
    return importance


@kernel
def collect(
    indptr: Ids,
    indices: AnyArray,
    weight: AnyArray,
    node: Ids,
    num_sources: int,
    left_indptr: Ids,
    left: Ids,
    held_key: np.uint64,
    share: float,
    words: NDArray[np.uint64],
    out_indptr: Ids,
    slot: Ids,
    source: Ids,
    out_weight: Floats,
) -> int:
    """Fill `InEdges` of `node`, with node ids for positions. weight: [E], or empty; edges of weight 0 are not among them.

    Returns -1, or a slot that is not there or has no valid source or weight.
    """
    at = 0
    for i in range(len(node)):
        first, last = indptr[node[i]], indptr[node[i] + 1]
        if first < 0 or last > indices.shape[0]:
            return indices.shape[0]
        out = left[left_indptr[i] : left_indptr[i + 1]] if len(left) > 0 else left
        for s in range(first, last):
            u = int(indices[s])
            if u < 0 or u >= num_sources:
                return s
            if len(weight) > 0 and not (weight[s] >= 0 and weight[s] < np.inf):
                return s
            if is_held_out(held_key, share, words, s, u, node[i]) or is_left_out(out, 0, len(out), u):
                continue
            if len(weight) > 0:
                if weight[s] == 0:
                    continue
                out_weight[at] = weight[s]
            slot[at] = s
            source[at] = u
            at += 1
        out_indptr[i + 1] = at
    return -1


@kernel
def largest_weight(weight: Floats, first: int, last: int) -> float:
    """Of in-edges first:last; 1 without weights."""
    found = 1.0 if len(weight) == 0 else 0.0
    for e in range(first, min(last, len(weight))):
        found = max(found, weight[e])
    return found


@kernel
def relative(weight: Floats, e: int, largest: float) -> float:
    """The weight of an in-edge by the destination's largest one; 1 without weights."""
    return 1.0 if len(weight) == 0 else max(weight[e] / largest, LEAST)


@kernel
def rate_of(weight: Floats, first: int, last: int, largest: float, fanout: int) -> float:
    """c of a destination with more in-edges, first:last, than its fan-out: the sum of min(1, c * weight) is the fan-out."""
    c = 0.0
    while True:  # more and more of them are certain
        rest, certain = 0.0, 0
        for e in range(first, last):
            own = relative(weight, e, largest)
            if c * own >= 1:
                certain += 1
            else:
                rest += own
        before = c
        if rest > 0:
            c = (fanout - certain) / rest
        if c <= before:
            return before


@kernel
def scale_of(source: Ids, weight: Floats, first: int, last: int, largest: float, variance: float, importance: Floats) -> float:
    """c of a destination with in-edges first:last: the sum of weight**2 / min(1, c * importance) is the variance."""
    c = 0.0
    while True:
        rest, certain = 0.0, 0.0
        for e in range(first, last):
            own, likely = relative(weight, e, largest), importance[source[e]]
            if c * likely >= 1:
                certain += own * own
            else:
                rest += own * own / likely
        before = c
        if rest > 0:
            c = rest / (variance - certain) if variance > certain else 1.0
        if c <= before or c >= 1:  # above 1 by rounding alone: importance falls
            return min(1.0, max(c, before))


@kernel
def begin(indptr: Ids, source: Ids, weight: Floats, fanout: int, variance: Floats, importance: Floats) -> float:
    """The first iteration: fill `variance` and `importance`, which is 0 before; returns the expected number of sources.

    variance: float64[n], of each destination's sum, by the square of its largest weight.
    """
    for i in range(len(indptr) - 1):
        first, last = indptr[i], indptr[i + 1]
        largest, c = largest_weight(weight, first, last), np.inf
        if last - first > fanout:
            c = rate_of(weight, first, last, largest, fanout)
        variance[i] = 0.0
        for e in range(first, last):
            own = relative(weight, e, largest)
            likely = min(1.0, c * own)
            variance[i] += own * own / likely
            importance[source[e]] = max(importance[source[e]], likely)
    return float(importance.sum())


@kernel
def iterate(
    indptr: Ids, source: Ids, weight: Floats, fanout: int, variance: Floats, importance: Floats, scratch: Floats
) -> float:
    """A further iteration, in place; returns the expected number of distinct sources. scratch: float64[u]."""
    scratch[:] = 0
    for i in range(len(indptr) - 1):
        first, last, c = indptr[i], indptr[i + 1], 1.0
        if last - first > fanout:
            c = scale_of(source, weight, first, last, largest_weight(weight, first, last), variance[i], importance)
        for e in range(first, last):
            scratch[source[e]] = max(scratch[source[e]], c * importance[source[e]])
    importance[:] = scratch
    return float(importance.sum())


@kernel
def priority(weight: Floats, e: int, largest: float, c: float, likely: float) -> float:
    """Of an in-edge whose source is likely to be taken, by its importance; c: of its destination, as of `rate_of`."""
    if len(weight) == 0:
        return likely
    own = c * relative(weight, e, largest)
    return np.inf if own >= CERTAIN else min(likely, MOST_RISE * own)


@kernel
def draw_by_importance(
    indptr: Ids,
    slot: Ids,
    source: Ids,
    node: Ids,
    weight: Floats,
    importance: Floats,
    keys: NDArray[np.uint64],
    fanout: int,
    out_slot: Ids,
    out_indptr: Ids,
    stands_for: Factors,
) -> None:
    """Draw of each destination's `InEdges` those with the smallest ratios, and what each stands for."""
    hashed, number = np.empty(len(node), np.uint64), np.empty(len(node), np.float64)
    for u in range(len(node)):
        hashed[u] = mix64(np.uint64(node[u]))
        number[u] = uniform(keys[np.int64(hashed[u] & np.uint64(3))] ^ hashed[u], 0)
    met, rank = np.full(len(node), -1), np.empty(max(1, fanout), np.float64)
    at = out_indptr[0]
    for i in range(len(indptr) - 1):
        size = 0
        if fanout > 0:
            size = _smallest(
                slot,
                source,
                weight,
                indptr[i],
                indptr[i + 1],
                i,
                met,
                hashed,
                number,
                importance,
                keys,
                rank,
                fanout,
                out_slot,
                at,
                stands_for,
            )
        at += size
        out_indptr[i + 1] = at


@kernel
def _smallest(
    slot: Ids,
    source: Ids,
    weight: Floats,
    first: int,
    last: int,
    i: int,
    met: Ids,
    hashed: NDArray[np.uint64],
    number: Floats,
    importance: Floats,
    keys: NDArray[np.uint64],
    rank: Ranks,
    fanout: int,
    out_slot: Ids,
    at: int,
    stands_for: Factors,
) -> int:
    """`draw_by_importance` at destination i: further edges from one source have numbers of their own, as of `draw_smallest`.

    The positions of edges stand in `out_slot` until all are chosen.
    """
    size, tau, largest, c = 0, np.inf, largest_weight(weight, first, last), np.inf
    if len(weight) > 0 and last - first > fanout:
        c = rate_of(weight, first, last, largest, fanout)
    for e in range(first, last):
        u = source[e]
        value = number[u]
        if met[u] == i:
            stream = keys[np.int64(hashed[u] & np.uint64(3))] ^ hashed[u]
            value = uniform(stream ^ mix64(~np.uint64(e - first)), 0)
        met[u] = i
        value /= priority(weight, e, largest, c, importance[u])
        if size < fanout:
            push(rank, out_slot, at, size, value, e)
            size += 1
        elif value < rank[0]:
            tau = rank[0]
            keep_smallest(rank, out_slot, at, size, value, e)
        else:
            tau = min(tau, value)
    sort_slots(out_slot, at, at + size)
    for j in range(at, at + size):
        e = out_slot[j]
        stands_for[j] = 1 / min(1.0, tau * priority(weight, e, largest, c, importance[source[e]]))
        out_slot[j] = slot[out_slot[j]]
    return size
