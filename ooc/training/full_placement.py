"""Where the values of a run's exact steps go: planned, as a run began, or all alike, on the disk that there is."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ooc.config.full import FullConfig
from ooc.fullgraph.activation_offload import SEGMENT_BYTES
from ooc.fullgraph.executor import LossOf
from ooc.fullgraph.ir import TensorPlacement
from ooc.fullgraph.placement.costs import Speed, StepProfile
from ooc.fullgraph.placement.step_plan import StepPlan, TierRoom, predict, settled, static_placements
from ooc.fullgraph.placement.step_profile import plan_full, profile
from ooc.fullgraph.step import FullGraph
from ooc.layerwise.scores import ExactScores
from ooc.training import checkpoint
from stores.errors import BudgetError, ConfigError

FOLDER = "full"
"""of what does not fit the memory, in the run's directory"""
FORCED = {"retained": "all retained", "host": "all on the host", "disk": "all on disk", "recomputed": "all recomputed"}
"""`FullConfig.placement` -> the static plan"""
_DISK_FRACTION = 0.9
"""of what is free"""
_UNMEASURED = StepProfile({}, {TensorPlacement.DISK: Speed(1.0, 1.0)}, 0.0)


def place(config: FullConfig, full: FullGraph, folder: Path, loss: LossOf) -> StepPlan | None:
    """Where values go, as configured: `full` has it then. The plan, by a profile of a few seconds; None without one.

    folder: the run's, on whose disk values may stand; loss: of its steps. A run goes on by the plan it began with, where that
    was made for the same store and settings and fits. Raises BudgetError where nothing fits, or not what is asked for.
    """
    full.disk = disk_of(config, folder)
    room = TierRoom(full.room, 0, max(0, full.disk - SEGMENT_BYTES))  # files of what autograd keeps grow by so much
    made = _kept(config, full, folder, room) if config.plan else None
    if made is None and config.placement != "planned":
        measured = profile(full, folder, loss, room.disk) if config.plan else _UNMEASURED
        static = static_placements(full.program, measured)
        if FORCED[config.placement] not in static:
            raise ConfigError(_NO_TIER.format(config.placement))
        forced = static[FORCED[config.placement]]
        made = settled(full.program, measured, lambda profile: predict(full.program, profile, forced, room))
    elif made is None and config.plan:
        made = plan_full(full, folder, room.disk, loss)
    elif made is None:  # by default; refused here where the disk has no room for it, before anything is written
        predict(full.program, _UNMEASURED, full.placement, TierRoom(_ANY_MEMORY, 0, room.disk))
        return None
    full.placement = made.placement
    return made if config.plan else None


_ANY_MEMORY = 1 << 60
_NO_TIER = (
    "placement = {!r}: a machine without a GPU has no host memory beside its own, and values go to disk only where --disk and "
    "what is free leave room"
)


def asked_of(config: FullConfig, full: FullGraph) -> dict[str, Any]:
    """What a plan was made for: kept beside it."""
    return {"placement": config.placement, "store": full.dataset.fingerprint}


def _kept(config: FullConfig, full: FullGraph, folder: Path, room: TierRoom) -> StepPlan | None:
    """The plan that the run began with, where it is still what is asked for and fits."""
    kept = checkpoint.read_plan(folder)
    if kept is None or kept.get("asked") != asked_of(config, full):
        return None
    plan = StepPlan.of(kept)
    return plan if all(most <= has for most, has in zip(plan.peak, room.bytes, strict=True)) else None


def disk_of(config: FullConfig, folder: Path) -> int:
    """Bytes of disk for values: those asked for, but no more than are free or hold what the run left there."""
    own = sum(path.stat().st_blocks * 512 for path in (folder / FOLDER).rglob("*") if path.is_file())
    free = int((shutil.disk_usage(folder).free + own) * _DISK_FRACTION)
    return free if config.disk_bytes is None else min(config.disk_bytes, free)


def scores_beside(full: FullGraph, folder: Path, engine: str) -> ExactScores:
    """Scores in the memory beside what a step leaves to the next one, or in its place where that is too much."""
    if 0 < full.held_bytes <= full.room // 2:
        with suppress(BudgetError):
            return ExactScores(full.model, full.dataset, folder, engine, full.held_bytes, full.budget)
    return ExactScores(full.model, full.dataset, folder, engine, budget=full.budget)
