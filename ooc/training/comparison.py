"""Short runs of one model with each technique against memory: accuracy, memory, time and bytes of each.

Every run is a process of its own, because the peak of a process's memory never falls. Runs are kept, so that a comparison that
was stopped goes on.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ooc.config.base import RunConfig
from ooc.config.modes import settings_of
from ooc.config.nodes import TrainConfig
from ooc.config.techniques import PLAIN, TECHNIQUES, names_of, with_technique
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.ingest.duck import Progress, silent
from ooc.stores.io.atomic import write_file
from ooc.training.checkpoint import METRICS, SUMMARY, read_json

RESULT = "comparison.json"
EPOCHS = 10
"""of a run, where the settings do not say"""
_LAST_BYTES = 2**14
"""of a log, which has its last lines"""
_LOOKS = 0.2
"""seconds between looks at how far a run is"""


@dataclass(frozen=True)
class Trial:
    """What training with one technique took; sizes in bytes, means over the seeds.

    technique, about: its name, and what it does; epochs: of a run; metric: name of the score; score, deviation: on the test
    split (or validation where there is none), and its standard deviation over the seeds, None of one seed; peak_rss_bytes:
    largest memory of the process, libraries included; training_bytes: the same while it trained, less what it had when it
    divided its memory; seconds: of an epoch of training; bytes_moved: read and written by all epochs; refused: why it could
    not be tried, None if it was.
    """

    technique: str
    about: str
    epochs: int = 0
    metric: str = ""
    score: float | None = None
    deviation: float | None = None
    peak_rss_bytes: int = 0
    training_bytes: int = 0
    peak_cuda_bytes: int = 0
    seconds: float = 0.0
    bytes_moved: int = 0
    refused: str | None = None


def compare(
    config: RunConfig | Path | str | None = None,
    *,
    techniques: str | Sequence[str] | None = None,
    seeds: int = 1,
    progress: Progress = silent,
    **settings: Any,
) -> list[Trial]:
    """Train one model for a few epochs with each technique against memory, and compare.

    Args:
        config: As of `ooc.train`: the settings that all runs share; 10 epochs unless they say.
        techniques: Names, as a list or "labor,bf16"; by default all.
        seeds: Runs of each technique.
        progress: Called with a technique, the epochs trained, those to train, and "epochs".
        settings: As of `ooc.train`. `out` is the directory of all runs; what is finished there is not trained again, as long
            as settings and data are the same.

    Returns:
        A `Trial` of every technique, that of the settings as given first; also written to OUT/comparison.json.

    Raises:
        ConfigError: If a technique is unknown, the settings do not fit the store, or `out` holds something else.

    >>> for trial in ooc.compare(store="tolokers.ooc", out="runs/compare", techniques="labor,history"):
    ...     print(trial.technique, trial.score, trial.peak_rss_bytes)
    """
    base = _base(settings_of(config, settings))
    names = names_of(techniques)
    if seeds < 1:
        raise ConfigError(f"seeds = {seeds} is invalid: give 1 or more")
    parts, data = _store_of(base)
    with _claimed(base.out):
        trials = []
        for name in names:
            trial = _trial(base, name, parts, data, seeds, progress)
            if name == PLAIN and trial.refused is not None:
                raise ConfigError(trial.refused)
            trials.append(trial)
        write_file(base.out / RESULT, json.dumps([asdict(each) for each in trials], indent=1).encode())
    return trials


def _base(config: RunConfig) -> TrainConfig:
    """The settings that runs share. Raises ConfigError if they are not of training on batches of nodes."""
    if not config.has_techniques:
        raise ConfigError(f"techniques are compared in training on batches of nodes, not in mode {config.mode}: leave it out")
    if "epochs" in config.model_fields_set:
        return cast(TrainConfig, config)
    values = {name: getattr(config, name) for name in config.model_fields_set}
    return cast(TrainConfig, settings_of(None, {**values, "epochs": EPOCHS}))


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Make the directory of a comparison; one that fails without a run in it leaves none.

    Raises ConfigError where there is something else, as runs in it are replaced.
    """
    if os.path.lexists(out) and not (out / RESULT).exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists already and is not of `ooc compare`: choose another `out`")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / RESULT).exists():
        write_file(out / RESULT, b"[]")
    try:
        yield
    except Exception:
        if [path.name for path in out.iterdir()] == [RESULT]:
            shutil.rmtree(out)
        raise


def _store_of(config: TrainConfig) -> tuple[int | None, str]:
    """(parts of the store's numbering, None if it has none; the fingerprint of its data)."""
    with Dataset.open(
        config.store, config.memory, features=config.features, cache_dir=config.cache_dir, cache=config.cache
    ) as dataset:
        return dataset.manifest.parts, dataset.fingerprint


def _trial(base: TrainConfig, name: str, parts: int | None, data: str, seeds: int, progress: Progress) -> Trial:
    """Train with a technique, once per seed."""
    about, runs = TECHNIQUES[name].about, []
    for seed in range(base.seed, base.seed + seeds):
        out = base.out / (name if seeds == 1 else f"{name}-{seed}")
        try:
            config = with_technique(base.model_copy(update={"out": out, "seed": seed}), name, parts)
            runs.append(_finished(config, data) or _measured(config, name, progress))
        except ConfigError as error:
            return Trial(name, about, refused=str(error))
    return _summed(name, about, runs)


def _summed(name: str, about: str, runs: list[dict[str, Any]]) -> Trial:
    """The means of runs that differ by their seeds; the largest peaks."""
    metric = runs[0]["monitor"]
    scores = [score for run in runs if (score := _score(run, metric)) is not None]
    moved = [run["bytes_read"] + run["history_bytes_read"] + run["history_bytes_written"] for run in runs]
    return Trial(
        name,
        about,
        runs[0]["config"]["epochs"],
        metric,
        statistics.mean(scores) if scores else None,
        statistics.stdev(scores) if len(scores) > 1 else None,
        max(run["peak_rss_bytes"] for run in runs),
        max(_training_bytes(run) for run in runs),
        max(run["peak_cuda_bytes"] for run in runs),
        statistics.mean(run["seconds_per_epoch"] for run in runs),
        round(statistics.mean(moved)),
    )


def _training_bytes(run: dict[str, Any]) -> int:
    """The peak while it trained, less what the process had before it made and read anything for that.

    What it had just before the first step would not do: a mode that computes rows beforehand has loaded code by then that
    others load in their first step.
    """
    peak = max(each["peak"] for each in run["memory"] if each["name"] == "training")
    return max(0, peak - run["budget"]["baseline"])


def _score(run: dict[str, Any], metric: str) -> float | None:
    """The score on test, or on validation where there is none."""
    found = (run["metrics"].get(split, {}).get(metric) for split in ("test", "val"))
    return next((score for score in found if score is not None), None)


def _finished(config: RunConfig, data: str) -> dict[str, Any] | None:
    """The summary of a run that has these settings and data and is done, None otherwise. One that compiled
    kernels is not: see `_measured`."""
    summary = read_json(config.out / SUMMARY, "remove the directory")
    if summary is None or summary.get("kernels_compiled"):
        return None
    kept, asked = summary["config"], config.model_dump(mode="json")
    asked |= {name: kept.get(name) for name in config.automatic if asked[name] in (None, "auto")}  # what the run chose
    return summary if (summary["store_fingerprint"], kept) == (data, asked) else None


def _measured(config: RunConfig, name: str, progress: Progress) -> dict[str, Any]:
    """Train, and again where kernels were compiled meanwhile: a machine does so once, and short runs take most of their time
    and memory for it."""
    summary = _trained(config, name, progress)
    return _trained(config, f"{name} again, with compiled kernels", progress) if summary["kernels_compiled"] else summary


def _trained(config: RunConfig, name: str, progress: Progress) -> dict[str, Any]:
    """Train in a process of its own and return the summary. Raises ConfigError with its message where it is refused."""
    shutil.rmtree(config.out, ignore_errors=True)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=config.out.parent) as folder, open(Path(folder, "said"), "w+") as said:
        given = Path(folder, "config.json")
        given.write_text(config.model_dump_json(include=config.model_fields_set))
        words = [sys.executable, "-m", "ooc", "train", "--config", str(given)]
        run = subprocess.Popen(words, env=_alone(), stdout=subprocess.DEVNULL, stderr=said)
        try:
            while run.poll() is None:
                progress(name, _epochs_done(config.out), config.epochs, "epochs")
                time.sleep(_LOOKS)
        finally:
            run.terminate()
            run.wait()
        if run.returncode:
            said.seek(0)
            raise ConfigError(_refusal(said.read(), run.returncode))
    progress(name, config.epochs, config.epochs, "epochs")
    summary = read_json(config.out / SUMMARY, "remove the directory")
    assert summary is not None
    return summary


def _alone() -> dict[str, str]:
    """The environment without what torchrun sets."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def _epochs_done(out: Path) -> int:
    """The epoch of the last whole line of the run's log, which is the number of those before it."""
    with suppress(FileNotFoundError), open(out / METRICS, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = log.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["epoch"]) if len(lines) > 1 else 0
    return 0


def _refusal(said: str, code: int) -> str:
    """Why a run ended, from what it printed.

    >>> _refusal("ooc: error: no room\\n", 2)
    'no room'
    """
    lines = [line for line in said.splitlines() if line.startswith("ooc: error: ")] or said.splitlines()[-1:]
    return lines[-1].removeprefix("ooc: error: ") if lines else f"exit code {code}"
