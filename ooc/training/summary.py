"""What a run spent, gathered over all its processes, and RUN/summary.json."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ooc.planning.run_plan import advise, bottleneck, hit_rate, read_amplification

PACKAGES = ("ooc", "torch", "torch-geometric", "numpy", "numba", "zarr", "lmdb")
_SECONDS = ("train_seconds", "evaluate_seconds", "checkpoint_seconds", "refresh_seconds")
_HISTORY = ("met", "pulled", "written", "age", "bytes_read", "bytes_written", "bytes_logged")
_WORK = ("work_s", "wait_s", "busy_s", "items")
_READ = ("bytes_read", "edge_bytes_read", "rows_read", "rows_asked")
_NEGATIVES = ("historical_negatives", "historical_negatives_random")
"""drawn from the source's past, and those of them that are random, since it had no other destination that was found"""
_TABLE = ("table_bytes_read", "table_bytes_written", "checkpoint_bytes_written")
"""of buckets; those that checkpoints write are among them"""
_PACKED = "packed_bytes_written"
_MOVED = ("bytes_read", "edge_bytes_read", _PACKED, "history_bytes_read", "history_bytes_written")
_COMPARED = ("evaluate_seconds", "peak_rss_bytes", *_MOVED, "rows_read", "rows_asked")
"""what is compared with a prediction as it was counted"""
COUNTS = (*_SECONDS, *_NEGATIVES, "steps", *_READ, *_TABLE, _PACKED, "processes", *(f"history_{name}" for name in _HISTORY))

Stages = dict[str, dict[str, float]]


def nothing_spent() -> dict[str, Any]:
    """Seconds, bytes and rows of a run that has not begun."""
    return {**dict.fromkeys(COUNTS, 0), "peak_rss_bytes": 0, "peak_cuda_bytes": 0, "stages": {}, "memory": []}


def of_ranks(spent: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks spent: bytes and rows of all together, the largest peak of one, and rank 0's seconds and steps."""
    total = dict(spent[0])
    for name in (*_NEGATIVES, *_READ, _PACKED, *(f"history_{name}" for name in _HISTORY)):
        total[name] = sum(each[name] for each in spent)
    for peak in ("peak_rss_bytes", "peak_cuda_bytes"):
        total[peak] = max(each[peak] for each in spent)
    return total


def add(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What earlier processes and this one spent together; peaks are maxima."""
    total: dict[str, Any] = {name: before.get(name, 0) + now[name] for name in COUNTS}
    for peak in ("peak_rss_bytes", "peak_cuda_bytes"):
        total[peak] = max(before[peak], now[peak])
    stages = [each["stages"] for each in (before, now)]
    total["stages"] = {
        name: {part: sum(each.get(name, {}).get(part, 0) for each in stages) for part in _WORK}
        for name in dict.fromkeys([*stages[0], *stages[1]])
    }
    total["memory"] = [*before["memory"], *now["memory"]]
    return total


def summarize(spent: dict[str, Any], steps_per_epoch: int, batch_size: int) -> dict[str, Any]:
    """summary.json's account of time, memory and I/O.

    seconds_per_batch: wall time from an epoch's first request to its last step, checkpoints and evaluation left out, divided
    by the steps; seconds_per_epoch: that of a whole epoch.
    """
    steps = spent["steps"]
    each = spent["train_seconds"] / steps if steps else None
    return {
        "seconds_per_epoch": None if each is None else each * steps_per_epoch,
        "seconds_per_batch": each,
        "seeds_per_second": None if not each else batch_size / each,
        "steps_per_epoch": steps_per_epoch,
        "read_bytes_per_second": spent["bytes_read"] / spent["train_seconds"] if steps else None,
        **spent,
    }


def score_lines(result: dict[str, Any]) -> list[str]:
    """A run's scores, a line a split, with those of what a model must beat below, and why others are missing.

    >>> print(*score_lines(train(config)), sep="\n")
    test: ap 0.9312, auroc 0.9407, mrr 0.9288
    test of EdgeBank: ap 0.7650, auroc 0.7583, mrr 0.8791
    """
    lines = []
    for split, scores in result["metrics"].items():
        beside = [(f" of {name}", each[split]) for name, each in result.get("baselines", {}).items() if split in each]
        for whose, found in [("", scores), *beside]:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if value is not None)
            lines.append(f"{split}{whose}: {shown or 'all scores are undefined'}")
    if lines and (said := result.get("negatives")):
        lines.append(said)
    if drawn := result.get("historical_negatives"):
        share = result["historical_negatives_random"] / drawn
        lines.append(f"historical negatives: {share:.1%} are random, as no other destination of their source was found before")
    return [*lines, *(f"{split}: no scores, {why}" for split, why in result.get("unscored", {}).items())]


def histories(spent: dict[str, Any]) -> dict[str, Any] | None:
    """What came from histories, None where no step met a row that could.

    share_pulled: of the rows that inner layers met, those that came from histories and had been written before;
    share_unwritten: those whose history was still zero; age_steps: since a pulled row was written, on average; bytes_logged: of
    overwritten rows, which the undo log read and wrote.
    """
    met, written = spent["history_met"], spent["history_written"]
    if not met:
        return None
    return {
        "share_pulled": written / met,
        "share_unwritten": (spent["history_pulled"] - written) / met,
        "age_steps": spent["history_age"] / written if written else None,
        "bytes_read": spent["history_bytes_read"],
        "bytes_written": spent["history_bytes_written"],
        "bytes_logged": spent["history_bytes_logged"],
    }


def account(
    spent: dict[str, Any], steps_per_epoch: int, row_bytes: int, plan: dict[str, Any] | None, even_rows: bool = True
) -> dict[str, Any]:
    """What happened beside what was predicted, and what to change; stages count while at least one of their threads works.

    row_bytes, even_rows: of features, see `ooc.planning.run_plan.RunFacts`; plan: `Plan.asdict`, None where none was made.
    "actual" has the names of `ooc.planning.run_plan.Prediction`.
    """
    steps, stages = spent["steps"], spent["stages"]
    work = {name: stage["busy_s"] for name, stage in stages.items() if name != "source"}
    seconds_per_epoch = spent["train_seconds"] / steps * steps_per_epoch if steps else None
    reading = work.get("read", 0.0)
    feature_bytes = spent["bytes_read"] - spent["edge_bytes_read"]  # edges are read while sampling
    asked_known = spent["rows_asked"] >= spent["rows_read"]  # not where the run was begun by an ooc that did not count them
    actual = {
        "seconds_per_epoch": seconds_per_epoch,
        **{name: spent[name] for name in _COMPARED},
        "hit_rate": hit_rate(spent["rows_read"], spent["rows_asked"]) if row_bytes and asked_known else None,
        "read_amplification": read_amplification(feature_bytes, spent["rows_read"], row_bytes if even_rows else 0),
        "read_bytes_per_second": feature_bytes / reading if reading and row_bytes else None,
        "stages": work,
        "bottleneck": bottleneck(work) if work else None,
    }
    predicted, others, advice = None if plan is None else plan["prediction"], dict[str, float](), None
    if work and seconds_per_epoch is not None:
        if plan is not None:  # where all was slower than predicted, so would be anything else
            scale = seconds_per_epoch / plan["prediction"]["seconds_per_epoch"]
            others = {name: seconds * scale for name, seconds in plan["others"].items()}
        advice = advise(work, spent["train_seconds"], seconds_per_epoch, others)
    return {"predicted": predicted, "actual": actual, "advice": advice}


def versions() -> dict[str, str]:
    """Versions of what computed the result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
