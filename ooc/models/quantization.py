"""Float tensors as 8, 4 or 2 bits an element with a scale a group, rounded at random so that they are right on average.

An element of a group of `GROUP` consecutive ones becomes the number of steps that it lies above the group's smallest one, and a
step is the group's range divided by 255, 15 or 3 (ActNN, Chen et al., 2021; EXACT, Liu et al., 2022; GACT, Liu et al., 2022).
Which of the two neighboring steps it is, is drawn with the probability that makes its expectation the element. Draws are those
of `ooc.models.dropout`: a function of the key and the element's position, whatever the threads. A group's smallest element and
step are bfloat16, which has the range of float32, rounded outwards so that the group still lies between both ends.

On the CPU kernels do it; on other devices torch's operations do, with the same bits.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime.keyed_dropout import number, run_of
from ooc.runtime.keyed_random import mix
from ooc.runtime.keyed_tensors import number32
from ooc.runtime.parts import in_parts
from ooc.stores.arrays.encoding import of_bfloat16
from ooc.stores.jit import kernel

Compression = Literal["int8", "int4", "int2"]
BITS: dict[str, int] = {"int8": 8, "int4": 4, "int2": 2}
GROUP = 256
"""elements that share a scale: 4 bytes of 260, 132 or 68"""
_AT_ONCE = 2**20
"""elements for which torch's operations have temporaries at once; divides 2**32, behind which draws have another key"""
_NAN = np.uint16(0x7FC0)
_GOLDEN = 0x9E3779B97F4A7C15
_UNIT = np.float32(2.0**-24)
_SIGN, _INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


class Quantized(NamedTuple):
    """A tensor's elements in row-major order."""

    codes: Tensor
    """uint8[-(-n * bits // 8)], the first elements in the lowest bits"""
    ends: Tensor
    """bfloat16[groups, 2]: the smallest element, and the step"""
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.codes.nbytes + self.ends.nbytes


def kept_share(compression: Compression) -> float:
    """Bytes of a matrix, by those of float32.

    >>> kept_share("int4")
    0.12890625
    """
    return (BITS[compression] * GROUP // 8 + 4) / (4 * GROUP)


@kernel
def _float_of(ordered: np.int32) -> np.float32:
    """The float32 of `_ordered`."""
    return np.int32(ordered ^ ((ordered >> 31) & _SIGN)).view(np.float32)


@kernel
def rounded_down(value: np.float32) -> np.uint16:
    """The bits of the largest bfloat16 that is not above a finite number."""
    bits = np.float32(value).view(np.uint32)
    cut = np.uint16(bits >> np.uint32(16))
    return np.uint16(cut + np.uint16((bits >> np.uint32(31)) & np.uint32((bits & np.uint32(0xFFFF)) != 0)))


@kernel
def rounded_up(value: np.float32) -> np.uint16:
    """The bits of the smallest bfloat16 that is not below a number of at least 0."""
    return np.uint16((np.float32(value).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16))


@kernel
def ends_of(bits: NDArray[np.int32], levels: np.float32) -> tuple[np.uint16, np.uint16]:
    """(the smallest of a group, its step) as bfloat16's bits; both not a number where an element is not finite.

    bits: int32[n], those of the elements as float32. Compared as integers, which compilers do many at once.
    """
    low, high = np.int32(2**31 - 1), np.int32(-(2**31))
    for i in range(len(bits)):
        ordered = np.int32(bits[i] ^ ((bits[i] >> 31) & _SIGN))
        low, high = min(low, ordered), max(high, ordered)
    if high >= _INFINITE or low <= np.int32(-_INFINITE - 1):
        return _NAN, _NAN
    least = rounded_down(_float_of(low))
    step = np.float32(np.float32(_float_of(high) - of_bfloat16(least)) / levels)
    return (_NAN, _NAN) if step > np.float32(3.38e38) else (least, rounded_up(step))


@kernel
def _quantize(
    key: np.uint64, begin: int, bits: int, x: NDArray[np.float32], codes: NDArray[np.uint8], ends: NDArray[np.uint16]
) -> None:
    """Fill `codes` and `ends` with the groups of x, whose first element is number `begin`, a multiple of `GROUP`."""
    per, levels = 8 // bits, np.float32((1 << bits) - 1)
    whole = np.zeros(GROUP, np.uint8)
    for group in range(len(ends)):
        first = group * GROUP
        own = x[first : first + GROUP]
        least, step = ends_of(own.view(np.int32), levels)
        ends[group, 0], ends[group, 1] = least, step
        low, width = of_bfloat16(least), of_bfloat16(step)
        if step == 0 or least == _NAN or len(own) < GROUP:
            whole[:] = 0
        if step != 0 and least != _NAN:
            _, at, one, other = run_of(key, begin + first, begin + first + GROUP)
            for i in range(len(own)):
                drawn = np.float32(number(np.uint32(at + np.uint32(i)), one, other) >> np.uint32(8)) * _UNIT
                steps = np.float32(np.float32(np.float32(own[i] - low) / width) + drawn)
                whole[i] = np.uint8(np.int32(min(steps, levels)))
        into = codes[first // per : (first + len(own) + per - 1) // per]
        if per == 1:
            into[:] = whole[: len(into)]
        elif per == 2:
            for i in range(len(into)):
                into[i] = whole[2 * i] | (whole[2 * i + 1] << 4)
        else:
            for i in range(len(into)):
                into[i] = whole[4 * i] | (whole[4 * i + 1] << 2) | (whole[4 * i + 2] << 4) | (whole[4 * i + 3] << 6)


@kernel
def _restore(bits: int, codes: NDArray[np.uint8], ends: NDArray[np.uint16], x: NDArray[np.float32]) -> None:
    """Fill x with the values of `_quantize`'s groups."""
    per = 8 // bits
    whole = np.zeros(GROUP, np.uint8)
    for group in range(len(ends)):
        first = group * GROUP
        own, low, width = x[first : first + GROUP], of_bfloat16(ends[group, 0]), of_bfloat16(ends[group, 1])
        packed = codes[first // per : (first + len(own) + per - 1) // per]
        if per == 1:
            whole[: len(packed)] = packed
        elif per == 2:
            for i in range(len(packed)):
                whole[2 * i], whole[2 * i + 1] = packed[i] & 15, packed[i] >> 4
        else:
            for i in range(len(packed)):
                both = packed[i]
                whole[4 * i], whole[4 * i + 1], whole[4 * i + 2], whole[4 * i + 3] = (
                    both & 3,
                    both >> 2 & 3,
                    both >> 4 & 3,
                    both >> 6,
                )
        for i in range(len(own)):
            own[i] = np.float32(low + np.float32(np.float32(whole[i]) * width))


def quantized(x: Tensor, key: int, bits: int) -> Quantized:
    """Return the elements of x, float32 of any shape, in 8, 4 or 2 bits each.

    The same key gives the same bits in any number of threads, and on any device. A group with an element that is not finite is
    not a number as a whole, so that a loss which is not finite stays so.

    >>> packed = quantized(torch.randn(1000, 64), key=7, bits=4)
    >>> restored(packed, (1000, 64)).shape
    torch.Size([1000, 64])
    """
    flat = x.detach().reshape(-1)
    groups = -(-len(flat) // GROUP)
    codes = torch.empty(-(-len(flat) * bits // 8), dtype=torch.uint8, device=x.device)
    ends = torch.empty(groups, 2, dtype=torch.bfloat16, device=x.device)
    if x.device.type != "cpu":
        for begin in range(0, len(flat), _AT_ONCE):
            part, first = flat[begin : begin + _AT_ONCE], begin * bits // 8
            own, bounds = _quantized_by_torch(part, key, begin, bits)
            codes[first : first + len(own)] = own
            ends[begin // GROUP : begin // GROUP + len(bounds)] = bounds
        return Quantized(codes, ends, bits)
    # `numpy()` would keep the storage from being resized, by which reversible layers free their input.
    values: Any = np.from_dlpack(flat)
    packed, stored = codes.numpy(), ends.view(torch.int16).numpy().view(np.uint16)
    stream, group_bytes = np.uint64(key), GROUP * bits // 8

    def work(begin: int, end: int) -> None:
        own = values[begin * GROUP : end * GROUP]
        _quantize(stream, begin * GROUP, bits, own, packed[begin * group_bytes : end * group_bytes], stored[begin:end])

    in_parts(work, groups, GROUP)
    return Quantized(codes, ends, bits)


def restored(packed: Quantized, shape: Any) -> Tensor:
    """Return float32 of that shape, contiguous: what `quantized` was given, but for the rounding."""
    codes, ends, bits = packed
    out = torch.empty(shape, dtype=torch.float32, device=codes.device)
    flat = out.view(-1)
    if out.device.type != "cpu":
        for begin in range(0, len(flat), _AT_ONCE):
            part = flat[begin : begin + _AT_ONCE]
            own = codes[begin * bits // 8 : -(-(begin + len(part)) * bits // 8)]
            part.copy_(_restored_by_torch(own, ends[begin // GROUP : -(-(begin + len(part)) // GROUP)], bits)[: len(part)])
        return out
    values, stored, bounds = flat.numpy(), codes.numpy(), ends.view(torch.int16).numpy().view(np.uint16)
    group_bytes = GROUP * bits // 8

    def work(begin: int, end: int) -> None:
        own = stored[begin * group_bytes : end * group_bytes]
        _restore(bits, own, bounds[begin:end], values[begin * GROUP : end * GROUP])

    in_parts(work, len(bounds), GROUP)
    return out


def _quantized_by_torch(x: Tensor, key: int, begin: int, bits: int) -> tuple[Tensor, Tensor]:
    """`_quantize` of float32[n], at most `_AT_ONCE`, by torch's operations: (codes, ends)."""
    per, levels, size = 8 // bits, (1 << bits) - 1, len(x)
    groups = torch.cat([x, x[-1:].expand(-size % GROUP)]).view(-1, GROUP)
    low, high = groups.aminmax(dim=1)
    least = _bfloat16_below(low)
    step = _bfloat16_above((high - least.float()) / levels)
    valid = torch.isfinite(groups).all(1) & (step.float() <= 3.38e38)
    ends = torch.stack([least, step], 1).masked_fill(~valid[:, None], torch.nan)
    own = mix(key ^ ((begin >> 32) * _GOLDEN & 2**64 - 1))
    at = torch.arange(begin & 2**32 - 1, (begin & 2**32 - 1) + groups.numel(), device=x.device)
    drawn = (number32(at, own & 2**32 - 1, own >> 32) >> 8).float().mul_(float(_UNIT)).view_as(groups)
    steps = ((groups - least.float()[:, None]) / step.float()[:, None]).add_(drawn)
    steps = torch.where((valid & (step != 0))[:, None], steps.clamp_(max=levels), 0)
    codes = steps.to(torch.uint8).view(-1)
    codes[size:] = 0
    shifts = torch.arange(per, device=x.device) * bits
    return (codes.view(-1, per) << shifts.to(torch.uint8)).sum(1, dtype=torch.uint8)[: -(-size // per)], ends


def _restored_by_torch(codes: Tensor, ends: Tensor, bits: int) -> Tensor:
    """`_restore` by torch's operations, of whole groups: float32[n]."""
    per = 8 // bits
    shifts = (torch.arange(per, device=codes.device) * bits).to(torch.uint8)
    steps = ((codes[:, None] >> shifts) & (1 << bits) - 1).view(-1).float()
    steps = torch.cat([steps, steps.new_zeros(-len(steps) % GROUP)]).view(-1, GROUP)
    low, width = ends.float().unbind(1)
    return (steps * width[:, None] + low[:, None]).view(-1)


def _bfloat16_below(x: Tensor) -> Tensor:
    """See `rounded_down`."""
    bits = x.view(torch.int32)
    cut = (bits >> 16) + ((bits < 0) & (bits & 0xFFFF != 0)).to(torch.int32)
    return cut.to(torch.int16).view(torch.bfloat16)


def _bfloat16_above(x: Tensor) -> Tensor:
    """See `rounded_up`."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
