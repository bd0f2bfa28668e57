"""Steps of LightGCN over the whole graph: exact propagation and gradient, in blocks of columns."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from torch import Tensor

from ooc.config.lightgcn import LightGCNConfig
from ooc.history.column_blocks import MOVING, StoredBlocks, block_bytes, column_bytes
from ooc.history.grown_table import moved_rows
from ooc.history.history import Growth
from ooc.history.propagated_table import PropagatedRows, PropagatedTable
from ooc.layerwise.propagation import SymmetricAdjacency
from ooc.loading.relation_links import RelationLinks
from ooc.planning.table_plan import Exchanged, TablePlan
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import plan_memory
from ooc.stores.arrays.bucket_rows import BucketRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.io.atomic import remove_tree
from ooc.stores.sizes import format_bytes
from ooc.training.lightgcn_batches import LinkBatch, LinkBatches
from ooc.training.propagation_steps import WORKING, PropagationSteps

FOLDER, BEST = "table", "best"
"""of the rows with their moments; name of the view of the best rows on validation"""

_SAME_MEMORY = 0.1
"""of the memory for batches that a process may have less than the one that began the run, as what it holds differs a little"""

_MORE = 1.5
"""of the bytes that lack, what to give: up to a quarter of it is for the links"""


class WholeGraphSteps(PropagationSteps):
    """Every row is changed by the exact gradient of a batch of links; see `PropagationSteps`."""

    folders = f"{FOLDER}*"

    def __init__(self, config: LightGCNConfig, dataset: Dataset, links: RelationLinks, batches: LinkBatches) -> None:
        super().__init__(config, dataset, links, batches)
        self.budget = plan_memory(dataset)
        self._columns, self.room = self._divided()
        self._now: tuple[int, int] | None = None
        self._rows: tuple[LinkBatch, PropagatedRows] | None = None

    @property
    def columns(self) -> list[int]:
        return self._columns

    def _divided(self) -> tuple[list[int], int]:
        """(columns of each block, blocks that memory holds). Raises BudgetError where it does not hold a column of each."""
        width, column, working, room = self._sizes
        if room >= width * (column + working):
            return [width], 1
        most = room // (MOVING * column + working)
        if most < 1:
            need = format_bytes(_MORE * (MOVING * column + working - room))
            raise BudgetError(
                f"a column of {self.links.num_nodes:,} rows and the links do not fit the memory: give {need} more"
            )
        fitting = [own for own in range(1, width + 1) if width % own == 0 and own <= most]
        own = min(fitting, key=lambda each: (self._step_bytes(each), -each))
        return [own] * (width // own), self._held(own)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """(columns, bytes of one with its state, of one that is worked on, of memory for all of them)."""
        rows, room = self.links.num_nodes, self.budget.batches - self.adjacency_bytes(self.adjacency_room)
        return self.config.hidden, column_bytes(rows), WORKING * 4 * rows, room

    def _step_bytes(self, own: int) -> int:
        """Bytes that a step reads and writes with blocks of so many columns, those of links among them."""
        width, column, _, _ = self._sizes
        return 2 * own * column * _moved(width // own, self._held(own)) + self.neighbor_bytes * self._passes(width // own)

    def _passes(self, blocks: int) -> int:
        """Over the file of the links in a step; 0 where memory has them."""
        return 2 * self.config.layers * blocks if self.neighbor_bytes > self.adjacency_room else 0

    def _held(self, own: int) -> int:
        """Blocks of so many columns that memory holds, at least those that move."""
        width, column, working, room = self._sizes
        stay = (room - own * (MOVING * column + working)) // (own * column)
        return min(width // own, MOVING + max(0, stay))

    def _check_room(self) -> None:
        """Raise BudgetError where memory does not hold the blocks that a run began with."""
        own, (_, column, working, room) = self.columns[0], self._sizes
        need = own * (min(MOVING, len(self.columns)) * column + working)
        if need > room + _SAME_MEMORY * self.budget.batches:
            raise BudgetError(
                f"blocks of {own} columns, with which {self.config.out} began, do not fit the memory: give "
                f"{format_bytes(_MORE * (need - room))} more"
            )

    def predict(self) -> TablePlan:
        rows, parts, own, steps = self.links.num_nodes, len(self.columns), self.columns[0], self.batches.steps_per_epoch
        moved = _moved(parts, self.room)
        passes = steps * self._passes(parts)
        return TablePlan(
            budget=self.budget,
            unit="blocks of columns",
            rows=rows,
            width=self.config.hidden,
            row_bytes=column_bytes(self.config.hidden),
            parts=parts,
            part_bytes=block_bytes(rows, own),
            in_memory=self.room,
            trained=1,
            steps_per_epoch=steps,
            first=Exchanged((steps - 1) * moved, steps * moved),
            later=Exchanged(steps * moved, steps * moved),
            link_bytes_read=self.neighbor_bytes * passes,
            spare=self.spare,
        )

    @property
    def adjacency_room(self) -> int:
        return self.budget.batches // 4

    @property
    def spare(self) -> int:
        rows, own = self.links.num_nodes, self.columns[0]
        used = self.adjacency_bytes(self.adjacency_room) + WORKING * 4 * rows * own + self.room * own * column_bytes(rows)
        return max(0, self.budget.batches - used)

    @property
    def described(self) -> str:
        blocks = len(self.columns)
        return "in memory" if self.room >= blocks else f"{blocks} blocks of {self.columns[0]} columns, {self.room} in memory"

    def open(self, saved: dict[str, Any] | None, growth: Growth | None, opened: ExitStack, engine: str) -> None:
        state = None if saved is None else saved["table"]
        rows, self._folder = self.links.num_nodes, FOLDER if state is None else state["folder"]
        if state is not None:
            self._columns = list(state["columns"])
            self.room = self._held(self.columns[0])
            self._check_room()
        if state is None:
            remove_tree(self.config.out / FOLDER)  # of a run that was killed before its first checkpoint
            files = StoredBlocks.create(self.config.out / FOLDER, rows, self.columns)
        else:
            files = BucketRows.open(self.config.out / self._folder, state["blocks"])
        grows = state is not None and (state["rows"], state["first"]) != (rows, self.links.first)
        room = min(MOVING, len(self.columns)) if grows else self.room  # what has grown is read once, beside the larger blocks
        blocks = self._blocks(files, rows if state is None else state["rows"], room)
        if grows:
            assert state is not None
            blocks = self._grown(blocks, state)
        self.blocks = opened.enter_context(closing(blocks))
        self._steps_before = 0 if state is None else int(state["steps"])

    def _blocks(self, files: BucketRows, rows: int, room: int) -> StoredBlocks:
        return StoredBlocks(files, rows, self.columns, room, key(self.config.seed, Purpose.TABLE), self.config.init)

    def _grown(self, before: StoredBlocks, state: dict[str, Any]) -> StoredBlocks:
        """The blocks with rows of the nodes that are new, in another place."""
        rows, first = self.links.num_nodes, self.links.first
        self._folder = f"{FOLDER}-{rows}"
        path = self.config.out / self._folder
        remove_tree(path)  # of a run that was killed before its first checkpoint
        larger = self._blocks(StoredBlocks.create(path, rows, self.columns), rows, self.room)
        with closing(before):
            larger.take_rows(before, moved_rows(state["first"], state["rows"], first))
        return larger

    def prepare(self, adjacency: SymmetricAdjacency) -> None:
        super().prepare(adjacency)
        self.table = PropagatedTable(self.blocks, adjacency, self.config.layers, self._steps_before)

    def of(self, epoch: int, step: int, stop: int) -> Iterator[tuple[int, int]]:
        for number in range(step, stop):
            yield epoch, number

    def rows(self, batch: tuple[int, int]) -> tuple[LinkBatch, PropagatedRows]:
        """See `PropagationSteps`: rows that the step before has propagated, where there was one."""
        if self._now != batch or self._rows is None:
            links = self.batches.of(*batch)
            self._now, self._rows = batch, (links, self.table.rows(links.node))
        return self._rows

    def update(self, lr: float, last: bool) -> None:
        """Change all rows, and propagate them for the next step, in the same pass over the blocks."""
        assert self._now is not None
        assert self._rows is not None
        (epoch, step), (links, rows) = self._now, self._rows
        after = (epoch, step + 1) if step + 1 < self.batches.steps_per_epoch else (epoch + 1, 0)
        following = None if last or after[0] >= self.config.epochs else self.batches.of(*after)
        nodes = np.empty(0, np.int64) if following is None else following.node
        found = self.table.step(links.node, rows, lr, nodes)
        self._now, self._rows = (None, None) if following is None else (after, (following, found))

    def keep_best(self, epoch: int) -> None:
        self.blocks.keep(BEST)

    def load(self, block: int, best: int | None) -> Tensor:
        return self.blocks.load(block)[0] if best is None else self.blocks.load_kept(block, BEST)

    def state(self) -> dict[str, Any]:
        about = {"columns": self.columns, "steps": self.table.steps, "folder": self._folder}
        return {"table": {**about, **self.numbering, "blocks": self.blocks.state()}}

    def commit(self, best: int | None) -> None:
        self.blocks.files.commit()

    def counts(self) -> dict[str, Any]:
        files = self.blocks.files
        return {"history_bytes_read": files.bytes_read, "history_bytes_written": files.bytes_written, "stages": {}}

    @property
    def folder(self) -> str:
        return self._folder


def _moved(blocks: int, held: int) -> int:
    """Blocks that a step reads, and writes, where memory holds so many of them."""
    return 0 if held >= blocks else blocks + MOVING - held
