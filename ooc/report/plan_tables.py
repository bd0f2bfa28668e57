"""A `Plan` for people: tables for a terminal."""

from rich.table import Table

from ooc.planning.choose import ModeChoice
from ooc.planning.plan import NAMES, Plan
from stores.sizes import format_bytes


def tables(plan: Plan) -> list[Table]:
    """The division of the memory, the stages, and what a run takes."""
    return [_memory(plan), _stages(plan), _run(plan)]


def compared(choice: ModeChoice) -> Table:
    """The modes beside one another, an epoch of each."""
    table = plain_table(
        "an epoch by mode", "mode", "seconds", "peak memory", "features", "edges", "histories read", "written", "loses"
    )
    for each in choice.candidates:
        style = "bold" if each.mode == choice.recommended else None
        if each.fix is not None:
            table.add_row(each.mode, *["-"] * 6, "does not do", style=style)
            continue
        sizes = (each.peak_bytes, each.features_read, each.edges_read, each.histories_read, each.histories_written)
        table.add_row(each.mode, f"{each.seconds:.3g}", *map(format_bytes, sizes), each.exactness, style=style)
    table.columns[-1].justify = "left"
    return table


def plain_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _memory(plan: Plan) -> Table:
    table = plain_table("memory", "part", "size")
    for name, size in plan.budget.parts().items():
        table.add_row(name, format_bytes(size))
    table.add_row("predicted peak", format_bytes(plan.prediction.peak_rss_bytes), style="bold")
    return table


def _stages(plan: Plan) -> Table:
    found = plan.prediction
    total = sum(found.stages.values())
    table = plain_table("stages", "stage", "seconds a batch", "seconds of the run")
    for name, seconds in found.stages.items():
        if seconds and total:
            style = "bold" if name == found.bottleneck else None
            table.add_row(NAMES.get(name, name), f"{seconds / plan.steps:.4f}", f"{seconds:.3g}", style=style)
    return table


def _run(plan: Plan) -> Table:
    found = plan.prediction
    table = plain_table(f"training, {plan.steps:,} batches ({plan.profiled_steps:,} profiled)", "", "")
    table.add_row("seconds an epoch", f"{found.seconds_per_epoch:.3g}", style="bold")
    table.add_row("the first epoch of the run", f"{found.first_epoch_seconds:.3g}")
    scored = f"{found.evaluate_seconds:.3g}" if found.evaluate_seconds else "not predicted"  # by sweeps
    table.add_row("evaluation, all of the run", scored)
    table.add_row("read from disk", format_bytes(found.bytes_read))
    if found.history_bytes_read or found.history_bytes_written:
        table.add_row("histories read", format_bytes(found.history_bytes_read))
        table.add_row("histories written", format_bytes(found.history_bytes_written))
    if found.beforehand_seconds:
        table.add_row("before the first batch", f"{found.beforehand_seconds:.3g}")
    if found.hit_rate is not None:
        table.add_row("rows served from memory", f"{100 * found.hit_rate:.1f} %")
    if found.read_amplification is not None:
        table.add_row("bytes read a byte wanted", f"{found.read_amplification:.2f}")
    if found.read_bytes_per_second is not None:
        table.add_row("while reading", f"{format_bytes(found.read_bytes_per_second)}/s")
    for name, seconds in plan.others.items():
        table.add_row(f"an epoch with {name}", f"{seconds:.3g}")
    table.add_row("bottleneck", NAMES.get(found.bottleneck, found.bottleneck))
    return table
