"""`GraphLoader`: batches of whole graphs of a store of many, read in long runs."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch

from ooc.loading.arguments import (
    InputNodes,
    check_numbers,
    check_pyg_arguments,
    dataset_of,
    input_graphs_of,
    names_of,
    renamed,
)
from ooc.loading.base import PREFETCH, EpochLoader
from ooc.loading.graph_order import RUN_BYTES, GraphOrder
from ooc.loading.graph_units import GraphCollator, GraphReader, Piece, UncollatedBatch, Unit, UnitPlan, fields_of
from ooc.loading.ranks import share_of
from ooc.loading.stages import buffers_for
from ooc.runtime.buffers import Buffers
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import MemoryPlan, plan_graph_memory, words_for
from ooc.runtime.messages import warn_user
from ooc.runtime.pipeline import SOURCE, Pipeline, Stage
from ooc.runtime.transfer import OnDevice, on_device, pins
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.sizes import format_bytes, parse_bytes

READERS = 2
"""units read at once: the disk has work while one's last bytes come"""
COLLATORS = 2
MOST_UNIT = 2**26
"""bytes of a unit where graphs come in their order: as much as makes reads long"""
_LOOKED_AT = 2**12
"""graphs whose bytes stand for those of all"""
_PLANNED = 2**20
"""graphs whose bytes are added up at once"""


class GraphLoader(EpochLoader):
    """Batches of whole graphs, each a PyG `Batch` as its DataLoader gives; each `iter` is the next epoch.

    A batch has x [n, f], edge_index int64[2, e], y, every other array of the store's nodes (pos, z, ...), edges (edge_attr,
    edge_weight, ...) and graphs by its name, batch int64[n], ptr int64[b + 1], and graph_id int64[b], the graphs' rows in the
    store. Arrays of one dimension stay so, but for x. Edges are sorted by destination, those of one destination as in the
    input. `batch[i]` and `batch.to_data_list()` give the graphs.

    With `shuffle`, runs of consecutive graphs (about 1 MiB each) come in a random order, and the graphs of `shuffle_block`
    bytes of runs are mixed, so that every block is read in large pieces: see `ooc.loading.graph_order`. The order depends on
    the seed, the epoch, the data and these settings, never on the memory, the engine or threads. A block that the memory does
    not hold is read in more and smaller pieces.

    Args:
        data: A store of many graphs (`ooc ingest --graph-id`, `ooc.from_data(dataset, path)`), or its path.
        batch_size: Graphs of a batch.
        shuffle: Whether to shuffle them anew every epoch.
        input_graphs: The graphs to load: a split's name, rows, a boolean mask, ids that are words; None: all.
        transform: Called with every batch, in a thread.
        drop_last: Whether to leave out a last batch of fewer graphs.
        num_workers: For PyG's sake; threads do the work.
        pin_memory: Whether batches are in page-locked memory.
        prefetch_factor: Batches made in advance, as far as the memory goes.
        follow_batch: Fields that get vectors `NAME_batch` and `NAME_ptr`, as in PyG's DataLoader.
        exclude_keys: Arrays that are not read.
        shuffle_block: Bytes of the graphs that are mixed with one another, such as "1GB": the larger, the better the shuffling,
            and up to about a tenth of the memory without more reads. It decides the order, so the same value gives the same
            batches in any memory.
        edge_ids: Whether batches have e_id int64[e], the edges' positions in the input.
        seed: Of the order; None: from torch's generator, as torch's DataLoader.
        rank, world_size: The share of these graphs in each step; by default that of torch's process group. Ranks read
            different blocks.
        as_one: Whether ranks have the order of one process instead, each step's graphs divided among them, so that they train
            as one with a batch as large as theirs together. Each rank then reads of every block.
        device: Where batches are moved.
        dtype: Of x; None: float32 for values stored in fewer bits, otherwise as stored.
        budget: A plan of the memory other than `plan_graph_memory(data)`.
        arguments: PyG's and DataLoader's others, as NeighborLoader's.

    Raises:
        ConfigError: An argument does not fit.
        InputError: The store holds one graph, or `input_graphs` names none of its graphs.
        BudgetError: While iterating, a batch does not fit the memory.

    >>> loader = GraphLoader(ds, batch_size=128, shuffle=True, input_graphs="train")
    >>> for batch in loader:
    ...     out = model(batch.x, batch.edge_index, batch.batch)  # [b, classes]
    """

    @renamed(world="world_size")
    def __init__(
        self,
        data: Dataset | Path | str,
        batch_size: int = 1,
        shuffle: bool = False,
        input_graphs: Any = None,
        transform: Callable[[Batch], Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        *,
        shuffle_block: int | str = "128MB",
        edge_ids: bool = False,
        as_one: bool = False,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        budget: MemoryPlan | None = None,
        **arguments: Any,
    ) -> None:
        own = list(inspect.signature(GraphLoader).parameters)
        check_pyg_arguments({"num_workers": num_workers, **arguments}, own, type(self).__name__)
        self.data = data = dataset_of(data)
        self.graphs = input_graphs_of(data.graphs, input_graphs)
        self.budget = budget or plan_graph_memory(data)
        place = None if device is None else torch.device(device)
        super().__init__(self.budget.in_flight, place, max(1, prefetch_factor or PREFETCH))
        share = share_of(seed, rank, world_size, own_ids=self.graphs.is_array, in_order=not shuffle)
        self._fields = fields_of(data, names_of(exclude_keys, "exclude_keys"), dtype)
        run = max(1, RUN_BYTES // max(1, _graph_bytes(data)))
        block = max(1, parse_bytes(shuffle_block, "shuffle_block") // (run * max(1, _graph_bytes(data))))
        self._seed_drawn = share.seed_drawn
        own_order = len(self.graphs), batch_size, shuffle, share.seed, drop_last, share.rank, share.world_size
        self.order = GraphOrder(*own_order, run, block, share.seed_drawn, as_one)
        check_numbers(self.order)
        reader = GraphReader.of(data, self._fields, edge_ids, Buffers(READERS, direct=True))
        if shuffle:
            _warn_of_large_blocks(reader, min(run * block, len(self.graphs)), shuffle_block, self.budget.graphs)
        pin = pins(pin_memory) and not (place is not None and place.type == "cuda")
        names = [each.name for each in self._fields] + ["edge_index"]
        followed = names_of(follow_batch, "follow_batch")
        for name in followed:
            if name not in names:
                raise ConfigError(f"follow_batch: batches have no {name!r}; there are {', '.join(sorted(names))}")
        self._collator = GraphCollator(reader, buffers_for(place, self.budget), tuple(followed), transform, pin)
        self._end = len(self)
        self._stop: int | None = None
        self._start_at(Cursor(0, 0))

    @property
    def batch_size(self) -> int:
        """Graphs of a batch."""
        return self.order.batch_size

    @property
    def dataset(self) -> range:
        """The positions of the input graphs, as in PyG's loaders: `len(loader.dataset)` are their number."""
        return range(len(self.graphs))

    @property
    def reader(self) -> GraphReader:
        """What reads its graphs."""
        return self._collator.reader

    @property
    def rows_read(self) -> int:
        """Rows of nodes read so far, for batches not yet delivered too."""
        return self._collator.reader.counts.rows

    @property
    def bytes_read(self) -> int:
        """Bytes read from the disk so far."""
        return self._collator.reader.counts.nbytes

    def __len__(self) -> int:
        """Steps an epoch."""
        return self.order.steps

    @property
    def own_steps(self) -> int:
        """Steps of an epoch in which this rank has graphs; see `GraphOrder.own_steps`."""
        return self.order.own_steps

    @property
    def shared_steps(self) -> int:
        """Steps of an epoch in which all ranks have graphs; rank 0 has none in a last one that has too few."""
        return replace(self.order, rank=0).own_steps

    def set_epoch(self, epoch: int) -> None:
        """The next `iter` is this epoch, from its beginning, or from where `load_state_dict` left that same epoch."""
        if epoch != self._start.epoch:
            self._start_at(Cursor(epoch, 0))

    def stop_before(self, step: int | None) -> None:
        """Epochs end before `step`, so that nothing is read ahead for batches nobody takes; None: whole epochs again."""
        self._stop = step

    @property
    def _until(self) -> int:
        return len(self) if self._stop is None else min(len(self), self._stop)

    def _identity(self) -> dict[str, Any]:
        names = ("seed", "rank", "batch_size", "shuffle", "drop_last", "block", "as_one")
        kept = {name: getattr(self.order, name) for name in names}
        input_graphs = {"num_graphs": len(self.graphs), "input_graphs": self.graphs.identity}
        return {**super()._identity(), "mode": "graphs", **kept, "world": self.order.world_size, **input_graphs}

    def _use_seed(self, seed: int) -> None:
        self.order = replace(self.order, seed=seed)

    def _from(self, start: Cursor) -> Pipeline | OnDevice:
        """Two pipelines: units are read, batches are made of them."""
        work = _Epoch(self.order, self.graphs, self._collator.reader, self.budget, start, self._until)
        with ExitStack() as unfinished:
            read = Stage("read", work.reader.read, READERS, nbytes=lambda plan: plan.nbytes)
            clocks = {SOURCE: self._clocks.setdefault("plan", Clock()), "read": self._clocks.setdefault("read", Clock())}
            units = Pipeline(work.plans(), [read], 3 * self.budget.graphs, READERS + 1, clocks)
            unfinished.callback(units.close)
            collate = Stage("collate", self._collator.collate, COLLATORS, nbytes=partial(_checked, self._collator, self.budget))
            batches = Pipeline(
                work.batches(units), [collate], self.budget.in_flight // 2, self.prefetch, self._clocks, before=units
            )
            unfinished.pop_all()
        if self.device is None or self.device.type == "cpu":
            return batches
        return on_device(batches, self.device, self._copier_of(None, self.budget.max_batch))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.graphs):,} graphs, {self.batch_size} a batch)"


class _Epoch:
    """One epoch's work from a step on: units to read, and the batches that are cut from them. Knows nothing of the loader, so
    that threads do not keep it alive."""

    def __init__(
        self, order: GraphOrder, graphs: InputNodes, reader: GraphReader, budget: MemoryPlan, start: Cursor, stop: int
    ) -> None:
        self.order, self.graphs, self.reader, self.start, self.stop = order, graphs, reader, start, stop
        self.room = budget.graphs

    def plans(self) -> Iterator[UnitPlan]:
        """The reads of the epoch's graphs in their order, in units of as many as fit the memory."""
        most = self.room if self.order.shuffle else min(self.room, MOST_UNIT)
        for first, last in self.order.spans(self.start.epoch, self.start.step, self.stop):
            while first < last:
                graph = self.graphs.ids(self.order.positions(self.start.epoch, first, min(last, first + _PLANNED)))
                plan = self._plan(graph, most)
                first += len(plan.graph)
                yield plan

    def _plan(self, graph: Ids, most: int) -> UnitPlan:
        """The plan of the first of these graphs, as many as fit; of one at least."""
        count = max(1, int(np.searchsorted(np.cumsum(self.reader.nbytes(graph)), most, side="right")))
        while True:
            plan = self.reader.plan(graph[:count])
            if plan.nbytes <= self.room:
                return plan
            if count == 1:
                raise BudgetError(
                    f"graph {graph[0]} needs {words_for(plan.nbytes, self.room)} to be read; give more memory, or leave arrays "
                    "out by `exclude_keys`"
                )
            count = max(1, min(count // 2, count * self.room // plan.nbytes))

    def batches(self, units: Iterator[Unit]) -> Iterator[UncollatedBatch]:
        """The batches of the steps, in pieces of units."""
        unit, done = None, 0
        for step in range(self.start.step, self.stop):
            first, last = self.order.batch(step)
            pieces, left = list[Piece](), last - first
            while left:
                if unit is None or done == len(unit.graph):
                    unit = None  # before the next one is waited for
                    unit, done = next(units, None), 0
                if unit is None:  # stopped
                    return
                some = min(left, len(unit.graph) - done)
                pieces.append(Piece(unit, done, done + some))
                done, left = done + some, left - some
            yield UncollatedBatch(step, tuple(pieces))
            del pieces


def _checked(collator: GraphCollator, budget: MemoryPlan, batch: UncollatedBatch) -> int:
    """Bytes of a batch. Raises BudgetError for more than there may be."""
    need, most = collator.nbytes(batch), budget.batch
    if need > most:
        count = len(batch.graph)
        raise BudgetError(f"a batch of {count} graphs needs {words_for(need, most)}; take a smaller batch size or more memory")
    return need


def _warn_of_large_blocks(reader: GraphReader, graphs: int, shuffle_block: int | str, room: int) -> None:
    """Say that the memory does not hold a block of so many graphs, by the first ones of the store."""
    first = np.arange(min(len(reader.data.graphs), _LOOKED_AT))
    if len(first) and float(reader.nbytes(first).mean()) * graphs > room:
        warn_user(
            f"shuffle_block = {shuffle_block} is more than the {format_bytes(room)} that the memory has for graphs read at "
            "once, so they are read in more pieces: give more memory, or a smaller block"
        )


def _graph_bytes(data: Dataset) -> int:
    """Bytes of a graph in the store on average: what the runs of the order are made by, whatever of it is read."""
    x = data.stored("x").row_bytes if data.num_features else 0
    return (data.num_nodes * (x + 8) + data.num_edges * 12) // data.num_graphs
