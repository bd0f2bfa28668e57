"""Where intermediates go: against trying everything, against plans that treat all alike, and against memory."""

import json
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.fullgraph.placement.costs import Ranges, RunLoad
from ooc.fullgraph.placement.op_costs import StepProfile
from ooc.fullgraph.placement.search import search, unbeaten
from ooc.fullgraph.placement.step_plan import StepPlan, TierRoom, plan_step, predict, static_placements
from ooc.fullgraph.program import Program, TensorPlacement
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import parse_bytes
from tests.ooc.fullgraph.chains import assert_found_is_the_best, best_of_all, chain, profile, seconds_of
from tests.scale import few

MOST_TRIED = 200


@st.composite
def problems(draw: st.DrawFn) -> tuple[Program, StepProfile, TierRoom]:
    """Chains of up to four layers whose placements can all be tried."""
    layers = draw(st.integers(1, 4))
    widths = draw(st.lists(st.sampled_from([2, 4, 8, 16]), min_size=layers + 1, max_size=layers + 1))
    gpu, initial, saved = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([0, 4]))
    constant = draw(st.booleans())
    program = chain(widths, saved=saved, constant=constant, initial=initial)
    placements, count = {}, 1
    for value in draw(st.permutations(program.values)):
        # Features are on a GPU with all else or not at all (`Placement.resident`), which is not for the search to weigh.
        on_gpu = gpu and value.kind != "features"
        allowed = [where for where in value.placements if on_gpu or where is not TensorPlacement.DEVICE]
        lasts = value.name == "initial"  # read at every layer: never made again where it can be kept
        some = draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=4, unique=True))
        some = [TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.RECOMPUTED] if lasts else some
        number = len(some) + (TensorPlacement.RECOMPUTED in some and value.kind == "rows")
        if count * number > MOST_TRIED:
            some, number = [some[0]], 1 + (some[0] is TensorPlacement.RECOMPUTED and value.kind == "rows")
        placements[value.name], count = tuple(some), count * number
    program = chain(widths, saved=saved, constant=constant, initial=initial, placements=placements)
    known = profile(
        program, draw(st.lists(st.integers(0, 40), min_size=5, max_size=9)), draw(st.sampled_from([0.0, 0.5, 1.0])), gpu
    )
    total = sum(value.nbytes for value in program.values)
    room = [int(total * draw(st.floats(low, 1))) for low in (0.02, 0.0, 0.3)]
    return program, known, TierRoom(room[0], room[1] if gpu else 0, room[2])


def test_rows_that_no_backward_pass_needs_are_not_made_again_for_one() -> None:
    retained, disk, recomputed = TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.RECOMPUTED
    allowed = {
        "x": (retained, disk),
        "initial": (disk,),
        "rows0": (recomputed,),
        "near0": (retained, recomputed),
        "edges": (disk,),
    }
    program = chain([16, 16], constant=True, initial=True, placements=allowed)
    known = profile(program, [0, 0, 0, 16, 1], 0.0)
    size = program.value("x").nbytes
    room = TierRoom(5 * size // 2, 0, 5 * size)
    found = search(program, known, room.bytes)
    assert found is not None
    assert seconds_of(program, known, found.placement, room) == best_of_all(program, known, room)


@settings(deadline=None, max_examples=25)
@given(problems())
def test_the_search_finds_what_trying_everything_finds(problem: tuple[Program, StepProfile, TierRoom]) -> None:
    assert_found_is_the_best(*problem)


@settings(deadline=None, max_examples=25)
@given(problems(), st.floats(1, 4))
def test_a_plan_fits_and_no_plan_that_treats_all_alike_is_faster(
    problem: tuple[Program, StepProfile, TierRoom], more: float
) -> None:
    program, known, room = problem
    room = TierRoom(*(int(more * nbytes) for nbytes in room.bytes))
    static = [seconds_of(program, known, each, room) for each in static_placements(program, known).values()]
    if min(static) == inf and search(program, known, room.bytes) is None:
        return
    plan = plan_step(program, known, room)
    assert plan.seconds <= min(static)
    assert all(used <= there for used, there in zip(plan.peak, room.bytes, strict=True))
    assert predict(program, known, plan.placement, room).runs == plan.runs


@pytest.mark.slow
def test_deep_models_are_planned_in_time_and_within_the_bounds() -> None:
    program = chain([16] * few(20, 24) + [4], saved=8)
    known = profile(program, [3, 5, 2, 7, 1], speed=18)
    total = sum(value.nbytes for value in program.values)
    before = inf
    for share in few((0.02, 0.3, 1.1), (0.02, 0.1, 0.3, 1.1)):
        plan = plan_step(program, known, TierRoom(int(total * share), 0, 10 * total))
        assert plan.seconds <= min([before, *(each for each in plan.static.values() if each is not None)])
        before = plan.seconds
    assert before == plan.static["all retained"] < inf


@settings(deadline=None, max_examples=15)
@given(problems(), st.floats(1, 2))
def test_more_memory_never_makes_a_plan_slower(problem: tuple[Program, StepProfile, TierRoom], more: float) -> None:
    program, known, room = problem
    found = search(program, known, room.bytes)
    if found is None:
        return
    larger = replace(room, memory=int(more * room.memory))
    again = search(program, known, larger.bytes)
    assert again is not None
    before, after = (seconds_of(program, known, each.placement, own) for each, own in ((found, room), (again, larger)))
    assert after <= before


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("device", "disk", "named"), [(30_000, 10**8, ("more memory",)), (100_000, 10**6, ("disk", "more memory"))]
)
def test_what_does_not_fit_names_what_would_do(device: int, disk: int, named: tuple[str, ...]) -> None:
    program = chain([8, 16, 16, 4])
    known = profile(program, [3, 5])
    with pytest.raises(BudgetError) as error:
        plan_step(program, known, TierRoom(device, 0, disk))
    advice = str(error.value).split(": give ")[1].split(" or ")
    assert len(advice) == len(named)
    for each, word in zip(advice, named, strict=True):
        assert word in each
        more = int(1.01 * parse_bytes("".join(each.split(" ")[:2])))
        more_memory = "more memory" in each
        room = TierRoom(device + more * more_memory, 0, disk + more * (not more_memory))
        assert plan_step(program, known, room).seconds > 0


def test_a_plan_is_the_same_from_json() -> None:
    program = chain([8, 16, 16, 4], saved=4)
    plan = plan_step(program, profile(program, [3, 5, 2]), TierRoom(10**6, 0, 10**8))
    again = StepPlan.of(json.loads(json.dumps(plan.asdict())))
    assert again == plan
    data = json.loads(json.dumps(plan.asdict()))
    assert data["seconds"] == plan.seconds
    data["placement"]["fates"] = data["placement"].pop("placements")
    assert StepPlan.of(data) == plan, "as earlier versions wrote it"


def test_passes_are_as_few_as_the_memory_allows_and_parts_hide_behind_the_longest() -> None:
    load = RunLoad((3.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.5, 0.0, 2.0), Ranges(8, 100.0))
    assert [float(load.ranges.passes(left)) for left in (-1, 99, 100, 300, 399, 400, 800, 10**6)] == [
        inf,
        inf,
        8,
        3,
        3,
        2,
        1,
        1,
    ]
    assert float(load.seconds(800, hidden=1.0)) == 3.0 + 2.0  # rows are computed once their sums are there
    assert float(load.seconds(800, hidden=0.0)) == 3.0 + 1.0 + 1.5 + 2.0
    assert float(load.seconds(400, hidden=0.5)) == (3.0 + 0.5 * 1.0) + (4.0 + 0.5 * 2.0)


@given(
    st.integers(1, 200),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 2_000),
    st.integers(0, 300),
    st.integers(-10, 9_000),
)
def test_ranges_are_as_large_as_fits_where_sources_are_shared(
    units: int, own: int, source: int, most: int, least: int, left: int
) -> None:
    ranges = Ranges(units, float(own + source), float(source), float(most), float(least))

    def taken(count: int) -> int:
        return min(source * count, most) + own * count

    fits = int(ranges.fits(left))
    allowed = [count for count in range(units + 1) if max(taken(count) if count else 0, least, 0) <= left]
    assert fits == max(allowed, default=0)
    assert float(ranges.taken(fits)) == taken(fits)
    assert float(ranges.passes(left)) == (-(-units // fits) if fits else inf)


@pytest.mark.parametrize(("degree", "passes"), [(1, 1), (4, 3), (16, 8), (16, 400), (2, 2_000)])
def test_rows_are_gathered_as_often_as_ranges_meet_them(degree: int, passes: int) -> None:
    rng, nodes = np.random.default_rng(degree), 20_000
    cut = np.linspace(0, nodes, passes + 1).astype(int)
    source = rng.integers(0, nodes, (nodes, degree))
    met = sum(len(np.union1d(source[a:b], np.arange(a, b))) for a, b in pairwise(cut))
    ranges = Ranges(nodes, 1.0, met=float(degree))
    assert float(ranges.meetings(passes)) == pytest.approx(met / nodes, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30))
def test_states_go_on_unless_one_that_is_alike_beats_them(states: list[tuple[int, int, int, int]]) -> None:
    states = sorted(states)  # by what is alike, then by seconds
    alike, held = np.array([each[0] for each in states]), np.array([each[2:] for each in states], np.float64)
    expected = [
        not any(a[0] == b[0] and a[2] <= b[2] and a[3] <= b[3] for a in states[:number]) for number, b in enumerate(states)
    ]
    assert unbeaten(alike, held).tolist() == expected
