"""PURE: counter-based randomness: keys, permutations, and the seeds of a batch from a cursor.

A key is a hash of (seed, purpose, epoch, step, rank), never a generator's state, so a batch is a function of those numbers and
resuming needs no saved generator.
"""

from collections.abc import Sized
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.stores.jit import kernel

_MASK = (1 << 64) - 1
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a key is used for; streams of different purposes are independent."""

    SHUFFLE = 1
    SAMPLE = 2
    TORCH = 3
    INIT = 4
    EVALUATE = 5
    DRIFT = 6
    NORMALISE = 7
    NEGATIVE = 8
    RANKING = 9
    TABLE = 10
    SPLIT = 11
    VARIATE = 12
    BUCKETS = 13
    COMPRESS = 14
    POLICY = 15


def mix(value: int) -> int:
    """The finalizer of splitmix64, a bijection of 64-bit integers (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(seed: int, purpose: Purpose, epoch: int = 0, step: int = 0, rank: int = 0) -> int:
    """Return the 64-bit key of one use of randomness."""
    state = 0
    for part in (seed, int(purpose), epoch, step, rank):
        state = mix(state ^ (part & _MASK))
    return state


def numbered(key: int, number: int) -> int:
    """Return the key of stream `number` of several under one key; number 0 is `key` itself."""
    return key if number == 0 else mix((key ^ mix(number)) & _MASK)


@kernel
def mix64(value: np.uint64) -> np.uint64:
    """`mix` for kernels."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@kernel
def keyed_uniform(key: np.uint64, row: NDArray[np.int64], bound: np.float32, out: NDArray[np.float32]) -> None:
    """Fill out[i] ([n, f]) with numbers in [-bound, bound), a function of key, row[i] (int64[n]) and the column."""
    for i in range(len(row)):
        stream = mix64(key ^ mix64(np.uint64(row[i])))
        for j in range(out.shape[1]):
            bits = mix64(stream + np.uint64(j) * _GOLDEN) >> np.uint64(40)
            out[i, j] = (np.float32(bits) * np.float32(2.0**-23) - np.float32(1)) * bound


@kernel
def _permute(round_keys: NDArray[np.uint64], half_bits: int, size: int, start: int, out: NDArray[np.int64]) -> None:
    """Fill `out` with the images of start, start + 1, ..., repeating the cipher until a value is below `size`."""
    shift = np.uint64(half_bits)
    mask = (np.uint64(1) << shift) - np.uint64(1)
    for i in range(len(out)):
        value = np.uint64(start + i)
        while True:
            left, right = value >> shift, value & mask
            for r in range(len(round_keys)):
                left, right = right, left ^ (mix64(round_keys[r] ^ right) & mask)
            value = (left << shift) | right
            if value < np.uint64(size):
                break
        out[i] = np.int64(value)


class KeyedPermutation:
    """A pseudo-random permutation of 0..n-1 (n <= 2**62) determined by a key; any slice can be computed on its own.

    A balanced Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits, with cycle walking (Black and
    Rogaway, 2002) down to n: O(1) memory, under four encryptions per position on average.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= 2**62:
            raise ValueError(f"a permutation cannot have {n} positions: give 0 to 2**62")
        self.n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2) if n else 1
        self._round_keys = np.array([mix(mix(key & _MASK) ^ r) for r in range(_ROUNDS)], np.uint64)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, positions: slice) -> NDArray[np.int64]:
        """Return the images of start..stop-1, int64[stop - start]. Raises ValueError for a step other than 1."""
        start, stop, step = positions.indices(self.n)
        if step != 1:
            raise ValueError(f"slices of a permutation must have step 1, not {step}")
        out = np.empty(max(0, stop - start), np.int64)
        _permute(self._round_keys, self._half_bits, self.n, start, out)
        return out


class Cursor(NamedTuple):
    """Position of the input side; with the seed, its whole state."""

    epoch: int
    step: int


def steps_of(n: int, batch_size: int, drop_last: bool = False, world_size: int = 1) -> int:
    """Steps of one epoch over `n` ids in batches of `batch_size` on each of `world_size` ranks."""
    step_size = batch_size * world_size
    return n // step_size if drop_last else -(-n // step_size)


def seeds_of(
    ids: Sized,
    cursor: Cursor,
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> NDArray[np.int64]:
    """Return the positions in `ids` of the batch of `rank` at `cursor`, int64[b].

    A step covers `batch_size * world_size` positions of one order shared by all ranks, of which rank r takes the r-th share; an
    uneven last step is divided as evenly as possible. Raises IndexError for a step past the epoch's end.
    """
    steps = steps_of(len(ids), batch_size, drop_last, world_size)
    if not 0 <= cursor.step < steps:
        raise IndexError(f"step {cursor.step}: an epoch has steps 0..{steps - 1}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside 0..{world_size - 1}")
    first = cursor.step * batch_size * world_size
    count = min(batch_size * world_size, len(ids) - first)
    start, stop = first + count * rank // world_size, first + count * (rank + 1) // world_size
    if not shuffle:
        return np.arange(start, stop)
    return KeyedPermutation(len(ids), key(seed, Purpose.SHUFFLE, cursor.epoch))[start:stop]
