"""PURE: what becomes of the rows of one array in memory, superbatch by superbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import narrow
from ooc.graph.relabel import by_last_use
from ooc.loading.feature_cache import CacheChange, CachedNodes, shared_rows
from ooc.loading.whole_reads import reads_most
from ooc.stores.arrays.rows import Rows


@dataclass(frozen=True)
class UsedRows:
    """The rows of one array that a superbatch's batches use, before it is known which of them are in memory."""

    ids: NDArray[Any]
    """[u], ascending; int32 where that is enough"""
    last: NDArray[np.int32]
    """int32[u]: the last batch that uses a row"""
    uses: NDArray[np.float32]
    """float32[u]: how many do"""
    limit: int
    """rows of the array in memory at most, with this superbatch's"""
    room: int
    """rows that the superbatch may have at most"""

    def of_all(self, count: int) -> "UsedRows":
        """The same with all rows there are, `count`; no batch uses the others."""
        last, uses = np.zeros(count, np.int32), np.zeros(count, np.float32)
        last[self.ids], uses[self.ids] = self.last, self.uses
        return replace(self, ids=narrow(np.arange(count)), last=last, uses=uses)


@dataclass(frozen=True)
class RowChanges:
    """What becomes of the rows of one array in memory, before a superbatch and after."""

    used: UsedRows
    carried: NDArray[np.int32]
    source: NDArray[np.int32]
    """see `ooc.loading.feature_cache.CacheChange`"""
    early: NDArray[np.int32]
    """of an epoch's first superbatch: positions of the rows in memory that it evicts itself"""
    idle: NDArray[np.int32]
    """positions of the rows in memory afterwards that the next superbatch evicts and this one does not use"""
    gone: NDArray[np.int32]
    """the rows of this superbatch that the next evicts, by their last use"""
    first: NDArray[np.int64]
    """int64[batches + 1]: gone[first[k]:first[k + 1]] are not needed after batch k"""
    final: CachedNodes | None
    """what is in memory afterwards, unless another superbatch is read by then; None where one follows for certain"""

    @property
    def missing(self) -> NDArray[np.int64]:
        """int64: the rows that are read, ascending."""
        return self.used.ids[self.carried < 0].astype(np.int64)


class FollowedCache:
    """Follows what is in memory of one array, superbatch by superbatch."""

    def __init__(self, residents: CachedNodes) -> None:
        self._residents = residents
        self._waiting: tuple[UsedRows, CacheChange, NDArray[np.int32]] | None = None

    def take(self, used: UsedRows, before: Sequence[Any] | None) -> RowChanges | None:
        """The changes of the superbatch before this one, of batches `before`; None for the first."""
        ids = np.empty(0, np.int32) if self._waiting is None else self._waiting[0].ids
        self._residents, change = self._residents.take(used.ids, used.uses, used.limit, ids)
        linked = None
        if self._waiting is not None and before is not None:
            linked = _linked(*self._waiting, len(before), change.evicted, change.idle, None)
        self._waiting = used, change, change.idle if self._waiting is None else np.empty(0, np.int32)
        return linked

    def reads_most(self, used: UsedRows, rows: Rows) -> bool:
        """Whether a superbatch that reads its missing rows is to read all that are missing."""
        if not len(used.ids) < rows.shape[0] <= used.room:
            return False
        return reads_most(rows, self._residents.missing(used.ids))

    def once(self, used: UsedRows, batches: int) -> RowChanges:
        """The changes of a superbatch of so many batches, before all others, that leaves none of its rows in memory."""
        kept, change = self._residents.take(used.ids, used.uses, used.limit, used.ids[:0])
        of_batch = np.empty(len(kept.node), np.int32)
        shared_rows(kept.node, used.ids, of_batch)
        self._residents = CachedNodes(kept.node[of_batch < 0], kept.recent_uses[of_batch < 0])
        change = replace(change, source=change.source[of_batch < 0])
        return _linked(used, change, change.idle, batches, used.ids, change.idle[:0], self._residents)

    def last(self, batches: Sequence[Any]) -> RowChanges:
        """The changes of the last superbatch."""
        assert self._waiting is not None
        nothing = np.empty(0, np.int32)
        return _linked(*self._waiting, len(batches), self._waiting[0].ids[:0], nothing, self._residents)


def _linked(
    used: UsedRows,
    change: CacheChange,
    early: NDArray[np.int32],
    batches: int,
    evicted: NDArray[Any],
    idle: NDArray[np.int32],
    final: CachedNodes | None,
) -> RowChanges:
    """The changes of a superbatch of so many batches, of which the next one gives up `evicted` and `idle`."""
    going = np.empty(len(used.ids), np.int32)
    gone = np.empty(int(shared_rows(used.ids, evicted, going)), np.int32)
    first = np.zeros(batches + 1, np.int64)
    by_last_use(used.last, going, gone, first)
    return RowChanges(used, change.carried, change.source, early, idle, gone, first, final)
