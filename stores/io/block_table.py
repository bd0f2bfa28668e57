"""Kernels over the table of `SharedBlocks`: which blocks of which files are in shared memory, and who reads what.

All that changes a slot runs under the lock of `SharedBlocks`. A slot's data is written without it, by whom has pages of it
pending, and read without it, by whom compares the slot's generation afterwards.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from ooc.stores.jit import kernel

Ints = NDArray[np.int64]

PAGE_BYTES = 4096
BLOCK_PAGES = 64
"""a bit of an int64 for each page"""
BLOCK_BYTES = PAGE_BYTES * BLOCK_PAGES

LANE, BLOCK, GENERATION, PRESENT, SESSION, PASSED_AT = range(6)
"""Columns of a slot: the file and the number of its block, how often the slot was given to another block, a bit for each page
that is there, and the session and the progress beyond which a member needs the block no more"""
COLUMNS = 6
PENDING, TAKEN = range(2)
"""Of a slot and a member, a bit for each page: those that the member reads, and those that it has"""
KEY, PROGRESS, ACTIVE = range(3)
"""Columns of a member's reading of a file: its session, how far it is, in blocks over all passes of the session, and whether it
goes on"""
HEAD, GONE, DIRTY, BROKEN = range(4)
"""The header: the slot to look at first, a bit for each member that has ended, whether the lock is held, and whether a member
ended while it held it"""

_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


@kernel
def split(offset: Ints, length: Ints, total: int, out: Ints) -> int:
    """Cut extents at the borders of blocks and at the end of the array; returns the number of parts.

    out: int64[parts, 4], for each its block, its first byte in the block, its length and where it begins in the extents. With
    no row, parts are counted only. The pages behind the array's end belong to no part.
    """
    count = at = 0
    for j in range(len(offset)):
        low, end = offset[j], min(offset[j] + length[j], total)
        while low < end:
            block = low // BLOCK_BYTES
            size = min(end, (block + 1) * BLOCK_BYTES) - low
            if count < len(out):
                out[count, 0] = block
                out[count, 1] = low - block * BLOCK_BYTES
                out[count, 2] = size
                out[count, 3] = at + low - offset[j]
            count += 1
            low += size
        at += length[j]
    return count


@kernel
def _mask(first: int, nbytes: int) -> int:
    """A bit for each page of bytes first:first + nbytes of a block."""
    low, high = first // PAGE_BYTES, (first + nbytes - 1) // PAGE_BYTES + 1
    ones = np.int64(-1) if high - low == BLOCK_PAGES else (np.int64(1) << np.int64(high - low)) - np.int64(1)
    return int(ones << np.int64(low))


@kernel
def wanted_pages(parts: Ints, begin: int, most: int, block: Ints, mask: Ints) -> tuple[int, int]:
    """Up to `most` blocks of parts[begin:] and their pages; returns (blocks, the part behind them)."""
    count, p = 0, begin
    while p < len(parts):
        if count == 0 or block[count - 1] != parts[p, 0]:
            if count == most:
                break
            block[count], mask[count] = parts[p, 0], 0
            count += 1
        mask[count - 1] |= _mask(parts[p, 1], parts[p, 2])
        p += 1
    return count, p


@kernel
def _passed(slots: Ints, pages: Ints, reading: Ints, gone: int, s: int) -> bool:
    """Whether every member has taken the slot's block, is beyond it, or is not coming for it."""
    lane = slots[s, LANE]
    for q in range(reading.shape[1]):
        lacks = slots[s, PRESENT] & ~pages[s, TAKEN, q]
        if lacks == 0 or gone & (np.int64(1) << np.int64(q)) or reading[lane, q, ACTIVE] == 0:
            continue
        if reading[lane, q, KEY] == slots[s, SESSION] and reading[lane, q, PROGRESS] < slots[s, PASSED_AT]:
            return False
    return True


@kernel
def _pinned(pages: Ints, gone: int, s: int) -> bool:
    """Whether a member that lives is reading pages of the slot."""
    reading = False
    for q in range(pages.shape[2]):
        reading |= pages[s, PENDING, q] != 0 and gone & (np.int64(1) << np.int64(q)) == 0
    return reading


@kernel
def _slot_for(header: Ints, slots: Ints, pages: Ints, reading: Ints, force: bool) -> int:
    """A slot whose block may go, -1 if there is none; force: also one that members have not taken yet, the oldest."""
    count = len(slots)
    for i in range(count):
        s = (header[HEAD] + i) % count
        if _pinned(pages, header[GONE], s):
            continue
        if force or slots[s, LANE] < 0 or _passed(slots, pages, reading, header[GONE], s):
            return s
    return -1


@kernel
def _find(slots: Ints, lane: int, block: int) -> int:
    for s in range(len(slots)):
        if slots[s, BLOCK] == block and slots[s, LANE] == lane:
            return s
    return -1


@kernel
def _behind(reading: Ints, gone: int, who: tuple[int, int, int], others: bool) -> int:
    """How far the last member of a session is in a file; others: without the one that asks."""
    me, lane, session = who
    last = np.int64(2**62)
    for q in range(reading.shape[1]):
        if gone & (np.int64(1) << np.int64(q)) or reading[lane, q, ACTIVE] == 0 or reading[lane, q, KEY] != session:
            continue
        if q != me or not others:
            last = min(last, reading[lane, q, PROGRESS])
    return int(last)


@kernel
def claim(
    header: Ints,
    slots: Ints,
    pages: Ints,
    reading: Ints,
    who: tuple[int, int, int],
    begin: int,
    force: bool,
    block: Ints,
    mask: Ints,
    found: Ints,
) -> int:
    """Divide the pages `mask` of blocks `block` of a file: those that are there, those that others read, and those to read now.

    Ends at a block for which there is no slot, unless all members that go through the file are beyond it. Blocks get slots only
    within as many as there are slots from where the last member is, so that what it needs next always finds one.

    who: the member, the file and the session; begin: blocks of the member's passes before this one; force: see `_slot_for`.
    found: int64[blocks, 5], for each block its slot, -1 if nobody else needs it, its generation, and the pages in the three
    cases. The last become pending.

    Returns how many blocks are in `found`.
    """
    me, lane, session = who
    last, last_other = _behind(reading, header[GONE], who, False), _behind(reading, header[GONE], who, True)
    for i in range(len(block)):
        s = _find(slots, lane, block[i])
        at = begin + block[i] + 1
        if s < 0:
            if force or at <= last + len(slots):
                s = _slot_for(header, slots, pages, reading, force)
            if s < 0 and (force or last_other >= at):
                found[i, 0], found[i, 1], found[i, 2], found[i, 3], found[i, 4] = -1, 0, 0, 0, mask[i]
                continue
            if s < 0:
                return i
            slots[s, PRESENT] = 0
            slots[s, GENERATION] += 1
            pages[s] = 0
            slots[s, LANE], slots[s, BLOCK] = lane, block[i]
            slots[s, SESSION], slots[s, PASSED_AT] = session, at
            header[HEAD] = (s + 1) % len(slots)
        elif slots[s, SESSION] != session or slots[s, PASSED_AT] < at:  # of an earlier pass
            slots[s, SESSION], slots[s, PASSED_AT] = session, at
            pages[s, TAKEN] = 0
        there = slots[s, PRESENT] & mask[i]
        others = np.int64(0)
        for q in range(pages.shape[2]):
            if not header[GONE] & (np.int64(1) << np.int64(q)):
                others |= pages[s, PENDING, q]
        others &= mask[i] & ~there
        mine = mask[i] & ~there & ~others
        pages[s, PENDING, me] |= mine
        found[i, 0], found[i, 1] = s, slots[s, GENERATION]
        found[i, 2], found[i, 3], found[i, 4] = there, others, mine
    return len(block)


@kernel
def publish(slots: Ints, pages: Ints, me: int, found: Ints, complete: bool) -> None:
    """The pages that this member had to read (see `claim`) are in their slots; complete: False if they could not be read."""
    for i in range(len(found)):
        s = found[i, 0]
        if s >= 0 and slots[s, GENERATION] == found[i, 1]:
            if complete:
                slots[s, PRESENT] |= found[i, 4]
                pages[s, TAKEN, me] |= found[i, 4]
            pages[s, PENDING, me] &= ~found[i, 4]


@kernel
def sound(slots: Ints, pages: Ints, me: int, found: Ints, column: int) -> bool:
    """Whether the pages in this column of `found`, which were copied, were there all the time: these count as taken."""
    fine = True
    for i in range(len(found)):
        s, copied = found[i, 0], found[i, column]
        if copied != 0 and (slots[s, GENERATION] != found[i, 1] or slots[s, PRESENT] & copied != copied):
            fine = False
        elif copied != 0:
            pages[s, TAKEN, me] |= copied
    return fine


@kernel
def arrived(header: Ints, slots: Ints, pages: Ints, found: Ints) -> int:
    """How many blocks lack pages that others read; -1 if some of these will not come, as nobody reads them any more."""
    lacking = 0
    for i in range(len(found)):
        s = found[i, 0]
        if s < 0 or found[i, 3] == 0:
            continue
        lacks, coming = found[i, 3] & ~slots[s, PRESENT], np.int64(0)
        for q in range(pages.shape[2]):
            if not header[GONE] & (np.int64(1) << np.int64(q)):
                coming |= pages[s, PENDING, q]
        if slots[s, GENERATION] != found[i, 1] or (lacks & ~coming & ~slots[s, PRESENT]) != 0:
            return -1
        lacking += int(lacks != 0)
    return lacking


@kernel
def runs_of(parts: Ints, found: Ints, column: int, out: Ints) -> int:
    """The runs of pages that lie in this column of `found`; returns how many there are.

    parts: those of the blocks of `found`, in order. out: int64[runs, 4], for each run the virtual byte where it begins, where
    it goes in the extents, where it is in the shared memory (below 0: nowhere), and its length. No run is in two blocks.
    """
    count, i = 0, -1
    last = np.int64(-1)
    for p in range(len(parts)):
        if parts[p, 0] != last:
            i, last = i + 1, parts[p, 0]
        those, low, end = found[i, column], parts[p, 1], parts[p, 1] + parts[p, 2]
        while low < end:
            page = low // PAGE_BYTES
            size = min(end, (page + 1) * PAGE_BYTES) - low
            if (those >> np.int64(page)) & 1:
                at, data = parts[p, 3] + low - parts[p, 1], found[i, 0] * BLOCK_BYTES + low
                virtual = last * BLOCK_BYTES + low
                k = count - 1
                joins = count > 0 and out[k, 0] + out[k, 3] == virtual and out[k, 1] + out[k, 3] == at
                if joins and out[k, 2] + out[k, 3] == data and low > 0:
                    out[k, 3] += size
                else:
                    out[count, 0], out[count, 1], out[count, 2], out[count, 3] = virtual, at, data, size
                    count += 1
            low += size
    return count


@kernel
def copy_runs(runs: Ints, source: int, source_column: int, target: int, target_column: int) -> None:
    """Copy runs (`runs_of`) from where a column says, behind the address `source`, to where another says, behind `target`.

    Those that are nowhere are left out.
    """
    for k in range(len(runs)):
        if runs[k, source_column] < 0 or runs[k, target_column] < 0:
            continue
        _memcpy(target + runs[k, target_column], source + runs[k, source_column], runs[k, 3])
