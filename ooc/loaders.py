"""`NeighborLoader`: a drop-in for PyG's, over a `Dataset` that need not fit in memory.

Threads sample, read and collate future batches while the model computes; a batch is a function of (seed, epoch, step, rank)
alone, whatever the threads, the windows (`ooc.windows`: rows on disk are read for many batches at once) and the engine; and
the memory, but for `split_seeds`, which says what then depends on it.
"""

import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from torch_geometric.data import Data

from ooc.arguments import check_pyg_arguments, fanout_of, input_nodes_of, weight_column_of
from ooc.budget import Budget, divide
from ooc.buffers import Buffers
from ooc.clock import Clock, Span
from ooc.collate import Collator
from ooc.device import Copier, OnDevice, on_device
from ooc.gather import Gather
from ooc.loading import BUFFERS_KEPT, PINNED_KEPT, Order, Topology, Work, slot_bytes
from ooc.machine import available_bytes
from ooc.memory import resident_bytes, return_large_blocks
from ooc.order import Cursor, steps_of
from ooc.pipeline import CONSUMER, Pipeline
from ooc.sampling import Lockstep, NeighborSampler
from ooc.sums import Summing
from ooc.sweepplan import sweeps_pay
from ooc.sweeps import swept
from ooc.windows import windowed
from stores.dataset import Dataset
from stores.errors import ConfigError
from stores.members import Members
from stores.rows import ArrayRows

SCRATCH_BYTES = 64 * 2**20
"""Allowed for the buffers of the reads under way"""
WARM_SHARE = 4
"""Of the memory, 1/4 at most for the topology's slots; where those to draw from fit, they are read in beforehand"""
COLUMNS_SHARE, LOCKSTEP_SHARE = 32, 4
"""Where the slots do not fit, the edges stay on disk: of the memory, 1/32 for columns that are met in the map even so; of the
batches' memory, 1/4 for those that are drawn together"""
PREFETCH = 8
"""Batches between the cursor and the model where no `prefetch_factor` is given"""

_budgets: "weakref.WeakKeyDictionary[Dataset, Budget]" = weakref.WeakKeyDictionary()


def budget_of(ds: Dataset, model: int = 0, columns: Collection[str] | None = None) -> Budget:
    """The division of the data set's memory, made once: all its loaders share it.

    model: bytes that training will add to a model that is there already (gradients, optimizer state). columns: of the graph,
    that loaders will look up; None: all it has.
    Without a limit (`memory=None`) the process may take half of what the machine has available.
    Raises BudgetError where nothing is left for batches.
    """
    if ds not in _budgets:
        baseline, _ = resident_bytes()
        memory, origin = ds.memory, "given"
        if memory is None:
            memory, origin = baseline + available_bytes() // 2, "(half of what is available)"
        labels = 0 if ds.labels is None else ds.labels.nbytes
        met = ds.graph.columns if columns is None else columns
        share = WARM_SHARE if ds.graph.sampled_bytes() <= memory // WARM_SHARE else COLUMNS_SHARE
        _budgets[ds] = divide(
            memory,
            baseline=baseline,
            topology=ds.graph.indptr.nbytes + min(slot_bytes(ds.graph, met), memory // share),
            labels=labels + len(ds.splits) * Members.nbytes_for(ds.num_nodes),
            model=model,
            scratch=SCRATCH_BYTES,
            origin=origin,
        )
    return _budgets[ds]


def make_work(
    ds: Dataset,
    order: Order,
    collator: Collator,
    sampling: tuple[list[int], bool, str | None],
    budget: Budget,
    transform: Callable[[Data], Any] | None,
    pin_memory: bool,
    device: torch.device | None,
    summing: Summing | None,
    threads: int,
) -> Work:
    """The stages' work over a data set. sampling: fan-out, replace, weight column; threads: that draw."""
    if ds.memory is not None:
        return_large_blocks()
    x = ds.stored("x") if ds.num_features else None
    y = ds.labels
    x_bytes = 0 if x is None or collator.gather is None else collator.gather.row_bytes(x.shape[1:])
    if x is None or len(x.shape) != 2 or collator.gather is None or not collator.gather.float32:
        summing = None
    elif summing is not None:
        x_bytes = 2 * 4 * x.shape[1]
    row_bytes = x_bytes + (0 if y is None else 8 * int(np.prod(y.shape[1:], dtype=np.int64)))
    per_node, per_expanded = (row_bytes, 0) if summing is None else (0, row_bytes)
    sweeping = summing is not None and x is not None and not isinstance(x, ArrayRows) and sweeps_pay(x, budget.batches)
    # A sweep has two batches' sums at least; what a batch takes in all, its share of a sweep, is checked when it is drawn.
    most_drawn, most = (budget.batches // 2, budget.batches) if sweeping else (budget.max_batch, budget.max_batch)
    limit: dict[str, Any] = {"max_bytes": most_drawn, "row_bytes": per_node, "expanded_bytes": per_expanded}
    sampler = NeighborSampler(ds.graph, *sampling, **limit)
    mapped, warm = max(0, budget.topology - ds.graph.indptr.nbytes), budget.memory // WARM_SHARE
    lockstep = None
    if x is not None and not isinstance(x, ArrayRows) and ds.graph.sampled_bytes(sampling[2]) > warm:
        columns = {name: ds.edge_rows(name) for name in collator.columns}
        lockstep = Lockstep(sampler, ds.edge_rows("indices"), columns, budget.batches // LOCKSTEP_SHARE)
    topology = Topology(ds.graph, sampling[2], mapped, warm, lockstep is None, collator.columns)
    to_cuda = device is not None and device.type == "cuda"
    buffers = Buffers(PINNED_KEPT, max_bytes=budget.batches, pinned=True) if to_cuda else Buffers(BUFFERS_KEPT)
    pin = pins(pin_memory) and not to_cuda
    parts = order, sampler, collator, x, y, row_bytes, most, transform, pin, topology, lockstep
    return Work(*parts, summing=summing, sweeping=sweeping, drawing=threads, buffers=buffers)


def pins(pin_memory: bool) -> bool:
    """Whether batches come in page-locked memory, for the user's own copies to CUDA."""
    if pin_memory and not torch.cuda.is_available():
        warnings.warn("pin_memory changes nothing: torch sees no CUDA device", UserWarning, stacklevel=4)
    return pin_memory and torch.cuda.is_available()


class NeighborLoader:
    """Mini-batches of sampled neighborhoods (GraphSAGE, Hamilton et al., 2017), as PyG's NeighborLoader gives them.

    num_neighbors: in-edges drawn at a node, per hop; -1 takes all. input_nodes: None (all nodes), a split's name, a
    boolean mask [N] or node ids [k] (tensor, array or list). weight_attr: edge column to sample in proportion to
    ("edge_weight" stands for the graph's weight too). transform: called with every batch, in a thread; it should be pure.
    PyG's and DataLoader's other arguments are accepted where they change nothing, with a warning that threads do the
    work; one that asks for something else is refused.

    Beyond PyG: seed; rank, world (this loader's share of each step's seeds); device (batches are moved there);
    dtype (of x; None: as stored, but float16, bfloat16 and scaled int8 come as float32; see `ooc.gather.Gather`);
    edge_ids (False saves looking up `e_id`);
    split_seeds (a batch over the memory budget is halved, and again, into more batches, instead of refused: for evaluation,
    so not with shuffle; where num_neighbors differ by hop, a node that a half meets at another hop gets that hop's fan-out, so
    scores may differ with the memory that decides on halving; where all hops draw
    alike they don't); budget (a division of the memory other than `budget_of(data)`); sample_threads;
    read_threads (to gather rows that are in memory; those on disk come in windows, which look further ahead than
    `prefetch_factor` batches); summing (`ooc.models.summing_of(model)`: the sums that the model's first layer makes of its
    neighbors are made here, x is `Sums` of its destinations, and no field has the last hop; a tenth of the memory. Where
    the values of x are no rows of float32, or `dtype` asks for another type, x is the rows all the same).

    A batch is a `Data` with x [n, f], y [n], edge_index int64[2, e], n_id int64[n], e_id int64[e], input_id int64[b],
    batch_size, num_sampled_nodes, num_sampled_edges (lists), edge_weight float32[e] of a weighted graph, and `blocks`, one
    `Block` a layer, which share edge_index's memory. Each `iter` is the next epoch.
    Raises ConfigError for an argument, InputError for a node, that does not fit; while iterating, BudgetError for a batch
    that does not fit the memory.

    >>> loader = NeighborLoader(ds, num_neighbors=[10, 10], input_nodes="train", batch_size=1024, shuffle=True)
    >>> for batch in loader:
    ...     model(batch.x, batch.edge_index)[: batch.batch_size]
    """

    def __init__(
        self,
        data: Dataset,
        num_neighbors: Sequence[int],
        input_nodes: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        replace: bool = False,
        weight_attr: str | None = None,
        transform: Callable[[Data], Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        input_id: Any = None,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        edge_ids: bool = True,
        split_seeds: bool = False,
        budget: Budget | None = None,
        summing: Summing | None = None,
        sample_threads: int = 1,
        read_threads: int = 2,
        **arguments: Any,
    ) -> None:
        check_pyg_arguments({"num_workers": num_workers, **arguments}, list(inspect.signature(NeighborLoader).parameters))
        numbers = (batch_size, world, rank, sample_threads, read_threads)
        if not all(isinstance(n, Integral) for n in numbers):
            raise ConfigError(f"batch_size, world, rank and the threads must be whole numbers, not {numbers}")
        if batch_size < 1 or world < 1 or not 0 <= rank < world or min(sample_threads, read_threads) < 1:
            raise ConfigError("batch_size, world and the threads must be 1 or more, and rank one of 0..world-1")
        if not (summing is None or isinstance(summing, Summing)):
            raise ConfigError(f"summing must be what `ooc.models.summing_of(model)` gives, not {summing!r}")
        if split_seeds and shuffle:
            raise ConfigError("split_seeds is for evaluation: training batches must not depend on the memory; drop shuffle")
        self.data = data
        self.budget = budget or budget_of(data)
        self.device = None if device is None else torch.device(device)
        self.prefetch = PREFETCH if prefetch_factor is None else max(1, prefetch_factor) * max(1, num_workers)
        self._split, self._threads = split_seeds, (sample_threads, read_threads)
        nodes = input_nodes_of(data, input_nodes, input_id)
        order = Order(nodes, batch_size, shuffle, seed, drop_last, rank, world)
        gather = Gather(data.encoding("x"), dtype) if data.num_features else None
        collator = Collator(data.graph, gather, weight_attr, edge_ids)
        self._weight = weight_column_of(data.graph, weight_attr)
        sampling = (fanout_of(num_neighbors), replace, self._weight)
        self._work = make_work(
            data, order, collator, sampling, self.budget, transform, pin_memory, self.device, summing, sample_threads
        )
        self._copier: Copier | None = None
        self._start = self._cursor = Cursor(0, 0)
        self._stop: int | None = None
        self._clocks: dict[str, Clock] = {}

    @property
    def rows_read(self) -> int:
        """Feature rows read so far, for batches not yet delivered too; one that many batches of a window want counts once."""
        return self._work.read.rows

    @property
    def rows_asked(self) -> int:
        """Feature rows that batches sampled so far want, each time they do."""
        return self._work.read.asked

    @property
    def bytes_read(self) -> int:
        """Bytes those rows took from the disk, and the edges where they stay there."""
        return self._work.read.nbytes + self._work.read.topology_nbytes

    @property
    def topology_bytes_read(self) -> int:
        """Those of `bytes_read` that were edges."""
        return self._work.read.topology_nbytes

    @property
    def work(self) -> Work:
        """What its threads do (`ooc.profiling` does some of it beforehand)."""
        return self._work

    @property
    def threads(self) -> tuple[int, int]:
        """Threads that sample, and that gather rows in memory."""
        return self._threads

    @property
    def num_seeds(self) -> int:
        """Input nodes, over all ranks and batches of an epoch."""
        return len(self._work.order.nodes)

    def __len__(self) -> int:
        """Steps an epoch; with `split_seeds`, the least number of batches."""
        order = self._work.order
        return steps_of(self.num_seeds, order.batch_size, order.drop_last, order.world)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(fanout={list(self._work.sampler.fanout)}, seeds={self.num_seeds}, batches={len(self)})"

    def set_epoch(self, epoch: int) -> None:
        """The next `iter` is this epoch, from its beginning, or from where `load_state_dict` left that same epoch."""
        if epoch != self._start.epoch:
            self._start = Cursor(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batch the consumer took last, and what it is only valid with."""
        return {"epoch": self._cursor.epoch, "step": self._cursor.step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next `iter` continues at `state`. Raises ConfigError where this loader's batches would be other ones.

        >>> loader.load_state_dict({"epoch": 3, "step": 17})
        """
        for name, value in self._identity().items():
            if name in state and state[name] != value:
                raise ConfigError(f"cannot resume: {name} was {state[name]!r} and is {value!r} now; use the old value")
        if not (state["epoch"] >= 0 and 0 <= state["step"] <= len(self)):
            raise ConfigError(f"cannot resume at epoch {state['epoch']} step {state['step']}: there are {len(self)} steps")
        self._start = self._cursor = Cursor(int(state["epoch"]), int(state["step"]))

    def stop_before(self, step: int | None) -> None:
        """Epochs end before `step`, so that nothing is read ahead for batches nobody takes; None: whole epochs again."""
        self._stop = step

    def _identity(self) -> dict[str, Any]:
        """All that batches depend on besides the cursor."""
        order, sampler = self._work.order, self._work.sampler
        kept = {name: getattr(order, name) for name in ("seed", "rank", "world", "batch_size", "shuffle", "drop_last")}
        drawn = {"fanout": list(sampler.fanout), "replace": sampler.replace, "weight_attr": self._weight}
        return {**kept, "num_seeds": self.num_seeds, **drawn}

    def times(self) -> dict[str, dict[str, float]]:
        """Seconds of work and waiting, and items, by stage, over all epochs so far; see `Pipeline.times`."""
        return {name: clock.sums() for name, clock in self._clocks.items()}

    def spans(self) -> dict[str, list[Span]]:
        """When each stage worked on what, as far as it was kept (see `ooc.clock`): the beginning of the first epoch."""
        return {name: list(clock.spans) for name, clock in self._clocks.items()}

    def __iter__(self) -> "Epoch":
        start = self._cursor = self._start
        self._start = Cursor(start.epoch + 1, 0)
        stop = len(self) if self._stop is None else min(len(self), self._stop)
        cursors = (Cursor(start.epoch, step) for step in range(start.step, stop))
        return Epoch(self, self._on_device(cursors), start.epoch)

    def _on_device(self, cursors: Iterator[Cursor]) -> Pipeline | OnDevice:
        """(steps done, batch) of `cursors`, where the user wants them."""
        if self.device is None or self.device.type == "cpu":
            return self._pipeline(cursors, self._clocks)
        if self.device.type != "cuda":
            return on_device(self._pipeline(cursors, self._clocks), self.device)
        if self._copier is None:
            self._copier = Copier(self.device, self._work.buffers, self.budget.max_batch)
        clocks = {name: clock for name, clock in self._clocks.items() if name != CONSUMER}  # whose clock is the copies'
        batches = self._pipeline(cursors, clocks)
        self._clocks |= {name: clock for name, clock in clocks.items() if name not in (CONSUMER, *self._clocks)}
        return on_device(batches, self.device, self._copier, self._clocks)

    def _pipeline(self, cursors: Iterator[Cursor], clocks: dict[str, Clock]) -> Pipeline:
        """Batches of `cursors`, in windows where rows come from the disk."""
        work = self._work
        if work.x is None or isinstance(work.x, ArrayRows):
            source = work.split(cursors) if self._split else cursors
            return Pipeline(source, work.stages(*self._threads, self._split), self.budget.in_flight, self.prefetch, clocks)
        pool, split = self.budget.batches, self._split
        if work.sweeping:
            return swept(work, cursors, pool=pool, threads=self._threads[0], split=split, clocks=clocks)
        return windowed(work, cursors, pool=pool, threads=self._threads[0], split=split, clocks=clocks)

    def _ended(self, epoch: int) -> None:
        if self._cursor == Cursor(epoch, len(self)):
            self._cursor = Cursor(epoch + 1, 0)


class Epoch:
    """Iterator over one epoch's batches. `close` ends its threads; so do the end, an exception, and its collection."""

    def __init__(self, loader: NeighborLoader, batches: Pipeline | OnDevice, epoch: int) -> None:
        self._loader, self._batches, self._epoch = loader, batches, epoch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            step, batch = next(self._batches)
        except StopIteration:
            self._loader._ended(self._epoch)
            raise
        self._loader._cursor = Cursor(self._epoch, step)
        return batch

    def close(self) -> None:
        """Stop working ahead; idempotent."""
        self._batches.close()
