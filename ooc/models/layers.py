"""The interface between layers: a model is a list of layers, each mapping a block's source rows to its destination rows.

Dropout, normalization, residual and activation are part of the layer, so the rows between layers are what histories store,
layer-wise passes write and recomputation starts from (the view of GNNAutoScale and DGL). An encoder before the list and a
decoder after it work row by row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice, pairwise, starmap
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch_geometric.nn import BatchNorm

from ooc.graph.aggregation import FirstInput, FirstLayerAggregates
from ooc.graph.blocks import Block, squared
from ooc.graph.shared_edges import SharedEdges
from ooc.models.dropout import Of, dropout
from ooc.models.kept_sums import KeptSums
from ooc.models.memory_efficient import Relu, activated
from ooc.models.recomputation import Given, Recomputation, recomputed
from ooc.models.recomputation import recording_nothing as recording_nothing
from ooc.models.sage_stack import runs_as_one, sage_stack
from ooc.stores.errors import ConfigError, InputError

Norm = Literal["none", "batch", "layer"]


class Layer(nn.Module):
    """dropout -> convolution -> norm -> + residual -> activation -> mlp, on one block.

    `conv` is a Module (x [num_src, in_channels], block) -> [num_dst, out_channels]. `norm` "layer" is of each row by itself,
    "batch" over the rows of the batch. `residual` adds the destination's input row, through a linear map if the widths differ.
    The layer accepts `FirstLayerAggregates` if its convolution has `pre_aggregation` and there is no dropout, and `initial`
    (see `run_layers`) if its convolution has `needs_initial`.

    >>> layer = Layer(BlockGCNConv(128, 256), 128, 256, dropout=0.5, norm="batch", activation=nn.ReLU())
    >>> layer(torch.randn(block.num_src, 128), block).shape
    torch.Size([num_dst, 256])
    """

    def __init__(
        self,
        conv: nn.Module,
        in_channels: int,
        out_channels: int,
        *,
        dropout: float = 0.0,
        norm: Norm = "none",
        residual: bool = False,
        activation: nn.Module | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv = conv
        self.dropout = dropout
        self.norm = make_norm(norm, out_channels)
        self.residual = residual
        same = in_channels == out_channels
        self.skip = nn.Linear(in_channels, out_channels, bias=False) if residual and not same else nn.Identity()
        self.activation = nn.Identity() if activation is None else activation
        self.mlp = mlp

    @property
    def needs_initial(self) -> bool:
        return bool(getattr(self.conv, "needs_initial", False))

    def forward(
        self, x: FirstInput, block: Block, initial: Tensor | None = None, *, dropped: bool = False, drop_next: float = 0.0
    ) -> Tensor:
        """Compute the layer. dropped: the layer before has dropped x; drop_next: see `dropped_ahead`."""
        if not isinstance(x, FirstLayerAggregates) and not dropped:
            x = dropout(x, self.dropout, self.training)
        out = self.convolved(x, block, initial)
        own = x.self_row if isinstance(x, FirstLayerAggregates) else x[: block.num_dst]
        return self.finished(out, own, drop_next=drop_next) if drop_next else self.finished(out, own)

    def convolved(self, x: FirstInput, block: Block, initial: Tensor | None = None) -> Tensor:
        """Apply only the convolution, to rows after dropout: [num_dst, out_channels]."""
        out: Tensor = self.conv(x, block, initial) if self.needs_initial else self.conv(x, block)
        return out

    def finished(
        self, out: Tensor, self_row: Tensor, norm: Callable[[Tensor], Tensor] | None = None, drop_next: float = 0.0
    ) -> Tensor:
        """Apply norm (or the given one), the residual of self_row [num_dst, in_channels], and activation; drop_next: see
        `dropped_ahead`."""
        out = self.norm(out) if norm is None else norm(out)
        if self.residual:
            out = out + self.skip(self_row)
        out = activated(self.activation, out, drop_next)
        return out if self.mlp is None else self.mlp(out)

    def joined(self, neighbor: Tensor, self_row: Tensor, block: Block) -> Tensor:
        """Compute the layer from aggregated rows of the convolution's `narrowed` (after dropout); without a residual."""
        return self.finished(self.conv_joined(neighbor, self_row, block), self_row)

    def conv_joined(self, neighbor: Tensor, self_row: Tensor, block: Block) -> Tensor:
        """The convolution's part of `joined`."""
        assert not self.residual, "a residual needs the input rows"
        conv: Any = self.conv
        out: Tensor = conv.joined(neighbor, self_row, block)
        return out

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, residual={self.residual}"


Layer.forward.drops_ahead = True  # type: ignore[attr-defined]


class DenseLayer(nn.Module):
    """dropout -> linear map -> activation, row by row; the building block of encoders and decoders. of: what rows are of, see
    `ooc.models.dropout`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        dropout: float = 0.0,
        activation: nn.Module | None = None,
        of: Of = "sources",
    ) -> None:
        super().__init__()
        self.dropout, self.of = dropout, of
        self.lin = nn.Linear(in_channels, out_channels)
        self.activation = nn.Identity() if activation is None else activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.lin(dropout(x, self.dropout, self.training, self.of)))
        return out

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


def make_norm(norm: str, channels: int) -> nn.Module:
    """Return the normalization of that name; batch norm is PyG's, which accepts a batch of one row."""
    if norm == "none":
        return nn.Identity()
    if norm == "batch":
        return BatchNorm(channels, allow_single_element=True)
    if norm == "layer":
        return nn.LayerNorm(channels)
    raise ConfigError(f"norm {norm!r} is unknown: use none, batch or layer")


Input = FirstInput | Mapping[str, Tensor]
"""what the first layer takes: rows, their aggregates, or rows by node type"""
Between = Callable[[int, Tensor], Tensor]
"""between(l, out [num_dst, g]) -> x for layer l + 1; not called for the last layer's output"""


def run_layers(
    layers: Sequence[nn.Module] | nn.ModuleList,
    x: Input,
    blocks: Sequence[Any],
    checkpoint: Given = False,
    *,
    encoder: nn.Module | None = None,
    decoder: nn.Module | None = None,
    between: Between | None = None,
    initial: Tensor | None = None,
    jump: nn.Module | None = None,
) -> Any:
    """Run layer l on block l, input side first, and return the rows of the seeds.

    `x` is [blocks[0].num_src, f], or `FirstLayerAggregates` if the first layer accepts them; it is converted to the dtype of
    the parameters. `encoder` and `decoder` are applied to x, and to the last layer's rows, row by row. Layers with
    `needs_initial` also receive the `initial` rows [num_dst, f0] of their destinations, by default x after the encoder.

    With `checkpoint` layers are recomputed in the backward pass: True each of them, "sqrt" in segments, or as a `Recomputation`
    says (see `ooc.models.recomputation`). The result does not change.

    With `jump`, the decoder is given what it makes of the seeds' rows behind all layers (`ooc.models.jumping`).

    Of a heterogeneous graph, x and what a layer returns are {node type: rows}, and blocks are `HeteroBlock`.

    Layers with `square` compute the rows of all nodes of the batch, from all its edges: all run on the first block, however
    many there are, and share a mask of dropout (`ooc.models.reversible`).

    Raises ConfigError if the numbers of layers and blocks differ, or an encoder is given `FirstLayerAggregates`; InputError if
    x does not fit the first block.
    """
    stack, out = LayerStack.of(layers, x, blocks, encoder, decoder, initial, seen=between is not None, jumps=jump is not None)
    seeds = _seeds_of_square(layers, blocks, between)
    out, kept = stack.run(out, _plan(checkpoint, len(layers), between), between)
    out = out if seeds is None else out[:seeds]
    out = out if jump is None else jump(kept)
    return out if decoder is None else decoder(out)


class LayerStack(NamedTuple):
    """The layers of a forward pass, and what they are given besides the rows. jumps: whether the seeds' rows behind each layer
    are wanted; for the others see `run_layers`."""

    layers: Any
    blocks: Sequence[Any]
    initial: Any
    mask: Tensor | None
    ahead: Sequence[float]
    jumps: bool

    @classmethod
    def of(
        cls,
        layers: Any,
        x: Input,
        blocks: Sequence[Any],
        encoder: nn.Module | None = None,
        decoder: nn.Module | None = None,
        initial: Tensor | None = None,
        seen: bool = False,
        jumps: bool = False,
    ) -> tuple[Self, Any]:
        """(the layers, the rows that the first one takes); see `run_layers`. seen: whether rows between layers are."""
        square = bool(len(layers)) and getattr(layers[0], "square", False)
        if square:
            blocks = [squared(blocks[0])._replace(shared=SharedEdges())] * len(layers)
        _check_input(len(layers), x, blocks)
        out = as_input(x, *(part for part in (encoder, *layers, decoder) if part is not None))
        if encoder is not None:
            if isinstance(out, FirstLayerAggregates):
                raise ConfigError("a model with an encoder needs the rows of x: load it without first-layer pre-aggregation")
            out = encoder(out)
        if initial is None:
            initial = out.self_row if isinstance(out, FirstLayerAggregates) else out
        mask = dropout_mask(out, float(getattr(layers[0], "dropout", 0.0)), layers[0].training) if square else None
        ahead = [0.0] * len(layers) if seen or jumps else [*starmap(dropped_ahead, pairwise(layers)), 0.0]
        return cls(layers, blocks, initial, mask, ahead, jumps), out

    def run(self, x: Any, plan: Recomputation, between: Between | None) -> tuple[Any, list[Tensor]]:
        """(the rows behind all layers, with a jump the seeds' rows behind each)."""
        kept: list[Tensor] = []
        if not (plan or between or self.jumps) and self._is_sage() and runs_as_one(self.layers, x, self.blocks):
            return sage_stack(self.layers, x, self.blocks, self.ahead), kept
        for first, stop, again in plan.parts(len(self.layers)):
            if again:

                def run(x: Any, sums: KeptSums, first: int = first, stop: int = stop) -> Any:
                    return self.segment(x, first, stop, sums)

                x, rows = recomputed(run, x, self.layers[first:stop], plan.sums_of((first, stop)))
            else:
                x, rows = self.segment(x, first, stop)
            kept += rows
            if between is not None and stop < len(self.layers):
                x = between(stop - 1, x)
        return x, kept

    def _is_sage(self) -> bool:
        """Whether layers are this module's own, and drop their outputs themselves, as `sage_stack` does."""
        if not all(type(each) is Layer for each in self.layers) or self.mask is not None:
            return False
        dropped = (each.dropout if each.training else 0.0 for each in islice(self.layers, 1, None))
        return all(p == own for p, own in zip(dropped, self.ahead, strict=False))

    def segment(self, x: Any, first: int, stop: int, sums: KeptSums | None = None) -> tuple[Any, list[Tensor]]:
        """`run` for layers first:stop. sums: is told the layer."""
        kept: list[Tensor] = []
        for index in range(first, stop):
            if sums is not None:
                sums.at(index - first)
            x = self.layer(index, x)
            if self.jumps:
                kept.append(own_rows(x, self.blocks[-1].num_dst))
        return x, kept

    def layer(self, index: int, x: Any) -> Any:
        """The rows behind a layer of those before it."""
        layer, block = self.layers[index], self.blocks[index]
        extra = (self.initial[: block.num_dst],) if getattr(layer, "needs_initial", False) else ()
        options: dict[str, Any] = {"drop_next": self.ahead[index]} if self.ahead[index] else {}
        options |= {"dropped": True} if index and self.ahead[index - 1] else {}
        options |= {"mask": self.mask} if self.mask is not None else {}
        return layer(x, block, *extra, **options)


def _plan(checkpoint: Given, layers: int, between: Between | None) -> Recomputation:
    """What is recomputed of so many layers: nothing where nothing is kept."""
    plan = Recomputation.of(checkpoint if torch.is_grad_enabled() else False, layers)
    if between is not None and any(stop - first > 1 for first, stop in plan.segments):
        raise ConfigError("rows between layers are taken out and put in, so segments of several layers cannot be recomputed")
    return plan


def own_rows(x: Tensor, count: int) -> Tensor:
    """The first rows of x, apart from the others, which are freed."""
    return x if len(x) == count else x[:count].clone()


def _seeds_of_square(layers: Any, blocks: Sequence[Any], between: Between | None) -> int | None:
    """How many of the batch's nodes are seeds, where layers compute the rows of all of them; None of other layers."""
    if not (len(layers) and getattr(layers[0], "square", False)):
        return None
    if between is not None:
        raise ConfigError(
            "reversible layers read rows of neighbors that they compute themselves: no histories can stand for them"
        )
    return int(blocks[-1].num_dst)


def dropout_mask(x: Tensor, p: float, training: bool) -> Tensor | None:
    """The factors of dropout of rows x [n, c], for layers that share them: 0 or 1 / (1 - p) each, [n, c]; None for none."""
    return dropout(torch.ones_like(x), p, training) if training and p else None


def dropped_ahead(layer: nn.Module, following: nn.Module) -> float:
    """The dropout of the next layer's input that a layer is to do with its ReLU, in one pass; 0 where it cannot.

    Results do not change. Rows that something else sees between the layers are not dropped yet: see `between` of `run_layers`;
    hooks are such. A subclass that finishes rows in its own way does not know of it.
    """
    one_pass = all(getattr(type(each).forward, "drops_ahead", False) for each in (layer, following))
    own = getattr(type(layer), "finished", Layer.finished) is not Layer.finished
    seen = bool(layer._forward_hooks or following._forward_pre_hooks)
    if (
        own
        or seen
        or getattr(layer, "mlp", None) is not None
        or not (one_pass and isinstance(layer.activation, Relu) and following.training)
    ):
        return 0.0
    return float(getattr(following, "dropout", 0.0))


def _check_input(num_layers: int, x: Input, blocks: Sequence[Any]) -> None:
    """Raise ConfigError or InputError if blocks or x do not fit; see `run_layers`."""
    typed = isinstance(x, Mapping)
    if num_layers != len(blocks):
        square = not typed and all(block.num_src == block.num_dst for block in blocks)  # parts, subgraphs, the whole graph
        advice = f"num_layers={num_layers}" if square else f"one fan-out for each layer, {num_layers} in all"
        raise ConfigError(f"the model has {num_layers} layers but the batch has {len(blocks)} blocks: give {advice}")
    if not isinstance(x, Mapping):
        _check_rows("x", x.size(0), blocks[0].num_src, "batch.n_id")
        return
    for (source, *_), block in blocks[0].blocks.items():
        if source not in x:
            raise InputError(f"x has no rows of node type {source!r}: there are {', '.join(x)}")
        _check_rows(f"x[{source!r}]", x[source].size(0), block.num_src, f"batch[{source!r}].n_id")


def _check_rows(name: str, rows: int, sources: int, nodes: str) -> None:
    if rows != sources:
        raise InputError(f"{name} has {rows} rows but the first block has {sources} sources: pass those of {nodes}")


def run_model(model: Any, x: Input, blocks: Sequence[Any], checkpoint: Given = False, between: Between | None = None) -> Any:
    """Call `run_layers` with the model's `layers`, and its `encoder` and `decoder` if it has them."""
    ends: dict[str, Any] = {name: getattr(model, name, None) for name in ("encoder", "decoder", "jump")}
    return run_layers(model.layers, x, blocks, checkpoint, between=between, **ends)


_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def looks_up(*modules: nn.Module) -> bool:
    """Whether modules have an Embedding, in which integers are looked up."""
    return any(isinstance(part, _LOOKUPS) for module in modules for part in module.modules())


def as_input(x: Any, *modules: nn.Module) -> Any:
    """Convert x to the dtype of the modules' parameters; under autocast, floating x is returned unchanged, as are integers for
    modules with an Embedding to look them up in."""
    if isinstance(x, FirstLayerAggregates):
        neighbor = as_input(x.neighbor, *modules)
        if neighbor is x.neighbor and x.self_row.dtype == neighbor.dtype:  # the parameters are looked for once a step
            return x
        return FirstLayerAggregates(neighbor, as_input(x.self_row, *modules))
    if isinstance(x, Mapping):
        return {name: as_input(rows, *modules) for name, rows in x.items()}
    if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        return x
    if not x.is_floating_point() and looks_up(*modules):
        return x
    return x.to(_dtype_of(modules) or x.dtype)


def _dtype_of(modules: Sequence[nn.Module]) -> torch.dtype | None:
    """The type of the first floating-point parameter, in the order of `Module.parameters`, which takes longer to find it."""
    for module in modules:
        for part in module.modules():
            for parameter in part._parameters.values():
                if parameter is not None and parameter.is_floating_point():
                    return parameter.dtype
    return None


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return torch's autocast context for precision "bf16" or "fp16", and a null context for "fp32"."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode without gradients, and restore the mode of each of its modules afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
