"""PURE: profile + budget -> `Plan`: what a run will take, why, and what would change it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ooc.planning.choose_mode import ModeChoice
from ooc.planning.over_ranks import RanksPlan
from ooc.planning.run_profile import Evaluation, RunProfile
from ooc.planning.simulate_superbatches import BatchCosts, Share, SimulatedReads
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.sizes import format_bytes

WORTH = 0.1
"""of an epoch's seconds: what a change must save to be advised"""


@dataclass(frozen=True)
class Upkeep:
    """What a run does besides batches. Bytes.

    beforehand: batches drawn before the first one, to count how often nodes come; lag: pushes to histories that are still to be
    written at the end; fills: times that histories' hot rows are read, before the second epoch and after every layer-wise pass;
    refresh_read: by all refreshes, but not by those that share a layer-wise pass with scores; drift_read: by measuring the
    drift of histories, behind every epoch; emptied: of the epochs after the first, the share before which a layer-wise pass has
    driven the rows out of memory; scan_peak: of the process in a layer-wise pass, where there are any; pool: of feature rows
    that are read from disk once, to stay on a GPU, pool_rows of them in pool_s seconds.
    """

    beforehand: float = 0.0
    lag: int = 0
    fills: int = 0
    refresh_read: int = 0
    refresh_written: int = 0
    drift_read: int = 0
    emptied: float = 0.0
    scan_peak: int = 0
    pool: int = 0
    pool_rows: int = 0
    pool_s: float = 0.0


CHANGES = {
    "read": "give more memory, store features in fewer bytes, or use a faster disk",
    "consumer": "the disk keeps up, so only a smaller model, fewer neighbors, or a faster processor or GPU, would help",
    "sample": "a smaller fan-out or, where edges stay on disk, more memory would help",
    "group": "a smaller fan-out, or rows in memory where they fit, would help",
    "sum": "a smaller fan-out or narrower features would help",
    "pack": "more of `pack`, a faster disk, or features in fewer bytes would help",
    "collate": "a smaller fan-out or narrower features would help",
    "pull": "more parts per batch, histories in float16 or a smaller hidden width would help",
    "tables": "more memory, a smaller hidden width or a smaller fan-out would help",
}
"""what helps where a stage takes the longest"""


@dataclass(frozen=True)
class RunFacts:
    """What the planner must know of a run besides its profile. steps: batches of the whole run; row_bytes: of a row as stored,
    the longest where several types differ, 0 where rows are in memory; scored: times that each split is."""

    steps_per_epoch: int
    steps: int
    row_bytes: int
    scored: Mapping[str, int]
    upkeep: Upkeep = Upkeep()
    even_rows: bool = True
    """whether all rows on disk are of that length, so that bytes needed follow from their number"""
    changes: Mapping[str, str] = field(default_factory=lambda: CHANGES)
    """what helps where a stage takes the longest"""


@dataclass(frozen=True)
class Prediction:
    """What a run will take: training only, but for the peak and where it is said. Seconds, bytes, rows: of the whole run.

    bytes_read: of features and edges; packed_bytes_written: to pack batches; history_bytes_read, history_bytes_written: by
    refreshes too; stages: seconds of work of each; beforehand_seconds: before the first batch.
    None where it does not apply: later_epoch_seconds with one epoch; hit_rate (of the rows that batches ask for, those that
    need no reading), read_amplification (bytes read by bytes of the rows that had to be read) and read_bytes_per_second (while
    reading) where rows are in memory.
    """

    seconds_per_epoch: float
    first_epoch_seconds: float
    later_epoch_seconds: float | None
    evaluate_seconds: float
    peak_rss_bytes: int
    bytes_read: int
    edge_bytes_read: int
    history_bytes_read: int
    history_bytes_written: int
    rows_read: int
    rows_asked: int
    hit_rate: float | None
    read_amplification: float | None
    read_bytes_per_second: float | None
    stages: dict[str, float]
    bottleneck: str
    beforehand_seconds: float = 0.0
    packed_bytes_written: int = 0

    @property
    def kept(self) -> str:
        """What `history_bytes_read` and `history_bytes_written` are of, for people."""
        return "embedding tables" if "tables" in self.stages else "histories"


CLOSE = 1.1
"""A predicted peak may be off by so much: batches keep to the memory, or are refused"""


@dataclass(frozen=True, repr=False)
class Plan:
    """A run's memory, what it will take, and what to change; frozen, printed by `ooc plan`, JSON by `asdict`.

    others: seconds an epoch with another setting; steps, profiled_steps: batches of the run, and those sampled for the plan;
    reading: how features are read, by which engine and why.
    """

    budget: MemoryPlan
    prediction: Prediction
    costs: BatchCosts
    others: dict[str, float]
    advice: str
    steps: int
    profiled_steps: int
    profile_seconds: float
    reading: str = ""
    activations: str = ""
    """which are kept and which recomputed, where that is planned"""
    choice: ModeChoice | None = None
    """the modes compared, if none was given"""
    ranks: RanksPlan | None = None
    """what several processes send, where that was asked for"""

    @property
    def needs_more(self) -> int:
        """Bytes of memory that the run needs where it needs more than it has; 0 where it fits."""
        peak = self.prediction.peak_rss_bytes
        return peak if peak > CLOSE * self.budget.memory else 0

    def __str__(self) -> str:
        """The prediction in one line."""
        found, parts = self.prediction, []
        if found.hit_rate is not None:
            parts = [f"{format_bytes(found.bytes_read)} read, {100 * found.hit_rate:.0f} % of the rows from memory"]
        elif found.bytes_read:
            parts = [f"{format_bytes(found.bytes_read)} read"]
        if found.packed_bytes_written:
            parts.append(f"{format_bytes(found.packed_bytes_written)} written to pack batches")
        if found.history_bytes_written:
            moved = format_bytes(found.history_bytes_read), format_bytes(found.history_bytes_written)
            parts.append(f"{found.kept} {moved[0]} read, {moved[1]} written")
        parts.insert(0, f"{found.seconds_per_epoch:.3g} s an epoch, peak {format_bytes(found.peak_rss_bytes)}")
        return "; ".join([", ".join(parts), self.advice])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def asdict(self) -> dict[str, Any]:
        found = asdict(replace(self, choice=None))
        del found["choice"]
        return found if self.choice is None else {**found, "choice": self.choice.asdict()}


def plan(profile: RunProfile, budget: MemoryPlan, run: RunFacts) -> Plan:
    """Predict `run`. More memory never means more bytes; the same profile gives the same plan."""
    first, later = _shares(profile.simulated, profile, run)
    costs, whole = profile.costs, first + later
    pulling_s, pulled, pushed = _histories(first, later, profile, run)
    stages = _stages(whole, profile) | pulling_s
    edges = profile.sampled_nbytes * (whole.steps + run.upkeep.beforehand) + whole.edge_nbytes
    upkeep = run.upkeep
    rows_read = whole.rows_read + upkeep.pool_rows
    seconds_per_epoch = (whole.seconds + upkeep.pool_s) / whole.steps * run.steps_per_epoch
    others = {
        name: sum(_shares((other,), profile, run), Share()).seconds / whole.steps * run.steps_per_epoch
        for name, other in profile.others.items()
        if other.suffices(min(run.steps, run.steps_per_epoch))
    }
    prediction = Prediction(
        seconds_per_epoch=seconds_per_epoch,
        first_epoch_seconds=first.seconds + upkeep.pool_s,
        later_epoch_seconds=later.scaled(run.steps_per_epoch).seconds if later.steps else None,
        evaluate_seconds=sum(run.scored.get(name, 0) * scoring_s(each, costs) for name, each in profile.evaluations.items()),
        peak_rss_bytes=peak_bytes(profile, run),
        bytes_read=round(whole.nbytes + upkeep.pool + edges),
        edge_bytes_read=round(edges),
        history_bytes_read=round(pulled),
        history_bytes_written=round(pushed),
        rows_read=round(rows_read),
        rows_asked=round(whole.rows_asked),
        hit_rate=hit_rate(rows_read, whole.rows_asked) if run.row_bytes else None,
        read_amplification=read_amplification(whole.nbytes + upkeep.pool, rows_read, run.row_bytes if run.even_rows else 0),
        read_bytes_per_second=whole.nbytes / whole.read_s if whole.read_s else None,
        stages=stages,
        bottleneck=bottleneck(stages),
        beforehand_seconds=run.upkeep.beforehand * costs.sample_s,
        packed_bytes_written=round(whole.packed_nbytes),
    )
    advice = advise(stages, whole.seconds, seconds_per_epoch, others, run.changes)
    return Plan(budget, prediction, costs, others, advice, run.steps, profile.steps, profile.seconds)


def hit_rate(rows_read: float, rows_asked: float) -> float | None:
    """Of the rows asked for, the share that needed no reading; None where none was asked for."""
    return 1 - rows_read / rows_asked if rows_asked else None


def read_amplification(nbytes: float, rows_read: float, row_bytes: int) -> float | None:
    """Bytes read by those of the rows that had to be read; None where there are none, or their length (0) is not known."""
    return nbytes / (rows_read * row_bytes) if rows_read and row_bytes else None


def _shares(simulated: tuple[SimulatedReads, ...], profile: RunProfile, run: RunFacts) -> tuple[Share, Share]:
    """(the first epoch, all later ones together), histories included: they go on beside all else while the disk has time."""
    costs, each, exchange = profile.costs, run.steps_per_epoch, profile.exchange
    first, later = simulated[0].epoch(costs, min(run.steps, each)), Share()
    left = run.steps - min(run.steps, each)
    if left:
        steady = simulated[1].epoch(costs, each) if len(simulated) > 1 else simulated[0].later_epoch(costs, each)
        emptied = run.upkeep.emptied * left
        later = first.scaled(emptied) + steady.scaled(left - emptied)
    if exchange is None:
        return first, later

    def beside(share: Share, pull_s: float) -> Share:
        idle = max(0.0, share.seconds - share.read_s)
        push_s = exchange.written * exchange.cost.byte_s  # as long as reading it
        return replace(share, seconds=share.seconds + max(0.0, (pull_s + push_s) * share.steps - idle))

    return beside(first, exchange.pull_s(exchange.first)), beside(later, exchange.pull_s(exchange.later))


def _histories(first: Share, later: Share, profile: RunProfile, run: RunFacts) -> tuple[dict[str, float], float, float]:
    """Of histories: (seconds of reading them, as a stage; bytes read; bytes written)."""
    exchange, upkeep, steps = profile.exchange, run.upkeep, first.steps + later.steps
    if exchange is None:
        return {}, 0.0, 0.0
    seconds = exchange.pull_s(exchange.first) * first.steps + exchange.pull_s(exchange.later) * later.steps
    read = exchange.first.nbytes * first.steps + exchange.later.nbytes * later.steps + exchange.hot.nbytes * upkeep.fills
    read += upkeep.drift_read * (steps // run.steps_per_epoch) + upkeep.refresh_read
    return {exchange.stage: seconds}, read, exchange.written * max(0.0, steps - upkeep.lag) + upkeep.refresh_written


def _stages(whole: Share, profile: RunProfile) -> dict[str, float]:
    costs = profile.costs
    stages = {"sample": whole.steps * costs.sample_s, "group": whole.steps * costs.group_s, "read": whole.read_s}
    sums = {} if costs.pace is None else {profile.simulated[0].makes: whole.sum_s}
    return {**stages, **sums, "collate": whole.steps * costs.collate_s, "consumer": whole.model_s}


def scoring_s(each: Evaluation, costs: BatchCosts) -> float:
    """Seconds of scoring a split once. costs: of training, which reads as fast."""
    if each.simulated is None:
        return each.batches * each.batch_s
    pace = costs.pace
    if pace is not None:  # the disk's work slows a batch down as it does in training
        pace = replace(pace, batch_s=each.batch_s * pace.batch_s / costs.together_s)
    own = replace(
        costs, sample_s=each.sample_s, collate_s=0.0, step_s=each.batch_s, together_s=each.batch_s, cpu_s=0.0, pace=pace
    )
    return each.simulated.epoch(own, each.batches).seconds


def peak_bytes(profile: RunProfile, run: RunFacts) -> int:
    """The most memory of the process: what it took to run the model, the rows or sums in memory beside it, in training or in
    scoring, and the edges still to be mapped."""
    steps = min(run.steps, run.steps_per_epoch)
    most = [each.peak_bytes(profile.costs, steps, run.row_bytes) for each in profile.simulated]
    for split, each in profile.evaluations.items():
        if run.scored.get(split) and each.simulated is not None:
            most.append(each.simulated.peak_bytes(profile.costs, each.batches, run.row_bytes))
    exchange = profile.exchange
    histories = 0 if exchange is None else exchange.memory + exchange.resident_hot * (run.steps > run.steps_per_epoch)
    return max(profile.resident + profile.unmapped + max(most, default=0) + histories, run.upkeep.scan_peak)


def bottleneck(stages: Mapping[str, float]) -> str:
    """The stage that works longest, for which the others wait."""
    return max(stages, key=lambda name: stages[name])


NAMES = {
    "sample": "sampling",
    "group": "grouping",
    "read": "reading",
    "sum": "summing",
    "pack": "packing",
    "collate": "collation",
    "pull": "reading histories",
    "tables": "reading embedding tables",
    "copy": "copying to the device",
    "consumer": "the model",
}
"""of stages, for people"""


def advise(
    stages: Mapping[str, float],
    seconds: float,
    seconds_per_epoch: float,
    others: Mapping[str, float],
    changes: Mapping[str, str] = CHANGES,
) -> str:
    """One sentence on what to change. stages: seconds of work; seconds: of training; others: seconds an epoch otherwise;
    changes: what helps, by stage.

    >>> advise({"read": 9.0, "consumer": 1.0}, 10.0, 10.0, {"4 GB of memory": 6.0})
    'Reading takes 90 % of the time: with 4 GB of memory an epoch would take 6 s instead of 10 s.'
    """
    worst = bottleneck(stages)
    share = f"{NAMES.get(worst, worst).capitalize()} takes {100 * min(1.0, stages[worst] / seconds):.0f} % of the time"
    best = min(others, key=lambda name: others[name], default=None)
    if worst == "read" and best is not None and others[best] < (1 - WORTH) * seconds_per_epoch:
        better = f"with {best} an epoch would take {others[best]:.3g} s instead of {seconds_per_epoch:.3g} s"
        return f"{share}: {better}."
    return f"{share}: {changes.get(worst, 'the others wait for it')}."
