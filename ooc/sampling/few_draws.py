"""LABOR's draws of few in-edges among many, without weights, and where none is left out: without branches, in vectors.

The numbers of a node's in-edges are made a block at a time, and those below a limit collected: so many that they are seldom
fewer than the fan-out. Which of them come from a source that an earlier in-edge has is looked up for these alone: where the
source's number is below the limit, an earlier in-edge of it is among them too; where an in-edge's own number is, which counts
only then, all earlier ones are compared with it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import mix64
from ooc.sampling.kernels import sort_slots
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.jit import kernel

FEW = 64
"""the largest fan-out"""
_DEVIATIONS = 2.5
"""by so many standard deviations more candidates are expected than are chosen, so that they are seldom too few"""
_UNIT = 2.0**53
_BLOCK = 16
"""in-edges whose numbers are made at once, two vectors of eight or more"""
_BITS_OF_BYTES = [[place for place in range(8) if byte >> place & 1] for byte in range(256)]
_PLACES = np.array([[*own, *[0] * (8 - len(own)), len(own)] for own in _BITS_OF_BYTES], np.uint8).ravel()
Quarters = tuple[np.uint64, np.uint64, np.uint64, np.uint64]
"""the keys of the sources' numbers"""


class Candidates(NamedTuple):
    """What `draw_few` works in."""

    number: NDArray[np.uint64]
    """[8 * FEW]"""
    candidate: Ids
    """[8 * FEW]: positions among the node's in-edges"""
    other: Ids
    """[4 * FEW]: those that count only if their source is met before"""
    rank: Ids
    """[8 * FEW]"""
    places: NDArray[np.uint8]
    """[256 * 9]: of each byte where its bits are, and how many"""

    @classmethod
    def empty(cls) -> "Candidates":
        candidate, other, rank = (np.empty(each * FEW, np.int64) for each in (8, 4, 8))
        return cls(np.empty(8 * FEW, np.uint64), candidate, other, rank, _PLACES)


@kernel
def guessed(fanout: int) -> float:
    """How many in-edges `draw_few` collects, so that they are seldom too few."""
    return fanout + _DEVIATIONS * np.sqrt(max(0, fanout)) + 1


@kernel
def number_at(indices: AnyArray, s: int, keys: Quarters) -> tuple[np.uint64, np.uint64]:
    """The stream of random numbers of the source at `s`, and the first of them: 53 bits."""
    hashed = mix64(np.uint64(indices[np.uint64(s)]))
    odd, upper = hashed & np.uint64(1) != np.uint64(0), hashed & np.uint64(2) != np.uint64(0)
    key = (keys[3] if odd else keys[2]) if upper else (keys[1] if odd else keys[0])
    return key ^ hashed, mix64(key ^ hashed) >> np.uint64(11)


@kernel
def own_number(stream: np.uint64, offset: int) -> np.uint64:
    """That of an edge whose source a node has had before, in its in-edge `offset`."""
    return mix64(stream ^ mix64(~np.uint64(offset))) >> np.uint64(11)


@kernel
def low_of_block(indices: AnyArray, s: int, offset: int, keys: Quarters, limit: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Of the `_BLOCK` in-edges from `s` on, a bit for each whose source's number is below the limit, and for each other one
    whose own number is."""
    by_source = by_slot = np.uint64(0)
    for j in range(_BLOCK):
        stream, number = number_at(indices, s + j, keys)
        bit = np.uint64(1) << np.uint64(j)
        by_source |= bit if number < limit else np.uint64(0)
        by_slot |= bit if own_number(stream, offset + j) < limit else np.uint64(0)
    return by_source, by_slot & ~by_source


@kernel
def occurs_before(indices: AnyArray, first: int, stop: int) -> bool:
    """Whether a slot of first:stop has the source of slot `stop`: all are compared, as LLVM compares many at once."""
    wanted, equal = indices[stop], np.int32(0)
    for s in range(first, stop):
        equal += np.int32(indices[np.uint64(s)] == wanted)
    return bool(equal > 0)


@kernel
def add_bits(bits: np.uint64, offset: int, places: NDArray[np.uint8], found: Ids, size: int) -> int:
    """Append offset + j to found[:size] for every bit j of `_BLOCK`, in order and without branches; returns the new size.

    places: see `Candidates`. Up to eight entries behind the new ones are changed.
    """
    for shift in range(0, _BLOCK, 8):
        row = np.int64((bits >> np.uint64(shift)) & np.uint64(255)) * 9
        for j in range(8):
            found[np.uint64(size + j)] = offset + shift + places[np.uint64(row + j)]
        size += places[np.uint64(row + 8)]
    return size


@kernel
def low_in_edges(
    indices: AnyArray,
    first: int,
    degree: int,
    keys: Quarters,
    limit: np.uint64,
    places: NDArray[np.uint8],
    candidate: Ids,
    other: Ids,
) -> tuple[int, int]:
    """Put into `candidate` which in-edges have sources of numbers below the limit, and into `other` which others would be below
    it by their own. Returns how many, or -1 where they are too many."""
    size = others = 0
    for offset in range(0, degree, _BLOCK):
        by_source, by_slot = low_of_block(indices, first + offset, offset, keys, limit)
        there = ~np.uint64(0) if degree - offset >= _BLOCK else (np.uint64(1) << np.uint64(degree - offset)) - np.uint64(1)
        if by_source | by_slot == np.uint64(0):
            continue
        size = add_bits(by_source & there, offset, places, candidate, size)
        others = add_bits(by_slot & there, offset, places, other, others)
        if max(size, others) > len(other) - _BLOCK:
            return -1, 0
    return size, others


@kernel
def number_repeated(
    indices: AnyArray, first: int, keys: Quarters, limit: np.uint64, number: NDArray[np.uint64], candidate: Ids, size: int
) -> int:
    """Give candidates whose source an earlier one has, which is told by its number, their own; returns how many are below the
    limit then, in the order of before."""
    for i in range(size - 1, 0, -1):
        for j in range(i):
            if number[j] == number[i]:
                number[i] = own_number(number_at(indices, first + candidate[i], keys)[0], candidate[i])
                break
    at = 0
    for i in range(size):
        number[at], candidate[at] = number[i], candidate[i]
        at += int(number[i] < limit)
    return at


@kernel
def rank_all(number: NDArray[np.uint64], rank: NDArray[np.int64], size: int) -> bool:
    """Set rank[i] to how many of number[:size] are below number[i]; returns whether all differ. Without branches."""
    for j in range(size):
        rank[np.uint64(j)] = 0
    for i in range(size):
        own = number[i]
        for j in range(size):
            rank[np.uint64(j)] += np.int64(own < number[np.uint64(j)])
    total = 0
    for j in range(size):
        total += rank[np.uint64(j)]
    return total == size * (size - 1) // 2


@kernel
def keep_least(number: NDArray[np.uint64], candidate: Ids, rank: NDArray[np.int64], size: int, fanout: int) -> np.uint64:
    """Move the candidates of ranks below `fanout` to the front, in order; returns the largest of their numbers."""
    at, largest = 0, np.uint64(0)
    for i in range(size):
        largest += number[i] * np.uint64(rank[i] == fanout - 1)
        number[at], candidate[at] = number[i], candidate[i]
        at += int(rank[i] < fanout)
    return largest


@kernel
def add_repeated(
    indices: AnyArray,
    first: int,
    keys: Quarters,
    limit: np.uint64,
    other: Ids,
    others: int,
    number: NDArray[np.uint64],
    candidate: Ids,
    size: int,
) -> int:
    """Append those of other[:others] to the candidates whose own numbers are below the limit and whose sources are met before;
    returns the new size."""
    for i in range(others):
        number[size + i] = own_number(number_at(indices, first + other[i], keys)[0], other[i])
    lower = 0
    for i in range(others):
        number[size + lower], other[lower] = number[size + i], other[i]
        lower += int(number[size + i] < limit)
    begin = size
    for i in range(lower):
        if occurs_before(indices, first, first + other[i]):
            number[size], candidate[size] = number[begin + i], other[i]
            size += 1
    return size


@kernel
def draw_few(
    indices: AnyArray,
    first: int,
    last: int,
    fanout: int,
    keys_of: NDArray[np.uint64],
    scratch: Candidates,
    guess: float,
    slot: Ids,
    at: int,
) -> int:
    """Put the `fanout` in-edges of first:last with the smallest numbers into slot[at:], in order; there are more.

    Collects the in-edges with numbers below a limit, about `guess` of them, and chooses among these. keys_of: uint64[4], of the
    quarters. Returns `fanout`, which is `FEW` at most, or -1 where those are fewer, or many more.
    """
    degree = last - first
    number, candidate, other, rank, places = scratch
    if last + _BLOCK > len(indices):  # blocks are read whole
        return -1
    keys = keys_of[0], keys_of[1], keys_of[2], keys_of[3]
    limit, size, others = np.uint64(_UNIT), degree, 0
    if degree <= guess:
        for j in range(degree):
            candidate[j] = j
    else:
        limit = np.uint64(guess / degree * _UNIT)
        size, others = low_in_edges(indices, first, degree, keys, limit, places, candidate, other)
    for i in range(size):
        number[i] = number_at(indices, first + candidate[i], keys)[1]
    if size >= fanout and not rank_all(number, rank, size):
        size = number_repeated(indices, first, keys, limit, number, candidate, size)
        rank_all(number, rank, size)
    if size < fanout:
        return -1
    limit = keep_least(number, candidate, rank, size, fanout)
    size = add_repeated(indices, first, keys, limit, other, others, number, candidate, fanout)
    if size > fanout:
        rank_all(number, rank, size)
        keep_least(number, candidate, rank, size, fanout)
        sort_slots(candidate, 0, fanout)
    for j in range(fanout):
        slot[at + j] = first + candidate[j]
    return fanout
