"""Terminal tables of plans, and of the modes compared."""

from functools import singledispatch
from typing import Any

from rich.table import Table
from rich.text import Text

from ooc.fullgraph.placement.op_costs import MOVED, TIERS
from ooc.fullgraph.placement.step_plan import TIER_NAMES, StepPlan
from ooc.fullgraph.program import GONE, Program
from ooc.layerwise.pass_plan import label_of
from ooc.planning.choose_mode import ModeChoice
from ooc.planning.over_ranks import RanksPlan
from ooc.planning.run_plan import NAMES, Plan
from ooc.planning.table_plan import TablePlan
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.sizes import format_bytes, format_seconds
from ooc.training.full_mode import FullPlan


@singledispatch
def tables(plan: Any) -> list[Table | Text]:
    """Return what is printed of a plan."""
    raise NotImplementedError


@tables.register
def _of_run(plan: Plan) -> list[Table | Text]:
    reading = [Text(f"features are read: {plan.reading}")] if plan.reading else []
    kept = [Text(f"activations: {plan.activations}")] if plan.activations else []
    return [_memory(plan), _stages(plan), _run(plan), *_ranks(plan.ranks), *reading, *kept, Text(plan.advice)]


@tables.register
def _of_step(plan: FullPlan) -> list[Table | Text]:
    """Every value's placement, each op's cost, and the whole step."""
    return [_values(plan.program, plan.step), _ops(plan.step), _step(plan.step), *_ranks(plan.ranks)]


@tables.register
def _of_table(plan: TablePlan) -> list[Table | Text]:
    """Where the table is, and what an epoch exchanges."""
    table = _table(f"a table, {plan.steps_per_epoch:,} batches an epoch", "", "")
    table.add_row("rows", f"{plan.rows:,} x {plan.width} float32, {format_bytes(plan.row_bytes)} each with their state")
    table.add_row(plan.unit, f"{plan.parts:,} of {format_bytes(plan.part_bytes)}, {plan.trained:,} trained at a time")
    table.add_row("of them in memory", f"{plan.in_memory:,}, {plan.resident_rows:,} rows")
    if "swaps" in plan.facts:
        table.add_row("exchanges an epoch", "{:,} (no order less than {:,})".format(*plan.facts.values()))
    for name, moved in (("first epoch", plan.first), ("a later epoch", plan.later)):
        read, written = (format_bytes(count * plan.part_bytes) for count in (moved.read, moved.written))
        table.add_row(name, f"{read} read, {written} written")
    table.add_row("links read, an epoch", format_bytes(plan.link_bytes_read))
    table.add_row("on disk, at least", format_bytes(plan.disk_bytes))
    return [_parts(plan.budget, plan.peak_bytes), table, Text(plan.advice)]


def _ranks(plan: RanksPlan | None) -> list[Table | Text]:
    """What several processes take, where that was asked for."""
    if plan is None:
        return []
    table = _table(f"{plan.nproc} processes, {format_bytes(plan.bandwidth)}/s", "", "")
    table.add_row("gradients sent by each, a step", f"{format_bytes(plan.gradient_bytes)}, {plan.gradient_seconds:.3g} s")
    if plan.push_bytes:
        sent = f"{format_bytes(plan.push_bytes)}, {plan.push_bytes / plan.bandwidth:.3g} s"
        table.add_row("rows of histories sent by each, an optimizer step", sent)
        table.add_row("memory of one for those of all", format_bytes(plan.push_memory))
    if plan.exchanges:
        table.add_row("memory of one, peak", format_bytes(plan.peak))
        table.add_row("rows of neighbors in other processes", f"{plan.halo:,}")
    for each in plan.exchanges:
        table.add_row(f"an epoch, halo {each.halo}", f"{format_bytes(each.nbytes)} sent, {each.seconds:.3g} s")
    for way in plan.ways:
        chosen, texts = way.name == plan.chosen, (format_bytes(way.nbytes), f"{way.recomputed:,}", f"{way.seconds:.3g}")
        label = f"recompute {way.name}" + " (chosen)" * chosen
        table.add_row(label, "{} sent, {} rows computed, {} s".format(*texts), style="bold" if chosen else None)
    return [table]


def compared(choice: ModeChoice) -> Table:
    """Return a table that compares one epoch of every mode."""
    columns = ("mode", "seconds", "peak memory", "features", "edges", "histories read", "written", "loses")
    table = _table("an epoch by mode", *columns)
    for each in choice.candidates:
        style = "bold" if each.mode == choice.recommended else None
        if each.fix is not None:
            table.add_row(each.mode, *["-"] * 6, "not possible", style=style)
            continue
        sizes = (each.peak_bytes, each.features_read, each.edges_read, each.histories_read, each.histories_written)
        table.add_row(each.mode, f"{each.seconds:.3g}", *map(format_bytes, sizes), each.exactness, style=style)
    table.columns[-1].justify = "left"
    return table


def _table(title: str, *columns: str) -> Table:
    """A table without borders, its first column left-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _memory(plan: Plan) -> Table:
    return _parts(plan.budget, plan.prediction.peak_rss_bytes)


def _parts(budget: MemoryPlan, peak: int) -> Table:
    table = _table("memory", "part", "size")
    for name, size in budget.parts().items():
        table.add_row(name, format_bytes(size))
    table.add_row("predicted peak", format_bytes(peak), style="bold")
    return table


def _stages(plan: Plan) -> Table:
    prediction = plan.prediction
    total = sum(prediction.stages.values())
    table = _table("stages", "stage", "seconds per batch", "in total")
    for name, seconds in prediction.stages.items():
        if seconds and total:
            style = "bold" if name == prediction.bottleneck else None
            table.add_row(NAMES.get(name, name), f"{seconds / plan.steps:.4f}", format_seconds(seconds), style=style)
    return table


def _run(plan: Plan) -> Table:
    prediction = plan.prediction
    table = _table(f"training, {plan.steps:,} batches ({plan.profiled_steps:,} profiled)", "", "")
    each = prediction.seconds_per_epoch
    table.add_row("seconds per epoch", f"{each:.3g}" if each < 1000 else f"{each:,.0f}", style="bold")
    table.add_row("first epoch", format_seconds(prediction.first_epoch_seconds))
    by_passes = not prediction.evaluate_seconds
    scored = "not predicted" if by_passes else format_seconds(prediction.evaluate_seconds)
    table.add_row("evaluation, in total", scored)
    table.add_row("read from disk", format_bytes(prediction.bytes_read))
    if prediction.packed_bytes_written:
        table.add_row("written to pack batches", format_bytes(prediction.packed_bytes_written))
    if prediction.history_bytes_read or prediction.history_bytes_written:
        table.add_row(f"{prediction.kept} read", format_bytes(prediction.history_bytes_read))
        table.add_row(f"{prediction.kept} written", format_bytes(prediction.history_bytes_written))
    if prediction.beforehand_seconds:
        table.add_row("before the first batch", format_seconds(prediction.beforehand_seconds))
    if prediction.hit_rate is not None:
        table.add_row("rows served from memory", f"{100 * prediction.hit_rate:.1f} %")
    if prediction.read_amplification is not None:
        table.add_row("bytes read per byte needed", f"{prediction.read_amplification:.2f}")
    if prediction.read_bytes_per_second is not None:
        table.add_row("read bandwidth", f"{format_bytes(prediction.read_bytes_per_second)}/s")
    for name, seconds in plan.others.items():
        table.add_row(f"epoch with {name}", format_seconds(seconds))
    table.add_row("bottleneck", NAMES.get(prediction.bottleneck, prediction.bottleneck))
    return table


def _values(program: Program, plan: StepPlan) -> Table:
    table = _table("intermediates", "value", "kind", "size", "placement")
    for value in program.values:
        placement = plan.placement.of(value.name)
        text = str(placement)
        if placement in GONE and value.kind == "rows":
            text += f", via {TIER_NAMES[plan.placement.standing(value.name)]}"
        table.add_row(label_of(value.name), value.kind, format_bytes(plan.sizes[value.name]), text)
    return table


def _ops(plan: StepPlan) -> Table:
    moves = [(number, tier) for number, tier in enumerate(MOVED) if plan.moved(tier) != (0, 0)]
    names = [f"{TIER_NAMES[tier]} {way}" for _, tier in moves for way in ("read", "written")]
    table = _table("ops", "op", "seconds", "compute", "passes", "memory", *names)
    for run in plan.runs:
        sizes = [format_bytes(way[number]) for number, _ in moves for way in (run.read, run.written)]
        seconds = f"{run.stop - run.start:.3g}", f"{run.parts[0]:.3g}"
        table.add_row(run.name, *seconds, str(run.passes), format_bytes(run.memory[0]), *sizes)
    return table


def _step(plan: StepPlan) -> Table:
    table = _table("a step over the whole graph", "", "")
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
