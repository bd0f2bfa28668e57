"""Models of event streams: rows for the nodes that a batch of an `EventLoader` queries, each at its time.

TGN (Rossi et al., 2020, in the form of PyG's TGNMemory and its example), TGAT (Xu et al., ICLR 2020) and GraphMixer (Cong et
al., ICLR 2023). A batch contains what a model knows of the past: each query's sampled events and, for TGN, the node memory.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv

from ooc.models.dropout import Dropout
from ooc.models.user_models import load_model
from ooc.stores.errors import ConfigError
from ooc.temporal.node_memory import BatchMemory, flat

ModelName = Literal["tgn", "tgat", "graphmixer"]


class Sizes(NamedTuple):
    """Widths of node features (0 for none), of an event's columns together, and of the model's rows."""

    features: int
    msg: int
    hidden: int
    time: int
    memory: int = 0


class TimeEncoder(nn.Module):
    """cos(t w + b) for times [n]: [n, width]. w is initialized with periods from 1 to 10^9, as GraphMixer's fixed ones.

    `seconds` is the number of seconds in a unit of t, which makes models independent of the store's time unit.
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
        encoded: Tensor = self.lin(t.to(self.lin.weight.dtype).mul(self.seconds).view(-1, 1)).cos()
        return encoded


class MemoryCell(nn.Module):
    """Updates a node's row with its last event: TGN's identity message of the last event, into a GRU.

    The same function and parameter names as PyG's TGNMemory with IdentityMessage and LastAggregator in training; also used in
    evaluation (as in the authors' code), where PyG's applies an event one batch earlier.
    """

    def __init__(self, msg: int, width: int, time: int) -> None:
        super().__init__()
        self.time_enc = TimeEncoder(time)
        self.gru = nn.GRUCell(2 * width + msg + time, width)

    def forward(self, memory_rows: BatchMemory) -> Tensor:
        encoded = self.time_enc(memory_rows.time - memory_rows.updated)
        message = torch.cat([memory_rows.memory, memory_rows.other, memory_rows.msg, encoded], dim=1)
        memory: Tensor = self.gru(message * memory_rows.known[:, None], memory_rows.memory)
        return memory


class EventModel(nn.Module):
    """Base class of event stream models; `columns` are the names of the event columns they use.

    `forward(batch, memory_rows)` returns rows [queries, hidden] and, of a model with memory, its new rows. Unless `raw`, column
    values are transformed by asinh, which is close to the identity for small values and limits long tails (amounts, distances)
    without statistics that would need the future.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        super().__init__()
        self.columns, self.raw = columns, False

    def transform(self, values: Tensor) -> Tensor:
        return values if self.raw else values.asinh()

    def event_columns(self, batch: Any, dtype: torch.dtype) -> list[Tensor]:
        """Return the sampled events' columns, [e, width] each."""
        return [self.transform(flat(batch[f"edge_{name}"]).to(dtype)) for name in self.columns]

    def event_rows(self, batch: Any, time_enc: TimeEncoder) -> Tensor:
        """Return the sampled events' ages, encoded, and columns, [e, time + msg]."""
        source, target = batch.edge_index
        past = time_enc(batch.entry_t[target] - batch.entry_t[source])
        return torch.cat([past, *self.event_columns(batch, past.dtype)], dim=1)


class TGN(EventModel):
    """Attention of a node over its latest events, on the memory of both ends and on node features if there are any.

    With `ages` it also uses the time since each sampled event and since the query node's last one, as in the paper; without, it
    is the model of PyG's example.
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

    def forward(self, batch: Any, memory_rows: BatchMemory | None) -> tuple[Tensor, Tensor | None]:
        assert memory_rows is not None, "TGN needs the node memory"
        updated = self.memory(memory_rows._replace(msg=self.transform(memory_rows.msg)))
        rows = updated if "x" not in batch else torch.cat([updated, batch.x.to(updated.dtype)], dim=1)
        (source, target), count = batch.edge_index, batch.num_sampled_nodes[0]
        node, asking, time = batch.entry[source], batch.entry[:count], batch.entry_t
        past = self.memory.time_enc(memory_rows.time[node] - time[source])
        edges, queries = [past, *self.event_columns(batch, past.dtype)], rows.index_select(0, asking)
        if self.ages is not None:
            edges.append(self.ages(time[target] - time[source]))
            queries = torch.cat([queries, self.ages(time[:count] - memory_rows.time[asking])], dim=1)
        out = self.conv((rows, queries), torch.stack([node, target]), torch.cat(edges, dim=1))
        return out.index_select(0, batch.query), updated


class TGAT(EventModel):
    """Attention over the events of a node's past, a hop per layer; without features, all nodes start with one learned row."""

    def __init__(self, sizes: Sizes, columns: tuple[str, ...], layers: int = 2, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__(columns)
        self.time_enc = TimeEncoder(sizes.time)
        self.encoder = nn.Linear(sizes.features, sizes.hidden) if sizes.features else None
        self.start = None if sizes.features else nn.Parameter(torch.zeros(sizes.hidden))
        self.convs = nn.ModuleList(
            TransformerConv(sizes.hidden, sizes.hidden // heads, heads=heads, dropout=dropout, edge_dim=sizes.msg + sizes.time)
            for _ in range(layers)
        )

    def forward(self, batch: Any, memory_rows: BatchMemory | None = None) -> tuple[Tensor, Tensor | None]:
        edges = self.event_rows(batch, self.time_enc)
        if self.encoder is None:
            assert self.start is not None
            rows = self.start.expand(len(batch.entry), -1)
        else:
            rows = self.encoder(batch.x.to(edges.dtype)).index_select(0, batch.entry)
        for layer, conv in enumerate(self.convs):
            hops = len(self.convs) - layer
            count, nodes = sum(batch.num_sampled_edges[:hops]), sum(batch.num_sampled_nodes[:hops])
            rows = conv((rows, rows[:nodes]), batch.edge_index[:, :count], edges[:count]).relu()
        return rows.index_select(0, batch.query), None


class Mixer(nn.Module):
    """MLP-Mixer on [n, k, width]: over the k tokens, then over the width (Tolstikhin et al., NeurIPS 2021)."""

    def __init__(self, tokens: int, width: int, dropout: float) -> None:
        super().__init__()

        def mlp(size: int, inner: int) -> nn.Sequential:
            drop = Dropout(dropout)
            return nn.Sequential(nn.Linear(size, inner), nn.GELU(), drop, nn.Linear(inner, size), drop)

        self.token_norm, self.tokens = nn.LayerNorm(width), mlp(tokens, max(1, tokens // 2))
        self.width_norm, self.widths = nn.LayerNorm(width), mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.widths(self.width_norm(x))
        return mixed


class GraphMixer(EventModel):
    """A mixer over a node's `latest` events of one hop with fixed time encodings, the last event in the last token.

    If nodes have features, it adds the node's own and the mean of those at the other ends of the events.
    """

    def __init__(self, sizes: Sizes, columns: tuple[str, ...], latest: int, dropout: float = 0.1) -> None:
        super().__init__(columns)
        self.latest = latest
        self.time_enc = TimeEncoder(sizes.time, learned=False)
        self.links = nn.Linear(sizes.msg + sizes.time, sizes.hidden)
        self.mixers = nn.Sequential(*(Mixer(latest, sizes.hidden, dropout) for _ in range(2)))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.out = nn.Linear(sizes.hidden + sizes.features, sizes.hidden)

    def forward(self, batch: Any, memory_rows: BatchMemory | None = None) -> tuple[Tensor, Tensor | None]:
        source, target = batch.edge_index
        queries = batch.num_sampled_nodes[0]
        links = self.links(self.event_rows(batch, self.time_enc))
        count = target.new_zeros(queries).index_add_(0, target, torch.ones_like(target))
        position = self.latest + torch.arange(len(target), device=target.device) - count.cumsum(0)[target]
        tokens = links.new_zeros((queries * self.latest, links.size(1)))
        tokens = tokens.index_copy(0, target * self.latest + position, links)
        rows = self.norm(self.mixers(tokens.view(queries, self.latest, -1))).mean(1)
        if "x" in batch:
            own = batch.x.to(rows.dtype)[batch.entry]
            total = own.new_zeros((queries, own.size(1))).index_add(0, target, own[source])
            rows = torch.cat([rows, own[:queries] + total / count.clamp(min=1)[:, None]], dim=1)
        return self.out(rows).index_select(0, batch.query), None


class OwnModel(nn.Module):
    """A user-defined class with `forward(batch)` -> rows [len(batch.query), hidden_channels]; it has no node memory.

    `batch` is an `EventLoader`'s; batch.query are the entries of its sources, destinations and negatives. The constructor
    receives those it declares of in_channels (of batch.x; 0 without it), edge_channels (of all columns), columns,
    hidden_channels, out_channels (the same), num_layers (hops), num_neighbors, time_dim, heads, dropout and seconds (per unit
    of time). Raises ConfigError if forward does not accept a batch or returns another shape.
    """

    def __init__(
        self,
        name: str,
        offered: Mapping[str, Any],
        required: Mapping[str, Any] | None = None,
        requested: Collection[str] = (),
        apart_from: Iterable[Path] = (),
    ) -> None:
        super().__init__()
        self.name, self.width = name, int(offered["hidden_channels"])
        self.model = load_model(name, offered, required, requested, apart_from)
        parameters = inspect.signature(self.model.forward)
        try:
            parameters.bind(None)
        except TypeError:
            raise ConfigError(f"model {name}.forward{parameters} cannot be called: for events, use forward(batch)") from None

    def forward(self, batch: Any, memory_rows: BatchMemory | None = None) -> tuple[Tensor, Tensor | None]:
        rows, expected = self.model(batch), (len(batch.query), self.width)
        shape = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        if shape != expected:
            raise ConfigError(f"model {self.name} returned {shape}: it must return rows {expected}, one per batch.query")
        return rows, None


class LinkPredictor(nn.Module):
    """Logits of links from the rows of their ends, as in PyG's TGN example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin_src, self.lin_dst = nn.Linear(width, width), nn.Linear(width, width)
        self.lin_final = nn.Linear(width, 1)

    def forward(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the logits of the `count` true links [k] and of the negatives [k, r].

        `rows` [k (2 + r), width] are those of the sources, the destinations, and each negative in turn.
        """
        source = self.lin_src(rows[:count])
        others = self.lin_dst(rows[count:]).view(-1, count, rows.size(1))  # destinations, then negatives
        scores = self.lin_final((source + others).relu()).squeeze(-1)
        return scores[0], scores[1:].T


class LinkModel(nn.Module):
    """A model and its decoder; the module that is trained and saved."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.decoder = model, LinkPredictor(width)

    def forward(self, batch: Any, memory_rows: BatchMemory | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits [k] of the batch's events and [k, r] of their negatives, and the nodes' new memory."""
        rows, updated = self.model(batch, memory_rows)
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
    """Build "tgn", "tgat" or "graphmixer" with its decoder.

    `hops` and `latest` are those sampled per query; for `ages` see `TGN`, for `raw` `EventModel`; `seconds` is per time unit.
    """
    model: EventModel
    if name == "tgn":
        model = TGN(sizes, columns, heads, dropout, ages)
    elif name == "tgat":
        model = TGAT(sizes, columns, hops, heads, dropout)
    else:
        model = GraphMixer(sizes, columns, latest, dropout)
    model.raw = raw
    for each in model.modules():
        if isinstance(each, TimeEncoder):
            each.seconds = seconds
    return LinkModel(model, sizes.hidden)
