"""GraphSAGE's layers in one autograd function, in kernels that threads share (`ooc.runtime.shared_work`).

One by one, the layers of a small batch take as long in Python, autograd and single-threaded passes over memory as in products.
Here the forward pass of all layers is one call, and so is the backward pass. A piece sums up the neighbors of some rows,
multiplies them and applies ReLU and dropout while they are in a core's cache. The bits, and what is saved for the backward
pass, are those of the layers one by one (`ooc.models.memory_efficient`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as all_modules
from torch_geometric.nn.dense import Linear

from ooc.graph import bag_sum
from ooc.graph.aggregation import FirstLayerAggregates
from ooc.graph.blocks import Block
from ooc.graph.shared_edges import edges_by_source
from ooc.models.convs import BlockSAGEConv, made_once, mean_share, narrow_first
from ooc.models.dropout import level_of, next_draw
from ooc.models.kept_sums import sums_are_watched
from ooc.models.memory_efficient import Relu, memory_efficient_here
from ooc.models.products import (
    ROWS_AT_ONCE,
    WeightGradients,
    by_onednn,
    numbers_of_sums,
    plain,
    share_all,
    sums_way,
    weight_gradients,
)
from ooc.runtime import onednn
from ooc.runtime.product_kernels import BLOCKS_BY_ONEDNN, BY_MKL, COLUMN_MAJOR, ROW_MAJOR, here
from ooc.runtime.row_kernels import (
    AFTER,
    CUT,
    DROPPED,
    GIVEN,
    INDEX,
    KEY,
    MASK,
    MASK_SCALE,
    NODES,
    OUT,
    OUT_WIDTH,
    OWN,
    POINTERS,
    RANGES,
    RELU,
    RELU_DROPOUT,
    ROWS,
    SUMS,
    VALUES,
    WAY,
    WIDTH,
)
from ooc.runtime.shared_work import Number, Work
from ooc.stores.jit import kernel

Phases = list[list[Work]]
Call = list[Number]
Numbers = dict[int, Number]
ROWS_OF_SUMS = 128
"""of a piece that only sums up"""
_CALLED = {"forward", "finished", "convolved"}
MOST_LAYERS = 3
"""that run as one: what the pass keeps at once, sums of all layers and their edges by source, would grow with more"""


@dataclass(frozen=True)
class Dropping:
    """Dropout of a layer's output. key: of the draw; level: see `level_of`; nodes: int64[n], the positions of rows."""

    key: int
    level: int
    nodes: Tensor


@dataclass
class SageRows:
    """The rows of one layer. size: of the output, [n, g]; width: of the input.

    neighbor, own: [n, width], the sums over neighbors and the own rows; given where aggregates are loaded, else made of `value`
    [e] and the edges. cut: bool[n, g], which numbers of the output ReLU and dropout set to 0; None without ReLU, of no number
    where no gradient is wanted.
    """

    size: tuple[int, int]
    width: int
    block: Block
    neighbor: Tensor
    own: Tensor
    value: Tensor | None
    cut: Tensor | None = None
    dropping: Dropping | None = None

    @property
    def level(self) -> int:
        return 0 if self.dropping is None else self.dropping.level

    def way(self) -> int:
        """By which its rows are multiplied, forward."""
        return BLOCKS_BY_ONEDNN if by_onednn(self.size[0], self.width, self.size[1]) else BY_MKL

    def way_back(self, width: int) -> int:
        """By which gradients are multiplied that are as wide as the output, to so many columns."""
        return BLOCKS_BY_ONEDNN if by_onednn(*self.size, width) else BY_MKL

    def way_of_sums(self) -> int | None:
        """By which gradients of weights are added up; None where `weight_gradients` makes them."""
        return sums_way(*self.size, [self.width] * 2)

    def numbers_of_sums(self) -> int:
        """How many numbers of memory these gradients need."""
        way = self.way_of_sums()
        return 0 if way is None else numbers_of_sums(*self.size, [self.width] * 2, way)


def runs_as_one(layers: Sequence[Any], x: Any, blocks: Sequence[Any]) -> bool:
    """Whether `sage_stack` computes what these layers compute of x, and nobody looks at what is in between.

    layers: of `ooc.models.layers.Layer` itself.
    """
    if torch.compiler.is_compiling() or not here():
        return False
    if not (0 < len(layers) <= MOST_LAYERS and all(map(_is_plain, layers)) and not _watched(layers)):
        return False
    *inner, last = (each.activation for each in layers)
    if not (all(type(each) is Relu for each in inner) and type(last) is nn.Identity and _takes(layers, x)):
        return False
    sizes = [block.num_dst for block in blocks]
    convs = [each.conv for each in layers]
    if min(*sizes, *(min(conv.in_channels, conv.out_channels) for conv in convs)) < 2:
        return False  # torch's product of one row or column has other bits
    if any(block.num_src != n for block, n in zip(blocks[1:], sizes, strict=False)):
        return False
    if any(conv.in_channels != below.out_channels for conv, below in zip(convs[1:], convs, strict=False)):
        return False
    if len({id(weight) for conv in convs for weight in _weights(conv)}) < 3 * len(convs):
        return False  # autograd adds up gradients of a layer that comes twice in an order of its own
    first = 1 if isinstance(x, FirstLayerAggregates) else 0
    if any(_otherwise(block, conv) for block, conv in zip(blocks[first:], convs[first:], strict=True)):
        return False
    if not torch.is_grad_enabled():
        return True
    if any(sums_way(n, conv.out_channels, [conv.in_channels]) is None for n, conv in zip(sizes[:-1], convs, strict=False)):
        return False
    return all(p.requires_grad for conv in convs for p in _weights(conv))


def _weights(conv: BlockSAGEConv) -> tuple[Tensor, Tensor, Tensor]:
    return conv.lin_l.weight, conv.lin_l.bias, conv.lin_r.weight


def _is_plain(layer: Any) -> bool:
    """Whether a layer is a convolution of GraphSAGE and an activation alone, of parameters that kernels know."""
    if type(layer.conv) is not BlockSAGEConv or type(layer.norm) is not nn.Identity or layer.residual or layer.mlp is not None:
        return False
    conv = layer.conv
    if not type(conv.lin_l) is type(conv.lin_r) is Linear:  # an adapter in its place has a forward of its own
        return False
    weights = _weights(conv)
    wide, long = (conv.out_channels, conv.in_channels), (conv.out_channels,)
    shapes = [each.shape for each in weights] == [wide, long, wide]
    return shapes and all(type(each) is nn.Parameter and plain(each) for each in weights)


def _watched(layers: Sequence[nn.Module]) -> bool:
    """Whether hooks or measurements see the modules or the sums of layers."""
    of_all = (
        all_modules._global_forward_hooks,
        all_modules._global_forward_pre_hooks,
        all_modules._global_backward_hooks,
        all_modules._global_backward_pre_hooks,
    )
    return any(of_all) or sums_are_watched() or any(map(_has_hooks, layers))


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module or one within has hooks, or functions of its own in place of those of its class."""
    if not _CALLED.isdisjoint(vars(module)):
        return True
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return any(_has_hooks(each) for each in module._modules.values() if each is not None)


def _takes(layers: Sequence[Any], x: Any) -> bool:
    """Whether kernels can read the input, no gradient is wanted of it, and nothing of it is dropped."""
    aggregates = isinstance(x, FirstLayerAggregates)
    if layers[0].dropout and layers[0].training and not aggregates:
        return False
    given = x if aggregates else (x,)
    known = all(type(each) is Tensor and plain(each) and not each.requires_grad for each in given)
    return known and memory_efficient_here(given[0]) and given[0].size(1) == layers[0].conv.in_channels


def _otherwise(block: Block, conv: BlockSAGEConv) -> bool:
    """Whether a layer is computed in another way than by sums of plain edges before the products."""
    known = all(each.is_cpu and each.dtype is torch.int64 and each.stride(-1) == 1 for each in (block.edge_index, block.indptr))
    if not known or (block.share is not None and not plain(block.share)):
        return True
    if block.indptr.size(0) != block.num_dst + 1:
        return True
    if block.share is not None and block.share.size(0) != block.edge_index.size(1):
        return True
    if not _are_edges(block.edge_index[0].numpy(), block.indptr.numpy(), block.num_src, bag_sum.HUB_EDGES):
        return True
    return narrow_first(block, conv.in_channels, conv.out_channels)


@kernel
def _are_edges(index: NDArray[np.int64], indptr: NDArray[np.int64], size: int, many: int) -> bool:
    """Whether all indices are row numbers below `size`, the pointers ascend from 0 to the number of indices, and no destination
    has `many` edges or more."""
    if indptr[0] != 0 or indptr[-1] != len(index):
        return False
    for i in range(len(indptr) - 1):
        if not 0 <= indptr[i + 1] - indptr[i] < many:
            return False
    least, most = 0, -1
    for i in range(len(index)):
        least, most = min(least, index[i]), max(most, index[i])
    return least >= 0 and most < size


def _floats(*size: int) -> Tensor:
    """Memory for float32 that kernels have the address of, whatever torch's defaults are."""
    return torch.empty(size, dtype=torch.float32, device="cpu")


def sage_stack(
    layers: Sequence[Any], x: Tensor | FirstLayerAggregates, blocks: Sequence[Block], ahead: Sequence[float]
) -> Tensor:
    """All layers on their blocks, where `runs_as_one`: the rows of the seeds, [num_dst, out_channels].

    Args:
        layers: GraphSAGE's, with ReLU between them.
        x: Rows [num_src, f], or the first layer's aggregates.
        blocks: One for each layer, input side first.
        ahead: Dropout of each layer's output; 0 for none.

    >>> sage_stack(model.layers, batch.x, batch.blocks, [0.5, 0.0]).shape
    torch.Size([1024, 32])
    """
    rows = [
        _rows_of(x if i == 0 else None, layer.conv, block) for i, (layer, block) in enumerate(zip(layers, blocks, strict=True))
    ]
    for each, p in zip(rows[:-1], ahead, strict=False):
        each.cut = torch.empty(each.size if p or torch.is_grad_enabled() else 0, dtype=torch.bool, device="cpu")
        if p:
            key, nodes = next_draw(each.cut, "sources")
            nodes = np.arange(each.size[0]) if nodes is None else np.ascontiguousarray(nodes, np.int64)
            assert len(nodes) == each.size[0], "every row has a position"
            each.dropping = Dropping(key, level_of(p), torch.from_numpy(nodes))
    weights = [weight for layer in layers for weight in _weights(layer.conv)]
    out: Tensor = _SageStack.apply(rows, x, *weights)  # type: ignore[no-untyped-call]
    return out


def _rows_of(x: Tensor | FirstLayerAggregates | None, conv: BlockSAGEConv, block: Block) -> SageRows:
    size, width = (block.num_dst, conv.out_channels), conv.in_channels
    if isinstance(x, FirstLayerAggregates):
        return SageRows(size, width, block, x.neighbor, x.self_row, None)
    value = block.share
    if value is None:
        value = made_once(block, ("mean", torch.float32), partial(mean_share, block, torch.float32))
    neighbor, own = _floats(size[0], width), _floats(size[0], width)
    return SageRows(size, width, block, neighbor, own, value)


class _SageStack(torch.autograd.Function):
    """See `sage_stack`; its weights are lin_l's, its bias and lin_r's of each layer."""

    @staticmethod
    def forward(ctx: Any, rows: list[SageRows], x: Tensor | FirstLayerAggregates, *weights: Tensor) -> Tensor:
        out, hidden = _floats(*rows[-1].size), _in_turn([each.size for each in rows[:-1]])
        share_all(_forward(rows, x, weights, [*hidden, out]))
        ctx.rows = [SageRows(each.size, each.width, each.block, *_UNSAVED, None, each.dropping) for each in rows]
        saved = [tensor for each in rows for tensor in (each.neighbor, each.own, each.value, each.cut)]
        ctx.save_for_backward(*saved, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = 4 * len(ctx.rows)
        saved = [_as_saved(each) for each in ctx.saved_tensors]
        rows = [
            replace(each, neighbor=saved[at], own=saved[at + 1], value=saved[at + 2], cut=saved[at + 3])
            for each, at in zip(ctx.rows, range(0, count, 4), strict=True)
        ]
        return None, None, *_gradients(rows, grad, saved[count:])


def _as_saved(tensor: Tensor | None) -> Any:
    """What autograd gives back, as kernels need it: hooks of saved tensors may return it in another layout or type."""
    if tensor is None or tensor.dtype is torch.bool:
        return tensor if tensor is None else tensor.contiguous()
    return tensor.to("cpu", torch.float32).contiguous()


_NONE = torch.empty(0, dtype=torch.float32, device="cpu")
_UNSAVED = (_NONE, _NONE, None)


def _call(out: Tensor, rows: Tensor, weight: Tensor, turned: bool, bias: Tensor | None = None, add: bool = False) -> Call:
    """The call for out = rows @ weight.T, or rows @ weight where not turned, plus bias or what is there."""
    (n, inner), columns = rows.shape, out.size(1)
    layout, leading = (COLUMN_MAJOR, inner) if turned else (ROW_MAJOR, columns)
    places = weight, leading, rows, inner, out, columns
    return [layout, ROW_MAJOR, columns, n, inner, *places, int(add), 0 if bias is None else bias]


def _in_ranges(n: int, way: int, calls: list[Call]) -> Work:
    """Products of n rows."""
    ranges = -(-n // (onednn.ROWS if way == BLOCKS_BY_ONEDNN else ROWS_AT_ONCE))
    return Work(ranges, {RANGES: ranges, ROWS: n, WAY: way}, calls)


def _also(work: Work, numbers: Numbers) -> Work:
    return work._replace(numbers={**work.numbers, **numbers})


def _sums(index: Tensor, pointers: Tensor, value: Tensor, given: Tensor, sums: Tensor, own: Tensor | None = None) -> Numbers:
    """Sums of rows before products; see `ooc.runtime.row_kernels`."""
    of_own: Number = 0 if own is None else own
    return {INDEX: index, POINTERS: pointers, VALUES: value, GIVEN: given, SUMS: sums, WIDTH: given.size(1), OWN: of_own}


def _forward(
    rows: list[SageRows], x: Tensor | FirstLayerAggregates, weights: Sequence[Tensor], outs: Sequence[Tensor]
) -> Phases:
    """The phases of the forward pass, which set each layer's output, and sums, own rows and cuts of `rows`."""
    phases, given = Phases(), x
    for i, (each, to) in enumerate(zip(rows, outs, strict=True)):
        of_neighbor, bias, of_own = weights[3 * i : 3 * i + 3]
        calls = [_call(to, each.neighbor, of_neighbor, True, bias), _call(to, each.own, of_own, True, add=True)]
        work = _in_ranges(each.size[0], each.way(), calls)
        if each.value is not None:
            assert isinstance(given, Tensor)
            sums = _sums(each.block.edge_index[0], each.block.indptr, each.value, given, each.neighbor, each.own)
            if each.way() == BY_MKL:
                work = _also(work, sums)
            else:  # oneDNN's last block begins with rows that another piece sums up
                phases.append([_only(each.size[0], sums)])
        phases.append([_also(work, _behind(each, to))])
        given = to
    return phases


def _in_turn(sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Matrices, of which only two that follow one another are in use at once."""
    memory = [_floats(max((n * g for n, g in sizes[first::2]), default=0)) for first in (0, 1)]
    return [memory[i % 2][: n * g].view(n, g) for i, (n, g) in enumerate(sizes)]


def _only(n: int, numbers: Numbers) -> Work:
    """Work on n rows without products."""
    ranges = max(1, n // ROWS_OF_SUMS)
    return Work(ranges, {RANGES: ranges, ROWS: n, **numbers})


def _behind(rows: SageRows, out: Tensor) -> Numbers:
    """What is done with a layer's output."""
    if rows.cut is None:
        return {}
    places: Numbers = {OUT: out, OUT_WIDTH: out.size(1), CUT: rows.cut if len(rows.cut) else 0}
    if rows.dropping is None:
        return {AFTER: RELU, **places}
    dropping = rows.dropping
    return {AFTER: RELU_DROPOUT, **places, KEY: dropping.key, DROPPED: dropping.level, NODES: dropping.nodes}


def _gradients(rows: list[SageRows], grad: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of all weights, in their order."""
    last, found = len(rows) - 1, dict[int, list[Tensor]]()
    if rows[last].way_of_sums() is None or not plain(grad):
        found[last] = weight_gradients(grad, (rows[last].neighbor, rows[last].own))
    grads = [*_in_turn([below.size for below in rows[:-1]][::-1])[::-1], grad.contiguous()]
    of_sums = _floats(max(each.numbers_of_sums() for each in rows))
    to_neighbor = _floats(max((each.size[0] * each.width for each in rows[1:]), default=0))
    phases = Phases()
    for i in range(last, -1, -1):
        first, second = list[Work](), list[Work]()
        if i not in found:
            way = rows[i].way_of_sums()
            assert way is not None
            found[i], (first, second) = WeightGradients.of(grads[i], (rows[i].neighbor, rows[i].own), way, of_sums)
        if i > 0:
            block, below = rows[i].block, grads[i - 1]
            edges = edges_by_source(block.edge_index, len(below), rows[i].value, block.shared)
            of_layer = weights[3 * i : 3 * i + 3]
            multiplied, summed = _input_gradients(rows[i], rows[i - 1], grads[i], below, of_layer, edges, to_neighbor)
            first, second = [*first, multiplied], [*summed, *second]
        phases += [each for each in (first, second) if each]  # the next layer's take the same memory
    if phases:
        share_all(phases)
    return [found[i][at] for i in range(len(rows)) for at in (0, 2, 1)]


def _input_gradients(
    rows: SageRows,
    below: SageRows,
    grad: Tensor,
    out: Tensor,
    weights: Sequence[Tensor],
    edges: tuple[Tensor, Tensor, Tensor | None],
    memory: Tensor,
) -> tuple[Work, list[Work]]:
    """(work that multiplies gradients for sums over neighbors, works that set `out` to gradients of the layer below, before its
    ReLU). edges: of `edges_by_source`; memory: to work in."""
    of_neighbor, _, of_own = weights
    (n, _), way, (pointers, target, value) = rows.size, rows.way_back(rows.width), edges
    assert value is not None
    assert below.cut is not None
    to_neighbor = memory[: n * rows.width].view(n, rows.width)
    multiplied = _in_ranges(n, way, [_call(to_neighbor, grad, of_neighbor, False)])
    behind: Numbers = {AFTER: MASK_SCALE if below.level else MASK, OUT_WIDTH: rows.width, DROPPED: below.level}
    works = []
    for first, stop in ((0, n), (n, len(out))):
        if first == stop:
            continue
        part, cut = out[first:stop], below.cut[first:stop]
        numbers = _sums(target, pointers[first:], value, to_neighbor, part) | behind
        numbers |= {OUT: part, CUT: cut}
        if first == 0:
            works.append(_also(_in_ranges(n, way, [_call(part, grad, of_own, False, add=True)]), numbers))
        else:
            works.append(_only(len(part), numbers))
    return multiplied, works
