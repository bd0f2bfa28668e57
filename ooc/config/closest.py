"""What a misspelt name may be meant to be."""

from collections.abc import Iterable

_SHORTEST = 3
"""letters of a part of a name that says something"""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The name that `word` is most likely meant to be, None where none is close.

    One slip comes first, then a name whose words are among those of `word`, then one that begins with `word`, then a slip in
    every three letters. Of names that are as close, one of the same letters comes first, then one that begins alike.

    >>> closest("modle", ["mode", "model", "lr"])
    'model'
    >>> closest("num_epochs", ["epochs", "lr"])
    'epochs'
    """
    own, names = word.lower().replace("-", "_"), {name: name.lower().replace("-", "_") for name in sorted(known)}
    slips = {name: _slips(own, its) for name, its in names.items()}
    near = sorted(names, key=lambda name: (slips[name], *_unlike(own, names[name])))[:1]
    parts = [name for name, its in names.items() if len(its) >= _SHORTEST and f"_{its}_" in f"_{own}_"]
    longer = [name for name, its in names.items() if len(own) >= _SHORTEST and its.startswith(own)]
    within = [name for name in near if slips[name] <= len(own) // 3]
    one_slip = [name for name in within if slips[name] <= 1]
    found = one_slip or sorted(parts, key=len)[-1:] or sorted(longer, key=len) or within
    return found[0] if found else None


def _unlike(word: str, name: str) -> tuple[bool, bool, int]:
    """In what a name differs that is as close as another: its letters, how it begins, its length."""
    return sorted(word) != sorted(name), word[:1] != name[:1], abs(len(word) - len(name))


def _slips(word: str, name: str) -> int:
    """Letters to insert, remove, replace or exchange with their neighbor, until `word` is `name`."""
    before: list[int] = []
    last = list(range(len(name) + 1))
    for i, letter in enumerate(word, 1):
        now = [i]
        for j, other in enumerate(name, 1):
            found = min(last[j] + 1, now[j - 1] + 1, last[j - 1] + (letter != other))
            exchanged = i > 1 and j > 1 and letter == name[j - 2] and word[i - 2] == other
            now.append(min(found, before[j - 2] + 1) if exchanged else found)
        before, last = last, now
    return last[-1]
