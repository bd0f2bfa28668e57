"""Which technique against memory would make a plan fit that does not."""

from typing import cast

from ooc.config.base import RunConfig
from ooc.config.nodes import TrainConfig
from ooc.config.techniques import PLAIN, TECHNIQUES, with_technique
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.working import scratch_folder
from ooc.training.compare_modes import COMPARE_SECONDS
from ooc.training.loop import planning
from ooc.training.open_run import open_dataset


def technique_that_fits(config: RunConfig) -> str:
    """Return what to add to the message of a plan that does not fit: the first technique that would, or nothing.

    Each technique is composed and profiled briefly, as `ooc plan` does, in the order of `TECHNIQUES`; nothing is left on disk.

    >>> technique_that_fits(TrainConfig(store="papers.ooc", out="run", batch_size=100_000, memory="2GB"))
    '; or with technique accumulate: `batch_size=25000`, `accumulate=4`'
    """
    if not config.has_techniques:
        return ""
    with scratch_folder(None, "ooc-plan") as folder, open_dataset(config) as dataset:
        for name in TECHNIQUES:
            if name == PLAIN:
                continue
            try:
                made = with_technique(cast(TrainConfig, config), name, dataset.manifest.parts)
                with planning(made, folder / name, dataset) as mode:
                    fits = not mode.predict(COMPARE_SECONDS, variants=False).needs_more
            except (BudgetError, ConfigError):
                continue
            if fits:
                return f"; or with technique {name}: {_changes(config, made)}"
    return ""


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
