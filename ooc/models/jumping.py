"""Jumping knowledge (Xu et al., 2018): outputs from the rows behind all layers, not those of the last alone."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn import JumpingKnowledge

from ooc.graph.blocks import Block
from ooc.stores.errors import ConfigError

Jk = Literal["none", "cat", "max", "lstm", "sum"]


class Jump(nn.Module):
    """The rows behind every layer, [n, widths[l]] each, as one: [n, channels].

    Args:
        mode: "cat", "max" or "lstm", by PyG's JumpingKnowledge; or "sum".
        widths: Columns behind each layer, all alike but for "cat".

    Raises:
        ConfigError: If the mode is unknown, or needs rows of one width.

    >>> Jump("cat", [64, 32])([torch.randn(10, 64), torch.randn(10, 32)]).shape
    torch.Size([10, 96])
    """

    def __init__(self, mode: str, widths: Sequence[int]) -> None:
        super().__init__()
        if mode not in ("cat", "max", "lstm", "sum"):
            raise ConfigError(f"jk {mode!r} is unknown: use none, cat, max, lstm or sum")
        if mode != "cat" and len(set(widths)) > 1:
            shown = ", ".join(map(str, widths))
            raise ConfigError(f"jk={mode!r} takes rows of one width, and those of the layers are {shown}: use cat")
        self.mode, self.widths = mode, list(widths)
        self.channels = sum(widths) if mode == "cat" else widths[0]
        self.jump = None if mode == "sum" else JumpingKnowledge(mode, widths[0], len(widths))

    def forward(self, rows: Sequence[Tensor]) -> Tensor:
        out: Tensor = torch.stack(list(rows)).sum(0) if self.jump is None else self.jump(list(rows))
        return out

    def extra_repr(self) -> str:
        return f"{self.mode!r}, widths={self.widths}"


class CarryingLayer(nn.Module):
    """A layer whose rows have those behind the layers before it in further columns, so that a pass over all nodes, which keeps
    one layer's rows, comes to the last layer with all: [h_l, h_1, ..., h_(l-1)].

    Args:
        layer: The layer, x [num_src, width] -> [num_dst, own_columns].
        width: Columns of the rows behind the layer before; 0 for the first layer, whose input is not carried.
        own_columns: Columns of its own rows.
    """

    def __init__(self, layer: nn.Module, width: int, own_columns: int) -> None:
        super().__init__()
        self.layer, self.width, self.own_columns = layer, width, own_columns

    def forward(self, x: Tensor, block: Block) -> Tensor:
        if not self.width:
            out: Tensor = self.layer(x, block)
            return out
        own = x[: block.num_dst]
        h = self.layer(x[:, : self.width].contiguous(), block)
        return torch.cat([h, own[:, self.width :], own[:, : self.width]], dim=1)


class CarriedJump(nn.Module):
    """`Jump`, and the decoder behind it, of the rows of the last `CarryingLayer`."""

    def __init__(self, jump: Jump, decoder: nn.Module) -> None:
        super().__init__()
        self.jump, self.decoder = jump, decoder

    def forward(self, x: Tensor) -> Tensor:
        *first, last = self.jump.widths
        own, *others = torch.split(x, [last, *first], dim=1)
        out: Tensor = self.decoder(self.jump([*others, own]))
        return out


def carrying(layers: Sequence[nn.Module], jump: Jump, decoder: Any) -> tuple[list[nn.Module], nn.Module]:
    """(layers, decoder) that give what a model with these layers, jump and decoder gives."""
    widths = [0, *jump.widths[:-1]]
    carried = [CarryingLayer(*each) for each in zip(layers, widths, jump.widths, strict=True)]
    return list[nn.Module](carried), CarriedJump(jump, decoder)
