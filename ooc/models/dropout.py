"""Fast dropout on CPU that saves no mask for the backward pass.

A counter-based generator (splitmix64) yields four 16-bit numbers per hash, keyed by one draw of torch's generator, so
`torch.manual_seed` determines the result and the backward pass regenerates the mask. torch's own CPU dropout is single-threaded
and takes 17 ns per element, eight times the rest of a GCN layer.

An element's number depends on its position only, so a matrix of all nodes can be processed in row ranges of any order;
`DropoutKeys` manages the keys and row positions.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.runtime.keyed_random import mix64
from ooc.stores.jit import kernel

Of = Literal["sources", "edges"]
LEVELS = 1 << 16
"""probabilities are rounded to multiples of 1 / LEVELS; the scale uses the rounded value"""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LANE = np.uint64(0xFFFF)


@kernel
def drop(key: np.uint64, dropped: int, scale: np.float32, x: NDArray[Any], out: NDArray[Any]) -> None:
    """Zero each element with probability dropped / LEVELS, else scale it; uses 16 bits of number i // 4 of the key's stream."""
    size = len(x)
    for word in range((size + 3) // 4):
        bits = mix64(key + np.uint64(word) * _GOLDEN)
        for lane in range(4):
            at = 4 * word + lane
            if at < size:
                kept = np.int64((bits >> np.uint64(16 * lane)) & _LANE) >= dropped
                out[at] = x[at] * scale if kept else x.dtype.type(0)


@kernel
def drop_rows(
    key: np.uint64, dropped: int, scale: np.float32, row: NDArray[np.int64], x: NDArray[Any], out: NDArray[Any]
) -> None:
    """Apply `drop` to rows row[i] (int64[n]) of a matrix; x and out ([n, f]) hold those rows."""
    width = x.shape[1]
    for i in range(len(row)):
        at = row[i] * width
        if at & 3 == 0:  # aligned: vectorizes, unlike the loop below
            drop(key + np.uint64(at >> 2) * _GOLDEN, dropped, scale, x[i], out[i])
            continue
        bits = mix64(key + np.uint64(at >> 2) * _GOLDEN)
        for j in range(width):
            lane = (at + j) & 3
            if lane == 0:
                bits = mix64(key + np.uint64((at + j) >> 2) * _GOLDEN)
            kept = np.int64((bits >> np.uint64(16 * lane)) & _LANE) >= dropped
            out[i, j] = x[i, j] * scale if kept else x.dtype.type(0)


class _Dropout(torch.autograd.Function):
    """See `drop`, and `drop_rows` for x [n, f] of float32 or float64 with `row`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, dropped: int, row: NDArray[np.int64] | None) -> Tensor:
        ctx.mask = key, dropped, row
        scale = np.float32(LEVELS / (LEVELS - dropped))
        if row is None and x.dtype not in (torch.float32, torch.float64):  # numba does not support the others
            factor = torch.empty(x.shape, dtype=torch.float32)
            ones = np.broadcast_to(np.float32(1), factor.numel())
            drop(np.uint64(key), dropped, scale, ones, factor.view(-1).numpy())
            return x * factor.to(x.dtype)
        out = torch.empty(x.shape, dtype=x.dtype)
        if row is None:
            drop(np.uint64(key), dropped, scale, x.detach().reshape(-1).numpy(), out.view(-1).numpy())
        else:
            drop_rows(np.uint64(key), dropped, scale, row, x.detach().contiguous().numpy(), out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Dropout.apply(grad, *ctx.mask), None, None, None  # type: ignore[no-untyped-call]


class DropoutKeys:
    """Dropout keys of a model on the whole graph, for passes over its nodes in ranges.

    Within `part`, each range is dropped as its rows in the matrix of all nodes would be. The n-th call of a part takes its key
    from torch's generator at the first range. `keys` (by part) is the whole state.
    """

    def __init__(self) -> None:
        self.keys: dict[str, list[int]] = {}
        self._at: dict[Of, NDArray[np.int64]] = {}
        self._part, self._calls = "", 0
        self._initial = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).digest()
        self._outer: Tensor | None = None
        """the generator's state while torch's own random numbers are `fixed`"""

    @contextmanager
    def part(self, name: str, at: dict[Of, NDArray[np.int64]]) -> Iterator[None]:
        """Set the positions of the source and edge rows among all rows (int64[n]; a prefix is used if fewer are dropped)."""
        outer, _scope.draws = getattr(_scope, "draws", None), self
        before = self._part, self._calls, self._at
        self._part, self._calls, self._at = name, 0, at
        try:
            yield
        finally:
            _scope.draws = outer
            self._part, self._calls, self._at = before

    @contextmanager
    def fixed(self, name: str, first: int) -> Iterator[None]:
        """Make torch's own random numbers depend on `name`, `first` and the generator's initial state only.

        Rows that are recomputed then see the same numbers in third-party modules. The generator is otherwise not affected.
        """
        if self._outer is not None:
            yield
            return
        digest = hashlib.blake2b(f"{name} {first}".encode(), key=self._initial, digest_size=8).digest()
        self._outer = torch.get_rng_state()
        torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        try:
            yield
        finally:
            torch.set_rng_state(self._outer)
            self._outer = None

    def _drawn(self) -> int:
        """Draw a key from the generator, bypassing `fixed`."""
        if self._outer is None:
            return _key()
        inner = torch.get_rng_state()
        torch.set_rng_state(self._outer)
        found = _key()
        self._outer = torch.get_rng_state()
        torch.set_rng_state(inner)
        return found

    def next(self, x: Tensor, of: Of) -> tuple[int, NDArray[np.int64]]:
        """Return the key of this call and the positions of its rows, int64[len(x)]."""
        keys = self.keys.setdefault(self._part, [])
        if self._calls == len(keys):
            keys.append(self._drawn())
        self._calls += 1
        return keys[self._calls - 1], self._at[of][: len(x)]


_scope = threading.local()


def _key() -> int:
    return int(torch.randint(1 << 62, ()))


def dropout(x: Tensor, p: float, training: bool, of: Of = "sources") -> Tensor:
    """`torch.nn.functional.dropout`: zero each element with probability p and divide the others by 1 - p.

    The same torch seed gives the same zeros for any number of threads. Uses torch's dropout on CUDA. `of` says what the rows of
    x belong to; see `DropoutKeys`.
    """
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p, training=True)
    return _drawn(x, min(round(p * LEVELS), LEVELS - 1), of)


class Dropout(nn.Module):
    """`torch.nn.Dropout` by `dropout`.

    Args:
        p: Probability with which an element is zeroed.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


@torch.compiler.disable  # torch.compile cannot trace numba
def _drawn(x: Tensor, dropped: int, of: Of) -> Tensor:
    """`dropout` with a key drawn from torch's generator."""
    draws: DropoutKeys | None = getattr(_scope, "draws", None)
    key, row = (_key(), None) if draws is None else draws.next(x, of)
    out: Tensor = _Dropout.apply(x, key, dropped, row)  # type: ignore[no-untyped-call]
    return out
