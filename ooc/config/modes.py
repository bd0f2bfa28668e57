"""Mode -> the class of its configuration, and loading one from a file and flags."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ooc.config.base import RunConfig, parse, read_config
from ooc.config.nodes import TrainConfig
from stores.errors import ConfigError


def classes() -> dict[str, type[RunConfig]]:
    """Mode -> the configuration of its runs; the first is the one without a mode."""
    from ooc.config.events import EventsConfig
    from ooc.config.full import FullConfig  # they are made of this module
    from ooc.config.snapshots import SnapshotsConfig

    modes = get_args(TrainConfig.model_fields["mode"].annotation)
    return {**dict.fromkeys(modes, TrainConfig), "full": FullConfig, "events": EventsConfig, "snapshots": SnapshotsConfig}


def class_of(values: Mapping[str, Any], where: str = "") -> type[RunConfig]:
    """The class of a configuration of these values. Raises ConfigError for an unknown mode."""
    known = classes()
    mode = values.get("mode", next(iter(known)))
    if mode not in known:
        raise ConfigError(f"{where}mode = {mode!r} does not do: expected {', '.join(map(repr, known))}")
    return known[mode]


def load_config(path: Path | None, overrides: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration of `path` (TOML, or JSON by its suffix), with `overrides` (flags; None means not given) over it.

    base: keys below both, such as those of the run being resumed.
    Raises ConfigError, one line, for an unknown key (with the closest one), a value of the wrong type, or settings that
    do not fit each other.

    >>> load_config(Path("run.toml"), {"lr": "0.02", "out": "runs/2"}).lr
    0.02
    """
    flags = {key: value for key, value in overrides.items() if value is not None}
    values = {**(base or {}), **(read_config(path) if path else {}), **flags}
    where = f"{path}: " if path else ""
    was, now = ((each or {}).get("mode") for each in (base, values))
    if was is not None and was != now:
        raise ConfigError(
            f"{values.get('out')} was trained with mode = {was!r}, not {now!r}: resume it unchanged, or start another run"
        )
    model = class_of(values, where)
    known = {key for each in classes().values() for key in each.model_fields}
    for key in values:
        if key in known - model.model_fields.keys():
            mode = values.get("mode", "sampled")
            raise ConfigError(f"{where}{key} means nothing in mode {mode}: leave it out, or choose another mode")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "`ooc train --help` lists the keys"
            raise ConfigError(f"{where}unknown key {key!r}; {hint}")
    return parse(model, values, where)
