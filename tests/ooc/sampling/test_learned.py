"""A learned importance: its inputs against plain loops, its score against autograd and on average, and that it learns."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ooc.runtime.keyed_random import Purpose
from ooc.runtime.keyed_random import key as key_of
from ooc.sampling import NeighborSampler
from ooc.sampling.importance import InEdges
from ooc.sampling.layer_wise import LayerWise, draw_sources
from ooc.sampling.learned import HIDDEN, INPUTS, MOST_LOGIT, SIZE, SKETCH, Policy, sketch_of
from ooc.stores.arrays.rows import ArrayRows
from tests.ooc.sampling.test_importance import overlapping
from tests.ooc.sampling.test_layer_wise import sums_and_means


def policy_of(num_nodes: int, seed: int = 0, scale: float = 0.5) -> Policy:
    rng = np.random.default_rng(seed)
    return Policy(rng.normal(size=(num_nodes, SKETCH)).astype(np.float32), scale * rng.normal(size=SIZE))


def hop_of(num_nodes: int, targets: int = 12) -> tuple[InEdges, NDArray[np.int64]]:
    """All in-edges of some nodes, and the nodes."""
    rng = np.random.default_rng(1)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(1, 9, targets))])
    node, source = np.unique(rng.integers(0, num_nodes, indptr[-1]), return_inverse=True)
    return InEdges(indptr, np.arange(indptr[-1]), source, node), rng.permutation(num_nodes)[:targets]


def test_inputs_are_those_of_the_plain_loop() -> None:
    found, node = hop_of(40)
    policy, degree = policy_of(40), np.arange(len(found.node))
    inputs = policy.look(found, node, degree, 1).inputs
    x = policy.sketch.astype(float)
    at = np.repeat(np.arange(len(node)), np.diff(found.indptr))
    means = [x[found.node[found.source[at == i]]].mean(0) for i in range(len(node))]
    for u, v in enumerate(found.node):
        its = at[found.source == u]
        expected = [
            *x[v],
            *x[node[its]].mean(0),
            *np.mean([means[i] for i in its], 0),
            np.log1p(len(its)),
            np.log1p(degree[u]),
            1,
        ]
        assert np.allclose(inputs[u], expected, atol=1e-6)


def test_the_score_is_the_gradient_of_the_draws_logarithm() -> None:
    """By torch: of the sum of drawn logits, less those of all sources by their probabilities."""
    found, node = hop_of(40)
    policy = policy_of(40)
    seen = policy.look(found, node, np.ones(len(found.node), int), 0)
    factor = np.empty(len(found.node))
    last, tau = draw_sources(found.node, seen.importance, np.uint64(3), 7, np.empty(7), np.empty(7, np.int64), factor)
    theta = torch.from_numpy(policy.parameters.copy()).requires_grad_()
    split = INPUTS * HIDDEN
    hidden = torch.tanh(torch.from_numpy(seen.inputs) @ theta[:split].view(INPUTS, HIDDEN) + theta[split:-HIDDEN])
    logit = (hidden @ theta[-HIDDEN:]).clamp(-MOST_LOGIT, MOST_LOGIT)
    assert np.allclose(seen.importance, logit.detach().exp().numpy())
    limit = torch.from_numpy(np.where(factor > 0, tau, last))
    p = (limit * logit.exp()).clamp(max=1).detach()
    ((torch.from_numpy(factor > 0).double() - p) * logit).sum().div(7).backward()
    assert theta.grad is not None
    assert np.allclose(policy.score(seen, factor > 0, last, tau), theta.grad.numpy(), atol=1e-10)


def test_the_expected_score_is_zero_and_the_expected_estimate_the_full_aggregate() -> None:
    graph, seeds = overlapping(), np.arange(0, 60, 2)
    degree, rng = np.diff(graph.indptr), np.random.default_rng(3)
    value = (rng.normal(size=60) + 1)[graph.indices]
    full = np.bincount(np.repeat(np.arange(60), degree), value, 60)[seeds]
    sampler = NeighborSampler(graph, [15], layer_wise=LayerWise(policy_of(60, scale=0.3), normalize=False))
    sums, scores = [], []
    for draw in range(3000):
        found = sampler.sample(seeds, key_of(draw, Purpose.SAMPLE))
        sums.append(sums_and_means(found, value)[0])
        scores.append(found.score)
    for estimates, expected in ((sums, full), (scores, 0.0)):
        error = np.std(estimates, 0) / np.sqrt(len(estimates))
        assert (np.abs(np.mean(estimates, 0) - expected) < 4.8 * error + 1e-12).all()


def test_it_learns_to_draw_what_lowers_the_loss() -> None:
    """A loss that counts the sources drawn whose first feature is negative."""
    graph = overlapping(200)
    policy = Policy(policy_of(200).sketch, np.zeros(SIZE))
    policy = Policy.begun(policy.sketch, 1)
    bad = policy.sketch[:, 0] < 0
    sampler = NeighborSampler(graph, [20], layer_wise=LayerWise(policy))
    shares, baseline = [], 0.5
    for draw in range(400):
        found = sampler.sample(np.arange(draw % 10, 200, 10), draw)
        drawn = np.unique(graph.indices[found.slot])
        loss = bad[drawn].mean()
        shares.append(loss)
        assert found.score is not None
        policy.parameters[:] -= 2.0 * (loss - baseline) * found.score
        baseline = 0.9 * baseline + 0.1 * loss
    assert np.mean(shares[:30]) > 0.4
    assert np.mean(shares[-30:]) < 0.2


def test_it_begins_by_finding_all_sources_equally_important() -> None:
    found, node = hop_of(40)
    seen = Policy.begun(policy_of(40).sketch, 2).look(found, node, np.ones(len(found.node), int), 0)
    assert (seen.importance == 1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_a_sketch_keeps_distances_about(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(4, 300)) * 20)[rng.integers(0, 4, 500)] + rng.normal(size=(500, 300))
    rows = ArrayRows(x.astype(dtype))
    found = sketch_of(rows, 5)
    assert found.shape == (500, SKETCH)
    assert np.allclose(found.std(0), 1, atol=1e-3)
    monkeypatch.setattr("ooc.sampling.learned._AT_ONCE", 10_000)
    assert np.allclose(sketch_of(rows, 5), found, atol=1e-4)
    near = np.linalg.norm(x - x[0], axis=1) < 200
    far = np.linalg.norm(found - found[0], axis=1)
    assert far[near].max() < far[~near].min()
