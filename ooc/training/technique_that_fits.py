"""Which technique against memory would make a plan fit that does not."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from ooc.config.base import RunConfig
from ooc.config.nodes import TrainConfig
from ooc.config.techniques import PLAIN, RECOMPUTING, TECHNIQUES, with_technique
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.working import scratch_folder
from ooc.training.compare_modes import COMPARE_SECONDS
from ooc.training.loop import planning
from ooc.training.open_run import open_dataset

NONE_FITS = "; no technique makes it fit"
TRIED_SECONDS = 60.0
"""after which no further technique is tried"""
Note = Callable[[str], None]
"""is called with what is tried"""


def silent(text: str) -> None:
    """Say nothing."""


def technique_that_fits(config: RunConfig, note: Note = silent) -> str:
    """Return what to add to the message of a plan that does not fit: the first technique that would, and the first way to
    recompute layers that would, or that none does.

    Each technique is composed and profiled briefly, as `ooc plan` does, in the order of `TECHNIQUES`; nothing is left on disk.

    Args:
        config: The settings that do not fit.
        note: Called with a line before a technique is tried.

    Returns:
        The words, which begin with "; "; nothing where techniques do not apply to the mode.

    >>> technique_that_fits(TrainConfig(store="papers.ooc", out="run", batch_size=100_000, memory="2GB"))
    '; or with technique accumulate: `batch_size=25000`, `accumulate=4`'
    """
    if not config.has_techniques:
        return ""
    found: dict[str, RunConfig] = {}
    begun, left_out = time.monotonic(), ""
    with scratch_folder(None, "ooc-plan") as folder, open_dataset(config) as dataset:
        for name in TECHNIQUES:
            if name == PLAIN or (found and name not in RECOMPUTING):
                continue
            if time.monotonic() - begun > TRIED_SECONDS:
                left_out = name
                break
            note(f"the plan does not fit the memory: trying technique {name}")
            made = _fitting(config, name, folder, dataset)
            if made is not None:
                found[name] = made
            if RECOMPUTING & found.keys():
                break
    if not found:
        return f"; no technique before {left_out} makes it fit, and no more were tried" if left_out else NONE_FITS
    return "".join(f"; or with technique {name}: {_changes(config, made)}" for name, made in found.items())


def _fitting(config: RunConfig, name: str, folder: Path, dataset: Dataset) -> RunConfig | None:
    """The settings with a technique, if they apply and their plan fits."""
    try:
        made = with_technique(cast(TrainConfig, config), name, dataset.manifest.parts)
        with planning(made, folder / name, dataset) as mode:
            return None if mode.predict(COMPARE_SECONDS, variants=False).needs_more else made
    except (BudgetError, ConfigError):
        return None


def _changes(config: RunConfig, made: RunConfig) -> str:
    """The settings that differ, as `name=value`, and those that do not apply, with the layers where a fan-out gave them.

    >>> _changes(TrainConfig(store="a.ooc", out="run", fanout=[9, 9, 9]), made)
    '`mode=cluster`, `layers=3`, `parts=16`, without `fanout`'
    """
    given = config.model_fields_set - made.model_fields_set
    left_out = [f"`{name}`" for name in type(config).model_fields if name in given]
    names = [name for name in type(made).model_fields if name in made.model_fields_set]
    names = [name for name in names if getattr(made, name) != getattr(config, name, None) or (left_out and name == "layers")]
    changed = ", ".join(f"`{name}={getattr(made, name)}`" for name in names)
    return f"{changed}, without {', '.join(left_out)}" if left_out else changed
