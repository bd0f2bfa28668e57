"""Destinations that an event did not have, for link prediction: random, historical, or given by a file.

A draw depends on (key, number of the event) alone, so it is the same whatever the batches; none looks at an event at or after
the time of its own. (Random negatives and the idea of historical ones as of Poursafaei et al., "Towards Better Evaluation for
Dynamic Link Prediction", NeurIPS 2022, whose historical ones are pairs that were linked; here they are destinations that
anybody's earlier events had. Files as of the Temporal Graph Benchmark, Huang et al., NeurIPS 2023.)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ooc.sampling.kernels import stream_of, uniform
from stores.dataset import Dataset
from stores.errors import ConfigError, InputError
from stores.events import EventBlock
from stores.jit import kernel
from stores.segment_rows import read_range

Ids = NDArray[np.int64]
_TRIES = 16
"""draws of a negative until one is another than the event's own destination, and is born; then the last one stands"""


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
    """Destinations of earlier events, each event alike, so popular nodes more often; random ones where nothing was before.

    destination: [events], those of all events in time order (a map goes); otherwise: for the first events.
    """

    def __init__(self, destination: NDArray[Any], otherwise: RandomNegatives) -> None:
        self.destination, self.otherwise, self.ratio = np.asarray(destination), otherwise, otherwise.ratio

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """See `Negatives`."""
        out = self.otherwise.draw(block, past, key)
        _historical(block.first, block.dst, past, self.destination, np.uint64(key & (2**64 - 1)), out)
        return out


class GivenNegatives:
    """Those of an npy file, int[events, ratio], of events first, first + 1, ...: a benchmark's.

    Raises InputError where the file is not such an array, or names nodes that are none.
    """

    def __init__(self, path: Path | str, first: int, num_nodes: int) -> None:
        try:
            held = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read as an npy file of negatives: {str(error)[:200]}; check it") from None
        if held.ndim != 2 or held.dtype.kind not in "iu" or held.shape[1] < 1:
            raise InputError(f"{path} holds {held.dtype}{list(held.shape)}: node ids [events, negatives] are wanted")
        self._path, self._held, self._first, self._num_nodes = path, held, first, num_nodes
        self.ratio = int(held.shape[1])

    def draw(self, block: EventBlock, past: Ids, key: int) -> Ids:
        """See `Negatives`; the key plays no part. Raises InputError for an event that the file leaves out."""
        begin = block.first - self._first
        if begin < 0 or begin + len(block) > len(self._held):
            last, wanted = self._first + len(self._held) - 1, block.first + len(block) - 1
            raise InputError(
                f"{self._path} has negatives for events {self._first}..{last}, not for {block.first}..{wanted}: give those too"
            )
        found = np.array(self._held[begin : begin + len(block)], np.int64)
        wrong = (found < 0) | (found >= self._num_nodes)
        if wrong.any():
            row = int(np.argmax(wrong.any(axis=1)))
            raise InputError(
                f"{self._path} row {begin + row}: {found[row][wrong[row]][0]} is no node (0..{self._num_nodes - 1})"
            )
        return found


def negatives_of(dataset: Dataset, how: str, ratio: int, destinations: Sequence[int] = ()) -> Negatives:
    """ "random" or "historical" negatives of a store's events, of nodes that are born (where it knows).

    destinations: the first node and the last that random ones are drawn from; (): all. ConfigError for one that is none.
    Memory: 8 bytes a node, where there are births.

    >>> negatives_of(ds, "historical", ratio=1)
    """
    nodes = dataset.num_nodes
    first, last = destinations or (0, nodes - 1)
    if last >= nodes:
        raise ConfigError(f"destinations {first},{last}: the store's nodes are 0..{nodes - 1}")
    birth = read_range(dataset.rows("birth"), 0, nodes)[0] if "birth" in dataset.names else None
    random = RandomNegatives(first, last + 1, ratio, birth)
    return random if how == "random" else HistoricalNegatives(dataset.events.map("dst"), random)


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
def _historical(number: int, dst: NDArray[Any], past: Ids, destination: NDArray[Any], key: np.uint64, out: Ids) -> None:
    """Overwrites out[i] where there is a past, and one of its draws is another than dst[i]."""
    for i in range(len(out)):
        if past[i] == 0:
            continue
        stream, counter = stream_of(~key, number + i), 0
        for j in range(out.shape[1]):
            for _ in range(_TRIES):
                drawn = destination[int(uniform(stream, counter) * past[i])]
                counter += 1
                if drawn != dst[i]:
                    out[i, j] = drawn
                    break
