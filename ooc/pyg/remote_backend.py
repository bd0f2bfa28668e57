"""PyG's remote-backend interfaces over a `Dataset`, so that PyG's own loaders run on it without pyg-lib.

>>> stores = OocFeatureStore(ds), OocGraphStore(ds)
>>> sampler = OocSampler(ds, [10, 10])
>>> loader = NodeLoader(stores, node_sampler=sampler, input_nodes=torch.from_numpy(ds.split("train")), batch_size=1024)

They run in the consumer's thread; `ooc.NeighborLoader` gives the same batches, loaded ahead.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from ooc.graph.blocks import EDGE_ATTR
from ooc.loading.arguments import fanout_of, weight_column_of
from ooc.loading.collate import edge_index_of
from ooc.runtime.memory_plan import plan_memory
from ooc.sampling import NeighborSampler
from ooc.stores.arrays.rows import Ids, Rows
from ooc.stores.bounds import check_nodes
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError

_WEIGHT = "edge_weight"
_EDGE_IDS = "edge_ids"
"""attribute of a batch's nodes, by which its edge features are found"""
_EDGES = ("node", "edge", "node")
"""the group of edge features, PyG's edge type of a homogeneous graph"""
_READ_ONLY = "a store is read-only: write the array elsewhere and open the data set with features={name: path}"


class OocFeatureStore(FeatureStore):  # type: ignore[misc]
    """PyG's FeatureStore over the node arrays and edge features of a data set.

    `names` are the node arrays of a batch (default: x and y), `edge_names` its edge features (default: edge_attr, if there is
    one); others can be requested by name, edge features with the group `("node", "edge", "node")` and edge ids. A batch that
    `OocSampler` sampled from a weighted store also has `edge_weight`.

    >>> OocFeatureStore(ds).get_tensor(group_name=None, attr_name="x", index=torch.tensor([3, 1]))
    """

    def __init__(self, ds: Dataset, names: Sequence[str] | None = None, edge_names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.ds = ds
        self.names = [name for name in ("x", "y") if name in ds.names] if names is None else list(names)
        for name in self.names:
            ds.rows(name)
        there = self._edge_names_there()
        self.edge_names = [name for name in (EDGE_ATTR,) if name in there] if edge_names is None else list(edge_names)
        for name in self.edge_names:
            ds.edge_features(name)
            if name in self.names:
                raise ConfigError(f"{name!r} is given as a node array and as an edge feature: a batch has room for one of them")

    def _edge_names_there(self) -> list[str]:
        return self.ds.manifest.edge_types[0].arrays

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        weights = [_WEIGHT] if "weight" in self.ds.graph.columns else []
        return [TensorAttr(group_name=None, attr_name=name) for name in [*self.names, *weights, *self.edge_names]]

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        """Return rows [k, ...] at `attr.index` (int64[k], mask [N], slice, or None for all), or one row [...] for a number.

        Of an edge feature, in the group of the edges, indices are edge ids.

        Features are decoded to float32 if stored in fewer bits (`Dataset.rows`); integers other than features become int64.
        Raises KeyError if there is no such array, IndexError for an index that torch would not take either.
        """
        if not self._has(attr):
            kind = "edge feature" if attr.group_name == _EDGES else "node array"
            raise KeyError(f"{self.ds.path} has no {kind} {attr.attr_name!r} of group {attr.group_name!r}")
        _refuse_workers()
        rows = self._rows(attr)
        ids = _rows_at(attr.index, rows.shape[0])
        out = np.empty((ids.size, *rows.shape[1:]), rows.dtype)
        rows.read(ids.reshape(-1), out)
        widened = out.dtype.kind in "iu" and attr.attr_name != "x" and attr.group_name != _EDGES
        tensor = torch.from_numpy(out.astype(np.int64) if widened else out)
        return tensor[0] if ids.ndim == 0 else tensor

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Tensor | None]:
        """Return what `get_tensor` does of each; edge weights and edge ids are those that `OocSampler` sent along with the
        nodes."""
        return [self._of_batch(attr) for attr in attrs]

    def _of_batch(self, attr: TensorAttr) -> Tensor | None:
        if attr.attr_name == _WEIGHT:
            return getattr(attr.index, _WEIGHT, None)
        if attr.group_name is not None or attr.attr_name not in self.edge_names:
            return self._get_tensor(attr)
        e_id = getattr(attr.index, _EDGE_IDS, None)
        return None if e_id is None else self._get_tensor(TensorAttr(_EDGES, attr.attr_name, e_id))

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        """Return the shape that `get_tensor` has, without reading it; None if there is no such array."""
        if not self._has(attr):
            return None
        count, *shape = self._rows(attr).shape
        return (*_rows_at(attr.index, count).shape, *shape)

    def _rows(self, attr: TensorAttr) -> Rows:
        return self.ds.edge_features(attr.attr_name) if attr.group_name == _EDGES else self.ds.rows(attr.attr_name)

    def _has(self, attr: TensorAttr) -> bool:
        if attr.group_name == _EDGES:
            return attr.attr_name in self._edge_names_there()
        return attr.group_name in (None, self.ds.manifest.node_type().name) and attr.attr_name in self.ds.names

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise ConfigError(_READ_ONLY)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise ConfigError(_READ_ONLY)


class OocGraphStore(GraphStore):  # type: ignore[misc]
    """PyG's GraphStore over the topology of a data set, in CSC.

    `get_edge_index` copies the whole topology into RAM as int64, as PyG's own code requires; `OocSampler` never does.
    """

    def __init__(self, ds: Dataset) -> None:
        super().__init__()
        self.ds = ds

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Return the single edge type; None, as PyG uses for a homogeneous graph."""
        num_nodes = self.ds.num_nodes
        return [EdgeAttr(edge_type=None, layout=EdgeLayout.CSC, is_sorted=True, size=(num_nodes, num_nodes))]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        """Return (source int64[E], colptr int64[N+1]) for CSC, and None for other layouts, which PyG converts."""
        if edge_attr.layout != EdgeLayout.CSC or edge_attr.edge_type is not None:
            return None
        graph = self.ds.graph
        check_nodes("graph/indices", 0, graph.indices, graph.num_nodes)
        return torch.from_numpy(graph.indices.astype(np.int64)), torch.from_numpy(np.array(graph.indptr))

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise ConfigError("a store's topology is read-only: ingest the edges into another store")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise ConfigError("a store's topology is read-only: ingest the edges into another store")


class OocSampler(BaseSampler):  # type: ignore[misc]
    """PyG's BaseSampler over the topology of a data set: uniform or weighted neighbor sampling by our own kernels.

    Arguments are those of `ooc.NeighborLoader`. Samples follow torch's generator as in PyG's samplers, so `torch.manual_seed`
    makes them repeatable. Raises BudgetError if a batch exceeds the data set's memory.

    >>> OocSampler(ds, [10, 10]).sample_from_nodes(NodeSamplerInput(input_id=None, node=torch.tensor([3, 1])))
    """

    def __init__(
        self, ds: Dataset, num_neighbors: Sequence[int], replace: bool = False, weight_attr: str | None = None
    ) -> None:
        self.ds = ds
        self._sampler = NeighborSampler(
            ds.graph,
            fanout_of(num_neighbors),
            replace,
            weight_column_of(ds.graph, weight_attr),
            max_bytes=plan_memory(ds).max_batch,
            row_bytes=ds.rows("x").row_bytes if ds.num_features else 0,
        )

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        """Sample the neighborhood of `index.node`; `edge` has the edges' positions in the input."""
        if index.time is not None or kwargs:
            raise ConfigError("OocSampler does not support temporal sampling: leave out input_time and further arguments")
        _refuse_workers()
        key = int(torch.randint(2**63 - 1, ()).item())
        subgraph = self._sampler.sample(index.node.numpy(), key)
        row, col = torch.from_numpy(edge_index_of(subgraph))
        node, graph = torch.from_numpy(subgraph.node), self.ds.graph
        edge = torch.from_numpy(graph.edge_ids(subgraph.slot))
        setattr(node, _EDGE_IDS, edge)  # PyG asks the feature store by nodes only
        if "weight" in graph.columns:
            setattr(node, _WEIGHT, torch.from_numpy(np.asarray(graph.columns["weight"][subgraph.slot], np.float32)))
        return SamplerOutput(
            node=node,
            row=row,
            col=col,
            edge=edge,
            batch=None,
            num_sampled_nodes=list(subgraph.num_nodes),
            num_sampled_edges=list(subgraph.num_edges),
            metadata=(index.input_id, index.time),
        )

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> SamplerOutput:
        """Raises NotImplementedError: link-level loaders are not supported."""
        raise NotImplementedError("OocSampler samples from nodes only: use NodeLoader, not LinkLoader")

    @property
    def edge_permutation(self) -> None:
        """None, because `SamplerOutput.edge` already has positions in the input."""
        return None


def _refuse_workers() -> None:
    """Raise in forked workers, which lack the reading threads and would wait forever."""
    if get_worker_info() is not None:
        raise ConfigError("a store cannot be read from worker processes: use num_workers=0")


def _rows_at(index: Any, count: int) -> Ids:
    """Convert a row index as torch takes it to int64[k], or to int64[] for a number. Raises IndexError for any other."""
    if index is None:
        return np.arange(count)
    if isinstance(index, slice):
        return np.arange(*index.indices(count))
    array = index.detach().cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    if array.dtype == bool or (isinstance(index, Tensor) and index.dtype == torch.uint8):
        if array.shape != (count,):
            raise IndexError(f"a mask {list(array.shape)} does not fit an array of {count} rows: give one entry a row")
        return np.flatnonzero(array)
    if array.ndim > 1 or (array.dtype.kind not in "iu" and array.size):
        raise IndexError(f"rows are indexed by whole numbers in one dimension or a mask, not {array.dtype}{list(array.shape)}")
    ids = array.astype(np.int64)
    if ids.size and not -count <= ids.min() <= ids.max() < count:
        raise IndexError(f"index {ids.min() if ids.min() < -count else ids.max()} is out of range: there are {count} rows")
    return np.where(ids < 0, ids + count, ids)
