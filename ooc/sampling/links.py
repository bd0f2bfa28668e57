"""Links as the seeds of a batch: their ends, their negatives, and which edges do not carry messages.

A negative depends on (key, link, its number) only, so it is the same for any batches. Exact negatives are never edges of the
graph. Slots of a node are in order of time and edge id and not of their source, so an edge is searched among all slots of its
destination: for destinations drawn uniformly these are as many as a node has in-edges on average.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.hetero import EdgeKey
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
    row_bytes: int = 0
    """of a link's own features, which a batch has too"""

    @property
    def nbytes(self) -> int:
        """Bytes of these arrays and of the fields that are made of them: a copy, the label of a link or binary negative, and
        the links' features."""
        arrays = self.src, self.dst, self.negative_src, self.negative_dst
        copies, labels = 2 * sum(each.nbytes for each in arrays), 8 * (len(self.src) + len(self.negative_src))
        return copies + labels + self.row_bytes * len(self.src)


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


class TypedSeeds(NamedTuple):
    """The seeds of a batch by node type, some of which may share a tree."""

    node: Mapping[str, Ids]
    """int64[b] each"""
    left_out: Mapping[EdgeKey, LeftOut] | None = None
    """edges that carry no messages"""
    links: Links | None = None
    """that they are the ends of"""
    time: Mapping[str, AnyArray] | None = None
    """[b] each, as of `Seeds`"""
    tree: Mapping[str, Ids] | None = None
    """int64[b] each: the tree that a seed is in; None: each has its own, where they have any"""


AnySeeds = Seeds | TypedSeeds


class ByTime(NamedTuple):
    """Nodes in order of time, of which those up to a time are a prefix."""

    node: Ids
    """int64[n]"""
    time: AnyArray
    """[n], ascending"""

    @classmethod
    def of(cls, time: AnyArray) -> "ByTime":
        order = np.argsort(time, kind="stable")
        return cls(order, time[order])


class EdgeLookup:
    """The edges of a graph by slot and by their ends.

    rows: the graph's `indices` where they are read from the disk, None where they are in memory or mapped.
    """

    def __init__(self, graph: Graph, rows: Rows | None = None) -> None:
        self.indptr, self._rows = np.asarray(graph.indptr), rows
        self._indices = None if rows is not None else np.asarray(graph.indices)
        self.num_nodes, self.num_edges, self.bipartite = graph.num_nodes, graph.num_edges, graph.sources is not None
        self.num_sources = graph.num_nodes if graph.sources is None else graph.sources

    def ends(self, slot: Ids) -> tuple[Ids, Ids]:
        """The sources and destinations of `slot`, int64[k] each. Raises StoreError for a damaged slot."""
        return self._sources(slot), np.searchsorted(self.indptr, slot, side="right") - 1

    def pieces(self) -> Iterator[tuple[Ids, Ids]]:
        """The sources and destinations of all edges in order of slots, int64[k] each, piece by piece."""
        for start in range(0, self.num_edges, _AT_ONCE):
            yield self.ends(np.arange(start, min(start + _AT_ONCE, self.num_edges)))

    def contain(self, src: Ids, dst: Ids) -> NDArray[np.bool_]:
        """Which pairs (int64[k] each) are edges, from `src` to `dst`: bool[k]."""
        if self._indices is not None:
            return slots_of(self.indptr, self._indices, src, dst) >= 0
        found = np.zeros(len(src), bool)
        first = self.indptr[dst]
        end = np.cumsum(self.indptr[dst + 1] - first)
        begin = end - (self.indptr[dst + 1] - first)
        for start in range(0, int(end[-1]) if len(end) else 0, _AT_ONCE):
            at = np.arange(start, min(start + _AT_ONCE, int(end[-1])))
            pair = np.searchsorted(end, at, side="right")
            found[pair[self._sources(first[pair] + at - begin[pair]) == src[pair]]] = True
        return found

    def are_all(self) -> bool:
        """Whether every two nodes have an edge in both directions, of a bipartite graph every source and destination."""
        most = self.num_sources - (not self.bipartite)
        if self.num_edges < self.num_nodes * most:
            return False
        for node in range(self.num_nodes):
            source = self._sources(np.arange(self.indptr[node], self.indptr[node + 1]))
            if len(np.unique(source if self.bipartite else source[source != node])) < most:
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
        wrong = (source < 0) | (source >= self.num_sources)
        if wrong.any():
            raise damaged_slot(int(slot[np.argmax(wrong)]))
        return source


@dataclass(frozen=True)
class LinkNegatives:
    """Negatives of links: pairs of random nodes ("binary"), or random destinations of each link's source ("triplet").

    amount: negatives a link; of binary ones a batch of b links has ceil(b * amount). num_nodes: possible destinations.
    cumulative: running sums of the weights that sources and destinations are drawn by, float64[N] each, None for uniform draws.
    edges: what exact negatives must not be, None where they may be edges; links: further such pairs, source * N + destination,
    ascending. num_sources: of nodes of another type than the destinations. by_time: sources and destinations that have times,
    of which only those up to a link's time are drawn, or the earliest; `cumulative` is then in their order. strict: whether
    a negative that cannot be exact is an error; it is an edge otherwise.
    """

    mode: Negative
    amount: float
    num_nodes: int
    cumulative: tuple[AnyArray | None, AnyArray | None] = (None, None)
    edges: EdgeLookup | None = None
    links: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    num_sources: int | None = None
    by_time: tuple[ByTime | None, ByTime | None] = (None, None)
    strict: bool = True

    def draw(self, src: Ids, link: Ids, key: int, time: AnyArray | None = None) -> tuple[Ids, Ids]:
        """The negatives of a batch.

        Args:
            src: Sources of the links, int64[b].
            link: Their numbers, which key the draws, int64[b].
            key: Of the epoch.
            time: Of the links, [b]; None without times.

        Returns:
            Sources and destinations, int64[m] each: the first of every link, then the second, and so on.

        Raises:
            InputError: For exact negatives, where there are none.
        """
        count = math.ceil(len(link) * self.amount)
        turn = np.arange(count) // max(1, len(link))
        of = np.arange(count) - turn * len(link)
        source = src[of] if self.mode == "triplet" else np.empty(0, np.int64)
        draw = _Draw(self, source, link[of], turn, key, None if time is None else time[of])
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
        for number in pending.tolist():
            found = self._any(draw, number)
            if found is not None:
                src[number], dst[number] = found
            elif self.strict:
                raise self._there_is_none(draw, number)

    def _any(self, draw: "_Draw", number: int) -> tuple[int, int] | None:
        """One of all candidates, in a random order."""
        fixed = len(draw.source) > 0
        sources = 1 if fixed else self.num_nodes if self.num_sources is None else self.num_sources
        candidates = KeyedPermutation(sources * self.num_nodes, draw.key_of(number))
        drawable = draw.drawable(number)
        for start in range(0, len(candidates), _TRIED_AT_ONCE):
            src, dst = np.divmod(candidates[start : start + _TRIED_AT_ONCE], self.num_nodes)
            if fixed:
                src = np.full(len(dst), draw.source[number])
            allowed = ~self._is_edge(src, dst)
            for end, each in zip((src, dst), drawable, strict=True):
                allowed &= True if each is None else each[end]
            if allowed.any():
                at = int(np.argmax(allowed))
                return int(src[at]), int(dst[at])
        return None

    @staticmethod
    def _there_is_none(draw: "_Draw", number: int) -> InputError:
        fixed = len(draw.source) > 0
        early = "" if draw.time is None else " that are early enough"
        what = f"node {draw.source[number]} has edges to all other nodes" if fixed else "the graph has all possible edges"
        what += early
        return InputError(f"{what}, so there are no exact negatives: leave out exact_negatives")

    def _is_edge(self, src: Ids, dst: Ids) -> NDArray[np.bool_]:
        assert self.edges is not None
        pair = src * self.num_nodes + dst
        at = np.searchsorted(self.links, pair)
        given = self.links[np.minimum(at, len(self.links) - 1)] == pair if len(self.links) else np.zeros(len(pair), bool)
        loop = (src == dst) & (self.num_sources is None)
        return loop | given | self.edges.contain(src, dst)


class _Draw:
    """The random ends of a batch's negatives. source: of triplets; link, turn, time: the link of each, its number there, and
    the link's time."""

    def __init__(
        self, negatives: LinkNegatives, source: Ids, link: Ids, turn: Ids, key: int, time: AnyArray | None = None
    ) -> None:
        self.source, self._link, self._turn, self._key, self.time = source, link, turn, key, time
        sources = negatives.num_nodes if negatives.num_sources is None else negatives.num_sources
        self._ends = list(zip((sources, negatives.num_nodes), negatives.cumulative, negatives.by_time, strict=True))

    def key_of(self, number: int) -> int:
        """Of negative `number` alone."""
        return mix(mix(self._key + int(self._turn[number])) ^ int(self._link[number]))

    def attempt(self, number: Ids, attempt: int) -> tuple[Ids, Ids]:
        """(sources, destinations) of the negatives `number` (int64[k]) at an attempt."""
        drawn = np.empty((2, len(number)), np.float64)
        _uniforms(np.uint64(self._key & (2**64 - 1)), self._link[number], self._turn[number], attempt, drawn)
        until = None if self.time is None else self.time[number]
        src = self.source[number] if len(self.source) else _drawn_nodes(drawn[0], *self._ends[0], until)
        return src, _drawn_nodes(drawn[1], *self._ends[1], until)

    def drawable(self, number: int) -> list[NDArray[np.bool_] | None]:
        """Which sources and which destinations a negative may have: bool[N] each, None for all."""
        found: list[NDArray[np.bool_] | None] = []
        for count, cumulative, by_time in self._ends:
            own = np.ones(count, bool) if cumulative is None else np.diff(cumulative, prepend=0) > 0
            if by_time is not None and self.time is not None:
                own &= by_time.time <= self.time[number]
                own[by_time.node] = own.copy()
            found.append(None if cumulative is None and by_time is None else own)
        return [None, found[1]] if len(self.source) else found


def _drawn_nodes(
    drawn: AnyArray, num_nodes: int, cumulative: AnyArray | None, by_time: ByTime | None, until: AnyArray | None
) -> Ids:
    """Nodes for numbers in [0, 1), up to a time each."""
    if by_time is not None and until is not None:
        count = np.maximum(np.searchsorted(by_time.time, until, side="right"), 1)
        if cumulative is None:
            return by_time.node[(drawn * count).astype(np.int64)]
        at = np.searchsorted(cumulative, drawn * cumulative[count - 1], side="right")
        return by_time.node[np.minimum(at, count - 1)]
    if cumulative is None:
        return (drawn * num_nodes).astype(np.int64)
    return np.minimum(np.searchsorted(cumulative, drawn * cumulative[-1], side="right"), num_nodes - 1)


def seeds_of_links(src: Ids, dst: Ids, negative: tuple[Ids, Ids] | None, mode: Negative | None, leave_out: bool) -> Seeds:
    """The distinct ends of links (int64[b] each) and of their negatives, ascending, as PyG orders them.

    leave_out: whether the edges between the two ends of a link, in both directions, carry no messages.
    """
    only = ("", "", "")
    typed = typed_seeds(only, src, dst, negative, mode, (only,) if leave_out else ())
    return Seeds(typed.node[""], None if typed.left_out is None else typed.left_out[only], typed.links)


def typed_seeds(
    edge_type: EdgeKey,
    src: Ids,
    dst: Ids,
    negative: tuple[Ids, Ids] | None,
    mode: Negative | None,
    left_out: Sequence[EdgeKey],
    disjoint: bool = False,
    time: AnyArray | None = None,
) -> TypedSeeds:
    """The ends of links of an edge type (int64[b] each) and of their negatives as seeds, in PyG's order: of each type the
    distinct ones, ascending, or with trees all of them, sources first.

    left_out: edge types whose edges between the two ends of a link carry no messages. disjoint: whether each link has a tree,
    which its negatives are in too. time: of the links, [b], which is that of their trees.
    """
    b, none = len(src), np.empty(0, np.int64)
    negative_src, negative_dst = negative or (none, none)
    source = src if mode == "triplet" else np.concatenate([src, negative_src])
    target = np.concatenate([dst, negative_dst])
    first, _, last = edge_type
    ends = {first: np.concatenate([source, target])} if first == last else {first: source, last: target}
    if disjoint:
        node, local = ends, {name: np.arange(len(each)) for name, each in ends.items()}
        of = [np.arange(len(each)) % max(1, b) for each in (source, target)]
        tree = {first: np.concatenate(of)} if first == last else dict(zip((first, last), of, strict=True))
    else:
        found = {name: np.unique(each, return_inverse=True) for name, each in ends.items()}
        node, local, tree = {name: own for name, (own, _) in found.items()}, {n: at for n, (_, at) in found.items()}, None
    at_source, at_target = local[first][: len(source)], local[last][len(local[last]) - len(target) :]
    negative_local = at_target[b:].reshape(-1, max(1, b)).T if mode == "triplet" else at_target[b:]
    links = Links(at_source[:b], at_target[:b], at_source[b:], negative_local)
    out = {key: _left_out(key, edge_type, src, dst, node[key[2]], tree, links) for key in left_out}
    times = None if time is None or tree is None else {name: time[own] for name, own in tree.items()}
    return TypedSeeds(node, out or None, links, times, tree)


def _left_out(
    key: EdgeKey,
    edge_type: EdgeKey,
    src: Ids,
    dst: Ids,
    seed: Ids,
    tree: Mapping[str, Ids] | None,
    links: Links,
) -> LeftOut:
    """What is left out of an edge type's draws at the seeds of its target type: of each link's end the other one.

    In a tree, a negative may be the same node as an end.
    """
    first, _, last = edge_type
    positions, others = [], []
    for own_type, other_type, own, other, at in ((last, first, dst, src, links.dst), (first, last, src, dst, links.src)):
        if (key[0], key[2]) != (other_type, own_type):
            continue
        if tree is not None:
            of = tree[own_type]
            at = np.flatnonzero(seed == own[of])
            other = other[of[at]]
        positions.append(at)
        others.append(other)
    return LeftOut.of(np.concatenate(positions), np.concatenate(others), len(seed))


@kernel
def _uniforms(key: np.uint64, link: Ids, turn: Ids, attempt: int, out: AnyArray) -> None:
    """out[:, i]: two numbers in [0, 1) of (key, link[i], turn[i], attempt)."""
    for i in range(len(link)):
        stream = stream_of(mix64(key + np.uint64(turn[i])), link[i])
        out[0, i] = uniform(stream, 2 * attempt)
        out[1, i] = uniform(stream, 2 * attempt + 1)


def slots_of(indptr: Ids, indices: AnyArray, src: Ids, dst: Ids) -> Ids:
    """int64[k]: the first slot of an edge from `src` to `dst` (int64[k] each), -1 where there is none."""
    order, found = np.lexsort((src, dst)), np.full(len(src), -1)
    _find_slots(indptr, indices, src[order], dst[order], found)
    slot = np.empty_like(found)
    slot[order] = found
    return slot


@kernel
def _find_slots(indptr: Ids, indices: AnyArray, src: Ids, dst: Ids, slot: Ids) -> None:
    """Fill `slot`, -1 before. Pairs ascend by (dst, src): the in-edges of a node are gone through once for all its pairs."""
    begin = 0
    while begin < len(dst):
        end = begin + 1
        while end < len(dst) and dst[end] == dst[begin]:
            end += 1
        wanted = end - begin
        for s in range(indptr[dst[begin]], indptr[dst[begin] + 1]):
            if wanted == 0:
                break
            u = int(indices[s])
            at = begin + np.searchsorted(src[begin:end], u)
            while at < end and src[at] == u and slot[at] < 0:
                slot[at] = s
                wanted -= 1
                at += 1
        begin = end
