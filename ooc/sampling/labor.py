"""LABOR: layer-neighbor sampling with one random number a source, so that the destinations of a batch share neighbors.

A destination takes the `fanout` in-edges whose sources have the smallest numbers (Balin and Catalyurek, "Layer-Neighbor
Sampling - Defusing Neighborhood Explosion in GNNs", 2023: LABOR-0 by sequential Poisson sampling, as GraphBolt has it). The
numbers of different sources are independent, so every set of `fanout` in-edges of a destination is equally likely, as in
uniform sampling, and means and sums over samples are unbiased; but two destinations that have a neighbor in common take it
together. Of several edges from one source to one destination the first has the source's number, and the others have numbers of
their own: with one number for all, their source would be drawn too rarely.

Numbers change in steps. With `batch_dependency` K a source keeps its number for K batches, and at every K/4-th batch a quarter
of the sources get new ones (all of them at every K-th where K is below 4); in between, all batches draw alike, so equal
destinations have equal samples there.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import Purpose, mix64, numbered
from ooc.runtime.keyed_random import key as key_of
from ooc.sampling.edge_split import is_held_out
from ooc.sampling.few_draws import FEW, Candidates, draw_few, guessed
from ooc.sampling.importance import MOST
from ooc.sampling.kernels import GOLDEN, Factors, Ranks, keep_smallest, push, sort_slots, uniform
from ooc.sampling.left_out import is_left_out
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import ConfigError
from ooc.stores.jit import kernel
from ooc.stores.prefetch import AHEAD, prefetch

QUARTERS = 4
"""parts of the sources whose numbers change at different batches"""
BatchKey = tuple[int, ...]
"""the keys of the quarters, where a batch's draws depend on those of the batches before"""
Key = int | BatchKey
"""of a batch's draws"""

_MASK = (1 << 64) - 1
_LEAST_BITS, _MOST_BITS = 6, 18
"""of the filter that finds sources met before at a node: 2**_MOST_BITS bits are 32 KiB"""
_BITS_A_SLOT = 8
_LINE_SLOTS = 16
"""slots between prefetches of a node's in-edges: int32 per cache line"""
_MOST_DEGREE = 2**31 - 1
"""of a node whose draws are kept"""
MANY = 8
"""in-edges of a node, by the fan-out, from which on its draws are kept for the batches that draw alike"""


@dataclass(frozen=True)
class Labor:
    """LABOR sampling (Balin and Catalyurek, 2023): destinations of a batch share neighbors, so a batch has fewer nodes.

    The value of `sampler` in `NeighborLoader` and `LinkNeighborLoader`; the text "labor" stands for `Labor()`.

    Args:
        layer_dependency: Whether a source has the same random number in all hops, so that layers share neighbors too.
        batch_dependency: For how many batches K a source keeps its number, 1 or more: consecutive batches then share
            neighbors. A quarter of the sources changes at every K/4-th batch, where K is below 4 all at every K-th.
        importance: Iterations, 0 to 64, or "*" until they converge, after which sources that many nodes of a batch have in
            common are drawn more often: fewer nodes, and sums of more variance. Means are weighted by the inverse of how often
            an edge is drawn, times its weight with `weight_attr`; see `edge_norm` of a batch. So they are unbiased but for a
            term that falls with the fan-out.

    Raises:
        ConfigError: An argument does not fit.

    >>> labor = ooc.Labor(layer_dependency=True, batch_dependency=64)
    >>> loader = ooc.NeighborLoader(ds, [10, 10], "train", batch_size=1024, shuffle=True, sampler=labor)
    """

    layer_dependency: bool = False
    batch_dependency: int = 1
    importance: int | Literal["*"] = 0

    def __post_init__(self) -> None:
        if not isinstance(self.layer_dependency, bool | np.bool_):
            raise ConfigError(f"layer_dependency must be True or False, not {self.layer_dependency!r}")
        period = self.batch_dependency
        if isinstance(period, bool) or not isinstance(period, Integral) or period < 1:
            raise ConfigError(f"batch_dependency must be a whole number of 1 or more, not {period!r}")
        often = self.importance
        whole = isinstance(often, Integral) and not isinstance(often, bool) and 0 <= often <= MOST
        if not whole and not (isinstance(often, str) and often == "*"):
            raise ConfigError(f"importance must be a whole number from 0 to {MOST}, or '*', not {often!r}")

    @property
    def name(self) -> str:
        """As `--sampler` has it."""
        return "labor"

    @property
    def iterations(self) -> int | None:
        """Of the importance; None: until it changes little."""
        return None if self.importance == "*" else int(self.importance)

    @property
    def identity(self) -> dict[str, Any]:
        """All of it that batches depend on, for the state of a loader."""
        kept = {"layer_dependency": bool(self.layer_dependency), "batch_dependency": int(self.batch_dependency)}
        return {**kept, "importance": "*" if self.iterations is None else self.iterations}

    def keys(self, key: Key, number: int, hop: int) -> NDArray[np.uint64]:
        """The keys of the quarters in a hop, uint64[4]; number: of the sources' type."""
        own = (key,) * QUARTERS if isinstance(key, int) else key
        hop = 0 if self.layer_dependency else hop
        return np.array([numbered(numbered(each & _MASK, number), hop) for each in own], np.uint64)


def batch_key(seed: int, rank: int, step: int, period: int) -> BatchKey:
    """The keys of the quarters at a step, counted over all epochs: each changes every `period` steps, one after the other where
    there are as many steps as quarters."""
    late = [quarter * period // QUARTERS if period >= QUARTERS else 0 for quarter in range(QUARTERS)]
    turns = [(step + each) // period for each in late]
    return tuple(key_of(seed, Purpose.VARIATE, turn, quarter, rank) for quarter, turn in enumerate(turns))


class KeptDraws(NamedTuple):
    """Draws at nodes of many in-edges, each at a place that follows from the node; no places: none are kept.

    node: int64[c], -1 for none; degree: int32[c], its in-edges; size: int32[c], how many are drawn; offset: int32[c, fanout],
    which of its in-edges these are; source: int64[c, fanout], or [c, 0] where sources are not kept.
    """

    node: Ids
    degree: NDArray[np.int32]
    size: NDArray[np.int32]
    offset: NDArray[np.int32]
    source: Ids

    @classmethod
    def empty(cls, places: int, fanout: int, sources: bool = False) -> "KeptDraws":
        """places: 0 or a power of two; sources: whether they are kept too."""
        degree, size = np.zeros(places, np.int32), np.zeros(places, np.int32)
        drawn = np.zeros((places, fanout), np.int32), np.zeros((places, fanout * sources), np.int64)
        return cls(np.full(places, -1, np.int64), degree, size, *drawn)

    @staticmethod
    def nbytes_for(places: int, fanout: int, sources: bool = False) -> int:
        """Bytes of so many places."""
        return 4 * places * (4 + fanout * (1 + 2 * sources))

    def clear(self) -> None:
        self.node[:], self.degree[:] = -1, 0


@kernel
def place_of(kept: KeptDraws, node: int, degree: int, fanout: int) -> int:
    """Where the draw at a node is kept, -1 where it is not.

    The top bits of a Fibonacci hash spread consecutive nodes, as hubs of a graph in degree order are, over most places.
    """
    if len(kept.node) == 0 or degree < MANY * fanout or degree > _MOST_DEGREE:
        return -1
    return int(np.int64(((np.uint64(node) * GOLDEN >> np.uint64(32)) * np.uint64(len(kept.node))) >> np.uint64(32)))


@kernel
def prefetch_kept(kept: KeptDraws, place: int) -> None:
    """Start loading what is kept at a place."""
    if place >= 0:
        prefetch(kept.node, place)
        prefetch(kept.size, place)
        prefetch(kept.offset, place * kept.offset.shape[1])


@kernel
def keep_draw(kept: KeptDraws, place: int, node: int, first: int, degree: int, slot: Ids, at: int, size: int) -> bool:
    """Keep the draw slot[at:at+size] in place of one at a node of no more in-edges; returns whether it was. first: its slot of
    offset 0."""
    if place < 0 or degree < kept.degree[place]:
        return False
    kept.node[place], kept.degree[place], kept.size[place] = node, degree, size
    for j in range(size):
        kept.offset[place, j] = slot[at + j] - first
    return True


@kernel
def take_kept(kept: KeptDraws, place: int, first: int, slot: Ids, at: int) -> int:
    """Copy the draw at a place into slot[at:]; returns its number of slots. first: the node's slot of offset 0."""
    size = int(kept.size[place])
    for j in range(size):
        slot[at + j] = first + kept.offset[place, j]
    return size


@kernel
def invalid_weight(weight: AnyArray, first: int, last: int) -> int:
    """The first slot of first:last whose weight is negative or not finite, or -1."""
    for s in range(first, last):
        if not (weight[s] >= 0 and weight[s] < np.inf):
            return s
    return -1


@kernel
def clear(seen: NDArray[np.uint64], degree: int) -> np.uint64:
    """Empty as much of a filter as a node with so many in-edges needs; returns the shift from a hash to its bit there."""
    bits = _LEAST_BITS
    while bits < _MOST_BITS and (1 << bits) < _BITS_A_SLOT * degree:
        bits += 1
    seen[: 1 << (bits - _LEAST_BITS)] = 0
    return np.uint64(64 - bits)


@kernel
def occurs(indices: AnyArray, first: int, stop: int, source: int) -> bool:
    """Whether a slot of first:stop has this source."""
    s = first
    while s < stop and int(indices[s]) != source:
        s += 1
    return s < stop


@kernel
def by_weight(number: float, weight: float) -> float:
    """An exponential variate with this rate, of a number in [0, 1)."""
    return -np.log(1.0 - number) / weight


class Rule(NamedTuple):
    """How a hop draws: `fanout` > 0 in-edges a node, by the numbers of `keys` (uint64[4], of the quarters), and which edges are
    held out, as of `HeldOut`."""

    fanout: int
    keys: NDArray[np.uint64]
    held_key: np.uint64
    share: float
    words: NDArray[np.uint64]


class Scratch(NamedTuple):
    """What the draw at a node works in."""

    seen: NDArray[np.uint64]
    """the filter of sources met"""
    rank: Ranks
    """[fanout]"""
    candidates: Candidates

    @classmethod
    def of(cls, fanout: int) -> "Scratch":
        ranks = np.empty(max(1, fanout), np.float64)
        return cls(np.empty(1 << (_MOST_BITS - _LEAST_BITS), np.uint64), ranks, Candidates.empty())


@kernel
def draw_smallest(
    indices: AnyArray,
    weight: AnyArray,
    v: int,
    first: int,
    last: int,
    shift: int,
    left: Ids,
    rule: Rule,
    scratch: Scratch,
    slot: Ids,
    at: int,
    stands_for: Factors,
) -> int:
    """Sample up to `fanout` of the in-edges first:last of node `v` into slot[at:]; returns their number.

    The filter `seen` says which sources may have been met before; whether one was is looked up only where it matters, which is
    rare: where the number of the source or that of the slot is small. For `stands_for` see `kernels.draw_keys`. shift: from
    where an in-edge stands to its slot.
    """
    fanout, keys, held_key, share, words = rule
    seen, rank = scratch.seen, scratch.rank
    bits = clear(seen, last - first)
    filtered, weighted = share > 0 or len(left) > 0, len(weight) > 0
    size, tau, w = 0, np.inf, 1.0
    for s in range(first, last):
        source = int(indices[s])
        if filtered and (is_held_out(held_key, share, words, s + shift, source, v) or is_left_out(left, 0, len(left), source)):
            continue
        hashed = mix64(np.uint64(source))
        bit = hashed >> bits
        word, mask = np.int64(bit >> np.uint64(6)), np.uint64(1) << (bit & np.uint64(63))
        maybe_met = seen[word] & mask != 0
        seen[word] |= mask
        if weighted:
            w = np.float64(weight[s])
            if w <= 0:
                continue
        stream = keys[np.int64(hashed & np.uint64(3))] ^ hashed
        value = uniform(stream, 0)
        value = by_weight(value, w) if weighted else value
        if maybe_met:
            other = uniform(stream ^ mix64(~np.uint64(s - first)), 0)
            other = by_weight(other, w) if weighted else other
            if min(value, other) < tau and occurs(indices, first, s, source):
                value = other
        if size < fanout:
            push(rank, slot, at, size, value, s)
            size += 1
        elif value < rank[0]:
            tau = rank[0]  # the largest selected number is below all that lost before
            keep_smallest(rank, slot, at, size, value, s)
        else:
            tau = min(tau, value)
    sort_slots(slot, at, at + size)
    if weighted:
        for e in range(at, at + size):
            stands_for[e] = -1.0 / np.expm1(-tau * np.float64(weight[slot[e]]))
    return size


@kernel
def draw_all(
    indices: AnyArray,
    v: int,
    first: int,
    last: int,
    shift: int,
    left: Ids,
    rule: Rule,
    slot: Ids,
    at: int,
    stands_for: Factors,
) -> int:
    """Put the in-edges first:last of node `v` into slot[at:], without those to leave out; returns their number."""
    size, share = 0, rule.share
    for s in range(first, last):
        if share > 0 or len(left) > 0:
            source = int(indices[s])
            if is_held_out(rule.held_key, share, rule.words, s + shift, source, v) or is_left_out(left, 0, len(left), source):
                continue
        slot[at + size] = s
        size += 1
    if len(stands_for) > 0:
        stands_for[at : at + size] = 1
    return size


@kernel
def draw_at(
    indices: AnyArray,
    weight: AnyArray,
    v: int,
    first: int,
    last: int,
    shift: int,
    left: Ids,
    rule: Rule,
    scratch: Scratch,
    slot: Ids,
    at: int,
    stands_for: Factors,
) -> int:
    """Put the draw at node `v` into slot[at:]; returns its number of in-edges, or ~s where that of s has an invalid weight.

    The node's in-edges stand at first:last of `indices` and `weight`, and so they are named in `slot`; their slots are `shift`
    more. weight, stands_for: empty for uniform draws.
    """
    fanout, weighted = rule.fanout, len(weight) > 0 and rule.fanout > 0
    wrong = invalid_weight(weight, first, last) if weighted else -1
    if wrong >= 0:
        return ~wrong
    if fanout == 0:
        return 0
    if fanout < 0 or (last - first <= fanout and not weighted):
        return draw_all(indices, v, first, last, shift, left, rule, slot, at, stands_for)
    size = -1
    if not weighted and fanout <= FEW and rule.share == 0 and len(left) == 0:
        size = draw_few(indices, first, last, rule.fanout, rule.keys, scratch.candidates, guessed(fanout), slot, at)
    if size < 0:
        size = draw_smallest(indices, weight, v, first, last, shift, left, rule, scratch, slot, at, stands_for)
    return size


@kernel
def draw_by_source(
    indptr: Ids,
    indices: AnyArray,
    weight: AnyArray,
    node: Ids,
    start: int,
    stop: int,
    left_indptr: Ids,
    left: Ids,
    rule: Rule,
    scratch: Scratch,
    kept: KeptDraws,
    slot: Ids,
    edge_indptr: Ids,
    stands_for: Factors,
) -> int:
    """`kernels.draw_uniform` or `kernels.draw_weighted` without replacement, by the numbers of the sources.

    left_indptr, left: the sources left out at each node, as of `LeftOut`; empty for none. weight, stands_for: empty for uniform
    draws. kept: by the same keys and fan-out, without weights. Returns -1, or a slot that is not there or whose weight is
    invalid.
    """
    at = edge_indptr[start]
    few, guess = len(weight) == 0 and 0 < rule.fanout <= FEW and rule.share == 0, guessed(rule.fanout)
    for i in range(start, stop):
        if i + 2 * AHEAD < stop:
            prefetch(indptr, node[i + 2 * AHEAD])
        if i + AHEAD < stop:
            coming = indptr[node[i + AHEAD]]
            prefetch(indices, coming)
            prefetch(indices, coming + _LINE_SLOTS)
            prefetch_kept(kept, place_of(kept, node[i + AHEAD], indptr[node[i + AHEAD] + 1] - coming, rule.fanout))
        first, last = indptr[node[i]], indptr[node[i] + 1]
        if first < 0 or last > indices.shape[0]:
            return indices.shape[0]
        out = left[left_indptr[i - start] : left_indptr[i - start + 1]] if len(left) > 0 else left
        place = place_of(kept, node[i], last - first, rule.fanout) if len(out) == 0 else -1
        if place >= 0 and kept.node[place] == node[i]:
            size = take_kept(kept, place, first, slot, at)
        else:
            size = -1
            if few and len(out) == 0 and last - first > rule.fanout:  # as `draw_at` does, without its call
                size = draw_few(indices, first, last, rule.fanout, rule.keys, scratch.candidates, guess, slot, at)
            if size < 0:
                size = draw_at(indices, weight, node[i], first, last, 0, out, rule, scratch, slot, at, stands_for)
            if size < 0:
                return ~size
            keep_draw(kept, place, node[i], first, last - first, slot, at, size)
        at += size
        edge_indptr[i + 1] = at
    return -1
