"""What a pass needs to know of a model and a data set before it is planned: widths, kinds of sums, and the room in memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch_geometric.nn import BatchNorm, DiffGroupNorm, GraphNorm, GraphSizeNorm, LayerNorm, MeanSubtractionNorm, PairNorm

from ooc.graph.blocks import Block
from ooc.layerwise.aggregator import AHEAD
from ooc.layerwise.edge_tiles import ENTRIES_AT_ONCE, piece_rows_of
from ooc.layerwise.pass_plan import LayerShape, ModelShape, least_sums
from ooc.models.builders import Model, full_blocks
from ooc.models.convs import BlockGATConv, BlockGCN2Conv, BlockGCNConv, BlockGINConv, BlockPropagation, BlockSAGEConv
from ooc.models.jumping import carrying
from ooc.models.layers import Layer, as_input, evaluating
from ooc.models.reversible import GroupStep, ReversibleLayer
from ooc.models.user_models import kind_of, refuse_edge_attr, takes_edge_attr
from ooc.runtime.memory_plan import MemoryPlan, plan_memory
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.graph import Graph
from ooc.stores.process import resident_bytes
from ooc.stores.sizes import format_bytes

_SUMMED = tuple(
    conv.forward for conv in (BlockSAGEConv, BlockGCNConv, BlockGINConv, BlockPropagation, BlockGCN2Conv)
)  # that take `FirstLayerAggregates`
ALLOWED = 100 * 2**20
"""for what libraries allocate at first use"""
_VARIES = 16 * 2**20
"""Bytes by which what a process takes before a pass differs from one time to the next"""
GATHERED = 2
"""Ranges of a layer that gathers which may be in memory at a time: one is computed on, and the next one read"""
_DEGREES_AT_ONCE = 2**20
_CODES = ("float32", "float16", "bfloat16", "int8")
Parts = tuple[nn.Module | None, list[nn.Module], nn.Module | None]
"""(encoder, layers, decoder)"""


def has_layers(model: nn.Module) -> bool:
    """Whether a model is a list of layers, which a pass can go through; others have a forward of their own, or take edge
    features, which no pass reads."""
    own = type(model).forward is not Model.forward
    if takes_edge_attr(model):
        return False
    return isinstance(getattr(model, "layers", None), nn.ModuleList) and not (own and kind_of(model) != "layers")


def own_way(model: nn.Module) -> str:
    """Why no pass can go through a model layer by layer, for people."""
    return "takes edge features" if takes_edge_attr(model) else "has its own forward"


def parts_of(model: nn.Module, upto: int | None = None) -> Parts:
    """(encoder, layers, decoder) of a model that is a list of layers; upto: the first so many layers, without a decoder. Raises
    ConfigError for a model with a forward of its own."""
    refuse_edge_attr(model)
    if not has_layers(model):
        raise ConfigError(
            f"a pass goes layer by layer, and {type(model).__name__} has its own forward: give it a ModuleList `self.layers` "
            "and no forward, or evaluate it on sampled batches"
        )
    layers: Any = model.layers
    encoder, decoder, jump = (getattr(model, name, None) for name in ("encoder", "decoder", "jump"))
    steps = [step for layer in layers for step in _steps(layer)]
    if upto is not None:
        return encoder, steps[:upto], None
    return (encoder, steps, decoder) if jump is None else (encoder, *carrying(steps, jump, decoder))


def _steps(layer: Any) -> list[nn.Module]:
    """The layers that a pass has for one of the model: of a reversible one those of its groups."""
    return [*layer.steps()] if isinstance(layer, ReversibleLayer) else [layer]


def layer_ends(model: Any) -> list[int]:
    """By how many layers of a pass each layer of the model is computed."""
    return list(accumulate(len(_steps(layer)) for layer in model.layers))


def own_norm(module: nn.Module) -> str:
    """The name of a module that makes of a row something that hangs on all rows it is given, "" for others and what they are
    made of: a batch norm in training, or a norm over graphs."""
    over = isinstance(module, GraphNorm | GraphSizeNorm | PairNorm | MeanSubtractionNorm | DiffGroupNorm)
    if isinstance(module, _NormBase):
        over = module.training or module.running_mean is None
    if isinstance(module, LayerNorm):
        over = module.mode == "graph"
    return type(module).__name__ if over else ""


def over_rows(module: nn.Module) -> str:
    """The name of such a module anywhere in one, "" where there is none."""
    return next((name for each in module.modules() if (name := own_norm(each))), "")


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is one of ours, with our forward."""
    return isinstance(layer, Layer) and type(layer).forward is Layer.forward


def norm_of(layer: nn.Module) -> _BatchNorm | None:
    """The norm over all nodes of one of our layers, None where it has none."""
    found: Any = layer.norm if is_plain(layer) else None
    found = found.module if isinstance(found, BatchNorm) else found
    return found if isinstance(found, _BatchNorm) and over_rows(found) else None


def hidden_norms(layer: nn.Module) -> str:
    """The name of a norm over all rows that a layer has elsewhere, "" without: else its rows are computed all together."""
    own = norm_of(layer)
    return next((found for module in layer.modules() if module is not own and (found := own_norm(module))), "")


def shape_of(model: nn.Module, dataset: Dataset, upto: int | None = None, *, training: bool = False) -> ModelShape:
    """The shape of a pass in evaluation that ends with layer `upto` (its own output), by default with the model's; with
    `training` of an exact step, in the mode the model is in. Raises ConfigError where model and features do not fit."""
    if not dataset.num_features or len(dataset.stored("x").shape) != 2:
        raise ConfigError(f"{dataset.path} holds no features [N, F] to compute on")
    encoder, layers, decoder = parts_of(model, upto)
    graph, encoding = dataset.graph, dataset.encoding("x")
    with evaluating(model):
        widths = probe_widths((encoder, layers, decoder), dataset.num_features, graph.weight_sum is not None)
    shapes = tuple(_layer_shape(layer, *widths[index : index + 2]) for index, layer in enumerate(layers))
    if training:
        shapes = tuple(replace(shape, **_training(layer)) for shape, layer in zip(shapes, layers, strict=True))
    first, parameter = layers[0], next(model.parameters(), torch.empty(0))
    weighted = graph.weight_sum is not None and any(shape.kind == "gcn" for shape in shapes)
    return ModelShape(
        num_nodes=dataset.num_nodes,
        num_edges=dataset.num_edges,
        halo=graph.num_nodes - dataset.num_nodes,
        x_bytes=dataset.stored("x").row_bytes,
        x_plain=encoding.as_float or (encoding.name in _CODES and encoding.dtype == np.float32),
        x_width=dataset.num_features,
        encoded=0 if encoder is None else widths[0],
        slot_bytes=12 if weighted else 8,
        layers=shapes,
        out=widths[-1],
        drops=training and is_plain(first) and bool(first.dropout) and first.training,
        itemsize=parameter.element_size() if training else 4,
        encoder_trains=encoder is not None and _trains(encoder),
    )


def _training(layer: nn.Module) -> dict[str, Any]:
    """What only exact training needs to know of a layer, by the fields of `LayerShape`."""
    norm: Any = norm_of(layer)
    residual = is_plain(layer) and bool(layer.residual)
    own = {"residual": residual, "trains": _trains(layer), "reversible": isinstance(layer, GroupStep)}
    return {"norm": 0 if norm is None else int(norm.num_features), **own}


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def device_of(*modules: nn.Module) -> torch.device:
    """Where parameters are; the CPU without any."""
    return next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))


def probe_widths(parts: Parts, features: int, weighted: bool) -> list[int]:
    """Columns into each layer, and of the result (with a decoder, the last layer's own are left out), as the parts, in
    evaluation mode, give for a graph of two nodes and an edge. features: columns of x; weighted: whether edges have weights."""
    encoder, layers, decoder = parts
    present = [part for part in (encoder, *layers, decoder) if part is not None]
    device = device_of(*present)
    weight = torch.ones(1) if weighted else None
    block = full_blocks(torch.tensor([[0], [1]]), 2, 1, weight)[0]
    moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in block]
    block = Block(*moved)  # type: ignore[arg-type]
    h = as_input(torch.zeros(2, features, device=device), *present)
    h = initial = h if encoder is None else encoder(h)
    widths = [h.size(1)]
    for layer in layers:
        h = layer(h, block, initial) if getattr(layer, "needs_initial", False) else layer(h, block)
        widths.append(h.size(1))
    if decoder is not None:
        widths[-1] = decoder(h).size(1)
    return widths


def _layer_shape(layer: nn.Module, width: int, out: int) -> LayerShape:
    needs_initial = bool(getattr(layer, "needs_initial", False))
    conv: Any = getattr(layer, "conv", None)
    size = max([4, *(p.element_size() for p in layer.parameters())])
    if is_plain(layer) and type(conv).forward in _SUMMED:
        narrow = None
        if hasattr(conv, "narrowed") and not layer.residual:
            narrow = (conv.out_channels, conv.out_channels if isinstance(conv, BlockSAGEConv) else 0)
        return LayerShape(width, out, conv.sum_kind, narrow, needs_initial, itemsize=size)
    wide = max([width, out, *[max(p.shape) for p in layer.parameters() if p.dim()]])
    light = getattr(type(conv), "forward", None) is BlockGATConv.forward
    per_edge = 48 + 8 * size * int(conv.heads) if light else 48 + 2 * size * wide  # others make a message of every edge
    per_edge = 48 if getattr(type(conv), "forward", None) in _SUMMED else per_edge
    return LayerShape(width, out, None, None, needs_initial, size * (3 * width + 3 * wide), per_edge, itemsize=size)


def besides_bytes(shape: ModelShape, graph: Graph) -> int:
    """Memory that a pass takes beside the sums: pieces and chunks on their way, edges, pointers, what is computed on."""
    pieces = (AHEAD + 2) * min(piece_rows_of(shape), shape.num_nodes + shape.halo) * max(shape.x_bytes, 4 * shape.widest)
    entries = (AHEAD + 2) * min(ENTRIES_AT_ONCE, shape.num_edges) * shape.slot_bytes
    chunks = 7 * shape.chunk_rows * max([layer.itemsize for layer in shape.layers]) * shape.chunk_columns
    return int(pieces + min(entries, 2**26) + chunks + graph.indptr.nbytes + ALLOWED)


def room_in(
    dataset: Dataset,
    besides: int,
    what: str,
    least: int,
    memory: int | None = None,
    beside: int = 0,
    budget: MemoryPlan | None = None,
) -> int:
    """Bytes that are left for values and sums of `what`, beside `besides` for what is under way. memory: bytes for the whole
    process, None: what `budget` (by default the data set's) leaves to batches, less `beside`; it took off what libraries
    allocate. Raises BudgetError for none, and advises what is enough for `least` bytes of values and sums."""
    besides -= ALLOWED if memory is None else 0
    left = memory - resident_bytes()[0] if memory is not None else (budget or plan_memory(dataset)).batches - beside
    if left <= besides:
        raise BudgetError(
            f"{format_bytes(max(0, left))} of memory are left for {what}, whose buffers alone take "
            f"{format_bytes(besides)}: give at least {format_bytes(besides - left + least + _VARIES)} more"
        )
    return left - besides


def least_bytes(graph: Graph, shape: ModelShape, share: int = 1) -> int:
    """Bytes for values and sums with which there is a plan of a pass. share: 1/share of them is for ranges of nodes whose
    sources are gathered."""
    gathering = [layer for layer in shape.layers if layer.kind is None]
    hub = hub_of(graph) if gathering and graph.num_nodes else None
    ranges = 0 if hub is None else GATHERED * max(gathered_bytes(graph, layer, hub, hub + 1) for layer in gathering)
    return max(least_sums(shape), share * ranges)


def check_hub(graph: Graph, shape: ModelShape, memory: int, share: int = 1, kind: str = "memory") -> None:
    """Raise BudgetError, naming the node, where one has too many in-edges for a layer that gathers. memory: bytes for two
    ranges of nodes, see `gather_ranges`, 1/share of those that are asked for; kind: what they are called."""
    gathering = [layer for layer in shape.layers if layer.kind is None]
    if not gathering or not graph.num_nodes:
        return
    hub = hub_of(graph)
    room, need = memory // GATHERED, max(gathered_bytes(graph, layer, hub, hub + 1) for layer in gathering)
    edges = int(graph.indptr[hub + 1] - graph.indptr[hub])
    if need > room:
        raise BudgetError(
            f"the {edges:,} in-edges of node {hub} take {format_bytes(need)} of {kind} in a layer that needs the rows, and "
            f"{format_bytes(room)} are there: give {format_bytes(share * GATHERED * (need - room))} more"
        )


def hub_of(graph: Graph) -> int:
    """The node with the most in-edges, of a graph that has any nodes."""
    starts = range(0, graph.num_nodes, _DEGREES_AT_ONCE)
    hubs = [first + int(np.diff(graph.indptr[first : first + _DEGREES_AT_ONCE + 1]).argmax()) for first in starts]
    return max(hubs, key=lambda node: int(graph.indptr[node + 1] - graph.indptr[node]))


def gathered_bytes(graph: Graph, layer: LayerShape, first: int, stop: int) -> int:
    """Bytes of destinations first:stop, their sources' rows and their edges."""
    edges, own = int(graph.indptr[stop] - graph.indptr[first]), stop - first
    return min(edges + own, graph.num_nodes) * layer.source_bytes + own * layer.itemsize * layer.out + edges * layer.edge_bytes


def gather_ranges(
    graph: Graph, layer: LayerShape, memory: int, start: int, stop: int | None = None
) -> Iterator[tuple[int, int]]:
    """Ranges (first, stop) of destinations from `start` on, up to `stop` (by default the last); two of them, with sources' rows
    and edges, fit `memory` bytes, but for a node that does not fit alone (see `check_hub`)."""
    first, most, room = start, graph.num_nodes if stop is None else stop, memory // GATHERED
    while first < most:
        low, high = first + 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if gathered_bytes(graph, layer, first, middle) <= room else (low, middle - 1)
        yield first, low
        first = low
