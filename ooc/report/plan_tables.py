"""Terminal tables of a `Plan`."""

from rich.table import Table

from ooc.planning.choose_mode import ModeChoice
from ooc.planning.run_plan import NAMES, Plan
from stores.sizes import format_bytes


def tables(plan: Plan) -> list[Table]:
    """Return tables of the memory division, the stages and the run."""
    return [_memory(plan), _stages(plan), _run(plan)]


def compared(choice: ModeChoice) -> Table:
    """Return a table that compares one epoch of every mode."""
    table = plain_table(
        "an epoch by mode", "mode", "seconds", "peak memory", "features", "edges", "histories read", "written", "loses"
    )
    for each in choice.candidates:
        style = "bold" if each.mode == choice.recommended else None
        if each.fix is not None:
            table.add_row(each.mode, *["-"] * 6, "not possible", style=style)
            continue
        sizes = (each.peak_bytes, each.features_read, each.edges_read, each.histories_read, each.histories_written)
        table.add_row(each.mode, f"{each.seconds:.3g}", *map(format_bytes, sizes), each.exactness, style=style)
    table.columns[-1].justify = "left"
    return table


def plain_table(title: str, *columns: str) -> Table:
    """Return a table without borders, its first column left-aligned."""
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
    prediction = plan.prediction
    total = sum(prediction.stages.values())
    table = plain_table("stages", "stage", "seconds per batch", "seconds in total")
    for name, seconds in prediction.stages.items():
        if seconds and total:
            style = "bold" if name == prediction.bottleneck else None
            table.add_row(NAMES.get(name, name), f"{seconds / plan.steps:.4f}", f"{seconds:.3g}", style=style)
    return table


def _run(plan: Plan) -> Table:
    prediction = plan.prediction
    table = plain_table(f"training, {plan.steps:,} batches ({plan.profiled_steps:,} profiled)", "", "")
    table.add_row("seconds per epoch", f"{prediction.seconds_per_epoch:.3g}", style="bold")
    table.add_row("first epoch", f"{prediction.first_epoch_seconds:.3g}")
    scored = f"{prediction.evaluate_seconds:.3g}" if prediction.evaluate_seconds else "not predicted"  # by layer-wise passes
    table.add_row("evaluation, in total", scored)
    table.add_row("read from disk", format_bytes(prediction.bytes_read))
    if prediction.history_bytes_read or prediction.history_bytes_written:
        table.add_row("histories read", format_bytes(prediction.history_bytes_read))
        table.add_row("histories written", format_bytes(prediction.history_bytes_written))
    if prediction.beforehand_seconds:
        table.add_row("before the first batch", f"{prediction.beforehand_seconds:.3g}")
    if prediction.hit_rate is not None:
        table.add_row("rows served from memory", f"{100 * prediction.hit_rate:.1f} %")
    if prediction.read_amplification is not None:
        table.add_row("bytes read per byte needed", f"{prediction.read_amplification:.2f}")
    if prediction.read_bytes_per_second is not None:
        table.add_row("read bandwidth", f"{format_bytes(prediction.read_bytes_per_second)}/s")
    for name, seconds in plan.others.items():
        table.add_row(f"epoch with {name}", f"{seconds:.3g}")
    table.add_row("bottleneck", NAMES.get(prediction.bottleneck, prediction.bottleneck))
    return table
