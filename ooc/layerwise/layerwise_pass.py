"""Passes over all nodes, layer by layer and range by range of destinations: exact outputs in bounded memory.

Every layer's input is read as Rows and its output written as Rows, so a model of any depth needs no more memory than one layer,
and no node is computed twice. Each layer is planned (`ooc.layerwise.pass_plan`): sums made while its input is read
(`ooc.layerwise.aggregator`), or gathered rows of a range's sources. A killed pass in a folder goes on after its last finished
range, whose rows were synced before it was noted. (Layer-wise inference as in GraphSAGE's and DGL's examples.)

Several ranks compute a range of nodes each, into the same files of a folder that all of them see, and wait for each other
behind every layer. A rank puts the in-edges of its own range in order, so together they read and write the edges once.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ooc.layerwise.edge_tiles import FORTH, Tiles, open_tiles, tile_names
from ooc.layerwise.executor import ForwardExecutor, NodeScans
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.node_ranges import node_ranges
from ooc.layerwise.ops import LayerModules, LayerObserver
from ooc.layerwise.pass_notes import PassNotes, PassStart, start_of
from ooc.layerwise.pass_plan import CHUNK_ROWS, LayerwisePlan, Op, forward_ops, plan_layerwise, ram_bytes
from ooc.layerwise.row_files import Files, PassStore
from ooc.layerwise.shape import besides_bytes, check_hub, least_bytes, over_rows, parts_of, room_in, shape_of
from ooc.loading.feature_cache import registry_of
from ooc.models.dropout import DropoutKeys
from ooc.models.layers import evaluating
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.ranks import ALONE, Ranks
from ooc.runtime.transfer import on_host
from ooc.stores.arrays.rows import Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.atomic import removed_path
from ooc.stores.sizes import format_bytes

Progress = Callable[[str, int, int], None]
"""progress(what, nodes or edges done, in all)"""
_SAME_MEMORY = 1.1
"""A pass goes on by its old plan where that needs at most so much of what there is now: processes differ a little"""


class LayerwisePass:
    """Passes of a model over a data set; `run` gives the rows of all nodes.

    It computes in evaluation mode and float32. folder: where rows and progress are kept, unless everything fits the memory;
    None: in memory. memory: bytes for the whole process, None: what `budget` (by default the data set's) leaves to batches,
    less `beside`; room: for values and sums alone, if known. upto: stop after so many layers, without the decoder. stats: of
    all runs. ranks: of several, all make the pass and call its methods together; rows are then in the folder in any case.
    Raises ConfigError for a model that is no list of layers, BudgetError where the memory is too little.

    >>> with closing(LayerwisePass(model, ds, Path("run/sweep"))) as whole:
    ...     rows = whole.run()  # Rows [N, classes]
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
        upto: int | None = None,
        engine: str = "auto",
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.dataset, self._upto, self.ranks = model, dataset, upto, ranks
        self._room = min(ranks.gather(ranks.together(partial(self._checked, room, memory, beside, budget))))
        self.plan = ranks.decided(partial(self._planned, folder is None))
        self.nodes = node_ranges(dataset.graph, ranks.world_size)[ranks.rank]
        """those that this rank computes"""
        self.files = Files(folder, engine, self.plan.in_ram, ranks, self.nodes)
        self._folder = folder
        if folder is not None:
            shutil.rmtree(removed_path(folder), ignore_errors=True)
        self.stats = IoStats()
        self._tiles: tuple[Tiles, ...] | None = None

    def _checked(self, room: int | None, memory: int | None, beside: int, budget: MemoryPlan | None) -> int:
        """The memory for values and sums, once the model is known to be one of layers."""
        upto, dataset = self._upto, self.dataset
        self._parts = parts_of(self.model, upto)
        self._check_norms()
        self.shape = shape_of(self.model, dataset, upto)
        if room is not None:
            return room
        besides = besides_bytes(self.shape, dataset.graph)
        return room_in(
            dataset, besides, "a pass over all nodes", least_bytes(dataset.graph, self.shape), memory, beside, budget
        )

    def _planned(self, in_memory: bool) -> LayerwisePlan:
        """The plan. in_memory: whether there is no folder."""
        plan = plan_layerwise(self.shape, self._room, may_keep=self.ranks.alone)
        check_hub(self.dataset.graph, self.shape, plan.memory)
        if in_memory and not plan.in_ram:
            raise BudgetError(f"a pass in memory does not fit {format_bytes(self._room)}: give it a folder")
        return plan

    def _check_norms(self) -> None:
        """A norm over all rows would see a few at a time, in evaluation too."""
        with evaluating(self.model):
            found = over_rows(self.model)
        if found and self.dataset.num_nodes > CHUNK_ROWS:
            raise ConfigError(
                f"{type(self.model).__name__} has a {found}, which sees all nodes, and a pass computes rows in parts: "
                "score it on sampled batches"
            )

    def _resumed(self, key: str) -> PassStart | None:
        """Where to go on, None to begin; takes over the plan of the pass that was interrupted, where it does not need more."""
        notes = self.files.progress()
        if not notes or any(note.get("key") != key for note in notes):
            return None
        kept = LayerwisePlan.of(notes[0]["plan"])
        if kept.memory > self._room * _SAME_MEMORY:
            return None
        self.plan = kept
        return start_of(notes, self.nodes)

    method = ""
    """see `ExactPass`"""

    @property
    def columns(self) -> int:
        """Numbers per row of the result."""
        return self.shape.out

    def lock(self) -> None:
        """Have the folder for this process until `close`. Raises StoreError if another process has it."""
        self.files.lock()

    def was_begun(self) -> bool:
        """Whether the folder holds what an earlier process came to in this pass: same parameters, same data."""
        notes = PassNotes(self._folder, self.ranks).read()  # also where this process needs no folder
        return bool(notes) and all(note.get("key") == self.fingerprint() for note in notes)

    def fingerprint(self) -> str:
        """A digest of the parameters and the data."""
        return digest(f"{self.dataset.fingerprint} {self._upto} {self.model}", on_host(sorted(self.model.state_dict().items())))

    @property
    def spare(self) -> int:
        """Bytes that a pass leaves of its memory, for rows of batches; none where it does not keep everything in memory."""
        return max(0, self._room - ram_bytes(self.shape)) if self.plan.in_ram else 0

    @property
    def ops(self) -> tuple[Op, ...]:
        """What is done, in order, after the edges are put in order."""
        return forward_ops(self.shape, self.plan)

    def run(
        self, progress: Progress = lambda what, done, total: None, *, observer: LayerObserver | None = None, anew: bool = False
    ) -> Rows:
        """Run, from where an earlier process was interrupted on; float32 Rows [N, columns], good until the next run.

        observer: is shown every layer's rows; anew: from the beginning in any case, as a pass that was not observed must be.
        Raises StoreError where the disk fails or is full (what was finished is kept), or another process uses the folder.
        """
        self.files.lock()
        stored = self.dataset.stored("x")
        registry = registry_of(stored)
        key = self.fingerprint()
        going_on = None if anew else self._resumed(key)  # with its own plan, on which the room depends
        scoring = registry.begin_scans(self.spare)  # where the rows that wait for the next batches have no room, they go
        try:
            if going_on is None:
                self.files.forget()
            at, node = going_on or (0, self.nodes[0])
            if self._tiles is None:
                self._tiles = self._open_tiles(progress)
            self.stats.restart()
            there = registry.whole(stored.shape[0]) if self.spare else None
            store = PassStore(self.files, self.dataset, self.shape, self.plan, self.stats, there)
            modules = LayerModules(self._parts, self.shape, DropoutKeys(), observer)
            scans = NodeScans(self.dataset, self.shape, store, self._tiles, self.stats, modules.device)
            executor = ForwardExecutor(modules, store, scans)
            try:
                with evaluating(self.model):
                    for number in range(at, len(self.ops)):
                        self._run_op(executor, store, number, node if number == at else self.nodes[0], key, progress)
                rows: Rows = store.open("out")
                self.files.keep_only({"out", *self._tile_names})
                return rows
            finally:
                scans.close()
                store.close()
        finally:
            scoring.end()

    def _run_op(
        self, executor: ForwardExecutor, store: PassStore, number: int, start: int, key: str, progress: Progress
    ) -> None:
        """Run an op from node `start` on, and note how far it came where it can go on later."""
        op, (first, last), observer = self.ops[number], self.nodes, executor.modules.observer
        self.files.keep_only({*self._tile_names, *self._needed_files(store, number)})
        store.make(op.writes)

        def note(stop: int) -> None:
            written = [rows for rows in map(self.files.opened, store.files_of(op.writes)) if rows is not None]
            self.files.note({"key": key, "plan": asdict(self.plan), "stage": number, "next": stop}, written)

        if not self.ranks.alone:
            note(start)
            self.files.take_over()
        for stop in executor.run_op(op, self.plan, start, self.nodes) if start < last else ():
            store.drain()
            if observer is not None and self.ranks.alone:
                observer.note()
            if observer is None or self.ranks.alone:
                note(stop)
            progress(_words(op), stop - first, last - first)
        self.ranks.barrier()
        if observer is not None and not self.ranks.alone:  # its note is one of all ranks, whose ranges end at other times
            observer.note()
            note(last)
            self.ranks.barrier()

    def _needed_files(self, store: PassStore, number: int) -> set[str]:
        """Files that an op and those after it read of what is made, and those that it writes."""
        ops = self.ops
        made = store.files_of(name for op in ops[: number + 1] for name in op.writes)
        read = store.files_of(name for op in ops[number:] for name in (op.summed, *op.reads) if name)
        return {"out", *store.files_of(ops[number].writes), *(made & read)}

    def _open_tiles(self, progress: Progress) -> tuple[Tiles, ...]:
        """The edges in the pass's order: those an earlier pass left in the folder, or dealt out now."""
        share = None if self.ranks.alone else (self.ranks.rank, self.nodes)
        return open_tiles(self.dataset, self.files, self.shape, self.stats, progress, back=False, share=share)

    @property
    def _tile_names(self) -> set[str]:
        """The files of all ranks' tiles."""
        return {name for rank in range(self.ranks.world_size) for name in tile_names(FORTH, rank)}

    def make_room(self) -> None:
        """Give up what the last run kept in memory, the rows it returned with it."""
        self._tiles = None
        self.files.close_rows()

    def close(self) -> None:
        """Close all rows; idempotent. What is on disk stays, so that a pass can go on."""
        self._tiles = None
        self.files.close()

    def discard(self) -> None:
        """Close, and remove the folder with all that is in it: also what a process with less memory left there."""
        self._tiles = None
        try:
            self.files.discard()
        finally:
            self.close()


def digest(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of a text and of the bytes of named tensors in the host's memory, in their order."""
    hashed = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        hashed.update(name.encode())
        hashed.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _words(op: Op) -> str:
    """What an op does, for people."""
    if op.kind == "add":
        return f"layer {op.layer}, sums {op.name.partition('.')[2]}"
    return "features" if op.kind == "map" else f"layer {op.layer}"
