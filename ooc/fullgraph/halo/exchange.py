"""Rows of the halo, from the ranks that compute them, and their gradients back to these; a piece of bounded size at a time."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.fullgraph.halo.reach import Ints, Reach
from ooc.fullgraph.value_store import ValueStore
from ooc.runtime.keyed_random import mix64, numbered
from ooc.runtime.range_io import write_range
from ooc.runtime.ranks import Ranks
from ooc.stores.jit import kernel

PIECE_BYTES = 16 * 2**20
"""of the rows that a rank sends to all others at a time, about"""
_TRIES = 3
"""pieces sent to measure a bandwidth, after one to warm up"""


@dataclass(frozen=True)
class HaloLists:
    """What a rank exchanges with each other one of the rows that a layer reads, by rank.

    send: int64[k] each, its nodes whose rows the other one wants. receive: int64[h] each, the nodes of its halo whose rows come
    from the other one, as they are numbered here, ascending. most: rows between any two ranks at most. node: int64[n], ids of
    the nodes here in the whole graph; begin: those from there on are not computed here.
    """

    send: list[Ints]
    receive: list[Ints]
    most: int
    node: Ints
    begin: int

    @classmethod
    def agreed(cls, ranks: Ranks, starts: Ints, reach: Reach, layer: int) -> "HaloLists":
        """Those of this rank for what a layer reads, agreed with all others. starts: int64[K + 1], the ranges of nodes."""
        own, node, received = int(starts[ranks.rank]), reach.node, reach.received[layer]
        owner = np.searchsorted(starts, node[received], side="right") - 1
        receive = [received[owner == rank] for rank in range(ranks.world_size)]
        wanted: list[list[int]] = ranks.gather([len(each) for each in receive])
        most, found = max(max(each) for each in wanted), list[list[Ints]]()
        rows = rows_at_once(8, ranks.world_size)
        for low in range(0, most, rows):
            given = [torch.from_numpy(node[each[low : low + rows]]) for each in receive]
            counts = [min(max(each[ranks.rank] - low, 0), rows) for each in wanted]
            found.append([part.numpy() - own for part in ranks.exchange(given, counts)])
        none = [np.empty(0, np.int64)] * ranks.world_size
        send = [np.concatenate(parts) for parts in zip(none, *found, strict=True)]
        return cls(send, receive, most, node, reach.count + reach.recomputed[layer])


def bandwidth_of(ranks: Ranks) -> float:
    """Bytes a second that a process sends to all others, while these do so too: that of the slowest, the same on all."""
    rows, taken = PIECE_BYTES // (4 * ranks.world_size), []
    given = [torch.zeros(rows * (rank != ranks.rank), device=ranks.place) for rank in range(ranks.world_size)]
    for _ in range(1 + _TRIES):
        ranks.barrier()
        began = perf_counter()
        ranks.exchange(given, [len(part) for part in given])
        if ranks.place.type != "cpu":
            torch.cuda.synchronize()
        taken.append(perf_counter() - began)
    return min(ranks.gather(sum(map(len, given)) * 4 / statistics.median(taken[1:])))


def rows_at_once(row_bytes: int, world_size: int) -> int:
    """Rows that a rank sends to each other one at a time."""
    return max(1, PIECE_BYTES // (row_bytes * world_size))


class HaloExchange:
    """Exchanges rows of the values of a step with the other ranks, which do so at the same time.

    bytes_sent: by this rank, of rows and gradients.
    """

    draws = False
    """whether steps draw which rows are exchanged"""

    def __init__(self, ranks: Ranks, lists: Sequence[HaloLists]) -> None:
        self.ranks, self._lists = ranks, lists
        self.bytes_sent = 0

    def begin(self, key: int) -> None:
        """Before a step. key: of what it draws, the same on all ranks."""

    def pull(self, store: ValueStore, name: str, layer: int) -> None:
        """Fill in those rows that other ranks send of a value that a layer reads, whose own rows are made."""
        self._pull(store, name, self._lists[layer], 1.0)

    def push(self, store: ValueStore, name: str, layer: int) -> None:
        """Add such rows of its gradient to those of the ranks that sent them, rank by rank."""
        self._push(store, name, self._lists[layer], 1.0)

    def _pull(self, store: ValueStore, name: str, lists: HaloLists, factor: float) -> None:
        rows = rows_at_once(store.rows(name).row_bytes, self.ranks.world_size)
        for low in range(0, lists.most, rows):
            given = [store.gather(name, ids[low : low + rows]) for ids in lists.send]
            into = [ids[low : low + rows] for ids in lists.receive]
            for ids, values in zip(into, self._exchange(given, [len(ids) for ids in into]), strict=True):
                write_rows(store, name, ids, values if factor == 1 else values * values.dtype.type(factor))

    def _push(self, store: ValueStore, name: str, lists: HaloLists, factor: float) -> None:
        rows = rows_at_once(store.rows(name).row_bytes, self.ranks.world_size)
        for low in range(0, lists.most, rows):
            given = [store.gather(name, ids[low : low + rows]) for ids in lists.receive]
            to = [ids[low : low + rows] for ids in lists.send]
            for ids, values in zip(to, self._exchange(given, [len(ids) for ids in to]), strict=True):
                if len(ids):
                    store.add(name, ids, values if factor == 1 else values * values.dtype.type(factor))

    def _exchange(self, given: list[NDArray[Any]], counts: list[int]) -> list[NDArray[Any]]:
        self.bytes_sent += sum(part.nbytes for part in given)
        tensors = [torch.from_numpy(np.ascontiguousarray(part)).to(self.ranks.place) for part in given]
        return [part.cpu().numpy() for part in self.ranks.exchange(tensors, counts)]


def write_rows(store: ValueStore, name: str, ids: Ints, values: NDArray[Any]) -> None:
    """Set rows of a value, ascending ids."""
    if len(ids) and int(ids[-1] - ids[0]) + 1 == len(ids):
        write_range(store.open(name), int(ids[0]), values)
    elif len(ids):
        store.open(name).write(ids, values)


class SampledHalo(HaloExchange):
    """Exchanges a sample of the halo's rows that each step draws anew, scaled so that sums over neighbors, and their gradients,
    are right on average (boundary sampling of BNS-GCN, Wan et al., MLSys 2022). rate: share of the rows that are drawn."""

    draws = True

    def __init__(self, ranks: Ranks, lists: Sequence[HaloLists], rate: float) -> None:
        super().__init__(ranks, lists)
        self._rate, self._drawn = rate, lists

    def begin(self, key: int) -> None:
        """See `HaloExchange.begin`."""
        self._drawn = [self._some(lists, key) for lists in self._lists]

    def _some(self, lists: HaloLists, key: int) -> HaloLists:
        send = [ids[drawn(lists.node[ids], key, to, self._rate)] for to, ids in enumerate(lists.send)]
        receive = [ids[drawn(lists.node[ids], key, self.ranks.rank, self._rate)] for ids in lists.receive]
        return replace(lists, send=send, receive=receive)

    def pull(self, store: ValueStore, name: str, layer: int) -> None:
        """See `HaloExchange.pull`; zeros for rows that were not drawn."""
        store.clear(name, self._lists[layer].begin)
        self._pull(store, name, self._drawn[layer], 1 / self._rate)

    def push(self, store: ValueStore, name: str, layer: int) -> None:
        """See `HaloExchange.push`."""
        self._push(store, name, self._drawn[layer], 1 / self._rate)


def drawn(node: Ints, key: int, rank: int, rate: float) -> NDArray[np.bool_]:
    """Which nodes (int64[n]) of a rank's halo are drawn: bool[n], the same wherever it is asked.

    >>> drawn(np.arange(1000), key=5, rank=1, rate=0.1).sum()
    99
    """
    found = np.empty(len(node), np.bool_)
    _draw(np.uint64(numbered(key, rank)), node, np.uint64(min(int(rate * 2.0**64), 2**64 - 1)), found)
    return found


@kernel
def _draw(stream: np.uint64, node: Ints, bound: np.uint64, out: NDArray[np.bool_]) -> None:
    for i in range(len(node)):
        out[i] = mix64(stream ^ mix64(np.uint64(node[i]))) < bound
