"""Rows of the halo of an earlier epoch: one is sent again once it is too old, or has drifted too far.

Both ends keep the rows that were sent last, in memory, so a step finds every row, of this epoch or of an earlier one (PipeGCN,
Wan et al., ICLR 2022; Sancus, Peng et al., VLDB 2022, sends what drifted). Gradients are sent in the same way.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.halo.exchange import HaloExchange, HaloLists, rows_at_once, write_rows
from ooc.fullgraph.halo.reach import Ints
from ooc.fullgraph.value_store import ValueStore
from ooc.runtime.ranks import Ranks

Rows = NDArray[Any]


class StaleHalo(HaloExchange):
    """every: epochs after which a row is sent again at the latest, rows taking turns; tolerance: how far a row may have drifted
    from what was sent, as a share of its length, None: any."""

    def __init__(self, ranks: Ranks, lists: Sequence[HaloLists], every: int, tolerance: float | None) -> None:
        super().__init__(ranks, lists)
        self._every, self._tolerance, self._epoch = every, tolerance, -1
        self._sent: dict[str, list[Rows]] = {}
        self._kept: dict[str, list[Rows]] = {}
        """by value, of each other rank: its rows as they were sent, and as they came"""
        self._since: dict[str, int] = {}
        """by value, the epoch of its first exchange"""

    def begin(self, key: int) -> None:
        """See `HaloExchange.begin`."""
        self._epoch += 1

    def pull(self, store: ValueStore, name: str, layer: int) -> None:
        """See `HaloExchange.pull`."""
        lists = self._lists[layer]
        kept = self._renewed(store, name, lists, lists.send, lists.receive)
        for ids, rows in zip(lists.receive, kept, strict=True):
            write_rows(store, name, ids, rows)

    def push(self, store: ValueStore, name: str, layer: int) -> None:
        """See `HaloExchange.push`."""
        lists = self._lists[layer]
        kept = self._renewed(store, name, lists, lists.receive, lists.send)
        for ids, rows in zip(lists.send, kept, strict=True):
            if len(ids):
                store.add(name, ids, rows)

    def _renewed(self, store: ValueStore, name: str, lists: HaloLists, given: list[Ints], taken: list[Ints]) -> list[Rows]:
        """The rows that came from each rank, by now or before. given, taken: rows here that are sent to each, and for which
        rows come."""
        columns, dtype = store.rows(name).shape[1], store.dtype
        if name not in self._kept:
            self._since[name] = self._epoch
            self._kept[name] = [np.zeros((len(ids), columns), dtype) for ids in taken]
            if self._tolerance is not None:
                self._sent[name] = [np.zeros((len(ids), columns), dtype) for ids in given]
        if not lists.most:  # between any two ranks
            return self._kept[name]
        chosen = [self._chosen(store, name, rank, lists.node[ids], ids) for rank, ids in enumerate(given)]
        counts = [int(each[0]) for each in self._exchange([np.array([len(each)]) for each in chosen], [1] * len(chosen))]
        most = max(max(each) for each in self.ranks.gather(counts))
        rows = rows_at_once(columns * dtype.itemsize, len(chosen))
        for low in range(0, most, rows):
            places = [each[low : low + rows] for each in chosen]
            coming = [min(max(count - low, 0), rows) for count in counts]
            values = self._exchange([store.gather(name, ids[at]) for ids, at in zip(given, places, strict=True)], coming)
            at = self._exchange([each.astype(np.int32) for each in places], coming)
            for kept, here, new in zip(self._kept[name], at, values, strict=True):
                kept[here] = new
        return self._kept[name]

    def _chosen(self, store: ValueStore, name: str, rank: int, node: Ints, ids: Ints) -> Ints:
        """Places in a rank's list of the rows that are sent to it now, ascending; what is sent is noted."""
        age = self._epoch - self._since[name]
        due = np.full(len(ids), True) if age == 0 else (age + node) % self._every == 0
        if self._tolerance is None:
            return np.flatnonzero(due)
        sent = self._sent[name][rank]
        step = rows_at_once(max(1, sent.itemsize * sent.shape[1]), 1)
        for low in range(0, len(ids), step):
            now, before = store.gather(name, ids[low : low + step]), sent[low : low + step]
            drift, length = (np.einsum("ij,ij->i", each, each) for each in (now - before, before))
            own = due[low : low + step]
            own |= drift > self._tolerance**2 * length
            before[own] = now[own]
        return np.flatnonzero(due)
