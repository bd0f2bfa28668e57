"""Training on batches of nodes, which the modes "sampled", "cluster", "saint" and "history" make each in their way."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ooc.config.nodes import TrainConfig
from ooc.history.embedding_tables import FOLDER as TABLES
from ooc.history.embedding_tables import EmbeddingTables, bytes_in_ram, bytes_per_node
from ooc.history.history import Growth
from ooc.layerwise.shape import has_layers, own_way
from ooc.loading.arguments import weight_column_of
from ooc.loading.base import BatchLoader
from ooc.loading.choose_pool import device_plan
from ooc.loading.ranks import WHOLE
from ooc.loading.sampling import graphs_of
from ooc.metrics.losses import LabelLoss
from ooc.models.compile import compile_model, many_variants
from ooc.models.compression import compressed_activations
from ooc.models.layers import autocast
from ooc.models.pre_aggregation import pre_aggregation_of
from ooc.models.quantization import kept_share
from ooc.models.recomputation import Given
from ooc.models.reversible import WIDTHS_ALIVE
from ooc.models.user_models import edge_features_for, forward_batch
from ooc.planning.first_step import check_first_step
from ooc.planning.recomputation import RecomputationPlanner, planner_for, runs_by_layers
from ooc.runtime.clock import write_trace
from ooc.runtime.crew import with_few
from ooc.runtime.memory import Blocks, keep_large_blocks
from ooc.runtime.memory_plan import compressed_share, plan_memory
from ooc.runtime.pipeline import Stage
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.sizes import format_bytes
from ooc.training import checkpoint, summary
from ooc.training.batch_scores import BatchScoring
from ooc.training.build import device_model_bytes, model_bytes, table_shapes
from ooc.training.data_parallel import shared_batches
from ooc.training.mode import RunContext, RunState, Scores
from ooc.training.node_mode import make_loss

_BY_EDGE = ("gat", "hgt")
"""models whose activations are mostly scores by edge, which are not compressed"""
_RECOMPUTED: dict[str, Given] = {"none": False, "layers": True, "sqrt": "sqrt"}
"""by `activation_checkpointing`"""
TRAIN_SECONDS = 1.0
"""What each part of the profile before training may take"""


class BatchMode(BatchScoring):
    """Training on batches of nodes; see `Mode`."""

    config: TrainConfig
    loader: BatchLoader
    checks_step: ClassVar[bool] = True
    """whether the first step is refused where its layers, one behind the other on the batch's blocks, do not fit the memory"""
    pools: ClassVar[bool] = False
    """whether feature rows may stay on a GPU"""

    def __init__(self, config: TrainConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.tables, self.table_shapes = EmbeddingTables(), table_shapes(config, dataset)
        self._check_types()
        if config.compile:
            compile_model(self.model, self.device)
        kept = self.node_bytes * dataset.num_nodes
        self.budget = plan_memory(
            dataset, model_bytes(config, self.model) + kept, self._columns(), activations=self._activations()
        )
        if config.is_reversible:
            self.budget = replace(self.budget, model_width=self._width)
        if self.table_shapes:
            self.budget = self.budget.beside_tables(bytes_in_ram(self.table_shapes, config.optimizer))
        if self.pools:
            device = device_plan(self.device, config.gpu_memory, device_model_bytes(config, self.model))
            self.budget = replace(self.budget, device=device)
        self.loader = self._make_loader()
        self.budget = replace(self.budget, device=self.loader.budget.device)
        self.by_layers = has_layers(self.model) and not dataset.is_hetero
        self.evaluators = {} if self.scores_by_layers else self._make_evaluators()
        if self._scores_full_neighborhoods:
            self._check_scored()
        self.loader.begin_reading()
        self._share_block_policy()
        self.loss_of = self._make_loss()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.accumulate = config.accumulate
        self.planner = self._make_planner()
        self.unchecked = self.checks_step and self._knows_activations()

    def _check_types(self) -> None:
        """Raise ConfigError for settings that do not apply to the types of nodes that the store has."""
        if self.table_shapes and not self.ranks.alone:
            names = ", ".join(self.table_shapes)
            raise ConfigError(f"the embedding tables of {names} are trained in one process: start it without torchrun")
        if self.table_shapes and self.config.momentum:
            names = ", ".join(self.table_shapes)
            raise ConfigError(f"the embedding tables of {names} are trained by sgd without momentum: leave momentum out")
        if self.dataset.is_hetero and self.config.compile:
            raise ConfigError("compile = true does not apply to heterogeneous graphs: leave it out")
        if self.table_shapes and self.config.precision == "fp16":
            names = ", ".join(self.table_shapes)
            raise ConfigError(f"the embedding tables of {names} are not trained in fp16: use `precision` fp32 or bf16")

    @property
    def node_bytes(self) -> int:
        """In memory, for every node of the graph, that the mode keeps."""
        return 0

    @cached_property
    def edge_features(self) -> tuple[str, ...]:
        """Those that batches have: what the model takes."""
        return edge_features_for(self.model, self.dataset)

    def notes(self) -> list[str]:
        """See `Mode`; how ranks of a host share its disk, and what cannot be done with a model that has its own forward."""
        said = [*super().notes(), *self._disk_notes()]
        if self.neighborhoods_too_large:
            said.append("scores are computed layer by layer, as full neighborhoods do not fit a batch, or hardly do")
        if self.by_layers or self.dataset.is_hetero:
            return said
        name = self.config.model if ":" not in self.config.model else type(self.model).__name__
        why = f"{name} {own_way(self.model)}"
        return [*said, f"{why}: `ooc infer` computes it on full neighborhoods, and modes history and full refuse it"]

    def _share_block_policy(self) -> None:
        """One policy for freed blocks in training and scores: the training loader's, else the scores' loaders'."""
        loaders = [self.loader, *self.evaluators.values()]
        keeps = next((each.keeps_blocks for each in loaders if each.keeps_blocks is not None), None)
        if self.config.activation_checkpointing != "none" and self.config.memory is not None:
            keeps = Blocks.RETURN  # cached blocks between those that stay take what recomputing saves (measured)
        if keeps is not None:
            self._keep_blocks(keeps)

    def _keep_blocks(self, keeps: Blocks) -> None:
        """Set a policy for freed blocks now, as a profile of the run has no epoch that begins, and in every epoch."""
        for each in (self.loader, *self.evaluators.values()):
            each.keeps_blocks = keeps
        keep_large_blocks(keeps)

    def _make_planner(self) -> RecomputationPlanner | None:
        """What plans the activations that are kept, where that is asked for."""
        return planner_for(self.layered, self.budget) if self.config.activation_checkpointing == "auto" else None

    def _knows_activations(self) -> bool:
        """Whether the memory was given, and layers can be measured one by one and take as much in a step; not those of a user's
        model, which may change buffers when they run."""
        config = self.config
        others = ":" in config.model or config.compile or config.compress is not None or config.is_reversible
        return config.memory is not None and self.budget.device is None and not others and runs_by_layers(self.layered)

    def _activations(self) -> float:
        """A batch's activations, of what they are without compression."""
        config = self.config
        if config.compress is None or config.convs & {*_BY_EDGE} or ":" in config.model:
            return 1.0
        return compressed_share(kept_share(config.compress), config.layers, self.whole_subgraphs)

    def _columns(self) -> set[str]:
        """The graphs' columns that batches look up: the weights, and what edges are drawn by."""
        graphs = graphs_of(self.dataset)
        drawn_by = weight_column_of(graphs, self.config.weight_attr)
        there = {name for graph in graphs.values() for name in graph.columns}
        return {name for name in ("weight", drawn_by) if name is not None and name in there}

    def _disk_notes(self) -> list[str]:
        """How the ranks of this host read features that stay on disk."""
        count, shared = self.ranks.local_world_size, self.dataset.shared
        if self.ranks.alone or count == 1 or not self.loader.strategy.reads_disk:
            return []
        if self.loader.strategy.stages.sample.apart:
            return [f"each of the {count} ranks of this host reads parts of its own"]
        if shared is None:
            return [f"each of the {count} ranks of this host reads the disk for itself, as they cannot share memory"]
        of = f"{format_bytes(shared.nbytes)} of shared memory"
        return [f"the {count} ranks of this host read the disk once: what one has read the others copy from {of}"]

    def _make_loader(self) -> BatchLoader:
        raise NotImplementedError

    def _make_loss(self) -> LabelLoss:
        return make_loss(self.config, self.nodes, self.task, self.device)

    def _share(self) -> dict[str, Any]:
        """Options of the loaders: this rank's share of each step's seeds, and batches without what no model reads."""
        return {**WHOLE, "rank": self.ranks.rank, "world_size": self.ranks.world_size}

    def _sampling(self) -> dict[str, Any]:
        config = self.config
        common: dict[str, Any] = {"replace": config.replace, "weight_attr": config.weight_attr, "device": self.device}
        common["sample_device"] = config.sample_device
        if self.table_shapes:
            rooms = config.accumulate, self.budget.table_rows
            common["beside"] = bytes_per_node(self.table_shapes, config.optimizer, *rooms)
        return {
            **common,
            **self._share(),
            "budget": self.budget,
            "pre_aggregation": pre_aggregation_of(self.model),
            "edge_features": self.edge_features,
            "sample_threads": config.sample_threads,
            "read_threads": config.read_threads,
        }

    def _subgraphs(self) -> dict[str, Any]:
        """What the loaders of subgraphs have in common."""
        config = self.config
        model: dict[str, Any] = {"num_layers": config.layers, "width": self._width}
        common: dict[str, Any] = {
            "seed": config.seed,
            "device": self.device,
            "budget": self.budget,
            "edge_features": self.edge_features,
            "sample_threads": config.sample_threads or 1,
        }
        return {"input_nodes": config.train_split, **model, **self._share(), **common}

    @property
    def _width(self) -> int:
        """Columns of a node's rows in all layers together, where each layer computes every node of a batch. Those of a
        reversible model are computed again layer by layer."""
        config = self.config
        return WIDTHS_ALIVE[config.model] * config.embedding if config.is_reversible else sum(config.widths) + config.embedding

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loader)

    @property
    def seeds_per_step(self) -> int:
        return -(-self.dataset.num_nodes // self.steps_per_epoch)

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        self.run = run
        if self.config.compile:
            self.opened.enter_context(many_variants())
        if saved:
            self.scaler.load_state_dict(saved["scaler"])
        if self.ranks.alone:
            self._open_exact(self.config.out)
        if self.table_shapes and saved:
            self._open_tables(saved["tables"], growth is not None)

    def _open_tables(self, state: dict[str, Any] | None, grown: bool) -> None:
        """Open the embedding tables, whose rows loaders read ahead."""
        config, more = self.config, {"state": state, "grown": grown, "engine": self.engine}
        settings: dict[str, Any] = {
            "seed": config.seed,
            "optimizer": config.optimizer,
            "max_bytes": self.budget.table_rows,
            **more,
        }
        tables = EmbeddingTables.open(config.out / TABLES, self.table_shapes, **settings)
        self.tables = self.opened.enter_context(closing(tables))
        self.loader.then = Stage("tables", tables.ahead)
        for loader in self.evaluators.values():
            loader.then = Stage("tables", tables.look_up)

    def prepare(self) -> None:
        """The plan of a run that has not begun, and then its embedding tables, whose disk space no plan takes. Several ranks
        open here what they share, as they may wait for each other."""
        if not self.ranks.alone:
            self._open_exact(self.ranks.broadcast(self.config.out))
        if self.config.plan and not self.run.state.total_steps and self.ranks.first:
            made = self.predict(TRAIN_SECONDS, variants=False)
            checkpoint.write_json(self.config.out / checkpoint.PLAN, made.asdict())
            self.run.watchers.note(f"plan: {made}")
        if self.table_shapes and not self.tables:
            self._open_tables(None, False)

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        self._begin_batches()
        return shared_batches(self.loader, self.loader.own_steps, epoch, step, stop)

    def _begin_batches(self) -> None:
        if self.exact is not None:
            self.exact.make_room()
        self.tables.end_pass()

    def forward(self, batch: Any) -> Tensor:
        """What the model computes of a batch in training, with what autograd keeps of it."""
        self.tables.pull(batch)
        with compressed_activations(self.config.compress, self.model, batch):
            return self.computed(batch)

    def computed(self, batch: Any) -> Tensor:
        """The model's rows for the batch's seeds."""
        return forward_batch(self.model, batch, checkpoint=self.recomputation(batch))

    def recomputation(self, batch: Any) -> Given:
        """What of the batch's forward pass is computed again in the backward pass."""
        planner, given = self.planner, _RECOMPUTED.get(self.config.activation_checkpointing, False)
        if self.unchecked:
            self.unchecked = False
            measuring = planner or planner_for(self.layered, self.budget)
            if check_first_step(measuring, self.layered, batch, None if planner else given, self.budget.memory):
                self._keep_blocks(Blocks.RETURN)
        return given if planner is None else planner(self.layered, batch)

    @property
    def layered(self) -> torch.nn.Module:
        """The part of the model that is layers on a batch's blocks."""
        return self.model

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch's labelled seeds; of GraphSAINT's the sum, each node's times its coefficient."""
        with autocast(self.device, self.config.precision):
            logits = self.forward(batch)
        labels, seeds = self.labels_in(batch), self._seeds(batch)
        norm = getattr(seeds, "node_norm", None)
        return with_few(self.checked(logits, labels), lambda rows: self.loss_of(rows, labels, norm))

    def weight(self, batch: Any) -> Tensor:
        """See `Mode`; each of GraphSAINT's subgraphs stands for the whole graph."""
        weighed = getattr(self._seeds(batch), "node_norm", None) is not None
        return super().weight(batch) if weighed else self.loss_of.weighed(self.labels_in(batch))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Mode`; with that of the embedding tables."""
        self.tables.gather()
        super().update(optimizer)
        self.tables.update(self.lr)

    def trained(self) -> Iterable[Tensor]:
        return [*super().trained(), *self.tables.gathered]

    def state(self, cursor: RunState) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict(), "halo": None, "refresh": None, "tables": self.tables.state()}

    def commit(self) -> None:
        self.tables.commit(self.run.state.best_epoch)

    def keep_best(self) -> None:
        self.tables.keep_best(self.run.state.epoch)

    def ended(self) -> dict[str, Any]:
        state = self.run.state
        return {"tables": self.tables.keep_ended(state.best_epoch, state.total_steps)} if self.tables else {}

    def final_scores(self) -> dict[str, Scores]:
        """See `NodeMode`; with the embedding tables of the best model."""
        if (best := self.run.state.best_epoch) is not None:
            self.tables.use_best(best)
        return super().final_scores()

    def counts(self) -> dict[str, Any]:
        return {
            "bytes_read": self.loader.bytes_read,
            "edge_bytes_read": self.loader.topology_bytes_read,
            "rows_read": self.loader.rows_read,
            "rows_asked": self.loader.rows_asked,
            "packed_bytes_written": self.loader.bytes_written,
            "stages": self.loader.times(),
            **self.tables.spent(),
        }

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        planned = checkpoint.read_plan(self.config.out)
        self.tables.drop_ended(self.run.state.total_steps)
        write_trace(self.config.out, self.loader.spans())
        return {
            "histories": summary.histories(result),
            **({} if self.planner is None else {"recomputation": self.planner.asdict()}),
            "plan": summary.account(result, self.steps_per_epoch, self.row_bytes, planned, self.even_rows),
            **super().finish(result),
        }
