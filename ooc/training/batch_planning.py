"""What training on batches of nodes will take: a profile of some batches, and what a run does besides them."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ooc.config.base import RunConfig
from ooc.config.nodes import TrainConfig
from ooc.graph.blocks import Subgraph
from ooc.history.embedding_table import table_row_bytes
from ooc.history.embedding_tables import EmbeddingTables, shares_of_tables
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.layerwise.pass_plan import ram_bytes
from ooc.layerwise.shape import besides_bytes
from ooc.loading.base import AHEAD, BatchLoader
from ooc.loading.load_stage import on_disk
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.models.layers import autocast, evaluating
from ooc.planning.choose_mode import ModeTraits
from ooc.planning.recomputation import RecomputationPlanner
from ooc.planning.run_plan import Plan, Prediction, RunFacts, Upkeep, plan
from ooc.planning.run_profile import RunTrial, profile
from ooc.planning.simulate_history import HistoryShape, table_shape
from ooc.planning.simulate_superbatches import cost_of
from ooc.runtime.ranks import ALONE
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.dataset import Dataset
from ooc.stores.process import resident_bytes
from ooc.training.build import make_optimizer
from ooc.training.node_mode import EXACT_FOLDER, NodeMode

LEAST_COVERAGE = 1e-9
"""a subgraph, where the coefficients of GraphSAINT do not matter"""


LONG_SECONDS = 60.0
"""of scores in a run, from where on there is advice on them"""


class PassCosts(NamedTuple):
    """Of a layer-wise pass: the process's bytes at most, and those read and written. rows_stay: whether it leaves the rows in
    memory that batches keep there."""

    peak: int
    read: int
    written: int
    rows_stay: bool


class BatchPlanning(NodeMode):
    """The part of `ooc.training.batch_mode.BatchMode` that predicts a run, and says what its mode gives up for that."""

    config: TrainConfig
    loader: BatchLoader
    evaluators: dict[str, NeighborLoader]
    tables: EmbeddingTables
    table_shapes: dict[str, tuple[int, int]]
    planner: RecomputationPlanner | None
    unchecked: bool
    """whether the first step, and so what it takes, is still to come"""
    prefers_exact: ClassVar[bool] = True
    """whether exact scores are the mode's choice where the settings are open"""
    loses: ClassVar[bool] = False
    """whether batches lack something that `met` counts"""
    traits: ClassVar[ModeTraits]

    @property
    @abstractmethod
    def scores_by_layers(self) -> bool:
        """Whether scores come from layer-wise passes."""

    @property
    @abstractmethod
    def scores_could_be_by_layers(self) -> bool:
        """Whether layer-wise passes could compute the scores that full neighborhoods are configured for."""

    @abstractmethod
    def _make_planner(self) -> RecomputationPlanner | None:
        """What plans the activations that are kept, where that is asked for."""

    @abstractmethod
    def outputs(self, model: torch.nn.Module, batch: Any) -> Tensor:
        """What a model predicts for the labelled of a batch, where it is scored."""

    @property
    def row_bytes(self) -> int:
        """Of a row of features on disk; 0 where they are in memory."""
        rows = self.loader.strategy.disk_rows
        return 0 if rows is None else rows.row_bytes

    @property
    def even_rows(self) -> bool:
        """Whether all of those rows are of that length; they may differ by node type."""
        rows = self.loader.strategy.disk_rows
        return not isinstance(rows, JoinedRows) or rows.even

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        """See `Mode`: neither histories, as large as all hidden rows, nor the counts of many subgraphs are made."""
        return config.model_copy(update={"history": "zero", "saint_coverage": LEAST_COVERAGE})

    def predict(self, seconds: float, variants: bool) -> Plan:
        config, each = self.config, self.steps_per_epoch
        steps = min(config.max_steps or 1 << 62, config.epochs * each)
        epochs = -(-steps // max(1, each))
        with torch.random.fork_rng(devices=[]):
            twin = self._twin()
            found = profile(self._trial(twin, min(steps, each), epochs), seconds, variants)
        scored = self.times_scored(self.evaluators, epochs)
        upkeep = self.upkeep(steps, found.asked)
        made = plan(found, self.batch_budget, RunFacts(each, steps, self.row_bytes, scored, upkeep, self.even_rows))
        activations = "" if twin.planner is None else str(twin.planner)
        advice = self._advice_on_scores(made.prediction, steps / max(1, each)) + made.advice
        return replace(made, reading=self.reading, activations=activations, advice=advice)

    def _advice_on_scores(self, found: Prediction, epochs: float) -> str:
        """What to change where scores take most of a run that takes long; nothing elsewhere."""
        training = found.seconds_per_epoch * epochs
        if found.evaluate_seconds < max(training, LONG_SECONDS):
            return ""
        share = f"{100 * found.evaluate_seconds / (found.evaluate_seconds + training):.0f}"
        if self.scores_could_be_by_layers:
            return f"Evaluation takes {share} % of the time: `evaluate=layerwise` computes scores by one pass over all nodes. "
        return f"Evaluation takes {share} % of the time: a larger `eval_every` or `eval_batch_size` would help. "

    def _trial(self, other: Self, steps: int, epochs: int) -> RunTrial:
        """The mode's loaders with the model of another."""
        device = self.device
        optimizer = make_optimizer(self.config, other.model)

        def train(batch: Any) -> None:
            other.model.train()
            other.tables.ahead((0, batch))
            other.step(self._placed(batch), 1)
            other.update(optimizer)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # training waits for every loss too

        def score(batch: Any) -> None:
            other.tables.look_up((0, batch))
            with evaluating(other.model), autocast(device, self.config.precision):
                batch = self._placed(batch)
                other.tables.pull(batch)
                self.outputs(other.model, batch)

        return RunTrial(self.loader, self.evaluators, train, score, steps, epochs, self.histories())

    def _placed(self, batch: Any) -> Any:
        """A batch of a trial on the device, with what is made there."""
        return self.loader.strategy.stages.load.completed(batch.to(self.device))

    def _twin(self) -> Self:
        """The mode with another model of the same shape."""
        other = copy(self)
        other.ranks = ALONE
        other.model = self._make_model()
        other.planner, other.unchecked = other._make_planner(), False
        other.tables = EmbeddingTables.trial(self.table_shapes, self.config.seed, self.config.optimizer)
        other.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.precision == "fp16")
        return other

    def histories(self) -> Sequence[HistoryShape]:
        """What is known of histories or embedding tables before there are any."""
        shapes, cost = self.table_shapes, cost_of(self.loader.strategy.stages.load.x)
        rows = {name: (count, table_row_bytes(width, self.config.optimizer)) for name, (count, width) in shapes.items()}
        rooms = shares_of_tables(shapes, self.budget.table_rows)
        return [table_shape(name, *own, rooms[name], AHEAD, cost) for name, own in rows.items()]

    def upkeep(self, steps: int, asked: float) -> Upkeep:
        """What a run of so many steps does besides batches. asked: nodes of a batch."""
        epochs = -(-steps // self.steps_per_epoch)
        emptied = [epoch for epoch in range(1, epochs) if self._empties_memory(epoch)]
        pool, x = self.loader.pool, self.loader.strategy.stages.load.x
        passes = self._passes()
        stay = all(each.rows_stay for each in passes)
        filled = {} if pool is None or not on_disk(x) else {"pool": pool.nbytes, "pool_rows": pool.slots.capacity}
        return Upkeep(
            fills=len({1, *emptied}) if epochs > 1 else 0,
            emptied=0.0 if stay else len(emptied) / max(1, epochs - 1),
            scan_peak=max((each.peak for each in passes), default=0),
            pool_s=filled.get("pool", 0) * cost_of(x).byte_s,
            **filled,
        )

    def _empties_memory(self, epochs: int) -> bool:
        """Whether a layer-wise pass behind so many epochs takes the memory of what batches keep there."""
        return self.scores_by_layers and (epochs % self.config.eval_every == 0 or epochs == self.config.epochs)

    def _passes(self) -> list[PassCosts]:
        """Of each kind of layer-wise pass that the run makes."""
        return [self._pass_costs(EXACT_FOLDER, None)] if self.scores_by_layers else []

    def _pass_costs(self, folder: str, upto: int | None) -> PassCosts:
        """What a layer-wise pass over all nodes takes, with the rows of batches where these stay in memory."""
        rows = self.loader.strategy.cache_bytes(self.loader.budget)
        beside = 0 if upto is not None or self.exact is None else self.exact.beside
        settings: dict[str, Any] = {"upto": upto, "beside": beside, "budget": self.budget}
        with closing(LayerwisePass(self.model, self.dataset, self.config.out / folder, **settings)) as scan:
            whole, under_way = ram_bytes(scan.shape), besides_bytes(scan.shape, self.dataset.graph)
            taken = whole + min(whole, under_way) if scan.plan.in_ram else scan.plan.memory + under_way
            stay = rows <= scan.spare
            taken += rows if stay else 0
            most = min(resident_bytes()[0] + taken, self.batch_budget.memory)  # libraries are loaded by the profile
            return PassCosts(most, *scan.plan.moved(scan.shape), stay)

    @classmethod
    def choices(cls, dataset: Dataset) -> Iterator[dict[str, Any]]:
        """Settings to try where they are open, from those that take the most memory on."""
        yield {}

    @property
    def weighed(self) -> bool:
        """Whether what is lost is made up for on average."""
        return True

    def met(self, subgraph: Subgraph) -> tuple[int, int]:
        """(what a batch has exactly, of how much): edges, or rows of nodes; where the mode `loses`."""
        raise NotImplementedError
