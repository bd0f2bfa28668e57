"""The mode "lightgcn": rows of nodes behind LightGCN's propagation over the whole graph, exact in every step."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.config.base import RunConfig
from ooc.config.lightgcn import LightGCNConfig
from ooc.history.column_blocks import MOVING, StoredBlocks, block_bytes, column_bytes
from ooc.history.grown_table import moved_rows
from ooc.history.history import Growth
from ooc.history.propagated_rows import write_propagated
from ooc.history.propagated_table import PropagatedRows, PropagatedTable
from ooc.layerwise.filtered_ranks import TableInOrder
from ooc.layerwise.propagation import SymmetricAdjacency
from ooc.loading.relation_links import RelationLinks, RelationSplit
from ooc.metrics.link_losses import LinkLoss
from ooc.models.edge_decoders import DotDecoder
from ooc.models.link_scores import DotScorer
from ooc.planning.over_ranks import RanksPlan
from ooc.planning.table_plan import Exchanged, TablePlan
from ooc.runtime.keyed_random import Cursor, Purpose, key, seeds_of, steps_of
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.ranks import ALONE, Ranks
from ooc.sampling.bucket_draws import drawn_nodes
from ooc.sampling.links import EdgeLookup
from ooc.stores.arrays.bucket_rows import BucketRows
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.atomic import remove_tree
from ooc.stores.sizes import format_bytes
from ooc.training import checkpoint
from ooc.training.link_mode import link_type
from ooc.training.mode import Mode, RunContext, RunState, Scores
from ooc.training.run import MODEL
from ooc.training.table_lists import ranked_scores
from ooc.training.table_memory import lists_bytes
from ooc.training.trained_table import TrainedTable, check_numbering

FOLDER, EMBEDDINGS = "table", "embeddings"
"""of the rows with their moments; of what they become behind the propagation, by node, once the run has ended"""
NOW = f"{EMBEDDINGS}-now"
"""of the same while they are scored"""
BEST = "best"
"""name of the view of the best rows on validation"""
_WORKING = 6
"""blocks' rows that are in memory while one is propagated, beside its own"""


class LinkBatch(NamedTuple):
    """Links of a step: the nodes that they and their negatives have, each once, and where theirs are among these."""

    node: Ids
    source: Tensor
    """int64[b]"""
    target: Tensor
    negative: Tensor
    """int64[b, ratio], or int64[ratio] where the batch shares them"""


class LightGCNMode(Mode):
    """Every row is changed by the exact gradient of a batch of links; see `Mode`."""

    config: LightGCNConfig
    auto_device = "cpu"
    typed = True
    has_table = True
    plans_unopened = True
    saves_device = "a smaller `hidden`"

    def __init__(self, config: LightGCNConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.key = link_type(config.edge_type, dataset)
        self.links = RelationLinks(dataset, config.edge_type, relations=False)
        edges = dataset.edges(self.key)
        stored = config.takes_split(bool(edges.splits))
        self.split = RelationSplit(self.links, None if stored else config.shares, config.train_split, config.seed)
        self.lookup = EdgeLookup(edges.graph)
        self.train: Members = self.split.members(config.train_split)[0]
        if not len(self.train):
            raise ConfigError(f"{config.store} has no edges left to train on: give a smaller val and test")
        names = self.split.names
        config.check_parts(names)
        if config.needs_scores and not (config.val_split in names and self.split.count(config.val_split)):
            raise ConfigError(f"{config.needs_scores} needs edges to validate on, and there are none: leave it out")
        self.model, self.monitor = DotDecoder(), config.monitored
        self.loss_of = LinkLoss(config.loss)
        self.budget = plan_memory(dataset)
        self.columns, self.room = self._divided()
        self._now: tuple[int, int] | None = None
        self._rows: PropagatedRows | None = None
        self._batch: LinkBatch | None = None

    @classmethod
    @contextmanager
    def trained_table(cls, run: Path, config: LightGCNConfig, dataset: Dataset, ended: Any) -> Iterator[TrainedTable]:
        """See `Mode`: the rows behind the propagation."""
        links = RelationLinks(dataset, config.edge_type, relations=False)
        with closing(DiskRows.open(run / ended[EMBEDDINGS])) as rows:
            check_numbering(run, links, {"rows": rows.shape[0], **ended})
            yield TrainedTable(dataset, links, DotScorer(config.hidden), TableInOrder(rows))

    def _divided(self) -> tuple[list[int], int]:
        """(columns of each block, blocks that memory holds). Raises BudgetError where it does not hold a column of each."""
        width, column = self.config.hidden, column_bytes(self.links.num_nodes)
        working = _WORKING * 4 * self.links.num_nodes
        room = self.budget.batches - self._adjacency_bytes()
        if room >= width * (column + working):
            return [width], 1
        most = room // (MOVING * column + working)
        own = max((each for each in range(1, width + 1) if width % each == 0 and each <= most), default=0)
        if not own:
            need = format_bytes(MOVING * column + working - room)
            raise BudgetError(
                f"a column of {self.links.num_nodes:,} rows and the links do not fit the memory: give {need} more"
            )
        stay = (room - own * (MOVING * column + working)) // (own * column)
        return [own] * (width // own), min(width // own, MOVING + stay)

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        return config

    def predict(self, seconds: float, variants: bool) -> TablePlan:
        """See `Mode`; by the numbers that a run is divided by."""
        rows, parts, own, steps = self.links.num_nodes, len(self.columns), self.columns[0], self.steps_per_epoch
        entries, moved = 8 * len(self.train), 0 if self.room >= parts else parts + MOVING - self.room
        passes = 2 * self.config.layers * parts * steps if entries > self._adjacency_room else 0
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
            link_bytes_read=entries * passes,
            spare=self._spare,
        )

    def predict_ranks(self, nproc: int, bandwidth: int) -> RanksPlan:
        raise ConfigError("nproc does not apply to mode lightgcn, which trains in one process: leave it out")

    @property
    def _spare(self) -> int:
        """Bytes that neither links nor rows take."""
        rows, own = self.links.num_nodes, self.columns[0]
        used = self._adjacency_bytes() + _WORKING * 4 * rows * own + self.room * own * column_bytes(rows)
        return max(0, self.budget.batches - used)

    def _adjacency_bytes(self) -> int:
        """Of the neighbors that are in memory, and of two numbers a node."""
        entries = 8 * len(self.train)
        return 16 * self.links.num_nodes + min(entries, self._adjacency_room)

    @property
    def _adjacency_room(self) -> int:
        """Bytes of memory that neighbors may take; more of them are in a file."""
        return self.budget.batches // 4

    @property
    def steps_per_epoch(self) -> int:
        return steps_of(len(self.train), self.config.batch_size)

    @property
    def seeds_per_step(self) -> int:
        return self.config.batch_size

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Of no parameter: the rows' is their table's."""
        return torch.optim.SGD([torch.zeros(())], self.config.lr)

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        self.run = run
        state = None if saved is None else saved["table"]
        rows, self._folder = self.links.num_nodes, FOLDER if state is None else state["folder"]
        if state is not None:
            self.columns = list(state["columns"])
            self.room = min(len(self.columns), max(MOVING, self.room))
        if state is None:
            remove_tree(self.config.out / FOLDER)  # of a run that was killed before its first checkpoint
            files = StoredBlocks.create(self.config.out / FOLDER, rows, self.columns)
        else:
            files = BucketRows.open(self.config.out / self._folder, state["blocks"])
        blocks = self._blocks(files, rows if state is None else state["rows"])
        if state is not None and (state["rows"], state["first"]) != (rows, self.links.first):
            blocks = self._grown(blocks, state)
        self.blocks = self.opened.enter_context(closing(blocks))
        self.kept = state is not None and growth is None and bool(state["kept"])
        self._steps_before = 0 if state is None else int(state["steps"])

    def _blocks(self, files: BucketRows, rows: int) -> StoredBlocks:
        return StoredBlocks(files, rows, self.columns, self.room, key(self.config.seed, Purpose.TABLE), self.config.init)

    def _grown(self, before: StoredBlocks, state: dict[str, Any]) -> StoredBlocks:
        """The blocks with rows of the nodes that are new, in another place."""
        rows, first = self.links.num_nodes, self.links.first
        self._folder = f"{FOLDER}-{rows}"
        path = self.config.out / self._folder
        remove_tree(path)  # of a run that was killed before its first checkpoint
        larger = self._blocks(StoredBlocks.create(path, rows, self.columns), rows)
        with closing(before):
            larger.take_rows(before, moved_rows(state["first"], state["rows"], first))
        return larger

    def prepare(self) -> None:
        """Put the links that carry messages in order."""
        members = [self.train]
        pieces = lambda: ((head, tail) for head, _, tail in self.links.pieces(members))  # noqa: E731
        made = self.config.out / "neighbors"
        adjacency = SymmetricAdjacency.of(pieces, self.links.num_nodes, max(2**24, self._adjacency_room), made)
        self.table = PropagatedTable(self.blocks, adjacency, self.config.layers, self._steps_before)

    def notes(self) -> list[str]:
        rows, blocks = self.links.num_nodes, len(self.columns)
        where = "in memory" if self.room >= blocks else f"{blocks} blocks of {self.columns[0]} columns, {self.room} in memory"
        parts = ", ".join(f"{self.split.count(name):,} of {name}" for name in self.split.names)
        return [*super().notes(), f"links: {parts}; {rows:,} rows, {where}"]

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        for number in range(step, stop):
            yield epoch, number

    def links_of(self, epoch: int, step: int) -> LinkBatch:
        """The batch of a step: a function of (seed, epoch, step)."""
        config = self.config
        slot = self.train[seeds_of(self.train, Cursor(epoch, step), config.batch_size, True, config.seed)]
        source, target = self.lookup.ends(slot)
        source, target = source + self.links.heads.start, target + self.links.tails.start
        count = config.ratio * (1 if config.loss == "softmax" else len(slot))
        draw = key(config.seed, Purpose.NEGATIVE, epoch, step)
        negative = drawn_nodes(draw, count, np.zeros(1, np.int64), 1, self.links.tails)
        node, place = np.unique(np.concatenate([source, target, negative]), return_inverse=True)
        first, second, third = np.split(place, [len(slot), 2 * len(slot)])
        shape = (-1,) if config.loss == "softmax" else (len(slot), config.ratio)
        return LinkBatch(node, torch.from_numpy(first), torch.from_numpy(second), torch.from_numpy(third.reshape(shape)))

    def loss(self, batch: Any) -> Tensor:
        """The loss of the links of (epoch, step), by rows that a step before has propagated where there was one."""
        if self._now != batch or self._rows is None:
            self._batch = self.links_of(*batch)
            self._rows, self._now = self.table.rows(self._batch.node), batch
        assert self._batch is not None
        return self._loss(self._batch, self._rows)

    def _loss(self, links: LinkBatch, found: PropagatedRows) -> Tensor:
        config, rows = self.config, found.propagated
        if config.similarity == "cosine":
            rows = F.normalize(rows, dim=-1)
        source, target, negative = rows[links.source], rows[links.target], rows[links.negative]
        positive = (source * target).sum(-1) / config.temperature
        if config.loss == "softmax":
            known = links.negative[None] == links.target[:, None]
            loss = self.loss_of(positive, source @ negative.t() / config.temperature, known)
        else:
            loss = self.loss_of(positive, (source.unsqueeze(1) * negative).sum(-1))
        if not config.l2:
            return loss
        places = links.source, links.target, links.negative.flatten()
        return loss + config.l2 / 2 * sum(found.own[place].square().sum() / len(place) for place in places)

    def step(self, batch: Any, share: float, last: bool = True) -> Tensor:
        loss = self.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Change all rows, and propagate them for the next step, in the same pass over the blocks."""
        assert self._now is not None
        assert self._rows is not None
        assert self._batch is not None
        epoch, step = self._now
        after = (epoch, step + 1) if step + 1 < self.steps_per_epoch else (epoch + 1, 0)
        ends = after[0] >= self.config.epochs or self.run.state.total_steps + 1 >= (self.config.max_steps or 1 << 62)
        following = None if ends else self.links_of(*after)
        nodes = np.empty(0, np.int64) if following is None else following.node
        self._rows = self.table.step(self._batch.node, self._rows, self.lr, nodes)
        self._batch, self._now = following, None if ends else after

    def evaluate(self) -> dict[str, Any]:
        """See `Mode`: Recall@k and NDCG@k of validation, where there are links of it."""
        if self.config.val_split not in self.split.names or not self.split.count(self.config.val_split):
            return {}
        scores = self._ranked(self.config.val_split)
        best = self.run.judge(scores)
        if best:
            self.blocks.keep(BEST)
            self.kept = True
        return {"val": scores, "best": best}

    def ended(self) -> dict[str, Any]:
        """See `Mode`: the best rows behind the propagation are written by node, beside those of an earlier end."""
        before = checkpoint.load(self.config.out, MODEL) or {}
        self._ended = EMBEDDINGS if before.get(EMBEDDINGS) != EMBEDDINGS else f"{EMBEDDINGS}-again"
        with closing(self._write(self._ended, self.kept)) as rows:
            rows.sync()
        return {EMBEDDINGS: self._ended, **self._about}

    def final_scores(self) -> dict[str, Scores]:
        wanted = [name for name in self.split.names if name in self.config.eval_splits and self.split.count(name)]
        if not wanted:
            return {}
        booked = self.run.measure("ranking"), self.run.booked("evaluate_seconds")
        with booked[0], booked[1], closing(DiskRows.open(self.config.out / self._ended)) as rows:
            return self._scores(wanted, rows)

    def _ranked(self, split: str) -> Scores:
        """The scores of a split by the rows as they are now."""
        try:
            with closing(self._write(NOW, kept=False)) as rows, self.run.stoppable():
                return self._scores([split], rows)[split]
        finally:
            remove_tree(self.config.out / NOW)

    def _scores(self, wanted: list[str], rows: DiskRows) -> dict[str, Scores]:
        trained = TrainedTable(self.dataset, self.links, DotScorer(self.config.hidden), TableInOrder(rows))
        return ranked_scores(trained, self.split, wanted, self.config, lists_bytes(self._spare))

    def _write(self, name: str, kept: bool) -> DiskRows:
        """The rows behind the propagation, or those that were kept, by node, with norms as lists have them."""

        def load(block: int) -> Tensor:
            return self.blocks.load_kept(block, BEST) if kept else self.blocks.load(block)[0]

        where = self.config.out / name, self.columns, load
        about = self.table.adjacency, self.config.layers, self.config.norm_power
        return write_propagated(*where, *about, self.run.stoppable)

    @property
    def _about(self) -> dict[str, Any]:
        """How rows are numbered."""
        return {"rows": self.links.num_nodes, "first": dict(self.links.first)}

    def state(self, cursor: RunState) -> dict[str, Any]:
        about = {"columns": self.columns, "steps": self.table.steps, "kept": self.kept, "folder": self._folder}
        return {"table": {**about, **self._about, "blocks": self.blocks.state()}}

    def commit(self) -> None:
        self.blocks.files.commit()

    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        """See `Mode`: from the next epoch on, with the rows and moments as they are; the best are chosen anew."""
        state = RunState.next_epoch_unchosen(saved)
        return saved | {"state": asdict(state), "best_model": None}, Growth(touched, state.epoch)

    def counts(self) -> dict[str, Any]:
        files = self.blocks.files
        return {"history_bytes_read": files.bytes_read, "history_bytes_written": files.bytes_written, "stages": {}}

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        (self.config.out / "neighbors").unlink(missing_ok=True)
        for path in self.config.out.glob(f"{FOLDER}*"):
            if path.name != self._folder:
                remove_tree(path)  # as it was before the store has grown
        for path in self.config.out.glob(f"{EMBEDDINGS}*"):
            if path.name != self._ended:
                remove_tree(path)  # of an earlier end
        return {"columns": self.columns}
