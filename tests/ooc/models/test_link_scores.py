import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn.kge import ComplEx, DistMult, RotatE, TransE

from ooc.config.tables import MODELS, OF_PAIRS
from ooc.models.link_scores import LinkScorer, SimplEScorer, make_scorer
from ooc.stores.errors import ConfigError

NODES, RELATIONS, WIDTH = 13, 3, 8
EVERY = [
    ("mf", None),
    ("distmult", None),
    ("complex", None),
    ("simple", None),
    *((name, distance) for name in ("transe", "rotate") for distance in ("l1", "l2", "squared")),
]


def scorer_of(name: str, distance: str | None = None, **options) -> LinkScorer:
    torch.manual_seed(7)
    scorer = make_scorer(name, WIDTH, 0 if name == "mf" else RELATIONS, distance=distance, **options)
    if scorer.relation is not None:
        torch.nn.init.normal_(scorer.relation)
    return scorer


def links() -> tuple[Tensor, Tensor, Tensor]:
    every = torch.cartesian_prod(torch.arange(NODES), torch.arange(RELATIONS), torch.arange(NODES))
    return every[:, 0], every[:, 1], every[:, 2]


def formula(scorer: LinkScorer, name: str, head: np.ndarray, relation: np.ndarray, tail: np.ndarray) -> float:
    """The score of one link as the papers write it, in float64."""
    if name == "mf":
        return float((head * tail).sum())
    half = WIDTH // 2
    if name == "simple":
        one = (head[:half] * relation[:half] * tail[half:]).sum()
        return float(one + (tail[:half] * relation[half:] * head[half:]).sum()) / 2
    if name in ("complex", "rotate"):
        h, t = (row[:half] + 1j * row[half:] for row in (head, tail))
        r = np.exp(1j * relation) if name == "rotate" else relation[:half] + 1j * relation[half:]
        if name == "complex":
            return float((h * r * t.conj()).sum().real)
        far = np.abs(h * r - t)
    elif name == "distmult":
        return float((head * relation * tail).sum())
    else:
        far = np.abs(head + relation - tail)
    return -float({"l1": far.sum(), "l2": math.sqrt((far**2).sum()), "squared": (far**2).sum()}[scorer.distance])


@pytest.mark.parametrize(("name", "distance"), EVERY)
def test_scores_are_those_of_the_formula_both_ways_and_of_all_candidates(name, distance):
    scorer, rows = scorer_of(name, distance), torch.randn(NODES, WIDTH)
    head, relation, tail = links()
    kinds = np.zeros((RELATIONS, 0)) if scorer.relation is None else scorer.relation.detach().double().numpy()
    row = rows.double().numpy()
    single = [formula(scorer, name, row[h], kinds[r], row[t]) for h, r, t in zip(head, relation, tail, strict=True)]
    wanted = torch.tensor(single, dtype=torch.float64)
    forward, backward = scorer.queries(rows[head], relation), scorer.queries(rows[tail], relation, reverse=True)
    torch.testing.assert_close(scorer.score(forward, rows[tail]).double(), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scorer.score(backward, rows[head]).double(), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scorer(forward, rows[tail]), scorer.score(forward, rows[tail]))
    for query, found, end in ((forward, scorer.score_all, tail), (backward, scorer.every, head)):
        every = found(query, rows).gather(1, end[:, None])[:, 0]
        torch.testing.assert_close(every.double(), wanted, atol=2e-3 if distance == "l2" else 1e-4, rtol=1e-4)
    if scorer.relation is not None:
        kind = scorer.score_relations(rows[head], rows[tail])
        torch.testing.assert_close(kind.gather(1, relation[:, None])[:, 0].double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["distmult", "complex", "rotate", "transe"])
def test_scores_and_gradients_are_those_of_pyg(name):
    pyg = {"distmult": DistMult, "complex": ComplEx, "rotate": RotatE, "transe": TransE}[name]
    width = WIDTH if name in ("distmult", "transe") else WIDTH // 2
    torch.manual_seed(3)
    theirs = pyg(NODES, RELATIONS, width) if name != "transe" else TransE(NODES, RELATIONS, width, p_norm=2.0)
    scorer = make_scorer(name, WIDTH, RELATIONS)
    rows = torch.cat([each.weight for each in (theirs.node_emb, getattr(theirs, "node_emb_im", None)) if each is not None], 1)
    kinds = [theirs.rel_emb.weight] if name != "complex" else [theirs.rel_emb.weight, theirs.rel_emb_im.weight]
    rows = rows.detach().requires_grad_()
    with torch.no_grad():
        scorer.relation.copy_(torch.cat(kinds, 1))
    head, relation, tail = links()
    own = torch.nn.functional.normalize(rows, dim=-1) if name == "transe" else rows
    found = scorer.score(scorer.queries(own[head], relation), own[tail])
    wanted = theirs(head, relation, tail) - (theirs.margin if name == "rotate" else 0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    weight = torch.randn(len(head))
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    gradient = torch.cat([theirs.node_emb.weight.grad] + ([theirs.node_emb_im.weight.grad] if rows.shape[1] > width else []), 1)
    torch.testing.assert_close(rows.grad, gradient, atol=1e-4, rtol=1e-4)
    kind = [theirs.rel_emb.weight.grad] + ([theirs.rel_emb_im.weight.grad] if name == "complex" else [])
    torch.testing.assert_close(scorer.relation.grad, torch.cat(kind, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "distance"), EVERY)
def test_gradients_of_all_candidates_are_those_of_single_pairs(name, distance, monkeypatch):
    monkeypatch.setattr("ooc.models.link_scores.PAIRS_AT_ONCE", 2 * NODES)  # several blocks
    scorer, rows = scorer_of(name, distance), torch.randn(NODES, WIDTH)
    relation, weight = torch.arange(NODES) % RELATIONS, torch.randn(NODES, 2 * NODES)
    found = []
    for every in (True, False):
        scorer.zero_grad()
        left, right = rows.clone().requires_grad_(), torch.cat([rows + 0.5, rows - 1]).requires_grad_()
        query = scorer.queries(left, relation)
        scores = scorer.score_all(query, right) if every else scorer.score(query.unsqueeze(1), right.unsqueeze(0))
        (scores * weight).sum().backward()
        found.append([left.grad, right.grad, *(each.grad for each in scorer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["distmult", "complex", "rotate", "transe", "simple"])
def test_reciprocal_relations_ask_for_heads_with_rows_of_their_own(name):
    scorer, rows = scorer_of(name, reciprocal=True), torch.randn(5, WIDTH)
    relation = torch.tensor([0, 1, 2, 0, 2])
    assert len(scorer.relation) == 2 * RELATIONS
    backward = scorer.queries(rows, relation, reverse=True)
    torch.testing.assert_close(backward, scorer.queries(rows, relation + RELATIONS))
    torch.testing.assert_close(scorer.relations_of(relation, reverse=True), scorer.relation[relation + RELATIONS])
    assert scorer.score_relations(rows, rows).shape == (5, RELATIONS)


def test_powers_take_complex_components_by_their_modulus():
    rows = torch.tensor([[3.0, 0.0, 4.0, 2.0]])
    assert make_scorer("complex", 4, 1).powers(rows, 3).item() == pytest.approx(5**3 + 2**3)
    assert make_scorer("distmult", 4, 1).powers(rows, 3).item() == pytest.approx(27 + 64 + 8)
    assert SimplEScorer(4).powers(rows, 3).item() == pytest.approx(27 + 64 + 8)
    for name in ("complex", "distmult", "simple"):
        assert make_scorer(name, 4, 1).powers(rows, 2).item() == pytest.approx(9 + 16 + 4)
    zero = torch.zeros(1, 4, requires_grad=True)
    make_scorer("complex", 4, 1).powers(zero, 3).backward()
    assert not zero.grad.any()


@given(st.lists(st.integers(0, 2**40), max_size=8), st.integers(0, 2**63), st.sampled_from(["mf", "complex", "rotate"]))
@settings(max_examples=25, deadline=None)
def test_initial_rows_depend_on_the_key_and_the_node_alone(nodes, stream, name):
    scorer = make_scorer(name, WIDTH, 2)
    rows = scorer.initial_rows(np.array(nodes, np.int64), stream)
    assert (np.abs(rows) <= scorer.bound).all()
    for node, row in zip(nodes, rows, strict=True):
        np.testing.assert_array_equal(scorer.initial_rows(np.array([node]), stream)[0], row)
    wider = scorer.initial_rows(np.array(nodes, np.int64), stream, bound=2 * scorer.bound)
    np.testing.assert_allclose(wider, 2 * rows, rtol=1e-6)


def test_distances_of_equal_rows_have_no_nan_gradients():
    for name, distance in EVERY[4:]:
        scorer, rows = scorer_of(name, distance), torch.zeros(2, WIDTH, requires_grad=True)
        with torch.no_grad():
            scorer.relation.zero_()
        query = scorer.queries(rows, torch.tensor([0, 1]))
        (scorer.score_all(query, rows).sum() + scorer.score(query, rows).sum()).backward()
        assert rows.grad.isfinite().all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="is unknown"):
        make_scorer("transformer", 8)
    with pytest.raises(ConfigError, match="even width, not 7"):
        make_scorer("complex", 7, 2)
    assert {name for name in MODELS if make_scorer(name, 8, 2).parts == 2} == set(OF_PAIRS), "what settings refuse"
    with pytest.raises(ConfigError, match="distance = l1 does not apply to complex"):
        make_scorer("complex", 8, 2, distance="l1")
    with pytest.raises(ConfigError, match="distance 'l3' is unknown"):
        make_scorer("rotate", 8, 2, distance="l3")
    assert make_scorer("mf", 7).relation is None
