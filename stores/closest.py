"""What a misspelt name may be meant to be."""

import difflib
from collections.abc import Iterable

_SHORTEST = 3
"""letters of a part of a name that says something"""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The name that `word` is most likely meant to be, None where none is close.

    Of names that `difflib` finds close, one of the same letters comes first. A name that is a word of `word`, or that begins
    with it, is close too.

    >>> closest("modle", ["mode", "model", "lr"])
    'model'
    >>> closest("num_epochs", ["epochs", "lr"])
    'epochs'
    """
    own, names = _plain(word), {_plain(name): name for name in sorted(known)}
    near = difflib.get_close_matches(own, names, cutoff=0.75)
    near.sort(key=lambda name: sorted(name) != sorted(own))
    within = [name for name in names if len(name) >= _SHORTEST and f"_{name}_" in f"_{own}_"]
    longer = [name for name in names if len(own) >= _SHORTEST and name.startswith(own)]
    found = near or sorted(within, key=len, reverse=True) or sorted(longer, key=len)
    return names[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known: the `closest` one, nothing where none is close.

    >>> did_you_mean("modle", ["mode", "model", "lr"])
    ": did you mean 'model'?"
    """
    meant = closest(word, known)
    return f": did you mean {meant!r}?" if meant else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
