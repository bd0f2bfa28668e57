"""PURE: what each way of making batches would take -> a table, the one to choose, and why.

Sampled neighborhoods lose nothing but grow with every layer; histories need one hop however deep the model is, and their rows
are of earlier steps; clusters drop the edges between them; GraphSAINT's subgraphs are weighed so that they stand for the whole
graph on average, which attention takes no part in. So another mode must pay for what it loses.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stores.sizes import format_bytes

Mode = Literal["sampled", "history", "cluster", "saint"]
MODES: tuple[Mode, ...] = ("sampled", "history", "cluster", "saint")
"""the less a mode loses the earlier it stands"""
WORTH = {"history": 2.0, "cluster": 2.0, "saint": 8.0}
"""times as fast an epoch must be in a mode that loses more; in a random subgraph a node meets few of its neighbors, so that it
takes more epochs"""
LEAST_SECONDS = 0.2
"""of an epoch that must be saved: on a small graph whatever is measured is chance"""
MOST_DROPPED = 0.3
"""of the edges: clusters that lose more are chosen only where nothing else fits"""


@dataclass(frozen=True)
class Candidate:
    """A mode, with the settings (of `TrainConfig`, besides those given) it was tried with. Seconds and bytes: of an epoch of
    training, on average over the run; 0 where it does not fit.

    fix: what would make it fit or do, None where it does. lost: the share of a batch's edges that a cluster drops, or of its
    rows that come from histories. weighed: whether the model takes GraphSAINT's coefficients.
    """

    mode: Mode
    settings: dict[str, Any]
    fix: str | None = None
    seconds: float = 0.0
    peak_bytes: int = 0
    """of the process"""
    features_read: int = 0
    edges_read: int = 0
    """0 where they are mapped or in memory"""
    histories_read: int = 0
    histories_written: int = 0
    lost: float = 0.0
    weighed: bool = True

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.features_read + self.edges_read + self.histories_read + self.histories_written

    @property
    def exactness(self) -> str:
        """What it costs."""
        lost = f"{self.lost:.0%}".replace("%", " %")
        words: dict[Mode, str] = {
            "sampled": "none",
            "history": f"stale halos: {lost} of a batch's rows",
            "cluster": f"dropped edges: {lost}",
            "saint": "none on average" if self.weighed else "dropped edges, not weighed by attention",
        }
        return words[self.mode]

    @property
    def flags(self) -> str:
        """Of `ooc train`, besides those given."""
        given = {"mode": self.mode, **self.settings}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())


@dataclass(frozen=True)
class ModeChoice:
    """The candidates, the one recommended, and why, in one sentence."""

    candidates: tuple[Candidate, ...]
    recommended: Mode
    reason: str

    @property
    def best(self) -> Candidate:
        """The one recommended."""
        return next(each for each in self.candidates if each.mode == self.recommended)

    def asdict(self) -> dict[str, Any]:
        """The fields as plain values, with what is said of each candidate."""
        told = [{**asdict(each), "exactness": each.exactness, "flags": each.flags} for each in self.candidates]
        return {"candidates": told, "recommended": self.recommended, "reason": self.reason}


def choose(candidates: Sequence[Candidate], layers: int) -> ModeChoice:
    """Choose among `candidates`, one a mode, for a model of so many layers. Without one that fits, the first is named.

    >>> choose([Candidate("sampled", {}, seconds=60.0), Candidate("history", {}, seconds=5.0)], layers=8).recommended
    'history'
    """
    ordered = sorted(candidates, key=lambda each: MODES.index(each.mode))
    fitting = [each for each in ordered if each.fix is None]
    good = [each for each in fitting if _is_good(each)] or fitting[:1]
    if not good:
        first = ordered[0]
        return ModeChoice(tuple(ordered), first.mode, f"Nothing fits; for mode {first.mode}: {first.fix}.")
    # The first that no later one is so much faster than.
    best = next(each for k, each in enumerate(good) if not any(_pays(other, each) for other in good[k + 1 :]))
    return ModeChoice(tuple(ordered), best.mode, _reason(best, ordered, layers))


def _is_good(candidate: Candidate) -> bool:
    """Whether it learns what the graph has."""
    learns: dict[Mode, bool] = {"saint": candidate.weighed, "cluster": candidate.lost <= MOST_DROPPED}
    return learns.get(candidate.mode, True)


def _pays(other: Candidate, best: Candidate) -> bool:
    return WORTH[other.mode] * other.seconds < best.seconds and best.seconds - other.seconds > LEAST_SECONDS


_NAMES = {
    "sampled": "sampled neighborhoods",
    "history": "histories",
    "cluster": "clusters",
    "saint": "GraphSAINT's subgraphs",
}


def _reason(best: Candidate, candidates: Sequence[Candidate], layers: int) -> str:
    sampled = next((each for each in candidates if each.mode == MODES[0]), None)
    if best is sampled:
        return _reason_to_sample(best, [each for each in candidates if each is not best and each.fix is None])
    why = {
        "history": f"with histories a step needs one hop for all {layers} layer{'s' * (layers != 1)}: {_takes(best)}",
        "cluster": f"parts keep {1 - best.lost:.0%} of a batch's edges: {_takes(best)}".replace("%", " %"),
        "saint": f"random subgraphs, weighed to stand for the whole graph, take {_takes(best)}",
    }[best.mode]
    if sampled is None:
        return f"{why[0].upper()}{why[1:]}."
    if sampled.fix is not None:
        return f"Sampled neighborhoods of {layers} layers do not do; {why}."
    return f"Sampled neighborhoods of {layers} layers take {_takes(sampled)}; {why}."


def _reason_to_sample(best: Candidate, others: Sequence[Candidate]) -> str:
    good = [each for each in others if _is_good(each)]
    quick = [each for each in others if not _is_good(each) and _pays(each, best)]
    said = f"Sampled neighborhoods fit and lose nothing: {_takes(best)}"
    if quick:
        loses = {"cluster": f"drop {quick[0].lost:.0%} of the edges".replace("%", " %"), "saint": "drop edges"}[quick[0].mode]
        return f"{said}; {_NAMES[quick[0].mode]} would take {quick[0].seconds:.3g} s, but {loses}."
    if good:
        nearest = min(good, key=lambda each: each.seconds)
        return (
            f"{said}; {_NAMES[nearest.mode]}, the fastest others, with {nearest.seconds:.3g} s do not pay for what they lose."
        )
    return f"{said}; no other mode does."


def _takes(candidate: Candidate) -> str:
    moved = f", {format_bytes(candidate.moved)} read and written" if candidate.moved else ""
    return f"{candidate.seconds:.3g} s an epoch{moved}"
