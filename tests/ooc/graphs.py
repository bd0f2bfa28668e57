"""Small graphs and a brute-force sampler for the tests of layers and models."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.graph.blocks import Block, blocks_of
from ooc.models.builders import full_blocks


@dataclass
class Sample:
    x_rows: Tensor
    edge_index: Tensor
    blocks: list[Block]
    batch_size: int
    x: Tensor


def hub_graph(num_nodes: int = 60, seed: int = 0, loops: bool = True) -> Tensor:
    """A random directed graph with a hub (node 0), isolated nodes (the last three), duplicate edges and self-loops."""
    generator = torch.Generator().manual_seed(seed)
    last = num_nodes - 3
    edge_index = torch.randint(0, last, (2, 4 * num_nodes), generator=generator)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    hub = torch.stack([torch.arange(1, last), torch.zeros(last - 1, dtype=torch.long)])
    parts = [edge_index, hub, edge_index[:, :20]]
    if loops:
        own = torch.tensor([0, 3, 3, 7, last - 1])
        parts.append(torch.stack([own, own]))
    edge_index = torch.cat(parts, dim=1)
    return edge_index[:, torch.randperm(edge_index.size(1), generator=generator)]


def sample(
    edge_index: Tensor,
    x: Tensor,
    seeds: Tensor,
    fanout: list[int],
    weight: Tensor | None = None,
    generator: torch.Generator | None = None,
    replace: bool = False,
) -> Sample:
    """Uniform neighbor sampling in plain Python, as blocks: seeds first, then each hop's new nodes."""
    whole = full_blocks(edge_index, x.size(0), 1, weight)[0]
    node, local = seeds.tolist(), {v: i for i, v in enumerate(seeds.tolist())}
    first, num_nodes, num_edges = 0, [len(node)], []
    source, target, slots = [], [], []
    for k in fanout:
        last = len(node)
        for i in range(first, last):
            low, high = whole.indptr[node[i]].item(), whole.indptr[node[i] + 1].item()
            for slot in draw(low, high, k, generator, replace):
                v = whole.edge_index[0, slot].item()
                if v not in local:
                    local[v] = len(node)
                    node.append(v)
                source.append(local[v])
                target.append(i)
                slots.append(slot)
        num_edges.append(len(source) - sum(num_edges))
        num_nodes.append(len(node) - last)
        first = last
    rows, slot = torch.tensor(node), torch.tensor(slots, dtype=torch.long)
    edges = torch.tensor([source, target], dtype=torch.long).view(2, -1)
    num_dst = len(node) - num_nodes[-1]
    indptr = torch.zeros(num_dst + 1, dtype=torch.long)
    indptr[1:] = torch.bincount(edges[1], minlength=num_dst).cumsum(0)

    def at(column: Tensor | None, index: Tensor) -> Tensor | None:
        return None if column is None else column[index]

    block = Block(
        edges,
        indptr,
        len(node),
        num_dst,
        whole.degree[rows],
        at(whole.loops, rows),
        at(whole.weight, slot),
        at(whole.weight_sum, rows),
        at(whole.loop_weight, rows),
    )
    return Sample(rows, edges, blocks_of(block, tuple(num_nodes), tuple(num_edges)), len(seeds), x[rows])


def draw(low: int, high: int, k: int, generator: torch.Generator | None, replace: bool) -> list[int]:
    """k of the slots low:high, all of them where k is -1."""
    if low == high:
        return []
    if replace:
        return sorted(torch.randint(low, high, (k,), generator=generator).tolist())
    if k < 0 or high - low <= k:
        return list(range(low, high))
    return sorted((low + torch.randperm(high - low, generator=generator)[:k]).tolist())
