"""LABOR's draws where edges stay on disk: one pass over the in-edges of all nodes that many batches expand in a hop.

A draw by the numbers of the sources reads all in-edges of its node. Those of the nodes that any of the batches expand are read
once, in file order and a piece at a time, while draws are made from the piece before. Batches that draw alike share the draw at
a node, and nodes of many in-edges keep theirs for the batches to come. The draws equal those of `SourceDraws.draw`.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import ahead
from ooc.sampling.kernels import Factors, num_drawn
from ooc.sampling.labor import KeptDraws, Key, Rule, Scratch, draw_at, keep_draw, place_of, take_kept
from ooc.sampling.left_out import LeftOut
from ooc.sampling.source_draws import NO_DRAWS, SourceDraws
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.arrays.segment_rows import RangePlan, SegmentRows
from ooc.stores.jit import kernel

PIECES = 2
"""in memory at once: one being read, one that draws are made from"""
NODE_BYTES = 96
"""of a node that a batch expands: its place among the batch's, among those of all batches and in a piece, and its draw's"""
_EDGE_BYTES = 20
"""of an in-edge drawn from a piece: its slot, its source, and what it stands for"""
_BYTES_AN_ID = 16
"""of a piece, for each in-edge that may be drawn from it"""
_GROWN = 9 / 8
"""`Buffers` are a little larger than asked for"""
_PAGE = 4096
_NO_ROOM = np.empty(0, np.float32)


class Expansion(NamedTuple):
    """The nodes that a batch expands in a hop, and where their draws go: slot[room[i]:room[i + 1]] has room for that of node i,
    which `size[i]` of them are in the end."""

    node: Ids
    """int64[n]"""
    key: Key
    left_out: LeftOut | None
    room: Ids
    """int64[n + 1]"""
    size: Ids
    """int64[n]; -1 where nothing is drawn yet"""
    slot: Ids
    source: Ids
    stands_for: Factors

    @classmethod
    def of(
        cls,
        indptr: Ids,
        node: Ids,
        fanout: int,
        key: Key,
        left_out: LeftOut | None,
        first: int,
        slot: Ids,
        source: Ids,
        stands_for: Factors | None,
    ) -> "Expansion":
        """first: of the edges, where the hop's begin."""
        room = np.empty(len(node) + 1, np.int64)
        make_room(indptr, node, fanout, first, room)
        factors = _NO_ROOM if stands_for is None else stands_for
        return cls(node, key, left_out, room, np.full(len(node), -1), slot, source, factors)

    def finish(self, edge_indptr: Ids) -> None:
        """Move the draws together; edge_indptr: int64[n + 1], where each begins then."""
        close_gaps(self.room, self.size, edge_indptr, self.slot, self.source, self.stands_for)


class Member(NamedTuple):
    """A batch of a group: the nodes order[j] of its expansion that are still to draw, and where they are in the group."""

    batch: Expansion
    order: Ids
    at: Ids
    """int64[len(order)], ascending"""


class Alike(NamedTuple):
    """Batches that draw alike, and the nodes at which one of them draws: ascending, and each once where nothing is left out."""

    rule: Rule
    left: LeftOut
    node: Ids
    members: tuple[Member, ...]
    kept: KeptDraws

    @classmethod
    def of(cls, draws: SourceDraws, batches: Sequence[Expansion], fanout: int, hop: int) -> "Alike":
        """batches: several of one key, or one from which edges are left out. Draws that are kept are handed out at once."""
        rule, left_out = draws.rule(batches[0].key, fanout, hop), batches[0].left_out
        orders = [np.argsort(each.node, kind="stable") for each in batches]
        if left_out is not None:
            order, node = orders[0], batches[0].node[orders[0]]
            return cls(rule, _in_order(left_out, order), node, (Member(batches[0], order, np.arange(len(node))),), NO_DRAWS)
        kept = draws.kept(rule, hop, sources=True)
        if len(kept.node):
            orders = [_hand_out_kept(kept, draws.indptr, fanout, *each) for each in zip(batches, orders, strict=True)]
        each_node = [batch.node[order] for batch, order in zip(batches, orders, strict=True)]
        node = np.unique(np.concatenate(each_node))
        members = zip(batches, orders, each_node, strict=True)
        shared = tuple(Member(batch, order, np.searchsorted(node, own)) for batch, order, own in members)
        return cls(rule, LeftOut(np.zeros(1, np.int64), np.empty(0, np.int64)), node, shared, kept)

    def draw(self, piece: "InEdgePiece", scratch: Scratch) -> int:
        """Draw at the group's nodes of a piece, for all its batches; returns -1, or a slot of an invalid weight."""
        begin, stop = np.searchsorted(self.node, [piece.node[0], piece.node[-1] + 1])
        if begin == stop:
            return -1
        node = self.node[begin:stop]
        indptr = np.zeros(len(node) + 1, np.int64)
        most = room_of(piece.node, piece.first, piece.last, node, self.rule.fanout)
        slot, source = np.empty(most, np.int64), np.empty(most, np.int64)
        weighted = any(len(each.batch.stands_for) for each in self.members)
        stands_for = np.empty(most if weighted else 0, np.float32)
        left = self.left.indptr[begin : stop + 1] if len(self.left.node) else self.left.indptr
        drawn = (indptr, slot, source, stands_for)
        bad = draw_piece(*piece, node, left, self.left.node, self.rule, scratch, self.kept, *drawn)
        for batch, order, at in self.members:
            if bad < 0:
                low, high = np.searchsorted(at, [begin, stop])
                where = (at[low:high], begin, order[low:high], batch.room, batch.size)
                hand_out(indptr, slot, source, stands_for, *where, batch.slot, batch.source, batch.stands_for)
        return int(bad)


class InEdgePiece(NamedTuple):
    """The in-edges of some nodes in memory: of node[i] the slots first[i]:last[i], from place[i] on."""

    node: Ids
    first: Ids
    last: Ids
    place: Ids
    indices: AnyArray
    weight: AnyArray


class InEdgePass:
    """Draws in the hops of batches whose in-edges `rows` has, and their weights `weight`, where they are drawn by these.

    at_once: in-edges drawn from a piece at most, but for one node's; a piece has 16 bytes for each.
    """

    def __init__(self, draws: SourceDraws, rows: Rows, weight: Rows | None, at_once: int) -> None:
        self.draws, self.rows, self.weight, self.at_once = draws, rows, weight, at_once

    def draw(self, batches: Sequence[Expansion], fanout: int, hop: int) -> tuple[int, int]:
        """Draw for all batches: the bytes read, and -1 or a slot of an invalid weight, with which the draws are incomplete."""
        groups = self._alike(batches, fanout, hop)
        node = np.unique(np.concatenate([np.empty(0, np.int64), *(group.node for group in groups)]))
        scratch, nbytes, buffers = Scratch.of(min(fanout, len(self.draws.indices))), 0, Buffers(PIECES)
        read = lambda part: self._read(node[part], buffers)  # noqa: E731
        parts = self._parts(node, fanout) if fanout else []
        with ThreadPoolExecutor(1, thread_name_prefix="ooc-in-edges") as pool:
            for piece, read_bytes in ahead(pool, read, parts, PIECES):
                nbytes += read_bytes
                for group in groups:
                    bad = group.draw(piece, scratch)
                    if bad >= 0:
                        return nbytes, bad
                del piece
        return nbytes, -1

    def nbytes(self, expanded: int, degree: int, hop: int, fanout: Sequence[int]) -> int:
        """Bytes that it takes in a hop beside the batches, with the draws that are kept.

        expanded: nodes of the batches that draw; degree: the most in-edges of one.
        """
        columns = [self.rows] if self.weight is None else [self.rows, self.weight, self.weight]  # weights are put in place
        bounds = [(_BYTES_AN_ID * self.at_once, each.row_bytes) for each in columns]
        pieces = sum(min(max(most, width * degree), width * self.rows.shape[0]) + 2 * _PAGE for most, width in bounds)
        drawn = max(self.at_once, degree if fanout[hop] < 0 else min(degree, fanout[hop]))
        own = int(PIECES * _GROWN * pieces) + _EDGE_BYTES * min(drawn, self.rows.shape[0])
        return NODE_BYTES * expanded + own + self.draws.kept_bytes(fanout, sources=True)

    def _alike(self, batches: Sequence[Expansion], fanout: int, hop: int) -> list[Alike]:
        """The batches by what they draw, in their order."""
        by_key: dict[Any, list[Expansion]] = {}
        for number, batch in enumerate(batches):
            by_key.setdefault(batch.key if batch.left_out is None else ("alone", number), []).append(batch)
        groups = [Alike.of(self.draws, group, fanout, hop) for group in by_key.values()]
        keeping = [number for number, group in enumerate(groups) if len(group.kept.node)]
        for number in keeping[:-1]:  # what is kept now is for the batches after the last one
            groups[number] = groups[number]._replace(kept=NO_DRAWS)
        return groups

    def _parts(self, node: Ids, fanout: int) -> list[slice]:
        """Pieces of the nodes, ascending, so that the reads of each and what is drawn from it are bounded."""
        alignment, gap = 1, 0
        if isinstance(self.rows, SegmentRows):
            alignment, gap = self.rows.engine.alignment, self.rows.cost.gap_bytes
        limits = (self.rows.row_bytes, alignment, gap, _BYTES_AN_ID * self.at_once, fanout, self.at_once)
        cut = np.empty(len(node) + 1, np.int64)
        count = cut_pieces(self.draws.indptr, node, *limits, cut)
        return [slice(int(cut[k]), int(cut[k + 1])) for k in range(count)]

    def _read(self, node: Ids, buffers: Buffers) -> tuple[InEdgePiece, int]:
        first, last = self.draws.indptr[node], self.draws.indptr[node + 1]

        def ranges(rows: Rows) -> tuple[AnyArray, Ids, int]:
            plan = RangePlan.of(rows, first, last)
            found = plan.read(lambda nbytes: buffers.empty((nbytes,), np.dtype(np.uint8)))
            return found.items, found.at, found.nbytes

        indices, place, nbytes = ranges(self.rows)
        weight: AnyArray = _NO_ROOM
        if self.weight is not None:
            items, at, more = ranges(self.weight)
            weight, nbytes = np.empty(len(indices), items.dtype), nbytes + more
            copy_ranges(items, at, last - first, weight, place)
        return InEdgePiece(node, first, last, place, indices, weight), nbytes


def _in_order(left_out: LeftOut, order: Ids) -> LeftOut:
    """What is left out at the nodes in this order."""
    count = np.diff(left_out.indptr)[order]
    indptr = np.concatenate([[0], np.cumsum(count)])
    begin = np.repeat(left_out.indptr[order] - indptr[:-1], count)
    return LeftOut(indptr, left_out.node[begin + np.arange(len(begin))])


def _hand_out_kept(kept: KeptDraws, indptr: Ids, fanout: int, batch: Expansion, order: Ids) -> Ids:
    """Give a batch the draws that are kept; returns those of `order` that are not."""
    rest = np.empty(len(order), np.int64)
    count = take_kept_draws(kept, indptr, fanout, batch.node, order, batch.room, batch.size, batch.slot, batch.source, rest)
    return rest[:count]


@kernel
def make_room(indptr: Ids, node: Ids, fanout: int, first: int, room: Ids) -> None:
    """Set room[i] to where the draw at node i may begin."""
    room[0] = first
    for i in range(len(node)):
        room[i + 1] = room[i] + num_drawn(indptr[node[i] + 1] - indptr[node[i]], fanout, False)


@kernel
def take_kept_draws(
    kept: KeptDraws, indptr: Ids, fanout: int, node: Ids, order: Ids, room: Ids, size: Ids, slot: Ids, source: Ids, rest: Ids
) -> int:
    """Copy the kept draws at node[order[j]] to their room; returns how many of `order` are left, in `rest`."""
    count = 0
    for i in order:
        place = place_of(kept, node[i], indptr[node[i] + 1] - indptr[node[i]], fanout)
        if place < 0 or kept.node[place] != node[i]:
            rest[count] = i
            count += 1
            continue
        size[i] = take_kept(kept, place, indptr[node[i]], slot, room[i])
        for e in range(size[i]):
            source[room[i] + e] = kept.source[place, e]
    return count


@kernel
def cut_pieces(
    indptr: Ids,
    node: Ids,
    row_bytes: int,
    alignment: int,
    gap_bytes: int,
    most_bytes: int,
    fanout: int,
    most_drawn: int,
    cut: Ids,
) -> int:
    """Set cut[k]:cut[k + 1] to the nodes of piece k, and return the number of pieces: as many nodes as `RangePlan` reads in
    `most_bytes`, and `most_drawn` in-edges are drawn at; one at least."""
    count = begin = drawn = 0
    end, nbytes = -1, 0
    for i in range(len(node)):
        first, last = indptr[node[i]], indptr[node[i] + 1]
        low = first * row_bytes // alignment * alignment
        high = -(-(last * row_bytes) // alignment) * alignment if last > first else low
        more = high - end if 0 <= low - end <= gap_bytes or low < end else high - low
        own = num_drawn(last - first, fanout, False)
        if i > begin and (nbytes + more > most_bytes or drawn + own > most_drawn):
            cut[count] = begin
            count += 1
            begin, nbytes, drawn, more = i, 0, 0, high - low
        nbytes, drawn, end = nbytes + max(0, more), drawn + own, max(end, high)
    if len(node) > 0:
        cut[count] = begin
        count += 1
    cut[count] = len(node)
    return count


@kernel
def room_of(piece_node: Ids, first: Ids, last: Ids, node: Ids, fanout: int) -> int:
    """In-edges drawn at most at these nodes, which are among a piece's."""
    total, p = 0, 0
    for v in node:
        while piece_node[p] != v:
            p += 1
        total += num_drawn(last[p] - first[p], fanout, False)
    return total


@kernel
def copy_ranges(items: AnyArray, at: Ids, length: Ids, out: AnyArray, place: Ids) -> None:
    """Copy items[at[i]:] to out[place[i]:], so many of range i."""
    for i in range(len(at)):
        for j in range(length[i]):
            out[place[i] + j] = items[at[i] + j]


@kernel
def draw_piece(
    piece_node: Ids,
    first: Ids,
    last: Ids,
    place: Ids,
    indices: AnyArray,
    weight: AnyArray,
    node: Ids,
    left_indptr: Ids,
    left: Ids,
    rule: Rule,
    scratch: Scratch,
    kept: KeptDraws,
    indptr: Ids,
    slot: Ids,
    source: Ids,
    stands_for: Factors,
) -> int:
    """Draw at these nodes, of a piece: their slots and sources in order. Returns -1, or a slot of an invalid weight."""
    p, at = 0, 0
    for i in range(len(node)):
        while piece_node[p] != node[i]:
            p += 1
        begin, degree = place[p], last[p] - first[p]
        shift = first[p] - begin
        out = left[left_indptr[i] : left_indptr[i + 1]] if len(left) > 0 else left
        size = draw_at(indices, weight, node[i], begin, begin + degree, shift, out, rule, scratch, slot, at, stands_for)
        if size < 0:
            return ~size + shift
        for e in range(at, at + size):
            source[e] = indices[slot[e]]
            slot[e] += shift
        where = place_of(kept, node[i], degree, rule.fanout) if len(out) == 0 else -1
        if keep_draw(kept, where, node[i], first[p], degree, slot, at, size):
            for j in range(size):
                kept.source[where, j] = source[at + j]
        at += size
        indptr[i + 1] = at
    return -1


@kernel
def hand_out(
    indptr: Ids,
    slot: Ids,
    source: Ids,
    stands_for: Factors,
    at: Ids,
    begin: int,
    order: Ids,
    room: Ids,
    size: Ids,
    out_slot: Ids,
    out_source: Ids,
    out_stands_for: Factors,
) -> None:
    """Copy the draws at[j] - begin of a group to where a batch has room for that of its node order[j]."""
    for j in range(len(at)):
        first, to = indptr[at[j] - begin], room[order[j]]
        size[order[j]] = indptr[at[j] - begin + 1] - first
        for e in range(size[order[j]]):
            out_slot[to + e], out_source[to + e] = slot[first + e], source[first + e]
            if len(out_stands_for) > 0:
                out_stands_for[to + e] = stands_for[first + e]


@kernel
def close_gaps(room: Ids, size: Ids, indptr: Ids, slot: Ids, source: Ids, stands_for: Factors) -> None:
    """Move each draw to behind the one before; indptr[i + 1]: where that of node i ends then."""
    at = room[0]
    for i in range(len(size)):
        for e in range(size[i]):
            slot[at + e], source[at + e] = slot[room[i] + e], source[room[i] + e]
            if len(stands_for) > 0:
                stands_for[at + e] = stands_for[room[i] + e]
        at += max(0, size[i])
        indptr[i + 1] = at
