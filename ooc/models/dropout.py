"""Dropout whose random numbers cost less than the layer behind it, and which keeps nothing for its backward pass.

torch draws one Mersenne twister number for each element on the CPU, in one thread: 17 ns, eight times the rest of a GCN layer
on the same rows. Here one counter-based 64-bit number (splitmix64) serves four elements, keyed by one draw from torch's
generator, so that `torch.manual_seed` decides it, and recomputing with the generator's state restored repeats it. The backward
pass draws the same numbers again from the key: no mask waits for it.

An element's number depends on its place alone. So a matrix of all nodes can be dropped a few rows at a time, in any order and
again: `DropoutKeys` knows the keys, and where rows stand.
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
from torch import Tensor

from ooc.runtime.keyed_random import mix64
from stores.jit import kernel

Of = Literal["sources", "edges"]
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


@kernel
def drop_rows(
    key: np.uint64, dropped: int, scale: np.float32, row: NDArray[np.int64], x: NDArray[Any], out: NDArray[Any]
) -> None:
    """What `drop` makes of rows row[i] of a matrix: x, out [n, f], those rows; row: int64[n]."""
    width = x.shape[1]
    for i in range(len(row)):
        at = row[i] * width
        if at & 3 == 0:  # four numbers at a time: the branch below keeps the processor from that
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
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, dropped: int, row: NDArray[np.int64] | None) -> Tensor:
        ctx.drawn = key, dropped, row
        return _dropped(x, key, dropped) if row is None else _dropped_rows(x, key, dropped, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Dropout.apply(grad, *ctx.drawn), None, None, None  # type: ignore[no-untyped-call]


class DropoutKeys:
    """The keys of a model's dropout on a whole graph, for a walk through its nodes in ranges: within `part` the dropout of
    each range's rows is that of the same rows in all nodes' matrix.

    A part's n-th call has its key from torch's generator at the first range, as it would have it for all nodes at once.
    keys: by part, to go on with; they are all that is to be kept.

    >>> draws = DropoutKeys()
    >>> with draws.part("layer 0", {"sources": np.arange(8192, 16384)}):
    ...     rows = dropout(x, 0.5, training=True)  # float32[8192, f]
    """

    def __init__(self, keys: dict[str, list[int]] | None = None) -> None:
        self.keys = {} if keys is None else keys
        self._at: dict[Of, NDArray[np.int64]] = {}
        self._part, self._calls = "", 0
        self._began = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).digest()
        self._outer: Tensor | None = None
        """the generator's state, while torch's own numbers are fixed"""

    @contextmanager
    def part(self, name: str, at: dict[Of, NDArray[np.int64]]) -> Iterator[None]:
        """at: int64[n], where the rows of sources and of edges stand in those of all; a prefix where fewer are dropped."""
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
        """Meanwhile torch's own random numbers, in modules not ours, hang on `name`, on `first` and on the generator as
        it was when these draws began: rows computed again meet the same ones. The generator goes on as if there were none."""
        if self._outer is not None:
            yield
            return
        digest = hashlib.blake2b(f"{name} {first}".encode(), key=self._began, digest_size=8).digest()
        self._outer = torch.get_rng_state()
        torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        try:
            yield
        finally:
            torch.set_rng_state(self._outer)
            self._outer = None

    def _drawn(self) -> int:
        """A key from the generator, past what is `fixed`."""
        if self._outer is None:
            return _key()
        inner = torch.get_rng_state()
        torch.set_rng_state(self._outer)
        found = _key()
        self._outer = torch.get_rng_state()
        torch.set_rng_state(inner)
        return found

    def next(self, x: Tensor, of: Of) -> tuple[int, NDArray[np.int64]]:
        """(the key of this call, int64[len(x)]: where its rows stand)."""
        keys = self.keys.setdefault(self._part, [])
        if self._calls == len(keys):
            keys.append(self._drawn())
        self._calls += 1
        return keys[self._calls - 1], self._at[of][: len(x)]


_scope = threading.local()


def _key() -> int:
    return int(torch.randint(1 << 62, ()))


def dropout(x: Tensor, p: float, training: bool, of: Of = "sources") -> Tensor:
    """`torch.nn.functional.dropout`: each element is 0 with probability p, else divided by 1 - p. On CUDA it is torch's.

    x: any shape, floating. The same torch seed gives the same zeros, whatever the number of threads. of: what the rows of x
    belong to, see `DropoutKeys`.

    >>> torch.manual_seed(0)
    >>> dropout(torch.ones(4), 0.5, training=True)
    tensor([...])  # zeros and twos
    """
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p, training=True)
    return _drawn(x, min(round(p * LEVELS), LEVELS - 1), of)


@torch.compiler.disable  # torch.compile cannot trace numba: it compiles what stands before and behind
def _drawn(x: Tensor, dropped: int, of: Of) -> Tensor:
    """`dropout`, keyed by one draw from torch's generator."""
    draws: DropoutKeys | None = getattr(_scope, "draws", None)
    key, row = (_key(), None) if draws is None else draws.next(x, of)
    out: Tensor = _Dropout.apply(x, key, dropped, row)  # type: ignore[no-untyped-call]
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


def _dropped_rows(x: Tensor, key: int, dropped: int, row: NDArray[np.int64]) -> Tensor:
    """See `drop_rows`; float32 or float64 [n, f]."""
    scale = np.float32(LEVELS / (LEVELS - dropped))
    out = torch.empty(x.shape, dtype=x.dtype)
    drop_rows(np.uint64(key), dropped, scale, row, x.detach().contiguous().numpy(), out.numpy())
    return out
