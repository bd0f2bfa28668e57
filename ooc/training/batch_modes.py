"""The modes "sampled", "cluster" and "saint": batches of sampled neighborhoods, of parts, and random subgraphs."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ooc.config.nodes import LEARNING, PARTS_AN_EPOCH
from ooc.graph.blocks import Subgraph
from ooc.history.gradient_norms import GradientNorms
from ooc.history.history import Growth
from ooc.loading.base import BatchLoader
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.subgraph_loaders import ClusterLoader, SaintLoader
from ooc.planning.choose_mode import ModeTraits
from ooc.planning.run_plan import Upkeep
from ooc.sampling.labor import Labor
from ooc.sampling.layer_wise import LayerWise, NodeImportance
from ooc.sampling.learned import NODE_BYTES
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.batch_mode import BatchMode
from ooc.training.learned_sampling import LearnedSampling
from ooc.training.mode import RunContext, RunState

NORMS = "importance"
"""of the norms of gradients that sources are drawn by, in the run's directory"""
MOST_PARTS = 2**14
"""parts to make at most where the settings are open"""


class SampledMode(BatchMode):
    """Sampled neighborhoods; see `Mode`."""

    saves_device = "a smaller `gpu_memory`, so that less stays there, or a smaller `batch_size`, `fanout` or `hidden`"
    ranked = True
    prefers_exact = False
    pools = True
    typed = True
    traits = ModeTraits(0, "sampled neighborhoods", "none")
    learned: LearnedSampling | None = None
    """how sources are drawn, where that is learned"""
    norms: GradientNorms | None = None
    """of the loss's gradient by the rows of nodes, where sources are drawn by them; from `open` on"""

    def notes(self) -> list[str]:
        """See `Mode`; with a GPU also where neighbors are sampled."""
        place = [str(self.loader.sample_place)] if self.device.type == "cuda" else []
        return [*super().notes(), *place]

    def _make_loader(self) -> BatchLoader:
        config = self.config
        if config.sampler in LEARNING:
            self._check_learning()
        if config.sampler == "learned":
            self.learned = LearnedSampling(self.dataset, config.seed)
        more = {} if self.by_norms is None else {"pre_aggregation": None}  # the rows have gradients of their own
        shuffled: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": True, "seed": config.seed}
        return NeighborLoader(
            self.dataset,
            self._neighbors(config.fanout),
            input_nodes=self._input(config.train_split),
            sampler=self.sampler,
            pack=None if config.pack is None else (config.pack, self._pack_folder()),
            **shuffled,
            **self._sampling() | more,
        )

    @cached_property
    def by_norms(self) -> NodeImportance | None:
        """The importance of nodes by the norms of gradients, where sources are drawn by it."""
        if self.config.sampler != "gradient":
            return None
        return NodeImportance("gradient", np.ones(self.dataset.num_nodes, np.float32))

    def _check_learning(self) -> None:
        """Raise ConfigError where sampling cannot learn from the steps."""
        name = self.config.sampler
        if not self.ranks.alone:
            raise ConfigError(f"sampler = {name} learns from the steps of one process: start it without torchrun")
        if self.dataset.is_hetero:
            raise ConfigError(
                f"sampler = {name} is for graphs of one type, and {self.dataset.path} has several: choose another"
            )

    def _pack_folder(self) -> Path:
        """The run's directory or, before there is one, the nearest folder above it."""
        out = self.config.out.absolute()
        return next(folder for folder in (out, *out.parents) if folder.is_dir())

    @property
    def sampler(self) -> Labor | LayerWise | None:
        """How training batches are drawn; scores do not depend on it, because their batches draw at each node independently."""
        config = self.config
        if config.sampler == "labor":
            return Labor(config.layer_dependency, config.batch_dependency, config.importance)
        if config.sampler == "neighbor":
            return None
        if config.sampler == "gradient" or config.sampler == "learned":
            own = self.by_norms if self.learned is None else self.learned.policy
            assert own is not None
            return LayerWise(own, config.normalize)
        return LayerWise(config.sampler, config.normalize)

    @property
    def node_bytes(self) -> int:
        """See `BatchMode`: an importance that does not depend on the batch."""
        of_runs = {"learned": NODE_BYTES, "gradient": 4}
        if self.config.sampler in of_runs:
            return of_runs[self.config.sampler]
        return self.sampler.node_bytes if isinstance(self.sampler, LayerWise) else 0

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        super().open(run, saved, growth)
        if self.learned is not None and saved:
            self.learned.load(saved["sampler"])
        if self.by_norms is not None:
            kept = GradientNorms.open(self.config.out / NORMS, self.by_norms.values, saved["sampler"] if saved else None)
            self.norms = self.opened.enter_context(closing(kept))

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """See `Mode`; period by period where sampling is learned."""
        if self.norms is not None and step == 0:
            self.norms.begin_epoch()
        return super().batches(epoch, step, stop) if self.learned is None else self._periods(epoch, step, stop)

    def _periods(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        assert self.learned is not None
        for first, end in self.learned.periods(step, stop, self.steps_per_epoch):
            with closing(super().batches(epoch, first, end)) as batches:  # type: ignore[type-var]
                yield from batches

    def step(self, batch: Any, share: float, last: bool = True) -> Tensor:
        """See `Mode`; with what sampling learns of the loss."""
        if self.norms is not None:
            batch.x.requires_grad_()
        loss = super().step(batch, share, last)
        if self.learned is not None:
            self.learned.learn(getattr(batch, "draw_score", None), float(loss.detach()))
        if self.norms is not None and batch.x.grad is not None:
            scale = share / self.scaler.get_scale()
            self.norms.put(batch.n_id.cpu().numpy(), (scale * norms_of(batch)).cpu().numpy())
        return loss

    def state(self, cursor: RunState) -> dict[str, Any]:
        """See `Mode`."""
        own = self.learned or self.norms
        return super().state(cursor) | {"sampler": None if own is None else own.state()}

    def commit(self) -> None:
        """See `Mode`."""
        super().commit()
        if self.norms is not None:
            self.norms.commit()

    def _twin(self) -> Self:
        """See `BatchPlanning`: nothing is learned of a trial."""
        other = super()._twin()
        other.learned = other.norms = None
        return other

    @property
    def seeds_per_step(self) -> int:
        return self.config.batch_size * self.ranks.world_size


def norms_of(batch: Any) -> Tensor:
    """The norms of the gradient by the rows of a batch, float32[n], without what their edges stand for."""
    block = batch.blocks[0]
    source, factor = block.edge_index[0], block.stands_for
    edges = torch.zeros(block.num_src, device=factor.device).index_add_(0, source, torch.ones_like(factor))
    mean = torch.zeros_like(edges).index_add_(0, source, factor) / edges.clamp(min=1)
    found: Tensor = batch.x.grad.float().flatten(1).norm(dim=1) / torch.where(edges > 0, mean, 1.0)
    return found


class PartMode(BatchMode):
    """Batches of parts; see `Mode`."""

    whole_subgraphs = True

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

    whole_subgraphs = True

    saves_device = "fewer `roots`, or a smaller `hidden`"
    ranked = True
    loader: SaintLoader
    traits = ModeTraits(
        3,
        "GraphSAINT's subgraphs",
        "none on average",
        "random subgraphs, weighed to stand for the whole graph, take {takes}",
        worth=8.0,  # in a random subgraph a node meets few of its neighbors, so that it takes more epochs
        drops="drop edges",
        unweighed="dropped edges, not weighed by attention",
    )

    @property
    def node_bytes(self) -> int:
        """See `BatchMode`: how often a node came."""
        return 4

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
