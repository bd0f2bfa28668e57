"""LightGCN's propagation over sampled links against PyG's convolution over all of them."""

import numpy as np
import pytest
import torch
from torch_geometric.nn import LGConv
from torch_geometric.utils import to_undirected

from ooc.layerwise.propagation import SymmetricAdjacency, propagate
from ooc.layerwise.sampled_propagation import SampledPropagation
from ooc.sampling.propagation_sampler import PropagationSampler

USERS, ITEMS, WIDTH, LAYERS = 40, 25, 8, 3
NODES = USERS + ITEMS
SEEDS = np.array([3, 44, 0, 39, 64, 17])


@pytest.fixture(scope="module")
def links():
    pair = np.unique(np.random.default_rng(0).integers(0, (USERS - 2, ITEMS - 1), (300, 2)), axis=0)
    return pair[:, 0].copy(), USERS + pair[:, 1]


@pytest.fixture(scope="module")
def adjacency(links):
    return SymmetricAdjacency.of(lambda: iter([links]), NODES)


def sampler_of(adjacency, fanout):
    return PropagationSampler(adjacency.indptr, adjacency.neighbor, adjacency.weight.numpy()[:, 0], fanout)


def by_pyg(table, links):
    """The rows behind the propagation, float64."""
    edge_index = to_undirected(torch.from_numpy(np.stack(links)), num_nodes=NODES)
    conv, rows, total = LGConv(), table, table
    for _ in range(LAYERS):
        rows = conv(rows, edge_index)
        total = total + rows
    return total / (LAYERS + 1)


def test_with_all_neighbors_rows_and_gradients_are_pygs_and_the_exact_ones_to_the_bit(links, adjacency):
    torch.manual_seed(0)
    table, weights = torch.randn(NODES, WIDTH), torch.randn(2, len(SEEDS), WIDTH)
    sampled = sampler_of(adjacency, [-1] * LAYERS).sample(SEEDS, 1)
    rows = table[sampled.node].requires_grad_()
    own, propagated = SampledPropagation.apply(rows, sampled)
    assert torch.equal(own, table[SEEDS])
    assert torch.equal(propagated, propagate(adjacency, table, LAYERS)[SEEDS])
    ((own * weights[0]).sum() + (propagated.square() * weights[1]).sum()).backward()
    theirs = table.double().requires_grad_()
    wanted = by_pyg(theirs, links)[SEEDS]
    torch.testing.assert_close(propagated.double(), wanted, rtol=1e-5, atol=1e-6)
    ((theirs[SEEDS] * weights[0]).sum() + (wanted.square() * weights[1]).sum()).backward()
    torch.testing.assert_close(rows.grad.double(), theirs.grad[sampled.node], rtol=1e-5, atol=1e-5)
    left_out = np.setdiff1d(np.arange(NODES), sampled.node)
    assert not theirs.grad[left_out].any()


@pytest.mark.parametrize("fanout", [[2, 2, 2], [1, 3, 2], [-1, 1, 1]])
def test_the_expectation_over_samples_is_the_exact_propagation(adjacency, fanout):
    """Also of walks that come back to a node, as every layer draws links of its own: within 4.5 standard errors."""
    torch.manual_seed(1)
    table, draws = torch.randn(NODES, WIDTH), 4000
    sampler, found = sampler_of(adjacency, fanout), []
    for number in range(draws):
        sampled = sampler.sample(SEEDS, number)
        found.append(SampledPropagation.apply(table[sampled.node], sampled)[1])
    every = torch.stack(found).double()
    error = every.std(0) / draws**0.5
    exact = propagate(adjacency, table, LAYERS)[SEEDS].double()
    assert ((every.mean(0) - exact).abs() <= 4.5 * error + 1e-6).all()
    assert error.max() < 0.05


@pytest.mark.parametrize("fanout", [[2, 3, 1]])
def test_the_gradient_is_that_of_the_sampled_sums(adjacency, fanout):
    sampled = sampler_of(adjacency, fanout).sample(SEEDS, 9)
    matrix = torch.eye(len(sampled.node))
    own, propagated = SampledPropagation.apply(matrix, sampled)
    rows, weights = torch.randn(len(matrix), 3).requires_grad_(), torch.randn(2, len(SEEDS), 3)
    of_table, behind = SampledPropagation.apply(rows, sampled)
    torch.testing.assert_close(behind, propagated @ rows)
    ((of_table * weights[0]).sum() + (behind * weights[1]).sum()).backward()
    torch.testing.assert_close(rows.grad, own.t() @ weights[0] + propagated.t() @ weights[1])
