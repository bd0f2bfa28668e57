"""PURE: the counter-based random numbers of `ooc.runtime.keyed_random` and `ooc.sampling.kernels` as torch operations.

They run on any device and give the kernels' bits: 64-bit hashes wrap around in int64, and logical shifts are arithmetic ones
with the sign's copies masked out.
"""

import torch
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = (each - 2**64 for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_UNIT = 2.0**-53
_STEP_32, _MIX_1_32, _MIX_2_32, _LOW_32 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B, 2**32 - 1


def signed(value: int) -> int:
    """The int64 of the same 64 bits.

    >>> signed(2**64 - 1), signed(2**64 + 5)
    (-1, 5)
    """
    return (value + 2**63) % 2**64 - 2**63


def _shifted(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (value >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def mix64(value: Tensor) -> Tensor:
    """`keyed_random.mix` of each of `value` (int64, the bits of unsigned numbers)."""
    value = value + _GOLDEN
    value = _shifted(value, 30).bitwise_xor_(value).mul_(_MIX_1)
    value = _shifted(value, 27).bitwise_xor_(value).mul_(_MIX_2)
    return _shifted(value, 31).bitwise_xor_(value)


def stream_of(key: int, node: Tensor) -> Tensor:
    """Start of the random stream of (key, node), for each of `node` (int64)."""
    return mix64(mix64(node).bitwise_xor_(signed(key)))


def uniform(stream: Tensor, counter: Tensor) -> Tensor:
    """Numbers `counter` of streams, in [0, 1): float64 of 53 random bits. The two (int64) are broadcast."""
    return _shifted(mix64(stream + counter * _GOLDEN), 11).to(torch.float64).mul_(_UNIT)


def number32(position: Tensor, one: int, other: int) -> Tensor:
    """`ooc.runtime.keyed_dropout.number` of positions below 2**32 (int64): 32 random bits each, as int64.

    one, other: of 32 bits.
    """
    h = (position * _STEP_32 + one).bitwise_and_(_LOW_32)
    h = (h >> 16).bitwise_xor_(h).mul_(_MIX_1_32).bitwise_and_(_LOW_32)
    h = (h >> 15).bitwise_xor_(h).bitwise_xor_(other).mul_(_MIX_2_32).bitwise_and_(_LOW_32)
    return (h >> 16).bitwise_xor_(h)
