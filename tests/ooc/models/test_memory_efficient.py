"""Layers written by hand against autograd's: the same values and gradients, and less kept for the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.graph.blocks import Block
from ooc.models.builders import full_blocks
from ooc.models.dropout import dropout
from ooc.models.layers import autocast
from ooc.models.memory_efficient import Relu, relu, relu_dropout, sage_layer, sum_of_products
from ooc.runtime import parts
from ooc.runtime.restoring import settings_restored

N, E, WIDE, OUT = 40, 300, 7, 5


def leaf(*shape: int, wanted: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(wanted)


def block(seed: int) -> Block:
    torch.manual_seed(seed)
    return full_blocks(torch.randint(N, (2, E)), N, 1)[0]


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    torch.manual_seed(9)
    (out * torch.randn_like(out)).sum().backward()
    found = [each.grad for each in leaves]
    for each in leaves:
        each.grad = None
    return found


def same(own: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    return all((a is None) == (b is None) for a, b in zip(own, wanted, strict=True)) and all(
        torch.allclose(a, b) for a, b in zip(own, wanted, strict=True) if a is not None and b is not None
    )


@pytest.mark.parametrize("x_wanted", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_are_linear_maps_added(x_wanted: bool, precision: str) -> None:
    dtype, widths = (torch.float64 if precision == "fp32" else torch.float32), (WIDE, WIDE, 1)
    rows, weights = [leaf(N, width, wanted=x_wanted) for width in widths], [leaf(OUT, width) for width in widths]
    leaves = [each.detach().to(dtype).requires_grad_(each.requires_grad) for each in (leaf(OUT), *rows, *weights)]
    bias, *others = leaves
    pairs = [each for pair in zip(others[:3], others[3:], strict=True) for each in pair]
    with autocast(torch.device("cpu"), precision):
        own = sum_of_products(bias, *pairs)
        wanted = sum((F.linear(*pairs[i : i + 2]) for i in (2, 4)), start=F.linear(pairs[0], pairs[1], bias))
    assert own.dtype == wanted.dtype
    assert torch.allclose(own, wanted)
    assert same(gradients(own, leaves), gradients(wanted, leaves))


@pytest.mark.parametrize("x_wanted", [True, False])
def test_a_sage_layer_is_the_sum_over_edges_and_two_linear_maps(x_wanted: bool) -> None:
    whole = block(1)
    x, value = leaf(N, WIDE, wanted=x_wanted), torch.rand(whole.edge_index.size(1), dtype=torch.float64)
    weights = leaf(OUT, WIDE), leaf(OUT), leaf(OUT, WIDE)
    leaves = [x, *weights]
    source, target = whole.edge_index
    neighbor = torch.zeros(N, WIDE, dtype=torch.float64).index_add(0, target, x[source] * value[:, None])
    wanted = F.linear(neighbor, weights[0], weights[1]) + F.linear(x, weights[2])
    own = sage_layer(x, value, (whole.edge_index, whole.indptr), *weights)
    assert torch.allclose(own, wanted)
    assert same(gradients(own, leaves), gradients(wanted, leaves))


@pytest.mark.parametrize("training", [True, False])
def test_relu_is_torch_s_and_keeps_a_byte_a_number(training: bool) -> None:
    base = torch.randn(N, WIDE)
    base[0, :3] = torch.tensor([0.0, -0.0, float("nan")])
    base.requires_grad_(training)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        own = Relu()(base * 1)
    wanted = nn.ReLU()(base * 1)
    assert torch.equal(own.nan_to_num(-1), wanted.nan_to_num(-1))
    if training:
        assert [tensor.dtype for tensor in kept if tensor.numel() > 1] == [torch.bool]
        assert same(gradients(own.nan_to_num(0), [base]), gradients(wanted.nan_to_num(0), [base]))


def test_relu_stops_infinite_gradients_where_the_number_was_cut() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    Relu()(x * 1).backward(torch.full((3,), torch.inf))
    assert x.grad.tolist() == [0, 0, torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("threads", [1, 2])
def test_relu_with_dropout_in_one_pass_is_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, p: float, threads: int
) -> None:
    """To the bit, of NaN and infinite numbers and gradients too; in float32 it keeps a byte a number and nothing else."""
    monkeypatch.setattr(parts, "LEAST", 50)
    torch.manual_seed(1)
    base, grad = torch.randn(N, WIDE).to(dtype), torch.randn(N, WIDE).to(dtype)
    base[0, :5] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])
    grad[1, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    found, kept = [], list[Tensor]()
    with settings_restored():
        torch.set_num_threads(threads)
        for both in (lambda x: relu_dropout(x, p), lambda x: dropout(relu(x), p, training=True)):
            torch.manual_seed(5)
            x = base.clone().requires_grad_()
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
                out = both(x * 1)
            out.backward(grad)
            found.append((out.detach(), x.grad, torch.get_rng_state()))
            if dtype == torch.float32:
                assert [each.dtype for each in kept if each.numel() > 1] == [torch.bool]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        torch.manual_seed(5)
        assert torch.equal(relu_dropout(base.clone(), p).view(torch.uint8), found[0][0].view(torch.uint8))
