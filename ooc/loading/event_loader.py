"""`EventLoader`: the events of a temporal graph in order, in batches, each with the past that its nodes are asked about.

Batches are ranges of the events' arrays, read front to back in blocks; for the next ones negatives are drawn, the past is
sampled (`ooc.sampling.temporal_neighbor`) and features are gathered while the model computes. What is drawn depends on (seed,
epoch, event) alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import TemporalData

from ooc.graph.relabel import RelabelTable
from ooc.loading.arguments import renamed
from ooc.loading.base import Epoch, Loader
from ooc.loading.feature_gather import Gather
from ooc.runtime.buffers import Buffers
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import MemoryPlan, plan_memory, words_for
from ooc.runtime.pipeline import Stage
from ooc.sampling.negatives import Negatives
from ooc.sampling.temporal_index import slots_of
from ooc.sampling.temporal_neighbor import Strategy, TemporalSampler, TemporalSubgraph
from ooc.sampling.time_windows import span_of
from stores.arrays.rows import AnyArray, Rows
from stores.dataset import Dataset
from stores.errors import BudgetError, ConfigError
from stores.events import EventBlock, Events

Ids = NDArray[np.int64]
PREFETCH = 8
BLOCK_EVENTS, BLOCK_BYTES = 2**16, 2**23
"""read at once, of which batches are parts: so many events, or fewer where these are wide"""
FIELDS = frozenset(
    (
        "src",
        "dst",
        "t",
        "neg_dst",
        "e_id",
        "n_id",
        "x",
        "entry",
        "entry_t",
        "entry_query",
        "query",
        "memory_request",
        "edge_index",
    )
) | {"index", "edge_id", "id", "num_nodes", "num_sampled_nodes", "num_sampled_edges"}
"""of a batch, beside the events' columns; or edge_FIELD is one"""


class Batch(NamedTuple):
    """A batch on its way: events first, first + 1, ...; its negatives, int64[k, ratio]."""

    number: int
    block: EventBlock
    negative: Ids | None


class Sampled(NamedTuple):
    """A batch with its queries' past: sources, destinations, negatives, one behind the other, at their event's time.

    node: int64[m], distinct; entry: int64[n], where each of the past's entries stands in it; query: int64[queries], each one's
    entry.
    """

    batch: Batch
    past: TemporalSubgraph
    node: Ids
    entry: Ids
    query: Ids


@dataclass
class EventBytes:
    """Bytes read from the disk, each counted by one thread; rows of features asked for."""

    events: int = 0
    gathered: int = 0
    rows: int = 0


@dataclass(frozen=True)
class EventWork:
    """What the pipeline's threads do. sampler: None for no past; x: node features."""

    events: Events
    columns: tuple[str, ...]
    first: int
    last: int
    batch_size: int
    whole_times: bool
    negatives: Negatives | None
    sampler: TemporalSampler
    gather: Gather | None
    x: Rows | None
    seed: int
    max_bytes: int
    beside: int
    shared: bool
    transform: Callable[[Any], Any] | None
    buffers: Buffers = field(default_factory=lambda: Buffers(2))
    moved: EventBytes = field(default_factory=EventBytes)

    def borders(self, start: int) -> Iterator[tuple[int, int]]:
        """(first, last) event of every batch, from event `start` on."""
        while start < self.last:
            stop = min(start + self.batch_size, self.last)
            if self.whole_times and stop < self.last:
                stop = min(self.events.at(self.events.time(stop - 1), "right"), self.last)
            yield start, stop
            start = stop

    def blocks(self, start: int) -> Iterator[EventBlock]:
        """The batches' events, read some batches at a time."""
        held: EventBlock | None = None
        width = self.events.row_bytes(list(self.columns))
        step = min(BLOCK_EVENTS, BLOCK_BYTES // width)
        for first, last in self.borders(start):
            if held is None or last > held.last:
                if (need := (last - first) * width) > self.max_bytes:
                    raise self._too_large(last - first, need)
                held = self.events.read(first, min(self.last, max(last, first + step)), list(self.columns))
                self.moved.events += held.nbytes
            yield held.part(first, last)

    def draw(self, epoch: int, block: EventBlock) -> Sampled:
        """Negatives and the past. Raises BudgetError where that does not fit."""
        negative = None
        if self.negatives is not None:
            past = self.events.before(block.time)
            negative = self.negatives.draw(block, past, key(self.seed, Purpose.NEGATIVE, epoch))
        nodes, times = queries(block, negative)
        query = np.arange(len(nodes))
        if self.shared:
            asked = RelabelTable()
            query = asked.add(nodes).astype(np.int64)
            nodes = asked.nodes()
            times = np.full(len(nodes), block.time[0])
        found = self.sampler.sample(nodes, times, key(self.seed, Purpose.SAMPLE, epoch))
        union = RelabelTable()
        entry = union.add(found.node).astype(np.int64)
        return Sampled(Batch(block.first, block, negative), found, union.nodes(), entry, query)

    def nbytes(self, sampled: Sampled) -> int:
        """Bytes of the batch from here to the model. Raises BudgetError for more than there may be."""
        values = sum(int(np.prod(self.events.width(name), dtype=np.int64)) for name in self.columns)
        rows = 0 if self.gather is None or self.x is None else self.gather.row_bytes(self.x.shape[1:])
        edges, block = len(sampled.past.source), sampled.batch.block
        need = sampled.past.nbytes + len(sampled.entry) * 24 + edges * (32 + 4 * values)
        need += len(sampled.node) * (8 + rows + self.beside) + len(block) * (40 + 4 * values)
        if need > self.max_bytes:
            raise self._too_large(len(block), need)
        return need

    def _too_large(self, count: int, need: int) -> BudgetError:
        together = " (those of one time stay together)" if count > self.batch_size else ""
        return BudgetError(
            f"a batch of {count:,} events{together} needs {words_for(need, self.max_bytes)}; take smaller batches, a smaller "
            "fan-out or more memory"
        )

    def collate(self, sampled: Sampled) -> tuple[int, Any]:
        """(the event behind it, the batch)."""
        (_, block, negative), past, node, entry, query = sampled
        count = len(block)
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
        if not self.shared:
            data.entry_query = torch.from_numpy(past.query % count)
        target = np.repeat(np.arange(len(past.indptr) - 1), np.diff(past.indptr))
        data.edge_index = torch.from_numpy(np.stack([past.source, target]))
        edge_id = self.sampler.edge_ids(past.slot)
        data.edge_id = torch.from_numpy(edge_id)
        for name in self.columns:
            data[f"edge_{name}"] = torch.from_numpy(self._read(name, edge_id))
        data.num_sampled_nodes, data.num_sampled_edges = list(past.num_nodes), list(past.num_edges)
        if self.x is not None and self.gather is not None:
            rows, nbytes = self.gather.read(self.x, node, self.buffers)
            data.x = self.gather.tensor(rows)
            self.moved.gathered += nbytes
            self.moved.rows += len(node)
        return block.first + count, data if self.transform is None else self.transform(data)

    def _read(self, name: str, edge_id: Ids) -> AnyArray:
        """A column's values of these events."""
        values, nbytes = Gather(self.events.encoding(name)).read(self.events.rows(name), edge_id, self.buffers)
        self.moved.gathered += nbytes
        return values


def queries(block: EventBlock, negative: Ids | None) -> tuple[Ids, AnyArray]:
    """(nodes, times): sources, destinations, negatives (event by event), each at its event's time."""
    ends = [block.src.astype(np.int64), block.dst.astype(np.int64)]
    times = [block.time, block.time]
    if negative is not None:
        for column in negative.T:
            ends.append(column)
            times.append(block.time)
    return np.concatenate(ends), np.concatenate(times)


class TemporalLoader(Loader):
    """What loaders of a store's events share: a plan of the memory, and the columns and features of a batch.

    Args:
        data: A store with times.
        columns: Of the events to read, None for all.
        label: The column that holds labels, which comes last and is no field of a batch.
        fields: Names that no column may have.
        features: Whether batches have x.
    """

    def __init__(
        self,
        data: Dataset,
        columns: Sequence[str] | None,
        fields: frozenset[str],
        *,
        features: bool,
        prefetch: int,
        device: torch.device | str | None,
        budget: MemoryPlan | None,
        label: str | None = None,
    ) -> None:
        self.data, self.budget = data, budget or plan_memory(data)
        super().__init__(self.budget.in_flight, device, prefetch)
        wanted = tuple(name for name in (data.events.columns if columns is None else columns) if name != label)
        check_names(data.events, wanted, fields)
        if label is not None:
            data.events.width(label)
        self._columns = wanted if label is None else (*wanted, label)
        self._x = data.stored("x") if features and data.num_features else None
        self._gather = None if self._x is None else Gather(data.encoding("x"))


class EventLoader(TemporalLoader):
    """Batches of consecutive events, as PyG `TemporalData`, with the past of their nodes; each `iter` is the next epoch.

    batch_size: events, more where `whole_times` keeps those of one time together, so that what a batch teaches is never of the
    time that the next one asks about. events: "train", "val" or "test" (`chronological`), (first, last), or None for all.
    num_neighbors: edges of the past drawn at a node, per hop ([]: none), the latest or, with temporal_strategy="uniform", any
    of them. negatives: of `ooc.sampling.negatives`, or None. columns: of the events to read, None for all. features: whether
    to give x. shared: ask about each node once a batch, at the time of its first event, as models with a memory do (then what
    an event of the batch asks about knows nothing of the others, as in PyG's TGN). beside: bytes a node that a subclass's
    stages hold. seed: of negatives and uniform draws. prefetch: batches made in advance, as far as the memory goes. device:
    where to.

    A batch has src, dst, t [k], its columns (`msg` [k, d]), neg_dst ([k], or [k, ratio] for several), e_id int64[k]; n_id
    int64[m], all nodes it meets, and x [m, f] of them. Its past is a forest over entries, which are nodes at times: first the
    sources, the destinations and the negatives, then what was drawn. entry int64[n]: where each stands in n_id; entry_t [n]:
    its time; entry_query int64[n]: the event it is for; query: which entries the sources, destinations and negatives are (the
    first ones; with `shared`, where entry_query is left out, one for each node that is asked about); edge_index int64[2, e]:
    from an entry to the one it was drawn for; edge_id int64[e], edge_msg [e, d]: of the past event; num_sampled_nodes,
    num_sampled_edges: per hop. Raises ConfigError for an argument that does not fit, InputError for a store without times;
    while iterating, BudgetError for a batch that does not fit the memory.

    >>> loader = EventLoader(ds, batch_size=200, events="train", negatives=RandomNegatives(0, ds.num_nodes))
    >>> for batch in loader:
    ...     z = memory(batch.n_id)[batch.entry]
    """

    @renamed(strategy="temporal_strategy")
    def __init__(
        self,
        data: Dataset,
        batch_size: int = 200,
        *,
        events: str | tuple[int, int] | None = None,
        num_neighbors: Sequence[int] = (10,),
        temporal_strategy: Strategy = "last",
        negatives: Negatives | None = None,
        columns: Sequence[str] | None = None,
        features: bool = True,
        whole_times: bool = True,
        shared: bool = False,
        beside: int = 0,
        seed: int = 0,
        prefetch: int = PREFETCH,
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        budget: MemoryPlan | None = None,
    ) -> None:
        super().__init__(data, columns, FIELDS, features=features, prefetch=prefetch, device=device, budget=budget)
        if batch_size < 1:
            raise ConfigError(f"batch_size is 1 or more, not {batch_size}")
        most = self.budget.batch
        first, last = span_of(data.events, events)
        self._work = EventWork(
            events=data.events,
            columns=self._columns,
            first=first,
            last=last,
            batch_size=batch_size,
            whole_times=whole_times,
            negatives=negatives,
            sampler=TemporalSampler(
                data.graph, list(num_neighbors), temporal_strategy, most, slots=slots_of(data, self.budget)
            ),
            gather=self._gather,
            x=self._x,
            seed=seed,
            max_bytes=most,
            beside=beside,
            shared=shared,
            transform=transform,
        )
        self._start = self._next = (0, self._work.first)

    def __len__(self) -> int:
        """Batches an epoch."""
        return sum(1 for _ in self._work.borders(self._work.first))

    @property
    def num_events(self) -> int:
        """Events an epoch."""
        return self._work.last - self._work.first

    @property
    def moved(self) -> EventBytes:
        """What was read so far, for batches not yet delivered too."""
        return self._work.moved

    def set_epoch(self, epoch: int) -> None:
        """The next `iter` is this epoch, from its beginning."""
        self._start = self._next = (epoch, self._work.first)

    def __iter__(self) -> Epoch:
        epoch, start = self._next = self._start
        self._start = epoch + 1, self._work.first
        return Epoch(self, self._batches(self._work.blocks(start), self._stages(epoch)), epoch)

    def _took(self, epoch: int, behind: int) -> None:
        self._next = epoch, behind

    def _ended(self, epoch: int) -> None:
        if self._next == (epoch, self._work.last):
            self._next = epoch + 1, self._work.first

    def _stages(self, epoch: int) -> list[Stage]:
        """What is done to a block of events; the last stage gives (the event behind it, the batch)."""
        work = self._work
        sample = Stage("sample", lambda block: work.draw(epoch, block))
        return [sample, Stage("collate", work.collate, nbytes=work.nbytes)]

    def state_dict(self) -> dict[str, Any]:
        """Which event of which epoch comes next, and what that is only valid with."""
        epoch, event = self._next
        return {"epoch": epoch, "event": event, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next `iter` goes on there. Raises ConfigError where this loader's batches are other ones.

        >>> loader.load_state_dict(saved)
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise ConfigError(f"cannot resume: {name} was {state[name]!r} and is {value!r} now; use the old value")
        self._start = self._next = (int(state["epoch"]), int(state["event"]))

    def _identity(self) -> dict[str, Any]:
        work = self._work
        kept = {name: getattr(work, name) for name in ("first", "last", "batch_size", "whole_times", "shared", "seed")}
        return {**kept, "fanout": list(work.sampler.fanout), "strategy": work.sampler.temporal_strategy}


def check_names(events: Events, columns: Sequence[str], fields: frozenset[str]) -> None:
    """Raise ConfigError for a column whose name a field of the batch has, InputError for one that is not there."""
    for name in columns:
        events.width(name)
        if name in fields:
            raise ConfigError(
                f"the events' column {name!r} would take the place of another field of the batch: leave it out (columns), or "
                "ingest it by another name"
            )
