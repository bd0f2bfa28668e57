"""What `reduce` and `select` say: by which method features are made narrower, and to how many columns."""

from collections.abc import Iterable
from typing import NamedTuple, get_args

from ooc.stores.errors import ConfigError
from ooc.stores.manifest import ReductionMethod

METHODS: dict[str, tuple[ReductionMethod, ...]] = {
    "reduce": ("pca", "svd", "random"),
    "select": ("variance", "mutual"),
}
"""argument -> its methods"""
assert sorted(sum(METHODS.values(), ())) == sorted(get_args(ReductionMethod))


class Reduction(NamedTuple):
    """A method and a number of columns.

    >>> Reduction.of("pca:64", None)
    Reduction(method='pca', width=64)
    """

    method: ReductionMethod
    width: int

    @classmethod
    def of(cls, reduce: str | None, select: str | None) -> "Reduction | None":
        """Of the two arguments, None without any. Raises ConfigError if both are given, or one is no METHOD:COLUMNS."""
        if reduce is not None and select is not None:
            raise ConfigError("`reduce` and `select` both make features narrower: give one of them")
        for argument, text in (("reduce", reduce), ("select", select)):
            if text is not None:
                return cls._parsed(argument, text)
        return None

    @classmethod
    def of_any(cls, text: str) -> "Reduction | None":
        """Of one text with a method of either argument, None if it is no METHOD:COLUMNS.

        >>> Reduction.of_any("mutual:32")
        Reduction(method='mutual', width=32)
        """
        word, _, number = text.partition(":")
        for method in get_args(ReductionMethod):
            if word == method and number.isascii() and number.isdigit() and int(number[:10]) > 0:
                return cls(method, int(number))
        return None

    @classmethod
    def _parsed(cls, argument: str, text: str) -> "Reduction":
        found, word = cls.of_any(text), text.partition(":")[0]
        if found is not None and found.method in METHODS[argument]:
            return found
        other = next((name for name, methods in METHODS.items() if word in methods and name != argument), None)
        if other is not None:
            raise ConfigError(f"`{argument}={text!r}`: use `{other}={text if found else f'{word}:64'!r}`")
        raise ConfigError(f"`{argument}={text!r}`: write METHOD:COLUMNS, {listed(METHODS[argument])}")

    def __str__(self) -> str:
        return f"{self.method}:{self.width}"


def listed(methods: Iterable[str]) -> str:
    """Methods as they are given, for people.

    >>> listed(["pca", "svd"])
    'pca:64 or svd:64'
    """
    return " or ".join(f"{method}:64" for method in methods)
