"""PURE: what each way of making batches would take -> a table, the one to choose, and why.

Sampled neighborhoods lose nothing but grow with every layer; histories need one hop however deep the model is, and their rows
are of earlier steps; clusters drop the edges between them; GraphSAINT's subgraphs are weighed so that they stand for the whole
graph on average, which attention takes no part in. So another mode must pay for what it loses.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ooc.stores.sizes import format_bytes

LEAST_SECONDS = 0.2
"""of an epoch that must be saved: on a small graph whatever is measured is chance"""


@dataclass(frozen=True)
class ModeTraits:
    """What choosing must know of a mode, stated by its class. In texts {lost} and {kept} are shares, {hops} the model's layers
    and {takes} what an epoch takes.

    rank: the less a mode loses the lower, 0 of the one that loses nothing; noun: what its batches are; exactness: what it
    loses; reason: why it is chosen; drops: why not, where more than `most_lost` is lost or, with `unweighed` (what it loses
    then), where the model takes no coefficients; worth: times as fast an epoch must be as in a mode that loses less.
    """

    rank: int
    noun: str
    exactness: str
    reason: str = ""
    worth: float = 1.0
    drops: str = ""
    most_lost: float = 1.0
    unweighed: str = ""


@dataclass(frozen=True)
class Candidate:
    """A mode, with the settings (of `TrainConfig`, besides those given) it was tried with. Seconds and bytes: of an epoch of
    training, on average over the run; 0 where it does not fit.

    fix: what would make it fit or do, None where it does. peak_bytes: of the process; edges_read: 0 where they are mapped or in
    memory. lost: the share of a batch's edges that a cluster drops, or of its rows that come from histories. weighed: whether
    the model takes GraphSAINT's coefficients.
    """

    mode: str
    traits: ModeTraits
    settings: dict[str, Any]
    fix: str | None = None
    seconds: float = 0.0
    peak_bytes: int = 0
    features_read: int = 0
    edges_read: int = 0
    histories_read: int = 0
    histories_written: int = 0
    lost: float = 0.0
    weighed: bool = True

    @property
    def good(self) -> bool:
        """Whether it learns what the graph has."""
        return self.lost <= self.traits.most_lost and (self.weighed or not self.traits.unweighed)

    @property
    def exactness(self) -> str:
        return self.text(self.traits.exactness if self.weighed else self.traits.unweighed or self.traits.exactness)

    @property
    def flags(self) -> str:
        """Of `ooc train`, besides those given."""
        given = {"mode": self.mode, **self.settings}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())

    def pays(self, other: "Candidate") -> bool:
        """Whether it is so much faster than another that loses less."""
        return self.traits.worth * self.seconds < other.seconds and other.seconds - self.seconds > LEAST_SECONDS

    def text(self, template: str, layers: int = 0) -> str:
        lost, kept = (f"{share:.0%}".replace("%", " %") for share in (self.lost, 1 - self.lost))
        hops = f"{layers} layer{'s' * (layers != 1)}"
        moved = self.features_read + self.edges_read + self.histories_read + self.histories_written
        takes = f"{self.seconds:.3g} s an epoch" + (f", {format_bytes(moved)} read and written" if moved else "")
        return template.format(lost=lost, kept=kept, hops=hops, takes=takes)

    def asdict(self) -> dict[str, Any]:
        """As plain values, with what is said of it."""
        given = {name: value for name, value in asdict(self).items() if name != "traits"}
        return {**given, "exactness": self.exactness, "flags": self.flags}


@dataclass(frozen=True)
class ModeChoice:
    """The candidates, the one recommended, and why, in one sentence."""

    candidates: tuple[Candidate, ...]
    best: Candidate
    reason: str

    @property
    def recommended(self) -> str:
        return self.best.mode

    def asdict(self) -> dict[str, Any]:
        each = [candidate.asdict() for candidate in self.candidates]
        return {"candidates": each, "recommended": self.recommended, "reason": self.reason}


def choose(candidates: Sequence[Candidate], layers: int) -> ModeChoice:
    """Choose among `candidates`, one a mode, for a model of so many layers. Without one that fits, the first is named."""
    ordered = tuple(sorted(candidates, key=lambda each: each.traits.rank))
    fitting = [each for each in ordered if each.fix is None]
    good = [each for each in fitting if each.good] or fitting[:1]
    if not good:
        return ModeChoice(ordered, ordered[0], f"Nothing fits; for mode {ordered[0].mode}: {ordered[0].fix}.")
    # The first that no later one is so much faster than.
    best = next(each for k, each in enumerate(good) if not any(other.pays(each) for other in good[k + 1 :]))
    return ModeChoice(ordered, best, _reason(best, ordered, layers))


def _reason(best: Candidate, candidates: Sequence[Candidate], layers: int) -> str:
    if best.traits.rank == 0:
        return _reason_to_lose_nothing(best, [each for each in candidates if each is not best and each.fix is None])
    why, first = best.text(best.traits.reason, layers), candidates[0]
    if first.traits.rank:
        return f"{why[0].upper()}{why[1:]}."
    noun = first.traits.noun.capitalize()
    if first.fix is not None:
        return f"{noun} of {layers} layers do not fit; {why}."
    return first.text(f"{noun} of {layers} layers take {{takes}}; {why}.")


def _reason_to_lose_nothing(best: Candidate, others: Sequence[Candidate]) -> str:
    said = best.text(f"{best.traits.noun.capitalize()} fit and lose nothing: {{takes}}")
    quick = next((each for each in others if not each.good and each.pays(best)), None)
    if quick is not None:
        return f"{said}; {quick.traits.noun} would take {quick.seconds:.3g} s, but {quick.text(quick.traits.drops)}."
    nearest = min((each for each in others if each.good), key=lambda each: each.seconds, default=None)
    if nearest is None:
        return f"{said}; no other mode is possible."
    return f"{said}; {nearest.traits.noun}, the fastest others, take {nearest.seconds:.3g} s: not worth what they lose."
