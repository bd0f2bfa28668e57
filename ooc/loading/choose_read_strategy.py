"""Which read strategy a loader has: decided here and nowhere else, by where its rows are and what they become."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ooc.graph.aggregation import PreAggregation
from ooc.graph.mapped_topology import HeteroTopology, Topology
from ooc.loading.arguments import Pack
from ooc.loading.batch_bytes import BatchBytes, BatchSize, PackBytes, ScanBytes, row_bytes_of
from ooc.loading.collate import CollateStage, Collator
from ooc.loading.hetero import HeteroCollator, HeteroLoadStage
from ooc.loading.hetero_bytes import HeteroBatchBytes, HeteroScanBytes
from ooc.loading.hetero_rows import TypedPreAggregation
from ooc.loading.load_stage import Labels, LoadStage, on_disk
from ooc.loading.packed import PackedBatches
from ooc.loading.read_counts import ReadCounts
from ooc.loading.read_strategy import InMemory, ReadStrategy
from ooc.loading.sample_device import PoolRoom, sample_place
from ooc.loading.sample_stage import Order, SamplePlace, SampleStage
from ooc.loading.sampling import Sampling, drawing
from ooc.loading.shared_scan import SharedScans
from ooc.loading.stages import BatchStages, buffers_for
from ooc.loading.superbatch import Superbatches
from ooc.runtime.memory import Blocks
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.messages import warn_user
from ooc.sampling import NeighborSampler, OnDiskFrontier
from ooc.sampling.device_neighbor import DeviceNeighborSampler
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.rows import ArrayRows, Rows
from ooc.stores.arrays.zarr_rows import ShardedRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.engines.ring import SCRATCH_BYTES as RING_BYTES


def scan_pays(rows: Rows, most: int) -> bool:
    """Whether to read rows on disk again for every scan; not where all of them stay in memory, of `most` bytes."""
    return rows.shape[0] * rows.row_bytes > most


def choose_strategy(
    stages: BatchStages, memory: BatchSize | ScanBytes | PackBytes, read_threads: int = 2, pack: Pack | None = None
) -> ReadStrategy:
    """The strategy for these stages.

    memory: of a batch, of a shared scan, or of packed batches, whose disk `pack` is; read_threads: that gather rows in memory.
    """
    if isinstance(memory, PackBytes):
        assert pack is not None
        return PackedBatches(stages, memory, pack.folder)
    if isinstance(memory, ScanBytes):
        return SharedScans(stages, memory)
    return Superbatches(stages, memory) if stages.disk_arrays else InMemory(stages, memory, read_threads)


def keeps_blocks(strategy: ReadStrategy, ds: Dataset, budget: MemoryPlan) -> Blocks:
    """Which freed blocks may be cached: none where rows fill a memory that is limited, and none is reserved for them."""
    if ds.memory is None:
        return Blocks.KEEP_ALL
    x = strategy.stages.load.x
    filled = isinstance(x, ArrayRows) or (x is not None and scan_pays(x, budget.resident_rows))
    return Blocks.KEEP if not filled or strategy.reserves_blocks else Blocks.RETURN


def edges_stay_on_disk(ds: Dataset, rows: Sequence[Rows | None], weight: str | None, budget: MemoryPlan) -> bool:
    """Whether edges are read as they are sampled; rows: those that batches have, weight: the column to sample by."""
    return any(map(on_disk, rows)) and ds.graph.sampled_bytes(weight) > budget.topology_in_ram


def neighbor_strategy(
    ds: Dataset,
    order: Order,
    collate: CollateStage,
    sampling: Sampling,
    budget: MemoryPlan,
    device: torch.device | None,
    pre_aggregation: PreAggregation | None,
    split_seeds: bool,
    threads: tuple[int, int],
    pack: Pack | None = None,
    pool: PoolRoom | None = None,
) -> ReadStrategy:
    """The stages of sampled neighborhoods, and how their rows are read.

    pre_aggregation: what batches should hold in place of feature rows, where those are rows of float32. threads: that sample,
    and that gather rows in memory. pack: disk to pack batches in, in place of shared scans. Where each seed has a tree of its
    own, sources have an importance or share a budget, or batches have other edges than the sampled ones, edges are read through
    memory maps.
    pool: feature rows on the GPU, see `sample_place`.
    """
    collator = collate.collator
    if isinstance(collator, HeteroCollator):
        if pack is not None:
            raise ConfigError(f"pack is for graphs of one node type, and {ds.path} has several: leave it out")
        place = sample_place(ds, order, collate, sampling, device, pre_aggregation, False, False, pool)
        made = ds, order, collate, collator, sampling, budget, device, pre_aggregation, split_seeds, threads
        return _hetero_strategy(*made, place)
    assert isinstance(collator, Collator)
    x = None if collator.gather is None else ds.stored("x")
    if x is None or len(x.shape) != 2 or collator.gather is None or not collator.gather.float32:
        pre_aggregation = None
    rows = [x, *(each.rows for each in collator.edge_features)]
    cold = edges_stay_on_disk(ds, rows, sampling.weight, budget)
    scanning = pre_aggregation is not None and x is not None and on_disk(x) and scan_pays(x, budget.resident_rows)
    kept = _Kept(scanning, cold, cold and not sampling.needs_mapped_edges)
    _check_pack(pack, pre_aggregation, scanning)
    read = rows[1:] if pool is not None and pool.whole else rows
    where = cold, any(map(on_disk, read)), pool, budget.topology_in_ram
    place = sample_place(ds, order, collate, sampling, device, pre_aggregation, *where)
    memory = _memory_of(ds, x, collator, budget, pre_aggregation, kept, sampling.repeats_neighbors, pack)
    own = order, collator, sampling, budget
    sample = _sample_stage(ds, own, memory, kept, place, pre_aggregation is not None, split_seeds, threads[0])
    labels = None if ds.labels is None else Labels(ds.labels, floats=ds.task == "multilabel")
    buffers = buffers_for(device, budget)
    load = LoadStage(ds.graph, x, collator.gather, labels, pre_aggregation, sample.counts, buffers, collator.edge_features)
    return choose_strategy(BatchStages(sample, load, collate), memory, threads[1], pack)


class _Kept(NamedTuple):
    """What of a graph of one node type stays on the disk. scanning: feature rows, which shared scans read; cold: edges, for
    their size; edges_stay: edges, which are read as they are sampled and not through memory maps."""

    scanning: bool
    cold: bool
    edges_stay: bool


def _memory_of(
    ds: Dataset,
    x: Rows | None,
    collator: Collator,
    budget: MemoryPlan,
    pre_aggregation: PreAggregation | None,
    kept: _Kept,
    shares_sums: bool,
    pack: Pack | None,
) -> BatchSize | ScanBytes | PackBytes:
    """Of batches: of one, of a shared scan's, or of packed ones. shares_sums: see `ScanBytes`."""
    row_bytes = row_bytes_of(ds, collator, pre_aggregation)
    channels = 0 if x is None or pre_aggregation is None else x.shape[1]
    batch = BatchBytes(
        budget.batch, collator, row_bytes, pre_aggregation, channels, budget.model_width, activations=budget.activations
    )
    if not kept.scanning:
        return batch
    if pack is not None and x is not None:
        return PackBytes(budget.scans(0), ScanBytes(budget.scans(0), batch), x.row_bytes, pack.nbytes)
    return _scan_bytes(ds, x, batch, budget, shares_sums, kept.edges_stay)


def _sample_stage(
    ds: Dataset,
    own: tuple[Order, Collator, Sampling, MemoryPlan],
    memory: Any,
    kept: _Kept,
    place: SamplePlace,
    sums: bool,
    split_seeds: bool,
    threads: int,
) -> SampleStage:
    """The stage that draws neighborhoods, on the CPU or a GPU. sums: whether the first layer's sums stand for feature rows."""
    order, collator, sampling, budget = own
    most = budget.drawn if kept.scanning else budget.batch  # what a batch takes of a scan in all is checked when it is drawn
    row_bytes = memory.row_bytes if isinstance(memory, BatchBytes) else memory.batch.row_bytes
    per_node, per_expanded = (0, row_bytes) if sums else (row_bytes, 0)
    limits: dict[str, Any] = {"max_bytes": most, "row_bytes": per_node, "expanded_bytes": per_expanded, "cold": kept.cold}
    limits |= {"held_out": order.nodes.held_out.get(ds.edge_types[0]), "labor": sampling.labor}
    how = sampling.fanout, sampling.replace, sampling.weight
    sampler = NeighborSampler(ds.graph, *how, **limits, layer_wise=sampling.layer_wise)
    frontier = _frontier(ds, sampler, collator, sampling, budget) if kept.edges_stay else None
    topology = _topology(ds, collator, sampling, budget, frontier is not None, place)
    chosen: Any = sampler
    if place.device is not None:
        chosen = DeviceNeighborSampler(sampler, ds.graph, place.device, place.edges_on_host)
    counts, draw = ReadCounts(), lambda seeds, key: (chosen.sample(seeds.node, key, seeds.left_out), 0)
    if sampling.disjoint or sampling.whole:
        draw = drawing(ds, sampling, most, {ds.node_types[0]: per_node}, ds.node_types[0], order.nodes.held_out, kept.cold)
    at_once = threads if place.device is None else 1
    return SampleStage(order, draw, topology, memory, counts, frontier, at_once, split_seeds, sampling.kept_bytes(ds), place)


def _frontier(
    ds: Dataset, sampler: NeighborSampler, collator: Collator, sampling: Sampling, budget: MemoryPlan
) -> OnDiskFrontier:
    """What draws many batches together from edges on disk, with the columns that batches have."""
    columns = {name: ds.edge_rows(name) for name in collator.columns}
    weight = None if sampling.labor is None or sampling.weight is None else ds.edge_rows(sampling.weight)
    return OnDiskFrontier(sampler, ds.edge_rows("indices"), columns, budget.frontier, weight=weight)


def _topology(
    ds: Dataset, collator: Collator, sampling: Sampling, budget: MemoryPlan, edges_stay: bool, place: SamplePlace
) -> Topology:
    """The topology within its memory, of which what stays on the disk is read through memory maps."""
    locked = ds.graph.indices.nbytes if place.edges_on_host else 0
    mapped = max(0, budget.topology - ds.graph.indptr.nbytes - locked)
    reads_slots = not edges_stay and (place.device is None or bool(collator.columns))
    weight = None if edges_stay and sampling.labor is not None else sampling.weight
    mapping = reads_slots, collator.columns, sampling.by_source is not None and not edges_stay
    return Topology(ds.graph, weight, mapped, budget.topology_in_ram, *mapping)


def _check_pack(pack: Pack | None, pre_aggregation: PreAggregation | None, scanning: bool) -> None:
    """Refuse `pack` where it cannot apply, and say so where it changes nothing."""
    if pack is None:
        return
    if pre_aggregation is None:
        raise ConfigError(
            "pack needs a first layer that begins with the sum of its neighbors' float32 features (`pre_aggregation`): sage, "
            "gin and, without input dropout, gcn have one, unless the hidden width is far below the features'; leave pack out"
        )
    if not scanning:
        warn_user("pack changes nothing: all feature rows stay in memory")


def _hetero_strategy(
    ds: Dataset,
    order: Order,
    collate: CollateStage,
    collator: HeteroCollator,
    sampling: Sampling,
    budget: MemoryPlan,
    device: torch.device | None,
    pre_aggregation: PreAggregation | None,
    split_seeds: bool,
    threads: tuple[int, int],
    place: SamplePlace,
) -> ReadStrategy:
    """`neighbor_strategy` of several types; where edges do not fit in memory they are read through memory maps."""
    graphs, types = collator.graphs, collator.types
    typed = TypedPreAggregation.of(pre_aggregation, types, graphs)
    x = ds.joined_rows("x") if any(on_disk(own.x) for own in types.values()) else None
    scanning = typed is not None and x is not None and scan_pays(x, budget.resident_rows)
    most = budget.drawn if scanning else budget.batch  # as of `neighbor_strategy`
    row_bytes = {name: own.drawn_bytes(typed is not None) for name, own in types.items()}
    mapped = max(0, budget.topology - sum(graph.indptr.nbytes for graph in graphs.values()))
    columns = {key: collator.columns(key) for key in graphs}
    read = columns, sampling.labor is not None
    topology = HeteroTopology(graphs, sampling.weight, mapped, budget.topology_in_ram, *read)
    cold = sum(graph.sampled_bytes(None) for graph in graphs.values()) > budget.topology_in_ram
    batch = HeteroBatchBytes(budget.batch, collator, typed=typed, activations=budget.activations)
    memory = _scan_bytes(ds, x, batch, budget, sampling.repeats_neighbors) if scanning else batch
    seed_type = collator.seeds if isinstance(collator.seeds, str) else collator.seeds[0]
    counts, draw = ReadCounts(), drawing(ds, sampling, most, row_bytes, seed_type, order.nodes.held_out, cold)
    kept = sampling.kept_bytes(ds)
    sample = SampleStage(order, draw, topology, memory, counts, None, threads[0], split_seeds, kept, place)
    step, of_edges = None if typed is None else typed.step, (graphs, collator.edge_features)
    load = HeteroLoadStage(None, x, None, None, step, counts, buffers_for(device, budget), (), types, *of_edges, typed)
    return choose_strategy(BatchStages(sample, load, collate), memory, threads[1])


def _scan_bytes(
    ds: Dataset, x: Rows | None, batch: Any, budget: MemoryPlan, shares_sums: bool, edges_stay: bool = False
) -> ScanBytes:
    """Of scans: all that batches have and, of the buffers of reads, what scans have no use for, where io_uring reads whole
    extents straight into their pieces. batch: bytes of their batches, of one type or of several; shares_sums: see `ScanBytes`.
    """
    parts = x.parts.values() if isinstance(x, JoinedRows) else [x]
    straight = all(isinstance(each, ShardedRows) and each.engine.name == "uring" for each in parts) and not edges_stay
    spare = max(0, budget.scratch - RING_BYTES) if straight else 0
    reserved = budget.freed if ds.memory is not None else 0
    kind = HeteroScanBytes if isinstance(batch, HeteroBatchBytes) else ScanBytes
    return kind(budget.scans(spare), batch, reserved + spare, spare, shares_sums)
