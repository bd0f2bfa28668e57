"""The links to make batches of: what PyG calls `edge_label_index`, with labels and negatives."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

from ooc.sampling.edge_split import PARTS, EdgeSplit, HeldOut
from ooc.sampling.links import EdgeLookup, LinkNegatives, Links, Seeds, seeds_of_links
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph

_SMALL = (torch.int8, torch.int16, torch.int32)
"""types of classes in a store; torch's losses take int64"""


@dataclass(frozen=True)
class InputLinks:
    """The links to predict, by position: pairs of nodes that the user gives, or edges of the graph by slot.

    pair: int64[2, k], None for edges; slots: which edges, None for all; part: of a split, what they are called. label: [k, ...]
    of the links, of edges by edge id. number: PyG's `input_id` of a position, None for the position itself. leave_out: whether
    links of a batch carry no messages; split: whose validation and test edges never do.
    """

    edges: EdgeLookup
    graph: Graph
    pair: Ids | None = None
    slots: Members | None = None
    part: str | None = None
    split: EdgeSplit | None = None
    label: torch.Tensor | None = None
    number: Ids | None = None
    negatives: LinkNegatives | None = None
    leave_out: bool = True

    def __len__(self) -> int:
        if self.pair is not None:
            return self.pair.shape[1]
        return self.edges.num_edges if self.slots is None else len(self.slots)

    def ends(self, position: Ids) -> tuple[Ids, Ids]:
        """Sources and destinations, int64[b] each."""
        if self.pair is not None:
            return self.pair[0, position], self.pair[1, position]
        return self.edges.ends(position if self.slots is None else self.slots[position])

    def index(self, position: Ids) -> Ids:
        """int64[b]: the links' numbers in the input: of edges their edge ids."""
        if self.pair is not None:
            return position
        return self.graph.edge_ids(position if self.slots is None else self.slots[position])

    @property
    def held_out(self) -> HeldOut | None:
        """Edges that carry no messages in any batch."""
        return None if self.split is None else self.split.held_out

    def seeds(self, position: Ids, key: int) -> Seeds:
        """The ends of the links at `position` and of their negatives as a batch's seeds; key: of the negatives."""
        src, dst = self.ends(position)
        negatives = self.negatives
        drawn = None if negatives is None else negatives.draw(src, position, key)
        return seeds_of_links(src, dst, drawn, None if negatives is None else negatives.mode, self.leave_out)

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

    def add_to(self, batch: Data, position: Ids, links: Links) -> None:
        """Give a batch PyG's fields of its links."""
        src, dst = torch.from_numpy(links.src), torch.from_numpy(links.dst)
        if self.negatives is not None and self.negatives.mode == "triplet":
            batch.src_index, batch.dst_pos_index = src, dst
            negative = torch.from_numpy(np.ascontiguousarray(links.negative_dst))
            batch.dst_neg_index = negative.squeeze(-1)
            return
        ends = [np.concatenate(each) for each in ((links.src, links.negative_src), (links.dst, links.negative_dst))]
        batch.edge_label_index = torch.from_numpy(np.stack(ends))
        batch.edge_label = self.labels(position, len(links.negative_src))  # None is no field of a Data

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
        for array in (self.pair, self.number, label, *weights):
            digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
        return f"links:{digest.hexdigest()}"


def negatives_for(
    ds: Dataset, edges: EdgeLookup, neg_sampling: Any, ratio: float | None, exact: bool, pair: Ids | None
) -> LinkNegatives | None:
    """The negatives that a loader's arguments ask for; pair: the links given, which are no exact negatives.

    neg_sampling: None, "binary", "triplet", PyG's `NegativeSampling` or a dict or tuple of its arguments. ratio: PyG's older
    way to ask for binary ones. Raises ConfigError where they do not fit, or where there are no exact negatives.
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
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"neg_sampling={neg_sampling!r} is invalid: {error}; give 'binary', 'triplet' or dict(mode='binary', amount=1)"
        ) from None
    if ds.num_nodes < 2:
        raise ConfigError(f"negatives need two nodes, and {ds.path} has {ds.num_nodes}: leave neg_sampling out")
    mode = asked.mode.value
    weights = [None if mode == "triplet" else asked.src_weight, asked.dst_weight]
    sums = [_cumulative(weight, f"{end}_weight", ds) for weight, end in zip(weights, ("src", "dst"), strict=True)]
    if not exact:
        return LinkNegatives(mode, asked.amount, ds.num_nodes, (sums[0], sums[1]))
    if edges.are_all():
        raise ConfigError(f"the graph of {ds.path} has all possible edges, so no exact negatives: leave exact_negatives out")
    given = np.empty(0, np.int64) if pair is None else np.unique(pair[0] * ds.num_nodes + pair[1])
    return LinkNegatives(mode, asked.amount, ds.num_nodes, (sums[0], sums[1]), edges, given)


def _stored_labels(ds: Dataset, negatives: LinkNegatives | None) -> torch.Tensor:
    """The store's labels of edges by edge id."""
    edges = ds.edges()
    if edges.labels is None:
        raise ConfigError(f"{ds.path} holds no labels of edges: ingest it with `edge_label`, or give one for each link")
    if negatives is not None:
        raise ConfigError(
            "edge_label='y' is of edges, and negatives are none: leave out neg_sampling, or give a label for each link"
        )
    label = torch.from_numpy(np.array(edges.labels))
    return label.float() if edges.task == "multilabel" else label  # torch's losses of several labels take floats


def _cumulative(weight: Any, name: str, ds: Dataset) -> AnyArray | None:
    if weight is None:
        return None
    array = np.asarray(weight, np.float64)
    if array.shape != (ds.num_nodes,) or not (np.isfinite(array) & (array >= 0)).all() or not array.sum() > 0:
        raise ConfigError(
            f"{name} must be a number for each of {ds.num_nodes} nodes, finite, 0 or more and not all 0, "
            f"not {array.dtype}{list(array.shape)}"
        )
    return np.cumsum(array)


def part_of(ds: Dataset, edges: EdgeLookup, part: Any, split: Any) -> Members | None:
    """The slots of a part of the split, "train", "val" or "test", or of one of the store's own splits of edges; None where
    `part` names none.

    Raises ConfigError for a part without a split, and another split than an `EdgeSplit`.
    """
    if not (split is None or isinstance(split, EdgeSplit)):
        raise ConfigError(f"edge_split must be an ooc.EdgeSplit, not {type(split).__name__}")
    if not isinstance(part, str):
        return None
    if split is None and part in (there := ds.edges().splits):
        return ds.edges().members(part)
    if part not in PARTS or split is None:
        own = f", or one of the store's splits of edges: {', '.join(there)}" if split is None and there else ""
        raise ConfigError(f"edge_label_index={part!r}: give links [2, k], or {', '.join(PARTS)} with an edge_split{own}")
    return split.members(part, edges.pieces(), edges.num_edges)


def pairs_of(ds: Dataset, edge_label_index: Any) -> Ids | None:
    """`edge_label_index` as int64[2, k]; None for edges of the graph. Also (the edge type or None, these), as PyG takes them.

    Ends that are words are the user's own ids (`Dataset.rows_of`). Raises ConfigError for another form, InputError for an end
    that is no node.
    """
    if isinstance(edge_label_index, tuple) and len(edge_label_index) == 2 and _is_type(edge_label_index[0]):
        edge_label_index = edge_label_index[1]
    if edge_label_index is None or isinstance(edge_label_index, str):
        return None
    if isinstance(edge_label_index, torch.Tensor):
        given: NDArray[Any] = edge_label_index.detach().cpu().numpy()
    else:
        given = np.array([np.asarray(each) for each in edge_label_index]) if len(edge_label_index) == 2 else np.empty(0)
    if given.dtype.kind in "UOT" and given.ndim == 2:
        given = np.stack([ds.rows_of(list(each)) for each in given])
    if given.ndim != 2 or given.shape[0] != 2 or (given.dtype.kind not in "iu" and given.size):
        raise ConfigError(
            f"edge_label_index must be whole numbers [2, k], sources and destinations, not {given.dtype}{list(given.shape)}"
        )
    pair = np.ascontiguousarray(given, np.int64)
    wrong = ((pair < 0) | (pair >= ds.num_nodes)).any(axis=0)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(
            f"link {at} of edge_label_index, from {pair[0, at]} to {pair[1, at]}, is out of range: the store has nodes "
            f"0..{ds.num_nodes - 1}"
        )
    return pair


def _is_type(given: Any) -> bool:
    """Whether it is PyG's edge type, or None in its place."""
    return given is None or isinstance(given, str) or (isinstance(given, tuple) and all(isinstance(n, str) for n in given))


def labels_for(ds: Dataset, edge_label: Any, count: int, negatives: LinkNegatives | None) -> torch.Tensor | None:
    """`edge_label` as the loader takes it, [count, ...], "y" for the store's; with binary negatives classes from 0 on become 1
    and more, as in PyG.

    Raises ConfigError for another length, and beside triplets.
    """
    if edge_label is None:
        return None
    if isinstance(edge_label, str) and edge_label == "y":
        return _stored_labels(ds, negatives)
    if isinstance(edge_label, Mapping | str):
        raise ConfigError(f"edge_label must be numbers, one a link, not {edge_label!r}")
    label = torch.as_tensor(edge_label).detach().cpu()
    if label.dim() < 1 or label.size(0) != count:
        raise ConfigError(f"edge_label has shape {list(label.shape)} for {count} links: give one for each")
    if negatives is not None and negatives.mode == "triplet":
        raise ConfigError("edge_label has no place beside triplets, where dst_pos_index are the true links: leave it out")
    if negatives is not None and label.numel() and label.min() == 0:
        label = label + 1
    return label
