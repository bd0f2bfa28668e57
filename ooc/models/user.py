"""Modules of the user's own: found by name, called by what their forward takes.

Three kinds are told apart by signature: `forward(x, blocks)`, a module that has only a list `layers` (and perhaps an `encoder`
and a `decoder`, see `ooc.models.layers.run_layers`), and any PyG module `forward(x, edge_index)`, which runs on the whole
subgraph, as PyG users do with NeighborLoader.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from ooc.models.layers import as_input, run_model
from stores.errors import ConfigError

Kind = Literal["blocks", "layers", "edge_index"]


def load_model(
    name: str, offered: Mapping[str, Any], required: Mapping[str, Any] | None = None, asked: Collection[str] = ()
) -> nn.Module:
    """The module "package.module:Class", looked for on the import path and in the working directory.

    offered: arguments by name (in_channels, out_channels, ...), of which the class is given those its constructor names.
    required: arguments that the class must take; asked: those of the offered ones that it must take, because somebody set
    them. Raises ConfigError where the class cannot be found or made, or where `forward_batch` could not call it.

    >>> model = load_model("mine.nets:Net", {"in_channels": 128, "out_channels": 32, "num_layers": 2})
    >>> forward_batch(model, batch).shape
    torch.Size([batch_size, 32])
    """
    model = make_module(name, offered, required, asked)
    kind_of(model)
    return model


def make_module(
    name: str, offered: Mapping[str, Any], required: Mapping[str, Any] | None = None, asked: Collection[str] = ()
) -> nn.Module:
    """`load_model`, whatever its forward takes.

    >>> model = make_module("mine.nets:Net", {"in_channels": 128, "hidden_channels": 100})
    """
    made = _find_class(name)
    arguments = _arguments(name, made, offered, required or {}, asked)
    try:
        model = made(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ConfigError(f"model {name}({given}) could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name} makes a {type(model).__name__}, not a torch.nn.Module: name a Module class")
    return model


def _find_class(name: str) -> Any:
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"model {name!r} names no class: write package.module:Class")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"model {name}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    for part in class_name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"model {name}: {module_name} has no {class_name}: check the name after the colon")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"model {name}: {class_name} is a {type(found).__name__}: name a Module class")
    return found


def _arguments(
    name: str, made: Any, offered: Mapping[str, Any], required: Mapping[str, Any], asked: Collection[str]
) -> dict[str, Any]:
    """What the constructor is given: all that is required, and what it names of the rest."""
    parameters = inspect.signature(made).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [key for key in required if key not in names and not takes_any]
    if unknown:
        raise ConfigError(f"model {name} does not take {', '.join(unknown)}: its constructor takes {', '.join(sorted(names))}")
    idle = [key for key in asked if key not in names and key not in required]
    if idle:
        raise ConfigError(f"model {name} does not take {idle[0]}: leave it out, or let its constructor name it")
    arguments = {key: value for key, value in offered.items() if key in names} | dict(required)
    needed = {p.name for p in parameters if p.name in names and p.default is p.empty}
    missing = sorted(needed - arguments.keys())
    if missing:
        offer = ", ".join(sorted(offered))
        raise ConfigError(
            f"model {name} needs {', '.join(missing)}, which is not known: offered are {offer}; give it a default"
        )
    return arguments


def kind_of(model: nn.Module) -> Kind:
    """How the module is called, by its forward's parameters; ConfigError where no way fits."""
    own_forward = getattr(type(model).forward, "__name__", "") != "_forward_unimplemented"
    if not own_forward:
        if isinstance(getattr(model, "layers", None), nn.ModuleList):
            return "layers"
        raise ConfigError(f"model {type(model).__name__} has neither a forward nor a ModuleList `layers`: define one of them")
    names = list(inspect.signature(model.forward).parameters)
    if "blocks" in names[1:2]:
        return "blocks"
    if any(name in names[1:2] for name in ("edge_index", "adj_t", "adj", "edge_indices")):
        return "edge_index"
    raise ConfigError(
        f"model {type(model).__name__}.forward({', '.join(names)}) cannot be called: "
        "use forward(x, blocks) or forward(x, edge_index)"
    )


def forward_batch(model: nn.Module, batch: Any, checkpoint: bool = False) -> Tensor:
    """The model's rows for the batch's seeds, [batch_size, out_channels].

    batch: a PyG Data as the loader gives it: x, edge_index, blocks, batch_size. A forward that names `edge_weight` is given the
    sampled edges' weights, None in an unweighted graph. checkpoint: recompute activations, see `run_layers`; ConfigError for a
    model whose own forward decides what is kept.

    >>> out = forward_batch(model, batch)
    >>> loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
    """
    kind = kind_of(model)
    if kind == "layers":
        return run_model(model, batch.x, batch.blocks, checkpoint)
    parameters = inspect.signature(model.forward).parameters
    if checkpoint and "checkpoint" not in parameters:
        raise ConfigError(
            f"activation checkpointing acts between layers, and {type(model).__name__} has its own forward: "
            "switch it off, or give the model a ModuleList `layers` and no forward"
        )
    extra: dict[str, Any] = {"checkpoint": checkpoint} if "checkpoint" in parameters else {}
    x = as_input(batch.x, model)
    if kind == "blocks":
        return model(x, batch.blocks, **extra)
    if "edge_weight" in parameters:
        extra["edge_weight"] = batch.blocks[0].weight
    return model(x, batch.edge_index, **extra)[: batch.batch_size]
