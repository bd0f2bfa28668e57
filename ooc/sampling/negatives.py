"""Destinations that an event did not have, for link prediction: random, historical, or given by a file.

A draw depends on (key, number of the event) alone, so it is the same whatever the batches; none looks at an event at or after
the time of its own. (Random and historical negatives as of Poursafaei et al., "Towards Better Evaluation for Dynamic Link
Prediction", NeurIPS 2022; historical ones have the event's source, and files are, as of the Temporal Graph Benchmark, Huang et
al., NeurIPS 2023.)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ooc.sampling.kernels import stream_of, uniform
from ooc.sampling.temporal_index import TemporalIndex, slots_of
from stores.arrays.rows import AnyArray, ArrayRows, Rows
from stores.arrays.segment_rows import read_range
from stores.dataset import Dataset
from stores.errors import ConfigError, InputError
from stores.events import EventBlock
from stores.jit import kernel

Ids = NDArray[np.int64]
_TRIES = 16
"""draws of a negative until one is another than the event's own destination, and is born; then the last one stands"""
_ROUNDS: list[Ids] = [np.arange(1), np.arange(1, 3), np.arange(3, 8)]
"""draws from the source's past for a historical negative: those of a round are looked at together, for few have to wait"""
_DRAWS = 8
LATEST = 256
"""events of the source's past, looked through where none of those was one with another destination"""
_AT_ONCE = 1024
"""negatives that are looked for so: some 10 MB"""


class Negatives(Protocol):
    """events, and how many come before each one's time -> destinations."""

    ratio: int
    """negatives an event"""

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """int64[k, ratio]; past: int64[k], events strictly before each one's time."""


class RandomNegatives:
    """Any node of first..last-1, each alike, but an event's own destination, and nodes that are not born at its time.

    birth: [N] first times of the nodes, or None. Raises ConfigError for a range that holds no two nodes.

    >>> RandomNegatives(0, ds.num_nodes).draw(block, past, key(seed, Purpose.NEGATIVE, epoch)).shape
    (200, 1)
    """

    def __init__(self, first: int, last: int, ratio: int = 1, birth: NDArray[Any] | None = None) -> None:
        if not 0 <= first < last - 1 or ratio < 1:
            raise ConfigError(
                f"negatives need two nodes to choose from and one or more an event, not {first}..{last - 1}, {ratio}"
            )
        self.first, self.last, self.ratio = first, last, ratio
        self.birth = np.empty(0, np.int64) if birth is None else birth

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """See `Negatives`."""
        out = np.empty((len(block), self.ratio), np.int64)
        _random(block.first, block.dst, block.time, self.birth, self.first, self.last, np.uint64(key & (2**64 - 1)), out)
        return out


class HistoricalNegatives:
    """Other destinations of the event's own source: of an earlier event of it, each alike; random ones where there is none.

    A few events of the source's past are drawn, and the first that is neither one to the source nor to the event's own
    destination stands; where none is, any such one of the `LATEST` latest. slots: of an undirected store, where a node has all
    events of its own; source: Rows [events], the sources of all events; otherwise: what takes the place where there is none.

    drawn, random: negatives so far, and how many of them are random, since no other destination of the source was found.

    >>> HistoricalNegatives(TemporalIndex(ds.graph), ds.events.rows("src"), RandomNegatives(0, ds.num_nodes))
    """

    def __init__(self, slots: TemporalIndex, source: Rows, otherwise: RandomNegatives) -> None:
        self._slots, self._source, self.otherwise, self.ratio = slots, source, otherwise, otherwise.ratio
        self.drawn = self.random = 0

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """See `Negatives`."""
        out = self.otherwise.draw(block, past, key).reshape(-1)
        stream = np.uint64(~key & (2**64 - 1))
        first, count = self._slots.before("edge_id", block.src.astype(np.int64), past)
        wanted = np.flatnonzero(np.repeat(count > 0, self.ratio))  # of out: place // ratio is the event
        for attempts in _ROUNDS:
            event = np.repeat(wanted // self.ratio, len(attempts))
            column, attempt = np.repeat(wanted % self.ratio, len(attempts)), np.tile(attempts, len(wanted))
            slot = np.empty(len(event), np.int64)
            _drawn(block.first, event, column, attempt, stream, first[event], count[event], slot)
            node, other = (each.reshape(-1, len(attempts)) for each in self._others(slot, block, event))
            stands, some = other.argmax(axis=1), other.any(axis=1)
            out[wanted[some]] = node[some, stands[some]]
            wanted = wanted[~some]
            if not len(wanted):
                break
        parts = [wanted[start : start + _AT_ONCE] for start in range(0, len(wanted), _AT_ONCE)]
        found = sum(self._of_the_latest(block, part, first, count, stream, out) for part in parts)
        self.drawn += len(out)
        self.random += int(np.count_nonzero(count == 0)) * self.ratio + len(wanted) - found
        return out.reshape(-1, self.ratio)

    def _others(self, slot: Ids, block: EventBlock, event: Ids) -> tuple[AnyArray, NDArray[np.bool_]]:
        """(the node in each slot; whether the block's event may have it): slots of the events' sources."""
        node, source = self._slots.values("indices", slot), np.empty(len(slot), self._source.dtype)
        self._source.read(self._slots.edge_ids(slot), source)
        return node, (source == block.src[event]) & (node != block.dst[event])

    def _of_the_latest(self, block: EventBlock, wanted: Ids, first: Ids, count: Ids, stream: np.uint64, out: Ids) -> int:
        """Fills in out[wanted] where the latest events of a source have another destination; how many."""
        event, asked = np.unique(wanted // self.ratio, return_inverse=True)
        length = np.minimum(count[event], LATEST)
        begin = np.cumsum(length) - length
        slot = np.repeat(first[event] + count[event] - length - begin, length) + np.arange(int(length.sum()))
        node, other = self._others(slot, block, np.repeat(event, length))
        many = np.add.reduceat(other, begin, dtype=np.int64)
        some = many[asked] > 0
        place = wanted[some]
        at, behind = np.empty(len(place), np.int64), np.full(len(place), _DRAWS)
        begin = np.cumsum(many) - many
        _drawn(block.first, place // self.ratio, place % self.ratio, behind, stream, begin[asked[some]], many[asked[some]], at)
        out[place] = node[other][at]
        return len(place)


class GivenNegatives:
    """Those of an npy file, int[events, ratio], of events first, first + 1, ...: a benchmark's.

    last: the event behind those that it is to have; None: asked when they are drawn. Raises InputError where the file is not
    such an array, has too few rows, or names nodes that are none.
    """

    def __init__(self, path: Path | str, first: int, num_nodes: int, last: int | None = None) -> None:
        try:
            held = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise InputError(f"there is no {path}: negatives are random, historical, or the path of an npy file") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read as an npy file of negatives: {str(error)[:200]}; check it") from None
        if held.ndim != 2 or held.dtype.kind not in "iu" or held.shape[1] < 1:
            raise InputError(f"{path} holds {held.dtype}{list(held.shape)}: node ids [events, negatives] are wanted")
        self._path, self._held, self._first, self._num_nodes = path, held, first, num_nodes
        self.ratio = int(held.shape[1])
        if last is not None:
            self._check(first, last)

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """See `Negatives`; the key plays no part. Raises InputError for an event that the file leaves out."""
        self._check(block.first, block.last)
        begin = block.first - self._first
        found = np.array(self._held[begin : begin + len(block)], np.int64)
        wrong = (found < 0) | (found >= self._num_nodes)
        if wrong.any():
            row = int(np.argmax(wrong.any(axis=1)))
            raise InputError(
                f"{self._path} row {begin + row}: {found[row][wrong[row]][0]} is no node (0..{self._num_nodes - 1})"
            )
        return found

    def _check(self, first: int, last: int) -> None:
        if first < self._first or last > self._first + len(self._held):
            has = f"events {self._first}..{self._first + len(self._held) - 1}"
            raise InputError(f"{self._path} has negatives for {has}, not for {first}..{last - 1}: give those too")


def fallen_back(drawn: Iterable[Negatives | None]) -> dict[str, int]:
    """Historical negatives so far, and how many of them are random, by the names of `summary.COUNTS`."""
    kept = {id(each): each for each in drawn if isinstance(each, HistoricalNegatives)}.values()
    total, random = sum(each.drawn for each in kept), sum(each.random for each in kept)
    return {"historical_negatives": total, "historical_negatives_random": random}


def negatives_of(dataset: Dataset, how: str, ratio: int, destinations: Sequence[int] = ()) -> Negatives:
    """ "random" or "historical" negatives of a store's events, of nodes that are born (where it knows).

    destinations: the first node and the last that random ones are drawn from; (): all. ConfigError for one that is none, and
    for historical ones of a store of directed edges, which keeps no node's own events together. Memory: 8 bytes a node, where
    there are births.

    >>> negatives_of(ds, "historical", ratio=1)
    """
    nodes = dataset.num_nodes
    first, last = destinations or (0, nodes - 1)
    if last >= nodes:
        raise ConfigError(f"destinations {first},{last}: the store's nodes are 0..{nodes - 1}")
    birth = read_range(dataset.rows("birth"), 0, nodes)[0] if "birth" in dataset.names else None
    random = RandomNegatives(first, last + 1, ratio, birth)
    if how == "random":
        return random
    if not dataset.manifest.undirected:
        raise ConfigError(
            f"historical negatives are of the source's own past, and {dataset.path} has directed edges, which keep that of "
            "destinations alone: ingest it with --undirected, or take random ones"
        )
    slots, events = slots_of(dataset), dataset.events
    source = ArrayRows(np.asarray(events.map("src"))) if slots.mapped else events.rows("src")
    return HistoricalNegatives(slots, source, random)


@kernel
def _random(
    number: int, dst: NDArray[Any], time: NDArray[Any], birth: NDArray[Any], first: int, last: int, key: np.uint64, out: Ids
) -> None:
    for i in range(len(out)):
        stream, counter = stream_of(key, number + i), 0
        for j in range(out.shape[1]):
            for _ in range(_TRIES):
                drawn = first + int(uniform(stream, counter) * (last - first))
                counter += 1
                if drawn != dst[i] and (len(birth) == 0 or birth[drawn] <= time[i]):
                    break
            out[i, j] = drawn


@kernel
def _drawn(number: int, event: Ids, column: Ids, attempt: Ids, key: np.uint64, first: Ids, count: Ids, out: Ids) -> None:
    """out[i]: one of first[i], ..., first[i] + count[i] - 1, by (key, number + event[i], column[i], attempt[i])."""
    for i in range(len(out)):
        stream = stream_of(key, number + event[i])
        out[i] = first[i] + int(uniform(stream, column[i] * (_DRAWS + 1) + attempt[i]) * count[i])
