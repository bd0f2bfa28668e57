"""Terminal tables of a `StepPlan`."""

from rich.table import Table

from ooc.fullgraph.ir import Program, TensorPlacement
from ooc.fullgraph.placement.costs import MOVED, TIERS
from ooc.fullgraph.placement.step_plan import TIER_NAMES, StepPlan
from ooc.report.plan_tables import plain_table
from stores.sizes import format_bytes


def step_tables(program: Program, plan: StepPlan) -> list[Table]:
    """Return tables of every value's placement, each op's cost, and the whole step.

    >>> for each in step_tables(program, plan):
    ...     Console().print(each)
    """
    return [_values(program, plan), _ops(plan), _step(plan)]


def _values(program: Program, plan: StepPlan) -> Table:
    table = plain_table("intermediates", "value", "kind", "size", "placement")
    for value in program.values:
        placement = plan.placement.of(value.name)
        text = str(placement)
        if placement is TensorPlacement.RECOMPUTED and value.kind == "rows":
            text += f", via {TIER_NAMES[plan.placement.standing(value.name)]}"
        table.add_row(value.name, value.kind, format_bytes(plan.sizes[value.name]), text)
    return table


def _ops(plan: StepPlan) -> Table:
    moves = [(number, tier) for number, tier in enumerate(MOVED) if plan.moved(tier) != (0, 0)]
    names = [f"{TIER_NAMES[tier]} {way}" for _, tier in moves for way in ("read", "written")]
    table = plain_table("ops", "op", "seconds", "compute", "passes", "memory", *names)
    for run in plan.runs:
        sizes = [format_bytes(way[number]) for number, _ in moves for way in (run.read, run.written)]
        seconds = f"{run.stop - run.start:.3g}", f"{run.parts[0]:.3g}"
        table.add_row(run.name, *seconds, str(run.passes), format_bytes(run.memory[0]), *sizes)
    return table


def _step(plan: StepPlan) -> Table:
    table = plain_table("a step over the whole graph", "", "")
    table.add_row("seconds per epoch", f"{plan.seconds:.3g}", style="bold")
    for number, tier in enumerate(TIERS):
        if plan.room.bytes[number]:
            sizes = format_bytes(plan.peak[number]), format_bytes(plan.room.bytes[number])
            table.add_row(f"{TIER_NAMES[tier]}, peak", f"{sizes[0]} of {sizes[1]}")
    for tier in MOVED:
        read, written = plan.moved(tier)
        if read or written:
            table.add_row(f"read from {TIER_NAMES[tier]}", format_bytes(read))
            table.add_row(f"written to {TIER_NAMES[tier]}", format_bytes(written))
    for name, seconds in plan.static.items():
        table.add_row(f"with {name}", "does not fit" if seconds is None else f"{seconds:.3g} s")
    return table
