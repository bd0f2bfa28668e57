"""The configuration that `ooc init` writes: settings of a mode with their defaults and what they are for, by topic."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ooc.cli.flags import Flag
from ooc.config import topics
from ooc.config.modes import applies, classes
from ooc.config.topics import by_topic

_EXAMPLES: Mapping[str, Any] = {"window": "7d"}
"""values of settings that have no default"""
_EMPTY: Any = (None, [], {})
_NONE: Mapping[str, Any] = MappingProxyType({})
_TABLES = {"NAME=VALUE": '{ NAME = "VALUE" }', "JSON": "{ NAME = VALUE }"}
"""kinds of values that are tables in TOML"""
_COMMENT = 32
"""width of settings, before their comments"""
_MORE = "# Further settings, with their defaults or the kind of their value: remove the # in front of those to set."


def template(store: Path, mode: str, flags: Mapping[str, Flag], about: str, given: Mapping[str, Any] = _NONE) -> str:
    """Return a TOML file of the settings of `mode`, with which `ooc train --config` does what it does without.

    Args:
        store: The store, named in the file.
        mode: The mode, by its name in `ooc.config.modes.classes`.
        flags: The flags of training, by name.
        about: What to say of the store, in one line.
        given: Settings other than the defaults, such as the task.

    Returns:
        The text: the settings that matter most, then the others, commented out.
    """
    model = classes()[mode]
    examples = {name: value for name, value in _EXAMPLES.items() if name in model.model_fields}
    settings = model(store=store, out=Path("run"), mode=mode.rpartition(" ")[2], **examples, **given)
    sections = by_topic([name for name, flag in flags.items() if mode in flag.modes], topics.TRAIN)
    common = topics.common(topics.TRAIN)
    lines = ["# Settings of `ooc train --config FILE`; options on the command line override them.", f"# {about}", ""]
    lines += [f"store = {json.dumps(str(store))}", f'# out = "runs/{store.resolve().stem}-1"']
    for in_short in (True, False):
        lines += [] if in_short else ["", _MORE]
        for topic, names in sections.items():
            chosen = [_line(flags[name].modes[mode], settings, in_short) for name in names if (name in common) == in_short]
            lines += ["", f"# {topic.partition(' (--mode')[0]}", *chosen] if chosen else []
    return "\n".join(lines) + "\n"


def _line(flag: Flag, settings: Any, active: bool) -> str:
    """A setting with its value and its description; commented out if it has no default, or one that follows from others."""
    value = type(settings).model_fields[flag.name].get_default(call_default_factory=True)
    is_set = value not in _EMPTY
    if flag.name in ("mode", "task", "model", "fanout", *_EXAMPLES):
        value = getattr(settings, flag.name)
        is_set = flag.name != "fanout" or bool(value)
    elif flag.name == "layers":  # where there is a fan-out, it says how many
        is_set = not (applies("fanout", settings.mode) and settings.fanout)
    elif not is_set:  # what it is resolved to, if anything
        value = getattr(settings, flag.name)
    shown = json.dumps(value) if value not in _EMPTY else _TABLES.get(flag.metavar or "", flag.metavar) or "BOOL"
    setting = f"{'' if active and is_set else '# '}{flag.name} = {shown}"
    return f"{setting:<{_COMMENT}}  # {flag.help}"
