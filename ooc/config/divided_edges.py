"""What runs that learn links say of the parts of the edges. Imports nothing heavy."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from ooc.config.base import changed
from ooc.stores.errors import ConfigError

_HELD_OUT = 0.1
_PARTS = ("train", "val", "test")
"""what the settings name by default, whether or not there are such"""


class DividedEdges:
    """Of configurations with the settings `val` and `test`, shares of the edges or None, and names of parts."""

    if TYPE_CHECKING:
        val: float | None
        test: float | None
        val_split: str
        eval_splits: list[str]

    @property
    def shares(self) -> tuple[float, float]:
        """Of the edges for validation and test, where they are divided at random."""
        return (_HELD_OUT if self.val is None else self.val), (_HELD_OUT if self.test is None else self.test)

    @property
    def is_divided(self) -> bool:
        """Whether the edges are divided at random although the store may have a split."""
        return not (self.val is None and self.test is None)

    def takes_split(self, stored: bool) -> bool:
        """Whether the parts are those of the store's split, if it has one (`stored`); else the edges are divided at random.

        Raises ConfigError where parts are named that a random division has not.
        """
        if stored and not self.is_divided:
            return True
        if named := changed(cast(Any, self), "train_split", "val_split"):
            why = "val and test divide the edges at random" if self.is_divided else "the store has no split of these edges"
            raise ConfigError(f"{named[0]} = {getattr(self, named[0])!r}, and {why}: leave it out")
        return False

    def check_parts(self, names: Collection[str]) -> None:
        """Raise ConfigError for a part to score that there is not. names: those that there are."""
        for setting, asked in (("val_split", [self.val_split]), ("eval_splits", sorted(self.eval_splits))):
            if unknown := [name for name in asked if name not in {*_PARTS, *names}]:
                raise ConfigError(f"{setting}: {unknown[0]!r} is no part of the edges: give {', '.join(names)}")
