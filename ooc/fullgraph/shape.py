"""What an exact step needs to know of a model: its parts, which of them learn, drop or normalise over all nodes."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ooc.fullgraph.program import FullLayer, FullShape
from ooc.layers import Layer
from ooc.sweepshape import parts_of, shape_of
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
        if part is not None and any(has_statistics(module) for module in part.modules()):
            raise ConfigError("an encoder or decoder is computed a few rows at a time: its batch norm would see only those")
    return FullShape(
        shape_of(model, dataset),
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


def has_statistics(module: nn.Module) -> bool:
    """Whether a module normalises by the rows that it is given, all of them in exact training."""
    if not isinstance(module, _BatchNorm):
        return False
    return module.training or module.running_mean is None


def norm_of(layer: nn.Module) -> _BatchNorm | None:
    """The norm over all nodes of one of our layers, None where it has none."""
    if not isinstance(layer, Layer):
        return None
    found: Any = [module for module in layer.norm.modules() if has_statistics(module)]
    return found[0] if found else None


def hidden_norms(layer: nn.Module) -> bool:
    """Whether a layer has statistics elsewhere: then all its rows are to be computed together."""
    own = norm_of(layer)
    return any(has_statistics(module) and module is not own for module in layer.modules())


def _full_layer(layer: nn.Module) -> FullLayer:
    ours = isinstance(layer, Layer)
    norm: Any = norm_of(layer)
    return FullLayer(
        norm=0 if norm is None else int(norm.num_features),
        residual=ours and bool(layer.residual),
        trains=_trains(layer),
        drops=ours and bool(layer.dropout) and layer.training,
    )


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
