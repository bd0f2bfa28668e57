"""Exact training on the whole graph: a step's gradient is that of all labelled nodes, by passes over all nodes in bounded
memory."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from ooc.fullgraph.activation_offload import OffloadFile
from ooc.fullgraph.device_values import DeviceValueStore, can_be_there
from ooc.fullgraph.executor import Executor, LossOf
from ooc.fullgraph.halo.part import EXACT, HaloSettings, Part, part_of
from ooc.fullgraph.halo.reach import Choose, recompute_none
from ooc.fullgraph.halo.reduce import sum_of, summed_gradients
from ooc.fullgraph.ops import StepModules
from ooc.fullgraph.placement.costs import bytes_alone
from ooc.fullgraph.placement.step_plan import alike
from ooc.fullgraph.program import Placement, TensorPlacement, Value, build
from ooc.fullgraph.resume import StepLog, key_of
from ooc.fullgraph.value_store import ValueStore
from ooc.layerwise.device_sums import device_edge_bytes, device_sum_bytes
from ooc.layerwise.edge_tiles import Tiles, open_tiles
from ooc.layerwise.executor import NodeScans
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.layerwise_pass import Progress
from ooc.layerwise.pass_plan import CHUNK_ROWS, ModelShape
from ooc.layerwise.shape import (
    besides_bytes,
    check_hub,
    device_of,
    gather_ranges,
    hidden_norms,
    least_bytes,
    over_rows,
    parts_of,
    room_in,
    shape_of,
)
from ooc.models.dropout import DropoutKeys
from ooc.models.quantization import Compression
from ooc.runtime.memory import Tidy, keep_large_blocks
from ooc.runtime.memory_plan import DEVICE_RANGES_SHARE, GATHERED_SHARE, MemoryPlan, gathered_share, plan_memory
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.atomic import remove_tree
from ooc.stores.process import resident_bytes
from ooc.stores.sizes import format_bytes

_UNMEASURED = 2
"""how much more autograd may keep than is estimated"""


def chunk_bytes(shape: ModelShape) -> int:
    """Memory of a chunk's activations and gradients (measured), where it is computed."""
    return 8 * shape.chunk_rows * shape.itemsize * shape.chunk_columns


def backward_bytes(shape: ModelShape) -> int:
    """Memory that a step takes beside what a pass does (measured): a chunk's activations and gradients, chunks on their way to
    and from the disk, and entries of both orders of the edges."""
    return chunk_bytes(shape) + 64 * 2**20


def check_model(model: nn.Module) -> None:
    """Raise ConfigError for a model that is no list of layers, of another dtype than float32 and float64, or with a norm over
    all nodes where it cannot be made exact."""
    encoder, _, decoder = parts_of(model)
    for part in (encoder, decoder):
        found = "" if part is None else over_rows(part)
        if found:
            raise ConfigError(f"an encoder or decoder is computed a few rows at a time: its {found} would see only those")
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"exact training computes in float32 or float64, and the model has parameters of {dtype}")


class FullGraph:
    """Exact steps of a model over a data set.

    folder: for what does not fit the memory; None where all is to be in memory. room: bytes for values and sums, by default
    what `budget` (by default the data set's) leaves to batches. device_memory: bytes of the GPU that computes; ranges of layers
    that gather have half of them, if there are any. Until `placement` is set, everything is on the GPU if it fits there; else
    values are retained where all fit, and otherwise on disk, and what autograd keeps is on the GPU if that fits. ranks: the
    processes that compute together, a range of nodes each; all make the same steps, each with a folder of its own; halo: how
    they exchange rows; recompute: which rows each computes instead (see `ooc.fullgraph.halo.reach`). Raises ConfigError as
    `check_model`, BudgetError where the memory is too little.

    >>> with closing(FullGraph(model, ds, Path("run/full"))) as full:
    ...     loss = full.step(loss_of)  # gradients are in the parameters' .grad
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        folder: Path | None,
        *,
        room: int | None = None,
        budget: MemoryPlan | None = None,
        engine: str = "auto",
        device_memory: int = 0,
        ranks: Ranks = ALONE,
        halo: HaloSettings = EXACT,
        recompute: Choose = recompute_none,
        compress: Compression | None = None,
    ) -> None:
        self.compress = compress
        self.model, self.whole, self._folder, self._budget, self.ranks = model, dataset, folder, budget, ranks
        check_model(model)
        self._parts, self._training = parts_of(model), model.training
        part = part_of(dataset, ranks, folder, shape_of(model, dataset, training=True), recompute)
        self.dataset, self.numbering = part.dataset, part.numbering
        self.halo = None if part.lists is None else halo.exchange(ranks, part.lists)
        ranks.together(lambda: self._open(room, part, halo, engine, device_memory))
        self.placement = self._default()

    def _open(self, room: int | None, part: Part, halo: HaloSettings, engine: str, device_memory: int) -> None:
        """What a rank does by itself."""
        model, dataset, folder = self.model, self.dataset, self._folder
        self.shape = replace(shape_of(model, dataset, training=True), recomputed=part.recomputed)
        halo.check(self.shape)
        self.on_gpu = device_of(model).type != "cpu"
        self.program = build(self.shape, self.on_gpu, not self.ranks.alone, self.compress is not None)
        besides = part.nbytes + besides_bytes(self.shape, dataset.graph) + backward_bytes(self.shape)
        for layer, lists in enumerate(part.lists or []):
            besides += halo.kept_bytes(lists, *self.program.exchanged_bytes(layer))
        if room is None:
            most = self.budget.memory
            under_way = besides - self.budget.topology  # it has the graph's pointers, which the budget took off already
            least = least_bytes(dataset.graph, self.shape, GATHERED_SHARE)
            room = room_in(self.whole, under_way, "exact training", least, budget=self.budget)
        else:
            most = resident_bytes()[0] + room + besides
        self.room = room
        gathers = self.on_gpu and device_memory > 0 and any(op.kind == "gather" for op in self.program.forward)
        self._ranges = device_memory // DEVICE_RANGES_SHARE if gathers else room
        """bytes for ranges at most"""
        self.device_room = device_memory - self._ranges if gathers else device_memory
        self.traffic = IoStats()
        tidy = Tidy(most - backward_bytes(self.shape))  # that much is allocated between two looks
        columns, dtype = {v.name: v.columns for v in self.program.values}, np.dtype(f"float{8 * self.shape.itemsize}")
        count = {value.name: value.rows for value in self.program.values}
        self.store = ValueStore(folder, engine, dataset, columns, dtype, self.traffic, tidy, count)
        self._there: DeviceValueStore | None = None
        self._make_there = partial(DeviceValueStore, engine, dataset, columns, dtype, self.traffic, tidy, device_of(model))
        self.disk: int | None = None
        """bytes that values may take on disk at a time; None: as many as all that stand there in a step"""
        self._constant: set[str] = set()
        self._placed_before = Placement({})
        self._offload = None if folder is None else OffloadFile(folder / "saved", self.traffic)
        self._scans: NodeScans | None = None
        self._check_room()

    @property
    def budget(self) -> MemoryPlan:
        """The division of the memory that its room is of."""
        if self._budget is None:
            self._budget = plan_memory(self.whole)
        return self._budget

    def _check_room(self) -> None:
        """Whether memory holds what is computed together: the largest hub, and all rows of a layer with a norm inside."""
        graph, memory = self.dataset.graph, min(gathered_share(self.room), self._ranges)
        check_hub(graph, self.shape, gathered_share(self.room), GATHERED_SHARE)
        check_hub(graph, self.shape, self._ranges, DEVICE_RANGES_SHARE, "GPU memory")
        for index, (layer, shape) in enumerate(zip(self._parts[1], self.shape.layers, strict=True)):
            found = hidden_norms(layer)
            if not found:
                continue
            if not self.ranks.alone:
                raise ConfigError(f"layer {index} has a {found} inside, which sees all nodes: train in one process")
            whole = graph.num_nodes <= CHUNK_ROWS if shape.kind else len(list(gather_ranges(graph, shape, memory, 0))) == 1
            if not whole:
                raise ConfigError(
                    f"layer {index} has a {found} inside, which sees all nodes, and its rows are computed in parts: give it "
                    'memory for all of them, or a norm of ours (norm = "batch")'
                )

    def resident(self, measured: Mapping[str, int] = MappingProxyType({})) -> Placement | None:
        """The placement of everything on the GPU; None where that is too much, where ranks exchange rows, and where torch lacks
        the features' type. measured: bytes of what autograd keeps, by value, where they are known."""
        if not self.on_gpu or not self.ranks.alone or not can_be_there(self.dataset):
            return None
        _, making = device_edge_bytes(self.shape) if self.shape.has_sums else (0, 0)
        rows = sum(value.nbytes for value in self.program.values if value.kind in ("rows", "sums", "gradient"))
        saved = [value for value in self.program.values if value.kind == "saved"]
        rows += sum(measured.get(value.name, _UNMEASURED * value.nbytes) for value in saved) + device_sum_bytes(self.shape)
        need = sum(self.copied_bytes) + max(rows, making)
        there = Placement(dict.fromkeys((value.name for value in self.program.values), TensorPlacement.DEVICE))
        return there if need <= self.device_room else None

    @property
    def copied_bytes(self) -> tuple[int, int]:
        """(of features, of edges) where they are on the GPU."""
        edges = device_edge_bytes(self.shape)[0] if self.shape.has_sums else 0
        return self.shape.num_nodes * self.shape.x_bytes, edges

    def _default(self) -> Placement:
        if (found := self.resident()) is not None:
            return found
        total, kept = self.most_bytes, [value for value in self.program.values if value.kind == "saved"]
        there = TensorPlacement.DEVICE if self.on_gpu else TensorPlacement.RETAINED
        stays = self.on_gpu and _UNMEASURED * sum(value.nbytes for value in kept) <= self.device_room
        stays = all(self.ranks.gather(stays))
        if all(self.ranks.gather(total <= self.room)):
            where = dict.fromkeys((value.name for value in self.program.values), TensorPlacement.RETAINED)
            return Placement({**where, **(dict.fromkeys((value.name for value in kept), there) if stays else {})})
        if self.program.undone_by and (found := self._inverted()) is not None:
            return found
        if self._folder is None:
            raise BudgetError(f"{format_bytes(total)} do not fit {format_bytes(self.room)}: give exact training a folder")
        saved = there if stays else TensorPlacement.RECOMPUTED
        return Placement({v.name: saved if v.kind == "saved" else TensorPlacement.DISK for v in self.program.values})

    def _inverted(self) -> Placement | None:
        """Rows of reversible layers INVERTED: all in RAM where that has room for what stands at a time, else on disk."""
        retained, costs = alike(self.program, TensorPlacement.INVERTED, TensorPlacement.RETAINED), bytes_alone(self.program)
        most = max(costs.standing_bytes(run.alive, retained)[0] for run in costs.runs(retained, first=True))
        if most <= self.room - gathered_share(self.room):
            return retained
        if self._folder is None:
            return None
        found = alike(self.program, TensorPlacement.INVERTED, TensorPlacement.DISK)
        saved = [value.name for value in self.program.values if value.kind == "saved"]
        return replace(found, placements={**found.placements, **dict.fromkeys(saved, TensorPlacement.RECOMPUTED)})

    def load(self, progress: Progress = lambda what, done, total: None) -> None:
        """Copy features and edges to the GPU, if they are to be there and are not; the first step would."""
        placement = self._bounded(self.placement)
        if placement.resident:
            self._open_scans(self._placed(placement, progress), progress)

    def step(self, loss: LossOf, progress: Progress = lambda what, done, total: None) -> float:
        """One step over the whole graph: the loss; its gradient is added to the parameters' `.grad`.

        loss: of a few nodes, by what it sums to over all (see `LossOf`). Draws keys for dropout from torch's generator as the
        model would on all nodes at once. A killed step goes on from its last log entry, if parameters, gradients, generator and
        data are as they were when it began. Raises StoreError where the disk is full or fails.
        """
        if self.model.training != self._training:
            raise ConfigError("the model was put into another mode: make another FullGraph for it")
        keep_large_blocks(True)  # a chunk's activations, made and freed in one thread
        self.store.disk.lock()
        if self._offload is not None:
            self._offload.begin()
        placement = self._bounded(self.placement)
        store = self._placed(placement, progress)
        scans, log = self._open_scans(store, progress), None
        # Ranks are not killed at the same op: they begin the step anew, as does one whose values are on the GPU alone.
        if self._folder is not None and self.ranks.alone and not placement.resident:
            log = StepLog(self._folder, self.model, key_of(self.model, self._asked))
        self.traffic.restart()
        if self.halo is not None:
            self.halo.begin(int(torch.randint(1 << 62, ())) if self.halo.draws else 0)
        modules = StepModules(self._parts, self.shape, DropoutKeys(), self.whole.num_nodes)
        made = store, scans, self._offload, self.room, self._constant
        executor = Executor(self.program, modules, *made, log, progress, self.halo, self.compress)
        with summed_gradients(self.model, self.ranks):
            found = executor.run(loss)
        found = sum_of(found, self.ranks)
        self.store.trim(self.most_bytes - self.held_bytes)  # what is done between steps relies on no more (`both_fit`)
        if log is not None:
            log.forget()
        return found

    @property
    def _asked(self) -> str:
        """What a step that was killed can go on with: data, placements, and the ranges of ops that gather, which memory
        decides."""
        placement, gathering = self._bounded(self.placement), [op.name for op in self.program.forward if op.kind == "gather"]
        ranges = [(name, placement.ranges.get(name, gathered_share(self.room))) for name in gathering]
        return f"{self.dataset.fingerprint} {sorted(placement.placements.items())} {sorted(placement.passing.items())} {ranges}"

    def _bounded(self, placement: Placement) -> Placement:
        """With no larger ranges of layers that gather than the GPU has memory for."""
        if not self.on_gpu:
            return placement
        gathering = [op.name for op in self.program.forward if op.kind == "gather"]
        asked = {name: placement.ranges.get(name, gathered_share(self.room)) for name in gathering}
        return replace(placement, ranges={name: min(nbytes, self._ranges) for name, nbytes in asked.items()})

    def _placed(self, placement: Placement, progress: Progress) -> ValueStore:
        """Where values stand from now on: in the host's memory and on disk, or all on the GPU."""
        if placement != self._placed_before:
            self._constant.clear()
            self._close_scans()
        self._placed_before, store = placement, self._store_of(placement, progress)
        store.place(placement)
        inverted = any(self.program.inverted(op, placement) for op in self.program.backward)
        store.frees = inverted or (self.disk is not None and self._disk_bytes > self.disk)
        return store

    def _store_of(self, placement: Placement, progress: Progress) -> ValueStore:
        if not placement.resident:
            self._close_there()
            return self.store
        if self._there is None:
            self.store.make_room()
            self._there = self._make_there()
        self._there.load(progress)
        return self._there

    def _open_scans(self, store: ValueStore, progress: Progress) -> NodeScans:
        if self._scans is None:
            tiles: tuple[Tiles, ...] = ()
            if store is self.store:
                tiles = open_tiles(self.dataset, store.files("edges"), self.shape, self.traffic, progress, back=True)
            made = self.dataset, self.shape, store, tiles, self.traffic, device_of(self.model)
            there = None if store is self.store else lambda done: progress("edges", done, self.shape.num_edges)
            self._scans = NodeScans(*made, keyed=True, numbering=self.numbering, there=there)
        return self._scans

    def _close_scans(self) -> None:
        if self._scans is not None:
            self._scans.close()
            self._scans = None

    def _close_there(self) -> None:
        if self._there is not None:
            self._there.close()
            self._there = None

    @property
    def bytes_exchanged(self) -> int:
        """Rows and gradients that this rank sent to others."""
        return 0 if self.halo is None else self.halo.bytes_sent

    @property
    def most_bytes(self) -> int:
        """Of all values together."""
        return sum(value.nbytes for value in self.program.values)

    @property
    def _disk_bytes(self) -> int:
        """Of all values that stand on disk at any time of a step."""
        added, values = self.program.added_to, self._standing(TensorPlacement.DISK)
        return sum(value.nbytes * (1 + (value.name in added)) for value in values if value.kind != "features")

    @property
    def held_bytes(self) -> int:
        """Of the memory that a step leaves to the next one: features, edges and sums that do not change."""
        return sum(value.nbytes for value in self._standing(TensorPlacement.RETAINED) if value.constant)

    def _standing(self, where: TensorPlacement) -> list[Value]:
        return [value for value in self.program.values if self.placement.standing(value.name) is where]

    def trim(self) -> None:
        """Give up the memory that waits to be used again, but no values."""
        self.store.trim()

    def make_room(self) -> None:
        """Give up what waits in the host's memory for the next step, which makes it again."""
        if self._there is None:
            self._close_scans()
            self._constant = {name for name in self._constant if self.store.on_disk(name)}
        self.store.make_room()

    def close(self) -> None:
        """Close everything; idempotent. What is on disk stays."""
        self._close_scans()
        self._close_there()
        self.make_room()
        if self._offload is not None:
            self._offload.close()
        self.store.close()

    def discard(self) -> None:
        """Close, and remove the folder with all that is in it."""
        self.close()
        if self._folder is not None:
            remove_tree(self._folder)
