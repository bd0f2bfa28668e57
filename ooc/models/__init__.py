"""Models as lists of layers: the built-in ones, user-defined modules, and the convolutions they use."""

from typing import TYPE_CHECKING

from ooc.runtime.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from ooc.models.builders import build_model, full_blocks, pre_aggregation_of, summing_of

__all__ = ["build_model", "full_blocks", "pre_aggregation_of", "summing_of"]
__getattr__ = lazy_exports(__name__, dict.fromkeys(__all__, "ooc.models.builders"))
