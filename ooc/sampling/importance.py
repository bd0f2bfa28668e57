"""LABOR with importance iterations: sources that many destinations of a batch have in common are drawn more often.

Every source of a hop has an importance, 1 at first. A destination with more in-edges than its fan-out k would have to take its
in-edges with probabilities min(1, c * importance), where c is such that a sum over them has the variance of k uniform ones; an
iteration multiplies the importance of each source by the largest c of its destinations, which lowers the expected number of
distinct sources (Balin and Catalyurek, 2023, section 3.2). A destination then takes the k in-edges with the smallest ratios of
its sources' random numbers to their importance: at most k as in uniform sampling, never none. Given the numbers of the others
an in-edge is taken with probability min(1, tau * importance), tau being the smallest ratio that was not taken, and stands for
the inverse of it, so sums are unbiased (priority sampling: Duffield et al., 2007; Cohen and Kaplan, 2007).
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
BYTES_A_SOURCE = 40
"""its id, importance, random number, largest c, and the node it was met at last"""
Floats = NDArray[np.float64]


class InEdges(NamedTuple):
    """All in-edges of the nodes that a hop expands, but those left out."""

    indptr: Ids
    """int64[n + 1]"""
    slot: Ids
    """int64[m]"""
    source: Ids
    """int64[m]: positions among `node`"""
    node: Ids
    """int64[u]: the distinct sources"""


def importance_of(edges: InEdges, fanout: int, iterations: int | None) -> Floats:
    """The importance of the sources after so many iterations, float64[u]; None: until these change little."""
    importance, largest = np.ones(len(edges.node)), np.empty(len(edges.node))
    before = np.inf
    for _ in range(MOST if iterations is None else iterations):
        expected = iterate(edges.indptr, edges.source, fanout, importance, largest)
        if iterations is None and expected > before * (1 - CONVERGED):
            break
        before = expected
    return importance


@kernel
def collect(
    indptr: Ids,
    indices: AnyArray,
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
) -> int:
    """Fill `InEdges` of `node`, with node ids for positions. Returns -1, or a slot that is not there or has no valid source."""
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
            if is_held_out(held_key, share, words, s, u, node[i]) or is_left_out(out, 0, len(out), u):
                continue
            slot[at] = s
            source[at] = u
            at += 1
        out_indptr[i + 1] = at
    return -1


@kernel
def scale_of(source: Ids, first: int, last: int, fanout: int, importance: Floats) -> float:
    """c of a destination with in-edges first:last: the sum of 1 / min(1, c * importance) is degree**2 / fanout; where it takes
    all of them, the smallest c that makes all certain."""
    degree = last - first
    if degree <= fanout:
        least = np.inf
        for e in range(first, last):
            least = min(least, importance[source[e]])
        return 1 / least
    target, c = degree * degree / fanout, 0.0
    while True:  # more and more of them are certain
        inverse, certain = 0.0, 0
        for e in range(first, last):
            own = importance[source[e]]
            if c * own >= 1:
                certain += 1
            else:
                inverse += 1 / own
        before, c = c, inverse / (target - certain)
        if c <= before or inverse == 0:
            return max(c, before)


@kernel
def iterate(indptr: Ids, source: Ids, fanout: int, importance: Floats, largest: Floats) -> float:
    """One iteration, in place; returns the expected number of distinct sources before it. largest: scratch, float64[u]."""
    largest[:] = 0
    for i in range(len(indptr) - 1):
        if indptr[i + 1] > indptr[i]:
            c = scale_of(source, indptr[i], indptr[i + 1], fanout, importance)
            for e in range(indptr[i], indptr[i + 1]):
                largest[source[e]] = max(largest[source[e]], c)
    expected = 0.0
    for u in range(len(importance)):
        importance[u] *= largest[u]
        expected += min(1.0, importance[u])
    return expected


@kernel
def draw_by_importance(
    indptr: Ids,
    slot: Ids,
    source: Ids,
    node: Ids,
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
    size, tau = 0, np.inf
    for e in range(first, last):
        u = source[e]
        value = number[u]
        if met[u] == i:
            stream = keys[np.int64(hashed[u] & np.uint64(3))] ^ hashed[u]
            value = uniform(stream ^ mix64(~np.uint64(e - first)), 0)
        met[u] = i
        value /= importance[u]
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
        stands_for[j] = 1 / min(1.0, tau * importance[source[out_slot[j]]])
        out_slot[j] = slot[out_slot[j]]
    return size
