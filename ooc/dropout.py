"""Dropout whose random numbers cost less than the layer behind it.

torch draws one Mersenne twister number for each element on the CPU, in one thread: 17 ns, eight times the rest of a GCN layer
on the same rows. Here one counter-based 64-bit number (splitmix64) serves four elements, keyed by one draw from torch's
generator, so that `torch.manual_seed` decides it, and recomputing with the generator's state restored repeats it.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ooc.order import mix64
from stores.jit import kernel

LEVELS = 1 << 16
"""A probability is rounded to a multiple of 1 / LEVELS, and the rows are scaled by what is really kept."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LANE = np.uint64(0xFFFF)


@kernel
def fill_factors(key: np.uint64, dropped: int, scale: np.float32, factor: NDArray[np.float32]) -> None:
    """factor[i]: 0 with probability dropped / LEVELS, else scale; from 16 bits of number i // 4 of the key's stream."""
    size = len(factor)
    for word in range((size + 3) // 4):
        bits = mix64(key + np.uint64(word) * _GOLDEN)
        for lane in range(4):
            at = 4 * word + lane
            if at < size:
                kept = np.int64((bits >> np.uint64(16 * lane)) & _LANE) >= dropped
                factor[at] = scale if kept else np.float32(0)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """`torch.nn.functional.dropout`: each element is 0 with probability p, else divided by 1 - p. On CUDA it is torch's.

    x: any shape, floating. The same torch seed gives the same zeros, whatever the number of threads.

    >>> torch.manual_seed(0)
    >>> dropout(torch.ones(4), 0.5, training=True)
    tensor([...])  # zeros and twos
    """
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p, training=True)
    factor = _factors(x.shape, min(round(p * LEVELS), LEVELS - 1))
    if x.dtype == factor.dtype and not (x.requires_grad and torch.is_grad_enabled()):
        return factor.mul_(x)  # nothing to save for backward: no second array
    return x * factor.to(x.dtype)


@torch.compiler.disable  # torch.compile cannot trace numba: it compiles what stands before and behind
def _factors(shape: torch.Size, dropped: int) -> Tensor:
    """float32[shape]: see `fill_factors`; keyed by one draw from torch's generator."""
    factor = torch.empty(shape, dtype=torch.float32)
    key = np.uint64(int(torch.randint(1 << 62, ())))
    fill_factors(key, dropped, np.float32(LEVELS / (LEVELS - dropped)), factor.view(-1).numpy())
    return factor
