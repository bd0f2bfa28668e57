"""The names of a store's arrays, files and types.

An edge type is named as in PyG; a homogeneous graph is the case of one node type and one edge type without names of their own.
"""

from typing import Any

import numpy as np

from ooc.stores.errors import InputError

NODE = "node"
EDGE = "edge"
EdgeKey = tuple[str, str, str]
"""an edge type as in PyG: (source type, name, target type)"""
HOMOGENEOUS: EdgeKey = (NODE, EDGE, NODE)
"""the edge type of a homogeneous store"""
SPLIT_CODES = {"train": 0, "val": 1, "test": 2}
"""values of the int8 array `split`; -1 for nodes in no split"""
INDPTR, INDICES = "graph/indptr", "graph/indices"
SELF_LOOPS, LOOP_WEIGHT, WEIGHT_SUM = "graph/self_loops", "graph/loop_weight", "graph/weight_sum"
PARTS = "graph/parts"
GRAPHS = "graphs"
"""group with the graphs of a store of many"""
GRAPH_PTR, GRAPH_EDGE_PTR = "graphs/ptr", "graphs/edge_ptr"
REDUCTIONS = "reductions"
"""group with the maps that made features narrower; see `ooc.stores.feature_map`"""
EVENTS = "events"
"""group with the edges of a temporal graph in time order"""
CHECKSUMS = "checksums"
VERSIONS = "versions"
"""folder of a store's later versions; see `ooc.stores.growth`"""
IDS = "ids.lmdb"
GRAPH_IDS = "graph_ids.lmdb"
DELTA = "delta.lmdb"
"""LMDB environments: external ids of nodes and of graphs, and what was appended; see `ooc.stores.growth.delta`"""
COLUMN_DTYPES: dict[str, np.dtype[Any]] = {"edge_id": np.dtype(np.int64), "weight": np.dtype(np.float32)}
"""dtypes of slot columns with a fixed one"""


def edge_folder(key: EdgeKey) -> str:
    """Name of an edge type's folder: `edge_folder(("author", "writes", "paper"))` is `"author__writes__paper"`."""
    return EDGE if key == HOMOGENEOUS else "__".join(key)


def graph_array(name: str, key: EdgeKey = HOMOGENEOUS) -> str:
    """Path of an array of an edge type's CSC in the group; slot columns have one entry per edge in slot order.

    >>> graph_array("indptr"), graph_array("time", ("author", "writes", "paper"))
    ('graph/indptr', 'graph/author__writes__paper/time')
    """
    return f"graph/{name}" if key == HOMOGENEOUS else f"graph/{edge_folder(key)}/{name}"


def column(name: str) -> str:
    """Path of a slot column's array of a homogeneous store: `graph_array` of its only edge type."""
    return graph_array(name)


def node_array(name: str, node_type: str = NODE) -> str:
    """Path of a node array in the group: `node_array("x")` is `"node/node/x"`."""
    return f"node/{node_type}/{name}"


def reduction_array(part: str, name: str, node_type: str = NODE) -> str:
    """Path of a part of the map of a node array: `reduction_array("mean", "x")` is `"reductions/node/x/mean"`."""
    return f"{REDUCTIONS}/{node_type}/{name}/{part}"


def graphs_array(name: str) -> str:
    """Path of an array with a row per graph: `graphs_array("y")` is `"graphs/y"`."""
    return f"{GRAPHS}/{name}"


def event_array(name: str) -> str:
    """Path of an array of the events: `event_array("time")` is `"events/time"`."""
    return f"{EVENTS}/{name}"


def edge_array(name: str, key: EdgeKey = HOMOGENEOUS) -> str:
    """Path of an edge array in the group, one row per edge id: `edge_array("msg")` is `"edge/edge/msg"`."""
    return f"edge/{edge_folder(key)}/{name}"


def checksum_array(name: str) -> str:
    """Path of the crc32c (uint32) of every inner chunk of array `name`."""
    return f"{CHECKSUMS}/{name}"


def check_type_name(name: str, what: str = "node type") -> str:
    """Return the name of a type if it can be one. Raises InputError otherwise.

    >>> check_type_name("field_of_study")
    'field_of_study'
    """
    wrong = name.startswith(("_", ".")) or name.endswith("_") or "__" in name or any(each in name for each in ":=/\\")
    if not name or wrong or not name.isprintable() or len(name.encode()) > _NAME_BYTES:
        raise InputError(
            f"{what} {name[:60]!r}: a name has 1 to {_NAME_BYTES} bytes, without ':', '=', '/' and '__', and does not begin "
            "with '_' or '.' or end with '_'; choose another"
        )
    return name


_NAME_BYTES = 80
"""so that the folder of an edge type has a name that file systems take"""


def parse_edge_type(text: str) -> EdgeKey:
    """Parse an edge type as on the command line. Raises InputError if it is none.

    >>> parse_edge_type("author:writes:paper")
    ('author', 'writes', 'paper')
    """
    parts = text.split(":")
    if len(parts) != 3:
        raise InputError(f"edge type {text[:60]!r}: write it SOURCE:NAME:TARGET, as in author:writes:paper")
    return check_type_name(parts[0]), check_type_name(parts[1], "edge type"), check_type_name(parts[2])


def show_edge_type(key: EdgeKey) -> str:
    """An edge type in messages and on the command line: `"author:writes:paper"`."""
    return ":".join(key)
