"""User-defined modules: imported by name and called according to the signature of their forward.

Supported are `forward(x, blocks)`, a ModuleList `layers` without a forward (see `ooc.models.layers.run_layers`), and PyG's
`forward(x, edge_index)` and `forward(x_dict, edge_index_dict)`, which run on the whole sampled subgraph as with NeighborLoader.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.graph.blocks import EDGE_ATTR
from ooc.graph.hetero import EdgeKey
from ooc.models.dropout import Of, rows_of_nodes
from ooc.models.hetero import EDGE_ATTR_DICT, inputs_of, seed_types
from ooc.models.layers import as_input, run_layers, run_model
from ooc.models.pyg_models import pyg_arguments
from ooc.models.recomputation import Given
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError

Kind = Literal["blocks", "layers", "edge_index"]


def load_model(
    name: str,
    offered: Mapping[str, Any],
    required: Mapping[str, Any] | None = None,
    requested: Collection[str] = (),
    apart_from: Iterable[Path] = (),
    degrees: Callable[[], Tensor] | None = None,
) -> nn.Module:
    """Import and construct the module "package.module:Class", also from the working directory.

    Importing runs the module's code, so the name must come from the user; see `ooc.config.modes.check_consent`. Only a subclass
    of torch.nn.Module is called.

    Args:
        name: "package.module:Class".
        offered: Arguments of which the constructor receives those it declares.
        required: Arguments that the constructor must accept.
        requested: Those of `offered` that the user set, which the constructor must accept too.
        apart_from: Directories that are data, such as a store or a run: nothing is imported from inside them.
        degrees: Returns the histogram of in-degrees, int64, for constructors with a parameter `deg` such as PyG's PNA.

    Returns:
        The module, in training mode. `kind_of` checks its forward.

    Raises:
        ConfigError: If the class is not found, is no torch.nn.Module, or cannot be constructed.

    >>> model = load_model("mine.nets:Net", {"in_channels": 128, "out_channels": 32, "num_layers": 2})
    """
    cls = find_class(name, apart_from)
    arguments = _arguments(name, cls, offered, required or {}, requested)
    if degrees is not None and "deg" in inspect.signature(cls).parameters and "deg" not in arguments:
        arguments["deg"] = degrees()
    arguments = pyg_arguments(cls, arguments, degrees)
    try:
        return cls(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ConfigError(f"model {name}({given}) could not be constructed: {type(error).__name__}: {error}") from error


def find_class(name: str, apart_from: Iterable[Path] = ()) -> type[nn.Module]:
    """Import the class "package.module:Class" and return it; see `load_model`."""
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"model {name!r} is not a class name: write package.module:Class")
    data = [Path(path).resolve() for path in apart_from]
    here = Path.cwd().resolve()
    if not _is_inside(here, data) and str(here) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(here))
    try:
        for place in _places(module_name):
            if _is_inside(place, data):
                raise ConfigError(f"model {name}: {place} is inside a store or a run, which is data: move the module elsewhere")
        found: Any = importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model {name}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    for part in class_name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"model {name}: {module_name} has no {class_name}: check the name after the colon")
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        kind = f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(f"model {name}: {class_name} is {kind}, not a torch.nn.Module class: name a Module class")
    return found


def _places(module_name: str) -> Iterator[Path]:
    """Where a module and each package around it would be imported from; only packages whose place was taken are imported."""
    for name in accumulate(module_name.split("."), "{}.{}".format):
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None:
            origins = [spec.origin] if spec.has_location and spec.origin else []
            yield from (Path(each).resolve() for each in (*origins, *(spec.submodule_search_locations or ())))


def _is_inside(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _arguments(
    name: str, cls: Any, offered: Mapping[str, Any], required: Mapping[str, Any], requested: Collection[str]
) -> dict[str, Any]:
    """Select the constructor's arguments: all required ones, and the offered ones it declares."""
    parameters = inspect.signature(cls).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [key for key in required if key not in names and not takes_any]
    if unknown:
        raise ConfigError(f"model {name} does not accept {', '.join(unknown)}: the constructor has {', '.join(sorted(names))}")
    unused = [key for key in requested if key not in names and key not in required and not takes_any]
    if unused:
        raise ConfigError(f"model {name} does not accept {unused[0]}: leave it out, or add it to the constructor")
    taken = names | set(requested if takes_any else ())
    arguments = {key: value for key, value in offered.items() if key in taken} | dict(required)
    needed = {p.name for p in parameters if p.name in names and p.default is p.empty and p.name != "deg"}
    missing = sorted(needed - arguments.keys())
    if missing:
        offer = ", ".join(sorted(offered))
        raise ConfigError(f"model {name} needs {', '.join(missing)}, which are not among {offer}: give defaults")
    return arguments


def parameters_of(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a model's forward by name, without `self`; inspected once for each function."""
    forward = model.forward
    function = getattr(forward, "__func__", None)
    return inspect.signature(forward).parameters if function is None else _of_method(function)


@lru_cache(maxsize=64)
def _of_method(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(MethodType(function, object())).parameters


def kind_of(model: nn.Module) -> Kind:
    """Return how to call the module, by its forward's parameters. Raises ConfigError if no way fits."""
    if getattr(type(model).forward, "__name__", "") == "_forward_unimplemented":  # no forward of its own
        if isinstance(getattr(model, "layers", None), nn.ModuleList):
            return "layers"
        raise ConfigError(f"model {type(model).__name__} has neither a forward nor a ModuleList `self.layers`: define one")
    names = list(parameters_of(model))
    if "blocks" in names[1:2]:
        return "blocks"
    if any(name in names[1:2] for name in ("edge_index", "edge_index_dict", "adj_t", "adj", "edge_indices")):
        return "edge_index"
    raise ConfigError(
        f"model {type(model).__name__}.forward({', '.join(names)}) cannot be called: "
        "use forward(x, blocks) or forward(x, edge_index)"
    )


def takes_edge_attr(model: nn.Module) -> bool:
    """Whether a model computes with the edge feature `edge_attr`.

    It does if its forward(x, edge_index, ...) has a parameter of that name (PyG's ready models only if they were given
    `edge_dim`), or if one of its modules has an attribute `needs_edge_attr` that is true, as `ooc`'s own GINE layers.
    """
    if any(getattr(module, "needs_edge_attr", False) for module in model.modules()):
        return True
    if isinstance(model, BasicGNN):
        return any(getattr(conv, "edge_dim", None) is not None for conv in model.convs)
    named = getattr(type(model).forward, "__name__", "") != "_forward_unimplemented"
    return named and EDGE_ATTR in parameters_of(model)


def edge_features_for(model: nn.Module, dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the edge features that a model's batches must have.

    Of a heterogeneous store a model takes them if its forward has a parameter `edge_attr_dict`. Raises ConfigError if the model
    cannot do without `edge_attr`, and the store has none.

    >>> edge_features_for(build_model("gine", 128, 256, 32, 2, edge_dim=8), ds)
    ('edge_attr',)
    """
    parameter = parameters_of(model).get(EDGE_ATTR_DICT if dataset.is_hetero else EDGE_ATTR)
    if parameter is None if dataset.is_hetero else not takes_edge_attr(model):
        return ()
    there = list(dict.fromkeys(name for each in dataset.manifest.edge_types for name in each.arrays))
    if EDGE_ATTR in there:
        return (EDGE_ATTR,)
    if parameter is not None and parameter.default is not parameter.empty and not isinstance(model, BasicGNN):
        return ()
    raise ConfigError(
        f"{type(model).__name__} takes edge features, and {dataset.path} has none called edge_attr (it has: "
        f"{', '.join(there) or 'none'}): ingest it with `edge_features`, as in edge_attr=f*"
    )


def refuse_edge_attr(model: nn.Module) -> None:
    """Raise ConfigError for a model that takes edge features, where they are not read."""
    if takes_edge_attr(model):
        raise ConfigError(
            f"{type(model).__name__} takes edge features, which are read for batches of sampled neighborhoods, clusters and "
            "random subgraphs alone: use mode sampled, cluster or saint"
        )


def edge_dim_of(dataset: Dataset) -> int | None:
    """Return the number of columns of the edge feature `edge_attr`; None if the store has none.

    >>> edge_dim_of(ds)
    8
    """
    if dataset.is_hetero or EDGE_ATTR not in dataset.manifest.edge_types[0].arrays:
        return None
    return math.prod(dataset.edge_features(EDGE_ATTR).shape[1:])


def edge_dims_of(dataset: Dataset) -> dict[EdgeKey, int]:
    """Return the number of columns of `edge_attr` of each edge type of a heterogeneous store that has it."""
    edges = {key: dataset.edges(key) for key in dataset.edge_types}
    return {key: math.prod(each.features(EDGE_ATTR).shape[1:]) for key, each in edges.items() if EDGE_ATTR in each.names}


def takes_types(cls: type[nn.Module]) -> bool:
    """Whether a class is for heterogeneous graphs as it is: all but one with PyG's forward(x, edge_index)."""
    names = list(inspect.signature(cls.forward).parameters)
    return names[2:3] != ["edge_index"]


def forward_batch(model: nn.Module, batch: Any, checkpoint: Given = False) -> Any:
    """Return the model's rows for the seeds of a loader's batch (PyG Data or HeteroData), [batch_size, out_channels].

    A forward with a parameter `edge_weight` receives the sampled edges' weights, and one with `edge_attr` the first of their
    edge features (see `takes_edge_attr`). `checkpoint` recomputes activations (see
    `run_layers`); raises ConfigError if the model's own forward does not support it.

    With HeteroData a forward is given PyG's `x_dict` (see `inputs_of`) and `edge_index_dict`, and `edge_attr_dict` of the edge
    types with that feature if it has such a parameter, or blocks, and returns rows of
    the seeds' node type, or {node type: rows}. Seeds of two types, which links have, are returned as {node type: rows}.

    >>> out = forward_batch(model, batch)
    >>> loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
    """
    with rows_of_nodes(_positions(batch) if model.training else None):
        return _forward(model, batch, checkpoint)


def _own_rows(model: nn.Module, out: Any, seeds: int, whole: bool = False) -> Tensor:
    """The rows of the seeds, which come first. whole: whether a forward returns rows of other nodes too.

    Raises ConfigError for what is no tensor, or has another number of rows.
    """
    if isinstance(out, Tensor) and not out.dim() and seeds == 1:  # squeezed
        return out.reshape(1)
    if not isinstance(out, Tensor) or not out.dim() or len(out) < seeds or (not whole and len(out) > seeds):
        wanted = "row of x" if whole else "destination of the last block"
        raise ConfigError(f"{type(model).__name__} returns {shown(out)} for {seeds} seeds: return a row for each {wanted}")
    return out[:seeds]


def shown(out: Any) -> str:
    """What a forward has returned, in messages: "a tensor [8, 3]", "a dict"."""
    return f"a tensor {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"


def check_columns(model: nn.Module, rows: Any, columns: int) -> None:
    """Raise ConfigError where a model's rows [n, columns], or those of each node type, have another width."""
    for each in rows.values() if isinstance(rows, Mapping) else [rows]:
        if tuple(each.shape[1:]) != (columns,):
            raise ConfigError(
                f"{type(model).__name__} returns {shown(each)}, and the decoder takes {columns} columns: make "
                "its last layer as wide as `out_channels`"
            )


def _positions(batch: Any) -> dict[Of, NDArray[np.int64]] | None:
    """The nodes of a batch's rows, which dropout depends on on the CPU; see `rows_of_nodes`."""
    typed = isinstance(batch, HeteroData)
    nodes = {name: batch[name].get("n_id") for name in batch.node_types} if typed else {"sources": getattr(batch, "n_id", None)}
    return {of: node.numpy() for of, node in nodes.items() if node is not None and node.device.type == "cpu"} or None


def _forward(model: nn.Module, batch: Any, checkpoint: Given) -> Any:
    """See `forward_batch`."""
    kind, typed = kind_of(model), isinstance(batch, HeteroData)
    inputs = inputs_of(batch) if typed else batch.x
    if kind == "layers":
        return _seeds_of(model, run_model(model, inputs, batch.blocks, checkpoint), batch)
    parameters = parameters_of(model)
    if checkpoint and "checkpoint" not in parameters:
        raise ConfigError(
            f"activation checkpointing acts between layers, and {type(model).__name__} has its own forward: "
            "switch it off, or give the model a ModuleList `self.layers` and no forward"
        )
    extra: dict[str, Any] = {"checkpoint": checkpoint} if "checkpoint" in parameters else {}
    x = as_input(inputs, model)
    if kind == "blocks":
        return _seeds_of(model, model(x, batch.blocks, **extra), batch)
    if typed:
        if EDGE_ATTR_DICT in parameters and (features := batch.collect(EDGE_ATTR, allow_empty=True)):
            extra[EDGE_ATTR_DICT] = {key: as_input(each, model) for key, each in features.items()}
        return _seeds_of(model, model(x, batch.edge_index_dict, **extra), batch)
    if "edge_weight" in parameters:
        extra["edge_weight"] = batch.blocks[0].weight
    if EDGE_ATTR in parameters and takes_edge_attr(model) and batch.blocks[0].edge_attr is not None:
        extra[EDGE_ATTR] = as_input(batch.blocks[0].edge_attr, model)
    return _own_rows(model, model(x, batch.edge_index, **extra), batch.batch_size, whole=True)


def forward_layer(model: Any, batch: Any, layer: int) -> Tensor:
    """Return the rows of a batch's seeds behind a layer of a model that is a list of layers, [batch_size, columns].

    Args:
        model: The model.
        batch: PyG's Data or HeteroData, with as many blocks as layers are run.
        layer: Number of the layer, from 1.

    >>> hidden = forward_layer(model, batch, 1)
    """
    typed = isinstance(batch, HeteroData)
    inputs = inputs_of(batch) if typed else batch.x
    rows = run_layers(list(model.layers)[:layer], inputs, batch.blocks, encoder=getattr(model, "encoder", None))
    found: Tensor = _seeds_of(model, rows, batch)
    return found


def _seeds_of(model: nn.Module, out: Any, batch: Any) -> Any:
    """The seeds' rows of what a forward on blocks, or on HeteroData, returned, which may be {node type: rows} there."""
    if not isinstance(batch, HeteroData):
        return _own_rows(model, out, batch.batch_size)
    wanted = seed_types(batch)
    if not isinstance(out, Mapping):
        if len(wanted) > 1:
            raise ConfigError(
                f"the model returns rows of one node type, and seeds are {' and '.join(wanted)}: return a dictionary"
            )
        out = {wanted[0]: out}
    if missing := [name for name in wanted if out.get(name) is None]:
        there = ", ".join(map(str, out)) or "none"
        raise ConfigError(f"the model returns no rows of the seeds' node type {missing[0]!r} (it returns: {there})")
    found = {name: _own_rows(model, out[name], batch[name].batch_size, whole=True) for name in wanted}
    return found if len(wanted) > 1 else found[wanted[0]]
