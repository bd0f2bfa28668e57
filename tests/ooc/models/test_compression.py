"""Saved-tensor hooks that compress: what is kept and what is not, gradients against those of exact activations, exact masks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from ooc.graph.blocks import Block
from ooc.models.builders import build_model, full_blocks
from ooc.models.compression import LEAST, compressed_activations, packed_bits, tensors_in, unpacked_bits
from ooc.models.quantization import BITS, kept_share
from ooc.runtime.step_memory import StepMemory

N, E, WIDE = 3000, 20_000, 64


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, list[Block], Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, 32), full_blocks(torch.randint(N, (2, E)), N, 3), torch.randint(8, (N,))


def model_of(name: str) -> nn.Module:
    torch.manual_seed(1)
    return build_model(
        name, 32, WIDE, 8, num_layers=3, dropout=0.3, norm="none" if name in ("sage", "gin", "gat") else "layer", heads=4
    )


def gradient(model: nn.Module, batch: Any, compress: Any, seed: int = 3) -> tuple[float, Tensor, StepMemory]:
    """(loss, gradients of all parameters in one vector, what stood between the passes)."""
    x, blocks, y = batch
    model.zero_grad()
    torch.manual_seed(seed)
    with StepMemory(model) as step:
        with compressed_activations(compress, model, (x, blocks)):
            out = model(x, blocks)
        loss = F.cross_entropy(out, y)
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), step


@pytest.mark.parametrize("name", ["sage", "gcn", "gin", "gat"])
def test_outputs_do_not_change_and_gradients_only_by_the_rounding(name: str, batch: Any) -> None:
    model = model_of(name)
    loss, exact, _ = gradient(model, batch, None)
    errors = []
    for compress in BITS:
        again, found, _ = gradient(model, batch, compress)
        assert again == loss
        errors.append(float((found - exact).norm() / exact.norm()))
    assert 0 < errors[0] < 0.05
    assert errors[0] < errors[1] < errors[2] < 2


def test_the_gradient_is_right_on_average(batch: Any) -> None:
    """Of a map, whose gradient is linear in what is kept: the mean of many steps comes closer by the root of their number."""
    torch.manual_seed(0)
    x, lin, grad = torch.randn(512, WIDE, requires_grad=True), nn.Linear(WIDE, 16), torch.randn(512, 16)

    def weight_gradient(compress: Any, seed: int) -> Tensor:
        torch.manual_seed(seed)
        with compressed_activations(compress, lin):
            out = lin(x * 1.0)
        return torch.autograd.grad(out, lin.weight, grad)[0]

    exact = weight_gradient(None, 0)
    off = torch.stack([weight_gradient("int2", seed) - exact for seed in range(200)])
    one, many = off.norm(dim=(1, 2)).mean(), off.mean(0).norm()
    assert many < 1.3 * one / 200**0.5


@pytest.mark.parametrize("compress", BITS)
def test_what_autograd_keeps_is_a_quarter_an_eighth_or_a_sixteenth(compress: Any, batch: Any) -> None:
    """Storages that stand between the passes, by who allocated them; the loss's own, and vectors, stay."""
    model = model_of("sage")
    _, _, plain = gradient(model, batch, None)
    _, _, packed = gradient(model, batch, compress)
    outside = sum(line.kept for line in plain.lines if not line.layer.startswith("layers"))
    vectors = 4 * 3 * E + 8 * N * 4  # factors of the edges of three layers, and the logits
    assert packed.kept is not None
    assert plain.kept is not None
    share = (packed.kept - outside - vectors) / (plain.kept - outside - vectors)
    assert share < kept_share(compress) + 0.01, "masks, of which eight are a byte, make it less than floats alone"


def test_parameters_the_batch_and_what_is_narrow_or_small_stay_as_they_are() -> None:
    rows, weight = torch.randn(LEAST, 20), nn.Parameter(torch.randn(20, LEAST))
    narrow, vector = torch.randn(LEAST, 8, requires_grad=True), torch.randn(LEAST, requires_grad=True)
    small = torch.randn(4, 20, requires_grad=True)
    made: list[Any] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            ctx.save_for_backward(*given)
            made.append(ctx)
            return given[0].sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            raise NotImplementedError

    model = nn.Module()
    model.weight = weight
    with compressed_activations("int8", model, Data(x=rows)):
        made_rows = rows * 2
        as_it_is = weight, rows, rows[:, :17], weight.t(), narrow, vector, small, rows.long(), rows[:1].expand(99, -1)
        Look.apply(*as_it_is, made_rows)  # type: ignore[no-untyped-call]
    (ctx,) = made
    unpacked = ctx.saved_tensors
    assert all(torch.equal(given, back) for given, back in zip(as_it_is, unpacked, strict=False))
    assert not torch.equal(unpacked[9], made_rows)
    assert (unpacked[9] - made_rows).abs().max() < 0.1


def test_what_two_operations_save_is_kept_once_and_changes_in_place_are_seen() -> None:
    model = nn.Identity()
    x = torch.randn(LEAST, 32, requires_grad=True)
    with StepMemory() as step, compressed_activations("int8", model):
        h = x * 1.0
        out = (h.sin() + h.cos()).sum()  # both save h
        del h
    assert step.kept is not None
    assert step.kept < 1.05 * 4 * kept_share("int8") * LEAST * 32 + 1000
    torch.manual_seed(0)
    with compressed_activations("int8", model):
        h = x * 1.0
        first = h.exp()
        changed = h.sin()
    out = out + first.sum() + changed.sum()
    (found,) = torch.autograd.grad(out, x)
    wanted = x.cos() - x.sin() + x.exp() + x.cos()
    assert (found - wanted).norm() / wanted.norm() < 0.02


class OfTorch(nn.Module):
    """A user's model with torch's own ReLU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, WIDE), nn.Linear(WIDE, 8)
        self.relu, self.drop = nn.ReLU(), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.relu(self.first(x)))
        h = F.relu(h + 0.1 * h.roll(1, 0) - 0.05, inplace=True)
        return self.second(torch.relu(h - 0.1).relu())


def test_masks_of_torchs_relu_and_dropout_are_exact_and_its_draws_the_same() -> None:
    """A gradient that only masks decide: of ones through ReLU and dropout."""
    torch.manual_seed(0)
    model, x = OfTorch(), torch.randn(N, 32)
    found = []
    for compress in (None, "int2"):
        torch.manual_seed(5)
        given = x.clone().requires_grad_()
        with compressed_activations(compress, model):
            out = model(given)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), [given, model.second.weight, model.first.weight])))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]), "of the input: weights and masks alone"
    assert not torch.equal(found[0][3], found[1][3])


@pytest.mark.parametrize("name", ["revsage", "revgat", "revgcn"])
def test_reversible_models_free_what_was_compressed(name: str, batch: Any) -> None:
    """Their layers resize the storage of their input, which the layer before has saved."""
    model = model_of(name)
    (loss, exact, _), (again, found, _) = (gradient(model, batch, compress) for compress in (None, "int8"))
    assert loss == again
    assert 0 < (found - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("in_place", [False, True])
def test_slopes_of_rrelu_are_kept_as_they_were_drawn(in_place: bool) -> None:
    """torch saves them before they are drawn."""
    torch.manual_seed(0)
    x, model = torch.randn(N, WIDE, requires_grad=True), nn.RReLU(inplace=in_place)
    found = []
    for compress in (None, "int8"):
        torch.manual_seed(5)
        with compressed_activations(compress, model):
            out = model(x * 1.0)
        found.append((out.detach(), *torch.autograd.grad(out.sum(), x)))
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).norm() < 0.01 * found[0][1].norm()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_matrices_stay_as_they_are(layout: torch.layout) -> None:
    """Of a model of one's own: as the batch's, as a buffer, or made on the way."""
    torch.manual_seed(0)
    matrix, x = torch.eye(N).to_sparse(layout=layout), torch.randn(N, WIDE, requires_grad=True)
    model = nn.Module()
    model.register_buffer("adjacency", matrix)
    with compressed_activations("int8", model, matrix):
        out = matrix @ (x * 1.0)
    (found,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(found, torch.ones_like(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocasts_dtypes_are_compressed_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(N, WIDE, dtype=dtype, requires_grad=True)
    with compressed_activations("int8", nn.Identity()):
        out = (x * 1.0).sin()
    (found,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert found.dtype == dtype
    assert (found - x.cos()).float().norm() / x.cos().float().norm() < 0.02


def test_a_step_is_a_function_of_torchs_seed_and_draws_nothing_from_it(batch: Any) -> None:
    model = model_of("sage")
    (_, one, _), (_, again, _), (_, other, _) = (gradient(model, batch, "int4", seed) for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    torch.manual_seed(3)
    with compressed_activations("int4", model, batch[:2]):
        model(*batch[:2])
    after = torch.randint(1 << 40, ())
    torch.manual_seed(3)
    model(*batch[:2])
    assert after == torch.randint(1 << 40, ())


@pytest.mark.parametrize("size", [(1,), (8,), (1023,), (33, 65)])
def test_bits_of_masks_come_back(size: tuple[int, ...]) -> None:
    mask = torch.rand(size) < 0.4
    packed = packed_bits(mask)
    assert packed.numel() == -(-mask.numel() // 8)
    assert torch.equal(unpacked_bits(packed, mask.shape), mask)


def test_every_tensor_of_a_batch_is_found() -> None:
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    data, typed = Data(x=a, blocks=[(b, {"c": c})]), HeteroData()
    typed["user"].x, typed["user", "likes", "item"].edge_index = a, d
    assert {id(each) for each in tensors_in(data)} == {id(a), id(b), id(c)}
    assert {id(each) for each in tensors_in((typed, [b]))} == {id(a), id(d), id(b)}
