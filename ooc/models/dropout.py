"""Fast dropout on CPU that saves no mask for the backward pass.

A counter-based generator, a 32-bit hash of an element's position (lowbias32, Wellons, 2018) keyed by one draw of torch's
generator, gives each element its number: `torch.manual_seed` determines the result, and the backward pass makes the mask again.
32-bit hashes are computed for many elements at once; torch's own CPU dropout is single-threaded and takes 17 ns per element.

An element's number depends on its position only, so a matrix of all nodes can be processed in row ranges of any order;
`DropoutKeys` manages the keys and row positions. Rows of batches have the positions of their nodes too (`rows_of_nodes`), so
that a node's row is dropped alike in whichever batch it is computed, and by whichever process.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.runtime.keyed_dropout import LEVELS, drop, drop_rows, scale_of
from ooc.runtime.parts import in_parts

Of = str
"""what rows belong to: "sources", "edges", "graphs", or a node type"""
STREAM = 3
"""which numbers rows get; checkpoints record it. 2 is by rows of batches and not by their nodes, and 1, of those without a
record, 16 bits of splitmix64 an element"""


class _Dropout(torch.autograd.Function):
    """See `drop`, and `drop_rows` for x [n, f] of float32 or float64 with `row`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, dropped: int, row: NDArray[np.int64] | None) -> Tensor:
        ctx.mask = key, dropped, row
        stream, scale = np.uint64(key), scale_of(dropped)
        if x.dtype not in (torch.float32, torch.float64):  # numba does not support the others
            return x * _Dropout.apply(torch.ones(x.shape), key, dropped, row).to(x.dtype)  # type: ignore[no-untyped-call]
        out = torch.empty(x.shape, dtype=x.dtype)
        if row is None:
            given, found = x.detach().reshape(-1).numpy(), out.view(-1).numpy()
            in_parts(lambda at, end: drop(stream, at, dropped, scale, given[at:end], found[at:end]), len(given))
        else:
            rows, found = x.detach().contiguous().numpy(), out.numpy()
            parts = lambda at, end: drop_rows(stream, dropped, scale, row[at:end], rows[at:end], found[at:end])  # noqa: E731
            in_parts(parts, len(rows), rows.shape[1])
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


class BatchRows:
    """Positions of the rows of a batch: rows of "sources" (or of a node type, ...) are those of the first of its nodes.

    Every call takes a key from torch's generator. Rows of what has no positions here have those of a matrix of their own.
    """

    def __init__(self, at: Mapping[Of, NDArray[np.int64]]) -> None:
        self._at = at

    def next(self, x: Tensor, of: Of) -> tuple[int, NDArray[np.int64] | None]:
        """See `DropoutKeys.next`; None for rows from 0 on."""
        at = self._at.get(of)
        return _key(), None if at is None or x.dim() != 2 or len(x) > len(at) else at[: len(x)]


_scope = threading.local()


@contextmanager
def rows_of_nodes(at: Mapping[Of, NDArray[np.int64]] | None) -> Iterator[None]:
    """Drop the rows of a batch by their positions among all rows; at: of what -> positions, int64[n]; None: by their own.

    >>> with rows_of_nodes({"sources": batch.n_id.numpy()}):
    ...     out = model(batch.x, batch.blocks)
    """
    with _dropping(None if at is None else BatchRows(at)):
        yield


@contextmanager
def _dropping(draws: Any) -> Iterator[None]:
    outer, _scope.draws = getattr(_scope, "draws", None), draws
    try:
        yield
    finally:
        _scope.draws = outer


def dropping_as_now() -> Callable[[], AbstractContextManager[None]]:
    """Return what makes a context in which rows have the positions that they have now, for what is computed again later."""
    return partial(_dropping, getattr(_scope, "draws", None))


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
    return _drawn(x, level_of(p), of)


def level_of(p: float) -> int:
    """The probability in units of 1 / LEVELS."""
    return min(round(p * LEVELS), LEVELS - 1)


def next_draw(x: Tensor, of: Of) -> tuple[int, NDArray[np.int64] | None]:
    """The key of a call, and the positions of the rows of x, int64[len(x)]; None for rows from 0 on."""
    draws: DropoutKeys | BatchRows | None = getattr(_scope, "draws", None)
    return (_key(), None) if draws is None else draws.next(x, of)


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
    key, row = next_draw(x, of)
    out: Tensor = _Dropout.apply(x, key, dropped, row)  # type: ignore[no-untyped-call]
    return out
