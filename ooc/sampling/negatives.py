"""Negative destinations of events for link prediction: random, historical, from a file, or those of TGB's evaluation.

A sample depends on (key, event number) only, so it is the same for any batches. Except for TGB's, none uses events at or after
the event's own time. (Random and historical negatives as in Poursafaei et al., "Towards Better Evaluation for Dynamic Link
Prediction", NeurIPS 2022; historical ones per source and files as in the Temporal Graph Benchmark, Huang et al., NeurIPS 2023.)
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ooc.graph.relabel import RelabelTable
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import plan_memory, words_for
from ooc.sampling.kernels import draw_distinct, stream_of, uniform
from ooc.sampling.temporal_neighbor import TemporalIndex
from ooc.sampling.time_windows import span_of
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError
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
"""read at a time to find the destinations of events"""
_PAIRS_AT_ONCE = 2**16
"""events whose pairs are collected at a time"""
_TGB_KEY = np.uint64(key(0, Purpose.RANKING))
"""of all runs: TGB's negatives are fixed"""
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

    >>> RandomNegatives(0, ds.num_nodes, among=destinations_of(ds, *chronological(ds.events)["train"]))
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
                f"the training events have {len(among)} node as destination, and negatives need two: "
                "give `negatives=random` and `eval_negatives=random`"
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


class TgbNegatives:
    """Up to `ratio` negatives per event as in the Temporal Graph Benchmark (its `NegativeEdgeGenerator`, "hist_rnd").

    Half of them, as far as there are so many, are distinct destinations that the source had in the training events; the others
    are distinct destinations of any event of the store that the source did not have in training. None is a true destination of
    the source at the event's time. They depend on the event's number only: not on a run's seed, epoch or batches. Times of
    birth are not considered. Where there are fewer than `ratio`, the event's own destination fills the row; it is no negative.

    Args:
        dataset: The store, with events.
        ratio: Negatives per event.
        train: The training events: "train" (those before validation, by time), or (first, last).
        max_bytes: For the table of the training's pairs while they are collected, 20 to 30 bytes each; None: half of what the
            memory leaves for batches. 8 bytes each stay.

    Raises:
        ConfigError: `ratio` is below 1.
        BudgetError: The pairs do not fit `max_bytes`.

    >>> negatives = ooc.TgbNegatives(ds, 100)
    >>> loader = ooc.EventLoader(ds, events="test", negatives=negatives)
    """

    def __init__(
        self, dataset: Dataset, ratio: int = 100, train: str | tuple[int, int] = "train", max_bytes: int | None = None
    ) -> None:
        if ratio < 1:
            raise ConfigError(f"negatives need a ratio of at least 1, not {ratio}")
        self._events, self.ratio = dataset.events, ratio
        self._all = destinations_of(dataset, 0, len(dataset.events))
        most = plan_memory(dataset).pairs if max_bytes is None else max_bytes
        self._pairs = self._collect(*span_of(dataset.events, train), most)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._all.nbytes + self._pairs.nbytes

    @property
    def num_destinations(self) -> int:
        """Distinct destinations of all events."""
        return len(self._all)

    def _collect(self, first: int, last: int, max_bytes: int) -> Ids:
        """Return the distinct pairs of events first..last-1, sorted: source * `num_destinations` + the destination's place."""
        table = RelabelTable()
        for start in range(first, last, _PAIRS_AT_ONCE):
            block = self._events.read(start, min(start + _PAIRS_AT_ONCE, last), [])
            table.add(self._row(block.src) + self._place(block.dst))
            if table.nbytes > max_bytes:
                need = RelabelTable.most_bytes(last - first)
                raise BudgetError(
                    f"the pairs of {last - first:,} training events, from which TGB's historical negatives are drawn, may need "
                    f"{words_for(need, max_bytes)}; give more memory, or take other `eval_negatives`"
                )
        return table.ascending(table.size)[0]

    def _place(self, dst: AnyArray) -> Ids:
        return np.searchsorted(self._all, dst)

    def _row(self, src: AnyArray) -> Ids:
        return src.astype(np.int64) * len(self._all)

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """See `Negatives`; ignores the past and the key."""
        events, out = self._events, np.empty((len(block), self.ratio), np.int64)
        first, last = events.at(block.time[0], "left"), events.at(block.time[-1], "right")
        near = block if (first, last) == (block.first, block.last) else events.read(first, last, [])
        row, true = self._row(block.src), self._place(near.dst)
        seen = np.searchsorted(self._pairs, np.stack([row, row + len(self._all)]))
        near_first, near_last = (np.searchsorted(near.time, block.time, side) for side in ("left", "right"))
        ranges = np.concatenate([seen, np.stack([near_first, near_last])])
        _tgb(block.first, block.src, row, ranges, near.src, true, self._pairs, len(self._all), _TGB_KEY, out)
        return np.where(out < 0, block.dst[:, None], self._all[out])


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


def destinations_of(dataset: Dataset, first: int, last: int) -> Ids:
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
        among: Returns the nodes that "destinations" stands for. Historical negatives are among them too where a source has no
            other earlier destination, unless `destinations` are given.

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
    if how == "random":
        return RandomNegatives(first, last + 1, ratio, birth)
    if not dataset.manifest.undirected:
        raise ConfigError(
            f"historical negatives need the past of sources, but {dataset.path} has directed edges and stores only that of "
            "destinations: ingest it with `undirected=True`, or use random negatives"
        )
    slots, events = TemporalIndex.of(dataset), dataset.events
    source = ArrayRows(np.asarray(events.map("src"))) if slots.mapped else events.rows("src")
    chosen = among() if among is not None and not destinations else None
    return HistoricalNegatives(slots, source, RandomNegatives(first, last + 1, ratio, birth, chosen))


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


@kernel
def _tgb(
    number: int,
    src: AnyArray,
    row: Ids,
    ranges: Ids,
    near_src: AnyArray,
    near_dst: Ids,
    pairs: Ids,
    count: int,
    key: np.uint64,
    out: Ids,
) -> None:
    """Fill out[i] with places of distinct destinations, then -1; see `TgbNegatives`.

    ranges: int64[4, k]: the event's source has pairs[ranges[0, i]:ranges[1, i]], and the events of its time are
    ranges[2, i]:ranges[3, i] of near_src and near_dst (places). count: of destinations.
    """
    ratio = out.shape[1]
    drawn = np.empty(ratio, np.int64)
    for i in range(len(out)):
        out[i] = -1
        seen = pairs[ranges[0, i] : ranges[1, i]] - row[i]
        at_once = slice(ranges[2, i], ranges[3, i])
        true = np.unique(near_dst[at_once][near_src[at_once] == src[i]])
        hidden = np.searchsorted(seen, true)  # places in `seen` that may not be drawn
        hidden = hidden[seen[np.minimum(hidden, len(seen) - 1)] == true] if len(seen) else hidden[:0]
        historical = min(ratio // 2, len(seen) - len(hidden))
        _other_than(hidden, len(seen), historical, stream_of(key, number + i), drawn)
        for j in range(historical):
            out[i, j] = seen[drawn[j]]
        met = np.unique(np.concatenate((seen, true)))
        random = min(ratio - historical, count - len(met))
        _other_than(met, count, random, stream_of(~key, number + i), drawn)
        for j in range(random):
            out[i, historical + j] = drawn[j]


@kernel
def _other_than(hidden: Ids, size: int, count: int, stream: np.uint64, out: Ids) -> None:
    """Set out[:count] to distinct numbers below `size` without those of `hidden` (ascending), uniformly."""
    left = size - len(hidden)
    if count == left:
        for j in range(count):
            out[j] = j
    elif count:
        draw_distinct(stream, 0, left, count, out, 0)
    skipped = 0
    for j in range(count):
        while skipped < len(hidden) and hidden[skipped] <= out[j] + skipped:
            skipped += 1
        out[j] += skipped
