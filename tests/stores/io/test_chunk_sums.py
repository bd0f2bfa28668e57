"""Chunks are compared with their checksums in whatever parts and order their bytes come."""

from itertools import pairwise
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.stores.errors import StoreError
from ooc.stores.io.chunk_sums import ChunkSums

CHUNK = 64


def sums_of(data: np.ndarray, rows: int) -> ChunkSums:
    """Checksums of `data`, which is padded to whole chunks; a row is 4 bytes."""
    known = np.array([google_crc32c.value(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)], np.uint32)
    return ChunkSums(Path("s.ooc/node/node/x"), CHUNK, CHUNK // 4, rows, lambda: known)


def seen(written: np.ndarray, read: np.ndarray, parts: list[tuple[int, int]], rows: int) -> ChunkSums:
    """The checksums of what was written, when these parts of what is read were shown to them."""
    sums = sums_of(written, rows)
    for low, high in parts:
        sums.see(low, read[low:high])
    return sums


CUTS = st.sets(st.integers(0, 400), max_size=12)


@given(rows=st.integers(1, 100), cuts=CUTS, seed=st.integers(0, 2**32), more=st.integers(0, 9))
def test_every_chunk_is_compared_once_all_its_bytes_were_seen(rows: int, cuts: set[int], seed: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    used = 4 * rows
    data = np.zeros(-(-used // CHUNK) * CHUNK, np.uint8)
    data[:used] = rng.integers(0, 256, used)
    bounds = sorted({0, used, *(cut for cut in cuts if cut < used)})
    parts = [(low, min(used, high + more)) for low, high in pairwise(bounds)]
    rng.shuffle(parts)
    assert not seen(data, data, parts, rows).pending
    at = int(rng.integers(0, used))
    damaged = data.copy()
    damaged[at] ^= 1
    first = at // CHUNK * CHUNK // 4
    with pytest.raises(StoreError, match=rf"x is damaged: chunk {at // CHUNK} \(rows {first} to {min(first + 15, rows - 1)}\)"):
        seen(data, damaged, parts, rows)


@given(parts=st.lists(st.tuples(st.integers(0, CHUNK), st.integers(0, CHUNK)).map(sorted), max_size=6))
def test_a_chunk_that_is_read_whole_is_compared_whatever_was_read_of_it_before(parts: list[list[int]]) -> None:
    data = np.arange(CHUNK).astype(np.uint8)
    before = [(low, high) for low, high in parts]
    assert not seen(data, data, [*before, (0, CHUNK)], CHUNK // 4).pending


def test_only_touched_chunks_that_were_not_compared_are_asked_for() -> None:
    data = np.arange(10 * CHUNK).astype(np.uint8)
    sums = sums_of(data, 10 * CHUNK // 4)
    sums.see(2 * CHUNK, data[2 * CHUNK : 3 * CHUNK])
    offset, length = np.array([CHUNK + 5, 9 * CHUNK]), np.array([2 * CHUNK, 2 * CHUNK])
    assert sums.unchecked(offset, length) == [1, 3, 9]
    assert sums.unchecked(np.array([0]), np.array([0])) == []


def test_a_wrong_number_of_checksums_is_an_error() -> None:
    sums = ChunkSums(Path("x"), CHUNK, 16, 16, lambda: np.zeros(2, np.uint32))
    with pytest.raises(StoreError, match="x has 1 chunks, but 2 checksums"):
        sums.see(0, np.zeros(CHUNK, np.uint8))
