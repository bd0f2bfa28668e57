"""What runs that learn links say of the parts of the edges. Imports nothing heavy."""

from typing import TYPE_CHECKING

_HELD_OUT = 0.1


class DividedEdges:
    """Of configurations with the settings `val` and `test`, shares of the edges or None."""

    if TYPE_CHECKING:
        val: float | None
        test: float | None

    @property
    def shares(self) -> tuple[float, float]:
        """Of the edges for validation and test, where they are divided at random."""
        return (_HELD_OUT if self.val is None else self.val), (_HELD_OUT if self.test is None else self.test)

    @property
    def is_divided(self) -> bool:
        """Whether the edges are divided at random although the store may have a split."""
        return not (self.val is None and self.test is None)
