"""Kaiming and Xavier initialization of a model's matrices."""

from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

Initialization = Literal["default", "kaiming", "xavier"]
Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def initialize(model: Module, name: Initialization = "default") -> Module:
    """Draw a model's weight matrices anew, from torch's generator, and set the biases of linear maps to 0.

    Args:
        model: The model. Embedding tables, norms and vectors of attention stay as they are.
        name: "kaiming" (He et al., 2015, uniform, for ReLU), "xavier" (Glorot & Bengio, 2010, uniform), or "default", which
            changes nothing: the layers' own, as in PyTorch and PyG.

    Returns:
        The model.

    >>> initialize(build_model("gcn", 1433, 16, 7, num_layers=2), "xavier")
    """
    if name == "default":
        return model
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if kind.startswith("weight") and parameter.dim() > 1:
                _draw(parameter, name)
            elif kind == "root" and parameter.dim() == 2:  # of R-GCN, [in, out]
                _draw(parameter.mT, name)
            elif kind == "bias" and isinstance(module, nn.Linear | Linear):
                parameter.zero_()
    return model


def _draw(weight: Tensor, name: Initialization) -> None:
    """weight: [out, in]; or [..., in, out], as of several edge types."""
    if weight.dim() > 2:
        for each in weight:
            _draw(each.mT if each.dim() == 2 else each, name)
    elif name == "kaiming":
        nn.init.kaiming_uniform_(weight, nonlinearity="relu")
    else:
        nn.init.xavier_uniform_(weight)
