"""`EventLoader`: the events of a temporal graph in order, in batches, each with the past that its nodes are asked about.

Batches are ranges of the events' arrays, read front to back in blocks; for the next ones negatives are drawn, the past is
sampled (`ooc.sampling.temporal_neighbor`) and features are gathered while the model computes. What is drawn depends on (seed,
epoch, event) alone.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch_geometric.data import TemporalData

from ooc.graph.relabel import RelabelTable
from ooc.loading.arguments import check_pyg_arguments, dataset_of, fanout_of, renamed
from ooc.loading.base import EpochLoader
from ooc.loading.collate import Gather
from ooc.loading.ranks import share_of
from ooc.runtime.buffers import Buffers
from ooc.runtime.keyed_random import Cursor, Purpose, key
from ooc.runtime.memory_plan import MemoryPlan, plan_memory, words_for
from ooc.runtime.messages import warn_user
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.runtime.ranks import ranks_now
from ooc.runtime.transfer import OnDevice
from ooc.sampling.negatives import Negatives
from ooc.sampling.temporal_neighbor import EDGE_BYTES, QUERY_BYTES, Strategy, TemporalIndex, TemporalSampler, TemporalSubgraph
from ooc.sampling.time_windows import span_of
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.events import EventBlock

PREFETCH = 8
BLOCK_EVENTS, BLOCK_BYTES = 2**16, 2**23
"""read at once, of which batches are parts: so many events, or fewer where these are wide"""
FIELDS = frozenset(("src", "dst", "t", "neg_dst", "e_id", "n_id", "x", "entry", "entry_t", "entry_query", "query"))
FIELDS |= {"part_of", "memory_request", "edge_index", "edge_id", "id", "num_nodes", "num_sampled_nodes", "num_sampled_edges"}
"""of a batch, beside the events' columns; or edge_FIELD is one"""
RANKED_AT_ONCE = 2**10
"""sources, destinations and negatives of a part that is ranked, or one event's: a constant, so that scores are the same in any
memory; as many as a batch of the default size asks about, about twice over"""
_QUERY_BYTES = 32
"""of a source, destination or negative before its past is drawn: itself, its node, time and entry"""


class BatchPart(NamedTuple):
    """Events to sample for: a whole batch, or some of its events that are ranked against further negatives."""

    block: EventBlock
    batch: EventBlock
    ranked: bool


class SampledEvents(NamedTuple):
    """A batch with its queries' past: sources, destinations, negatives, one behind the other, at their event's time."""

    part: BatchPart
    negative: Ids | None
    """int64[k, ratio]"""
    past: TemporalSubgraph
    node: Ids
    """int64[m], distinct"""
    entry: Ids
    """int64[n]: where each of the past's entries stands in `node`"""
    query: Ids
    """int64[queries]: each one's entry"""


@dataclass
class EventBytes:
    """Bytes read from the disk, each counted by one thread; rows of features asked for."""

    events: int = 0
    gathered: int = 0
    rows: int = 0


class TemporalLoader(EpochLoader):
    """What loaders of a store's events share: a plan of the memory, and the columns and features of a batch.

    label: the column that holds labels, which is read last and is no field of a batch; fields: names that no column may have;
    features: whether batches have x.
    """

    def __init__(
        self,
        data: Dataset,
        columns: Sequence[str] | None,
        fields: frozenset[str],
        *,
        features: bool,
        prefetch: int,
        transform: Callable[[Any], Any] | None,
        device: torch.device | str | None,
        budget: MemoryPlan | None,
        label: str | None = None,
    ) -> None:
        self.data, self.budget = data, budget or plan_memory(data)
        super().__init__(self.budget.in_flight, device, prefetch)
        if not ranks_now().alone:
            warn_user(f"{type(self).__name__} does not divide events among the ranks of a process group: each has all")
        wanted = tuple(name for name in (data.events.columns if columns is None else columns) if name != label)
        for name in wanted if label is None else (*wanted, label):
            data.events.width(name)
            if name in fields and name != label:
                raise ConfigError(
                    f"the events' column {name!r} would take the place of another field of the batch: leave it out (columns), "
                    "or ingest it by another name"
                )
        self._events, self._max_bytes, self._transform = data.events, self.budget.batch, transform
        self._columns = wanted if label is None else (*wanted, label)
        self._features = (data.stored("x"), Gather(data.encoding("x"))) if features and data.num_features else None
        self._buffers = Buffers(2)
        self.moved = EventBytes()
        """what was read so far, for batches not yet delivered too"""

    @property
    def _node_bytes(self) -> int:
        """Bytes of a node's features."""
        return 0 if self._features is None else self._features[1].row_bytes(self._features[0].shape[1:])

    def _add_features(self, data: Any, node: Ids) -> None:
        """Give a batch its nodes' features."""
        if self._features is not None:
            x, gather = self._features
            rows, nbytes = gather.read(x, node, self._buffers)
            data.x = gather.tensor(rows)
            self.moved.gathered += nbytes
            self.moved.rows += len(node)


class EventLoader(TemporalLoader):
    """Batches of consecutive events, as PyG `TemporalData`, with the past of their nodes; each `iter` is the next epoch.

    A batch has src, dst, t [k], its columns (`msg` [k, d]), neg_dst ([k], or [k, ratio] for several), e_id int64[k]; n_id
    int64[m], all nodes it meets, and x [m, f] of them. Its past is a forest over entries, which are nodes at times: first the
    sources, the destinations and the negatives, then what was drawn. entry int64[n]: where each stands in n_id; entry_t [n]:
    its time; entry_query int64[n]: the event it is for; query: which entries the sources, destinations and negatives are (the
    first ones; with `shared`, where entry_query is left out, one for each node that is asked about); edge_index int64[2, e]:
    from an entry to the one it was drawn for; edge_id int64[e], edge_msg [e, d]: of the past event; num_sampled_nodes,
    num_sampled_edges: per hop.

    Args:
        data: A store with times.
        batch_size: Events of a batch, more where `whole_times` keeps those of one time together.
        events: "train", "val" or "test" (in order of time), (first, last), or None for all.
        num_neighbors: Edges of the past drawn at a node, per hop; []: none.
        temporal_strategy: "last" draws the latest of them, "uniform" any.
        negatives: Of `ooc.sampling.negatives`, or None.
        ranking: Further negatives, to rank events against many. Before each batch its events then come in parts of a few, with
            these as neg_dst, and with part_of, the batch's first event: what they ask about knows nothing of the batch.
            `len(loader)` does not count them.
        columns: Of the events to read; None: all.
        features: Whether to give x.
        whole_times: Whether what a batch teaches is never of the time that the next one asks about.
        shared: Whether each node is asked about once a batch, at the time of its first event, as models with a memory do. What
            an event of the batch asks about then knows nothing of the others, as in PyG's TGN.
        beside: Bytes a node that a subclass's stages hold.
        seed: Of negatives and uniform draws; None: from torch's generator, as NeighborLoader's.
        prefetch: Batches made in advance, as far as the memory goes.
        transform: Called with every batch, in a thread.
        device: Where batches are moved.
        budget: A plan of the memory other than `plan_memory(data)`.
        arguments: PyG's and DataLoader's others, as NeighborLoader's.

    Raises:
        ConfigError: An argument does not fit.
        InputError: The store has no times.
        BudgetError: While iterating, a batch does not fit the memory.

    >>> loader = EventLoader(ds, batch_size=200, events="train", negatives=RandomNegatives(0, ds.num_nodes))
    >>> for batch in loader:
    ...     z = memory(batch.n_id)[batch.entry]
    """

    unit = "event"

    @renamed(strategy="temporal_strategy")
    def __init__(
        self,
        data: Dataset | Path | str,
        batch_size: int = 200,
        *,
        events: str | tuple[int, int] | None = None,
        num_neighbors: Sequence[int] = (10,),
        temporal_strategy: Strategy = "last",
        negatives: Negatives | None = None,
        ranking: Negatives | None = None,
        columns: Sequence[str] | None = None,
        features: bool = True,
        whole_times: bool = True,
        shared: bool = False,
        beside: int = 0,
        seed: int | None = None,
        prefetch: int = PREFETCH,
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        budget: MemoryPlan | None = None,
        **arguments: Any,
    ) -> None:
        check_pyg_arguments(arguments, list(inspect.signature(EventLoader).parameters), type(self).__name__)
        data = dataset_of(data, homogeneous=type(self).__name__)
        common: dict[str, Any] = {"transform": transform, "device": device, "budget": budget}
        super().__init__(data, columns, FIELDS, features=features, prefetch=prefetch, **common)
        if not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ConfigError(f"batch_size is a whole number, 1 or more, not {batch_size!r}")
        self._begin, self._end = span_of(data.events, events)
        self._batch_size, self._whole_times, self._shared = batch_size, whole_times, shared
        self._negatives, self._ranking, self._beside = negatives, ranking, beside
        self._seed, *_, self._seed_drawn = share_of(seed, 0, 1)
        slots = TemporalIndex.of(data, self.budget.memory)
        self._sampler = TemporalSampler(data.graph, fanout_of(num_neighbors), temporal_strategy, self._max_bytes, slots=slots)
        self._start_at(Cursor(0, self._begin))

    def __len__(self) -> int:
        return sum(1 for _ in self._borders(self._begin))

    @property
    def num_events(self) -> int:
        return self._end - self._begin

    def set_epoch(self, epoch: int) -> None:
        """The next `iter` is this epoch, from its beginning."""
        self._start_at(Cursor(epoch, self._begin))

    def _identity(self) -> dict[str, Any]:
        kept = {name: getattr(self, f"_{name}") for name in ("batch_size", "whole_times", "shared", "seed")}
        return {
            **super()._identity(),
            "first": self._begin,
            "last": self._end,
            **kept,
            "fanout": list(self._sampler.fanout),
            "strategy": self._sampler.temporal_strategy,
            "columns": list(self._columns),
            "negatives": _named(self._negatives),
            "ranking": _named(self._ranking),
        }

    def _use_seed(self, seed: int) -> None:
        self._seed = seed

    def _from(self, start: Cursor) -> Pipeline | OnDevice:
        return self._batches(self._parts(start.step), self._stages(start.epoch))

    def _stages(self, epoch: int) -> list[Stage]:
        """What is done to a block of events; the last stage gives (the event behind it, the batch)."""
        return [Stage("sample", partial(self._draw, epoch)), Stage("collate", self._collate, nbytes=self._nbytes)]

    def _borders(self, start: int) -> Iterator[tuple[int, int]]:
        """(first, last) event of every batch, from event `start` on."""
        while start < self._end:
            stop = min(start + self._batch_size, self._end)
            if self._whole_times and stop < self._end:
                stop = min(self._events.at(self._events.time(stop - 1), "right"), self._end)
            yield start, stop
            start = stop

    def _blocks(self, start: int) -> Iterator[EventBlock]:
        """The batches' events, read some batches at a time."""
        block: EventBlock | None = None
        columns = list(self._columns)
        width = self._events.row_bytes(columns)
        step = min(BLOCK_EVENTS, BLOCK_BYTES // width)
        for first, last in self._borders(start):
            if block is None or last > block.last:
                if (need := (last - first) * width) > self._max_bytes:
                    ratio = 0 if self._negatives is None else self._negatives.ratio
                    most = self._most_bytes(last - first, (last - first) * (2 + ratio))
                    raise self._too_large(last - first, max(need, most), "may need")
                block = self._events.read(first, min(self._end, max(last, first + step)), columns)
                self.moved.events += block.nbytes
            yield block.part(first, last)

    def _parts(self, start: int) -> Iterator[BatchPart]:
        """The batches, each behind the parts of it that are ranked."""
        for batch in self._blocks(start):
            if self._ranking is not None:
                count = max(1, RANKED_AT_ONCE // (2 + self._ranking.ratio))
                for first in range(batch.first, batch.last, count):
                    yield BatchPart(batch.part(first, min(first + count, batch.last)), batch, ranked=True)
            yield BatchPart(batch, batch, ranked=False)

    def _draw(self, epoch: int, part: BatchPart) -> SampledEvents:
        """Negatives and the past. Raises BudgetError where that does not fit."""
        block, negatives, negative = part.block, self._ranking if part.ranked else self._negatives, None
        if negatives is not None:
            need = len(block) * (2 + negatives.ratio) * _QUERY_BYTES
            if need > self._max_bytes:
                raise self._too_large(len(block), self._most_bytes(len(block), need // _QUERY_BYTES), "may need")
            past = self._events.before(block.time)
            negative = negatives.draw(block, past, key(self._seed, Purpose.NEGATIVE, epoch))
        ends = [block.src.astype(np.int64), block.dst.astype(np.int64), *([] if negative is None else negative.T)]
        nodes, times = np.concatenate(ends), np.concatenate([block.time] * len(ends))
        query = np.arange(len(nodes))
        if self._shared:
            distinct = RelabelTable()
            query = distinct.add(nodes).astype(np.int64)
            nodes = distinct.nodes()
            times = np.full(len(nodes), part.batch.time[0])
        try:
            found = self._sampler.sample(nodes, times, key(self._seed, Purpose.SAMPLE, epoch))
        except BudgetError:
            if min(self._sampler.fanout) < 0:
                raise
            raise self._too_large(len(block), self._most_bytes(len(block), len(nodes)), "may need") from None
        union = RelabelTable()
        entry = union.add(found.node).astype(np.int64)
        return SampledEvents(part, negative, found, union.nodes(), entry, query)

    def _most_bytes(self, events: int, queries: int) -> int:
        """`_nbytes` at most, where every query has a full past of other nodes."""
        hops = [queries]
        for fanout in self._sampler.fanout:
            hops.append(hops[-1] * max(fanout, 1))
        entries, edges = sum(hops), sum(hops[1:])
        sampled = entries * QUERY_BYTES + edges * EDGE_BYTES + 8 * (entries + 1)
        nodes = min(entries, self.data.num_nodes)
        return max(queries * _QUERY_BYTES, sampled + self._batch_bytes(events, entries, edges, nodes))

    @property
    def _values(self) -> int:
        """Values of all columns together, of an event."""
        return sum(int(np.prod(self._events.width(name), dtype=np.int64)) for name in self._columns)

    def _batch_bytes(self, events: int, entries: int, edges: int, nodes: int) -> int:
        """Bytes of a batch beside what was sampled."""
        need = entries * 24 + edges * (32 + 4 * self._values)
        return need + nodes * (8 + self._node_bytes + self._beside) + events * (40 + 4 * self._values)

    def _nbytes(self, sampled: SampledEvents) -> int:
        """Bytes of the batch from here to the model. Raises BudgetError for more than there may be."""
        edges, block = len(sampled.past.source), sampled.part.block
        need = sampled.past.nbytes + self._batch_bytes(len(block), len(sampled.entry), edges, len(sampled.node))
        if need > self._max_bytes:
            raise self._too_large(len(block), need)
        return need

    def _too_large(self, count: int, need: int, needs: str = "needs") -> BudgetError:
        together = " (those of one time stay together)" if count > self._batch_size else ""
        return BudgetError(
            f"a batch of {count:,} events{together} {needs} {words_for(need, self._max_bytes)}; take smaller batches, a "
            "smaller fan-out, fewer negatives or more memory"
        )

    def _collate(self, sampled: SampledEvents) -> tuple[int, Any]:
        """(the event behind it, the batch)."""
        part, negative, past, node, entry, query = sampled
        block, count = part.block, len(part.block)
        fields = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in block.columns.items()}
        data = TemporalData(
            src=torch.from_numpy(block.src.astype(np.int64)),
            dst=torch.from_numpy(block.dst.astype(np.int64)),
            t=torch.from_numpy(np.ascontiguousarray(block.time)),
            **fields,
        )
        if negative is not None:
            data.neg_dst = torch.from_numpy(negative[:, 0].copy() if negative.shape[1] == 1 else negative)
        data.e_id = torch.arange(block.first, block.first + count)
        data.n_id, data.entry = torch.from_numpy(node), torch.from_numpy(entry)
        data.entry_t, data.query = torch.from_numpy(past.time), torch.from_numpy(query)
        if not self._shared:
            data.entry_query = torch.from_numpy(past.query % count)
        target = np.repeat(np.arange(len(past.indptr) - 1), np.diff(past.indptr))
        data.edge_index = torch.from_numpy(np.stack([past.source, target]))
        edge_id = self._sampler.edge_ids(past.slot)
        data.edge_id = torch.from_numpy(edge_id)
        for name in self._columns:
            values, nbytes = Gather(self._events.encoding(name)).read(self._events.rows(name), edge_id, self._buffers)
            self.moved.gathered += nbytes
            data[f"edge_{name}"] = torch.from_numpy(values)
        data.num_sampled_nodes, data.num_sampled_edges = list(past.num_nodes), list(past.num_edges)
        if part.ranked:
            data.part_of = part.batch.first
        self._add_features(data, node)
        behind = part.batch.first if part.ranked else part.batch.last
        return behind, data if self._transform is None else self._transform(data)


def _named(negatives: Negatives | None) -> str | None:
    """What a state of a loader keeps of its negatives."""
    return None if negatives is None else f"{type(negatives).__name__}({negatives.ratio})"
