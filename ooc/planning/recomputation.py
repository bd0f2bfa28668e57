"""What is recomputed in the backward pass, planned for batch after batch by measured costs and the memory that there is."""

from collections.abc import Callable, Sequence
from typing import Any

from torch_geometric.data import HeteroData

from ooc.models.hetero import inputs_of
from ooc.models.recomputation import Given, Recomputation
from ooc.models.user_models import kind_of, parameters_of
from ooc.planning.measure_layers import MeasuredLayers, degrees_of, measured_layers, size_of
from ooc.planning.recomputation_plan import LayerCosts, RecomputationPlan, Size, StepCost, plan_recomputation, predicted
from ooc.runtime.memory import cuda_bytes
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.errors import ConfigError
from ooc.stores.process import resident_bytes
from ooc.stores.sizes import format_bytes

SMALLER = 0.8
"""of the size planned for: batches this much smaller are planned anew, as they may keep more"""


def _nothing() -> int:
    return 0


def runs_by_layers(model: Any) -> bool:
    """Whether a model's layers can be run one by one."""
    return hasattr(model, "layers") and (kind_of(model) == "layers" or "checkpoint" in parameters_of(model))


def check_layers(model: Any) -> None:
    """Raise ConfigError for a model whose layers cannot be run one by one."""
    if not runs_by_layers(model):
        raise ConfigError(
            f"layers are measured to decide which are recomputed, and {type(model).__name__} has its own forward: leave "
            "activation_checkpointing out, or give the model a ModuleList `self.layers` and no forward"
        )


class RecomputationPlanner:
    """Plans what is recomputed so that a step's activations fit `room` bytes.

    Layers are measured on the first batch. A plan holds until a batch does not fit it, or is much smaller; and memory that is
    exceeded all the same leaves that much less room, and has layers measured again. Results do not depend on the plan.

    Args:
        room: Bytes for activations.
        exceeded: Returns by how many bytes memory was exceeded so far, at most.

    >>> planner = RecomputationPlanner(room=50_000_000)
    >>> out = model(batch.x, batch.blocks, checkpoint=planner(model, batch))
    """

    def __init__(self, room: int, exceeded: Callable[[], int] = _nothing) -> None:
        self.room, self._exceeded = room, exceeded
        self._seen = max(0, exceeded())  # what was before is not of these steps
        self._measured: MeasuredLayers | None = None
        self._sizes: Sequence[Size] = ()
        self.plan: RecomputationPlan | None = None
        """the latest one"""
        self.plans = self.measurements = 0
        """how many there were"""

    def __str__(self) -> str:
        """The latest plan in a line, for people."""
        if self.plan is None:
            return "nothing is planned yet"
        segments, (kept, peak, seconds) = self.plan.recomputation.segments, self.plan.predicted
        count, layers = sum(stop - first for first, stop in segments), len(self._sizes)
        again = f"{count} of {layers} layers are computed again, {1000 * seconds:.3g} ms a batch" if count else "all are kept"
        room = f"{format_bytes(peak)} at the peak of {format_bytes(self.room)}"
        return f"{again}; {format_bytes(kept)} between the passes, {room}{'' if self.plan.fits else ', which is not enough'}"

    def asdict(self) -> dict[str, Any]:
        """The latest plan, for people: layers recomputed, bytes kept and at the peak, seconds a batch, and how often it was
        made."""
        made: dict[str, Any] = {"room_bytes": self.room, "plans": self.plans, "measurements": self.measurements}
        if self.plan is not None:
            segments, (kept, peak, seconds) = self.plan.recomputation.segments, self.plan.predicted
            made |= {"segments": segments, "kept_sums": self.plan.recomputation.kept_sums, "fits": self.plan.fits}
            made |= {"kept_bytes": kept, "peak_bytes": peak, "batch_seconds": seconds}
        return made

    def __call__(self, model: Any, batch: Any) -> Recomputation:
        """What to recompute of a batch of a loader. Raises ConfigError for a model without layers."""
        return self.of(model, inputs_of(batch) if isinstance(batch, HeteroData) else batch.x, batch.blocks)

    def of(self, model: Any, x: Any, blocks: Sequence[Any]) -> Recomputation:
        """The same of rows and blocks."""
        check_layers(model)
        over = self._exceeded()
        if over > self._seen:
            self.room, self._seen, self._measured = max(0, self.room - (over - self._seen)), over, None
        if self._measured is None:
            self._measured, self.plan = measured_layers(model, x, blocks), None
            self.measurements += 1
        sizes = [size_of(block) for block in blocks]
        if self.plan is None or not self._holds(self.plan, sizes):
            costs, (_, fixed, least) = self._costs(blocks, sizes), self._measured
            self.plan, self._sizes = plan_recomputation(costs, self.room, fixed, least), sizes
            self.plans += 1
        return self.plan.recomputation

    def predict(self, given: Given) -> StepCost:
        """What the batch that was measured last takes, recomputed as `given` says."""
        assert self._measured is not None
        costs, fixed, least = self._measured
        return predicted(costs, Recomputation.of(given, len(costs)), fixed, least)

    def _holds(self, plan: RecomputationPlan, sizes: Sequence[Size]) -> bool:
        """Whether a plan is good for a batch of other sizes."""
        assert self._measured is not None
        costs = [each.for_size(size) for each, size in zip(self._measured.costs, sizes, strict=True)]
        if plan.fits and predicted(costs, plan.recomputation, self._measured.fixed).peak > self.room:
            return False
        smaller = max(
            new / max(1, old) for size, was in zip(sizes, self._sizes, strict=True) for new, old in zip(size, was, strict=True)
        )
        return smaller >= SMALLER or not plan.recomputation

    def _costs(self, blocks: Sequence[Any], sizes: Sequence[Size]) -> list[LayerCosts]:
        assert self._measured is not None
        own = zip(self._measured.costs, blocks, sizes, strict=True)
        return [each.for_size(size, degrees_of(block) if each.sum_bytes else ()) for each, block, size in own]


def planner_for(model: Any, budget: MemoryPlan) -> RecomputationPlanner:
    """What plans the activations of a run. Memory is exceeded where the process has had more than it may, or on a GPU, tensors.

    Raises ConfigError for a model whose layers cannot be run one by one.
    """
    check_layers(model)
    device = budget.device

    def exceeded() -> int:
        return resident_bytes()[1] - budget.memory if device is None else cuda_bytes()[1] - device.memory

    return RecomputationPlanner(budget.step_activations, exceeded)
