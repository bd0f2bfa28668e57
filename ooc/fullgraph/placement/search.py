"""PURE: the placements that take the least time, by dynamic programming over the stages of a step.

What is made in the forward pass stands until the backward pass has undone it, so while the ops of a stage run, forward or
backward, what was made by the stages below stands and nothing else: a state says all that matters by its bytes by tier, the
seconds so far, what the next stage meets, and the rows that are still to be made again. Of states that are alike in the last
two only those that no other one beats in bytes and seconds go on; so the result is exact. Two bounds keep it fast: the seconds
that the rest takes at least, with all memory to itself, and the seconds of a plan that is known. Where more states are left
than `MOST`, some are given up, and `exact` says so. (As knapsacks are solved by lists of undominated states: Nemhauser and
Ullmann, 1969.)

Rows that are RECOMPUTED are made again before the first op in the backward pass that needs them: that of the highest stage that
makes something again of them. Until the search comes to it they are a chain of runs, which grows with every stage.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.placement.costs import CELLS, RunLoad, StepCosts
from ooc.fullgraph.placement.op_costs import TIERS, Bytes, Floats, Ints, StepProfile
from ooc.fullgraph.placement.op_runs import OpRun, inputs_of
from ooc.fullgraph.placement.stage_tables import ALIVE, BEFORE, PlacementStage, Stages, Tables, ValueChoice
from ooc.fullgraph.program import GONE, Placement, Program
from ooc.stores.jit import kernel

MOST, LEAST_MOST, FIRST = 1_500_000, 40_000, 4_000
"""States by options: of all stages, of one at least; and of one in a quick search before that finds a bound"""
_SLACK = 1 + 1e-9
"""Bounds are added up in another order than what they bound"""
_BANDS = 16
"""of bytes: where states are given up, some of each are kept"""
Known = tuple[ValueChoice, ...]

_FIELDS = CELLS + 3
"""Of a run: behind the cells of its `RunLoad` the bytes of all rows of the chain so far, by tier"""


class SearchResult(NamedTuple):
    """placement: the best; exact: whether no state was given up."""

    placement: Placement
    exact: bool


class States(NamedTuple):
    """States before a stage, or beyond the last, [s] each. known: what the stage meets, by its number; chain: rows to be made
    again (`RecomputeChains`); held: float64[s, 3], bytes by tier; parent, option: where each comes from."""

    known: Ints
    chain: Ints
    held: Floats
    seconds: Floats
    parent: Ints
    option: Ints

    def some(self, at: Ints) -> "States":
        """Those at some places."""
        return States._make(field[at] for field in self)


class RecomputeLink(NamedTuple):
    """What a stage adds to a chain. written: rows that its op makes again, empty where none; read: what it reads for them; run:
    float64[18], the first of `_FIELDS`; size: float64[3], bytes of the rows by tier."""

    written: frozenset[str]
    read: frozenset[str]
    run: Floats
    size: Floats


NO_LINK = RecomputeLink(frozenset(), frozenset(), np.zeros(CELLS), np.zeros(3))


class RecomputeChains:
    """Chains by number, 0 that of nothing. made: float64[chains, 3], bytes of their rows by tier."""

    def __init__(self, costs: StepCosts, stages: Stages, room: Floats) -> None:
        self._costs, self._stages, self._room = costs, stages, room
        self._runs: list[Floats] = [np.zeros((0, _FIELDS))]
        self._written: list[frozenset[str]] = [frozenset()]
        self._numbers: dict[tuple[int, bytes, frozenset[str]], int] = {}
        self.made = np.zeros((1, 3))

    def link(self, stage: PlacementStage, known: dict[str, ValueChoice]) -> RecomputeLink:
        """What a stage adds to chains. known: choices, also of those values that decide."""
        values, size = self._costs.values, np.zeros(3)
        written = tuple(n for n in stage.op.writes if n in known and self._stages.made_again(values[n], known[n]))
        if not written:
            return NO_LINK
        made = bool(stage.sums) and self._stages.kept(values[stage.sums], known[stage.sums])
        adds, gathers, reads = inputs_of(stage.op, stage.sums, made)
        placement = Placement({n: c.where for n, c in known.items()}, {n: c.standing for n, c in known.items()})
        load = self._costs.load(OpRun(stage.op, True, adds, gathers, reads, written, "", ()), placement)
        for name in written:
            size[TIERS.index(known[name].standing)] += self._costs.size(name)
        return RecomputeLink(frozenset(written), frozenset((*adds, *gathers, *reads)), np.array(load.cells), size)

    def grown(self, chain: int, link: RecomputeLink) -> tuple[int, bool]:
        """(the chain behind a stage, whether the one before is due with the stage's backward pass)."""
        if not link.written:
            return 0, chain > 0
        goes_on = not self._written[chain].isdisjoint(link.read)
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
        stands = held[:, None, None, :] + before[None, :, None, :] + own[..., CELLS:]
        left = self._room[0] - stands[..., 0]
        load = RunLoad.of(own[..., :CELLS])
        load = load._replace(ranges=load.ranges._replace(units=np.maximum(load.ranges.units, 1)))  # 0 where there is no run
        seconds = load.seconds(left, self._costs.profile.hidden)
        fits = (stands[..., 1:] <= self._room[1:]).all(-1)
        return np.where(fits, seconds, np.inf).sum(-1)


class Step(NamedTuple):
    """A stage met with something known: all that does not depend on the state. follows: int64[options], the number of what the
    next stage meets; link: int64[options], which of `links` an option adds to what is to be made again; before: bytes before
    the first op of the backward pass, the different ones [b, 3], and which an option has [options]."""

    tables: Tables
    follows: Ints
    link: Ints
    links: list[RecomputeLink]
    before: tuple[Floats, Ints]


def search(program: Program, profile: StepProfile, room: Bytes, known: float = np.inf) -> SearchResult | None:
    """The placement that takes the least time, or None where nothing fits `room` or is as fast as `known` seconds.

    Features stay with the host: a step that has all values on the GPU (`Placement.resident`) is not weighed here.
    """
    searching = _Search(StepCosts(program, profile), room)
    quick, most = searching.run(known, FIRST), max(LEAST_MOST, MOST // len(searching.stages.stages))
    if quick is None:
        return None if searching.whole else searching.run(known, most)
    if quick.exact:
        return quick
    return searching.run(searching.best, most) or quick


class _Search:
    """Tables, bounds and chains that all searches of a program in a room share. best: seconds of the last one's result; whole:
    whether it gave up no state."""

    def __init__(self, costs: StepCosts, room: Bytes) -> None:
        self.costs, self.room, self.stages = costs, np.array(room, np.float64), Stages(costs)
        self.chains = RecomputeChains(costs, self.stages, self.room)
        self._numbers: list[dict[Known, int]] = [{} for _ in range(len(self.stages.stages) + 1)]
        self._steps: dict[tuple[int, int], Step] = {}
        self._parts: dict[tuple[int, tuple[str, ...]], tuple[list[dict[str, ValueChoice]], Ints]] = {}
        self._options = [self.stages.options(stage) for stage in self.stages.stages]
        self._roots = self._begin()
        self._rest = self._bounds()
        self.best, self.whole = np.inf, True
        most = np.zeros(3)
        for value in costs.program.values:
            for tier in {choice.standing for choice in self.stages.choices[value.name]}:
                most[TIERS.index(tier)] += costs.size(value.name)
        self._binding = [0] + [tier for tier in (1, 2) if most[tier] > self.room[tier]]

    def run(self, known: float, most: int) -> SearchResult | None:
        """Search for what takes at most `known` seconds."""
        states, history, self.whole = self._roots, [self._roots], True
        for stage in self.stages.stages:
            parts = [self._step(stage, number, states, known) for number in np.unique(states.known)]
            whole = [part for part in parts if len(part.seconds)]
            if not whole:
                return None
            states = States(*(np.concatenate(field) for field in zip(*whole, strict=True)))
            states = self._bounded(self._unbeaten(states), stage, most)
            history.append(states)
        self.best = float(states.seconds.min())
        return SearchResult(self._traced(history), self.whole)

    def _begin(self) -> States:
        """Before the first stage: where the store's own values stand."""
        options: list[dict[str, ValueChoice]] = [{}]
        for value in self.costs.program.values:
            if self.stages.decided[value.name] < 0:
                options = [{**each, value.name: choice} for each in options for choice in self.stages.choices[value.name]]
        held = np.zeros((len(options), 3))
        for row, chosen in zip(held, options, strict=True):
            for name, choice in chosen.items():
                row += self.stages.kept_bytes(self.costs.values[name], choice)
        self._root_options, count = options, len(options)
        first = self.stages.stages[0].known
        known = np.array([self._number(0, tuple(chosen[name] for name in first)) for chosen in options])
        none = np.full(count, -1)
        return States(known, np.zeros(count, np.int64), held, np.zeros(count), none, np.arange(count))

    def _number(self, stage: int, known: Known) -> int:
        """Of what a stage meets."""
        return self._numbers[stage].setdefault(known, len(self._numbers[stage]))

    def _met(self, stage: PlacementStage, number: int) -> Step:
        """A stage met with what has that number."""
        key = stage.number, number
        if key not in self._steps:
            choices, following = list(self._numbers[stage.number])[number], stage.number + 1
            known = dict(zip(stage.known, choices, strict=True))
            names = self.stages.stages[following].known if following < len(self.stages.stages) else ()
            picked, inverse = self._parted(stage, names)
            numbers = [self._number(following, tuple(each.get(n) or known[n] for n in names)) for each in picked]
            link, links = self._links(stage, known)
            tables = self.stages.tables(stage, known)
            scan = tables.node_scans[:, 1, BEFORE] if stage.backwards else np.zeros((len(tables.kept), 3))
            before, which = np.unique(scan, axis=0, return_inverse=True)
            self._steps[key] = Step(tables, np.array(numbers)[inverse], link, links, (before, which.reshape(-1)))
        return self._steps[key]

    def _parted(self, stage: PlacementStage, names: tuple[str, ...]) -> tuple[list[dict[str, ValueChoice]], Ints]:
        """(what options of a stage pick for some values, each once; which of these each option does)."""
        key = stage.number, names
        if key not in self._parts:
            columns = [number for number, value in enumerate(stage.decides) if value.name in names]
            options = self._options[stage.number]
            _, first, inverse = np.unique(options[:, columns], axis=0, return_index=True, return_inverse=True)
            picked = [self.stages.picked(stage, options[at]) for at in first]
            self._parts[key] = picked, inverse.reshape(-1)
        return self._parts[key]

    def _links(self, stage: PlacementStage, known: dict[str, ValueChoice]) -> tuple[Ints, list[RecomputeLink]]:
        """See `Step`; only rows and sums that the op makes decide what a stage adds to a chain."""
        names = tuple(v.name for v in stage.decides if v.kind in ("rows", "sums") and v.name in stage.op.writes)
        picked, inverse = self._parted(stage, names)
        links = list[RecomputeLink]()
        number = []
        for each in picked:
            link = self.chains.link(stage, known | each)
            same = [at for at, other in enumerate(links) if not (link.written or other.written)]
            number.append(same[0] if same else len(links))
            links += [] if same else [link]
        return np.array(number)[inverse], links

    def _step(self, stage: PlacementStage, number: int, all_states: States, known: float) -> States:
        """What all options of a stage make of the states that meet it with something known."""
        at = np.nonzero(all_states.known == number)[0]
        states, step = all_states.some(at), self._met(stage, int(number))
        chains, inverse = np.unique(states.chain, return_inverse=True)
        seconds = states.seconds[:, None] + self._seconds(stage, step, states.held, self.chains.made[chains][inverse])
        seconds, chain = self._again(step, states.held, (chains, inverse), seconds)
        rest = self._rest[stage.number + 1][step.follows]
        total = seconds + rest
        row, option = np.nonzero(np.isfinite(total) & (total <= known * _SLACK))
        held = states.held[row] + step.tables.kept[option]
        return States(step.follows[option], chain[row, option], held, seconds[row, option], at[row], option)

    def _seconds(self, stage: PlacementStage, step: Step, held: Floats, made: Floats) -> Floats:
        """float64[states, options]: of the stage's ops, up and down, infinite where something does not fit. made:
        float64[states, 3], bytes of rows made again."""
        hidden, ops = self.costs.profile.hidden, (stage.op, *stage.backwards)
        total = np.zeros((len(held), len(step.tables.kept)))
        node_scans = []
        for scan, op in enumerate(ops):
            cells, stands = step.tables.node_scans[:, scan], held + made if scan else held
            left = self.room[0] - stands[:, :1] - cells[None, :, ALIVE.start]
            fits = np.ones(total.shape, np.bool_)
            for tier in (1, 2):
                fits &= stands[:, tier : tier + 1] + cells[None, :, ALIVE.start + tier] <= self.room[tier]
            node_scans.append((op.kind == "gather", RunLoad.of(cells[:, :CELLS]), left, fits))
        gathered = [load.ranges.passes(left) for gathers, load, left, _ in node_scans if gathers]
        cut = np.maximum.reduce(gathered) if gathered else 1.0  # a layer's ranges are the same up and down
        for gathers, load, left, fits in node_scans:
            total += np.where(fits, load.seconds(left, hidden, cut if gathers else 1.0), np.inf)
        return total

    def _again(self, step: Step, held: Floats, of: tuple[Ints, Ints], seconds: Floats) -> tuple[Floats, Ints]:
        """(seconds with rows made again before this stage's backward pass, where they are due; the chains behind the stage)."""
        chains, inverse = of
        grown = [[self.chains.grown(int(chain), link) for link in step.links] for chain in chains]
        behind, turn = (np.array([[each[part] for each in row] for row in grown]) for part in (0, 1))
        chain, due = behind[inverse][:, step.link], turn[inverse][:, step.link]
        if due.any():
            before, which = step.before
            cost = self.chains.seconds(chains, inverse, held, before)[:, which]
            seconds = seconds + np.where(due, cost, 0.0)
        return seconds, chain

    def _bounds(self) -> list[Floats]:
        """By stage and number of what it meets: seconds that it and all that follow take at least, with all memory to
        themselves and nothing made again."""
        alone: list[list[Floats]] = []
        for stage in self.stages.stages:
            met = [self._met(stage, number) for number in range(len(self._numbers[stage.number]))]
            none = np.zeros((1, 3))
            alone.append([self._seconds(stage, step, none, none)[0] for step in met])
        rest = [np.zeros(max(1, len(self._numbers[-1])))]
        for stage, own in zip(reversed(self.stages.stages), reversed(alone), strict=True):
            steps = [self._steps[stage.number, number] for number in range(len(own))]
            least = [float((s + rest[0][step.follows]).min()) for s, step in zip(own, steps, strict=True)]
            rest.insert(0, np.array(least))
        return rest

    def _unbeaten(self, states: States) -> States:
        """Of states that go on alike those that no other one beats in bytes and seconds."""
        columns = states.held[:, self._binding]
        order = np.lexsort((*columns.T[::-1], states.seconds, states.chain, states.known))
        alike = states.known[order] * (states.chain.max() + 1) + states.chain[order]
        return states.some(order[unbeaten(alike, np.ascontiguousarray(columns[order]))])

    def _bounded(self, states: States, stage: PlacementStage, most: int) -> States:
        """Not many more states than `most` asks for: of each band of bytes the most promising, and the least of every tier."""
        following = stage.number + 1
        options = len(self._options[following]) if following < len(self._options) else 1
        many = max(8, most // options)
        if len(states.seconds) <= many:
            return states
        self.whole = False
        promised = states.seconds + self._rest[following][states.known]
        span = max(1.0, float(states.held[:, 0].max()))
        band = np.minimum((states.held[:, 0] / span * _BANDS).astype(np.int64), _BANDS - 1)
        order = np.lexsort((promised, band))
        first = np.searchsorted(band[order], np.arange(_BANDS))
        place = np.arange(len(order)) - first[band[order]]
        chosen = set(order[place < -(-many // _BANDS)].tolist())
        chosen |= {int(states.held[:, tier].argmin()) for tier in range(3)}
        return states.some(np.array(sorted(chosen)))

    def _traced(self, history: list[States]) -> Placement:
        """The placement of the fastest state beyond the last stage."""
        at = int(history[-1].seconds.argmin())
        chosen: dict[str, ValueChoice] = {}
        for stage, states in zip(reversed(self.stages.stages), reversed(history[1:]), strict=True):
            chosen |= self.stages.picked(stage, self._options[stage.number][states.option[at]])
            at = int(states.parent[at])
        chosen |= self._root_options[history[0].option[at]]
        placements = {name: choice.where for name, choice in chosen.items()}
        passing = {name: choice.standing for name, choice in chosen.items() if choice.where in GONE}
        return Placement(placements, passing)


@kernel
def unbeaten(alike: Ints, columns: Floats) -> NDArray[np.bool_]:
    """Whether each state is beaten by none before it that is `alike`: bool[s]. columns: float64[s, bytes by tier]; in the order
    of `alike`, and of seconds within it."""
    found = np.ones(len(alike), np.bool_)
    front = np.empty(len(alike), np.int64)
    count = 0
    for k in range(len(alike)):
        if k and alike[k] != alike[k - 1]:
            count = 0
        for j in range(count):
            other, beaten = front[j], True
            for c in range(columns.shape[1]):
                if columns[other, c] > columns[k, c]:
                    beaten = False
                    break
            if beaten:
                found[k] = False
                break
        if found[k]:
            front[count] = k
            count += 1
    return found
