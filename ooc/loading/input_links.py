"""The links to make batches of: what PyG calls `edge_label_index`, with labels and negatives."""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.sampler import NegativeSampling

from ooc.graph.blocks import EDGE_ATTR
from ooc.graph.hetero import EdgeKey
from ooc.loading.link_type import LinkType
from ooc.loading.stored_edge_split import StoredEdgeSplit
from ooc.sampling.disjoint_neighbor import Times
from ooc.sampling.edge_split import PARTS, EdgeSplit, HeldOut
from ooc.sampling.links import AnySeeds, ByTime, EdgeLookup, LinkNegatives, Links, seeds_of_links, typed_seeds
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.node_set import NodeSet

_SMALL = (torch.int8, torch.int16, torch.int32)
"""types of classes in a store; torch's losses take int64"""


@dataclass(frozen=True)
class InputLinks:
    """The links to predict, by position: pairs of nodes that the user gives, or edges of the graph by slot.

    pair: int64[2, k], None for edges; slots: which edges, None for all; part: of a split, what they are called. label: [k, ...]
    of the links, of edges by edge id. number: PyG's `input_id` of a position, None for the position itself. leave_out: whether
    links of a batch carry no messages; split: whose validation and test edges never do. disjoint: whether each link has a tree
    of its own; time, slot_time: until when that reaches, by position or else by slot, None without times. attr: of
    edges by edge id, that batches have of their links.
    """

    edges: EdgeLookup
    of: LinkType
    pair: Ids | None = None
    slots: Members | None = None
    part: str | None = None
    split: EdgeSplit | StoredEdgeSplit | None = None
    label: torch.Tensor | None = None
    number: Ids | None = None
    negatives: LinkNegatives | None = None
    leave_out: bool = True
    disjoint: bool = False
    time: AnyArray | None = None
    slot_time: AnyArray | None = None
    attr: Rows | None = None

    def __len__(self) -> int:
        if self.pair is not None:
            return self.pair.shape[1]
        return self.edges.num_edges if self.slots is None else len(self.slots)

    def ends(self, position: Ids) -> tuple[Ids, Ids]:
        """Sources and destinations, int64[b] each."""
        if self.pair is not None:
            return self.pair[0, position], self.pair[1, position]
        return self.edges.ends(self._slot(position))

    def _slot(self, position: Ids) -> Ids:
        return position if self.slots is None else self.slots[position]

    def times(self, position: Ids) -> AnyArray | None:
        """[b]: the links' times; None without times."""
        if self.time is not None:
            return np.asarray(self.time[self.index(position)])
        return None if self.slot_time is None else np.asarray(self.slot_time[self._slot(position)])

    def index(self, position: Ids) -> Ids:
        """int64[b]: the links' numbers in the input: of edges their edge ids."""
        if self.pair is not None:
            return position
        return self.of.graph.edge_ids(self._slot(position))

    @property
    def most_seeds(self) -> int:
        """Seeds of a link at most: its ends, and those of its negatives."""
        return 2 + (0 if self.negatives is None else 2 * math.ceil(self.negatives.amount))

    @property
    def held_out(self) -> Mapping[EdgeKey, HeldOut]:
        """Edges that carry no messages in any batch, by edge type."""
        return {} if self.split is None else self.split.held_out_of((self.of.key, *self.of.reverses))

    def seeds(self, position: Ids, key: int) -> AnySeeds:
        """The ends of the links at `position` and of their negatives as a batch's seeds; key: of the negatives."""
        src, dst = self.ends(position)
        negatives, time = self.negatives, self.times(position)
        drawn = None if negatives is None else negatives.draw(src, position, key, time)
        mode = None if negatives is None else negatives.mode
        found: AnySeeds
        if self.of.typed or self.disjoint:
            left_out = (self.of.key, *self.of.reverses) if self.leave_out else ()
            found = typed_seeds(self.of.key, src, dst, drawn, mode, left_out, self.disjoint, time)
        else:
            found = seeds_of_links(src, dst, drawn, mode, self.leave_out)
        if self.attr is None or found.links is None:
            return found
        return found._replace(links=replace(found.links, row_bytes=self.attr.row_bytes))

    def input_id(self, position: Ids) -> Ids:
        """int64[b]: PyG's `input_id` of `position`: of the graph's edges the edge id."""
        index = self.index(position)
        return index if self.number is None else self.number[index]

    def labels(self, position: Ids, num_negatives: int) -> torch.Tensor | None:
        """[b + num_negatives, ...]: the links' labels, of negatives 0; None without labels and binary negatives."""
        label = self.label
        if label is not None:
            label = label[torch.from_numpy(self.index(position))]
            label = label.long() if label.dtype in _SMALL else label
        elif self.negatives is None or self.negatives.mode == "triplet":
            return None
        else:
            label = torch.ones(len(position))
        return torch.cat([label, label.new_zeros(num_negatives, *label.shape[1:])])

    def add_to(self, batch: Any, position: Ids, links: Links, num_nodes: Any) -> None:
        """Give a batch PyG's fields of its links; num_nodes: new nodes per hop, of several types by node type."""
        edge = source = target = batch
        if self.of.typed:
            first, _, last = self.of.key
            edge, source, target = batch[self.of.key], batch[first], batch[last]
            source.batch_size, target.batch_size = num_nodes[first][0], num_nodes[last][0]
        else:
            batch.batch_size = num_nodes[0]
        time = self.times(position)
        if self.negatives is not None and self.negatives.mode == "triplet":
            source.src_index, target.dst_pos_index = torch.from_numpy(links.src), torch.from_numpy(links.dst)
            negative = torch.from_numpy(np.ascontiguousarray(links.negative_dst))
            target.dst_neg_index = negative.squeeze(-1)
            source.seed_time = target.seed_time = None if time is None else torch.from_numpy(time)
            return
        ends = [np.concatenate(each) for each in ((links.src, links.negative_src), (links.dst, links.negative_dst))]
        edge.edge_label_index = torch.from_numpy(np.stack(ends))
        edge.edge_label = self.labels(position, len(links.negative_src))  # None is no field of a Data
        if self.attr is not None:
            attr = np.empty((len(position), *self.attr.shape[1:]), self.attr.dtype)
            self.attr.read(self.index(position), attr)
            edge.edge_label_attr = torch.from_numpy(attr)
        if time is not None:
            edge.edge_label_time = torch.from_numpy(np.resize(time, edge.edge_label_index.shape[1]))

    @property
    def is_array(self) -> bool:
        """Whether they were given as pairs."""
        return self.pair is not None

    @functools.cached_property
    def identity(self) -> str:
        """What tells them from other links of the same store."""
        digest = hashlib.blake2b(digest_size=16)
        negatives = self.negatives
        drawn = () if negatives is None else (negatives.mode, negatives.amount, negatives.edges is not None)
        digest.update(repr((self.leave_out, self.part, self.split, *drawn)).encode())
        weights = () if negatives is None else negatives.cumulative
        label = None if self.label is None else self.label.numpy()
        given = (self.pair, self.number, label, *weights)
        for array in given if self.time is None else (*given, self.time):
            digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
        if self.of.typed:
            digest.update(repr(self.of.key).encode())
        return f"links:{digest.hexdigest()}"


def negatives_for(
    of: LinkType,
    edges: EdgeLookup,
    neg_sampling: Any,
    ratio: float | None,
    exact: bool | Literal["possible"],
    pair: Ids | None,
    times: Times | None = None,
) -> LinkNegatives | None:
    """The negatives that a loader's arguments ask for; pair: the links given, which are no exact negatives; times: of nodes,
    which are drawn up to a link's time.

    neg_sampling: None, "binary", "triplet", PyG's `NegativeSampling` or a dict or tuple of its arguments. ratio: PyG's older
    way to ask for binary ones. exact: `exact_negatives`. Raises ConfigError where they do not fit, or where there are no exact
    negatives.
    """
    if ratio:
        if neg_sampling is not None:
            raise ConfigError("neg_sampling_ratio and neg_sampling ask for the same: leave neg_sampling_ratio out")
        neg_sampling = {"mode": "binary", "amount": ratio}
    if neg_sampling is None:
        if exact:
            raise ConfigError("exact_negatives needs negatives: give neg_sampling too, or leave it out")
        return None
    try:
        asked = NegativeSampling.cast(neg_sampling)
        if not math.isfinite(asked.amount):
            raise ValueError(f"the amount must be finite, not {asked.amount}")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"neg_sampling={neg_sampling!r} is invalid: {error}; give 'binary', 'triplet' or dict(mode='binary', amount=1)"
        ) from None
    path, num_nodes, least = of.edges.path, of.target.num_nodes, 2 if of.same_nodes else 1
    if min(num_nodes, of.source.num_nodes) < least:
        raise ConfigError(f"negatives need two nodes, and {path} has {num_nodes}: leave neg_sampling out")
    mode = asked.mode.value
    drawn = [(None if mode == "triplet" else of.source, asked.src_weight, "src"), (of.target, asked.dst_weight, "dst")]
    by_time = [None if nodes is None else _by_time(nodes, times) for nodes, _, _ in drawn]
    sums = [
        None if nodes is None else _cumulative(weight, f"{end}_weight", nodes.num_nodes, early)
        for (nodes, weight, end), early in zip(drawn, by_time, strict=True)
    ]
    if exact not in (True, False, "possible"):
        raise ConfigError(f"exact_negatives={exact!r} is invalid: give True, False or 'possible'")
    if exact is True and edges.are_all():
        raise ConfigError(f"the graph of {path} has all possible edges, so no exact negatives: leave exact_negatives out")
    given = np.empty(0, np.int64) if pair is None or not exact else np.unique(pair[0] * num_nodes + pair[1])
    sources = None if of.same_nodes else of.source.num_nodes
    refused, ends = (edges if exact else None, given), ((sums[0], sums[1]), (by_time[0], by_time[1]))
    return LinkNegatives(mode, asked.amount, num_nodes, ends[0], *refused, sources, ends[1], strict=exact is True)


def _by_time(nodes: NodeSet, times: Times | None) -> ByTime | None:
    """The nodes of a type in order of their times, where they have any."""
    return ByTime.of(times.of_nodes[nodes.name]) if times is not None and nodes.name in times.of_nodes else None


def times_for(
    of: LinkType, times: Times | None, edge_label_time: Any, count: int, given: bool
) -> tuple[AnyArray | None, AnyArray | None]:
    """`edge_label_time` as the loader takes it, by link or edge id, or where there is none the edges' own times by slot.

    times: what `time_attr` names; count: links, given: whether they are pairs and not edges of the graph. Raises ConfigError
    where they do not fit one another.
    """
    if edge_label_time is None and times is None:
        return None, None
    if times is None:
        raise ConfigError("edge_label_time needs time_attr, the name of the times it is compared with")
    if edge_label_time is None:
        if given or of.key not in times.of_edges:
            raise ConfigError("edge_label_time must be given, one for each link: the links have no times of their own")
        return None, times.of_edges[of.key]
    time = np.asarray(edge_label_time.detach().cpu().numpy() if hasattr(edge_label_time, "detach") else edge_label_time)
    if time.shape != (count,) or time.dtype.kind not in "iuf":
        raise ConfigError(f"edge_label_time must be one number for each of {count} links, not {time.dtype}{list(time.shape)}")
    return time, None


def _stored_labels(edges: EdgeSet, negatives: LinkNegatives | None) -> torch.Tensor:
    """The store's labels of edges by edge id."""
    if edges.labels is None:
        raise ConfigError(f"{edges.path} holds no labels of edges: ingest it with `edge_label`, or give one for each link")
    if negatives is not None:
        raise ConfigError(
            "edge_label='y' is of edges, and negatives are none: leave out neg_sampling, or give a label for each link"
        )
    label = torch.from_numpy(np.array(edges.labels))
    return label.float() if edges.task == "multilabel" else label  # torch's losses of several labels take floats


def _cumulative(weight: Any, name: str, num_nodes: int, by_time: ByTime | None) -> AnyArray | None:
    if weight is None:
        return None
    try:
        array = np.asarray(weight, np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.shape != (num_nodes,) or not (np.isfinite(array) & (array >= 0)).all() or not array.sum() > 0:
        raise ConfigError(
            f"{name} must be a number for each of {num_nodes} nodes, finite, 0 or more and not all 0, "
            f"not {array.dtype}{list(array.shape)}"
        )
    return np.cumsum(array if by_time is None else array[by_time.node])


def part_of(of: EdgeSet, edges: EdgeLookup, part: Any, split: Any) -> Members | None:
    """The slots of a part of the split, "train", "val" or "test", or of one of the store's own splits of edges; None where
    `part` names none.

    Raises ConfigError for a part without a split, and another split than an `EdgeSplit` or `StoredEdgeSplit`.
    """
    if not (split is None or isinstance(split, EdgeSplit | StoredEdgeSplit)):
        raise ConfigError(f"edge_split must be an ooc.EdgeSplit or ooc.StoredEdgeSplit, not {type(split).__name__}")
    if not isinstance(part, str):
        return None
    if split is None and part in (there := of.splits):
        return of.members(part)
    if split is None or part not in split.names:
        names = ", ".join(PARTS if split is None else split.names)
        own = f", or one of the store's splits of edges: {', '.join(there)}" if split is None and there else ""
        raise ConfigError(f"edge_label_index={part!r}: give links [2, k], or {names} with an edge_split{own}")
    return split.members(part, edges.pieces(), edges.num_edges)


def pairs_of(of: LinkType, edge_label_index: Any) -> Ids | None:
    """`edge_label_index` as int64[2, k]; None for edges of the graph.

    Ends that are words are the user's own ids (`NodeSet.rows_of`). Raises ConfigError for another form, InputError for an end
    that is no node.
    """
    if edge_label_index is None or isinstance(edge_label_index, str):
        return None
    if isinstance(edge_label_index, torch.Tensor):
        given: NDArray[Any] = edge_label_index.detach().cpu().numpy()
    else:
        given = _two_rows(edge_label_index)
    if given.dtype.kind in "UOT" and given.ndim == 2:
        given = np.stack([nodes.rows_of(list(each)) for nodes, each in zip((of.source, of.target), given, strict=True)])
    if given.ndim != 2 or given.shape[0] != 2 or (given.dtype.kind not in "iu" and given.size):
        raise ConfigError(
            f"edge_label_index must be whole numbers [2, k], sources and destinations, not {given.dtype}{list(given.shape)}"
        )
    pair = np.ascontiguousarray(given, np.int64)
    counts = np.array([[of.source.num_nodes], [of.target.num_nodes]])
    wrong = ((pair < 0) | (pair >= counts)).any(axis=0)
    if wrong.any():
        at, (sources, targets) = int(np.argmax(wrong)), counts[:, 0] - 1
        have = f"nodes 0..{targets}"
        if not of.same_nodes:
            have = f"{of.source.name!r} nodes 0..{sources} and {of.target.name!r} nodes 0..{targets}"
        raise InputError(
            f"link {at} of edge_label_index, from {pair[0, at]} to {pair[1, at]}, is out of range: the store has {have}"
        )
    return pair


def _two_rows(given: Any) -> NDArray[Any]:
    """Sources and destinations as one array [2, k]; empty where they are none."""
    ends = [np.asarray(each) for each in given] if isinstance(given, Sequence | np.ndarray) and len(given) == 2 else []
    return np.array(ends) if len(ends) and ends[0].shape == ends[1].shape else np.empty(0)


def attr_for(of: EdgeSet, wanted: bool, pair: Ids | None, negatives: LinkNegatives | None) -> Rows | None:
    """The feature `edge_attr` of the edges that are links, where it is `wanted`. Raises ConfigError where links have none."""
    if not wanted:
        return None
    if pair is not None or negatives is not None:
        raise ConfigError("edge_label_attr is of edges of the graph alone: leave it out, or links given and negatives")
    return of.features(EDGE_ATTR)


def labels_for(edges: EdgeSet, edge_label: Any, count: int, negatives: LinkNegatives | None) -> torch.Tensor | None:
    """`edge_label` as the loader takes it, [count, ...], "y" for the store's; with binary negatives classes from 0 on become 1
    and more, as in PyG.

    Raises ConfigError for another length, and beside triplets.
    """
    if edge_label is None:
        return None
    if isinstance(edge_label, str) and edge_label == "y":
        return _stored_labels(edges, negatives)
    if isinstance(edge_label, Mapping | str):
        raise ConfigError(f"edge_label must be numbers, one a link, not {edge_label!r}")
    try:
        label = torch.as_tensor(edge_label).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"edge_label must be numbers, one a link, not a {type(edge_label).__name__} of others") from None
    if label.dim() < 1 or label.size(0) != count:
        raise ConfigError(f"edge_label has shape {list(label.shape)} for {count} links: give one for each")
    if negatives is not None and negatives.mode == "triplet":
        raise ConfigError("edge_label has no place beside triplets, where dst_pos_index are the true links: leave it out")
    if negatives is not None and label.numel() and label.min() == 0:
        label = label + 1
    return label
