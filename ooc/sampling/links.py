"""Links as the seeds of a batch: their ends, their negatives, and which edges do not carry messages.

A negative depends on (key, link, its number) only, so it is the same for any batches. Exact negatives are never edges of the
graph. Slots of a node are in order of time and edge id and not of their source, so an edge is searched among all slots of its
destination: for destinations drawn uniformly these are as many as a node has in-edges on average.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import KeyedPermutation, mix, mix64
from ooc.sampling.kernels import stream_of, uniform
from ooc.sampling.left_out import LeftOut
from ooc.sampling.neighbor import damaged_slot
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.errors import InputError
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel

Negative = Literal["binary", "triplet"]
_TRIES = 64
"""draws of an exact negative before all candidates are tried in a random order"""
_TRIED_AT_ONCE = 1024
_AT_ONCE = 2**20
"""slots read at a time"""


@dataclass(frozen=True)
class Links:
    """The links of a batch, their ends as positions among its seeds."""

    src: Ids
    """int64[b]"""
    dst: Ids
    """int64[b]"""
    negative_src: Ids
    """int64[m] of binary negatives, empty otherwise"""
    negative_dst: Ids
    """int64[m] of binary negatives, int64[b, m] of the destinations of triplets"""


class Seeds(NamedTuple):
    """The seeds of a batch."""

    node: Ids
    """int64[b]"""
    left_out: LeftOut | None = None
    """edges that carry no messages"""
    links: Links | None = None
    """that they are the ends of; None where the seeds are the nodes to predict"""
    time: AnyArray | None = None
    """[b]: until when their neighborhoods reach; None without times"""


class EdgeLookup:
    """The edges of a graph by slot and by their ends.

    rows: the graph's `indices` where they are read from the disk, None where they are in memory or mapped.
    """

    def __init__(self, graph: Graph, rows: Rows | None = None) -> None:
        self.indptr, self._rows = np.asarray(graph.indptr), rows
        self._indices = None if rows is not None else np.asarray(graph.indices)
        self.num_nodes, self.num_edges = graph.num_nodes, graph.num_edges

    def ends(self, slot: Ids) -> tuple[Ids, Ids]:
        """The sources and destinations of `slot`, int64[k] each. Raises StoreError for a damaged slot."""
        return self._sources(slot), np.searchsorted(self.indptr, slot, side="right") - 1

    def pieces(self) -> Iterator[tuple[Ids, Ids]]:
        """The sources and destinations of all edges in order of slots, int64[k] each, piece by piece."""
        for start in range(0, self.num_edges, _AT_ONCE):
            yield self.ends(np.arange(start, min(start + _AT_ONCE, self.num_edges)))

    def contain(self, src: Ids, dst: Ids) -> NDArray[np.bool_]:
        """Which pairs (int64[k] each) are edges, from `src` to `dst`: bool[k]."""
        found = np.zeros(len(src), bool)
        if self._indices is not None:
            _search(self.indptr, self._indices, src, dst, found)
            return found
        first = self.indptr[dst]
        end = np.cumsum(self.indptr[dst + 1] - first)
        begin = end - (self.indptr[dst + 1] - first)
        for start in range(0, int(end[-1]) if len(end) else 0, _AT_ONCE):
            at = np.arange(start, min(start + _AT_ONCE, int(end[-1])))
            pair = np.searchsorted(end, at, side="right")
            found[pair[self._sources(first[pair] + at - begin[pair]) == src[pair]]] = True
        return found

    def are_all(self) -> bool:
        """Whether every two nodes have an edge in both directions."""
        nodes = self.num_nodes
        if self.num_edges < nodes * (nodes - 1):
            return False
        for node in range(nodes):
            source = self._sources(np.arange(self.indptr[node], self.indptr[node + 1]))
            if len(np.unique(source[source != node])) < nodes - 1:
                return False
        return True

    def _sources(self, slot: Ids) -> Ids:
        if self._indices is not None:
            source = self._indices[slot].astype(np.int64)
        else:
            assert self._rows is not None
            read = np.empty(len(slot), self._rows.dtype)
            self._rows.read(slot, read)
            source = read.astype(np.int64)
        wrong = (source < 0) | (source >= self.num_nodes)
        if wrong.any():
            raise damaged_slot(int(slot[np.argmax(wrong)]))
        return source


@dataclass(frozen=True)
class LinkNegatives:
    """Negatives of links: pairs of random nodes ("binary"), or random destinations of each link's source ("triplet").

    amount: negatives a link; of binary ones a batch of b links has ceil(b * amount). cumulative: running sums of the weights
    that sources and destinations are drawn by, float64[N] each, None for uniform draws. edges: what exact negatives must not
    be, None where they may be edges; links: further such pairs, source * N + destination, ascending.
    """

    mode: Negative
    amount: float
    num_nodes: int
    cumulative: tuple[AnyArray | None, AnyArray | None] = (None, None)
    edges: EdgeLookup | None = None
    links: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    def draw(self, src: Ids, link: Ids, key: int) -> tuple[Ids, Ids]:
        """The negatives of a batch.

        Args:
            src: Sources of the links, int64[b].
            link: Their numbers, which key the draws, int64[b].
            key: Of the epoch.

        Returns:
            Sources and destinations, int64[m] each: the first of every link, then the second, and so on.

        Raises:
            InputError: For exact negatives, where there are none.
        """
        count = math.ceil(len(link) * self.amount)
        turn = np.arange(count) // max(1, len(link))
        of = np.arange(count) - turn * len(link)
        source = src[of] if self.mode == "triplet" else np.empty(0, np.int64)
        draw = _Draw(self, source, link[of], turn, key)
        found = draw.attempt(np.arange(count), 0)
        if self.edges is not None:
            self._replace_edges(draw, *found)
        return found

    def _replace_edges(self, draw: "_Draw", src: Ids, dst: Ids) -> None:
        """Draw those that are edges again, until none is."""
        pending = np.flatnonzero(self._is_edge(src, dst))
        for attempt in range(1, _TRIES):
            if not len(pending):
                return
            src[pending], dst[pending] = draw.attempt(pending, attempt)
            pending = pending[self._is_edge(src[pending], dst[pending])]
        for number in pending:
            src[number], dst[number] = self._any(draw, int(number))

    def _any(self, draw: "_Draw", number: int) -> tuple[int, int]:
        """One of all candidates, in a random order."""
        fixed = len(draw.source) > 0
        candidates = KeyedPermutation(self.num_nodes if fixed else self.num_nodes**2, draw.key_of(number))
        for start in range(0, len(candidates), _TRIED_AT_ONCE):
            src, dst = np.divmod(candidates[start : start + _TRIED_AT_ONCE], self.num_nodes)
            if fixed:
                src = np.full(len(dst), draw.source[number])
            allowed = ~self._is_edge(src, dst)
            for end, sums in zip((src, dst), self.cumulative, strict=True):
                allowed &= True if sums is None else np.diff(sums, prepend=0)[end] > 0
            if allowed.any():
                at = int(np.argmax(allowed))
                return int(src[at]), int(dst[at])
        what = f"node {draw.source[number]} has edges to all other nodes" if fixed else "the graph has all possible edges"
        raise InputError(f"{what}, so there are no exact negatives: leave out exact_negatives")

    def _is_edge(self, src: Ids, dst: Ids) -> NDArray[np.bool_]:
        assert self.edges is not None
        pair = src * self.num_nodes + dst
        at = np.searchsorted(self.links, pair)
        given = self.links[np.minimum(at, len(self.links) - 1)] == pair if len(self.links) else np.zeros(len(pair), bool)
        return (src == dst) | given | self.edges.contain(src, dst)


class _Draw:
    """The random ends of a batch's negatives. source: of triplets; link, turn: the link of each and its number there."""

    def __init__(self, negatives: LinkNegatives, source: Ids, link: Ids, turn: Ids, key: int) -> None:
        self.source, self._link, self._turn, self._key = source, link, turn, key
        self._num_nodes, self._cumulative = negatives.num_nodes, negatives.cumulative

    def key_of(self, number: int) -> int:
        """Of negative `number` alone."""
        return mix(mix(self._key + int(self._turn[number])) ^ int(self._link[number]))

    def attempt(self, number: Ids, attempt: int) -> tuple[Ids, Ids]:
        """(sources, destinations) of the negatives `number` (int64[k]) at an attempt."""
        drawn = np.empty((2, len(number)), np.float64)
        _uniforms(np.uint64(self._key & (2**64 - 1)), self._link[number], self._turn[number], attempt, drawn)
        src = self.source[number] if len(self.source) else self._node(drawn[0], self._cumulative[0])
        return src, self._node(drawn[1], self._cumulative[1])

    def _node(self, drawn: AnyArray, cumulative: AnyArray | None) -> Ids:
        if cumulative is None:
            return (drawn * self._num_nodes).astype(np.int64)
        return np.minimum(np.searchsorted(cumulative, drawn * cumulative[-1], side="right"), self._num_nodes - 1)


def seeds_of_links(src: Ids, dst: Ids, negative: tuple[Ids, Ids] | None, mode: Negative | None, leave_out: bool) -> Seeds:
    """The distinct ends of links (int64[b] each) and of their negatives, ascending, as PyG orders them.

    leave_out: whether the edges between the two ends of a link, in both directions, carry no messages.
    """
    none = np.empty(0, np.int64)
    negative_src, negative_dst = negative or (none, none)
    negative_src = none if mode == "triplet" else negative_src
    node, local = np.unique(np.concatenate([src, dst, negative_src, negative_dst]), return_inverse=True)
    source, target, negative_src, negative_dst = np.split(local, np.cumsum([len(src), len(dst), len(negative_src)]))
    if mode == "triplet":
        negative_dst = negative_dst.reshape(-1, len(src)).T
    links = Links(source, target, negative_src, negative_dst)
    left_out = None
    if leave_out:
        left_out = LeftOut.of(np.concatenate([target, source]), np.concatenate([src, dst]), len(node))
    return Seeds(node, left_out, links)


@kernel
def _uniforms(key: np.uint64, link: Ids, turn: Ids, attempt: int, out: AnyArray) -> None:
    """out[:, i]: two numbers in [0, 1) of (key, link[i], turn[i], attempt)."""
    for i in range(len(link)):
        stream = stream_of(mix64(key + np.uint64(turn[i])), link[i])
        out[0, i] = uniform(stream, 2 * attempt)
        out[1, i] = uniform(stream, 2 * attempt + 1)


@kernel
def _search(indptr: Ids, indices: AnyArray, src: Ids, dst: Ids, found: NDArray[np.bool_]) -> None:
    for i in range(len(src)):
        for slot in range(indptr[dst[i]], indptr[dst[i] + 1]):
            if indices[slot] == src[i]:
                found[i] = True
                break
