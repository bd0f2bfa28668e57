"""What all loaders share: epochs of batches from a cursor on, through a pipeline of threads, to a device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch

from ooc.loading.read_counts import ReadCounts
from ooc.loading.read_strategy import ReadStrategy
from ooc.loading.row_pool import RowPool
from ooc.loading.sample_stage import Order, SamplePlace
from ooc.runtime.buffers import Buffers
from ooc.runtime.clock import Clock, Span
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import Blocks, keep_large_blocks, return_freed
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.messages import warn_user
from ooc.runtime.pipeline import CONSUMER, Pipeline, Stage
from ooc.runtime.transfer import Copier, OnDevice, on_device
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.process import release_library_pages

PREFETCH = 8
"""Batches between the cursor and the model where no `prefetch_factor` is given"""
AHEAD = 2
"""batches that the stage behind a loader's own has done before the model needs them, including the current one"""


class Loader:
    """What all loaders have: a device that batches are moved to, a bound on what is made in advance, and clocks of its stages.

    in_flight: bytes of the batches between the source and the consumer; prefetch: batches made in advance.
    """

    def __init__(self, in_flight: int, device: torch.device | str | None, prefetch: int) -> None:
        if prefetch < 1:
            raise ConfigError(f"prefetch is how many are made in advance, 1 or more, not {prefetch}")
        self._in_flight, self.prefetch = in_flight, prefetch
        self.device = None if device is None else torch.device(device)
        self._clocks: dict[str, Clock] = {}
        self._copier: Copier | None = None  # its stream and page-locked memory serve all passes

    def _batches(self, source: Iterator[Any], stages: list[Stage]) -> Pipeline | OnDevice:
        batches = Pipeline(source, stages, self._in_flight, self.prefetch, self._clocks)
        if self.device is None or self.device.type == "cpu":
            return batches
        return on_device(batches, self.device, self._copier_of(None, None))

    def _copier_of(self, leases: Buffers | None, max_bytes: int | None) -> Copier | None:
        """What copies batches to CUDA; leases, max_bytes: see `Copier`."""
        if self._copier is None and self.device is not None and self.device.type == "cuda":
            self._copier = Copier(self.device, leases, max_bytes)
        return self._copier

    def times(self) -> dict[str, dict[str, float]]:
        """Seconds of work and waiting, and items, by stage, over all epochs so far; see `Pipeline.times`."""
        return {name: clock.sums() for name, clock in self._clocks.items()}

    def spans(self) -> dict[str, list[Span]]:
        """When each stage worked on what, as far as it was kept (see `ooc.runtime.clock`): the beginning of the first epoch."""
        return {name: list(clock.spans) for name, clock in self._clocks.items()}


class EpochLoader(Loader):
    """Iterates over epochs, each from a cursor on, which counts steps, events or windows."""

    unit: ClassVar[str] = "step"
    """what a cursor's `step` is called in `state_dict`"""
    data: Dataset
    _seed_drawn: bool = False
    """whether the seed came from torch's generator, as none was given"""
    _delivered: bool = False
    """whether it has given a batch"""
    _begin: int = 0
    _end: int
    """an epoch's cursors begin and end there"""
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    """what it was made with, for pickling"""

    def __new__(cls, *given: Any, **options: Any) -> Self:
        made = super().__new__(cls)
        made._given = given, options
        return made

    def __reduce__(self) -> Any:
        """A pickled loader is made again by its arguments, with its data set opened again, and continues where it stands."""
        return _made_again, (type(self), *self._given, self._cursor, self._identity().get("seed", 0))

    def _start_at(self, cursor: Cursor) -> None:
        self._start = self._cursor = cursor

    def _from(self, start: Cursor) -> Pipeline | OnDevice:
        """(where the cursor stands behind a batch, the batch) from `start` to the end of its epoch."""
        raise NotImplementedError

    def _identity(self) -> dict[str, Any]:
        """All that batches depend on besides the cursor."""
        return {"store": self.data.fingerprint}

    def __iter__(self) -> "Epoch":
        start = self._cursor = self._start
        self._start = Cursor(start.epoch + 1, self._begin)
        return Epoch(self, self._from(start), start.epoch, self._until)

    @property
    def _until(self) -> int | None:
        """Where the next epoch's last batch ends; None where only iterating tells."""
        return self._end

    def _ended(self, epoch: int) -> None:
        if self._cursor == Cursor(epoch, self._end):
            self._cursor = Cursor(epoch + 1, self._begin)

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batch the consumer took last, and what it is only valid with."""
        return {"epoch": self._cursor.epoch, self.unit: self._cursor.step, **self._identity()}

    def _use_seed(self, seed: int) -> None:
        """Take the seed of a state in place of the one that was drawn."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state` with the next `iter`. A loader that was given no seed takes that of the state.

        Args:
            state: What `state_dict` returned; of its entries only the epoch and the step (event) must be there.

        Raises:
            ConfigError: This loader's batches would be other ones: other data, input nodes, ranks or settings.

        >>> loader.load_state_dict({"epoch": 3, "step": 17})
        """
        if not {"epoch", self.unit} <= state.keys():
            raise ConfigError(f"cannot resume: a state of {type(self).__name__} has 'epoch' and {self.unit!r}, not {[*state]}")
        for name, value in self._identity().items():
            if name == "store" and state.get(name, value) != value:
                raise ConfigError(f"cannot resume: the state is of another store than {self.data.path}, or of other data in it")
            if name in state and state[name] != value and not (name == "seed" and self._seed_drawn):
                raise ConfigError(f"cannot resume: {name} was {state[name]!r} and is {value!r} now; use the old value")
        epoch, at, count = int(state["epoch"]), int(state[self.unit]), self._end - self._begin
        if not (epoch >= 0 and self._begin <= at <= self._end):
            raise ConfigError(f"cannot resume at epoch {epoch} {self.unit} {at}: there are {count} {self.unit}s")
        if self._seed_drawn and "seed" in state:
            self._use_seed(int(state["seed"]))
        self._start_at(Cursor(epoch, at))


def warn_of_prefetch(prefetch_factor: int | None, strategy: ReadStrategy) -> None:
    """Say that a `prefetch_factor` changes nothing, where that is so."""
    if prefetch_factor is not None and strategy.reads_disk:
        warn_user("prefetch_factor changes nothing: rows on disk are read for as many batches ahead as the memory holds")


def _made_again(
    cls: "type[EpochLoader]", given: tuple[Any, ...], options: dict[str, Any], cursor: Cursor, seed: int
) -> "EpochLoader":
    """A loader from a pickle; cursor, seed: where it stood, and the seed if it was drawn."""
    loader = cls(*given, **options)
    if loader._seed_drawn:
        loader._use_seed(seed)
    loader._start_at(cursor)
    return loader


class BatchLoader(EpochLoader):
    """Iterates over the batches of a strategy's stages; each `iter` is the next epoch."""

    def __init__(
        self, data: Dataset, strategy: ReadStrategy, budget: MemoryPlan, device: torch.device | None, prefetch: int = PREFETCH
    ) -> None:
        super().__init__(budget.in_flight, device, prefetch)
        self.data, self.budget, self.strategy = data, budget, strategy
        self._end = len(self)
        self._seed_drawn = self._order.seed_drawn
        self._stop: int | None = None
        self._every = 1
        self.then: Stage | None = None
        """a stage behind the loader's own: for each (steps done, batch) in order, shortly before the model has the batch"""
        self._start_at(Cursor(0, 0))
        self.keeps_blocks: Blocks | None = None
        """whether freed blocks are cached while it is iterated over, see `keep_large_blocks`; None: as the process has it"""

    @property
    def _order(self) -> Order:
        return self.strategy.stages.sample.order

    @property
    def _counts(self) -> ReadCounts:
        return self.strategy.stages.counts

    def begin_reading(self) -> None:
        """Begin to read the topology, which the first batch needs, while the caller prepares other things. The first batch
        raises what goes wrong."""
        self.strategy.stages.sample.topology.begin()

    @property
    def rows_read(self) -> int:
        """Feature rows read so far, for batches not yet delivered too; one that many batches read together want counts once."""
        return self._counts.rows

    @property
    def rows_asked(self) -> int:
        """Feature rows that batches sampled so far want, each time they do."""
        return self._counts.requested

    @property
    def bytes_read(self) -> int:
        """Bytes those rows took from the disk, and the edges where they stay there."""
        return self._counts.nbytes + self._counts.topology_nbytes

    @property
    def pool(self) -> RowPool | None:
        """The feature rows that stay on the device; None where none do."""
        return self.strategy.stages.load.pool

    @property
    def topology_bytes_read(self) -> int:
        """Those of `bytes_read` that were edges."""
        return self._counts.topology_nbytes

    @property
    def bytes_written(self) -> int:
        """Bytes written to the disk to pack batches."""
        return self._counts.written

    @property
    def sample_place(self) -> SamplePlace:
        """Where neighbors are sampled, and why."""
        return self.strategy.stages.sample.place

    @property
    def batch_size(self) -> int:
        """Seeds (parts) of a batch."""
        return self._order.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a last batch of fewer seeds is left out."""
        return self._order.drop_last

    @property
    def dataset(self) -> range:
        """The positions of the input nodes, as in PyG's loaders: `len(loader.dataset)` are their number."""
        return range(self.num_seeds)

    @property
    def num_seeds(self) -> int:
        """Input nodes, over all ranks and batches of an epoch."""
        return len(self._order.nodes)

    def __len__(self) -> int:
        """Steps an epoch; with `split_seeds`, the least number of batches."""
        return self._order.steps

    @property
    def own_steps(self) -> int:
        """Steps of an epoch in which this rank has seeds; see `Order.own_steps`."""
        return self._order.own_steps

    @property
    def shared_steps(self) -> int:
        """Steps of an epoch in which all ranks have seeds; rank 0 has none in a last one that has too few."""
        return replace(self._order, rank=0).own_steps

    def set_epoch(self, epoch: int) -> None:
        """The next `iter` is this epoch, from its beginning, or from where `load_state_dict` left that same epoch."""
        if epoch != self._start.epoch:
            self._start_at(Cursor(epoch, 0))

    def stop_before(self, step: int | None) -> None:
        """Epochs end before `step`, so that nothing is read ahead for batches nobody takes; None: whole epochs again."""
        self._stop = step

    def _identity(self) -> dict[str, Any]:
        order = self._order
        kept = {name: getattr(order, name) for name in ("seed", "rank", "batch_size", "shuffle", "drop_last")}
        seeds = {"world": order.world_size, "num_seeds": self.num_seeds, "input_nodes": order.nodes.identity}
        return {**super()._identity(), **kept, **seeds}

    def _use_seed(self, seed: int) -> None:
        stages = self.strategy.stages
        sample = replace(stages.sample, order=replace(stages.sample.order, seed=seed))
        self.strategy = replace(self.strategy, stages=replace(stages, sample=sample))

    def _from(self, start: Cursor) -> Pipeline | OnDevice:
        if self.keeps_blocks is not None:
            keep_large_blocks(self.keeps_blocks)
        return_freed()  # of the epoch before, or of training where this one is for scores
        return self._on_device(Cursor(start.epoch, step) for step in range(start.step, self._until, self._every))

    @property
    def _until(self) -> int:
        return len(self) if self._stop is None else min(len(self), self._stop)

    def _on_device(self, cursors: Iterator[Cursor]) -> Pipeline | OnDevice:
        """(steps done, batch) of `cursors`, where the user wants them, completed there."""
        batches, load = self._moved(cursors), self.strategy.stages.load
        return OnDevice(batches, lambda done: (done[0], load.completed(done[1]))) if self.pool is not None else batches

    def _moved(self, cursors: Iterator[Cursor]) -> Pipeline | OnDevice:
        """(steps done, batch) of `cursors` on the device."""
        if self.device is None or self.device.type == "cpu":
            return self._pipeline(cursors, self._clocks)
        if self.device.type != "cuda":
            return on_device(self._pipeline(cursors, self._clocks), self.device)
        copier = self._copier_of(self.strategy.stages.load.buffers, self.budget.max_batch)
        clocks = {name: clock for name, clock in self._clocks.items() if name != CONSUMER}  # whose clock is the copies'
        batches = self._pipeline(cursors, clocks)
        self._clocks |= {name: clock for name, clock in clocks.items() if name not in (CONSUMER, *self._clocks)}
        return on_device(batches, self.device, copier, self._clocks)

    def _pipeline(self, cursors: Iterator[Cursor], clocks: dict[str, Clock]) -> Pipeline:
        """(steps done, batch) of `cursors`, as the read strategy makes them, and through `then`."""
        if self.then is None:
            return self.strategy.pipeline(cursors, self.budget, self.prefetch, clocks)
        name = self.then.name
        inner = {each: clock for each, clock in clocks.items() if each not in (CONSUMER, name)}
        batches = self.strategy.pipeline(cursors, self.budget, self.prefetch, inner)
        clocks |= {each: clock for each, clock in inner.items() if each != CONSUMER}
        own = {each: clocks.setdefault(each, Clock()) for each in (name, CONSUMER)}
        return Pipeline(batches, [self.then], max_bytes=1, max_items=AHEAD, clocks=own, before=batches)


class Epoch:
    """Iterator over one epoch's batches. `close` ends its threads; so do the last batch, an exception, and its collection.

    until: where the last batch ends; None where only asking for another one tells.
    """

    def __init__(self, loader: EpochLoader, batches: Pipeline | OnDevice, epoch: int, until: int | None) -> None:
        self._loader, self._batches, self._epoch, self._until = loader, batches, epoch, until

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            behind, batch = next(self._batches)
        except StopIteration:
            self._loader._ended(self._epoch)
            raise
        self._loader._cursor = Cursor(self._epoch, behind)
        if not self._loader._delivered:  # kernels are loaded, and what LLVM needed of itself for that is not used again
            self._loader._delivered = True
            release_library_pages()
        if behind == self._until:  # a loop that scores or saves now, before it asks for more, has the memory back
            self.close()
        return batch

    def close(self) -> None:
        """Stop working ahead; idempotent."""
        self._batches.close()
