"""The modes "sampled", "cluster" and "saint": batches of sampled neighborhoods, of parts, and random subgraphs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ooc.config.base import RunConfig
from ooc.config.fan_outs import ALL_OTHERS
from ooc.config.nodes import TrainConfig
from ooc.graph.blocks import Subgraph
from ooc.history.embedding_tables import FOLDER as TABLES
from ooc.history.embedding_tables import EmbeddingTables, bytes_in_ram, bytes_per_node, shares_of_tables, table_row_bytes
from ooc.history.history import Growth
from ooc.layerwise.full_neighbor_pass import full_hops
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.layerwise.pass_plan import ram_bytes
from ooc.layerwise.scores import ExactScores
from ooc.layerwise.shape import besides_bytes, has_layers, own_way
from ooc.loading.arguments import weight_column_of
from ooc.loading.base import AHEAD, BatchLoader
from ooc.loading.choose_pool import device_plan
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.ranks import WHOLE
from ooc.loading.sampling import graphs_of
from ooc.loading.stages import on_disk
from ooc.loading.subgraph_loaders import ClusterLoader, SaintLoader
from ooc.metrics.losses import LabelLoss
from ooc.models.compile import compile_model, many_variants
from ooc.models.layers import autocast, evaluating
from ooc.models.pre_aggregation import pre_aggregation_of
from ooc.models.user_models import edge_features_for, forward_batch
from ooc.planning.choose_mode import ModeTraits
from ooc.planning.run_plan import Plan, RunFacts, Upkeep, plan
from ooc.planning.run_profile import RunTrial, profile
from ooc.planning.simulate_history import HistoryShape, table_shape
from ooc.planning.simulate_superbatches import cost_of
from ooc.runtime.clock import write_trace
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory import keep_large_blocks
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.pipeline import Stage
from ooc.runtime.ranks import ALONE, Ranks
from ooc.sampling.labor import Labor
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.process import resident_bytes
from ooc.stores.sizes import format_bytes
from ooc.training import checkpoint, summary
from ooc.training.build import device_model_bytes, make_optimizer, model_bytes, table_shapes
from ooc.training.data_parallel import shared_batches
from ooc.training.mode import RunContext, RunState, Scores
from ooc.training.node_mode import EXACT_FOLDER, NodeMode, make_loss

TRAIN_SECONDS = 1.0
"""What each part of the profile before training may take"""
LEAST_COVERAGE = 1e-9
"""a subgraph, where the coefficients of GraphSAINT do not matter"""
PARTS_AN_EPOCH, MOST_PARTS = 16, 2**14
"""batches of parts to make where the settings are open, where memory allows as large ones; parts at most"""


class BatchMode(NodeMode):
    """Training on batches of nodes; see `Mode`."""

    config: TrainConfig
    loader: BatchLoader
    node_bytes: ClassVar[int] = 0
    """in memory, for every node of the graph, that the mode keeps"""
    prefers_exact: ClassVar[bool] = True
    """whether exact scores are the mode's choice where the settings are open"""
    pools: ClassVar[bool] = False
    """whether feature rows may stay on a GPU"""
    loses: ClassVar[bool] = False
    """whether batches lack something that `met` counts"""
    out: Path
    """the run's directory, of several ranks rank 0's; from `open` on, of several ranks from `prepare` on"""
    traits: ClassVar[ModeTraits]

    def __init__(self, config: TrainConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.tables, self.table_shapes = EmbeddingTables(), table_shapes(config, dataset)
        self._check_types()
        if config.compile:
            compile_model(self.model, self.device)
        kept = self.node_bytes * dataset.num_nodes
        self.budget = plan_memory(dataset, model_bytes(config, self.model) + kept, self._columns())
        if self.table_shapes:
            self.budget = self.budget.beside_tables(bytes_in_ram(self.table_shapes, config.optimizer))
        if self.pools:
            device = device_plan(self.device, config.gpu_memory, device_model_bytes(config, self.model))
            self.budget = replace(self.budget, device=device)
        self.loader = self._make_loader()
        self.budget = replace(self.budget, device=self.loader.budget.device)
        self.by_layers = has_layers(self.model) and not dataset.is_hetero
        self.evaluators = {} if self.scores_by_layers else self._make_evaluators()
        self._share_block_policy()
        self.loss_of = self._make_loss()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.accumulate = config.accumulate

    def _check_types(self) -> None:
        """Raise ConfigError for settings that do not apply to the types of nodes that the store has."""
        if self.table_shapes and not self.ranks.alone:
            names = ", ".join(self.table_shapes)
            raise ConfigError(f"the embedding tables of {names} are trained in one process: start it without torchrun")
        if self.dataset.is_hetero and self.config.compile:
            raise ConfigError("compile = true does not apply to heterogeneous graphs: leave it out")
        if self.table_shapes and self.config.precision == "fp16":
            names = ", ".join(self.table_shapes)
            raise ConfigError(f"the embedding tables of {names} are not trained in fp16: use `precision` fp32 or bf16")

    @property
    def scores_by_layers(self) -> bool:
        """Whether scores come from layer-wise passes; exact ones of other models, and of graphs of several types, come from
        full neighborhoods."""
        return self.by_layers and self.config.evaluate == "layerwise"

    @cached_property
    def edge_features(self) -> tuple[str, ...]:
        """Those that batches have: what the model takes."""
        return edge_features_for(self.model, self.dataset)

    @cached_property
    def hops(self) -> int:
        """Hops of the full neighborhoods that outputs depend on, where they do not come from layer-wise passes."""
        return full_hops(self.model, self.dataset, self.config.layers)

    def notes(self) -> list[str]:
        """See `Mode`; how ranks of a host share its disk, and what cannot be done with a model that has its own forward."""
        said = [*super().notes(), *self._disk_notes()]
        if self.by_layers or self.dataset.is_hetero:
            return said
        name = self.config.model if ":" not in self.config.model else type(self.model).__name__
        why = f"{name} {own_way(self.model)}"
        return [*said, f"{why}: `ooc infer` computes it on full neighborhoods, and modes history and full refuse it"]

    def _share_block_policy(self) -> None:
        """One policy for freed blocks in training and scores: the training loader's, else the scores' loaders'."""
        loaders = [self.loader, *self.evaluators.values()]
        keeps = next((each.keeps_blocks for each in loaders if each.keeps_blocks is not None), None)
        for each in loaders:
            each.keeps_blocks = keeps
        if keeps is not None:
            keep_large_blocks(keeps)  # a profile of the run has no epoch that begins

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

    def _make_evaluators(self) -> dict[str, NeighborLoader]:
        """A loader for each split to score that the store has."""
        config = self.config
        fanout = [-1] * self.hops if config.evaluate == "layerwise" else self._neighbors(config.eval_fanout)
        return {
            split: NeighborLoader(
                self.dataset,
                fanout,
                input_nodes=self._input(split),
                batch_size=config.eval_batch_size or config.batch_size,
                seed=key(config.seed, Purpose.EVALUATE) >> 1,
                split_seeds=True,
                **self._sampling(),
            )
            for split in dict.fromkeys([config.val_split, *config.eval_splits])
            if split in self.nodes.splits and len(self.nodes.members(split))
        }

    def _neighbors(self, fanout: list[int] | dict[str, list[int]]) -> Any:
        """See `fan_outs_of`."""
        return fan_outs_of(fanout, self.dataset)

    def _input(self, split: str) -> str | tuple[str, str]:
        """A split as input nodes of a loader."""
        return (self.nodes.name, split) if self.dataset.is_hetero else split

    def _seeds(self, batch: Any) -> Any:
        """What of a batch has the labels and the number of its seeds."""
        return batch[self.nodes.name] if self.dataset.is_hetero else batch

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
        model: dict[str, Any] = {"num_layers": config.layers, "width": config.layers * config.hidden}
        common: dict[str, Any] = {
            "seed": config.seed,
            "device": self.device,
            "budget": self.budget,
            "edge_features": self.edge_features,
            "sample_threads": config.sample_threads or 1,
        }
        return {"input_nodes": config.train_split, **model, **self._share(), **common}

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loader)

    @property
    def seeds_per_step(self) -> int:
        return -(-self.dataset.num_nodes // self.steps_per_epoch)

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

    @property
    def pending_bytes(self) -> int:
        """That the mode keeps in memory while the model is scored."""
        return 0

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

    def _open_exact(self, out: Path) -> None:
        """Have exact scores, where they come from layer-wise passes. out: the run's directory, rank 0's of several ranks."""
        self.out = out
        if self.scores_by_layers:
            settings: dict[str, Any] = {"task": self.task, "ranks": self.ranks}
            beside, folder = self.pending_bytes, out / EXACT_FOLDER
            exact = ExactScores(self.model, self.dataset, folder, self.engine, beside, self.budget, **settings)
            self.exact = self.opened.enter_context(closing(exact))

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
        """The model's rows for the batch's seeds."""
        self.tables.pull(batch)
        return forward_batch(self.model, batch, checkpoint=self.config.activation_checkpointing)

    def loss(self, batch: Any) -> Tensor:
        """The mean over the batch's labelled seeds; of GraphSAINT's the sum, each node's times its coefficient."""
        with autocast(self.device, self.config.precision):
            logits = self.forward(batch)
        seeds = self._seeds(batch)
        return self.loss_of(logits, self.labels_in(batch), getattr(seeds, "node_norm", None))

    def weight(self, batch: Any) -> Tensor:
        """See `Mode`; each of GraphSAINT's subgraphs stands for the whole graph."""
        weighed = getattr(self._seeds(batch), "node_norm", None) is not None
        return super().weight(batch) if weighed else self.loss_of.weighed(self.labels_in(batch))

    def outputs(self, model: torch.nn.Module, batch: Any) -> Tensor:
        """What a model predicts for the labelled of a batch, where it is scored."""
        return forward_batch(model, batch)

    def labels_in(self, batch: Any) -> Tensor:
        """The labels of a batch, one for each of its outputs."""
        seeds = self._seeds(batch)
        labels: Tensor = seeds.y[: seeds.batch_size]
        return labels

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Mode`; with that of the embedding tables."""
        self.tables.gather()
        super().update(optimizer)
        self.tables.update(self.config.lr)

    def trained(self) -> Iterable[Tensor]:
        return [*super().trained(), *self.tables.gathered]

    def score(self, split: str, epoch: int) -> Scores | None:
        if self.exact is not None:
            return super().score(split, epoch)
        loader = self.evaluators.get(split)
        if loader is None:
            return None
        scores = self.task.scores(loader.num_seeds, self.device)
        loader.set_epoch(epoch)
        loader.stop_before(loader.own_steps)
        with evaluating(self.model):
            for batch in loader:
                batch = batch.to(self.device, non_blocking=True)
                with autocast(self.device, self.config.precision):
                    self.tables.pull(batch)
                    logits = self.outputs(self.model, batch)
                scores.update(logits, self.labels_in(batch))
        scores.merge(self.ranks)
        return scores.compute()

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
            "plan": summary.account(result, self.steps_per_epoch, self.row_bytes, planned, self.even_rows),
            **super().finish(result),
        }

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        """See `Mode`: neither histories, as large as all hidden rows, nor the counts of many subgraphs are made."""
        return config.model_copy(update={"history": "zero", "saint_coverage": LEAST_COVERAGE})

    def predict(self, seconds: float, variants: bool) -> Plan:
        config, each = self.config, self.steps_per_epoch
        steps = min(config.max_steps or 1 << 62, config.epochs * each)
        epochs = -(-steps // max(1, each))
        with torch.random.fork_rng(devices=[]):
            found = profile(self._trial(min(steps, each), epochs), seconds, variants)
        scored = self.times_scored(self.evaluators, epochs)
        upkeep = self.upkeep(steps, found.asked)
        made = plan(found, self.batch_budget, RunFacts(each, steps, self.row_bytes, scored, upkeep, self.even_rows))
        return replace(made, reading=self.reading)

    def _trial(self, steps: int, epochs: int) -> RunTrial:
        """The mode's loaders with a model of their own."""
        device, other = self.device, self._twin()
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
        filled = {} if pool is None or not on_disk(x) else {"pool": pool.nbytes, "pool_rows": pool.slots.capacity}
        return Upkeep(
            fills=len({1, *emptied}) if epochs > 1 else 0,
            emptied=len(emptied) / max(1, epochs - 1),
            scan_peak=self._pass_costs(EXACT_FOLDER, None)[0] if self.scores_by_layers else 0,
            pool_s=filled.get("pool", 0) * cost_of(x).byte_s,
            **filled,
        )

    def _empties_memory(self, epochs: int) -> bool:
        """Whether a layer-wise pass behind so many epochs takes the memory of what batches keep there."""
        return self.scores_by_layers and (epochs % self.config.eval_every == 0 or epochs == self.config.epochs)

    def _pass_costs(self, folder: str, upto: int | None) -> tuple[int, int, int]:
        """(the process's bytes at most, bytes read, bytes written) of a layer-wise pass over all nodes."""
        beside = 0 if upto is not None or self.exact is None else self.exact.beside
        settings: dict[str, Any] = {"upto": upto, "beside": beside, "budget": self.budget}
        with closing(LayerwisePass(self.model, self.dataset, self.config.out / folder, **settings)) as scan:
            whole, under_way = ram_bytes(scan.shape), besides_bytes(scan.shape, self.dataset.graph)
            taken = whole + min(whole, under_way) if scan.plan.in_ram else scan.plan.memory + under_way
            most = min(resident_bytes()[0] + taken, self.batch_budget.memory)  # libraries are loaded by the profile
            return most, *scan.plan.moved(scan.shape)

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


class SampledMode(BatchMode):
    """Sampled neighborhoods; see `Mode`."""

    saves_device = "a smaller `gpu_memory`, so that less stays there, or a smaller `batch_size`, `fanout` or `hidden`"
    ranked = True
    prefers_exact = False
    pools = True
    typed = True
    traits = ModeTraits(0, "sampled neighborhoods", "none")

    def notes(self) -> list[str]:
        """See `Mode`; with a GPU also where neighbors are sampled."""
        place = [str(self.loader.sample_place)] if self.device.type == "cuda" else []
        return [*super().notes(), *place]

    def _make_loader(self) -> BatchLoader:
        config = self.config
        shuffled: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": True, "seed": config.seed}
        return NeighborLoader(
            self.dataset,
            self._neighbors(config.fanout),
            input_nodes=self._input(config.train_split),
            sampler=self.sampler,
            pack=None if config.pack is None else (config.pack, self._pack_folder()),
            **shuffled,
            **self._sampling(),
        )

    def _pack_folder(self) -> Path:
        """The run's directory or, before there is one, the nearest folder above it."""
        out = self.config.out.absolute()
        return next(folder for folder in (out, *out.parents) if folder.is_dir())

    @property
    def sampler(self) -> Labor | None:
        """How training batches are drawn; scores do not depend on it, because their batches draw at each node independently."""
        config = self.config
        return Labor(config.layer_dependency, config.batch_dependency, config.importance) if config.sampler == "labor" else None

    @property
    def seeds_per_step(self) -> int:
        return self.config.batch_size * self.ranks.world_size


def fan_outs_of(fanout: list[int] | dict[str, list[int]], dataset: Dataset) -> Any:
    """Fan-outs of a configuration as loaders take them. Raises ConfigError for those by edge type on a store that has one."""
    if isinstance(fanout, list):
        return fanout
    own = {name: counts for name, counts in fanout.items() if name != ALL_OTHERS}
    if not dataset.is_hetero:
        raise ConfigError(
            f"fan-outs by edge type ({next(iter(own), ALL_OTHERS)}) are of heterogeneous stores, and {dataset.path} has one "
            "edge type: give `fanout` one number per layer"
        )
    others = fanout.get(ALL_OTHERS)
    return own if others is None else {":".join(key): others for key in dataset.edge_types} | own


class PartMode(BatchMode):
    """Batches of parts; see `Mode`."""

    saves_device = "more `parts`, or a smaller `parts_per_batch` or `hidden`"
    loses = True
    traits = ModeTraits(
        2,
        "clusters",
        "dropped edges: {lost}",
        "parts keep {kept} of a batch's edges: {takes}",
        worth=2.0,
        drops="drop {lost} of the edges",
        most_lost=0.3,
    )

    @classmethod
    def choices(cls, dataset: Dataset) -> Iterator[dict[str, Any]]:
        """Fewer and fewer parts a batch of those the store has, or more and more ranges."""
        graph = dataset.graph
        if graph.parts is not None:
            many = max(1, (len(graph.parts) - 1) // PARTS_AN_EPOCH)
            while many:
                yield {"parts_per_batch": many}
                many //= 2
            return
        parts = PARTS_AN_EPOCH
        while parts <= min(MOST_PARTS, graph.num_nodes):
            yield {"parts": parts}
            parts *= 2


class ClusterMode(PartMode):
    """Parts, and the edges between those of a batch; see `Mode`."""

    ranked = True

    def _make_loader(self) -> BatchLoader:
        config = self.config
        parts: dict[str, Any] = {"shuffle": True, "num_parts": config.parts}
        return ClusterLoader(self.dataset, config.parts_per_batch, **parts, **self._subgraphs())

    def met(self, subgraph: Subgraph) -> tuple[int, int]:
        """Edges, of those of the batch's nodes."""
        own, indptr = subgraph.node[: subgraph.num_nodes[0]], np.asarray(self.dataset.graph.indptr)
        return len(subgraph.source), int((indptr[own + 1] - indptr[own]).sum())


class SaintMode(BatchMode):
    """GraphSAINT's random subgraphs, whose coefficients are kept in the run's directory; see `Mode`."""

    saves_device = "fewer `roots`, or a smaller `hidden`"
    ranked = True
    loader: SaintLoader
    node_bytes = 4
    """how often it came"""
    traits = ModeTraits(
        3,
        "GraphSAINT's subgraphs",
        "none on average",
        "random subgraphs, weighed to stand for the whole graph, take {takes}",
        worth=8.0,  # in a random subgraph a node meets few of its neighbors, so that it takes more epochs
        drops="drop edges",
        unweighed="dropped edges, not weighed by attention",
    )

    def _make_loader(self) -> BatchLoader:
        config = self.config
        sizes: dict[str, Any] = {"batch_size": config.roots, "walk_length": config.walk_length}
        sizes |= {"sample_coverage": config.saint_coverage, "save_dir": config.out / "saint"}
        return self.opened.enter_context(closing(SaintLoader(self.dataset, config.saint, **sizes, **self._subgraphs())))

    def prepare(self) -> None:
        """Count how often nodes come: here, and not in a thread of the first epoch."""
        coverage = self.config.saint_coverage
        self.run.watchers.note(f"GraphSAINT estimates its normalization from {coverage:g} draws of each node on average")
        self.loader.prepare()
        super().prepare()

    def upkeep(self, steps: int, asked: float) -> Upkeep:
        """With the subgraphs drawn beforehand."""
        drawn = self.config.saint_coverage * self.dataset.num_nodes / max(1.0, asked)
        return replace(super().upkeep(steps, asked), beforehand=drawn)

    @property
    def weighed(self) -> bool:
        """Attention takes no coefficients."""
        return not (self.config.model == "gat" or ":" in self.config.model)
