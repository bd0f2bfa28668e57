"""Passes over files that the processes of one host make together, so that the disk is read once for all of them.

Ranks of a run take the same steps at the same time, but each plans its own groups of batches. Groups that end with the same
step on all ranks need their passes at the same time; `SharingEngine` then has each block read by one of them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ooc.loading.sample_stage import Order
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.rows import Rows
from ooc.stores.arrays.segment_rows import SegmentRows
from ooc.stores.io.engines.sharing import SharingEngine
from ooc.stores.io.shared_blocks import SharedBlocks

_SPARE, _MOST_SPARE = 1 / 128, 1 / 8
"""Of a group's memory, what is kept free at first, so that other processes have room for the same batches; twice as much each
time that it was not enough, up to the second"""


class HostPasses:
    """The passes of an epoch over these arrays; of arrays that no other process shares, nothing.

    >>> passes = HostPasses([ds.stored("x")], order)
    >>> with passes.each():
    ...     ds.stored("x").read(ids, out)  # ids of one group of batches
    >>> passes.end()
    """

    def __init__(self, arrays: Iterable[Rows], order: Order) -> None:
        self._engines = list(_sharing(arrays))
        self.ends: SharedEnds | None = None
        """where groups end, if others share the arrays"""
        if self._engines:
            blocks = self._engines[0].blocks
            name = f"{len(order.nodes)} {order.batch_size} {order.seed} {order.shuffle} {order.drop_last} {order.world_size}"
            session = blocks.session_key(name)
            self.ends = SharedEnds(blocks, session)
            for engine in self._engines:
                engine.begin(session)

    @contextmanager
    def each(self) -> Iterator[None]:
        """Wrap the reading of one group."""
        for engine in self._engines:
            engine.begin_pass()
        try:
            yield
        finally:
            for engine in self._engines:
                engine.end_pass()

    def end(self) -> None:
        """No group follows; idempotent, from any thread."""
        for engine in self._engines:
            engine.end()


class SharedEnds:
    """`GroupEnds` of a session: a group ends where the first process has as good as filled it, or after the batch that another
    one has taken by then. Nobody waits, and a process whose batches are larger ends earlier by itself."""

    def __init__(self, blocks: SharedBlocks, session: int) -> None:
        self._blocks, self._session, self._group = blocks, session, -1

    def begin(self) -> None:
        self._group += 1

    def goes_on(self, taken: int) -> bool:
        return self._blocks.goes_on(self._session, self._group, taken)

    @property
    def most_full(self) -> float:
        return 1 - min(_MOST_SPARE, _SPARE * 2 ** self._blocks.spares(self._session))

    def as_good_as_full(self, taken: int) -> bool:
        return self._blocks.ends(self._session, self._group, taken, False)

    def full(self, taken: int) -> None:
        self._blocks.ends(self._session, self._group, taken, True)


def _sharing(arrays: Iterable[Rows]) -> Iterator[SharingEngine]:
    """The engines of the arrays on disk that share reads."""
    for rows in arrays:
        for part in rows.parts.values() if isinstance(rows, JoinedRows) else [rows]:
            if isinstance(part, SegmentRows) and part.sharing is not None:
                yield part.sharing
