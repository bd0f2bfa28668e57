"""torch.compile for training: compiles a model in place for blocks whose sizes differ in every batch."""

import os
import shutil
import sysconfig
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ooc.models.layers import Layer
from ooc.models.user_models import kind_of
from ooc.stores.errors import ConfigError

VARIANTS = 32
"""compiled variants torch caches per function: one per layer, mode (training, evaluation) and order of products"""


def compile_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Compile the model's layers in place, or its forward if it is not a list of layers, and return the model.

    Sizes are dynamic, so all batches run the same code; checkpoints of compiled and uncompiled models are interchangeable.
    It is called within `many_variants`. Raises ConfigError if no compiler is found.

    >>> model = compile_model(build_model("sage", 128, 256, 32, num_layers=2), torch.device("cpu"))
    >>> with many_variants():
    ...     model(batch.x, batch.blocks)
    """
    missing = missing_tools(device)
    if missing is not None:
        raise ConfigError(f"`compile=True`: torch.compile needs {missing}; or leave `compile` out")
    layers: Any = getattr(model, "layers", None)
    listed = isinstance(layers, nn.ModuleList) and (
        kind_of(model) == "layers" or all(isinstance(each, Layer) for each in layers)
    )
    for part in layers if listed else [model]:
        part.compile(dynamic=True)
    return model


def many_variants() -> AbstractContextManager[Any]:
    """Return a context in which torch keeps as many compiled variants of a function as a model has."""
    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    context: AbstractContextManager[Any] = config.patch({limit: max(VARIANTS, getattr(config, limit))})
    return context


def missing_tools(device: torch.device) -> str | None:
    """Return what torch.compile needs and does not find on this machine, or None."""
    compiler = os.environ.get("CXX")
    if not any(shutil.which(each) for each in ([compiler] if compiler else ["g++", "clang++", "c++"])):
        return f"a C++ compiler ({f'CXX={compiler} is missing' if compiler else 'no g++ or clang++ is on PATH'}): install one"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's headers (Python.h): install the package python3-dev, or python3-devel"
    if device.type == "cuda" and find_spec("triton") is None:
        return "triton for CUDA: pip install triton"
    return None
