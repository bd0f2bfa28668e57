"""Whether the first step of a run fits its memory: what its layers would take beside what the process has by then."""

from typing import Any

from ooc.models.recomputation import Given
from ooc.planning.measure_layers import size_of
from ooc.planning.recomputation import RecomputationPlanner
from ooc.planning.run_plan import CLOSE
from ooc.runtime.memory import return_freed
from ooc.stores.errors import BudgetError
from ooc.stores.process import resident_bytes
from ooc.stores.sizes import format_bytes

CACHED = 1.2
"""of a step's activations: freed blocks that the C library keeps beside them where it may (1.1 as measured)"""
COPIES = 8
"""of a layer's rows and messages at once, more than any layer has: in, out and between, and their gradients"""


def most_activations(model: Any, batch: Any) -> int:
    """Bytes above those of a step's activations, by the sizes of its blocks and parameters alone.

    >>> most_activations(model, batch)
    301989888
    """
    width = max((max(each.shape, default=1) for each in model.parameters()), default=1)
    return COPIES * 4 * width * sum(sum(size_of(block)) for block in batch.blocks)


def check_first_step(planner: RecomputationPlanner, model: Any, batch: Any, given: Given | None, memory: int) -> bool:
    """Refuse a step that would take more memory than the process may have, before it is computed.

    Where sizes leave it open, layers are run one by one, which takes little memory, and what all of them take is added up.
    Batches and caches that come later are not counted, nor are the loss and the decoder: so what is refused would not have fit.

    Args:
        planner: Measures the layers, and plans as `activation_checkpointing="auto"` does.
        model: A model of layers.
        batch: The first one of a run.
        given: What is recomputed; None: what the planner plans.
        memory: Bytes that the process may have.

    Returns:
        Whether freed blocks are to be returned to the system, as those that the C library caches would not fit.

    Raises:
        BudgetError: If the step does not fit; it says whether recomputing would do.

    >>> check_first_step(RecomputationPlanner(room=50_000_000), model, batch, False, memory=600_000_000)
    ooc.stores.errors.BudgetError: a step would take about 1.02 GB of 600 MB of memory, 700 MB of it for activations: ...
    """
    if resident_bytes()[0] + (1 + CACHED) * most_activations(model, batch) <= memory:
        return False
    planned = planner(model, batch)
    return_freed()
    others, _ = resident_bytes()
    activations = planner.predict(planned if given is None else given).peak
    if (need := others + activations) <= CLOSE * memory:
        return need + CACHED * activations > memory
    least = others + planner.predict(planned).peak
    saves = given is not None and least <= memory
    auto = f"`activation_checkpointing='auto'`, which takes about {format_bytes(least)}, " if saves else ""
    raise BudgetError(
        f"a step would take about {format_bytes(need)} of {format_bytes(memory)} of memory, {format_bytes(activations)} of it "
        f"for activations: give {auto}smaller batches, narrower layers, or `memory` at least {format_bytes(need)}"
    )
