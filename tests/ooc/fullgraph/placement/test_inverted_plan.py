"""Where rows of reversible layers go: the search against trying everything, and bytes that do not grow with depth."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.fullgraph.placement.op_costs import RangeBytes, StepProfile
from ooc.fullgraph.placement.step_plan import TierRoom
from ooc.fullgraph.program import Program, TensorPlacement, Value, build
from ooc.layerwise.pass_plan import LayerShape, ModelShape
from tests.ooc.fullgraph.chains import assert_found_is_the_best, profile, ways

RETAINED, DISK, INVERTED = TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.INVERTED
RECOMPUTED = TensorPlacement.RECOMPUTED
NODES, EDGES, WIDTH = 1 << 13, 1 << 15, 8
MOST_TRIED = 130


def layered(kinds: list[str], *, gpu: bool = False) -> Program:
    """The program of layers behind an encoder: "sum", "gather" or "reversible", which gathers too."""
    layers = tuple(
        LayerShape(WIDTH, WIDTH, "sum" if kind == "sum" else None, trains=True, reversible=kind == "reversible")
        for kind in kinds
    )
    shape = ModelShape(NODES, EDGES, 4 * WIDTH, True, WIDTH, WIDTH, 8, layers, 4, encoder_trains=True)
    return build(shape, on_gpu=gpu)


def fewer(program: Program, placements: Mapping[str, tuple[TensorPlacement, ...]]) -> Program:
    return replace(program, values=tuple(replace(v, placements=placements[v.name]) for v in program.values))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Program, StepProfile, TierRoom]:
    """Models of reversible and other layers whose placements can all be tried."""
    gpu, cut = draw(st.booleans()), draw(st.booleans())
    before, after = (draw(st.lists(st.sampled_from(["gather", "sum"]), max_size=1)) for _ in range(2))
    program, count = layered([*before, *["reversible"] * draw(st.integers(2, 4)), *after], gpu=gpu), 1
    placements: dict[str, tuple[TensorPlacement, ...]] = {}
    order: list[list[Value]] = [[], [], []]
    for value in program.values:
        order[0 if value.output else 1 if value.kind in ("rows", "saved") else 2].append(value)
    for value in (each for part in order for each in draw(st.permutations(part))):
        # Of rows that are gathered again, in ranges, the search thinks of ranges of their own.
        allowed = [where for where in value.placements if not (cut and value.kind == "rows" and where is RECOMPUTED)]
        some = draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=3, unique=True))
        some = [INVERTED, *(where for where in some if where is not INVERTED)] if value.output else some
        while count * len(ways(replace(value, placements=tuple(some)))) > MOST_TRIED and len(some) > 1:
            some.pop()
        placements[value.name], count = tuple(some), count * len(ways(replace(value, placements=tuple(some))))
    for value in program.undone_by.values():
        saved = program.saved_of(program.op(value.backward[0]))
        if draw(st.integers(0, 9)) and RECOMPUTED not in placements[saved]:  # else its rows cannot be
            placements[saved] = (RECOMPUTED, *placements[saved][1:])
    return fewer(program, placements), *_costs(draw, program, gpu=gpu, cut=cut)


def _costs(draw: st.DrawFn, program: Program, *, gpu: bool, cut: bool) -> tuple[StepProfile, TierRoom]:
    """cut: whether what layers gather is taken in ranges."""
    sizes = {value.name: 1024 * draw(st.integers(1, 300)) for value in program.values}
    seconds = draw(st.lists(st.integers(0, 40), min_size=5, max_size=9))
    known = replace(profile(program, seconds, draw(st.sampled_from([0.0, 0.5, 1.0])), gpu), nbytes=sizes)
    if cut:
        gathered, kept = RangeBytes(draw(st.integers(0, 8)), draw(st.integers(1, 8))), RangeBytes(draw(st.integers(0, 4)), 1)
        costs = {op.name: replace(known.op(op.name), gathered=gathered, kept=kept) for op in program.ops if op.kind == "gather"}
        known = replace(known, ops={**known.ops, **costs})
    total = sum(sizes.values())
    memory, device = (int(total * draw(st.sampled_from([0.2, 0.3, 0.4, 0.6, 0.8, 1.1]))) for _ in range(2))
    return known, TierRoom(memory, device if gpu else 0, int(total * draw(st.sampled_from([0.2, 0.5, 1.2]))))


@settings(deadline=None, max_examples=40)
@given(problems())
def test_the_search_finds_what_trying_everything_finds(problem: tuple[Program, StepProfile, TierRoom]) -> None:
    assert_found_is_the_best(*problem, precision=1e-12)
