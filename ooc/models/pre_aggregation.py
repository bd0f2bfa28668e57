"""Which models begin with a neighbor sum that a loader can compute in advance (first-layer pre-aggregation)."""

import warnings
from dataclasses import replace
from typing import Any

from torch import nn

from ooc.graph.aggregation import PreAggregation
from ooc.models.builders import Model
from ooc.models.convs import BlockGCNConv, BlockGINConv, BlockPropagation, BlockSAGEConv
from ooc.models.hetero import HeteroLayer
from ooc.models.hetero_convs import BlockRGCNConv, RSAGEConv
from ooc.models.layers import Layer
from ooc.models.memory_efficient import Relu

_LAYERS = (Layer.forward, HeteroLayer.forward)
_SUMMED = (
    *(BlockSAGEConv.forward, BlockGCNConv.forward, BlockGINConv.forward, BlockPropagation.forward),
    *(RSAGEConv.forward, BlockRGCNConv.forward),
)
"""forwards of the layers and convolutions that accept the loader's aggregates"""


def summing_of(model: nn.Module) -> PreAggregation | None:
    """Deprecated name of `pre_aggregation_of`."""
    warnings.warn("ooc.models.summing_of is now pre_aggregation_of", DeprecationWarning, stacklevel=2)
    return pre_aggregation_of(model)


def pre_aggregation_of(model: nn.Module) -> PreAggregation | None:
    """Return the neighbor sum of the model's first layer if a loader can compute it in advance, else None.

    None for models with an encoder, attention, input dropout or their own forward, and where rows are so wide that applying the
    linear map before the sum is cheaper (`ooc.models.convs.narrow_first`).

    >>> pre_aggregation_of(build_model("sage", 128, 256, 32, num_layers=2))
    PreAggregation(kind='mean', channels=256, more_rows=0.0)
    """
    layers = getattr(model, "layers", None)
    if not layers or type(model).forward is not Model.forward or model.encoder is not None:
        return None
    first: Any = layers[0]
    if type(first).forward not in _LAYERS or type(first.conv).forward not in _SUMMED or first.dropout:
        return None
    result: PreAggregation | None = first.conv.pre_aggregation()
    return None if result is None else replace(result, more_rows=max(map(_more_rows, layers)))


def _more_rows(layer: Any) -> float:
    """Rows a step allocates per destination besides those of the convolution and `Relu` (measured)."""
    if isinstance(layer, Layer):
        normed, skipped = not isinstance(layer.norm, nn.Identity), not isinstance(layer.skip, nn.Identity)
    elif isinstance(layer, HeteroLayer):
        normed, skipped = bool(layer.norm), bool(layer.skip)
    else:
        return 3.0  # assumed for a user-defined layer
    own_activation = not isinstance(layer.activation, Relu | nn.Identity)
    return 1.5 * normed + 1.0 * own_activation + 0.5 * skipped
