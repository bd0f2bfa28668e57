"""Configuration classes by mode, and loading a configuration from a file and flags."""

import difflib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ooc.config.base import RunConfig, parse, read_config
from ooc.config.events import EventsConfig
from ooc.config.nodes import OWN, FullConfig, TrainConfig
from ooc.config.snapshots import SnapshotsConfig
from ooc.stores.errors import ConfigError


def classes() -> dict[str, type[RunConfig]]:
    """Return the configuration class of every mode; the first mode is the default."""
    modes = get_args(TrainConfig.model_fields["mode"].annotation)
    return {**dict.fromkeys(modes, TrainConfig), "full": FullConfig, "events": EventsConfig, "snapshots": SnapshotsConfig}


def class_of(values: Mapping[str, Any], where: str = "") -> type[RunConfig]:
    """Return the class for these values. Raises ConfigError for an unknown mode."""
    known = classes()
    mode = values.get("mode", next(iter(known)))
    if mode not in known:
        raise ConfigError(f"{where}mode = {mode!r} is invalid: expected {', '.join(map(repr, known))}")
    return known[mode]


def applies(name: str, mode: str) -> bool:
    """Whether a setting means something in a mode."""
    if name not in classes()[mode].model_fields:
        return False
    own = {**OWN, "sampled": (*OWN["sampled"], "fanout")}
    return mode not in own or name in own[mode] or not any(name in names for names in own.values())


def next_out(store: Path) -> Path:
    """The first of runs/<store>-1, runs/<store>-2, ... that does not exist."""
    return next(out for n in itertools.count(1) if not os.path.lexists(out := Path("runs") / f"{store.resolve().stem}-{n}"))


def load_config(path: Path | None, overrides: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> RunConfig:
    """Load the configuration in the file `path` (JSON by its suffix, else TOML), overridden by flags (None means not given).

    `base` are values below both, such as those of the run being resumed. If nothing sets `out`, it is `next_out(store)`.
    Raises ConfigError, in one line, for an unknown key (with the closest one), an invalid value, or conflicting settings.

    >>> load_config(Path("run.toml"), {"lr": "0.02", "out": "runs/2"}).lr
    0.02
    """
    flags = {key: value for key, value in overrides.items() if value is not None}
    values = {**(base or {}), **(read_config(path) if path else {}), **flags}
    where = f"{path}: " if path else ""
    trained, now = ((each or {}).get("mode") for each in (base, values))
    if trained is not None and trained != now:
        raise ConfigError(
            f"{values.get('out')} was trained with mode = {trained!r}, not {now!r}: resume it unchanged, or start a new run"
        )
    model = class_of(values, where)
    known = {key for each in classes().values() for key in each.model_fields}
    for key in values:
        if key in known - model.model_fields.keys():
            mode = values.get("mode", "sampled")
            raise ConfigError(f"{where}{key} does not apply to mode {mode}: leave it out, or use another mode")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "`ooc train --help` lists the keys"
            raise ConfigError(f"{where}unknown key {key!r}; {hint}")
    if "out" not in values and isinstance(values.get("store"), str | Path):
        values["out"] = next_out(Path(values["store"]))
    return parse(model, values, where)
