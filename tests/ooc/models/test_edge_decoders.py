"""Decoders of pairs against the formulas, broadcast or pair by pair."""

import pytest
import torch
from torch import nn

from ooc.models import edge_decoders
from ooc.models.edge_decoders import DistMultDecoder, DotDecoder, MLPDecoder, make_decoder, scores_of_own
from ooc.stores.errors import ConfigError


@pytest.mark.parametrize("name", ["dot", "mlp", "distmult"])
def test_shared_destinations_are_scored_as_pairs_are(name: str) -> None:
    decoder = make_decoder(name, 6)
    src, dst = torch.randn(4, 6), torch.randn(5, 6)
    every = decoder(src[:, None], dst[None])
    pairs = decoder(src.repeat_interleave(5, 0), dst.repeat(4, 1)).view(4, 5)
    torch.testing.assert_close(every, pairs)
    torch.testing.assert_close(decoder.every(src, dst), pairs)
    assert decoder(src[:0], src[:0]).shape == (0,)


def test_hidden_rows_of_all_pairs_are_not_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 12 pairs at a time; scores and gradients are those of all pairs together, also with dropout."""
    made = MLPDecoder(6, hidden=32, dropout=0.5).double()
    src, dst = (torch.randn(count, 6, dtype=torch.float64, requires_grad=True) for count in (20, 5))
    torch.manual_seed(3)
    kept: list[int] = []
    monkeypatch.setattr(edge_decoders, "PAIRS_AT_ONCE", 12)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        scores = made.every(src, dst)
    assert scores.shape == (20, 5)
    assert max(kept) <= 20 * 6 < 20 * 5 * 32
    scores.sum().backward()
    made.zero_grad()
    src.grad = dst.grad = None
    found = []
    for at_once in (12, 1000):
        monkeypatch.setattr(edge_decoders, "PAIRS_AT_ONCE", at_once)
        scores = made.eval().every(src, dst)
        found.append((scores.detach(), *torch.autograd.grad((scores**2).sum(), [src, dst, *made.parameters()])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["dot", "mlp", "distmult"])
def test_destinations_of_each_source_are_gathered_some_pairs_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, dst = make_decoder(name, 6).double(), torch.randint(0, 9, (20, 5))
    src, rows = (torch.randn(count, 6, dtype=torch.float64, requires_grad=True) for count in (20, 9))
    found, most = [], []
    for at_once in (12, 1000):
        monkeypatch.setattr(edge_decoders, "PAIRS_AT_ONCE", at_once)
        kept: list[int] = []
        hooks = lambda each, kept=kept: kept.append(each.numel()) or each, lambda each: each
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            scores = scores_of_own(decoder, src, rows, dst)
        most.append(max(kept))
        found.append((scores.detach(), *torch.autograd.grad((scores**2).sum(), [src, rows, *decoder.parameters()])))
    assert most[0] < 20 * 5 * 6 <= most[1]
    torch.testing.assert_close(found[0][0], decoder(src[:, None], rows[dst]).detach())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert scores_of_own(decoder, src, rows, dst[:, :0]).shape == (20, 0)


def test_they_are_their_formulas() -> None:
    src, dst = torch.randn(7, 3), torch.randn(7, 3)
    torch.testing.assert_close(DotDecoder()(src, dst), torch.einsum("id,id->i", src, dst))
    mlp = MLPDecoder(3, hidden=5).eval()
    joined = nn.Linear(6, 5)
    joined.weight.data = torch.cat([mlp.src.weight, mlp.dst.weight], 1)
    joined.bias.data = mlp.src.bias.data
    torch.testing.assert_close(mlp(src, dst), mlp.out(joined(torch.cat([src, dst], -1)).relu()).view(-1))
    assert not torch.allclose(mlp(src, dst), mlp(dst, src))
    kind = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    distmult = DistMultDecoder(3, num_relations=2)
    expected = torch.stack([s @ torch.diag(distmult.relation[k]) @ d for s, d, k in zip(src, dst, kind, strict=True)])
    torch.testing.assert_close(distmult(src, dst, kind), expected)
    torch.testing.assert_close(distmult(src, dst)[kind == 0], expected[kind == 0])


def test_an_unknown_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="decoder 'cosine' is unknown: use one of dot, mlp, distmult"):
        make_decoder("cosine", 4)
