"""Small data sets of graphs, and PyG's batches of them in the order of ours."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data


def random_graphs(count: int, seed: int = 0, **fixed: Any) -> list[Data]:
    """Graphs of 1 to 8 nodes, some without edges, with attributes of nodes, edges and graphs in one and two dimensions."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    found = []
    for number in range(count):
        nodes = int(whole(1, 9, 1))
        edges = int(whole(0, 20, 1))
        found.append(
            Data(
                x=torch.randn(nodes, 5, generator=generator),
                edge_index=whole(0, nodes, 2, edges),
                edge_attr=torch.randn(edges, 3, generator=generator),
                bond=whole(0, 4, edges),
                z=whole(0, 9, nodes),
                y=whole(0, 3, 1),
                u=torch.randn(1, 2, generator=generator),
                number=number,
                **fixed,
            )
        )
    return found


def sorted_edges(data: Data) -> Data:
    """The graph with its edges sorted by destination, those of one destination as they are."""
    order = torch.sort(data.edge_index[1], stable=True).indices
    by_edge = {name: data[name][order] for name in ("edge_attr", "bond", "edge_weight") if name in data}
    return Data(**{**data.to_dict(), **by_edge, "edge_index": data.edge_index[:, order]})


def assert_same_batch(ours: Any, graphs: list[Data]) -> None:
    """Compare a batch to the bit with PyG's batch of `graphs`, but for what only ours has."""
    theirs: Any = Batch.from_data_list([sorted_edges(graph) for graph in graphs])
    assert set(ours.keys()) - {"graph_id", "e_id"} == set(theirs.keys())
    for name in theirs.keys():  # noqa: SIM118 - of a Batch
        expected = theirs[name]
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name], expected), name
    assert ours.num_graphs == theirs.num_graphs
