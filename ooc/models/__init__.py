"""Models as lists of layers: the built-in ones, user-defined modules, and the convolutions they use."""

from typing import TYPE_CHECKING

from ooc.runtime.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from ooc.models.builders import build_model, full_blocks
    from ooc.models.hetero import build_hetero_model, full_hetero_blocks
    from ooc.models.pre_aggregation import pre_aggregation_of, summing_of

__all__ = ["build_hetero_model", "build_model", "full_blocks", "full_hetero_blocks", "pre_aggregation_of", "summing_of"]
__getattr__ = lazy_exports(
    __name__,
    {
        "build_hetero_model": "ooc.models.hetero",
        "build_model": "ooc.models.builders",
        "full_blocks": "ooc.models.builders",
        "full_hetero_blocks": "ooc.models.hetero",
        "pre_aggregation_of": "ooc.models.pre_aggregation",
        "summing_of": "ooc.models.pre_aggregation",
    },
)
