"""Models of event streams: rows for the nodes that a batch of an `EventLoader` asks about, each at its time.

TGN (Rossi et al., 2020, in the form of PyG's TGNMemory and its example), TGAT (Xu et al., ICLR 2020) and GraphMixer (Cong et
al., ICLR 2023). What a model knows of the past is in the batch: the events drawn for each query, and with TGN the memory.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv

from ooc.models.user import make_module
from ooc.temporal.node_memory import BatchMemory, flat
from stores.errors import ConfigError

ModelName = Literal["tgn", "tgat", "graphmixer"]


class Sizes(NamedTuple):
    """Widths: of node features (0: none), of an event's columns together, and of what the model keeps."""

    features: int
    msg: int
    hidden: int
    time: int
    memory: int = 0


class UpdatedMemory(NamedTuple):
    """Memory rows [n, d] and times [n] of a batch's nodes, their last events taken up."""

    memory: Tensor
    time: Tensor


class TimeEncoder(nn.Module):
    """cos(t w + b) for times [n]: [n, width]. w begins with periods from 1 to 10^9 (as GraphMixer's, which stay so).

    seconds: in a unit of t, so that data mean the same in whatever unit a store keeps their times.
    """

    def __init__(self, width: int, learned: bool = True) -> None:
        super().__init__()
        self.seconds = 1.0
        self.lin = nn.Linear(1, width)
        with torch.no_grad():
            self.lin.weight.copy_(10 ** -torch.linspace(0, 9, width)[:, None])
            self.lin.bias.zero_()
        self.requires_grad_(learned)

    def forward(self, t: Tensor) -> Tensor:
        """[n] of any type -> [n, width]."""
        encoded: Tensor = self.lin(t.to(self.lin.weight.dtype).mul(self.seconds).view(-1, 1)).cos()
        return encoded


class MemoryCell(nn.Module):
    """How a node's row takes up its last event: TGN's identity message, of the last event alone, into a GRU.

    The same function, by the same names of parameters, as PyG's TGNMemory with IdentityMessage and LastAggregator in training;
    it is used in evaluation too (as in the authors' own code), where PyG's takes an event up one batch sooner.
    """

    def __init__(self, msg: int, width: int, time: int) -> None:
        super().__init__()
        self.time_enc = TimeEncoder(time)
        self.gru = nn.GRUCell(2 * width + msg + time, width)

    def forward(self, held: BatchMemory) -> UpdatedMemory:
        """The rows of the batch's nodes with their last events taken up, and the times of these."""
        encoded = self.time_enc(held.time - held.updated)
        message = torch.cat([held.memory, held.other, held.msg, encoded], dim=1)
        memory = self.gru(message * held.known[:, None], held.memory)
        return UpdatedMemory(memory, held.time)


class EventModel(nn.Module):
    """What models of event streams have in common: the events' columns that they are given, by name.

    raw: take their values as they are; else asinh of them. That is nearly the value itself where it is small, and tames the
    long tails of what people store (amounts, distances) without statistics, which would have to know the future.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        super().__init__()
        self.columns, self.raw = columns, False

    def tamed(self, values: Tensor) -> Tensor:
        """What the model is told of values."""
        return values if self.raw else values.asinh()

    def drawn(self, batch: Any, dtype: torch.dtype) -> list[Tensor]:
        """The drawn events' columns, [e, width] each."""
        return [self.tamed(flat(batch[f"edge_{name}"]).to(dtype)) for name in self.columns]


class TGN(EventModel):
    """Attention of a node over its latest events, on the memory of both ends, and on node features where there are some.

    ages: tell how long ago, for whoever asks, each drawn event was, as in the paper, and the asking node's last one that its
    memory knows; without, it is the function of PyG's example, where an event is as old as it is to its other end's last one.
    """

    def __init__(self, sizes: Sizes, columns: tuple[str, ...], heads: int = 2, dropout: float = 0.1, ages: bool = True) -> None:
        super().__init__(columns)
        self.memory = MemoryCell(sizes.msg, sizes.memory, sizes.time)
        self.ages = TimeEncoder(sizes.time) if ages else None
        width = sizes.memory + sizes.features
        widths = width, width + ages * sizes.time
        self.conv = TransformerConv(
            widths, sizes.hidden // heads, heads=heads, dropout=dropout, edge_dim=sizes.msg + (1 + ages) * sizes.time
        )

    def forward(self, batch: Any, held: BatchMemory | None) -> tuple[Tensor, UpdatedMemory | None]:
        """([queries, hidden], the nodes' new memory), of a batch of one hop."""
        assert held is not None, "TGN has a memory"
        updated = self.memory(held._replace(msg=self.tamed(held.msg)))
        rows = updated.memory if "x" not in batch else torch.cat([updated.memory, batch.x.to(updated.memory.dtype)], dim=1)
        (source, target), count = batch.edge_index, batch.num_sampled_nodes[0]
        node, asking, time = batch.entry[source], batch.entry[:count], batch.entry_t
        past = self.memory.time_enc(updated.time[node] - time[source])
        edges, asked = [past, *self.drawn(batch, past.dtype)], rows[asking]
        if self.ages is not None:
            edges.append(self.ages(time[target] - time[source]))
            asked = torch.cat([asked, self.ages(time[:count] - updated.time[asking])], dim=1)
        found = self.conv((rows, asked), torch.stack([node, target]), torch.cat(edges, dim=1))
        return found[batch.query], updated


class TGAT(EventModel):
    """Attention over the events of a node's past, a layer a hop; without node features it begins with one row for all nodes."""

    def __init__(self, sizes: Sizes, columns: tuple[str, ...], layers: int = 2, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__(columns)
        self.time_enc = TimeEncoder(sizes.time)
        self.encoder = nn.Linear(sizes.features, sizes.hidden) if sizes.features else None
        self.start = None if sizes.features else nn.Parameter(torch.zeros(sizes.hidden))
        self.convs = nn.ModuleList(
            TransformerConv(sizes.hidden, sizes.hidden // heads, heads=heads, dropout=dropout, edge_dim=sizes.msg + sizes.time)
            for _ in range(layers)
        )

    def forward(self, batch: Any, held: BatchMemory | None = None) -> tuple[Tensor, UpdatedMemory | None]:
        """([queries, hidden], None), of a batch with as many hops as there are layers."""
        source, target = batch.edge_index
        past = self.time_enc(batch.entry_t[target] - batch.entry_t[source])
        edges = torch.cat([past, *self.drawn(batch, past.dtype)], dim=1)
        if self.encoder is None:
            assert self.start is not None
            rows = self.start.expand(len(batch.entry), -1)
        else:
            rows = self.encoder(batch.x.to(past.dtype))[batch.entry]
        for layer, conv in enumerate(self.convs):
            hops = len(self.convs) - layer
            count, nodes = sum(batch.num_sampled_edges[:hops]), sum(batch.num_sampled_nodes[:hops])
            rows = conv((rows, rows[:nodes]), batch.edge_index[:, :count], edges[:count]).relu()
        return rows[batch.query], None


class Mixer(nn.Module):
    """MLP-Mixer on [n, k, width]: over the k, then over the width (Tolstikhin et al., NeurIPS 2021)."""

    def __init__(self, tokens: int, width: int, dropout: float) -> None:
        super().__init__()

        def mlp(size: int, inner: int) -> nn.Sequential:
            drop = nn.Dropout(dropout)
            return nn.Sequential(nn.Linear(size, inner), nn.GELU(), drop, nn.Linear(inner, size), drop)

        self.token_norm, self.tokens = nn.LayerNorm(width), mlp(tokens, max(1, tokens // 2))
        self.width_norm, self.widths = nn.LayerNorm(width), mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, k, width] -> the same."""
        x = x + self.tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.widths(self.width_norm(x))
        return mixed


class GraphMixer(EventModel):
    """A mixer over a node's k latest events, with fixed encodings of how long ago they were, beside the mean of the features of
    itself and of their other ends, where nodes have features."""

    def __init__(self, sizes: Sizes, columns: tuple[str, ...], latest: int, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__(columns)
        self.latest = latest
        self.time_enc = TimeEncoder(sizes.time, learned=False)
        self.links = nn.Linear(sizes.msg + sizes.time, sizes.hidden)
        self.mixers = nn.Sequential(*(Mixer(latest, sizes.hidden, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.out = nn.Linear(sizes.hidden + sizes.features, sizes.hidden)

    def forward(self, batch: Any, held: BatchMemory | None = None) -> tuple[Tensor, UpdatedMemory | None]:
        """([queries, hidden], None), of a batch of one hop with at most `latest` events a query."""
        source, target = batch.edge_index
        asked = batch.num_sampled_nodes[0]
        past = self.time_enc(batch.entry_t[target] - batch.entry_t[source])
        links = self.links(torch.cat([past, *self.drawn(batch, past.dtype)], dim=1))
        count = torch.bincount(target, minlength=asked)
        place = torch.arange(len(target), device=target.device) - (count.cumsum(0) - count)[target]
        tokens = links.new_zeros((asked * self.latest, links.size(1)))
        tokens = tokens.index_copy(0, target * self.latest + place, links)
        rows = self.norm(self.mixers(tokens.view(asked, self.latest, -1))).mean(1)
        if "x" in batch:
            own = batch.x.to(rows.dtype)[batch.entry]
            total = own.new_zeros((asked, own.size(1))).index_add(0, target, own[source])
            rows = torch.cat([rows, own[:asked] + total / count.clamp(min=1)[:, None]], dim=1)
        return self.out(rows)[batch.query], None


class OwnModel(nn.Module):
    """A class of the user's own: `forward(batch)` -> rows [len(batch.query), hidden_channels]; it has no node memory.

    batch: what `EventLoader` gives; batch.query: which entries are its sources, destinations and negatives. The class is given
    what its constructor names of in_channels (of batch.x; 0: there is none), edge_channels (of the columns together), columns,
    hidden_channels, out_channels (the same), num_layers (hops), num_neighbors, time_dim, heads, dropout, and seconds (in a unit
    of the events' times). Raises ConfigError for a forward that cannot be called so, and rows of another shape.

    >>> OwnModel("mine.nets:Net", {"in_channels": 16, "hidden_channels": 100})
    """

    def __init__(
        self, name: str, offered: Mapping[str, Any], required: Mapping[str, Any] | None = None, asked: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.name, self.width = name, int(offered["hidden_channels"])
        self.model = make_module(name, offered, required, asked)
        parameters = inspect.signature(self.model.forward)
        try:
            parameters.bind(None)
        except TypeError:
            raise ConfigError(f"model {name}.forward{parameters} cannot be called: events want forward(batch)") from None

    def forward(self, batch: Any, held: BatchMemory | None = None) -> tuple[Tensor, UpdatedMemory | None]:
        """([queries, hidden], None)."""
        rows, wanted = self.model(batch), (len(batch.query), self.width)
        found = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        if found != wanted:
            raise ConfigError(f"model {self.name} gives {found}: rows {wanted} are wanted, one for each of batch.query")
        return rows, None


class LinkPredictor(nn.Module):
    """Scores (logits) of links from the rows of their ends, as in PyG's example of TGN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin_src, self.lin_dst = nn.Linear(width, width), nn.Linear(width, width)
        self.lin_final = nn.Linear(width, 1)

    def forward(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(float[k] of the true links, float[k, r] of the negatives); rows: [k (2 + r), width] of the sources, destinations,
        and each negative in turn; count: k."""
        source = self.lin_src(rows[:count])
        others = self.lin_dst(rows[count:]).view(-1, count, rows.size(1))  # destinations, then negatives
        scores = self.lin_final((source + others).relu()).squeeze(-1)
        return scores[0], scores[1:].T


class LinkModel(nn.Module):
    """A model and its decoder: what is trained and saved."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.decoder = model, LinkPredictor(width)

    def forward(self, batch: Any, held: BatchMemory | None = None) -> tuple[Tensor, Tensor, UpdatedMemory | None]:
        """(scores float[k] of the batch's events, float[k, r] of their negatives, the new memory of its nodes)."""
        rows, updated = self.model(batch, held)
        positive, negative = self.decoder(rows, len(batch.src))
        return positive, negative, updated


def build_event_model(
    name: ModelName,
    sizes: Sizes,
    columns: tuple[str, ...],
    *,
    hops: int = 1,
    latest: int = 10,
    heads: int = 2,
    dropout: float = 0.1,
    ages: bool = True,
    raw: bool = False,
    seconds: float = 1.0,
) -> LinkModel:
    """A model of that name with its decoder; hops, latest: of what is drawn for a query; ages: see `TGN`; raw: see
    `EventModel`; seconds: in a unit of the events' times.

    >>> build_event_model("tgat", Sizes(0, 16, hidden=100, time=100), ("msg",), hops=2)
    """
    made: EventModel
    if name == "tgn":
        made = TGN(sizes, columns, heads, dropout, ages)
    elif name == "tgat":
        made = TGAT(sizes, columns, hops, heads, dropout)
    else:
        made = GraphMixer(sizes, columns, latest, dropout=dropout)
    made.raw = raw
    for each in made.modules():
        if isinstance(each, TimeEncoder):
            each.seconds = seconds
    return LinkModel(made, sizes.hidden)
