"""PyG data sets as the input of an ingest; the only part of the ingest that imports torch."""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from ooc.pyg.data_arrays import arrays_of
from ooc.pyg.graph_arrays import arrays_for
from ooc.pyg.hetero_arrays import hetero_arrays_of, is_hetero
from ooc.runtime.restoring import working_directory_left
from ooc.stores.errors import ConfigError
from ooc.stores.ingest import IngestResult, IngestSpec
from ooc.stores.ingest import ingest as build
from ooc.stores.ingest.duck import Progress


def ingest(spec: IngestSpec, progress: Progress | None = None) -> IngestResult:
    """Build a store as `ooc.stores.ingest.ingest` does, reading the PyG data set of `spec.pyg` first if given.

    >>> ingest(IngestSpec(out="cora.ooc", pyg="Planetoid", arg=["root=data", "name=Cora"])).num_nodes
    2708
    """
    if spec.pyg is None:
        return build(spec, progress)
    dataset, name, many = read_pyg(spec.pyg, arguments(spec.arg))
    if not many and is_hetero(dataset):
        typed, left_out, hetero = hetero_arrays_of(dataset, spec)
        result = build(hetero, progress, typed)
        return replace(result, notes=(*_left_out(left_out), *result.notes))
    with arrays_for(dataset, name, spec.out) if many else nullcontext(arrays_of(dataset, name)) as found:
        arrays, left_out, time = found
        result = build(spec if time is None else spec.with_times(time), progress, arrays)
    return replace(result, notes=(*_left_out(left_out), *result.notes))


def _left_out(what: list[str]) -> list[str]:
    return [f"left out: {', '.join(what)}"] if what else []


def arguments(pairs: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs to keyword arguments; values are JSON (5, true, "0") if valid, else text.

    >>> arguments(["name=Cora", "split=public", "num_nodes=100"])
    {'name': 'Cora', 'split': 'public', 'num_nodes': 100}
    """
    keywords: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name.isidentifier():
            raise ConfigError(f"`arg={pair!r}`: write it NAME=VALUE, as in name=Cora")
        try:
            keywords[name] = json.loads(value)
        except (ValueError, RecursionError):
            keywords[name] = value
    return keywords


@working_directory_left()
def read_pyg(name: str, keywords: Mapping[str, Any]) -> tuple[Any, str, bool]:
    """Return (a PyG data set of several items, or else item 0; what to call it in messages; whether there are several).

    `name` is a class of torch_geometric.datasets, or `package.module:Class`, also from the working directory. Raises
    ConfigError if it does not exist or cannot be constructed.
    """
    module_name, _, class_name = name.rpartition(":")
    here = os.getcwd()
    if module_name and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name or "torch_geometric.datasets"), class_name)
    except (ImportError, AttributeError) as error:
        where = f"{module_name}:{class_name}" if module_name else f"torch_geometric.datasets.{class_name}"
        raise ConfigError(f"there is no data set {where} ({error}); use a PyG class, or package.module:Class") from None
    try:
        dataset = factory(**keywords)
        first = dataset[0]
    except Exception as error:  # third-party code may raise anything
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"the data set {name} cannot be constructed with {dict(keywords)}: {words[0][:300]} (`arg`)"
        ) from error
    many = hasattr(dataset, "__len__") and len(dataset) > 1
    return (dataset, name, True) if many else (first, f"item 0 of {name}", False)
