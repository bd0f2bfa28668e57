"""Models of heterogeneous graphs as lists of layers: R-SAGE, R-GCN and HGT.

Layers map {node type: rows} to {node type: rows} on a `HeteroBlock`; `run_layers` runs them as it runs layers on blocks.
Nodes of a type without features have an embedding table: it is part of the model, or its rows are given in place of features
(`ooc.history.embedding_tables`).
"""

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.utils import index_sort
from torch_geometric.utils.sparse import index2ptr

from ooc.graph.blocks import Block
from ooc.graph.hetero import EdgeKey, HeteroBlock
from ooc.models.builders import Model
from ooc.models.dropout import dropout
from ooc.models.hetero_convs import BlockHGTConv, BlockRGCNConv, Metadata, RSAGEConv, TypedRows
from ooc.models.layers import DenseLayer, Norm, make_norm
from ooc.models.memory_efficient import Relu, activated
from ooc.stores.errors import ConfigError

HeteroModelName = Literal["rsage", "rgcn", "hgt"]
NUM_BASES = 30
"""of R-GCN with more edge types than that, as published for the largest data sets"""
EDGE_ATTR_DICT = "edge_attr_dict"
"""the parameter of a forward that receives edge features by edge type, as PyG calls it"""


class HeteroLayer(nn.Module):
    """dropout -> convolution -> norm -> + residual -> activation, on one block, for the rows of every node type.

    `Layer` for heterogeneous graphs: norms and the residual's maps are a node type's own.

    Args:
        conv: A module ({node type: x}, block) -> {node type: [num_dst, out_channels]}.
        in_channels: Node type -> width of its rows.
        out_channels: Width of the rows of all types.
        dropout, norm, residual, activation: As of `Layer`.

    >>> layer = HeteroLayer(RSAGEConv(widths, 64, ds.metadata()), widths, 64, dropout=0.5, activation=Relu())
    >>> layer(batch.x_dict, batch.blocks[0])["paper"].shape
    torch.Size([num_dst, 64])
    """

    def __init__(
        self,
        conv: nn.Module,
        in_channels: Mapping[str, int],
        out_channels: int,
        *,
        dropout: float = 0.0,
        norm: Norm = "none",
        residual: bool = False,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv, self.dropout, self.residual = conv, dropout, residual
        self.norm = ModuleDict({} if norm == "none" else {name: make_norm(norm, out_channels) for name in in_channels})
        wide = {name: width for name, width in in_channels.items() if residual and width != out_channels}
        self.skip = ModuleDict({name: nn.Linear(width, out_channels, bias=False) for name, width in wide.items()})
        self.activation = nn.Identity() if activation is None else activation

    def forward(
        self, x: Mapping[str, Tensor], block: HeteroBlock, *, dropped: bool = False, drop_next: float = 0.0
    ) -> TypedRows:
        """Compute the layer. dropped, drop_next: as of `Layer.forward`."""
        if not dropped:
            x = {name: dropout(rows, self.dropout, self.training, of=name) for name, rows in x.items()}
        return {name: self._finished(name, out, x[name], drop_next) for name, out in self.conv(x, block).items()}

    def _finished(self, node_type: str, out: Tensor, x: Tensor, drop_next: float) -> Tensor:
        """Apply norm, the residual of the type's input rows x, and activation."""
        if node_type in self.norm and len(out):
            out = self.norm[node_type](out)
        if self.residual:
            own = x[: len(out)]
            out = out + (self.skip[node_type](own) if node_type in self.skip else own)
        return activated(self.activation, out, drop_next, of=node_type)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, residual={self.residual}"


HeteroLayer.forward.drops_ahead = True  # type: ignore[attr-defined]


class HeteroEncoder(nn.Module):
    """Rows of every node type as the layers take them: mapped, looked up in the type's embedding table, or as they are.

    Args:
        maps: Node type -> a module for its rows.
        tables: Node type without features -> numbers of its rows and columns. Its x is the nodes' numbers in the graph,
            int64[n], or their rows [n, columns].

    >>> HeteroEncoder({"paper": nn.Linear(128, 64)}, {"author": (1000, 64)})({"paper": x, "author": batch["author"].n_id})
    """

    def __init__(self, maps: Mapping[str, nn.Module], tables: Mapping[str, tuple[int, int]]) -> None:
        super().__init__()
        self.maps = ModuleDict(dict(maps))
        self.tables = ModuleDict({name: nn.Embedding(*shape) for name, shape in tables.items()})
        for table in self.tables.values():
            nn.init.xavier_uniform_(table.weight)

    def forward(self, x: Mapping[str, Tensor]) -> TypedRows:
        return {name: self._encoded(name, rows) for name, rows in x.items()}

    def _encoded(self, node_type: str, rows: Tensor) -> Tensor:
        if node_type in self.tables and not rows.is_floating_point():
            rows = self.tables[node_type](rows)
        if node_type in self.maps:
            rows = self.maps[node_type](rows)
        return rows


class OfType(nn.Module):
    """The rows of one node type, through `head` if there is one: the decoder of a task on these nodes."""

    def __init__(self, node_type: str, head: nn.Module | None = None) -> None:
        super().__init__()
        self.node_type, self.head = node_type, nn.Identity() if head is None else head

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.head(x[self.node_type])
        return out

    def extra_repr(self) -> str:
        return repr(self.node_type)


class OfTypes(nn.Module):
    """The rows of several node types, as {node type: rows}; see `OfType`."""

    def __init__(self, heads: Mapping[str, nn.Module | None]) -> None:
        super().__init__()
        self.heads = ModuleDict({name: nn.Identity() if head is None else head for name, head in heads.items()})

    def forward(self, x: Mapping[str, Tensor]) -> TypedRows:
        return {name: head(x[name]) for name, head in self.heads.items()}


def build_hetero_model(
    name: str,
    in_channels: Mapping[str, int],
    hidden_channels: int,
    out_channels: int,
    metadata: Metadata,
    node_type: str | Sequence[str],
    *,
    num_nodes: Mapping[str, int] | None = None,
    num_layers: int = 2,
    dropout: float = 0.0,
    norm: Norm = "none",
    residual: bool = False,
    heads: int = 8,
    num_bases: int | None = None,
    input_dropout: float = 0.0,
) -> Model:
    """Build a model of a heterogeneous graph by name.

    Args:
        name: "rsage" (`RSAGEConv`), "rgcn" (Schlichtkrull et al., 2018) or "hgt" (Hu et al., 2020).
        in_channels: Node type -> number of its features, 0 for a type without.
        hidden_channels: Width between layers. hgt maps the features of every type to it first, rgcn where their widths differ.
        out_channels: Number of outputs.
        metadata: Node types and edge types, as `ds.metadata()` gives them.
        node_type: The type whose nodes have outputs; of several types these are {node type: rows}.
        num_nodes: Node type -> number of its nodes, for embedding tables inside the model of types without features. None: the
            rows of such a type are given as its x, as many columns as `table_width` says.
        num_layers: Number of layers.
        dropout: Dropout on the input of every layer but the first.
        norm, residual: As of `ooc.models.build_model`.
        heads: Attention heads of hgt, of which hidden_channels is a multiple.
        num_bases: Bases of rgcn. Default: a matrix for every edge type, or 30 bases if there are more edge types.
        input_dropout: Dropout on the input of the first layer.

    Raises:
        ConfigError: If a value is invalid.

    >>> model = build_hetero_model("rsage", {"paper": 128, "author": 0}, 64, 10, ds.metadata(), "paper")
    >>> model({"paper": batch["paper"].x, "author": rows}, batch.blocks).shape
    torch.Size([batch_size, 10])
    """
    check_hetero_model(name, hidden_channels, num_layers, heads, num_bases)
    node_types, learned = metadata[0], [node_type] if isinstance(node_type, str) else list(node_type)
    _check_types(in_channels, metadata, learned)
    table = table_width(name, in_channels, hidden_channels)
    widths = {each: in_channels[each] or table for each in node_types}
    mapped = {each for each in node_types if in_channels[each] and _maps_first(name, in_channels)}
    maps = {each: DenseLayer(widths[each], hidden_channels, activation=nn.ReLU()) for each in node_types if each in mapped}
    tables = {each: (num_nodes[each], table) for each in node_types if num_nodes is not None and not in_channels[each]}
    widths |= dict.fromkeys(mapped, hidden_channels)
    layers = []
    for index in range(num_layers):
        last = index == num_layers - 1
        width = hidden_channels if not last or name == "hgt" else out_channels
        conv = _make_conv(name, widths, width, metadata, heads, num_bases)
        options: dict[str, Any] = {"dropout": dropout if index else input_dropout, "residual": residual}
        if not last:
            options |= {"norm": norm, "activation": None if name == "hgt" else Relu()}
        layers.append(HeteroLayer(conv, widths, width, **options))
        widths = dict.fromkeys(node_types, width)
    head = {each: nn.Linear(hidden_channels, out_channels) if name == "hgt" else None for each in learned}
    decoder = OfType(node_type, head[node_type]) if isinstance(node_type, str) else OfTypes(head)
    return Model(layers, HeteroEncoder(maps, tables) if maps or tables else None, decoder)


def table_width(name: str, in_channels: Mapping[str, int], hidden_channels: int) -> int:
    """Columns of the embedding tables of types without features: the features' number if all types have as many, and the model
    takes them as they are, else hidden_channels.

    >>> table_width("rsage", {"paper": 128, "author": 0}, 64), table_width("hgt", {"paper": 128, "author": 0}, 64)
    (128, 64)
    """
    found = {width for width in in_channels.values() if width}
    return found.pop() if len(found) == 1 and not _maps_first(name, in_channels) else hidden_channels


def _maps_first(name: str, in_channels: Mapping[str, int]) -> bool:
    """Whether features are mapped to the hidden width first: by HGT as published, by R-GCN as types share one matrix."""
    return name == "hgt" or (name == "rgcn" and len({width for width in in_channels.values() if width}) > 1)


def check_hetero_model(name: str, hidden: int, num_layers: int, heads: int, num_bases: int | None) -> None:
    """Raise ConfigError for an unknown model or invalid sizes."""
    known = get_args(HeteroModelName)
    if name not in known:
        raise ConfigError(
            f"model {name!r} is not for heterogeneous graphs: use {', '.join(known)}, or package.module:Class for your own"
        )
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers} is invalid: a model has at least one layer")
    if name == "hgt" and (heads < 1 or hidden % heads):
        raise ConfigError(f"hidden = {hidden} is the width of all {heads} heads together: use a multiple of {heads}")
    if num_bases is not None and num_bases < 1:
        raise ConfigError(f"num_bases={num_bases} is invalid: give 1 or more")


def _check_types(in_channels: Mapping[str, int], metadata: Metadata, learned: Sequence[str]) -> None:
    node_types, edge_types = metadata
    if unknown := [name for name in learned if name not in node_types]:
        raise ConfigError(f"node type {unknown[0]!r} does not exist: there are {', '.join(node_types)}")
    if missing := [name for name in node_types if name not in in_channels]:
        raise ConfigError(f"in_channels lacks node type {missing[0]!r}: give 0 for a type without features")
    if not edge_types:
        raise ConfigError("metadata has no edge types: a model of a heterogeneous graph needs at least one")


def _make_conv(
    name: str, widths: Mapping[str, int], width: int, metadata: Metadata, heads: int, num_bases: int | None
) -> nn.Module:
    node_types, edge_types = metadata
    if name == "rsage":
        return RSAGEConv(widths, width, metadata)
    if name == "rgcn":
        bases = NUM_BASES if num_bases is None and len(edge_types) > NUM_BASES else num_bases
        return BlockRGCNConv(next(iter(widths.values())), width, edge_types, bases)
    return BlockHGTConv(dict(widths), width, (list(node_types), [*map(tuple, edge_types)]), heads)


def full_hetero_blocks(
    edge_index: Mapping[EdgeKey, Tensor], num_nodes: Mapping[str, int], num_layers: int
) -> list[HeteroBlock]:
    """Return one block per layer in which every node of the graph is both source and destination; see `full_blocks`.

    Args:
        edge_index: Edge type -> int64[2, e], (source, destination) in any order.
        num_nodes: Node type -> number of its nodes.
        num_layers: Number of blocks to return, which share their tensors.

    >>> blocks = full_hetero_blocks(data.edge_index_dict, {"paper": 100, "author": 50}, num_layers=2)
    >>> model(data.x_dict, blocks).shape
    torch.Size([100, out_channels])
    """
    blocks = {}
    for key, (source, target) in edge_index.items():
        size = num_nodes[key[2]]
        target, order = index_sort(target, max_value=size, stable=True)
        indptr = index2ptr(target, size)
        sizes = num_nodes[key[0]], size
        blocks[key] = Block(torch.stack([source[order], target]), indptr, *sizes, indptr.diff(), None, None, None)
    return [HeteroBlock(blocks, dict(num_nodes))] * num_layers


def initialized(
    model: nn.Module, widths: Mapping[str, int], metadata: Metadata, edge_dims: Mapping[EdgeKey, int] = MappingProxyType({})
) -> nn.Module:
    """Return the module after a forward on a node and an edge of each type, which gives lazy parameters (-1) their shapes.

    Args:
        model: A module with a forward(x_dict, edge_index_dict); others, and without lazy parameters, are returned unchanged.
        widths: Node type -> columns of its rows.
        metadata: Node types and edge types.
        edge_dims: Edge type -> columns of `edge_attr`, of types that have it, for a forward that takes `edge_attr_dict`.

    Raises:
        ConfigError: If the forward fails.
    """
    if not any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        return model
    node_types, edge_types = metadata
    modes = [module for module in model.modules() if module.training]
    more: dict[str, Any] = {}
    if EDGE_ATTR_DICT in inspect.signature(model.forward).parameters and edge_dims:
        more[EDGE_ATTR_DICT] = {key: torch.zeros(1, width) for key, width in edge_dims.items()}
    try:
        with torch.no_grad():
            model.eval()(
                {name: torch.zeros(1, widths[name]) for name in node_types},
                {key: torch.zeros(2, 1, dtype=torch.long) for key in edge_types},
                **more,
            )
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"{type(model).__name__} fails on a small graph: {type(error).__name__}: {error}") from error
    for module in modes:
        module.training = True
    return model


def seed_types(batch: Any) -> list[str]:
    """Return the node types of a heterogeneous batch's seeds: those that have a batch_size. Links have two or one."""
    return [name for name in batch.node_types if "batch_size" in batch[name]]


def inputs_of(batch: Any) -> TypedRows:
    """Return the input rows of a heterogeneous batch: x, or n_id for types without x (numbers of rows of a table).

    >>> model(inputs_of(batch), batch.blocks)
    """
    return {name: batch[name].x if "x" in batch[name] else batch[name].n_id for name in batch.node_types}
