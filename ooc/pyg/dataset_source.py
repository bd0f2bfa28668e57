"""PyG data sets as the input of an ingest; the only part of the ingest that imports torch."""

import importlib
import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset, TemporalData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from ooc.pyg.data_arrays import check_data
from ooc.pyg.graph_arrays import arrays_for, single
from ooc.pyg.hetero_arrays import hetero_arrays_of, is_hetero
from ooc.runtime.restoring import working_directory_left
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import IngestResult, IngestSpec
from ooc.stores.ingest import ingest as build
from ooc.stores.ingest.duck import Progress

_FILES = (".pt", ".pth")
"""what torch.save writes"""
_SPLITS = ("train_mask", "val_mask", "test_mask", "graphs.train", "graphs.val", "graphs.test")
"""arrays of splits, which random ones replace"""


def ingest(spec: IngestSpec, progress: Progress | None = None) -> IngestResult:
    """Build a store as `ooc.stores.ingest.ingest` does, reading the PyG data set of `spec.pyg` first if given.

    >>> ingest(IngestSpec(out="cora.ooc", pyg="Planetoid", arg=["root=data", "name=Cora"])).num_nodes
    2708
    """
    if spec.pyg is None:
        return build(spec, progress)
    if spec.pyg.endswith(_FILES):
        return ingest_data(load(spec.pyg, spec.arg), spec.pyg, spec, progress)
    dataset, name, many = read_pyg(spec.pyg, arguments(spec.arg))
    if not many:
        check_data(dataset, name)
    return ingest_data(dataset, name, spec, progress)


def ingest_data(data: Any, name: str, spec: IngestSpec, progress: Progress | None = None) -> IngestResult:
    """Build a store of a `Data`, `HeteroData`, `TemporalData`, or of several graphs, called `name` in messages.

    The notes begin with what is left out. Raises as `ooc.from_data` does.

    >>> ingest_data(data, "data", IngestSpec(out="cora.ooc", pyg="data")).num_nodes
    """
    data = single(data)
    if is_hetero(data):
        if isinstance(data, Batch):
            raise InputError(
                f"{name} is a batch of HeteroData: many graphs have one type of nodes and edges; give one HeteroData"
            )
        typed, left_out, hetero = hetero_arrays_of(data, spec)
        result = build(hetero, progress, typed)
    else:
        with arrays_for(data, name, spec.out) as (found, left_out, time):
            drawn = _SPLITS if spec.random_split is not None else ()
            arrays = {name: array for name, array in found.items() if name not in drawn}
            result = build(spec if time is None else spec.with_times(time), progress, arrays)
    return replace(result, notes=(f"left out: {', '.join(left_out)}", *result.notes)) if left_out else result


def load(path: str, arg: Sequence[str] = ()) -> Any:
    """Return what torch.save wrote to a file: a `Data`, `HeteroData`, `TemporalData`, a list of graphs, or a data set that
    `InMemoryDataset.save` wrote, mapped from disk.

    Raises InputError if there is no such file, or it holds other objects, which could run code as they are loaded.
    """
    if arg:
        raise ConfigError(f"`arg` is for the class of a data set, and {path} is a file: leave it out")
    graphs = [
        Data,
        HeteroData,
        TemporalData,
        DataEdgeAttr,
        DataTensorAttr,
        BaseStorage,
        NodeStorage,
        EdgeStorage,
        GlobalStorage,
    ]
    try:
        with torch.serialization.safe_globals(graphs):
            return _unpacked(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except FileNotFoundError:
        raise InputError(f"there is no file {path}: check the path") from None
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} does not hold PyG's graphs alone, and other objects could run code: load it in Python, and give the "
            "graphs to `ooc.from_data`"
        ) from None
    except Exception as error:  # a damaged file may raise anything
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{path} is no file of torch.save, or damaged: {words[0][:200]}") from None


def _unpacked(found: Any) -> Any:
    """The data set of a tuple (all graphs in one, where each begins, their class), as PyG keeps it; others as they are."""
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[1], dict | None):
        return found
    held = InMemoryDataset()
    held.data = found[2].from_dict(found[0]) if len(found) == 3 else found[0]
    held.slices = found[1]
    return held


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
