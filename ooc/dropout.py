"""Dropout whose random numbers cost less than the layer behind it, and which keeps nothing for its backward pass.

torch draws one Mersenne twister number for each element on the CPU, in one thread: 17 ns, eight times the rest of a GCN layer
on the same rows. Here one counter-based 64-bit number (splitmix64) serves four elements, keyed by one draw from torch's
generator, so that `torch.manual_seed` decides it, and recomputing with the generator's state restored repeats it. The backward
pass draws the same numbers again from the key: no mask waits for it.
"""

from typing import Any

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
def drop(key: np.uint64, dropped: int, scale: np.float32, x: NDArray[Any], out: NDArray[Any]) -> None:
    """out[i]: 0 with probability dropped / LEVELS, else x[i] * scale; from 16 bits of number i // 4 of the key's stream."""
    size = len(x)
    for word in range((size + 3) // 4):
        bits = mix64(key + np.uint64(word) * _GOLDEN)
        for lane in range(4):
            at = 4 * word + lane
            if at < size:
                kept = np.int64((bits >> np.uint64(16 * lane)) & _LANE) >= dropped
                out[at] = x[at] * scale if kept else x.dtype.type(0)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, dropped: int) -> Tensor:
        ctx.drawn = key, dropped
        return _dropped(x, key, dropped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad, *ctx.drawn), None, None  # type: ignore[no-untyped-call]


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
    return _drawn(x, min(round(p * LEVELS), LEVELS - 1))


@torch.compiler.disable  # torch.compile cannot trace numba: it compiles what stands before and behind
def _drawn(x: Tensor, dropped: int) -> Tensor:
    """`dropout`, keyed by one draw from torch's generator."""
    out: Tensor = _Dropout.apply(x, int(torch.randint(1 << 62, ())), dropped)  # type: ignore[no-untyped-call]
    return out


def _dropped(x: Tensor, key: int, dropped: int) -> Tensor:
    """See `drop`."""
    scale = np.float32(LEVELS / (LEVELS - dropped))
    if x.dtype not in (torch.float32, torch.float64):  # numba has no shorter ones
        factor = torch.empty(x.shape, dtype=torch.float32)
        ones = np.broadcast_to(np.float32(1), factor.numel())
        drop(np.uint64(key), dropped, scale, ones, factor.view(-1).numpy())
        return x * factor.to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    drop(np.uint64(key), dropped, scale, x.detach().reshape(-1).numpy(), out.view(-1).numpy())
    return out
