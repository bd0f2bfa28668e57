"""What a store's arrays say to other Zarr readers: names of their dimensions and a `description` each.

They say nothing to `ooc` itself and are no part of fingerprints; arrays of earlier stores lack them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ooc.stores.arrays.encoding import DTYPE, SCALE
from ooc.stores.io.atomic import write_file

DESCRIPTION = "description"
_ENTRIES = {
    "graph": "slot",
    "graph/indptr": "node_bound",
    "graph/parts": "part_bound",
    "graph/self_loops": "self_loop",
    "graph/loop_weight": "self_loop",
    "graph/weight_sum": "node",
    "graphs": "graph",
    "graphs/ptr": "graph_bound",
    "graphs/edge_ptr": "graph_bound",
    "events": "event",
    "edge": "edge",
    "node": "node",
    "x": "node",
}
"""array, or the group it is in -> the name of its first dimension; `x` alone is what `ooc embed` writes"""
_DESCRIPTIONS = {
    "graph/indptr": "compressed sparse columns (CSC): the in-edges of node v are the slots indptr[v] to indptr[v + 1] - 1",
    "graph/indices": "the source node of each slot; slots are in the order of (destination, time, edge id)",
    "graph/edge_id": "the edge of each slot: its position in the input, or in the order of time if edges have times",
    "graph/weight": "the weight of each slot's edge",
    "graph/time": "the time of each slot's edge",
    "graph/self_loops": "the node of each self-loop, in ascending order; the loops are slots, too",
    "graph/loop_weight": "the weight of each edge of self_loops",
    "graph/weight_sum": "the sum of the weights of each node's in-edges, without self-loops",
    "graph/parts": "part p is the nodes parts[p] to parts[p + 1] - 1",
    "graphs/ptr": "graph g is the nodes ptr[g] to ptr[g + 1] - 1",
    "graphs/edge_ptr": "the edges of graph g are the slots edge_ptr[g] to edge_ptr[g + 1] - 1",
    "events/src": "the source node of each event; events are edges in the order of time, numbered by edge id",
    "events/dst": "the destination node of each event",
    "events/time": "the time of each event",
    "events/weight": "the weight of each event",
    "events/input": "the position of each event in the input",
    "y": "labels; -1 for nodes without",
    "split": "0: train, 1: val, 2: test, -1: none",
    "birth": "the time from which each node exists",
}
"""array, or the last part of the path of a node array or of an array of graphs"""


def dimensions(name: str, ndim: int) -> tuple[str, ...]:
    """Return the names of an array's dimensions; arrays of one group share a name only if they share the size.

    >>> dimensions("node/node/x", 2), dimensions("graph/indices", 1)
    (('node', 'x_column'), ('slot',))
    """
    name = _of_any_type(name)
    top, _, leaf = name.partition("/")[0], *name.rpartition("/")[1:]
    if top == "checksums":
        first = f"{leaf}_chunk"
    elif ndim == 1 and leaf.endswith("_scale"):
        first = f"{leaf.removesuffix('_scale')}_column"
    else:
        first = _ENTRIES.get(name) or _ENTRIES.get(top) or f"{leaf}_row"
    rest = [f"{leaf}_column"] if ndim == 2 else [f"{leaf}_axis{k}" for k in range(1, ndim)]
    return (first, *rest)


def described(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an array's attributes with a description, if there is something to say.

    >>> described("node/node/x", {"ooc_dtype": "int8", "ooc_scale": "x_scale"})["description"]
    'int8: the value in column j is x[:, j] * x_scale[j]'
    """
    name = _of_any_type(name)
    leaf = name.rpartition("/")[2]
    text = _DESCRIPTIONS.get(name) or (_DESCRIPTIONS.get(leaf) if name.startswith(("node/", "graphs/")) else None)
    if attributes.get(SCALE) is not None:
        text = f"{attributes[DTYPE]}: the value in column j is {leaf}[:, j] * {attributes[SCALE]}[j]"
    elif DTYPE in attributes:
        text = f"{attributes[DTYPE]}, which Zarr lacks: each entry is the upper 16 bits of a float32"
    elif name.startswith("checksums/"):
        text = f"crc32c of each inner chunk of {name.removeprefix('checksums/')}, as stored"
    return dict(attributes) if text is None else {DESCRIPTION: text, **attributes}


def _of_any_type(name: str) -> str:
    """The array of a homogeneous graph that is one of an edge type: "graph/author__writes__paper/indptr" is "graph/indptr"."""
    return f"graph/{name.rpartition('/')[2]}" if name.startswith("graph/") else name


def write_placeholder(folder: Path, text: str) -> None:
    """Make a folder with files of another format an empty Zarr array with a description.

    Zarr readers list the folder without looking into it; in files they do not know they would warn of each.
    """
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [0],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {DESCRIPTION: text},
        "dimension_names": [f"{folder.name.partition('.')[0]}_file"],
    }
    write_file(folder / "zarr.json", json.dumps(metadata, indent=2).encode())
