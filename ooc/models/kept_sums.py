"""Sums over neighbors that are kept where a layer is recomputed: those of destinations with many in-edges.

A sum takes a row of memory whatever it adds up, and the time to make it again grows with the in-edges. So of destinations with
many it is kept and used again, and of the others made again. Each is one sequential sum over its own edges, so the bits are
the same.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ooc.graph.bag_sum import bag_sum

_scope = threading.local()


class KeptSums:
    """The sums of a segment of layers. rows: of each layer how many destinations keep theirs.

    They live as long as this does: a graph that is gone through backward twice needs them again.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows
        self._layer, self._next, self._records = 0, 0, True
        self._kept: list[tuple[Tensor | None, Tensor] | None] = []

    def at(self, layer: int) -> None:
        """The segment's layer of that number is next."""
        self._layer = layer

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep sums that are made within."""
        self._kept, self._records = [], True
        with _entered(self):
            yield

    @contextmanager
    def using(self) -> Iterator[None]:
        """Use those again for sums that are made within, in the same order."""
        self._next, self._records = 0, False
        with _entered(self):
            yield

    def sum(self, index: Tensor, rows: Tensor, indptr: Tensor, value: Tensor | None) -> Tensor:
        """See `neighbor_sum`."""
        if self._records:
            sums = bag_sum(index, rows, indptr, value)
            self._kept.append(self._chosen(sums, indptr))
            return sums
        kept = self._kept[self._next]
        self._next += 1
        return bag_sum(index, rows, indptr, value) if kept is None else _with(kept, index, rows, indptr, value)

    def _chosen(self, sums: Tensor, indptr: Tensor) -> tuple[Tensor | None, Tensor] | None:
        """(which destinations, None for all; their sums) of those to keep."""
        count = self._rows[self._layer]
        if not count:
            return None
        if count >= len(sums):
            return None, sums.detach()
        hubs = indptr.diff().topk(count, sorted=False).indices.sort().values
        return hubs, sums.detach()[hubs]


class TimedSums:
    """Measures the sums that are made within `timed_sums`. seconds: they took; nbytes: of what they gave."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.seconds, self.nbytes = 0.0, 0

    def sum(self, index: Tensor, rows: Tensor, indptr: Tensor, value: Tensor | None) -> Tensor:
        """See `neighbor_sum`."""
        self._wait()
        begun = time.perf_counter()
        sums = bag_sum(index, rows, indptr, value)
        self._wait()
        self.seconds += time.perf_counter() - begun
        self.nbytes += sums.nbytes
        return sums


@contextmanager
def timed_sums(wait: Callable[[], None]) -> Iterator[TimedSums]:
    """Measure the sums of layers that run within. wait: for the device, before the clock is read."""
    timed = TimedSums(wait)
    with _entered(timed):
        yield timed


@contextmanager
def _entered(kept: KeptSums | TimedSums) -> Iterator[None]:
    outer, _scope.kept = getattr(_scope, "kept", None), kept
    try:
        yield
    finally:
        _scope.kept = outer


def sums_are_watched() -> bool:
    """Whether sums of layers are kept, used again or measured here."""
    return getattr(_scope, "kept", None) is not None


def neighbor_sum(index: Tensor, rows: Tensor, indptr: Tensor, value: Tensor | None) -> Tensor:
    """`bag_sum` of a layer's forward pass, some of it kept from an earlier one where the layer is recomputed."""
    if torch.compiler.is_compiling():
        return bag_sum(index, rows, indptr, value)
    kept: Any = getattr(_scope, "kept", None)
    sums: Tensor = bag_sum(index, rows, indptr, value) if kept is None else kept.sum(index, rows, indptr, value)
    return sums


def _with(kept: tuple[Tensor | None, Tensor], index: Tensor, rows: Tensor, indptr: Tensor, value: Tensor | None) -> Tensor:
    """The sums, of which some are there and the others are made."""
    hubs, there = kept
    if hubs is None:
        return there.detach()
    count = indptr.diff()
    others = torch.ones(len(count), dtype=torch.bool, device=count.device).index_fill_(0, hubs, False)
    edges = others.repeat_interleave(count).nonzero().flatten()
    ends = torch.cat([count.new_zeros(1), count[others].cumsum(0)])
    made = bag_sum(index[edges], rows, ends, None if value is None else value[edges])
    sums = made.new_empty(len(count), made.size(1))
    sums[others] = made
    return sums.index_copy_(0, hubs, there)
