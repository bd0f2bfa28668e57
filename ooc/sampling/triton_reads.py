"""Numbers in page-locked memory of the host, read over the bus by a Triton kernel (unified virtual addressing).

Imported only where it is used: torch's builds for CUDA bring Triton along, those for the CPU do not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 1024
"""that a program reads"""


@triton.jit(do_not_specialize=["count"])
def _read(numbers_at, slot_at, out_at, count, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    there = at < count
    slot = tl.load(slot_at + at, mask=there, other=0)
    tl.store(out_at + at, tl.load(numbers_at + slot, mask=there, other=0).to(tl.int64), mask=there)


def read(numbers: Tensor, slot: Tensor) -> Tensor:
    """numbers[slot], int64[e] where slot (int64[e]) is. numbers: int32|int64[n] in page-locked memory. Raises ValueError for
    tensors with gaps."""
    if not (numbers.is_contiguous() and slot.is_contiguous()):
        raise ValueError(f"numbers and slots lie in a row, not with strides of {numbers.stride()} and {slot.stride()}")
    out = torch.empty_like(slot)
    if len(slot):
        _read[(triton.cdiv(len(slot), _NUMBERS),)](numbers, slot, out, len(slot), NUMBERS=_NUMBERS)
    return out
