"""PURE: rows that are made again in the backward pass, as the search remembers them: chains of runs whose turn comes later.

Rows that are gone are made again before the first op in the backward pass that needs them: that of the highest stage that makes
something again of them. Until the search comes to it they are a chain, which grows with every stage.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.ir import Placement
from ooc.fullgraph.placement.costs import TIERS, Floats, Ranges, RunLoad, StepCosts
from ooc.fullgraph.placement.schedule import OpRun, met_on_the_way
from ooc.fullgraph.placement.stage_tables import PlacementStage, Stages, ValueChoice

Ints = NDArray[np.int64]
_LOAD, _RUN, _FIELDS = 12, 19, 22
"""Of a run: the seconds of its `RunLoad`; with its `Ranges` and bytes of workspace; with those of all rows of the chain so far
by tier, its own among them"""


class RecomputeLink(NamedTuple):
    """What a stage adds to a chain. written: rows that its op makes again, empty where none; met: what it reads for them; run:
    float64[19], of `_FIELDS`; size: float64[3], bytes of the rows by tier."""

    written: frozenset[str]
    met: frozenset[str]
    run: Floats
    size: Floats


NO_LINK = RecomputeLink(frozenset(), frozenset(), np.zeros(_RUN), np.zeros(3))


class RecomputeChains:
    """Chains by number, 0 that of nothing. made: float64[chains, 3], bytes of their rows by tier."""

    def __init__(self, costs: StepCosts, stages: Stages, room: Floats) -> None:
        self._costs, self._stages, self._room = costs, stages, room
        self._runs: list[Floats] = [np.zeros((0, _FIELDS))]
        self._written: list[frozenset[str]] = [frozenset()]
        self._numbers: dict[tuple[int, bytes, frozenset[str]], int] = {}
        self.made = np.zeros((1, 3))

    def tells(self, stage: PlacementStage) -> tuple[str, ...]:
        """The values that decide what a stage adds to a chain, given what is known to it."""
        return tuple(v.name for v in stage.decides if v.kind in ("rows", "sums") and v.name in stage.op.writes)

    def link(self, stage: PlacementStage, known: dict[str, ValueChoice]) -> RecomputeLink:
        """What a stage adds to chains. known: choices, also of what tells."""
        values, size = self._costs.values, np.zeros(3)
        written = tuple(n for n in stage.op.writes if n in known and self._stages.made_again(values[n], known[n]))
        if not written:
            return NO_LINK
        sums = stage.sums
        made = bool(sums) and self._stages.kept(values[sums], known[sums])
        adds, gathers, reads = met_on_the_way(stage.op, sums, made)
        placement = Placement({n: c.where for n, c in known.items()}, {n: c.standing for n, c in known.items()})
        load = self._costs.load(OpRun(stage.op, True, adds, gathers, reads, written, "", ()), placement)
        for name in written:
            size[TIERS.index(known[name].standing)] += self._costs.size(name)
        workspace = self._costs.profile.op(stage.op.name).workspace
        run = np.array([*load.rows, *load.adds, *load.row_pass, *load.add_pass, *load.ranges, workspace])
        return RecomputeLink(frozenset(written), frozenset((*adds, *gathers, *reads)), run, size)

    def grown(self, chain: int, link: RecomputeLink) -> tuple[int, bool]:
        """(the chain behind a stage, whether the turn of the one before comes with the stage's backward pass)."""
        if not link.written:
            return 0, chain > 0
        goes_on = not self._written[chain].isdisjoint(link.met)
        below = chain if goes_on else 0
        key = below, link.run.tobytes() + link.size.tobytes(), link.written
        if key not in self._numbers:
            made = self.made[below] + link.size
            self._numbers[key] = len(self._runs)
            self._runs.append(np.concatenate([self._runs[below], np.concatenate([link.run, made])[None]]))
            self._written.append(link.written)
            self.made = np.concatenate([self.made, made[None]])
        return self._numbers[key], chain > 0 and not goes_on

    def seconds(self, chains: Ints, inverse: Ints, held: Floats, before: Floats) -> Floats:
        """float64[states, b]: of making chains[inverse] again where `held` [states, 3] and `before` [b, 3] stand."""
        longest = max(len(self._runs[chain]) for chain in chains)
        runs = np.zeros((len(chains), longest, _FIELDS))
        for row, chain in zip(runs, chains, strict=True):
            row[: len(self._runs[chain])] = self._runs[chain]
        own = runs[inverse][:, None]  # [states, 1, runs, fields]
        stands = held[:, None, None, :] + before[None, :, None, :] + own[..., _RUN:]
        left = self._room[0] - stands[..., 0] - own[..., _RUN - 1]
        rows, adds, row_pass, add_pass = ((own[..., at], own[..., at + 1], own[..., at + 2]) for at in range(0, _LOAD, 3))
        units, *ranges = np.moveaxis(own[..., _LOAD : _RUN - 1], -1, 0)
        load = RunLoad(rows, adds, row_pass, add_pass, Ranges(np.maximum(units, 1), *ranges))  # 0 where there is no run
        seconds = load.seconds(left, self._costs.profile.hidden)
        fits = (stands[..., 1:] <= self._room[1:]).all(-1)
        return np.where(fits, seconds, np.inf).sum(-1)
