"""Losses of links against torch's own and plain formulas in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from ooc.metrics.link_losses import LinkLoss, loss_of_all
from ooc.stores.errors import ConfigError

POSITIVE, NEGATIVE = torch.tensor([0.3, -2.0, 4.0]), torch.tensor([[0.1, 5.0], [-1.0, -2.0], [3.0, 4.0]])


def test_bce_is_torchs_over_all_scores() -> None:
    scores = torch.cat([POSITIVE, NEGATIVE.view(-1)])
    label = torch.tensor([1.0] * 3 + [0.0] * 6)
    expected = F.binary_cross_entropy_with_logits(scores, label)
    torch.testing.assert_close(LinkLoss("bce")(POSITIVE, NEGATIVE), expected)
    torch.testing.assert_close(LinkLoss("bce")(POSITIVE, NEGATIVE.view(-1)), expected)


def test_bpr_and_softmax_are_their_formulas() -> None:
    pairs = [(p, n) for p, row in zip(POSITIVE.tolist(), NEGATIVE.tolist(), strict=True) for n in row]
    bpr = sum(-math.log(1 / (1 + math.exp(n - p))) for p, n in pairs) / 6
    assert float(LinkLoss("bpr")(POSITIVE, NEGATIVE)) == pytest.approx(bpr, rel=1e-6)
    scores = torch.cat([POSITIVE[:, None], NEGATIVE], 1)
    expected = F.cross_entropy(scores, torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(LinkLoss("softmax")(POSITIVE, NEGATIVE), expected)


def test_adversarial_weights_negatives_by_their_softmax_which_has_no_gradient() -> None:
    margin, temperature, expected = 2.0, 0.5, 0.0
    positive, negative = POSITIVE.clone().requires_grad_(), NEGATIVE.clone().requires_grad_()
    share = [[math.exp(temperature * n) for n in row] for row in NEGATIVE.tolist()]
    gradient = []
    for p, row, weight in zip(POSITIVE.tolist(), NEGATIVE.tolist(), share, strict=True):
        own = [w / sum(weight) for w in weight]
        expected += math.log(1 + math.exp(-margin - p)) / 6
        expected += sum(w * math.log(1 + math.exp(margin + n)) for w, n in zip(own, row, strict=True)) / 6
        gradient.append([w / (1 + math.exp(-margin - n)) / 6 for w, n in zip(own, row, strict=True)])
    loss = LinkLoss("adversarial", margin=margin, temperature=temperature)(positive, negative)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(negative.grad, torch.tensor(gradient))


def test_a_sample_of_the_candidates_counts_for_all() -> None:
    shared = LinkLoss("softmax", population=20)(POSITIVE, NEGATIVE)
    repeated = LinkLoss("softmax")(POSITIVE, NEGATIVE.repeat(1, 10))
    torch.testing.assert_close(shared, repeated)
    assert LinkLoss("softmax", population=20)(POSITIVE, NEGATIVE[:, :0]) == 0


def test_the_loss_of_all_is_softmax_against_all_others() -> None:
    scores, true = torch.randn(3, 7), torch.tensor([0, 6, 2])
    own = torch.nn.functional.one_hot(true, 7).bool()
    positive = scores[own].clone()
    torch.testing.assert_close(loss_of_all(scores, true), LinkLoss("softmax")(positive, scores, own))
    spread = -0.1 * scores.log_softmax(1).mean(1) + 0.9 * (scores.logsumexp(1) - positive)
    torch.testing.assert_close(loss_of_all(scores, true, smoothing=0.1), spread.mean())
    assert loss_of_all(scores[:0], true[:0]) == 0


@pytest.mark.parametrize("name", ["bce", "bpr", "softmax", "adversarial"])
def test_known_links_among_negatives_do_not_count(name: str) -> None:
    known = torch.tensor([[False, True], [False, True], [False, True]])
    loss = LinkLoss(name)
    torch.testing.assert_close(loss(POSITIVE, NEGATIVE, known), loss(POSITIVE, NEGATIVE[:, :1]))
    positive, negative = POSITIVE.clone().requires_grad_(), NEGATIVE.clone().requires_grad_()
    loss(positive, negative, known).backward()
    assert positive.grad.isfinite().all()
    assert (negative.grad[:, 1] == 0).all()
    assert (negative.grad[:, 0] > 0).all()
    assert loss(POSITIVE[:0], NEGATIVE[:0]) == 0
    every = loss(POSITIVE, NEGATIVE, torch.ones(3, 2, dtype=torch.bool))
    assert every.isfinite()


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss 'hinge' is unknown: use one of bce, bpr, softmax, adversarial"):
        LinkLoss("hinge")
