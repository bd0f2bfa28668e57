"""Small heterogeneous graphs, and their full neighborhoods computed plainly."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from ooc.graph.hetero import EdgeKey, EdgeSample, HeteroBlock, HeteroSubgraph, hetero_block_of, hetero_blocks_of
from ooc.stores.graph import Graph

NODES = {"paper": 30, "author": 20, "venue": 4}
WIDTHS = {"paper": 5, "author": 3, "venue": 4}
EDGES = {
    ("author", "writes", "paper"): 60,
    ("paper", "written_by", "author"): 60,
    ("paper", "cites", "paper"): 80,
    ("paper", "in", "venue"): 25,
    ("venue", "has", "paper"): 25,
}


def hetero_data(seed: int = 0, widths: Mapping[str, int] = WIDTHS, nodes: Mapping[str, int] = NODES) -> HeteroData:
    """A random graph of three node types and five edge types; the last node of each type has no in-edges. Width 0: no x."""
    rng = np.random.default_rng(seed)
    data = HeteroData()
    for name, count in nodes.items():
        data[name].num_nodes = count
        if widths[name]:
            data[name].x = torch.from_numpy(rng.standard_normal((count, widths[name])).astype(np.float32))
    for key, count in EDGES.items():
        ends = rng.integers(0, nodes[key[0]], count), rng.integers(0, nodes[key[2]] - 1, count)
        data[key].edge_index = torch.from_numpy(np.stack(ends))
    return data


def sizes(data: HeteroData) -> dict[str, int]:
    """Node type -> number of nodes."""
    return {name: data[name].num_nodes for name in data.node_types}


def full_neighborhood(data: HeteroData, node_type: str, seeds: Tensor, hops: int) -> tuple[HeteroSubgraph, list[HeteroBlock]]:
    """All in-edges of the seeds and of the nodes that they bring, hop by hop, and a block a layer."""
    node = {name: [] for name in data.node_types}
    node[node_type] = seeds.tolist()
    counts = {name: [len(found)] for name, found in node.items()}
    graphs = {
        key: Graph.from_edges(*data[key].edge_index.numpy(), num_nodes=max(sizes(data).values())) for key in data.edge_types
    }
    slots: dict[EdgeKey, list[list[int]]] = {key: [] for key in data.edge_types}
    edges: dict[EdgeKey, list[int]] = {key: [] for key in data.edge_types}
    begin = dict.fromkeys(node, 0)
    for _ in range(hops):
        end = {name: len(found) for name, found in node.items()}
        for key in data.edge_types:
            drawn = [list(range(*graphs[key].slots(v))) for v in node[key[2]][begin[key[2]] : end[key[2]]]]
            slots[key] += drawn
            edges[key].append(sum(map(len, drawn)))
            known = set(node[key[0]])
            for slot in (slot for each in drawn for slot in each):
                source = int(graphs[key].indices[slot])
                if source not in known:
                    known.add(source)
                    node[key[0]].append(source)
        for name, found in node.items():
            counts[name].append(len(found) - end[name])
        begin = end
    samples = {}
    for key, drawn in slots.items():
        place = {v: i for i, v in enumerate(node[key[0]])}
        flat = np.array([slot for each in drawn for slot in each], np.int64)
        source = np.array([place[int(v)] for v in graphs[key].indices[flat]], np.int64)
        samples[key] = EdgeSample(np.cumsum([0, *map(len, drawn)]).astype(np.int64), source, flat)
    subgraph = HeteroSubgraph(
        {name: np.array(found, np.int64) for name, found in node.items()},
        samples,
        {name: tuple(found) for name, found in counts.items()},
        {key: tuple(found) for key, found in edges.items()},
    )
    index = {key: torch.from_numpy(sample.edge_index()) for key, sample in samples.items()}
    first = hetero_block_of(graphs, subgraph, index, {})
    return subgraph, hetero_blocks_of(first, subgraph.num_nodes, subgraph.num_edges)
