"""What is wrong with settings, in one line. Imports nothing heavy; see `ooc.config.nodes`."""

import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ooc.stores.closest import did_you_mean

_MOST_SHOWN = 100
"""characters of a value in a message"""


def fault_of(error: ValidationError, values: Mapping[str, Any]) -> str:
    """Say what is wrong first: the setting, its value, and what it may be.

    Args:
        error: What pydantic found.
        values: The settings as they were given.

    >>> fault_of(error, {"hidden": "256,0,64"})
    "hidden = '256,0,64' is invalid: expected a number greater than 0"
    """
    faults = error.errors(include_url=False)
    of_first = [each for each in faults if each["loc"][:1] == faults[0]["loc"][:1]]
    fault = max(of_first, key=lambda each: len(each["loc"]))  # of a number or a list: what is wrong inside the list
    message = _message(fault)
    if not fault["loc"]:
        return message
    key = fault["loc"][0]
    if fault["type"] == "missing":
        return f"{key} is not set: give it as `{key}` or in the configuration"
    words = [each["msg"].removeprefix("Input should be ") for each in of_first if each["type"] == "literal_error"]
    if fault["type"] != "literal_error" and words:  # alternatives, such as a number or a word
        message = " or ".join([message, *words])
    named = re.findall(r"'([^']+)'", message) if words else []
    if isinstance(fault["input"], str):
        message += did_you_mean(fault["input"], named)
    return f"{_place(fault, values)} is invalid: {message}"


def _message(fault: ErrorDetails) -> str:
    """What a value is to be, without the value."""
    if (fault["loc"][:1], fault["type"]) == (("model",), "string_type"):
        return "expected the name of a model or of a class, as in package.module:Class"
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) > 1:
        return f"{fault['loc'][-1]!r} is no setting there"
    if fault["type"] == "model_type":
        return 'expected a table of settings, such as {"conv": "gat"}'
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ")
    message = re.sub(r"^expected (?=greater|less)", "expected a number ", message)
    return message.split(", unable to parse")[0] if fault["loc"] else message


def _place(fault: ErrorDetails, values: Mapping[str, Any]) -> str:
    """The setting that is at fault and its value; in blocks the number of the block, from 1, and its key."""
    key, *within = fault["loc"]
    if key != "blocks" or not within:
        return f"{key} = {_shown(values.get(str(key)))}"
    (index, *names), value = within, _shown(fault["input"])
    return f"block {int(index) + 1}: {names[0]} = {value}" if names else f"block {int(index) + 1} = {value}"


def _shown(value: object) -> str:
    """A value in a message: as written, on one line, and cut where it is long; a list of texts as flags are given."""
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    joined = ", ".join(cast("list[str]", value)) if texts else ""
    text = " ".join((joined or repr(value)).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
