"""Fan-outs as settings: one number per layer, or several of them by edge type."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag

from ooc.config.base import Number, numbers

ALL_OTHERS = "default"
"""in place of an edge type: the fan-out of those that have none of their own, as PyG's NumNeighbors calls it"""


def parsed(value: object) -> object:
    """Parse "10,10" to a list, and ["10,10", "author:writes:paper=5,5"] to lists by edge type; what is none of it is returned
    unchanged.

    >>> parsed(["10,10", "author:writes:paper=5,5"])
    {'default': ['10', '10'], 'author:writes:paper': ['5', '5']}
    """
    if isinstance(value, dict):
        return {_edge_type(key): _counts(own) for key, own in value.items()}
    parts: Any = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not any(isinstance(part, str) and "=" in part for part in parts):
        return _counts(parts[0] if isinstance(parts, list | tuple) and len(parts) == 1 else value)
    pairs = [str(part).rpartition("=")[::2] for part in parts]
    names = [_edge_type(name or ALL_OTHERS) for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{'the one of all others' if twice[0] == ALL_OTHERS else twice[0]} is given twice")
    return {name: _counts(own) for name, (_, own) in zip(names, pairs, strict=True)}


def _counts(value: object) -> object:
    """As `numbers`, of one at least where it is text."""
    found = numbers(value)
    if isinstance(value, str) and not found:
        raise ValueError("give a number for each layer")
    return found


def _edge_type(key: Any) -> Any:
    """An edge type as "source:name:target", of PyG's triple or "source__name__target" too."""
    if isinstance(key, tuple):
        return ":".join(map(str, key))
    return key.replace("__", ":") if isinstance(key, str) and ":" not in key else key


def _checked(value: list[int] | dict[str, list[int]]) -> list[int] | dict[str, list[int]]:
    if isinstance(value, list):
        if any(count < -1 or count == 0 for count in value):
            raise ValueError("each number must be -1 (all neighbors) or positive")
        return value
    for name, counts in value.items():
        if name != ALL_OTHERS and len(name.split(":")) != 3:
            raise ValueError(f"{name!r} is no edge type: write source:name:target, as in author:writes:paper=10,5")
        if any(count < -1 for count in counts):
            raise ValueError("each number must be -1 (all neighbors), 0 (none) or positive")
    return value


HELP = "In-neighbors sampled, one number per layer, -1 for all: 10,10. Of an edge type: author:writes:paper=10,5; repeatable."
"""of `fanout`, the same in all modes, so that the help says it once"""
_Lists = Annotated[list[Number], Tag("list")] | Annotated[dict[str, list[Number]], Tag("dict")]
FanOuts = Annotated[
    Annotated[_Lists, Discriminator(lambda value: "dict" if isinstance(value, dict) else "list")],
    BeforeValidator(parsed),
    AfterValidator(_checked),
]
"""In-neighbors sampled, one number per layer; by edge type "source:name:target", and `ALL_OTHERS`"""


def by_edge_type(fanout: list[int] | dict[str, list[int]]) -> dict[str, list[int]]:
    """Fan-outs by edge type; a list is that of all."""
    return fanout if isinstance(fanout, dict) else {ALL_OTHERS: fanout}


def fanout_text(fanout: list[int] | dict[str, list[int]]) -> str:
    """Fan-outs for people.

    >>> fanout_text({"default": [10, 10], "author:writes:paper": [5, 5]})
    '10, 10 (author:writes:paper 5, 5)'
    """
    texts = {name: ", ".join(map(str, own)) for name, own in by_edge_type(fanout).items()}
    others = texts.pop(ALL_OTHERS, None)
    own = "; ".join(f"{name} {text}" for name, text in texts.items())
    return own if others is None else f"{others} ({own})" if own else others
