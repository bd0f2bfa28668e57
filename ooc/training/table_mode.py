"""The mode "table" of the task "link": rows of nodes, in buckets of which memory holds some, trained to score links.

A batch is of one pair of buckets. Its rows are gathered, autograd computes their gradients, and these are added up by row in a
fixed order. So the same buckets give the same losses to the bit, whatever memory there is.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.config.base import RunConfig
from ooc.config.tables import TableConfig
from ooc.history.bucket_table import BucketTable, TableShape, TableView
from ooc.history.grown_table import GrownTable, moved_rows
from ooc.history.history import Growth
from ooc.history.row_optimizers import RowOptimizer, gather_rows
from ooc.loading.bucket_batches import BatchShape, EpochOrder, TableBatch, table_batches
from ooc.loading.bucket_edges import CHECKSUMS, BucketEdges, EdgeShape, Piece
from ooc.loading.relation_links import RelationLinks, RelationSplit
from ooc.models.link_scores import LinkScorer, make_scorer
from ooc.planning.over_ranks import RanksPlan
from ooc.planning.table_plan import TablePlan
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.messages import Pace
from ooc.runtime.ranks import ALONE, Ranks
from ooc.sampling.bucket_order import beta_swaps, bucket_visits, least_swaps
from ooc.stores.arrays.bucket_rows import BucketRows
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.atomic import remove_tree
from ooc.training import checkpoint
from ooc.training.build import model_bytes
from ooc.training.mode import Mode, RunContext, RunState, Scores
from ooc.training.run import MODEL
from ooc.training.table_losses import ComparedRows, LinkRows, TableLoss
from ooc.training.table_memory import TableMemory
from ooc.training.table_scores import TableScores
from ooc.training.trained_table import TrainedTable, check_numbering

TABLE, EDGES = "table", "edges"
"""folders of a run"""
BEST, ENDED = "best", "ended"
"""views of the table: of the best epoch, and of the model that the run ended with last"""


class TableMode(Mode):
    """Tables of embeddings; see `Mode` and the module."""

    config: TableConfig
    typed = True
    has_table = True
    plans_unopened = True
    saves_device = "a smaller `batch_size`, `ratio` or `hidden`"
    model: LinkScorer
    monitor: str
    table: BucketTable
    """from `open` on"""
    edges: BucketEdges | None = None
    """of training, from `prepare` on"""

    def __init__(self, config: TableConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.monitor = config.monitor or "mrr"
        self.links = RelationLinks(dataset, config.edge_type, config.has_relations)
        self.split = self._split()
        self.train_links = self.split.count(config.train_split)
        self._check_splits()
        self.model = self._make_model().to(self.device)
        self.memory = self._divided()
        self.budget, self.shape, self.resident = self.memory.budget, self.memory.shape, self.memory.resident
        self.scores = TableScores(config, self.model, self.links, self.split, self.memory)
        self.loss_of = TableLoss(config, self._chunk, len(self.links.tails), len(self.links.heads))
        self._checkpoint_bytes = 0
        self._order: EpochOrder | None = None
        self._pulled: tuple[Ids, Tensor] | None = None

    @classmethod
    @contextmanager
    def trained_table(cls, run: Path, config: TableConfig, dataset: Dataset, ended: Any) -> Iterator[TrainedTable]:
        """See `Mode`."""
        links = RelationLinks(dataset, config.edge_type, config.has_relations)
        scorer = make_scorer(config.model, config.hidden, links.num_relations, config.reciprocal, config.distance)
        scorer.load_state_dict(ended["model"])
        check_numbering(run, links, ended[TABLE])
        assert config.buckets is not None, "a run has chosen how many"
        shape = TableShape(ended[TABLE]["rows"], config.hidden, config.optimizer, config.buckets)
        files = BucketRows.open(run / ended[TABLE]["folder"], ended[TABLE]["files"])
        bound = scorer.bound if config.init is None else config.init
        with closing(BucketTable(files, shape, 1, key(config.seed, Purpose.TABLE), bound)) as table:
            yield TrainedTable(dataset, links, scorer, TableView(table))

    def _split(self) -> RelationSplit:
        config = self.config
        stored = config.takes_split(self.links.has_splits)
        return RelationSplit(self.links, None if stored else config.shares, config.train_split, config.seed)

    def _check_splits(self) -> None:
        """Raise ConfigError where there is nothing to train on, or no such split."""
        config = self.config
        config.check_parts(self.split.names)
        if not self.train_links:
            raise ConfigError(f"{config.store} has no edges left to train on: give a smaller val and test")
        if (name := config.needs_scores) and not self.split.count_of(config.val_split):
            raise ConfigError(f"{name} needs edges to validate on, and there are none: leave it out")

    def _make_model(self) -> LinkScorer:
        config = self.config
        torch.manual_seed(key(config.seed, Purpose.INIT) >> 1)
        return make_scorer(config.model, config.hidden, self.links.num_relations, config.reciprocal, config.distance)

    def _divided(self) -> TableMemory:
        """The memory, and the buckets that it has room for."""
        config, dataset = self.config, self.dataset
        scored = max((self.split.count_of(name) for name in {config.val_split, *config.eval_splits}), default=0)
        masks = len(self.split.names) * Members.nbytes_for(self.links.num_edges)
        plan = plan_memory(dataset, model_bytes(config, self.model) + masks, {"edge_id"}, scanned=True)
        nodes = len(self.links.tails) if config.loss == "all" else 0
        return TableMemory.of(config, plan, self.links.num_nodes, self.train_links, scored, nodes)

    @property
    def _chunk(self) -> int:
        return min(self.config.chunk or self.config.batch_size, self.config.batch_size)

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        return config

    def predict(self, seconds: float, variants: bool) -> TablePlan:
        """See `Mode`; by the numbers that a run is divided by."""
        edges = EdgeShape(self.links.num_nodes, self.train_links, self.shape.buckets, self.config.has_relations)
        return self.memory.planned(self.config.seed, self.steps_per_epoch, self.train_links * edges.edge_bytes)

    def predict_ranks(self, nproc: int, bandwidth: int) -> RanksPlan:
        raise ConfigError("nproc does not apply to mode table, which trains in one process: leave it out")

    def chosen(self) -> dict[str, Any]:
        return {"buckets": self.shape.buckets, "resident": self.resident}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Of the relations; nodes' rows have theirs."""
        config = self.config
        own = list(self.model.parameters()) or [nn.Parameter(torch.empty(0))]  # torch wants one
        kind: Any = torch.optim.Adam if config.optimizer == "adam" else torch.optim.Adagrad
        made: torch.optim.Optimizer = kind(own, lr=config.lr, weight_decay=config.weight_decay)
        return made

    @property
    def steps_per_epoch(self) -> int:
        if self.edges is None:  # as if all were of one pair
            return -(-self.train_links // self.config.batch_size)
        return self._steps

    @property
    def seeds_per_step(self) -> int:
        return self.config.batch_size

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        self.run, config = run, self.config
        own = saved[TABLE] if saved else None
        bound = self.model.bound if config.init is None else config.init
        stream = key(config.seed, Purpose.TABLE)
        if own is None:
            self._folder = TABLE
            remove_tree(config.out / TABLE)  # of a run that was killed before its first checkpoint
            files = BucketRows.create(config.out / TABLE, self.shape.buckets, self.shape.bucket_bytes)
        else:
            self._folder = own["folder"]
            files = BucketRows.open(config.out / self._folder, own["files"])
        if own is not None and growth is not None:
            remove_tree(config.out / EDGES)  # there are others now
            files = self._grown(files, own, stream, bound)
        ended = checkpoint.load(config.out, MODEL)
        if own is not None and ended is not None and ended.get(TABLE, {}).get("folder") == self._folder:
            files.keep(ENDED, ended[TABLE]["files"])
        self.table = self.opened.enter_context(closing(BucketTable(files, self.shape, self.memory.room, stream, bound)))
        self.rows = RowOptimizer(config.optimizer, config.hidden, 0 if own is None else own["updates"])

    def _grown(self, files: BucketRows, own: dict[str, Any], stream: int, bound: float) -> BucketRows:
        """The table with rows of the nodes that are new; another one, where the numbers of nodes are not those they were."""
        shape, first = self.shape, self.links.first
        if (own["rows"], own["first"]) == (shape.rows, first):
            return files
        if own["first"].keys() != first.keys():
            raise ConfigError(f"{self.dataset.path} has edges between other node types now: start another run")
        folder = f"{TABLE}-{shape.rows}"
        path = self.config.out / folder
        remove_tree(path)  # of a run that was killed before its first checkpoint
        with closing(files):
            larger = BucketRows.create(path, shape.buckets, shape.bucket_bytes)
            before = replace(shape, rows=own["rows"])
            moved = moved_rows(own["first"], own["rows"], first)
            GrownTable(files, before, shape, stream, bound).write(larger, moved)
        self._folder = folder
        return larger

    def notes(self) -> list[str]:
        counts = ", ".join(f"{self.split.count_of(name):,} of {name}" for name in self.split.names)
        kinds = self.links.num_relations
        links = f"links: {counts}" + (f"; {kinds:,} relation{'s' * (kinds > 1)}" if kinds else "")
        found = [*super().notes(), self.memory.described, links]
        if self.config.has_relations and any(part.unused_labels for part in self.links.parts):
            found.append("the edges' labels are no relations: they are not one of some classes, as words and whole numbers are")
        if self._estimates:
            found.append(f"scores are estimates: ranks among {self.config.eval_candidates:,} random candidates, not among all")
        return found

    @property
    def _estimates(self) -> bool:
        """Whether scores rank among a sample of the candidates, and not among all."""
        config, links = self.config, self.links
        sides = [links.tails, links.heads] if config.both_ways else [links.tails]
        return config.eval_candidates is not None and config.eval_candidates < max(map(len, sides))

    def prepare(self) -> None:
        """Sort the training edges, unless that is done."""
        path, config = self.config.out / EDGES, self.config
        shape = EdgeShape(self.links.num_nodes, self.train_links, self.shape.buckets, config.has_relations)
        if path.exists() and not (path / CHECKSUMS).exists():
            remove_tree(path)  # of an earlier version
        if path.exists():
            edges = BucketEdges.open(path, shape)
        else:
            edges = BucketEdges.sort(path, shape, self._training(), config.seed, self.memory.sort_bytes)
        self.edges = self.opened.enter_context(closing(edges))
        self._steps = int((-(-edges.counts() // config.batch_size)).sum())
        self.rate = ("edges", self.train_links / self.steps_per_epoch)

    def _training(self) -> Iterator[Piece]:
        pace, done = Pace(self.run.watchers.note), 0
        members = self.split.members(self.config.train_split)
        for head, relation, tail in self.links.pieces(members, self.budget.memory):
            yield head, tail, relation if self.config.has_relations else None
            done += len(head)
            pace("sorting the edges", done, self.train_links, "edges")

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[TableBatch]:
        assert self.edges is not None
        seed, buckets = self.config.seed, self.shape.buckets
        order = EpochOrder(self.edges, self.resident, self.config.batch_size, seed, epoch)
        self.table.follow(order.visits, bucket_visits(buckets, self.resident, seed, epoch + 1))
        yield from table_batches(self.edges, order, self._batch_shape, seed, epoch, step, stop)

    @cached_property
    def _batch_shape(self) -> BatchShape:
        config = self.config
        heads = self.links.heads if config.both_ways else None
        return BatchShape(config.batch_size, 0 if config.loss == "all" else config.ratio, self._chunk, heads, self.links.tails)

    def step(self, batch: TableBatch, share: float, last: bool = True) -> Tensor:
        if self.memory.is_full(self.table.files):  # slots come free with a checkpoint, between two steps
            self.run.checkpoint()
            self.memory.check_free(self.table.files)
        self.table.visit(batch.visit)
        return super().step(batch, share, last)

    def loss(self, batch: TableBatch) -> Tensor:
        """See `TableLoss`."""
        tails, heads = self._candidates(batch)
        at = self.table.places(np.concatenate([batch.head, batch.tail, tails.reshape(-1), heads.reshape(-1)]))
        gathered = torch.empty(len(at), self.shape.width)
        gather_rows(self.table.packed, at, gathered.numpy())
        rows = gathered.to(self.device).requires_grad_()
        self._pulled = at, rows
        count = len(batch.head)
        head, tail, of_tails, of_heads = torch.split(rows, [count, count, tails.size, heads.size])
        relation = None if batch.relation is None else torch.from_numpy(batch.relation).to(self.device)
        asked_heads = self._batch_shape.heads
        ours = self._compared(of_tails, tails, batch.tail, self.links.tails)
        if asked_heads is None:
            theirs = None
        else:
            shared = self.config.loss == "all" and not heads.size
            theirs = self._compared(of_tails, tails, batch.head, asked_heads) if shared else None
            theirs = theirs or self._compared(of_heads, heads, batch.head, asked_heads)
        return self.loss_of(self.model, LinkRows(head, tail, relation, ours, theirs))

    def _candidates(self, batch: TableBatch) -> tuple[Ids, Ids]:
        """Nodes that tails and heads are compared with, int64[chunks, m]; of 1-vs-all no heads that are the tails too."""
        if self.config.loss != "all":
            return batch.negative_tails, batch.negative_heads
        tails, heads = self.links.tails, self._batch_shape.heads
        own = range(0) if heads is None or heads == tails else heads
        return np.arange(tails.start, tails.stop)[None], np.arange(own.start, own.stop)[None]

    def _compared(self, rows: Tensor, ids: Ids, true: Ids, nodes: range) -> ComparedRows:
        shaped = rows.view(*ids.shape, self.shape.width)
        if self.config.loss == "all":
            return ComparedRows(shaped, torch.from_numpy(true - nodes.start).to(self.device))
        own = np.repeat(np.arange(len(ids)), self._chunk)[: len(true)]
        return ComparedRows(shaped, torch.from_numpy(ids[own] == true[:, None]).to(self.device))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Mode`; with that of the nodes' rows."""
        assert self._pulled is not None
        super().update(optimizer)
        (at, rows), self._pulled = self._pulled, None
        assert rows.grad is not None
        gradient: NDArray[np.float32] = rows.grad.cpu().contiguous().numpy()
        self.rows.step(self.table.packed, at, gradient, self.lr)
        self.table.changed()

    def evaluate(self) -> dict[str, Any]:
        """ "val" and "best"."""
        scores = self._score(self.config.val_split)
        if scores is None:
            return {}
        best = self.run.judge(scores)
        if best:
            self._flush()
            self.table.files.keep(BEST)
        return {"val": scores, "best": best}

    def _score(self, split: str) -> Scores | None:
        """The scores of a split; None where it has no links."""
        self.table.settle()
        with self.run.stoppable():
            return self.scores.of(split, self.table, BEST if self._scores_best else None)

    _scores_best = False

    def final_scores(self) -> dict[str, Scores]:
        """Of `eval_splits`, by the rows of the best epoch."""
        state, config = self.run.state, self.config
        self._scores_best = state.best_epoch is not None
        known = {} if state.best_scores is None else {config.val_split: state.best_scores}
        with self.run.measure("scoring"), self.run.booked("evaluate_seconds"):
            found = {name: known.get(name) or self._score(name) for name in config.eval_splits}
        return {name: scores for name, scores in found.items() if scores is not None}

    def ended(self) -> dict[str, Any]:
        """The view of the table that the run's model belongs to."""
        self._flush()
        files = self.table.files
        view = files.view(BEST if self.run.state.best_epoch is not None else None)
        files.sync()
        files.keep(ENDED, view)
        return {TABLE: {"files": view, **self._about}}

    @property
    def _about(self) -> dict[str, Any]:
        """Which table it is, and how its rows are numbered."""
        return {"folder": self._folder, "rows": self.shape.rows, "first": dict(self.links.first)}

    def _flush(self) -> None:
        before = self.table.files.bytes_written
        self.table.flush()
        self._checkpoint_bytes += self.table.files.bytes_written - before

    def state(self, cursor: RunState) -> dict[str, Any]:
        self._flush()
        own = {"files": self.table.files.state(), "updates": self.rows.updates, **self._about}
        return {TABLE: own}

    def commit(self) -> None:
        self.table.files.commit()

    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        """See `Mode`: from the next epoch on, with the rows and the relations' rows as they are; the best are chosen anew."""
        state = RunState.next_epoch_unchosen(saved)
        return saved | {"state": asdict(state), "best_model": None}, Growth(touched, state.epoch)

    def counts(self) -> dict[str, Any]:
        files, edges = self.table.files, 0 if self.edges is None else self.edges.bytes_read
        times = {"work_s": self.table.worked, "busy_s": self.table.worked, "wait_s": self.table.waited, "items": 0}
        return {
            "bytes_read": files.bytes_read + edges,
            "edge_bytes_read": edges,
            "table_bytes_read": files.bytes_read,
            "table_bytes_written": files.bytes_written,
            "checkpoint_bytes_written": self._checkpoint_bytes,
            "stages": {"buckets": times},
        }

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """What an epoch exchanges beside the bound of any order, in bytes read and written."""
        for path in self.config.out.glob(f"{TABLE}*"):
            if path.name != self._folder:
                remove_tree(path)  # as it was before the store has grown
        shape, p, c = self.shape, self.shape.buckets, self.resident
        swaps = {"swaps": beta_swaps(p, c), "least_swaps": least_swaps(p, c), "bucket_bytes": shape.bucket_bytes}
        found: dict[str, Any] = {"rows": shape.rows, "buckets": p, "resident": c, "in_memory": self.memory.room, **swaps}
        if not self._estimates:
            return {"table": found}
        said = f"estimates: ranked among {self.config.eval_candidates:,} random candidates, not all"
        return {"table": found, "negatives": said}
