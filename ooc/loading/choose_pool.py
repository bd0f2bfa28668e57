"""Whether the feature rows of batches stay on the device, which, and how many: decided here, from a few sampled batches."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch

from ooc.loading.batch_bytes import BatchBytes, PackBytes, ScanBytes
from ooc.loading.choose_read_strategy import choose_strategy
from ooc.loading.collate import SampledBatch
from ooc.loading.load_stage import LoadStage
from ooc.loading.packed import PackedBatches
from ooc.loading.pooled_load import PooledLoadStage, PoolNeed, pool_need
from ooc.loading.read_strategy import ReadStrategy
from ooc.loading.row_pool import RowPool, SlotMap, fits_pool, shared_pool
from ooc.loading.sample_device import PoolRoom
from ooc.loading.sample_stage import SamplePlace
from ooc.loading.shared_scan import SharedScans
from ooc.loading.stages import BatchStages
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import DevicePlan, MemoryPlan, plan_memory
from ooc.runtime.messages import warn_user
from ooc.runtime.transfer import AHEAD
from ooc.sampling.device_topology import device_bytes, is_there
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.graph import Graph
from ooc.stores.io.pages import PAGE_BYTES
from ooc.stores.io.read_plan import ReadCost
from ooc.stores.sizes import format_bytes, parse_bytes

SIZED, COUNTED = 4, 32
"""batches that are sampled to know how large they are, and which rows they want most"""
ON_DEVICE = AHEAD + 2
"""batches on the device: one being copied, those that wait, and one at the model"""
_LARGER, _LARGER_THAN = 5, 4
"""how much larger a batch may be than the largest of those sampled"""
_GIVEN = "(gpu_memory)"
_BYTES_ALONE = ReadCost(0.0, 1.0)
"""of a disk that nobody measured"""


def with_pool(
    strategy: ReadStrategy, budget: MemoryPlan, device: torch.device | None, data: Dataset, read_threads: int
) -> tuple[ReadStrategy, MemoryPlan]:
    """The strategy and plan with rows in a pool, where `budget` has a device and batches are faster so; else as they are."""
    if budget.device is None or device is None:
        return strategy, budget
    why = _kept_from_it(strategy)
    if why is None:
        device = torch.empty(0, device=device).device  # with its number
        return _Chooser(strategy, budget, device, data, read_threads).chosen()
    if budget.device.origin == _GIVEN and not strategy.stages.sample.split_seeds:
        warn_user(f"gpu_memory has no feature rows: {why}")
    return strategy, budget


def sampled_beside(
    strategy: ReadStrategy, budget: MemoryPlan, stages_beside: Callable[[PoolRoom], BatchStages]
) -> tuple[ReadStrategy, MemoryPlan]:
    """The strategy and plan with neighbors sampled on the device, where that can be once it is known which rows stay there.

    stages_beside: the stages chosen with this knowledge. Raises ConfigError where it is asked for and cannot be.
    """
    stages, plan, pool = strategy.stages, budget.device, strategy.stages.load.pool
    if stages.sample.place.device is not None:
        return strategy, budget
    room = PoolRoom(False, 0)
    if pool is not None and pool.slots.whole and plan is not None:
        # Ids are longer there, and edges are sorted: of batches as much again as cross the bus
        left = plan.memory - plan.libraries - plan.model - 2 * plan.batches - plan.activations - pool.nbytes
        room = PoolRoom(True, max(0, left))
    sample = stages_beside(room).sample
    if sample.place.device is None:
        sample = replace(stages.sample, place=sample.place)
    else:
        sample = replace(sample, limit=stages.sample.limit, counts=stages.sample.counts)
        if plan is not None:
            nbytes = topology_bytes(stages.load.graph, sample.place)
            budget = replace(budget, device=replace(plan.with_topology(nbytes), batches=2 * plan.batches))
    return replace(strategy, stages=replace(stages, sample=sample)), budget


def topology_bytes(graph: Graph | None, place: SamplePlace) -> int:
    """Bytes of the device that a topology takes which is to be sampled there and is not there yet."""
    if graph is None or place.device is None or is_there(graph, place.device, place.edges_on_host):
        return 0
    return device_bytes(graph, place.edges_on_host)


def _kept_from_it(strategy: ReadStrategy) -> str | None:
    """Why no rows can stay on a device; None if they can."""
    load = strategy.stages.load
    if type(load) is not LoadStage:
        return "the graph has several types"
    if load.x is None or load.gather is None or not load.x.shape[0] * load.x.row_bytes:
        return "batches have none"
    reasons = {
        "transform takes batches in the host's memory": strategy.stages.collate.transform is not None,
        "they are packed on disk": isinstance(strategy, PackedBatches),
        f"torch does not gather {load.x.dtype}": not fits_pool(load.x, load.gather.encoding),
    }
    return next((why for why, is_so in reasons.items() if is_so), None)


class _Chooser:
    """Chooses for one loader; see `with_pool`."""

    def __init__(
        self, strategy: ReadStrategy, budget: MemoryPlan, device: torch.device, data: Dataset, read_threads: int
    ) -> None:
        self.strategy, self.budget, self.device, self.engine = strategy, budget, device, data.engine
        self.by_degree = data.manifest.order == "degree" and data.manifest.partition is None
        """whether the first rows of the store are those that are wanted most"""
        self.read_threads = read_threads
        memory: Any = getattr(strategy, "memory")  # noqa: B009 - of every strategy but none of the base class
        self.bytes: BatchBytes = memory.batch if isinstance(memory, ScanBytes | PackBytes) else memory
        load = strategy.stages.load
        assert load.x is not None
        assert load.gather is not None
        self.load, self.x, self.gather = load, load.x, load.gather

    def chosen(self) -> tuple[ReadStrategy, MemoryPlan]:
        """The strategy and its plan. Raises BudgetError where a batch and the model alone are too much for the device."""
        there = shared_pool(self.x, self.device)
        try:
            assert self.budget.device is not None
            topology = topology_bytes(self.load.graph, self.strategy.stages.sample.place)
            device = self.budget.device.with_topology(topology)  # before batches are sampled there
            sizes = self._on_device()
            rows = self.x.shape[0] * self.x.row_bytes
            left = self._left(device, *sizes, rows if there is None else there.nbytes, rows)
            slots = self._slots(left.pool // self.x.row_bytes) if there is None else there.slots
            budget = replace(self.budget, device=left).beside_slots(slots.nbytes)
            memory = self._memory(slots, budget)
            if slots.capacity and self._fits(memory) and self._pays(slots):
                pool = shared_pool(self.x, self.device, lambda: self._pool(slots))
                assert pool is not None
                return self._over(pool, memory), budget
        except _TooLargeError:
            return self.strategy, self.budget  # what is too large is refused when it is iterated over
        return self.strategy, replace(self.budget, device=left.without_pool())

    def _left(self, device: DevicePlan, *sizes: int) -> DevicePlan:
        """`DevicePlan.beside`; it is refused where the user gave a limit, and elsewhere no rows stay: sizes are estimates."""
        try:
            return device.beside(*sizes)
        except BudgetError as error:
            if device.origin == _GIVEN:
                raise
            raise _TooLargeError from error

    @cached_property
    def _some(self) -> list[SampledBatch]:
        """The first batches of an epoch."""
        return self._sample(SIZED)

    def _sample(self, most: int) -> list[SampledBatch]:
        """The first batches of an epoch, `most` at the most. Raises _TooLargeError."""
        sample = self.strategy.stages.apart().sample
        try:
            return list(islice(sample.batches(Cursor(0, step) for step in range(min(most, sample.order.steps))), most))
        except BudgetError as error:
            raise _TooLargeError from error

    def _on_device(self) -> tuple[int, int]:
        """Bytes of batches, and of activations; none of batches that are halved until they fit, those of scores."""
        if self.strategy.stages.sample.split_seeds:
            return 0, 0
        need = [self._need(drawn) for drawn in self._some]
        return ON_DEVICE * _most([each.batch for each in need]), _most([each.rows + each.model for each in need])

    def _need(self, drawn: SampledBatch) -> PoolNeed:
        subgraph, y = drawn.subgraph, self.load.labels
        label = 0 if y is None else 8 * int(np.prod(y.y.shape[1:], dtype=np.int64))
        nodes, edges = subgraph.size
        host = self.bytes.collator.nbytes(nodes, edges, label) + 4 * edges
        width = 4 * int(np.prod(self.x.shape[1:], dtype=np.int64))
        aggregation = self.load.pre_aggregation
        weighs = aggregation is not None and aggregation.weighs_edges(subgraph)
        return pool_need(nodes, edges, nodes, self.x.row_bytes, width, host, self.bytes.activation_bytes(drawn), weighs)

    def _slots(self, capacity: int) -> SlotMap:
        """Which rows are to stay; of an array that has no order only where the host has memory for the places."""
        count = self.x.shape[0]
        if self.by_degree or capacity >= count or 4 * count > self.budget.batches // 4:
            return SlotMap.first(count, capacity)
        wanted = (np.unique(each.subgraph.node) for each in self._sample(COUNTED))
        return SlotMap.most_wanted(wanted, count, capacity)

    def _memory(self, slots: SlotMap, budget: MemoryPlan) -> BatchBytes:
        """What a batch takes of the host: places, and any of the rows that are not there."""
        y = self.load.labels
        row = 12 + (0 if y is None else 8 * int(np.prod(y.y.shape[1:], dtype=np.int64)))
        row += 0 if slots.whole else self.x.row_bytes
        return BatchBytes(budget.batch, self.bytes.collator, row, edges_per_node=self.bytes.edges_per_node)

    def _fits(self, memory: BatchBytes) -> bool:
        """Whether the host has memory for batches; without a pool they may take less, as aggregates do."""
        if self.load.pre_aggregation is None or self.strategy.stages.sample.split_seeds:
            return True
        return _most([memory.nbytes(each) for each in self._some]) <= memory.max_bytes

    def _pays(self, slots: SlotMap) -> bool:
        """Whether batches are faster with these rows on the device."""
        if slots.whole or not self._some:
            return slots.whole
        some = self._some
        missed = sum(len(slots.find(each.subgraph.node)[1]) for each in some) / len(some)
        if isinstance(self.strategy, SharedScans):
            return missed * _random_read(self.x) < self._scan_seconds(some)
        rows = [each.subgraph.size[0] for each in some]
        if self.load.pre_aggregation is not None:  # two rows of each destination cross the bus
            width = 8 * self.x.shape[1]
            rows = [(len(each.subgraph.indptr) - 1) * width // self.x.row_bytes for each in some]
        return missed < sum(rows) / len(rows)

    def _scan_seconds(self, some: list[SampledBatch]) -> float:
        """What a batch takes of a shared scan."""
        assert isinstance(self.strategy, SharedScans)
        memory, sample = self.strategy.memory, self.strategy.stages.sample
        sizes = [memory.size(each, sample.drawing_bytes(each.subgraph.nbytes)) for each in some]
        room = self.strategy.pool(self.budget) - max(each.fixed for each in sizes)
        together = max(1.0, room / max(1.0, sum(each.kept for each in sizes) / len(sizes)))
        cost: ReadCost = getattr(self.x, "cost", _BYTES_ALONE)
        return self.x.shape[0] * self.x.row_bytes * cost.byte_s / together

    def _pool(self, slots: SlotMap) -> RowPool:
        counts = self.load.counts
        return RowPool(self.x, self.gather.encoding, slots, self.device, counts.add, self.engine)

    def _over(self, pool: RowPool, memory: BatchBytes) -> ReadStrategy:
        """The strategy over a pool: what it misses is read as rows without one are."""
        inherited = {each.name: getattr(self.load, each.name) for each in fields(LoadStage)}
        stages, load = self.strategy.stages, PooledLoadStage(**inherited, pool=pool)
        stages = replace(stages, load=load, sample=replace(stages.sample, limit=memory))
        return choose_strategy(stages, memory, self.read_threads)


class _TooLargeError(Exception):
    """A batch does not fit the host's memory, or perhaps not what is free of the device's."""


def _most(sizes: list[int]) -> int:
    return max(sizes, default=0) * _LARGER // _LARGER_THAN


def _random_read(x: Any) -> float:
    """Seconds of a row that lies by itself."""
    cost: ReadCost = getattr(x, "cost", _BYTES_ALONE)
    return cost.read_s + max(PAGE_BYTES, x.row_bytes) * cost.byte_s


def device_plan(device: torch.device | None, limit: int | str | None, model: int | None = None) -> DevicePlan | None:
    """What there is of a GPU's memory; None elsewhere. Raises ConfigError for a limit elsewhere, or of more than is free.

    limit: what the user gives of it; None: what is free, and what torch has of it already. model: bytes of gradients and
    optimizer state of a model that is there; None: it is yet to come, and has half of what is free.
    """
    if device is None or device.type != "cuda":
        if limit is not None:
            raise ConfigError(
                "`gpu_memory` needs a CUDA device, and batches are on the CPU: leave it out, or use `device='cuda'`"
            )
        return None
    if not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch sees no CUDA device here; leave it out")
    free, _ = torch.cuda.mem_get_info(device)
    there = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if limit is None:
        return DevicePlan.of(there if model is not None else there // 2, model or 0, "(free)")
    given = parse_bytes(limit, "gpu_memory")
    if given > there:
        raise ConfigError(f"`gpu_memory` is {format_bytes(given)}, and {format_bytes(there)} of it are free: give at most that")
    return DevicePlan.of(given, (model or 0) + torch.cuda.memory_allocated(device), _GIVEN)


def plan_for(
    data: Dataset,
    budget: MemoryPlan | None,
    device: torch.device | str | None,
    gpu_memory: int | str | None,
    node_bytes: int = 0,
) -> MemoryPlan:
    """The plan of a loader: `budget`, or one of its own, with what it may have of the GPU it is for. node_bytes: that it keeps
    for each node."""
    if budget is not None and gpu_memory is None:
        return budget
    place = None if device is None else torch.device(device)
    return replace(budget or plan_memory(data, node_bytes * data.num_nodes), device=device_plan(place, gpu_memory))
