"""Losses of links against torch's own and plain formulas in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from ooc.metrics.link_losses import LinkLoss
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


@pytest.mark.parametrize("name", ["bce", "bpr", "softmax"])
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


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss 'hinge' is unknown: use one of bce, bpr, softmax"):
        LinkLoss("hinge")
