"""Negative destinations of events for link prediction: random, historical, or from a file.

A sample depends on (key, event number) only, so it is the same for any batches, and never uses events at or after the event's
own time. (Random and historical negatives as in Poursafaei et al., "Towards Better Evaluation for Dynamic Link Prediction",
NeurIPS 2022; historical ones per source and files as in the Temporal Graph Benchmark, Huang et al., NeurIPS 2023.)
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ooc.sampling.kernels import stream_of, uniform
from ooc.sampling.temporal_neighbor import TemporalIndex
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.events import EventBlock
from ooc.stores.jit import kernel

_TRIES = 16
"""attempts to find a random negative that is born and not the event's own destination; the last one is used in any case"""
_ROUNDS: list[Ids] = [np.arange(1), np.arange(1, 3), np.arange(3, 8)]
"""samples of the source's past for a historical negative, checked in rounds because most events need only the first"""
_DRAWS = 8
LATEST = 256
"""latest events of the source's past that are searched if no sampled one had another destination"""
_EVENTS_AT_ONCE = 2**20
"""read at a time to find the destinations of training events"""
_AT_ONCE = 1024
"""negatives searched at a time: about 10 MB"""


class Negatives(Protocol):
    """Maps events, and the number of events before each, to destinations."""

    ratio: int
    """negatives per event"""

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """Return destinations, int64[k, ratio]; past: int64[k], events strictly before each one's time."""


class RandomNegatives:
    """Uniform nodes of first..last-1, excluding an event's own destination and, given their `birth` times [N], unborn nodes.

    Args:
        first, last: The range of nodes.
        ratio: Negatives per event.
        birth: Times that nodes are born at, [N], or None.
        among: Sorted nodes to draw from, int[k]; None draws from the whole range.

    Raises:
        ConfigError: If there are fewer than two nodes to draw from, or `ratio` is below 1.

    >>> RandomNegatives(0, ds.num_nodes, among=training_destinations(ds, *chronological(ds.events)["train"]))
    """

    def __init__(self, first: int, last: int, ratio: int = 1, birth: AnyArray | None = None, among: Ids | None = None) -> None:
        if not 0 <= first < last - 1 or ratio < 1:
            raise ConfigError(
                f"negatives need at least two nodes and a ratio of at least 1, not nodes {first}..{last - 1} and ratio {ratio}"
            )
        self.first, self.last, self.ratio = first, last, ratio
        self.birth = np.empty(0, np.int64) if birth is None else birth
        self.among = np.empty(0, np.int64) if among is None else among
        if among is not None and len(among) < 2:
            raise ConfigError(
                f"the training events have {len(among)} node as destination, and negatives need two: use random negatives"
            )

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        out = np.empty((len(block), self.ratio), np.int64)
        stream = np.uint64(key & (2**64 - 1))
        _random(block.first, block.dst, block.time, self.birth, self.first, self.last, self.among, stream, out)
        return out


class HistoricalNegatives:
    """Destinations of earlier events of the same source, uniformly over those events; `otherwise` is used if there are none.

    A few past events of the source are sampled and the first with another destination is used; failing that, one of the
    `LATEST` latest. `slots` index an undirected store, `source` are the sources of all events. `drawn` and `random` count the
    negatives so far and the random ones among them.
    """

    def __init__(self, slots: TemporalIndex, source: Rows, otherwise: RandomNegatives) -> None:
        self._slots, self._source, self.otherwise, self.ratio = slots, source, otherwise, otherwise.ratio
        self.drawn = self.random = 0

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        out = self.otherwise.draw(block, past, key).reshape(-1)
        stream = np.uint64(~key & (2**64 - 1))
        first, count = self._slots.before("edge_id", block.src.astype(np.int64), past)
        pending = np.flatnonzero(np.repeat(count > 0, self.ratio))  # position in out; position // ratio is the event
        for attempts in _ROUNDS:
            event = np.repeat(pending // self.ratio, len(attempts))
            column, attempt = np.repeat(pending % self.ratio, len(attempts)), np.tile(attempts, len(pending))
            slot = np.empty(len(event), np.int64)
            _drawn(block.first, event, column, attempt, stream, first[event], count[event], slot)
            node, other = (each.reshape(-1, len(attempts)) for each in self._others(slot, block, event))
            choice, found = other.argmax(axis=1), other.any(axis=1)
            out[pending[found]] = node[found, choice[found]]
            pending = pending[~found]
            if not len(pending):
                break
        parts = [pending[start : start + _AT_ONCE] for start in range(0, len(pending), _AT_ONCE)]
        filled = sum(self._from_latest(block, part, first, count, stream, out) for part in parts)
        self.drawn += len(out)
        self.random += int(np.count_nonzero(count == 0)) * self.ratio + len(pending) - filled
        return out.reshape(-1, self.ratio)

    def _others(self, slot: Ids, block: EventBlock, event: Ids) -> tuple[AnyArray, NDArray[np.bool_]]:
        """Return the node in each slot and whether it is a valid negative of the block's event."""
        node, source = self._slots.values("indices", slot), np.empty(len(slot), self._source.dtype)
        self._source.read(self._slots.edge_ids(slot), source)
        return node, (source == block.src[event]) & (node != block.dst[event])

    def _from_latest(self, block: EventBlock, pending: Ids, first: Ids, count: Ids, stream: np.uint64, out: Ids) -> int:
        """Fill out[pending] from the latest events of the sources; returns how many were found."""
        event, inverse = np.unique(pending // self.ratio, return_inverse=True)
        length = np.minimum(count[event], LATEST)
        begin = np.cumsum(length) - length
        slot = np.repeat(first[event] + count[event] - length - begin, length) + np.arange(int(length.sum()))
        node, other = self._others(slot, block, np.repeat(event, length))
        many = np.add.reduceat(other, begin, dtype=np.int64)
        some = many[inverse] > 0
        position = pending[some]
        at, attempt = np.empty(len(position), np.int64), np.full(len(position), _DRAWS)
        begin, which = np.cumsum(many) - many, inverse[some]
        column = position % self.ratio
        _drawn(block.first, position // self.ratio, column, attempt, stream, begin[which], many[which], at)
        out[position] = node[other][at]
        return len(position)


class GivenNegatives:
    """Negatives from an npy file, int[events, ratio], for events first, first + 1, ..., as benchmarks provide them.

    Raises InputError if the file is no such array, has invalid node ids, or does not cover the events up to `last` (None: when
    sampling).
    """

    def __init__(self, path: Path | str, first: int, num_nodes: int, last: int | None = None) -> None:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise InputError(f"{path} does not exist: negatives are random, historical, or the path of an npy file") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not a readable npy file of negatives: {str(error)[:200]}") from None
        if array.ndim != 2 or array.dtype.kind not in "iu" or array.shape[1] < 1:
            raise InputError(f"{path} holds {array.dtype}{list(array.shape)}: negatives must be node ids [events, negatives]")
        self._path, self._array, self._first, self._num_nodes = path, array, first, num_nodes
        self.ratio = int(array.shape[1])
        if last is not None:
            self._check(first, last)

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """See `Negatives`; ignores the key. Raises InputError for events the file does not cover."""
        self._check(block.first, block.last)
        begin = block.first - self._first
        destinations = np.array(self._array[begin : begin + len(block)], np.int64)
        wrong = (destinations < 0) | (destinations >= self._num_nodes)
        if wrong.any():
            row = int(np.argmax(wrong.any(axis=1)))
            raise InputError(
                f"{self._path} row {begin + row}: {destinations[row][wrong[row]][0]} is not a node (0..{self._num_nodes - 1})"
            )
        return destinations

    def _check(self, first: int, last: int) -> None:
        if first < self._first or last > self._first + len(self._array):
            has = f"events {self._first}..{self._first + len(self._array) - 1}"
            raise InputError(f"{self._path} has negatives for {has}, not for {first}..{last - 1}: add those")


def fallback_counts(drawn: Iterable[Negatives | None]) -> dict[str, int]:
    """Return the number of historical negatives and of random ones among them, named as in `summary.COUNTS`."""
    samplers = {id(each): each for each in drawn if isinstance(each, HistoricalNegatives)}.values()
    total, random = sum(each.drawn for each in samplers), sum(each.random for each in samplers)
    return {"historical_negatives": total, "historical_negatives_random": random}


def training_destinations(dataset: Dataset, first: int, last: int) -> Ids:
    """Return the nodes that are destinations of events first..last-1, sorted int64[k]; one byte per node while it counts."""
    met = np.zeros(dataset.num_nodes, bool)
    for start in range(first, last, _EVENTS_AT_ONCE):
        met[dataset.events.read(start, min(start + _EVENTS_AT_ONCE, last), []).dst] = True
    return np.flatnonzero(met)


def negatives_of(
    dataset: Dataset,
    how: str,
    ratio: int,
    destinations: Sequence[int] = (),
    among: Callable[[], Ids] | None = None,
) -> Negatives:
    """Return negatives of a store's events, excluding unborn nodes if births are known.

    Args:
        dataset: The store, with events.
        how: "destinations" (of training events), "random" or "historical".
        ratio: Negatives per event.
        destinations: First and last node for random negatives, () for all.
        among: Returns the nodes that "destinations" stands for.

    Raises:
        ConfigError: If `destinations` are out of range, or for historical negatives of a directed store.
    """
    nodes = dataset.num_nodes
    first, last = destinations or (0, nodes - 1)
    if last >= nodes:
        raise ConfigError(f"destinations {first},{last} are out of range: the store has nodes 0..{nodes - 1}")
    birth = read_range(dataset.rows("birth"), 0, nodes)[0] if "birth" in dataset.names else None
    if how == "destinations":
        assert among is not None, "the training events have destinations"
        return RandomNegatives(0, nodes, ratio, birth, among())
    random = RandomNegatives(first, last + 1, ratio, birth)
    if how == "random":
        return random
    if not dataset.manifest.undirected:
        raise ConfigError(
            f"historical negatives need the past of sources, but {dataset.path} has directed edges and stores only that of "
            "destinations: ingest it with `undirected=True`, or use random negatives"
        )
    slots, events = TemporalIndex.of(dataset), dataset.events
    source = ArrayRows(np.asarray(events.map("src"))) if slots.mapped else events.rows("src")
    return HistoricalNegatives(slots, source, random)


@kernel
def _random(
    number: int,
    dst: AnyArray,
    time: AnyArray,
    birth: AnyArray,
    first: int,
    last: int,
    among: Ids,
    key: np.uint64,
    out: Ids,
) -> None:
    chosen = len(among)
    for i in range(len(out)):
        stream, counter = stream_of(key, number + i), 0
        for j in range(out.shape[1]):
            for _ in range(_TRIES):
                drawn = first + int(uniform(stream, counter) * (last - first if chosen == 0 else chosen))
                if chosen:
                    drawn = among[drawn - first]
                counter += 1
                if drawn != dst[i] and (len(birth) == 0 or birth[drawn] <= time[i]):
                    break
            out[i, j] = drawn


@kernel
def _drawn(number: int, event: Ids, column: Ids, attempt: Ids, key: np.uint64, first: Ids, count: Ids, out: Ids) -> None:
    """out[i]: one of first[i], ..., first[i] + count[i] - 1, keyed by (key, number + event[i], column[i], attempt[i])."""
    for i in range(len(out)):
        stream = stream_of(key, number + event[i])
        out[i] = first[i] + int(uniform(stream, column[i] * (_DRAWS + 1) + attempt[i]) * count[i])
