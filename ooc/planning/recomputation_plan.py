"""PURE: what layers cost, and memory -> which of them are recomputed in the backward pass, and which sums are kept.

A step's memory is largest when the backward pass is at some layer: then all layers before it have what they keep, and it has
its own activations, kept or just recomputed. Plans are built layer by layer from the input on, over states (bytes kept,
seconds) of which none is better in both: every layer is kept, or begins a segment of any length, whose sums over neighbors are
kept for some destinations. A sum takes the same bytes whatever it adds up, and its time grows with the in-edges: so those with
most in-edges are kept first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ooc.models.recomputation import Recomputation, Segment

MOST_STATES = 64
"""that are kept for a layer: of more, those in between are left out"""
LEVELS = 16
"""numbers of a layer's sums that are tried; what memory is left over has more"""
LONG = 16
"""layers that a segment may have, or four times the square root of their number"""
Numbers = NDArray[np.float64]
Degrees = tuple[tuple[int, int], ...]
"""see `LayerCosts.degrees`"""


class Size(NamedTuple):
    """Numbers of a layer's source rows, destinations and edges."""

    sources: int
    destinations: int
    edges: int


@dataclass(frozen=True)
class LayerCosts:
    """What a layer takes in a step of one batch. Bytes and seconds.

    Args:
        size: Of its block.
        kept: What autograd keeps of it, but for the rows before and behind it.
        before, behind: The rows before it, 0 where the batch has them anyway, and behind it.
        forward, backward: What it takes besides `kept` while it is computed, and while it goes backward, at most.
        seconds: Of its forward pass.
        holds_before, holds_behind: Whether autograd keeps the rows before it, and behind it.
        sum_seconds: Of these seconds, for sums over neighbors.
        sum_bytes: Of a destination's sums; 0 where there are none to keep.
        degrees: (in-edges, destinations that have so many), those with most in-edges first.
    """

    size: Size
    kept: int
    before: int
    behind: int
    forward: int
    backward: int
    seconds: float
    holds_before: bool = False
    holds_behind: bool = False
    sum_seconds: float = 0.0
    sum_bytes: int = 0
    degrees: Degrees = ()

    def for_size(self, size: Size, degrees: Degrees = ()) -> Self:
        """What it takes with another block: bytes by whichever of the three numbers grows most, seconds by the edges."""
        grown = max(new / max(1, old) for new, old in zip(size, self.size, strict=True))
        by_edges = size.edges / self.size.edges if self.size.edges else grown
        rows = size.sources / max(1, self.size.sources)
        bytes_of = {name: round(getattr(self, name) * grown) for name in ("kept", "forward", "backward")}
        seconds = {name: getattr(self, name) * by_edges for name in ("seconds", "sum_seconds")}
        return replace(
            self, size=size, before=round(self.before * rows), degrees=degrees or self.degrees, **bytes_of, **seconds
        )

    @property
    def sums(self) -> int:
        """Destinations whose sums may be kept."""
        return sum(count for _, count in self.degrees) if self.sum_bytes and self.sum_seconds else 0

    @cached_property
    def _edges(self) -> tuple[Numbers, Numbers]:
        """(numbers of destinations, those with most in-edges first; edges of as many): the ends of straight lines."""
        degree, counts = np.asarray(self.degrees, np.float64).reshape(-1, 2).T
        return np.concatenate([[0], counts.cumsum()]), np.concatenate([[0], (counts * degree).cumsum()])

    def saved(self, rows: int) -> float:
        """Seconds of recomputing that keeping so many sums saves."""
        if not self.sums:
            return 0.0
        ends, edges = self._edges
        return float(self.sum_seconds * np.interp(rows, ends, edges) / max(1.0, edges[-1]))

    def levels(self) -> list[int]:
        """Numbers of sums to try: none, all, and where the next one is worth less, or evenly if these are many."""
        if not self.sums:
            return [0]
        ends = [int(end) for end in np.unique(self._edges[0])]
        every = range(self.sums + 1) if self.sums < LEVELS else [self.sums * i // (LEVELS - 1) for i in range(LEVELS)]
        chosen = ends if len(ends) <= LEVELS and self.sums >= LEVELS else every
        return sorted({*chosen})


class StepCost(NamedTuple):
    """What a plan takes: bytes kept between the passes, bytes at the peak, seconds of recomputing."""

    kept: int
    peak: int
    seconds: float


@dataclass(frozen=True)
class RecomputationPlan:
    """What is recomputed, what that takes, and whether it fits the memory that there is."""

    recomputation: Recomputation
    predicted: StepCost
    fits: bool


def predicted(costs: Sequence[LayerCosts], plan: Recomputation, fixed: int = 0, least: int = 0) -> StepCost:
    """What a plan takes. fixed: bytes that are there in any case; least: the peak of other parts of the step."""
    kept, peak, seconds, held = fixed, max(fixed, least), 0.0, False
    for first, stop, again in plan.parts(len(costs)):
        group = costs[first:stop]
        before = group[0].before if (again or group[0].holds_before) and not held else 0
        if again:
            rows = plan.sums_of((first, stop))
            kept += before + sum(count * each.sum_bytes for count, each in zip(rows, group, strict=True))
            peak = max(peak, kept + _live(costs, first, stop))
            seconds += sum(each.seconds - each.saved(count) for count, each in zip(rows, group, strict=True))
        else:
            kept += before + group[0].kept + _behind(costs, first)
            peak = max(peak, kept + _live_kept(costs, first))
        held = not again and group[0].holds_behind
    return StepCost(kept, peak, seconds)


def _behind(costs: Sequence[LayerCosts], layer: int) -> int:
    """Bytes of the rows behind a layer that it holds."""
    holds = costs[layer].holds_behind and layer + 1 < len(costs)
    return costs[layer + 1].before if holds else 0


def _live_kept(costs: Sequence[LayerCosts], layer: int) -> int:
    """The most bytes that a kept layer takes besides what is kept, while it is computed or goes backward."""
    own = costs[layer]
    return max(own.forward + (0 if own.holds_before else own.before), own.backward)


def _live(costs: Sequence[LayerCosts], first: int, stop: int) -> int:
    """The most bytes of a segment's activations while it is computed again, beside the gradient of the rows behind it, and goes
    backward; without the rows before it."""
    kept = live = 0
    for i in range(first, stop):
        own, inner = costs[i], costs[i].before if i > first else 0
        held = i > first and (own.holds_before or costs[i - 1].holds_behind)
        again = kept + inner + own.kept + own.forward + costs[stop - 1].behind
        kept += own.kept + inner * held
        live = max(live, again, kept + own.backward)
    return live


class _States(NamedTuple):
    """Ways to go through the first layers: ascending bytes, descending seconds. held: whether the rows behind are kept; origin:
    (the layer from which the last part goes, the state there, held there, the option of the segment or -1 for a kept layer)."""

    kept: Numbers
    seconds: Numbers
    origin: NDArray[np.int64]

    @classmethod
    def best(cls, kept: Numbers, seconds: Numbers, origin: NDArray[np.int64]) -> Self:
        """Those that none is better than in both, `MOST_STATES` at most."""
        order = np.lexsort((seconds, kept))
        kept, seconds, origin = kept[order], seconds[order], origin[order]
        better = np.concatenate([[True], seconds[1:] < np.minimum.accumulate(seconds)[:-1]]) if len(kept) else kept > 0
        at = np.flatnonzero(better)
        if len(at) > MOST_STATES:
            at = at[np.linspace(0, len(at) - 1, MOST_STATES).round().astype(np.int64)]
        return cls(kept[at], seconds[at], origin[at])


class _Options(NamedTuple):
    """Ways to keep sums of a segment: bytes, seconds to recompute it; origin: (the option of the segment without its last
    layer, the level of that one)."""

    kept: Numbers
    seconds: Numbers
    origin: NDArray[np.int64]


class _PlanSearch:
    """See `plan_recomputation`."""

    def __init__(self, costs: Sequence[LayerCosts], room: int, fixed: int) -> None:
        self._costs, self._room = costs, room
        self._levels = [each.levels() for each in costs]
        self._longest = max(LONG, 4 * isqrt(len(costs)))
        start = _States(np.array([float(fixed)]), np.zeros(1), np.full((1, 4), -1))
        none = _States(np.empty(0), np.empty(0), np.empty((0, 4), np.int64))
        self._states = {(0, False): start, (0, True): none}
        self._options: dict[Segment, _Options] = {}

    def best(self) -> Recomputation | None:
        """The plan of the fewest seconds; None where none fits."""
        count = len(self._costs)
        for stop in range(1, count + 1):
            for held in (False, True):
                found = [*self._kept(stop, held), *(() if held else self._recomputed(stop))]
                parts = zip(*found, strict=True) if found else ([np.empty(0)], [np.empty(0)], [np.empty((0, 4), np.int64)])
                self._states[stop, held] = _States.best(*(np.concatenate(part) for part in parts))
        ends = [(states.seconds[-1], held) for held in (False, True) if len((states := self._states[count, held]).seconds)]
        return self._traced(min(ends)[1]) if ends else None

    def _kept(self, stop: int, held: bool) -> Iterator[_States]:
        """States behind a layer that is kept."""
        layer, own = stop - 1, self._costs[stop - 1]
        for before in (False, True) if own.holds_behind == held else ():
            states = self._states[layer, before]
            kept = states.kept + own.kept + _behind(self._costs, layer) + (own.before if own.holds_before and not before else 0)
            yield self._fitting(kept, states.seconds, _live_kept(self._costs, layer), layer, before, np.full(len(kept), -1))

    def _recomputed(self, stop: int) -> Iterator[_States]:
        """States behind a segment."""
        for first in range(stop - 1, max(-1, stop - 1 - self._longest), -1):
            options, live = self._of_segment(first, stop), _live(self._costs, first, stop)
            for before in (False, True):
                states = self._states[first, before]
                kept = states.kept + (0 if before else self._costs[first].before)
                sums = np.add.outer(kept, options.kept).ravel(), np.add.outer(states.seconds, options.seconds).ravel()
                option = np.tile(np.arange(len(options.kept)), len(kept))
                yield self._fitting(*sums, live, first, before, option, len(options.kept))

    def _fitting(
        self, kept: Numbers, seconds: Numbers, live: int, first: int, held: bool, option: NDArray[np.int64], options: int = 1
    ) -> _States:
        """The states that fit while the part that ends here goes backward, with where they come from."""
        fits = np.flatnonzero(kept + live <= self._room)
        same = np.full(len(fits), first), fits // options, np.full(len(fits), int(held))
        return _States(kept[fits], seconds[fits], np.stack([*same, option[fits]], axis=1))

    def _of_segment(self, first: int, stop: int) -> _Options:
        """The options of a segment, from those of the segment without its last layer."""
        if (first, stop) not in self._options:
            own, levels = self._costs[stop - 1], self._levels[stop - 1]
            before = _Options(np.zeros(1), np.zeros(1), np.zeros((1, 2), np.int64))
            if stop - first > 1:
                before = self._of_segment(first, stop - 1)
            kept = np.add.outer(before.kept, np.array([float(own.sum_bytes * rows) for rows in levels]))
            seconds = np.add.outer(before.seconds, np.array([own.seconds - own.saved(rows) for rows in levels]))
            origin = np.stack(np.unravel_index(np.arange(kept.size), kept.shape), axis=1)
            self._options[first, stop] = _Options(*_States.best(kept.ravel(), seconds.ravel(), origin))
        return self._options[first, stop]

    def _traced(self, held: bool) -> Recomputation:
        """The plan that the last state comes from."""
        stop, state, segments, rows = len(self._costs), -1, list[Segment](), [0] * len(self._costs)
        while stop:
            first, state, before, option = map(int, self._states[stop, held].origin[state])
            if option >= 0:
                segments.append((first, stop))
                for layer in range(stop - 1, first - 1, -1):
                    option, level = map(int, self._options[first, layer + 1].origin[option])
                    rows[layer] = self._levels[layer][level]
            stop, held = first, bool(before)
        return Recomputation(tuple(reversed(segments)), tuple(rows) if any(rows) else ())


def plan_recomputation(costs: Sequence[LayerCosts], room: int, fixed: int = 0, least: int = 0) -> RecomputationPlan:
    """Decide what is recomputed so that a step fits `room` bytes and takes the fewest seconds.

    Args:
        costs: Of every layer, input side first.
        room: Bytes for activations.
        fixed: Bytes of them that are taken in any case, as by an encoder.
        least: Bytes of them that other parts of the step take at some time.

    Returns:
        A plan, never slower than all kept, every layer recomputed or sqrt(n) segments, where these fit. Where nothing fits,
        the one of equal segments that takes the least.

    >>> plan_recomputation(costs, room=50_000_000).recomputation.segments
    ((0, 1),)
    """
    count = len(costs)
    found = _PlanSearch(costs, room, fixed).best() if least <= room else None
    usual = [Recomputation(), Recomputation.of(True, count), Recomputation.by_sqrt(count)]
    plans = [
        RecomputationPlan(each, predicted(costs, each, fixed, least), True) for each in (found, *usual) if each is not None
    ]
    fitting = [plan for plan in plans if plan.predicted.peak <= room]
    if fitting:
        best = min(fitting, key=lambda plan: plan.predicted.seconds)
        return _filled(costs, best, room, fixed, least)
    smallest = min((*usual, *_equal(count)), key=lambda each: predicted(costs, each, fixed, least)[1:])
    return RecomputationPlan(smallest, predicted(costs, smallest, fixed, least), False)


def _equal(layers: int) -> Iterator[Recomputation]:
    """Segments of every length, the last of which is kept."""
    for length in range(1, layers):
        ends = range(0, layers - 1, length)
        yield Recomputation(tuple((end, min(end + length, layers - 1)) for end in ends))


def _filled(costs: Sequence[LayerCosts], plan: RecomputationPlan, room: int, fixed: int, least: int) -> RecomputationPlan:
    """The plan with more sums, as many as what memory is left over holds: those that save most by their bytes first."""
    rows = [*(plan.recomputation.kept_sums or (0,) * len(costs))]
    again = {layer for segment in plan.recomputation.segments for layer in range(*segment)}
    some = {layer: costs[layer] for layer in again if costs[layer].sums}
    worth = {layer: own.saved(own.sums) / own.sums / own.sum_bytes for layer, own in some.items()}
    for layer in sorted(worth, key=lambda layer: worth[layer], reverse=True):
        low, high = rows[layer], costs[layer].sums
        while low < high:  # the most that fits
            rows[layer] = (low + high + 1) // 2
            made = replace(plan.recomputation, kept_sums=tuple(rows))
            low, high = (rows[layer], high) if predicted(costs, made, fixed, least).peak <= room else (low, rows[layer] - 1)
        rows[layer] = low
    made = replace(plan.recomputation, kept_sums=tuple(rows) if any(rows) else ())
    return RecomputationPlan(made, predicted(costs, made, fixed, least), True)
