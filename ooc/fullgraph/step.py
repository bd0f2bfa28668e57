"""Exact training on the whole graph: a step's gradient is that of all labelled nodes, by passes over all nodes in bounded
memory."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from ooc.fullgraph.activation_offload import OffloadFile
from ooc.fullgraph.executor import Executor, LossOf, Progress
from ooc.fullgraph.ir import Placement, TensorPlacement
from ooc.fullgraph.ops import StepModules
from ooc.fullgraph.program import FullShape, build
from ooc.fullgraph.resume import StepLog, key_of
from ooc.fullgraph.shape import dtype_of, full_shape, hidden_norms
from ooc.fullgraph.value_store import ValueStore
from ooc.layerwise.edge_order import EdgeTiles
from ooc.layerwise.edge_tiles import Tiles
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.pass_plan import CHUNK_ROWS, cell_rows
from ooc.layerwise.scans import NodeScans
from ooc.layerwise.shape import ALLOWED, besides_bytes, check_hub, gather_ranges, parts_of, piece_rows_of, room_in
from ooc.models.dropout import DropoutKeys
from ooc.runtime.memory import Tidy, keep_large_blocks
from ooc.runtime.memory_plan import MemoryPlan, plan_memory
from stores.dataset import Dataset
from stores.errors import BudgetError, ConfigError
from stores.io.atomic import remove_tree
from stores.process import resident_bytes
from stores.sizes import format_bytes


def backward_bytes(shape: FullShape) -> int:
    """Memory that a step takes beside what a pass does (measured): a chunk's activations and gradients, chunks on their way to
    and from the disk, and entries of both orders of the edges."""
    model = shape.model
    widest = max([model.x_width, model.encoded, model.out, *[max(layer.width, layer.out) for layer in model.layers]])
    return 16 * CHUNK_ROWS * shape.itemsize * widest + 64 * 2**20


class FullGraph:
    """Exact steps of a model over a data set.

    folder: for what does not fit the memory; None where all is to be in memory. memory: bytes for the whole process, None:
    what `budget` (by default the data set's) leaves to batches, less `beside`; room: for values and sums alone, where that is
    known. placement: a placement for every value; by default all are retained where they fit, and else on disk. Raises
    ConfigError for a model that is no list of layers, BudgetError where the memory is too little.

    >>> with closing(FullGraph(model, ds, Path("run/full"))) as full:
    ...     loss = full.step(loss_of)  # gradients are in the parameters' .grad
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        folder: Path | None,
        *,
        memory: int | None = None,
        room: int | None = None,
        beside: int = 0,
        budget: MemoryPlan | None = None,
        placement: Placement | None = None,
        engine: str = "auto",
    ) -> None:
        self.model, self.dataset, self._folder, self._budget = model, dataset, folder, budget
        self._parts = parts_of(model)
        self.shape = full_shape(model, dataset)
        self._training = model.training
        self.room = self._room_in(memory, beside) if room is None else room
        self.program = build(self.shape)
        self.traffic = IoStats()
        tidy = Tidy(self._whole(memory, room) - backward_bytes(self.shape))  # that much is allocated between two looks
        dtype = np.dtype(f"float{8 * self.shape.itemsize}")
        self.store = ValueStore(folder, engine, dataset, self.program, dtype, self.traffic, tidy)
        self.disk: int | None = None
        """bytes that values may take on disk at a time; None: as many as all that stand there in a step"""
        self._constant: set[str] = set()
        self._tiles: tuple[Tiles, ...] = ()
        self._spool = None if folder is None else OffloadFile(folder / "saved", self.traffic.written, self.traffic.read)
        self._node_scans: NodeScans | None = None
        self._check(dtype_of(model))
        self.placement = self._default() if placement is None else placement

    @property
    def budget(self) -> MemoryPlan:
        """The division of the memory that its room is of."""
        if self._budget is None:
            self._budget = plan_memory(self.dataset)
        return self._budget

    def _room_in(self, memory: int | None, beside: int) -> int:
        besides = self._besides
        if memory is None:  # `besides` has the graph's pointers and what libraries allocate, which the budget took off already
            besides -= self.budget.topology + ALLOWED
        return room_in(self.dataset, besides, "exact training", memory, beside, self._budget)

    def _whole(self, memory: int | None, room: int | None) -> int:
        """Bytes for the process: where only the room is known, what it has now with all that a step takes."""
        if room is not None:
            return resident_bytes()[0] + room + self._besides
        return self.budget.memory if memory is None else memory

    @property
    def _besides(self) -> int:
        """Memory that a step takes beside values and sums."""
        return besides_bytes(self.shape.model, self.dataset.graph) + backward_bytes(self.shape)

    def _check(self, dtype: torch.dtype) -> None:
        check_hub(self.dataset.graph, self.shape.model, self.room // 2)
        for index, layer in enumerate(self._parts[1]):
            found = hidden_norms(layer)
            if not found:
                continue
            whole = self.dataset.num_nodes <= CHUNK_ROWS if self.shape.model.layers[index].kind else self._at_once(index)
            if not whole:
                raise ConfigError(
                    f"layer {index} has a {found} inside, which sees all nodes, and its rows are computed in parts: give it "
                    'memory for all of them, or a norm of ours (norm = "batch")'
                )

    def _at_once(self, index: int) -> bool:
        return len(list(gather_ranges(self.dataset.graph, self.shape.model.layers[index], self.room // 2, 0))) == 1

    def _default(self) -> Placement:
        total = self.most_bytes
        if total <= self.room:
            return Placement({value.name: TensorPlacement.RETAINED for value in self.program.values})
        if self._folder is None:
            raise BudgetError(f"{format_bytes(total)} do not fit {format_bytes(self.room)}: give exact training a folder")
        placements = {
            v.name: TensorPlacement.RECOMPUTED if v.kind == "saved" else TensorPlacement.DISK for v in self.program.values
        }
        return Placement(placements)

    def step(self, loss: LossOf, progress: Progress = lambda what, done, total: None) -> float:
        """One step over the whole graph: the loss; its gradient is added to the parameters' `.grad`.

        loss: of a few nodes, by what it sums to over all (see `LossOf`). Draws keys for dropout from torch's generator as the
        model would on all nodes at once. A step that was killed goes on where it was noted last, if parameters, gradients,
        generator and data are as they were when it began. Raises StoreError where the disk is full or fails.
        """
        if self.model.training != self._training:
            raise ConfigError("the model was put into another mode: make another FullGraph for it")
        keep_large_blocks(True)  # a chunk's activations, made and freed in one thread
        self.store.disk.lock()
        if self._spool is not None:
            self._spool.begin()
        if self.placement != self.store.placement:
            self._constant.clear()
        self.store.place(self.placement)
        self.store.frees = self.disk is not None and self._disk_bytes > self.disk
        node_scans = self._open_scans(progress)
        log = None if self._folder is None else StepLog(self._folder, self.model, key_of(self.model, self._placed))
        self.traffic.restart()
        parts = StepModules(self._parts, self.shape, DropoutKeys())
        stepper = Executor(
            self.program,
            self.placement,
            self.shape,
            parts,
            self.store,
            node_scans,
            self._spool,
            self.traffic,
            self.room,
            self._constant,
            log,
            progress,
        )
        found = stepper.run(loss)
        self.store.trim(self.most_bytes - self.held_bytes)  # what is done between steps relies on no more (`both_fit`)
        if log is not None:
            log.forget()
        return found

    @property
    def _placed(self) -> str:
        """What a step that was killed can go on with: data, placements, and the ranges of ops that gather, which memory
        decides."""
        placement, gathering = self.placement, [op.name for op in self.program.forward if op.kind == "gather"]
        ranges = [(name, placement.ranges.get(name, self.room // 2)) for name in gathering]
        return f"{self.dataset.fingerprint} {sorted(placement.placements.items())} {sorted(placement.passing.items())} {ranges}"

    def _open_scans(self, progress: Progress) -> NodeScans:
        if self._node_scans is not None:
            return self._node_scans
        model = self.shape.model
        if any(layer.kind for layer in model.layers):
            files = self.store.files("edges")
            edges = EdgeTiles(self.dataset, files, piece_rows_of(model), cell_rows(model), weighted=model.slot_bytes > 8)

            def done(count: int) -> None:
                progress("edges", count, model.num_edges)

            self._tiles = edges.forth(done), edges.back(done)
            self.traffic.bytes_read += edges.bytes_read
            self.traffic.bytes_written += edges.bytes_written
        device = torch.device("cpu")
        self._node_scans = NodeScans(self.dataset, model, self.store, self._tiles, self.traffic, device, keyed=True)
        return self._node_scans

    @property
    def most_bytes(self) -> int:
        """Of all values together."""
        return sum(value.nbytes for value in self.program.values)

    @property
    def _disk_bytes(self) -> int:
        """Of all values that stand on disk at any time of a step."""
        added = self.program.added_to
        standing = [
            v for v in self.program.values if v.kind != "features" and self.placement.standing(v.name) is TensorPlacement.DISK
        ]
        return sum(value.nbytes * (1 + (value.name in added)) for value in standing)

    @property
    def held_bytes(self) -> int:
        """Of the memory that a step leaves to the next one: features, edges and sums that do not change."""
        return sum(
            v.nbytes for v in self.program.values if v.constant and self.placement.standing(v.name) is TensorPlacement.RETAINED
        )

    def trim(self) -> None:
        """Give up the memory that waits to be used again, but no values."""
        self.store.trim()

    def make_room(self) -> None:
        """Give up what waits in memory for the next step, which makes it again."""
        if self._node_scans is not None:
            self._node_scans.close()
            self._node_scans = None
        self._tiles = ()
        self._constant = {name for name in self._constant if self.store.on_disk(name)}
        self.store.make_room()

    def close(self) -> None:
        """Close everything; idempotent. What is on disk stays."""
        self.make_room()
        if self._spool is not None:
            self._spool.close()
        self.store.close()

    def discard(self) -> None:
        """Close, and remove the folder with all that is in it."""
        self.close()
        if self._folder is not None:
            remove_tree(self._folder)
