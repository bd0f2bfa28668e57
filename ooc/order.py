"""PURE: a cursor -> the seeds of a batch, and the keys every random choice hangs on.

Randomness is counter-based: a key is a hash of (seed, purpose, epoch, step, rank), never the state of a generator, so a
batch is a function of those numbers alone and resuming needs no saved generator.
"""

from enum import IntEnum

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a key is for: streams of different purposes never meet."""

    SHUFFLE = 1
    SAMPLE = 2
    TORCH = 3
    INIT = 4
    EVALUATE = 5


def mix(value: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers with good avalanche (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(seed: int, purpose: Purpose, epoch: int = 0, step: int = 0, rank: int = 0) -> int:
    """A 64-bit key for one use of randomness.

    >>> key(0, Purpose.SAMPLE, epoch=1, step=2) == key(0, Purpose.SAMPLE, epoch=1, step=2)
    True
    """
    state = 0
    for part in (seed, int(purpose), epoch, step, rank):
        state = mix(state ^ (part & _MASK))
    return state
