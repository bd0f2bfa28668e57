"""The plan of what is recomputed, against all plans there are."""

from collections.abc import Iterator
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.models.recomputation import Recomputation
from ooc.planning.recomputation_plan import LayerCosts, Size, plan_recomputation, predicted


def cost(kept: int, before: int, working: int, seconds: float, **more: object) -> LayerCosts:
    return LayerCosts(Size(10, 5, 20), kept, before, 0, working, working, seconds, **more)  # type: ignore[arg-type]


LAYERS = st.builds(
    LayerCosts,
    size=st.just(Size(10, 5, 20)),
    kept=st.integers(0, 20),
    before=st.integers(0, 10),
    behind=st.integers(0, 4),
    forward=st.integers(0, 8),
    backward=st.integers(0, 8),
    seconds=st.integers(3, 9).map(float),
    holds_before=st.booleans(),
    holds_behind=st.booleans(),
    sum_seconds=st.integers(0, 3).map(float),
    sum_bytes=st.integers(0, 3),
    degrees=st.sets(st.integers(0, 9), max_size=3).map(lambda found: tuple((each, 1) for each in sorted(found, reverse=True))),
)


def every_plan(costs: list[LayerCosts]) -> Iterator[Recomputation]:
    """All ways to divide layers into kept ones and segments, with all numbers of sums."""
    count = len(costs)

    def divided(at: int) -> Iterator[tuple[tuple[int, int], ...]]:
        if at == count:
            yield ()
            return
        yield from divided(at + 1)
        for stop in range(at + 1, count + 1):
            yield from (((at, stop), *rest) for rest in divided(stop))

    for segments in divided(0):
        again = {layer for segment in segments for layer in range(*segment)}
        numbers = [range(each.sums + 1) if i in again else range(1) for i, each in enumerate(costs)]
        for rows in product(*numbers):
            yield Recomputation(segments, rows)


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(LAYERS, min_size=1, max_size=4), room=st.integers(0, 90), fixed=st.integers(0, 5))
def test_no_plan_that_fits_is_faster(costs: list[LayerCosts], room: int, fixed: int) -> None:
    found = plan_recomputation(costs, room, fixed)
    assert found.predicted == predicted(costs, found.recomputation, fixed)
    every = [predicted(costs, plan, fixed) for plan in every_plan(costs)]
    best = min((each.seconds for each in every if each.peak <= room), default=inf)
    assert found.fits == (best < inf)
    if found.fits:
        assert found.predicted.peak <= room
        assert found.predicted.seconds == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(LAYERS, min_size=1, max_size=30), room=st.integers(20, 600))
def test_it_is_never_slower_than_a_single_way(costs: list[LayerCosts], room: int) -> None:
    found = plan_recomputation(costs, room)
    for way in (Recomputation(), Recomputation.of(True, len(costs)), Recomputation.by_sqrt(len(costs))):
        single = predicted(costs, way)
        if single.peak <= room:
            assert found.fits
            assert found.predicted.seconds <= single.seconds + 1e-9


@given(costs=st.lists(LAYERS, min_size=1, max_size=6), room=st.integers(10, 200))
def test_more_memory_is_never_slower(costs: list[LayerCosts], room: int) -> None:
    less, more = (plan_recomputation(costs, each) for each in (room, room + 30))
    assert more.fits >= less.fits
    if less.fits:
        assert more.predicted.seconds <= less.predicted.seconds + 1e-9


def test_hubs_are_kept_and_leaves_recomputed() -> None:
    """Of 1,003 destinations three have 1,000 in-edges each, and a thousand have one: sums of the three are 3/4 of the time."""
    degrees = ((1000, 3), (1, 1000))
    layer = cost(kept=5000, before=0, working=10, seconds=9.0, sum_seconds=8.0, sum_bytes=4, degrees=degrees)
    last = cost(kept=5000, before=20, working=10, seconds=10.0)
    assert layer.saved(3) == pytest.approx(6.0)
    assert layer.saved(1003) == pytest.approx(8.0)
    room = 5010 + 12 + 30
    found = plan_recomputation([layer, last], room)
    assert found.recomputation.segments == ((0, 1),)
    assert found.recomputation.kept_sums == (5, 0), "what memory is left over has a few leaves"
    assert found.predicted.seconds < 9.0 - 6.0


def test_where_nothing_fits_it_is_the_least() -> None:
    costs = [cost(kept=100, before=10, working=5, seconds=1.0) for _ in range(9)]
    found = plan_recomputation(costs, 50)
    assert not found.fits
    assert found.predicted.peak <= predicted(costs, Recomputation.by_sqrt(9)).peak
    assert found.predicted.peak <= predicted(costs, Recomputation.of(True, 9)).peak


def test_costs_of_another_block_follow_its_size() -> None:
    own = cost(kept=100, before=50, working=10, seconds=2.0, sum_seconds=1.0)
    other = own.for_size(Size(20, 5, 60), ((2, 1),))
    assert (other.kept, other.forward, other.backward, other.before) == (300, 30, 30, 100)
    assert (other.seconds, other.sum_seconds, other.degrees) == (6.0, 3.0, ((2, 1),))


def test_a_deep_model_is_planned() -> None:
    """Of 112 equal layers: what sqrt(n) segments take is enough, and half of it is too."""
    costs = [cost(kept=300, before=100, working=200, seconds=1.0) for _ in range(112)]
    peak = predicted(costs, Recomputation.by_sqrt(112)).peak
    for room in (10 * peak, 3 * peak, peak):
        found = plan_recomputation(costs, room)
        assert found.fits
        assert found.predicted.seconds <= predicted(costs, Recomputation.by_sqrt(112)).seconds
    assert plan_recomputation(costs, 10 * peak).recomputation == Recomputation()
