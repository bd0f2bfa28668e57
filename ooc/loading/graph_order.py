"""PURE: the order in which whole graphs come, shuffled so that they are still read in long runs.

Consecutive graphs form runs of about 1 MiB. An epoch has the runs in a keyed random order, takes as many of them together as a
block has, and puts the graphs of each block into a keyed random order. So every block is read in large pieces, and a batch has
graphs of as many places of the file as a block has runs. (As shuffling by shards and a buffer in WebDataset, but the order
depends on the seed, the epoch and the data alone, and any part of it is computed by itself.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ooc.runtime.keyed_random import KeyedPermutation, Purpose, key, steps_of
from ooc.stores.arrays.rows import Ids

RUN_BYTES = 2**20


@dataclass(frozen=True)
class GraphOrder:
    """Positions 0..count-1 of graphs in the order of an epoch, and the part of it that each rank has.

    By default ranks have consecutive parts of the order, so that they read different blocks: of `f` full steps, rank r has the
    batches r * f to (r + 1) * f - 1; what is left over is divided as evenly as possible among all ranks for a last step.
    """

    count: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int
    world_size: int
    run: int
    """graphs of a run"""
    block: int
    """runs of a block"""
    seed_drawn: bool = False
    """see `ooc.loading.ranks.SeedShare`"""
    as_one: bool = False
    """whether each step's graphs are those of one process with a batch as large as the ranks' together, divided among them"""

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same for all ranks."""
        return steps_of(self.count, self.batch_size, self.drop_last, self.world_size)

    @property
    def own_steps(self) -> int:
        """Those in which this rank has graphs: all but the last one, where that has fewer graphs than there are ranks."""
        steps = self.steps
        first, last = self.batch(steps - 1) if steps else (0, 1)
        return steps - (first == last)

    def batch(self, step: int) -> tuple[int, int]:
        """First and last place, in the order of an epoch, of this rank's batch."""
        full = self._full_steps
        if step < full:
            first = (self.rank * full + step) * self.batch_size
            return first, first + self.batch_size
        begin = (step if self.as_one else full) * self.batch_size * self.world_size
        left = min(self.batch_size * self.world_size, self.count - begin)
        return begin + left * self.rank // self.world_size, begin + left * (self.rank + 1) // self.world_size

    @property
    def _full_steps(self) -> int:
        """Steps whose batches are a consecutive part of the order, by rank."""
        return 0 if self.as_one and self.world_size > 1 else self.count // (self.batch_size * self.world_size)

    def spans(self, epoch: int, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """The places of steps first..stop-1 of this rank, as ranges of the order that no block's end divides, in turn."""
        full = self._full_steps
        starts = self._block_starts(epoch) if self.shuffle else np.array([0, self.count])
        apart = [(step, step + 1) for step in range(max(first, full), stop)]
        for low, high in ((first, min(stop, full)), *apart):
            if low >= high:
                continue
            begin, end = self.batch(low)[0], self.batch(high - 1)[1]
            inside = starts[(starts > begin) & (starts < end)].tolist()
            yield from pairwise([begin, *inside, end])

    def positions(self, epoch: int, first: int, last: int) -> Ids:
        """Positions of the graphs at places first..last-1 of an epoch, which lie in one block, int64[last - first]."""
        if not self.shuffle:
            return np.arange(first, last)
        starts = self._block_starts(epoch)
        block = int(np.searchsorted(starts, first, side="right")) - 1
        begin, end = starts[block : block + 2].tolist()
        if last > end:
            raise ValueError(f"places {first} to {last - 1} lie in several blocks")
        runs = self._runs(epoch)[block * self.block : (block + 1) * self.block]
        sizes = np.minimum(self.run, self.count - runs * self.run)
        start = np.cumsum(sizes) - sizes
        inner = KeyedPermutation(end - begin, key(self.seed, Purpose.SHUFFLE, epoch, block + 1))[first - begin : last - begin]
        of = np.searchsorted(start, inner, side="right") - 1
        return np.asarray(runs[of] * self.run + inner - start[of], np.int64)

    def _runs(self, epoch: int) -> Ids:
        """The order of the runs, int64[-(-count // run)]."""
        runs = -(-self.count // self.run)
        return KeyedPermutation(runs, key(self.seed, Purpose.SHUFFLE, epoch))[:]

    def _block_starts(self, epoch: int) -> Ids:
        """Where each block begins in the order, and its end; one block has the last run, which may be short."""
        runs = self._runs(epoch)
        ends = np.cumsum(np.minimum(self.run, self.count - runs * self.run))
        last = np.minimum(np.arange(self.block, len(runs) + self.block, self.block), len(runs)) - 1  # run of each block
        return np.concatenate([np.zeros(1, np.int64), ends[last]])
