"""Configuration classes by mode, and loading a configuration from a file and flags."""

import itertools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from ooc.config.base import FREE_TO_CHANGE, RunConfig, parse, read_config, saved_config, task_name
from ooc.config.closest import closest
from ooc.config.edges import EdgeConfig
from ooc.config.events import EventsConfig
from ooc.config.graphs import GraphConfig
from ooc.config.lightgcn import LightGCNConfig
from ooc.config.links import LinkConfig
from ooc.config.nodes import OWN, FullConfig, TrainConfig
from ooc.config.snapshots import SnapshotsConfig
from ooc.config.tables import TableConfig
from ooc.stores.errors import ConfigError


def choices() -> dict[tuple[str, str], type[RunConfig]]:
    """Return the configuration class of every (task, mode); the first mode of a task is its default, and so is the first task
    of a mode."""
    batches = get_args(TrainConfig.model_fields["mode"].annotation)
    return {
        **{("node", mode): TrainConfig for mode in batches},
        ("node", "full"): FullConfig,
        ("edge", "sampled"): EdgeConfig,
        ("graph", "graphs"): GraphConfig,
        ("link", "sampled"): LinkConfig,
        ("link", "lightgcn"): LightGCNConfig,
        ("link", "events"): EventsConfig,
        ("link", "snapshots"): SnapshotsConfig,
        ("link", "table"): TableConfig,
        ("node", "snapshots"): SnapshotsConfig,
    }


def classes() -> dict[str, type[RunConfig]]:
    """Return the configuration classes by mode, with the task in front where a mode has another class for another task than its
    first; the first is the default."""
    found: dict[str, type[RunConfig]] = {}
    for (task, mode), made in choices().items():
        if found.setdefault(mode, made) is not made:
            found[f"{task} {mode}"] = made
    return found


def name_of(task: str, mode: str) -> str:
    """Return the name in `classes` of a task and mode."""
    return mode if classes()[mode] is choices()[task, mode] else f"{task} {mode}"


def choice_of(values: Mapping[str, Any], where: str = "") -> tuple[str, str]:
    """Return the task and mode that these values ask for. Raises ConfigError if one is unknown, or they do not go together."""
    known = list(choices())
    given = {"task": task_name(values.get("task")), "mode": values.get("mode")}
    for at, (name, value) in enumerate(given.items()):
        names = list(dict.fromkeys(each[at] for each in known))
        if value is not None and value not in names:
            raise ConfigError(f"{where}{name} = {value!r} is invalid: expected {', '.join(map(repr, names))}")
    for task, mode in known:
        if given["task"] in (None, task) and given["mode"] in (None, mode):
            return task, mode
    modes = " or ".join(mode for task, mode in known if task == given["task"])
    tasks = " and ".join(task for task, mode in known if mode == given["mode"])
    raise ConfigError(
        f"{where}task = {given['task']!r} is not trained by mode {given['mode']}, which trains {tasks}: use mode {modes}"
    )


def class_of(values: Mapping[str, Any], where: str = "") -> type[RunConfig]:
    """Return the class for these values. Raises as `choice_of`."""
    return choices()[choice_of(values, where)]


def suggested(labelled: Collection[str], temporal: bool) -> tuple[str, str]:
    """Return the task and mode to begin with on a store with labels of these ("node", "graph", "edge"), or with times only."""
    if temporal and not labelled:
        return choice_of({"mode": "events"})
    return choice_of({"task": next((task for task in ("node", "graph", "edge") if task in labelled), "node")})


def applies(name: str, mode: str) -> bool:
    """Whether a setting means something in a mode, by its name in `classes`."""
    model, mode = classes()[mode], mode.rpartition(" ")[2]
    if name not in model.model_fields or name in model.refused:
        return False
    own = {**OWN, "sampled": (*OWN["sampled"], "fanout")}
    mode = mode.split()[-1]  # without the task
    return mode not in own or name in own[mode] or not any(name in names for names in own.values())


def next_out(store: Path) -> Path:
    """The first of runs/<store>-1, runs/<store>-2, ... that does not exist."""
    return next(
        out
        for n in itertools.count(1)
        if not os.path.lexists(out := Path("runs") / f"{Path(os.path.realpath(store)).stem}-{n}")
    )


def check_consent(saved: object, given: object, allow_code: bool, where: Path | str, argument: str = "model") -> None:
    """Raise ConfigError if the model that a run names is a class to import and the user has not agreed to it.

    A run's config.json may come from a stranger, and importing a class runs code. The user agrees by naming the same model, or
    by `allow_code`.

    Args:
        saved: The model in the run's config.json.
        given: The model that the user named (by a flag, a configuration or an argument), or None.
        allow_code: Whether the user trusts the run.
        where: The run's directory, for the message.
        argument: What names the model, for the message.
    """
    if isinstance(saved, str) and ":" in saved and given != saved and not allow_code:
        raise ConfigError(
            f"{where} uses the class {saved}, and importing it runs its code: if you trust it, name it again "
            f"(`{argument}={saved!r}`) or give `allow_code=True`"
        )


def settings_of(
    config: RunConfig | Path | str | None, given: Mapping[str, Any], resume: bool = False, allow_code: bool = False
) -> RunConfig:
    """Return the settings of a run, given by a configuration, by a file, or by name.

    Args:
        config: A configuration, or a TOML or JSON file, or None.
        given: Settings by name above it; None means not given.
        resume: Whether settings of the run in `out` count where nothing else is given.
        allow_code: See `load_config`.

    Raises:
        ConfigError: As `load_config`; with `resume`, if there is no `out`.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    if not (config is None or isinstance(config, str | os.PathLike)):
        if not flags:
            return config
        values = {name: getattr(config, name) for name in config.model_fields_set}
        chosen = {} if flags.keys() & {"mode", "task"} else {"mode": config.mode, "task": config.task}
        return load_config(None, {**chosen, **values, **flags})
    path = None if config is None else Path(config)
    if path is not None and path.is_dir():
        raise ConfigError(f"{path} is a directory, not a configuration in TOML or JSON: a store is given as `store`")
    base: Mapping[str, Any] = {}
    if resume:
        out = flags.get("out") or (read_config(path).get("out") if path else None)
        if out is None:
            raise ConfigError("`resume=True` continues a run: give its directory as `out`")
        base = saved_config(Path(out)) or {}
    return load_config(path, flags, base, allow_code)


def load_config(
    path: Path | str | None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    base: Mapping[str, Any] | None = None,
    allow_code: bool = False,
) -> RunConfig:
    """Load the configuration in the file `path` (JSON by its suffix, else TOML), overridden by flags (None means not given).

    If nothing sets `out`, it is `next_out(store)`.

    Args:
        path: The file, which is the user's own: a model class that it names is imported.
        overrides: Values above the file's, such as those of flags.
        base: Values below both, such as those of the run being resumed.
        allow_code: Whether a model class that only `base` names may be imported; see `check_consent`.

    Raises:
        ConfigError: In one line, for an unknown key (with the closest one), an invalid value, or conflicting settings.

    >>> load_config(Path("run.toml"), {"lr": "0.02", "out": "runs/2"}).lr
    0.02
    """
    flags = {key: value for key, value in overrides.items() if value is not None}
    own = {**(read_config(Path(path)) if path else {}), **flags}
    values = {**(base or {}), **own}
    where = f"{path}: " if path else ""
    if base and values.get("model") == base.get("model"):  # another one is refused as a difference
        check_consent(base.get("model"), own.get("model"), allow_code, values.get("out") or "the run")
    for name in ("mode", "task"):
        trained, now = (task_name((each or {}).get(name)) for each in (base, values))
        if trained is not None and trained != now:
            raise trained_otherwise(values.get("out"), name, trained, now)
    task, mode = choice_of(values, where)
    model = choices()[task, mode]
    known = {key for each in classes().values() for key in each.model_fields}
    for key in values:
        if key in known - model.model_fields.keys():
            tasks = [other for (other, its), each in choices().items() if its == mode and key in each.model_fields]
            whose, use = (f"task {task}", f"task {' or '.join(tasks)}") if tasks else (f"mode {mode}", "another mode")
            raise ConfigError(f"{where}{key} does not apply to {whose}: leave it out, or use {use}")
        if key not in known:
            meant = closest(key, known)
            hint = f"did you mean {meant!r}?" if meant else "`ooc init STORE` prints the keys"
            raise ConfigError(f"{where}unknown key {key!r}; {hint}")
    if "out" not in values and isinstance(values.get("store"), str | Path):
        values["out"] = next_out(Path(values["store"]))
    try:
        return parse(model, values, where)
    except ConfigError:
        if base:
            _check_unchanged(model, values, base, own)
        raise


def _check_unchanged(model: type[RunConfig], values: Mapping[str, Any], base: Mapping[str, Any], own: Collection[str]) -> None:
    """Raise ConfigError for a setting of `own` that a resumed run keeps: a saved one that goes with it must not be blamed."""
    needed = {name: values[name] for name in ("store", "out", "mode", "task") if name in values}
    for name in own:
        if name in FREE_TO_CHANGE or name not in base:
            continue
        try:
            now = parse(model, {**needed, name: values[name]}).model_dump(mode="json")[name]
        except ConfigError:  # it is itself at fault
            continue
        if now != base[name]:
            raise trained_otherwise(values.get("out"), name, base[name], now) from None


def trained_otherwise(out: Any, name: str, was: Any, now: Any) -> ConfigError:
    """The error of a resumed run in `out` whose setting `name` is another than it `was`."""
    return ConfigError(f"{out} was trained with {name} = {was!r}, not {now!r}: resume it unchanged, or start another run")
