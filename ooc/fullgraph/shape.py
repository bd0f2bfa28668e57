"""What an exact step needs to know of a model: its parts, which of them learn, drop or normalise over all nodes."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import BatchNorm

from ooc.fullgraph.program import FullLayer, FullShape
from ooc.layerwise.shape import over_rows, own_norm, parts_of, shape_of
from ooc.models.layers import Layer
from stores.dataset import Dataset
from stores.errors import ConfigError


def full_shape(model: nn.Module, dataset: Dataset) -> FullShape:
    """The model's shape in the mode it is in, training or evaluation.

    Raises ConfigError for a model that is no list of layers, or has a batch norm where it cannot be made exact.
    """
    encoder, layers, decoder = parts_of(model)
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise ConfigError('exact training computes on the CPU: leave the model there (device = "cpu")')
    for part in (encoder, decoder):
        found = "" if part is None else over_rows(part)
        if found:
            raise ConfigError(f"an encoder or decoder is computed a few rows at a time: its {found} would see only those")
    first = layers[0]
    return FullShape(
        replace(shape_of(model, dataset), drops=is_plain(first) and bool(first.dropout) and first.training),
        tuple(_full_layer(layer) for layer in layers),
        torch.empty(0, dtype=dtype_of(model)).element_size(),
        encoder is not None and _trains(encoder),
    )


def dtype_of(model: nn.Module) -> torch.dtype:
    """float32 or float64, as its parameters are. Raises ConfigError for others."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"exact training computes in float32 or float64, and the model has parameters of {dtype}")
    return dtype


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is one of ours, and does what ours do."""
    return isinstance(layer, Layer) and type(layer).forward is Layer.forward


def norm_of(layer: nn.Module) -> _BatchNorm | None:
    """The norm over all nodes of one of our layers, None where it has none."""
    if not is_plain(layer):
        return None
    found: Any = layer.norm.module if isinstance(layer.norm, BatchNorm) else layer.norm
    return found if isinstance(found, _BatchNorm) and over_rows(found) else None


def hidden_norms(layer: nn.Module) -> str:
    """The name of a norm over all rows that a layer has elsewhere, "" without: else its rows are computed all together."""
    own = norm_of(layer)
    return next((found for module in layer.modules() if module is not own and (found := own_norm(module))), "")


def _full_layer(layer: nn.Module) -> FullLayer:
    ours = is_plain(layer)
    norm: Any = norm_of(layer)
    return FullLayer(
        norm=0 if norm is None else int(norm.num_features),
        residual=ours and bool(layer.residual),
        trains=_trains(layer),
    )


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
