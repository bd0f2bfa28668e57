"""The arguments of PyG's NeighborLoader and torch's DataLoader: checked, and brought into our own form.

Nothing is silently ignored: an argument either has its effect, or changes nothing and is warned about, or is refused.
"""

import functools
import hashlib
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data.data import BaseData
from torch_geometric.sampler import NumNeighbors

from ooc.graph.hetero import EdgeKey
from ooc.runtime.messages import warn_user
from ooc.sampling.edge_split import HeldOut
from ooc.sampling.hetero_neighbor import check_fanouts
from ooc.sampling.labor import Labor
from ooc.sampling.links import Seeds
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.closest import did_you_mean
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph
from ooc.stores.graph_set import GraphSet
from ooc.stores.node_set import NodeSet
from ooc.stores.sizes import parse_bytes

_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_workers": (0,),
    "persistent_workers": (False,),
    "multiprocessing_context": (None,),
    "filter_per_worker": (None,),
    "is_sorted": (False,),
    "pin_memory_device": ("",),
}
"""Name -> values that need no warning; any other is accepted with one."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "sample_direction": (("forward",), "in-edges are sampled"),
    "directed": ((True,), "PyG calls it subgraph_type='induced' now"),
    "subgraph_type": (("directional",), "only NeighborLoader takes it"),
    "disjoint": ((False,), "seeds share one subgraph"),
    "temporal_strategy": (("uniform",), "temporal sampling is not supported"),
    "time_attr": ((None,), "temporal sampling is not supported"),
    "input_time": ((None,), "temporal sampling is not supported"),
    "transform_sampler_output": ((None,), "use transform, which gets the whole batch"),
    "neighbor_sampler": ((None,), "use PyG's NodeLoader with ooc.pyg.OocSampler"),
    "custom_cls": ((None,), "batches are PyG Data; convert them in transform"),
    "generator": ((None,), "randomness comes from seed"),
    "sampler": (
        (None,),
        "the order comes from shuffle, seed and input_nodes, and LABOR is for NeighborLoader and LinkNeighborLoader",
    ),
    "batch_sampler": ((None,), "the order comes from shuffle and seed; give input_nodes in your own order"),
    "collate_fn": ((None,), "use transform"),
    "worker_init_fn": ((None,), "there are no worker processes"),
    "timeout": ((0,), "reading threads have no time limit"),
    "in_order": ((True,), "batches come in order"),
}
"""Name -> the values that ask for what we do anyway, and what to say of another."""


class Pack(NamedTuple):
    """Disk that batches may be packed in: bytes, and the folder of a file without a name."""

    nbytes: int
    folder: Path

    @classmethod
    def of(cls, pack: Any, data: Dataset) -> "Pack | None":
        """Of a size, or of a pair of it and a folder, which is the store's by default. Raises ConfigError for others."""
        if pack is None:
            return None
        size, folder = pack if isinstance(pack, tuple | list) and len(pack) == 2 else (pack, Path(data.path).parent)
        if not (isinstance(size, int | str) and isinstance(folder, str | os.PathLike)):
            raise ConfigError(f"pack is a size, such as '12GB', or a pair of it and a folder, not {pack!r}")
        if not Path(folder).is_dir():
            raise ConfigError(f"pack: {folder} is no folder: name one on the disk where batches are to be packed")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"pack: this process may not write to {folder}: name another folder, as pack = ({size!r}, folder)"
            )
        return cls(parse_bytes(size, "pack"), Path(folder))


def dataset_of(data: Any, homogeneous: str = "") -> Dataset:
    """The data set that a loader was given, opened where it is the path of a store.

    homogeneous: the loader's name, if it is for homogeneous graphs only. Raises ConfigError for a heterogeneous store then, for
    a graph in memory, and for anything else.
    """
    check_store(data, "data")
    found = data if isinstance(data, Dataset) else Dataset.open(os.fspath(data))
    if homogeneous and found.is_hetero:
        raise ConfigError(
            f"{homogeneous} is for homogeneous graphs, and {found.path} is heterogeneous: use NeighborLoader, HGTLoader or "
            "LinkNeighborLoader"
        )
    return found


def check_store(store: Any, name: str) -> None:
    """Raise ConfigError for the argument `name` unless it is a data set or a path."""
    if isinstance(store, BaseData):
        kind = type(store).__name__
        raise ConfigError(
            f"{name} is a {kind} in memory: make a store of it once, ds = ooc.from_data(data, PATH), and load that"
        )
    if not isinstance(store, str | os.PathLike):  # a data set is path-like
        raise ConfigError(f"{name} must be a data set (ooc.open) or the path of a store, not {type(store).__name__}")


def refuse_of_open(**given: Any) -> None:
    """Raise ConfigError for an argument that says how a store is opened, where the data set is open; None and False are not
    given."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ConfigError(f"{name} is a property of an open data set: give it to `ooc.open`, and leave it out here")


def renamed(**names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function so that it still takes arguments by their old names (old name -> new name), with a
    DeprecationWarning, and raises ConfigError when called with both names of one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*positional: Any, **given: Any) -> Any:
            for old in names.keys() & given.keys():
                if names[old] in given:
                    raise ConfigError(f"{names[old]} is given twice: {old} is its old name")
                warn_user(f"{old} is now {names[old]}", DeprecationWarning)
                given[names[old]] = given.pop(old)
            return function(*positional, **given)

        return call

    return decorate


def check_pyg_arguments(arguments: Mapping[str, Any], own: Sequence[str], loader: str = "NeighborLoader") -> None:
    """Warn of arguments that change nothing here; raise ConfigError for one that is unknown or asks for something else.

    own: the loader's named arguments, to suggest where a name is misspelt.
    """
    idle = []
    for name, value in arguments.items():
        if name in _NO_EFFECT:
            idle += [name] if value not in _NO_EFFECT[name] else []
        elif name not in _REFUSED:
            of_labor = "sampler" in own and name in Labor.__dataclass_fields__
            hint = f": give sampler=ooc.Labor({name}=...)" if of_labor else did_you_mean(name, [*_NO_EFFECT, *_REFUSED, *own])
            raise ConfigError(f"{loader} has no argument {name!r}{hint}")
        elif not any(value is allowed or _same(value, allowed) for allowed in _REFUSED[name][0]):
            raise ConfigError(f"{loader} cannot take {name}={value!r}: {_REFUSED[name][1]}; leave it out")
    if idle:
        warn_user(f"{', '.join(idle)} changes nothing: threads do the work, there are no worker processes")


def _same(value: Any, allowed: Any) -> bool:
    """Equal, where both are plain values (`SubgraphType.directional` counts as its text)."""
    plain = getattr(value, "value", value)
    return isinstance(plain, str | bool | int | float) and bool(plain == allowed)


def fanouts_of(ds: Dataset, num_neighbors: Any) -> Any:
    """Fan-out per hop as a list of int; for a data set of several edge types a list for each.

    num_neighbors: one list, or a dictionary or PyG's `NumNeighbors` with a list by edge type: (source, name, target),
    "source__name__target" or "source:name:target". Raises ConfigError where they do not fit.
    """
    default = None
    if isinstance(num_neighbors, NumNeighbors):
        num_neighbors, default = num_neighbors.values, num_neighbors.default
    if not ds.is_hetero:
        return fanout_of(num_neighbors)
    if not isinstance(num_neighbors, Mapping):
        return {key: fanout_of(num_neighbors) for key in ds.edge_types}
    given = {_edge_type(key): fanout_of(own) for key, own in num_neighbors.items()}
    if default is not None:
        given = {key: fanout_of(default) for key in ds.edge_types} | given
    return check_fanouts(given, ds.edge_types)


def _edge_type(key: Any) -> Any:
    """An edge type as a triple; what is none is left for the message."""
    if not isinstance(key, str):
        return tuple(key) if isinstance(key, list) else key
    parts = key.split(":" if ":" in key else "__")
    return tuple(parts) if len(parts) == 3 else key


def names_of(given: Any, argument: str) -> list[str]:
    """Names as a list: one name or several, None for none. Raises ConfigError for anything else."""
    names = [given] if isinstance(given, str) else given or ()
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{argument} must be a list of names, not {given!r}")
    return list(names)


def fanout_of(num_neighbors: Any) -> list[int]:
    """Fan-out per hop as a list of int. Raises ConfigError for a dictionary and for anything but numbers."""
    if isinstance(num_neighbors, Mapping):
        raise ConfigError("num_neighbors must be a list, one number a hop: a dictionary is for stores of several edge types")
    if not isinstance(num_neighbors, Sequence | np.ndarray | torch.Tensor) or isinstance(num_neighbors, str):
        raise ConfigError(f"num_neighbors must be a list, one number a hop, such as [10, 10], not {num_neighbors!r}")
    try:
        return [operator.index(k) for k in num_neighbors]
    except TypeError:
        raise ConfigError(f"num_neighbors must be whole numbers, one a hop, such as [10, 10], not {num_neighbors!r}") from None


def weight_column_of(graph: Graph | Mapping[Any, Graph], weight_attr: str | None) -> str | None:
    """The graph column that `weight_attr` names; PyG scripts call the weight "edge_weight" (or "edge_attr").

    graph: the topology, or that of each edge type, of which one at least must have the column. Raises ConfigError where there
    is no such column.
    """
    graphs = graph.values() if isinstance(graph, Mapping) else [graph]
    columns = list(dict.fromkeys(name for each in graphs for name in each.columns))
    if weight_attr is None or weight_attr in columns:
        return weight_attr
    if weight_attr in ("edge_weight", "edge_attr") and "weight" in columns:
        return "weight"
    there = ", ".join(name for name in columns if name != "edge_id") or "none"
    raise ConfigError(
        f"no edge column {weight_attr!r} to sample by; the store has {there}. Features of edges do not serve: "
        "ingest the numbers with `weight`, or name them edge_weight in the Data"
    )


def check_numbers(order: Any, **numbers: Any) -> None:
    """Raise ConfigError unless an order's numbers and these are whole and 1 or more, and its rank is one of the ranks."""
    numbers = {"batch_size": order.batch_size, "world_size": order.world_size, **numbers}
    if not all(isinstance(n, Integral) for n in (*numbers.values(), order.rank)):
        raise ConfigError(f"{', '.join(numbers)} and rank must be whole numbers, not {(*numbers.values(), order.rank)}")
    if min(numbers.values()) < 1 or not 0 <= order.rank < order.world_size:
        raise ConfigError(f"{', '.join(numbers)} must be 1 or more, and rank one of 0..world_size-1")


@dataclass(frozen=True)
class InputNodes:
    """The nodes to make batches of, by position; `node` is None where position p is node p.

    number: what PyG calls `input_id`: the position, the node for a mask, or what the user gives. split: its name, if it is one.
    node_type: of the nodes; None in a homogeneous graph. time, node_time: until when their neighborhoods reach, by position or
    else by node; None without times. held_out: edges that carry no messages in any batch, by edge type.
    """

    count: int
    node: Ids | Members | None = None
    number: Ids | None = None
    split: str | None = None
    node_type: str | None = None
    time: AnyArray | None = None
    node_time: AnyArray | None = None
    held_out: Mapping[EdgeKey, HeldOut] = field(default_factory=dict)
    most_seeds: ClassVar[int] = 1
    """of an input node"""

    def __len__(self) -> int:
        return self.count

    def ids(self, position: Ids) -> Ids:
        """int64[b]: the nodes at `position`."""
        return position if self.node is None else self.node[position]

    def seeds(self, position: Ids, key: int) -> Seeds:
        """The nodes at `position` as a batch's seeds."""
        return Seeds(self.ids(position), time=self.times(position))

    def input_id(self, position: Ids) -> Ids:
        """int64[b]: PyG's `input_id` of `position`."""
        return position if self.number is None else self.number[position]

    def times(self, position: Ids) -> AnyArray | None:
        """[b]: the times of the nodes at `position`; None without times."""
        if self.time is not None:
            return np.asarray(self.time[position])
        return None if self.node_time is None else np.asarray(self.node_time[self.ids(position)])

    @property
    def is_array(self) -> bool:
        """Whether they were given as ids or a mask."""
        return isinstance(self.node, np.ndarray)

    @functools.cached_property
    def identity(self) -> str:
        """What tells them from other input nodes of the same store: the split's name, "all", or a digest of the array."""
        digest = hashlib.blake2b(digest_size=16)
        given = [self.node if isinstance(self.node, np.ndarray) else None, self.number]
        for array in given if self.time is None else [*given, self.time]:
            digest.update(b"none" if array is None else np.ascontiguousarray(array).data)
        for key, (stream, share, words) in self.held_out.items():
            digest.update(repr((key, int(stream), share)).encode() + words.tobytes())
        kind = self.split or ("array" if self.is_array else "all")
        kind = kind if self.node_type is None else f"{self.node_type}:{kind}"
        named = not (self.is_array or self.number is not None or self.time is not None or self.held_out)
        return kind if named else f"{kind}:{digest.hexdigest()}"


def input_nodes_of(ds: Dataset, input_nodes: Any, input_id: Any = None) -> InputNodes:
    """`input_nodes` as the loader takes it: None, a split's name, a mask [N], ids [k], or (None or the node type, these).

    Several node types need the type: alone (all its nodes) or in a pair. Ids that are words are the user's own
    (`NodeSet.rows_of`). A mask is bool, or whole numbers that are all 0 or 1, one a node. Raises InputError for an unknown type
    or split, an id out of range, or a mask of another length; ConfigError for anything else.
    """
    node_type, input_nodes = _typed(ds, input_nodes)
    return replace(_of_type(ds.nodes(node_type), input_nodes, input_id), node_type=node_type if ds.is_hetero else None)


def _typed(ds: Dataset, input_nodes: Any) -> tuple[str | None, Any]:
    """(the node type, which of its nodes); the type is None for the only one."""
    pair = isinstance(input_nodes, tuple) and len(input_nodes) == 2
    if pair and (input_nodes[0] is None or isinstance(input_nodes[0], str)):
        node_type, input_nodes = input_nodes
    elif ds.is_hetero and isinstance(input_nodes, str):
        node_type, input_nodes = input_nodes, None
    else:
        node_type = None
    if node_type is None and ds.is_hetero and len(ds.node_types) > 1:
        there = ", ".join(ds.node_types)
        raise ConfigError(f"input_nodes must name their type, one of {there}, as in input_nodes=({ds.node_types[0]!r}, mask)")
    if node_type is not None and node_type not in ds.node_types:
        there, of = ", ".join(ds.node_types), [name for name in ds.node_types if node_type in ds.nodes(name).splits]
        split = f"; a split goes with its type, as in input_nodes={(of[0], node_type)}" if of else ""
        raise InputError(f"input_nodes are of the node type {node_type!r}, which {ds.path} has not: it has {there}{split}")
    return node_type or ds.node_types[0], input_nodes


def _of_type(ds: NodeSet, input_nodes: Any, input_id: Any) -> InputNodes:
    """`input_nodes_of` nodes of one type."""
    number = None if input_id is None else _array(input_id, "input_id").astype(np.int64)
    if input_nodes is None:
        nodes = InputNodes(ds.num_nodes, number=number)
    elif isinstance(input_nodes, str):
        members = ds.members(input_nodes)
        nodes = InputNodes(len(members), members, number, input_nodes)
    else:
        given = _rows_of(ds, input_nodes)
        masked = _is_mask(given, ds.num_nodes)
        if masked and len(given) != ds.num_nodes:
            raise InputError(
                f"the mask of input nodes has {len(given)} entries, the store {ds.num_nodes} nodes; give one a node"
            )
        ids = np.flatnonzero(given) if masked else _of_ids(given, ds.num_nodes)
        nodes = InputNodes(len(ids), ids, ids if number is None and masked else number)
    input_ids_of(number, nodes.count, "input nodes")
    return nodes


def input_ids_of(input_id: Any, count: int, of: str) -> Ids | None:
    """`input_id` as int64[count], None for None. Raises ConfigError for anything else; `of` says what there is one for."""
    if input_id is None:
        return None
    number = _array(input_id, "input_id").astype(np.int64)
    if len(number) != count:
        raise ConfigError(f"input_id has {len(number)} entries for {count} {of}; give one for each")
    return number


def input_graphs_of(graphs: GraphSet, given: Any) -> InputNodes:
    """The graphs that a loader was given, by position: None for all, a split's name, a mask [G], rows [k], or words as ids.

    Raises InputError for an unknown split, a row out of range, or a mask of another length; ConfigError for anything else.
    """
    if given is None:
        return InputNodes(len(graphs))
    if isinstance(given, str):
        members = graphs.members(given)
        return InputNodes(len(members), members, None, given)
    if isinstance(given, Sequence) and len(given) and all(isinstance(each, str) for each in given):
        given = graphs.rows_of(given)
    array = _array(given, "input_graphs", "a split's name, ")
    masked = _is_mask(array, len(graphs))
    if masked and len(array) != len(graphs):
        raise InputError(f"the mask of input graphs has {len(array)} entries, the store {len(graphs)} graphs; give one a graph")
    ids = np.flatnonzero(array) if masked else _of_ids(array, len(graphs), "graph")
    return InputNodes(len(ids), ids)


def members_of(ds: Dataset, input_nodes: Any) -> tuple[Members | None, str | None]:
    """The nodes that a loader of subgraphs trains on, and their identity; None for all. Raises as `input_nodes_of`."""
    if input_nodes is None:
        return None, None
    nodes = input_nodes_of(ds, input_nodes)
    if isinstance(nodes.node, Members):
        return nodes.node, nodes.identity
    wanted = np.zeros(ds.num_nodes, bool)
    wanted[nodes.ids(np.arange(len(nodes)))] = True
    return Members.of(wanted), nodes.identity


def _rows_of(ds: NodeSet, input_nodes: Any) -> NDArray[Any]:
    """Ids or a mask as an array; the user's own ids, where these are words, as rows."""
    words = isinstance(input_nodes, Sequence) or (isinstance(input_nodes, np.ndarray) and input_nodes.dtype.kind in "UOT")
    if words and len(input_nodes) and all(isinstance(each, str) for each in input_nodes):
        return ds.rows_of(input_nodes)
    return _array(input_nodes, "input_nodes", "a split's name, ")


def _array(given: Any, name: str, or_else: str = "") -> NDArray[Any]:
    array = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if array.ndim != 1 or (array.dtype.kind not in "biu" and len(array)):
        raise ConfigError(
            f"{name} must be {or_else}a boolean mask or whole numbers in one dimension, not {array.dtype}{list(array.shape)}"
        )
    return array


def positions_of(index: Any, count: int) -> Ids:
    """int64[b]: positions among `count` input nodes, given as such or by a mask [count].

    Raises InputError for one out of range and a mask of another length, ConfigError for other arrays.
    """
    given = _array(index, "index")
    if given.dtype == bool:
        if len(given) != count:
            raise InputError(f"the mask has {len(given)} entries for {count} input nodes; give one for each")
        return np.flatnonzero(given)
    position = given.astype(np.int64)
    wrong = (position < 0) | (position >= count)
    if wrong.any():
        raise InputError(f"position {position[wrong][0]} is out of range: there are {count} input nodes")
    return position


def _is_mask(given: NDArray[Any], num_nodes: int) -> bool:
    """Whether an array is a mask. As ids, one 0 or 1 per node would be the first two nodes again and again."""
    if given.dtype == bool:
        return True
    return len(given) == num_nodes > 2 and not ((given != 0) & (given != 1)).any()


def _of_ids(given: NDArray[Any], num_nodes: int, what: str = "node") -> Ids:
    ids = given.astype(np.int64)
    wrong = (ids < 0) | (ids >= num_nodes)
    if wrong.any():
        at = int(np.argmax(wrong))
        have = f"the store has {what}s 0..{num_nodes - 1}"
        raise InputError(f"input {what} {given[at]} at position {at} is out of range: {have}")
    return ids
