"""The mode "full": a step's gradient is that of all labelled nodes of the training split, and a step is an epoch.

Where the values of a step go is planned, as a run began, or all alike, on the disk that there is.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ooc.config.base import RunConfig
from ooc.config.nodes import FullConfig
from ooc.fullgraph.activation_offload import SEGMENT_BYTES
from ooc.fullgraph.executor import LossOf
from ooc.fullgraph.halo.part import HaloSettings, starts_of
from ooc.fullgraph.halo.reach import Choose, recompute_none
from ooc.fullgraph.halo.recompute import HaloRows
from ooc.fullgraph.placement.op_costs import PackCost, Speed, StepProfile
from ooc.fullgraph.placement.step_plan import StepPlan, TierRoom, predict, settled, static_placements
from ooc.fullgraph.placement.step_profile import plan_full, plan_resident, profile
from ooc.fullgraph.program import Program, TensorPlacement
from ooc.fullgraph.step import FullGraph, chunk_bytes
from ooc.history.history import Growth
from ooc.layerwise.pass_plan import FEATURES
from ooc.layerwise.scores import ExactScores
from ooc.layerwise.shape import besides_bytes, least_bytes, room_in, shape_of
from ooc.loading.choose_pool import device_plan
from ooc.metrics.losses import LabelLoss
from ooc.metrics.tasks import LabelTask
from ooc.planning.over_ranks import RanksPlan, plan_over_ranks
from ooc.runtime.clock import write_trace
from ooc.runtime.memory import keep_large_blocks, return_freed
from ooc.runtime.memory_plan import beside_scores, plan_memory
from ooc.runtime.messages import Pace
from ooc.runtime.ranks import ALONE, RankLost, Ranks
from ooc.runtime.transfer import to_device
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.sizes import parse_bytes
from ooc.training import checkpoint
from ooc.training.build import device_model_bytes, model_bytes
from ooc.training.halo_choice import HaloChoice, fixed_choice, kept_choice, measured_choice
from ooc.training.mode import RunContext, RunState, Scores
from ooc.training.node_mode import EXACT_FOLDER, NodeMode, labels_of, make_loss

FOLDER = "full"
"""of what does not fit the memory, in the run's directory"""
FORCED = {
    "retained": "all retained",
    "device": "all on the GPU",
    "disk": "all on disk",
    "recomputed": "all recomputed",
    "compressed": "all compressed",
    "inverted": "all inverted",
}
"""`FullConfig.placement` -> the static plan"""
_DISK_FRACTION = 0.9
"""of what is free"""
_ANY_MEMORY = 1 << 60


class SplitLoss:
    """The loss of a split's labelled nodes, a few rows at a time: what they add to the mean over all of them. checked: returns
    (outputs, labels)'s outputs, or raises."""

    def __init__(self, loss: LabelLoss, dataset: Dataset, split: str, checked: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._loss, self._dataset, self._members, self._checked = loss, dataset, dataset.members(split), checked
        self.total = sum(loss.weight(labels) for labels in labels_of(dataset, split))

    def __call__(self, first: int, logits: Tensor) -> Tensor | None:
        node = np.arange(first, first + len(logits))
        at = np.flatnonzero(self._members.contains(node))
        if not len(at):
            return None
        labels: Any = self._dataset.labels
        known = torch.from_numpy(np.asarray(labels[node[at]]))
        if not self._loss.weight(known):
            return None
        rows, known = to_device([torch.from_numpy(at), known], logits.device)
        return self._loss.part(self._checked(logits[rows], known), known) / self.total


@dataclass(frozen=True)
class FullPlan:
    """What exact training would take: the values and ops of a step, and the plan of one."""

    program: Program
    step: StepPlan
    ranks: RanksPlan | None = None
    """what several processes take, where that was asked for"""
    needs_more: ClassVar[int] = 0
    """see `ooc.planning.run_plan.Plan`: a plan of exact training fits, or there is none"""

    def __str__(self) -> str:
        """The prediction in one line."""
        return str(self.step)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def asdict(self) -> dict[str, Any]:
        return self.step.asdict() | ({} if self.ranks is None else {"ranks": self.ranks.asdict()})


class FullMode(NodeMode):
    """Exact training on the whole graph; see `Mode`. On a GPU only where --device asks for it."""

    config: FullConfig
    auto_device = "cpu"
    plans_disk = True
    ranked = True
    steps_per_epoch = 1
    saves_device = "a smaller `gpu_memory`, so that less stays there, or a smaller `hidden`"

    def __init__(self, config: FullConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        if config.compress is not None and self.device.type != "cpu":
            raise ConfigError("compress in mode full is for the CPU: leave it out, or give `device='cpu'`")
        self.budget = plan_memory(dataset, model_bytes(config, self.model))
        loss = make_loss(config, dataset, self.task, self.device)
        self.split_loss = SplitLoss(loss, dataset, config.train_split, self.checked)
        self.model.train()
        for name, given, alone in (("halo", config.halo, "exact"), ("halo_recompute", config.halo_recompute, "none")):
            if ranks.alone and given != alone:
                raise ConfigError(f"{name} = {given!r} applies to several processes: start them with torchrun, or leave it out")
        self._memory = ranks.together(self._device_memory)
        self.choice = self._choice()
        self.full = self.opened.enter_context(closing(self._opened(config.out / FOLDER, self.choice.choose)))
        self.plan: StepPlan | None = None
        """as predicted before the first step"""
        self.seconds: list[float] = []
        """of every step of this process"""

    def _opened(self, folder: Path, recompute: Choose) -> FullGraph:
        """Exact training in a folder."""
        made: dict[str, Any] = {"budget": self.budget, "engine": self.engine, "device_memory": self._memory}
        more: dict[str, Any] = {"ranks": self.ranks, "halo": _halo_of(self.config), "recompute": recompute}
        more["compress"] = self.config.compress
        return FullGraph(self.model, self.dataset, folder, **made, **more)

    def _choice(self) -> HaloChoice:
        """Which rows of the halo this run recomputes."""
        config, ranks = self.config, self.ranks
        if config.halo_recompute != "auto":
            return fixed_choice(config.halo_recompute)
        asked = {"store": self.dataset.fingerprint, "processes": ranks.world_size, "halo": asdict(_halo_of(config))}
        asked |= {"bandwidth": config.halo_bandwidth}
        kept: HaloChoice | None = ranks.decided(lambda: kept_choice(config.out, asked))
        if kept is not None:
            return kept
        bandwidth = None if config.halo_bandwidth is None else parse_bytes(config.halo_bandwidth)

        def trial(folder: Path) -> FullGraph:
            return self._opened(folder, recompute_none)

        return measured_choice(trial, ranks, checkpoint.nearest_folder(config.out), _halo_of(config), bandwidth, asked)

    def _device_memory(self) -> int:
        """Bytes of the GPU for what stays there; booked as activations. Raises BudgetError where a chunk alone is too much."""
        device = device_plan(self.device, self.config.gpu_memory, device_model_bytes(self.config, self.model))
        if device is None:
            return 0
        chunk = chunk_bytes(shape_of(self.model, self.dataset, training=True))
        device = device.beside(0, chunk, device.memory, 0, instead="or a smaller `hidden`")
        self.budget = replace(self.budget, device=replace(device, pool=0, activations=chunk + device.pool))
        return device.pool

    def _book_copies(self) -> None:
        """Book features and edges by themselves, where they are on the GPU."""
        device, (features, edges) = self.budget.device, self.full.copied_bytes
        if device is not None and self.full.placement.resident:
            left = device.activations - features - edges
            self.budget = replace(self.budget, device=replace(device, pool=features, topology=edges, activations=left))

    @property
    def seeds_per_step(self) -> int:
        return self.dataset.num_nodes

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        """See `Mode`; places the values of a step."""
        self.run, config, full = run, self.config, self.full
        keep_large_blocks(True)  # as steps do: their ops are timed
        if self.choice.ways:  # measured now, not when the run began
            self.choice.keep(config.out)
            run.watchers.note(str(self.choice))
        self.plan = _place(config, full, config.out, self.split_loss)
        self._book_copies()
        exact = _scores_beside(full, config.out / EXACT_FOLDER, self.engine, self.task)
        self.exact = self.opened.enter_context(closing(exact))
        beside = self.exact.memory_bytes
        most = 0 if full.placement.resident else full.most_bytes
        self._both_fit = beside is not None and most + beside <= full.room
        """whether memory has room for what steps and scores keep at once"""
        if self.plan is not None:
            planned = {**self.plan.asdict(), "asked": _asked(config, full)}
            checkpoint.write_json(config.out / checkpoint.PLAN, planned)
            run.watchers.note(f"plan: {self.plan}")

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        yield None

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError("an exact step has its own backward")

    def step(self, batch: Any, share: float, last: bool = True) -> Tensor:
        assert self.exact is not None
        if not self._both_fit:
            self.exact.make_room()
        pace = Pace(self.run.watchers.note)

        def progress(what: str, done: int, total: int) -> None:
            pace(what, done, total, "edges" if what == "edges" else "nodes")
            if self.run.interrupted:
                raise KeyboardInterrupt

        self.full.load(progress)
        began = time.perf_counter()
        loss = self.full.step(self.split_loss, progress)
        self.seconds.append(time.perf_counter() - began)
        return torch.tensor(loss)

    def is_scored(self, epoch: int, steps_left: int) -> bool:
        """Also where `max_steps` ends the run."""
        return steps_left <= 0 or super().is_scored(epoch, steps_left)

    def score(self, split: str, epoch: int) -> Scores | None:
        assert self.exact is not None
        if not self._both_fit:
            if self.exact.beside:
                self.full.trim()
            else:
                self.full.make_room()
        return_freed()
        return super().score(split, epoch)

    def state(self, cursor: RunState) -> dict[str, Any]:
        """Nothing: a step ends before a checkpoint."""
        return {}

    def counts(self) -> dict[str, Any]:
        return {"bytes_read": self.full.traffic.bytes_read, "stages": {}}

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        traffic = self.full.traffic
        moved = {"bytes_read": traffic.bytes_read, "bytes_written": traffic.bytes_written}
        if not self.ranks.alone:
            moved["bytes_exchanged"] = sum(self.ranks.gather(self.full.bytes_exchanged))
            moved["rows_recomputed"] = sum(self.ranks.gather(sum(self.full.shape.recomputed)))
        took = {"step_seconds": self.seconds, "op_seconds": traffic.seconds, "ops": traffic.ops, "busy_seconds": traffic.busy()}
        found = {**super().finish(result), "full": {**moved, **took}, **self._compared(moved)}
        self.full.discard()
        write_trace(self.config.out, traffic.spans(), traffic.samples)
        return found

    def _compared(self, moved: dict[str, int]) -> dict[str, Any]:
        """What was predicted of this process's steps, beside what they took."""
        plan, steps = self.plan, len(self.seconds)
        if plan is None or not steps:
            return {}
        read, written = plan.moved(TensorPlacement.DISK)
        predicted = {"seconds_per_epoch": plan.seconds, "value_bytes": plan.peak[0]}
        predicted |= {"bytes_read": steps * read, "bytes_written": steps * written}
        most = max((sample.memory for sample in self.full.traffic.samples), default=0)
        actual = {"seconds_per_epoch": statistics.median(self.seconds), "value_bytes": most, **moved}
        return {"plan": {"predicted": predicted, "actual": actual, "advice": None}}

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        alone = {"halo": "exact", "halo_recompute": "none"}  # one process plans for several
        return config.model_copy(update={"plan": True, **alone})

    def predict(self, seconds: float, variants: bool) -> FullPlan:
        """See `Mode`; made by `open`."""
        assert self.plan is not None, "`planned` has a plan made"
        return FullPlan(self.full.program, self.plan)

    def predict_ranks(self, nproc: int, bandwidth: int) -> RanksPlan:
        """See `Mode`; for all rows of the halo in every epoch, for those settings that send less, and for ways to recompute."""
        full, alone, config = self.full, super().predict_ranks(nproc, bandwidth), self.config
        starts = starts_of(self.dataset, nproc)
        edges = np.diff(self.dataset.graph.indptr[starts])
        sizes = list(zip(np.diff(starts).tolist(), edges.tolist(), strict=True))
        disk = max(0, (full.disk or 0) - SEGMENT_BYTES)
        measured = profile(full, config.out, self.split_loss, disk)
        options = [
            HaloSettings(),
            HaloSettings("sampled", rate=config.halo_rate),
            HaloSettings("stale", every=config.halo_every),
        ]
        room = TierRoom(full.room, full.device_room, disk)
        halos = [HaloRows(self.dataset, starts, rank, full.shape) for rank in range(nproc)]
        on_disk = full.placement.of(FEATURES.name) is TensorPlacement.DISK
        made = full.shape, full.program, measured, room, halos, sizes, alone, options, _halo_of(config), on_disk
        return plan_over_ranks(*made)


def _halo_of(config: FullConfig) -> HaloSettings:
    """How rows of the halo are exchanged."""
    return HaloSettings(config.halo, config.halo_rate, config.halo_every, config.halo_tolerance)


def _place(config: FullConfig, full: FullGraph, folder: Path, loss: LossOf) -> StepPlan | None:
    """Place the values of `full`'s steps, as configured. The plan, by a profile of a few seconds; None without one.

    folder: the run's, on whose disk values may stand. A run goes on by the plan it began with, where that was made for the same
    store and settings and fits. Raises BudgetError where nothing fits, or not what is asked for.
    """
    full.disk = full.ranks.together(lambda: _disk_of(config, folder))
    disk = max(0, full.disk - SEGMENT_BYTES)  # files of what autograd keeps grow by so much
    room, unmeasured = TierRoom(full.room, full.device_room, disk), _unmeasured(full)
    made = _kept(config, full, folder, room) if config.plans and full.ranks.alone else None
    if made is None and config.placement != "planned":
        made = full.ranks.together(lambda: _forced(config, full, folder, room, loss, unmeasured))
    elif made is None and config.plans:
        made = plan_full(full, folder, room.disk, loss)
    elif made is None:  # by default; refused here where the disk has no room for it, before anything is written
        most = TierRoom(_ANY_MEMORY, _ANY_MEMORY, room.disk)
        full.ranks.together(lambda: predict(full.program, unmeasured, full.placement, most))
        return None
    full.placement = made.placement
    return made if config.plans else None


def _forced(
    config: FullConfig, full: FullGraph, folder: Path, room: TierRoom, loss: LossOf, unmeasured: StepProfile
) -> StepPlan:
    """The plan that treats all values alike, as configured. Raises ConfigError where there is no such tier."""
    if config.placement == "device" and (there := _resident(config, full, room, loss, unmeasured)) is not None:
        return there
    measured = profile(full, folder, loss, room.disk) if config.plans else unmeasured
    static = static_placements(full.program, measured)
    if config.placement == "inverted" and not full.program.undone_by:
        raise ConfigError(
            "placement = 'inverted' is for rows between reversible layers (models revsage, revgat, revgcn) in one process: "
            "leave it out, or choose another"
        )
    if FORCED[config.placement] not in static:
        raise ConfigError(
            f"placement = {config.placement!r}: without a GPU there is no memory of one, and values go "
            "to disk only where `disk` and what is free leave room"
        )
    forced = static[FORCED[config.placement]]
    return settled(full.program, measured, lambda profile: predict(full.program, profile, forced, room))


def _resident(config: FullConfig, full: FullGraph, room: TierRoom, loss: LossOf, unmeasured: StepProfile) -> StepPlan | None:
    """The plan of everything on the GPU; None where it has no memory for all."""
    if config.plan:
        return plan_resident(full, room.disk, loss)
    found = full.resident()
    return None if found is None else predict(full.program, unmeasured, found, replace(room, device=_ANY_MEMORY))


def _unmeasured(full: FullGraph) -> StepProfile:
    """A profile by which plans are refused, but not compared."""
    tiers = (TensorPlacement.DISK, *([TensorPlacement.RETAINED] if full.on_gpu else []))
    saved = [value.name for value in full.program.values if TensorPlacement.COMPRESSED in value.placements]
    return StepProfile({}, dict.fromkeys(tiers, Speed(1.0, 1.0)), 0.0, packed=dict.fromkeys(saved, PackCost()))


def _asked(config: FullConfig, full: FullGraph) -> dict[str, Any]:
    """What a plan is made for: kept beside it."""
    asked = {"placement": config.placement, "store": full.whole.fingerprint, **({"device": "cuda"} if full.on_gpu else {})}
    return asked if config.compress is None else {**asked, "compress": config.compress}


def _kept(config: FullConfig, full: FullGraph, folder: Path, room: TierRoom) -> StepPlan | None:
    """The plan that the run began with, where it is still what is asked for and fits."""
    kept = checkpoint.read_plan(folder)
    if kept is None or kept.get("asked") != _asked(config, full):
        return None
    plan = StepPlan.of(kept)
    if plan.placement.resident and full.resident(plan.sizes) is None:
        return None
    return plan if all(most <= has for most, has in zip(plan.peak, room.bytes, strict=True)) else None


def _disk_of(config: FullConfig, folder: Path) -> int:
    """Bytes of disk for values: those asked for, but no more than are free or hold what the run left there."""
    own = sum(path.stat().st_blocks * 512 for path in (folder / FOLDER).rglob("*") if path.is_file())
    free = int((shutil.disk_usage(folder).free + own) * _DISK_FRACTION)
    return free if config.disk_bytes is None else min(config.disk_bytes, free)


def _scores_beside(full: FullGraph, folder: Path, engine: str, task: LabelTask) -> ExactScores:
    """Scores in the memory beside what a step leaves to the next one, or in its place where that is too much; in a folder that
    all ranks see."""
    made = full.model, full.whole, full.ranks.broadcast(folder), engine
    if all(full.ranks.gather(_has_room_beside(full))):
        with suppress(BudgetError, RankLost):  # of one rank, and of the others: all try again
            return ExactScores(*made, full.held_bytes, full.budget, task, full.ranks)
    return ExactScores(*made, budget=full.budget, task=task, ranks=full.ranks)


def _has_room_beside(full: FullGraph) -> bool:
    """Whether this process has memory for a pass beside what a step leaves to the next one."""
    if not 0 < full.held_bytes <= beside_scores(full.room):
        return False
    shape = shape_of(full.model, full.whole)
    besides = besides_bytes(shape, full.whole.graph)
    with suppress(BudgetError):
        return (
            room_in(
                full.whole, besides, "scores", least_bytes(full.whole.graph, shape), beside=full.held_bytes, budget=full.budget
            )
            > 0
        )
    return False
