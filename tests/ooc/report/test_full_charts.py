"""What is shown of an exact step: every value and run, predicted and measured."""

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from ooc.fullgraph.halo.recompute import Way
from ooc.fullgraph.placement.step_plan import StepPlan, TierRoom, predict
from ooc.fullgraph.program import Placement, Program, TensorPlacement
from ooc.layerwise.pass_plan import label_of
from ooc.planning.over_ranks import Exchange, RanksPlan
from ooc.report.full_charts import memory_figure, schedule_figure, seconds_figure
from ooc.report.tables import tables
from ooc.runtime.clock import MemorySample, Span
from ooc.training.full_mode import FullPlan
from tests.ooc.fullgraph.chains import chain, profile


@pytest.fixture
def planned() -> tuple[Program, StepPlan]:
    program = chain([8, 16, 16, 4])
    placements = {
        "rows1": TensorPlacement.RECOMPUTED,
        "near0": TensorPlacement.RECOMPUTED,
        "x": TensorPlacement.DISK,
        "gnear2": TensorPlacement.DISK,
    }
    return program, predict(program, profile(program, [3, 5, 2]), Placement(placements), TierRoom(4 * 10**6, 0, 10**8))


def test_the_tables_name_every_value_and_every_run(planned: tuple[Program, StepPlan]) -> None:
    program, plan = planned
    values, ops, step = tables(FullPlan(program, plan))
    assert values.row_count == len(program.values)
    assert ops.row_count == len(plan.runs)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for each in (values, ops, step):
        console.print(each)
    text = console.export_text()
    assert "recomputed, via disk" in text
    assert "up0 again" in text
    assert f"{plan.seconds:.3g}" in text


def test_every_way_to_have_rows_of_the_halo_is_shown_and_the_chosen_one_named(planned: tuple[Program, StepPlan]) -> None:
    ways = Way("none", 2.5, 4_000_000, 0), Way("first", 1.5, 1_000_000, 1234), Way("all", 1.75, 0, 56789)
    *_, table = tables(FullPlan(*planned, RanksPlan(2, 10**7, 0, 0.0, 1, 5, (Exchange("exact", 4_000_000, 2.5),), ways)))
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "recompute none 4 MB sent, 0 rows computed, 2.5 s" in lines
    assert "recompute first (chosen) 1 MB sent, 1,234 rows computed, 1.5 s" in lines
    assert "recompute all 0 B sent, 56,789 rows computed, 1.75 s" in lines


def bars(figure: Figure, axes: int) -> float:
    """Seconds that the bars of a chart are long in all."""
    found = 0.0
    for collection in figure.axes[axes].collections:
        for path in collection.get_paths():
            box = path.get_extents()
            found += box.x1 - box.x0
    return found


def test_the_schedule_shows_all_that_was_planned_and_all_that_was_done(planned: tuple[Program, StepPlan]) -> None:
    _, plan = planned
    spans = {"compute": [Span(0, 1, 100.0, 102.0), Span(1, 1, 102.0, 103.5)], "read": [Span(0, 2, 100.5, 101.0)], "write": []}
    figure = schedule_figure(plan, spans, ["up0", "up1"])
    assert bars(figure, 0) == pytest.approx(sum(sum(run.parts) for run in plan.runs))
    assert bars(figure, 1) == pytest.approx(4.0)
    assert (
        schedule_figure(plan, {"compute": [Span(0, 1, 5.0, 5.0 + 3 * plan.seconds)]}).axes[0].get_xlim()[1] >= 3 * plan.seconds
    )
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["compute", "read"]


def test_memory_is_shown_against_what_there_is(planned: tuple[Program, StepPlan]) -> None:
    _, plan = planned
    figure = memory_figure(plan, [MemorySample(0.0, 10**6, 3 * 10**6), MemorySample(1.0, 2 * 10**6, 0)])
    assert len(figure.axes) == 2  # no GPU
    drawn = [[line.get_ydata().tolist() for line in axes.lines if line.get_label() == "measured"] for axes in figure.axes]
    assert drawn == [[[1.0, 2.0]], [[3.0, 0.0]]]
    assert max(figure.axes[0].patches[0].get_data().values) == plan.peak[0] / 1e6
    dashed = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [float(line.get_ydata()[0]) for line in dashed] == [4.0]


def test_seconds_are_shown_beside_those_predicted(planned: tuple[Program, StepPlan]) -> None:
    _, plan = planned
    figure = seconds_figure(plan, {"up0": 7.0, "up0 again": 2.0})
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert sum(widths) == pytest.approx(plan.seconds + 9.0)
    assert len(widths) == 2 * len({run.name for run in plan.runs})


def test_values_are_labelled_in_words() -> None:
    names = ["x", "near0", "root1", "rows2", "gnear1", "saved0", "saved-norm1", "z3", "edges"]
    assert [label_of(name) for name in names] == [
        "features",
        "neighbor sums 0",
        "self rows 1",
        "rows 2",
        "gradient of neighbor sums 1",
        "saved by layer 0",
        "saved by norm 1",
        "rows before norm 3",
        "edges",
    ]
