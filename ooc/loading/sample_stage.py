"""The first stage of a loader's pipeline, Cursor -> SampledBatch: draws neighbors, and checks a batch against the memory."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Self, cast

import torch

from ooc.graph.blocks import Subgraph
from ooc.graph.mapped_topology import HeteroTopology, Topology
from ooc.loading.arguments import InputNodes
from ooc.loading.batch_bytes import BatchLimit
from ooc.loading.collate import SampledBatch
from ooc.loading.input_links import InputLinks
from ooc.loading.read_counts import ReadCounts
from ooc.runtime.keyed_random import Cursor, Purpose, key, seeds_of, steps_of
from ooc.runtime.memory_plan import smaller_than, words_for
from ooc.sampling import OnDiskFrontier
from ooc.sampling.labor import Key, batch_key
from ooc.sampling.links import AnySeeds, Seeds
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import BudgetError

FIRST_TOGETHER, MOST_TOGETHER = 4, 128
"""Batches drawn together where the edges stay on disk: at first, and at most; in between as many as fit. (1.6 billion edges,
[15,10,5]: 128 batches read a third less of the edges than 64 do; more are drawn for longer than a scan is used.)"""
DrawSubgraph = Callable[[AnySeeds, Any], tuple[Any, int]]
"""(seeds, `Key`) -> (the subgraph as of `SampledBatch`, bytes of edges read from the disk for it)"""


@dataclass(frozen=True)
class Order:
    """Which seeds a step has, and the keys of its draws: all that a batch depends on besides the cursor."""

    nodes: InputNodes | InputLinks
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int
    world_size: int
    seed_drawn: bool = False
    """whether the seed came from torch's generator; see `ooc.loading.ranks.SeedShare`"""
    batch_dependency: int = 1
    """for how many batches, over all epochs, draws depend on one another; see `Labor`"""
    draws_by_rank: bool = False
    """whether ranks draw differently, as where a batch is drawn without seeds. Otherwise a node's draw is the same on all
    ranks, and in one process that has their batches together"""

    def positions(self, cursor: Cursor) -> Ids:
        return seeds_of(
            self.nodes, cursor, self.batch_size, self.shuffle, self.seed, self.drop_last, self.rank, self.world_size
        )

    def seeds(self, epoch: int, position: Ids) -> AnySeeds:
        return self.nodes.seeds(position, key(self.seed, Purpose.NEGATIVE, epoch))

    @property
    def steps(self) -> int:
        """Of an epoch, the same on all ranks."""
        return steps_of(len(self.nodes), self.batch_size, self.drop_last, self.world_size)

    @property
    def own_steps(self) -> int:
        """Those in which this rank has seeds: all but the last one, where that has fewer seeds than there are ranks."""
        steps = self.steps
        left = len(self.nodes) - (steps - 1) * self.batch_size * self.world_size
        return steps - (steps > 0 and left * self.rank // self.world_size == left * (self.rank + 1) // self.world_size)

    def key(self, cursor: Cursor) -> Key:
        rank = self.rank if self.draws_by_rank else 0
        if self.batch_dependency == 1:
            return key(self.seed, Purpose.SAMPLE, cursor.epoch, cursor.step, rank)
        return batch_key(self.seed, rank, cursor.epoch * self.steps + cursor.step, self.batch_dependency)


class SamplePlace(NamedTuple):
    """Where neighbors are sampled. device: the GPU; None for the CPU. why: for people; edges_on_host: whether the GPU reads the
    edges from the host's memory."""

    device: torch.device | None
    why: str
    edges_on_host: bool = False

    def __str__(self) -> str:
        return f"neighbors are sampled {'by the CPU' if self.device is None else f'on {self.device}'}: {self.why}"


ON_CPU = SamplePlace(None, "nothing else can be asked for")


@dataclass(frozen=True)
class SampleStage:
    """Draws batches, from a topology that is kept within its memory, and checks them against `limit`."""

    order: Order
    draw: DrawSubgraph
    topology: Topology | HeteroTopology
    limit: BatchLimit
    counts: ReadCounts
    frontier: OnDiskFrontier | None = None
    """draws many batches together, where the edges stay on disk"""
    threads: int = 1
    """that draw, where batches are drawn one by one"""
    split_seeds: bool = False
    """whether a batch beyond the limit is halved, and again, into more batches"""
    kept_bytes: int = 0
    """of the draws that a thread keeps for further batches, where batches are drawn one by one"""
    place: SamplePlace = ON_CPU
    apart: bool = False
    """whether batches of an epoch have no rows in common, such as parts: then ranks have nothing to share"""

    @property
    def one_by_one(self) -> bool:
        """Whether each cursor gives one batch, drawn by itself."""
        return self.frontier is None and not self.split_seeds

    def drawing_bytes(self, nbytes: int) -> int:
        """Bytes of the batches being drawn at once, with hash tables and the draws that are kept. nbytes: of a subgraph."""
        threads = 1 if self.split_seeds else self.threads
        return threads * (4 * nbytes + self.kept_bytes) if self.frontier is None else self.frontier.max_bytes or 0

    def shared(self, limit: BatchLimit, parts: int) -> Self:
        """The same within another limit, for one of so many parts of the frontier's memory."""
        frontier = self.frontier
        if frontier is not None and frontier.max_bytes is not None:
            own = frontier.max_bytes // parts
            frontier = frontier.within(own)
        return replace(self, limit=limit, frontier=frontier)

    def sample(self, cursor: Cursor) -> SampledBatch:
        """The batch at `cursor`, whole. Raises BudgetError where it does not fit the memory."""
        self.topology.warm()
        position = self.order.positions(cursor)
        seeds = self.order.seeds(cursor.epoch, position)
        return self._checked(cursor, position, True, self._drawn(seeds, self.order.key(cursor)), seeds)

    def sample_at(self, position: Ids, key: int) -> SampledBatch:
        """The batch of the input nodes at `position`, in no order of an epoch. Raises as `sample` does."""
        self.topology.warm()
        seeds = self.order.nodes.seeds(position, key)
        subgraph = self._drawn(seeds, key) if self.frontier is None else self._together([seeds], [key])[0]
        if isinstance(subgraph, Exception):
            raise subgraph
        return self._checked(Cursor(0, 0), position, True, subgraph, seeds)

    def batches(self, cursors: Iterator[Cursor]) -> Iterator[SampledBatch]:
        """The batches of `cursors`, drawn one by one, in halves or together."""
        return map(self.sample, cursors) if self.one_by_one else self._parts(cursors)

    def _parts(self, cursors: Iterator[Cursor]) -> Iterator[SampledBatch]:
        """The batches of `cursors`; with `split_seeds`, where one does not fit, its halves in order.

        Where the edges stay on disk, many are drawn at a time, hop by hop, as many as fit the frontier's memory. The batches
        before one that fails come first. All parts of a step share its draws: a node's draw is the same in every part as long
        as it is met at the same hop. Where fan-outs differ by hop, a node can be met at an earlier or a later hop in a half
        than in the whole, and then with another fan-out: so what is computed from a split batch depends on where it was split,
        that is, on the memory.
        """
        self.topology.warm()
        waiting: deque[tuple[Cursor, Ids, bool]] = deque()
        together = 1 if self.frontier is None else FIRST_TOGETHER
        while True:
            for cursor in islice(cursors, max(0, together - len(waiting))):
                waiting.append((cursor, self.order.positions(cursor), True))
            if not waiting:
                return
            parts = list(islice(waiting, together))
            seeds = [self.order.seeds(cursor.epoch, position) for cursor, position, _ in parts]
            found = self._subgraphs(seeds, [self.order.key(cursor) for cursor, _, _ in parts])
            if self.frontier is not None:
                together = min(2 * together, MOST_TOGETHER) if len(found) == together else len(found)
            for (cursor, position, last), each, subgraph in zip(parts, seeds, found, strict=False):
                waiting.popleft()
                try:
                    if isinstance(subgraph, Exception):
                        raise subgraph
                    drawn = self._checked(cursor, position, last, subgraph, each)
                except BudgetError:
                    if not self.split_seeds or len(position) == 1:
                        raise
                    half = len(position) // 2
                    waiting.extendleft([(cursor, position[half:], last), (cursor, position[:half], False)])
                    break  # what was drawn behind it is drawn again, in its place
                yield drawn
            del found  # before the next ones are drawn

    def _subgraphs(self, seeds: list[AnySeeds], keys: list[Key]) -> Sequence[Any]:
        """The subgraphs of the first of these seeds, of one at least, or what it failed on."""
        if self.frontier is not None:
            return self._together(seeds, keys)
        try:
            return [self._drawn(seeds[0], keys[0])]
        except BudgetError as error:
            return [error]

    def _together(self, seeds: list[AnySeeds], keys: list[Key]) -> Sequence[Subgraph | Exception]:
        assert self.frontier is not None
        plain = cast(list[Seeds], seeds)  # trees and several types are read through memory maps
        together = self.frontier.sample([each.node for each in plain], keys, [each.left_out for each in plain])
        self.counts.add(topology=together.nbytes, together=len(together.batches))
        return together.batches

    def _drawn(self, seeds: AnySeeds, key: Key) -> Any:
        subgraph, nbytes = self.draw(seeds, key)
        if nbytes:
            self.counts.add(topology=nbytes)
        return subgraph

    def _checked(self, cursor: Cursor, position: Ids, last: bool, subgraph: Any, seeds: AnySeeds) -> SampledBatch:
        self.topology.trim(subgraph)
        drawn, most = SampledBatch(cursor.step, last, position, subgraph, seeds.links), self.limit.max_bytes
        need = self.limit.need(drawn, self.drawing_bytes(subgraph.nbytes))  # the sampler has not counted what collation adds
        if need > most:
            raise BudgetError(
                f"a batch of {len(position)} seed{'s' * (len(position) != 1)} needs {words_for(need, most)}; "
                f"use {smaller_than(len(position))}"
            )
        self.counts.add(requested=self.limit.rows(drawn))
        return drawn
