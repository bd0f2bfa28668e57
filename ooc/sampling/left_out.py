"""Edges left out of draws: those that a model is to predict must not carry messages.

These are the links of a batch, which meet at its seeds, and the edges held out for validation and test. Slots of a node are in
order of time and edge id, not of their source, so the slots to leave out are not known before their sources are read. A node
draws as many more slots as it may have to leave out; of those that remain its fan-out is chosen, uniformly again, so the sample
is uniform among the other edges. Where too few remain (several edges between a pair), where the node has few edges, and where
edges are drawn by weight, all its slots are read.
"""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ooc.sampling.edge_split import HeldOut, is_held_out
from ooc.sampling.kernels import (
    Factors,
    Ranks,
    draw_cumulative,
    draw_distinct,
    draw_keys,
    draw_uniform,
    draw_weighted,
    num_drawn,
    sort_slots,
    stream_of,
    uniform,
)
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.jit import kernel

_WHOLE = 4
"""A node with at most so many times the slots it would draw reads all of them: they lie together"""
_DEVIATIONS = 6.0
"""By so many standard deviations more slots are drawn than are held out on average, so that hardly a node has too few"""
NOTHING = HeldOut(np.uint64(0), 0.0)
"""no edges"""


class LeftOut(NamedTuple):
    """The sources left out of the draws at a batch's seeds: of seed i, `node[indptr[i]:indptr[i + 1]]`.

    >>> LeftOut.of(np.array([1, 0]), np.array([7, 9]), num_seeds=2)
    LeftOut(indptr=array([0, 1, 2]), node=array([9, 7]))
    """

    indptr: Ids
    """int64[b+1]"""
    node: Ids
    """int64[k]: node ids, ascending at each seed"""

    @classmethod
    def of(cls, seed: Ids, node: Ids, num_seeds: int) -> Self:
        """That leaves `node[i]` out of the draw at `seed[i]`, a position among the seeds; int64[k] each, repeated or not."""
        order = np.lexsort((node, seed))
        seed, node = seed[order], node[order]
        new = np.ones(len(seed), bool)
        new[1:] = (seed[1:] != seed[:-1]) | (node[1:] != node[:-1])
        return cls(np.searchsorted(seed[new], np.arange(num_seeds + 1)), node[new])


class FilteredDraws:
    """The draws of one hop of a batch, at nodes with edges to leave out.

    left_out: of the seeds; None at later hops. held_out: at every node. node: int64[n], those that draw.
    """

    def __init__(
        self,
        left_out: LeftOut | None,
        held_out: HeldOut | None,
        indptr: Ids,
        node: Ids,
        fanout: int,
        replace: bool,
        weighted: bool,
    ) -> None:
        self.left_out = LeftOut(np.zeros(len(node) + 1, np.int64), np.empty(0, np.int64)) if left_out is None else left_out
        self.held_out, self.fanout, self.replace = held_out or NOTHING, fanout, replace
        self.take = np.empty(len(node), np.int64)
        """slots that each node draws before any are left out; -1 for all"""
        _plan(indptr, node, self.left_out.indptr, self.held_out.share, fanout, weighted, self.take)

    def bound(self, indptr: Ids, node: Ids) -> tuple[int, int, int]:
        """(slots drawn, the node with the most, how many that has), as `kernels.count_edges`."""
        return _count(indptr, node, self.take, self.fanout, self.replace)

    def draw(self, indptr: Ids, node: Ids, key: np.uint64, slot: Ids, edge_indptr: Ids) -> None:
        """Draw slots uniformly; see `kernels.draw_uniform`."""
        _draw(indptr, node, self.take, self.replace, key, slot, edge_indptr)

    def draw_weighted(
        self,
        indptr: Ids,
        weight: AnyArray,
        node: Ids,
        key: np.uint64,
        rank: Ranks,
        slot: Ids,
        edge_indptr: Ids,
        stands_for: Factors,
    ) -> int:
        """Draw slots by weight, and all of the nodes with edges to leave out; see `kernels.draw_weighted`."""
        how, out = (self.take, self.fanout, self.replace, key), (rank, slot, edge_indptr, stands_for)
        return _draw_weighted(indptr, weight, node, *how, *out)

    def others(
        self, indptr: Ids, node: Ids, key: np.uint64, slot: Ids, source: Ids, edge_indptr: Ids
    ) -> tuple[Ids, Ids] | None:
        """Choose the fan-out of each node among the drawn edges that are not left out; slot, source: of all edges so far.

        Returns:
            Their positions among the edges, and the nodes' new indptr; None where a node has too few and draws all its slots
            next.
        """
        kept, kept_indptr = self._empty(edge_indptr)
        mine = (*self.left_out, *self.held_out, self.fanout, self.replace, key, self.take)
        lacking = _choose(indptr, node, *mine, slot, source, edge_indptr, kept, kept_indptr)
        return None if lacking else (kept[: kept_indptr[-1]], kept_indptr + edge_indptr[0])

    def others_weighted(
        self, weight: AnyArray, node: Ids, key: np.uint64, slot: Ids, source: Ids, edge_indptr: Ids, stands_for: Factors
    ) -> tuple[Ids, Ids, Factors]:
        """As `others`, by weight; also what each edge stands for."""
        kept, kept_indptr = self._empty(edge_indptr)
        factor = np.empty(len(kept), np.float32)
        mine = (*self.left_out, *self.held_out, self.fanout, self.replace, key, self.take)
        _choose_weighted(weight, node, *mine, slot, source, edge_indptr, stands_for, kept, kept_indptr, factor)
        return kept[: kept_indptr[-1]], kept_indptr + edge_indptr[0], factor[: kept_indptr[-1]]

    def _empty(self, edge_indptr: Ids) -> tuple[Ids, Ids]:
        """Room for the positions of chosen edges, and for the indptr: with replacement a node has its fan-out of any slots."""
        drawn = np.diff(edge_indptr)
        most = np.maximum(drawn, max(0, self.fanout) * (drawn > 0)) if self.replace else drawn
        return np.empty(int(most.sum()), np.int64), np.zeros(len(drawn) + 1, np.int64)


@kernel
def _plan(indptr: Ids, node: Ids, left_indptr: Ids, share: float, fanout: int, weighted: bool, take: Ids) -> None:
    for i in range(len(take)):
        out = left_indptr[i + 1] - left_indptr[i]
        take[i] = fanout
        if out == 0 and share == 0:
            continue
        if fanout > 0:
            wanted = np.float64(fanout + out)
            spare = (_DEVIATIONS * np.sqrt(wanted * share) + 2) if share > 0 else 0.0
            take[i] = int(np.ceil((wanted + spare) / (1 - share)))
            if indptr[node[i] + 1] - indptr[node[i]] <= _WHOLE * take[i]:
                take[i] = -1
        if weighted:
            take[i] = -1


@kernel
def _count(indptr: Ids, node: Ids, take: Ids, fanout: int, replace: bool) -> tuple[int, int, int]:
    edges, hub, largest = 0, -1, -1
    for i in range(len(take)):
        degree = indptr[node[i] + 1] - indptr[node[i]]
        if degree < 0:
            return -1, node[i], degree
        if degree > largest:
            hub, largest = node[i], degree
        edges += max(num_drawn(degree, take[i], replace), num_drawn(degree, fanout, replace))
    return edges, hub, largest


@kernel
def _draw(indptr: Ids, node: Ids, take: Ids, replace: bool, key: np.uint64, slot: Ids, edge_indptr: Ids) -> None:
    for i in range(len(take)):
        draw_uniform(indptr, node, i, i + 1, take[i], replace, key, slot, edge_indptr)


@kernel
def _draw_weighted(
    indptr: Ids,
    weight: AnyArray,
    node: Ids,
    take: Ids,
    fanout: int,
    replace: bool,
    key: np.uint64,
    rank: Ranks,
    slot: Ids,
    edge_indptr: Ids,
    stands_for: Factors,
) -> int:
    for i in range(len(take)):
        first, last = indptr[node[i]], indptr[node[i] + 1]
        if take[i] >= 0:
            bad = draw_weighted(indptr, weight, node, i, i + 1, fanout, replace, key, rank, slot, edge_indptr, stands_for)
            if bad >= 0:
                return bad
            continue
        if first < 0 or last > weight.shape[0]:
            return weight.shape[0]
        for s in range(first, last):
            if not (weight[s] >= 0 and weight[s] < np.inf):
                return s
        draw_uniform(indptr, node, i, i + 1, -1, replace, key, slot, edge_indptr)
        stands_for[edge_indptr[i] : edge_indptr[i + 1]] = 1
    return -1


@kernel
def is_left_out(left: Ids, first: int, last: int, node: int) -> bool:
    """Whether `node` is in left[first:last], ascending."""
    while first < last:
        middle = (first + last) // 2
        if left[middle] == node:
            return True
        if left[middle] < node:
            first = middle + 1
        else:
            last = middle
    return False


@kernel
def _choose(
    indptr: Ids,
    node: Ids,
    left_indptr: Ids,
    left: Ids,
    held_key: np.uint64,
    share: float,
    words: NDArray[np.uint64],
    fanout: int,
    replace: bool,
    key: np.uint64,
    take: Ids,
    slot: Ids,
    source: Ids,
    edge_indptr: Ids,
    kept: Ids,
    kept_indptr: Ids,
) -> int:
    """Fill `kept` and `kept_indptr`; take[i] becomes -1 where a node has too few. Returns how many have."""
    lacking, at = 0, 0
    for i in range(len(take)):
        begin, first, last = at, edge_indptr[i], edge_indptr[i + 1]
        filtered = share > 0 or left_indptr[i] < left_indptr[i + 1]
        for e in range(first, last):
            held_out = is_held_out(held_key, share, words, slot[e], source[e], node[i])
            if not (held_out or is_left_out(left, left_indptr[i], left_indptr[i + 1], source[e])):
                kept[at] = e
                at += 1
        size = at - begin
        if filtered and fanout >= 0 and last > first:
            degree = indptr[node[i] + 1] - indptr[node[i]]
            stream = stream_of(~key, node[i])
            whole = take[i] < 0 or (last - first == degree and not replace)
            if not whole and size < fanout:
                take[i] = -1
                lacking += 1
            elif whole and replace:
                at = begin + _repeat(kept, begin, size, fanout, stream)
            elif size > fanout:
                other = kept[begin:at].copy()
                draw_distinct(stream, 0, size, fanout, kept, begin)
                for j in range(begin, begin + fanout):
                    kept[j] = other[kept[j]]
                at = begin + fanout
        kept_indptr[i + 1] = at
    return lacking


@kernel
def _repeat(kept: Ids, begin: int, size: int, fanout: int, stream: np.uint64) -> int:
    """Replace kept[begin:begin + size] by `fanout` draws of it with replacement; returns their number."""
    if size == 0:
        return 0
    other = kept[begin : begin + size].copy()
    for j in range(fanout):
        kept[begin + j] = other[int(uniform(stream, j) * size)]
    sort_slots(kept, begin, begin + fanout)
    return fanout


@kernel
def _choose_weighted(
    weight: AnyArray,
    node: Ids,
    left_indptr: Ids,
    left: Ids,
    held_key: np.uint64,
    share: float,
    words: NDArray[np.uint64],
    fanout: int,
    replace: bool,
    key: np.uint64,
    take: Ids,
    slot: Ids,
    source: Ids,
    edge_indptr: Ids,
    stands_for: Factors,
    kept: Ids,
    kept_indptr: Ids,
    factor: Factors,
) -> None:
    """Fill `kept`, `kept_indptr` and `factor`: a weight of 0 leaves an edge out, and the other draws are as without it."""
    at = 0
    rank = np.empty(max(1, fanout), np.float64)
    for i in range(len(take)):
        first, last = edge_indptr[i], edge_indptr[i + 1]
        if take[i] >= 0:
            for e in range(first, last):
                kept[at] = e
                factor[at] = stands_for[e]
                at += 1
        elif last > first:
            own = np.empty(last - first, np.float64)
            for e in range(first, last):
                out = is_held_out(held_key, share, words, slot[e], source[e], node[i])
                out = out or is_left_out(left, left_indptr[i], left_indptr[i + 1], source[e])
                own[e - first] = 0.0 if out else np.float64(weight[slot[e]])
            count, stream = num_drawn(last - first, fanout, replace), stream_of(key, node[i])
            drawn = 0
            if replace:
                drawn = draw_cumulative(own, stream, 0, last - first, count, rank, kept, at, factor)
            else:
                drawn = draw_keys(own, stream, 0, last - first, count, rank, kept, at, factor)
            for j in range(at, at + drawn):
                kept[j] += first
            at += drawn
        kept_indptr[i + 1] = at
