"""Messages of the library in the words of the command line."""

import re
from collections.abc import Mapping

import typer

from ooc.cli.app import app

_OTHERS = {"num_parts": "--parts", "model_class": "--model", "store": "the argument STORE"}
"""arguments of Python that the command line has under other names"""
_ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")


def name_flags(text: str) -> str:
    """A message with flags in place of the arguments of Python that it names in backticks.

    >>> name_flags("give `drop_missing=True`, or `dtype='int8'`; run `ooc verify`")
    'give --drop-missing, or --dtype int8; run `ooc verify`'
    """
    options = _options()

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name not in options:
            return found[0]
        if value == "False":
            return options[name].replace("--", "--no-", 1)
        return options[name] if value in (None, "True") else f"{options[name]} {_plain(value)}"

    return _ARGUMENT.sub(flag, text)


def _plain(value: str) -> str:
    """A value as it is written on the command line: without quotation marks."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _options() -> Mapping[str, str]:
    """Argument -> option, of all verbs that are registered."""
    verbs = getattr(typer.main.get_command(app), "commands", {}).values()
    options = (each for verb in verbs for each in verb.params if each.param_type_name == "option")
    return {each.name or "": each.opts[0] for each in options} | _OTHERS
