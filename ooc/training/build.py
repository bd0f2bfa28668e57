"""Model, optimizer, device and fan-outs of a configuration."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch_geometric.nn import to_hetero

from ooc.config.base import DeviceName, RunConfig, changed
from ooc.config.fan_outs import ALL_OTHERS
from ooc.config.models import ModelConfig
from ooc.config.nodes import NodeConfig
from ooc.models.builders import build_model
from ooc.models.edge_decoders import make_decoder
from ooc.models.graph_models import build_graph_model
from ooc.models.hetero import HeteroModelName, build_hetero_model, initialized, table_width
from ooc.models.initialization import initialize
from ooc.models.user_models import edge_dims_of, edge_features_for, find_class, kind_of, load_model, takes_types
from ooc.runtime.crew import in_one_call
from ooc.runtime.determinism import use_deterministic_kernels
from ooc.runtime.keyed_random import Purpose, key
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError

_TF32_CAPABILITY = (8, 0)
"""CUDA's compute capability of Ampere"""
_SHARED = ("dropout", "heads", "norm", "residual")
"""settings of every model, built in or not"""
_OF_GRAPHS = ("pooling", "virtual_node")
"""settings of models of whole graphs"""
_BUILT_IN = ("jk", "output_heads", "input_dropout", "alpha", "theta", "rescale", "groups")
"""settings of built-in models; exact training has no sums over sampled edges to rescale"""


def check_device(name: str) -> None:
    """Raise ConfigError for a device that is none, or is not here."""
    if name not in get_args(DeviceName):
        raise ConfigError(f"device = {name!r} is invalid: expected {', '.join(map(repr, get_args(DeviceName)))}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("`device='cuda'`: torch sees no CUDA device here; use auto or cpu")


def pick_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one. Deterministic kernels are switched on; see `ooc.runtime.determinism`."""
    check_device(name)
    device = torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda")
    use_deterministic_kernels(device)
    return device


def use_tf32(device: torch.device) -> None:
    """Let matrix products of float32 round their factors to TF32. Raises ConfigError where the device has no such products."""
    if device.type != "cuda":
        raise ConfigError("`tf32` is of GPUs, and this run computes on the CPU: leave it out")
    if torch.cuda.get_device_capability(device) < _TF32_CAPABILITY:
        raise ConfigError(f"`tf32` is not of {torch.cuda.get_device_name(device)}: leave it out")
    torch.set_float32_matmul_precision("high")


def placed(model: nn.Module, name: str) -> torch.device:
    """Put a model that is not trained on the device of that name, see `pick_device`, and return it.

    On the CPU its kernels are deterministic as they are: what only training needs is left as it was.
    """
    if name == "cpu" or not torch.cuda.is_available():
        check_device(name)
        return torch.device("cpu")
    device = pick_device(name)
    model.to(device)
    return device


def takes_floats(config: RunConfig) -> bool:
    """Whether integer features come as float32: built-in models multiply them, a class of your own may look them up."""
    return ":" not in config.model


def make_model(
    config: ModelConfig,
    in_channels: int,
    channels: int,
    degrees: Callable[[], Tensor] | None = None,
    edge_dim: int | None = None,
) -> nn.Module:
    """The configured model, of nodes or of whole graphs, its parameters drawn from the seed alone; of links with its decoder as
    `link_decoder`.

    degrees: see `load_model`; edge_dim: columns of the edge feature `edge_attr`, None where there is none.
    """
    torch.manual_seed(key(config.seed, Purpose.INIT) >> 1)
    made = _model_of_rows(config, in_channels, channels, degrees, edge_dim)
    if config.link_decoder is not None:
        made.link_decoder = make_decoder(config.link_decoder, channels, config.dropout)
    return made


def check_homogeneous(config: ModelConfig, store: Path) -> None:
    """Raise ConfigError for a model of heterogeneous graphs on a homogeneous store."""
    if config.model in get_args(HeteroModelName):
        raise ConfigError(
            f"model {config.model} is for heterogeneous graphs, and {store} is homogeneous: use sage, gcn, gat, ..."
        )


def _model_of_rows(
    config: ModelConfig, in_channels: int, channels: int, degrees: Callable[[], Tensor] | None, edge_dim: int | None
) -> nn.Module:
    of_graphs = [name for name in _OF_GRAPHS if name in type(config).model_fields]
    shared = (*_SHARED, *of_graphs)
    shape: dict[str, Any] = {"in_channels": in_channels, "hidden_channels": _hidden_of(config), "out_channels": channels}
    shape |= {"num_layers": config.layers} | {name: getattr(config, name) for name in shared}
    if edge_dim is not None:
        shape["edge_dim"] = edge_dim
    if ":" in config.model:
        asked = [name for name in changed(config, *shared) if getattr(config, name)]
        made = load_model(config.model, shape, config.model_args, asked, config.folders, degrees)
        if of_graphs:
            return made
        count = len(made.layers) if kind_of(made) == "layers" else config.layers  # type: ignore[arg-type]
        if count != config.layers:
            raise ConfigError(f"model {config.model} has {count} layers, and layers is {config.layers}: give `layers={count}`")
        return made
    check_homogeneous(config, config.store)
    if "gine" in config.convs and not edge_dim:
        raise ConfigError(
            f"gine takes edge features, and {config.store} has none called edge_attr: ingest it with `edge_features`, as in "
            "edge_attr=f*"
        )
    own = {name: getattr(config, name) for name in _BUILT_IN if name in type(config).model_fields}
    own["blocks"] = [block.model_dump() for block in config.blocks]
    built = build_graph_model if of_graphs else build_model
    return initialize(built(config.model, **shape, **own), config.init)


def _hidden_of(config: ModelConfig) -> int | list[int]:
    """The hidden width, or those behind each layer that the model's builder takes: not that of outputs that are hidden rows."""
    if isinstance(config.hidden, int):
        return config.hidden
    outputs = config.jk == "none" and config.gives_hidden and "pooling" not in type(config).model_fields
    return list(config.widths[:-1] if outputs else config.widths)


def table_shapes(config: NodeConfig, dataset: Dataset) -> dict[str, tuple[int, int]]:
    """Node type without features -> numbers of rows and columns of its embedding table; none of a homogeneous store."""
    if not dataset.is_hetero:
        return {}
    features = features_of(dataset)
    width = table_width(config.model, features, config.embedding)
    return {name: (dataset.nodes(name).num_nodes, width) for name, count in features.items() if not count}


def features_of(dataset: Dataset) -> dict[str, int]:
    """Node type -> number of its features."""
    return {name: dataset.nodes(name).num_features for name in dataset.node_types}


def make_hetero_model(config: NodeConfig, dataset: Dataset, node_type: str | Sequence[str], channels: int) -> nn.Module:
    """The configured model of a heterogeneous store, its parameters drawn from the seed alone; of links with its decoder as
    `link_decoder`.

    node_type: that has outputs, or several such, such as the two that links are between.

    A class of one's own that is for homogeneous graphs, with a forward(x, edge_index), is made heterogeneous by PyG's
    `to_hetero`. The rows of embedding tables are given to models in place of features; see `table_shapes`.
    """
    torch.manual_seed(key(config.seed, Purpose.INIT) >> 1)
    one = node_type if isinstance(node_type, str) or len(node_type) > 1 else node_type[0]
    made = _model_of_types(config, dataset, one, channels)
    if config.link_decoder is not None:
        made.link_decoder = make_decoder(config.link_decoder, channels, config.dropout)
    return made


def _model_of_types(config: NodeConfig, dataset: Dataset, node_type: str | Sequence[str], channels: int) -> nn.Module:
    metadata = dataset.metadata()
    shape: dict[str, Any] = {"hidden_channels": config.embedding, "out_channels": channels, "num_layers": config.layers}
    shared = {name: getattr(config, name) for name in _SHARED}
    if ":" not in config.model:
        own: dict[str, Any] = {"num_bases": config.num_bases, "input_dropout": config.input_dropout or 0.0}
        sizes = features_of(dataset)
        built = build_hetero_model(config.model, sizes, metadata=metadata, node_type=node_type, **shape, **shared, **own)
        return initialize(built, config.init)
    widths = features_of(dataset) | {name: width for name, (_, width) in table_shapes(config, dataset).items()}
    typed = takes_types(find_class(config.model, config.folders))
    edge_dims = edge_dims_of(dataset)
    offered = {"in_channels": widths if typed else (-1, -1), "metadata": metadata, **shape, **shared}
    offered |= {"edge_dim": edge_dims} if typed and edge_dims else {}
    offered |= {"node_type": node_type} if isinstance(node_type, str) else {}
    asked = [name for name in changed(config, *_SHARED) if getattr(config, name)]
    made = load_model(config.model, offered, config.model_args, asked, config.folders)
    if typed:
        edge_features_for(made, dataset)  # refused before it is called without them
    return initialized(made if typed else _of_every_type(made, metadata), widths, metadata, edge_dims)


def _of_every_type(model: nn.Module, metadata: Any) -> nn.Module:
    """The module with layers for every type, as PyG's `to_hetero` makes it. Raises ConfigError where that does not."""
    try:
        made: nn.Module = to_hetero(model, metadata)
    except Exception as error:  # PyG refuses some modules, and traces the user's code
        why = " ".join(str(error).split())
        raise ConfigError(f"{type(model).__name__} cannot be made heterogeneous by PyG's to_hetero: {why}") from error
    return made


def model_bytes(config: RunConfig, model: nn.Module) -> int:
    """What training adds to a model that stands in the process's memory: gradients, the optimizer's state, and the best
    model so far with one being saved. Nothing where it stands on a GPU, but for the latter."""
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.device.type == "cpu"]
    kept = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    return sum(sizes) * (1 + _states(config)) + 2 * kept


def device_model_bytes(config: RunConfig, model: nn.Module) -> int:
    """What training adds to a model that stands on a GPU: gradients and the optimizer's state."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.is_cuda) * (1 + _states(config))


def _states(config: RunConfig) -> int:
    """Numbers that the optimizer keeps of a parameter."""
    return {"adam": 2, "adamw": 2, "sgd": int(config.momentum > 0), "adagrad": 1, "rowwise_adagrad": 1}[config.optimizer]


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Adam, AdamW or SGD, weight decay on every parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"model {config.model} has no parameter to train")
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    scaled = getattr(config, "precision", "fp32") == "fp16"  # a run begun unfused goes on so, which its scaler has to know
    fused = None if scaled else in_one_call(parameters)
    own: dict[str, Any] = {"momentum": config.momentum} if config.optimizer == "sgd" else {"fused": fused}
    return kinds[config.optimizer](parameters, lr=config.lr, weight_decay=config.weight_decay, **own)


def fan_outs_of(fanout: list[int] | dict[str, list[int]], dataset: Dataset) -> Any:
    """Fan-outs of a configuration as loaders take them. Raises ConfigError for those by edge type on a store that has one."""
    if isinstance(fanout, list):
        return fanout
    own = {name: counts for name, counts in fanout.items() if name != ALL_OTHERS}
    if not dataset.is_hetero:
        raise ConfigError(
            f"fan-outs by edge type ({next(iter(own), ALL_OTHERS)}) are of heterogeneous stores, and {dataset.path} has one "
            "edge type: give `fanout` one number per layer"
        )
    others = fanout.get(ALL_OTHERS)
    return own if others is None else {":".join(key): others for key in dataset.edge_types} | own
