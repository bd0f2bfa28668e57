"""The seam between layers: order, checkpointing, dtypes, errors."""

import copy

import pytest
import torch
from torch import Tensor

from ooc.graph.blocks import Block
from ooc.models import memory_efficient
from ooc.models.builders import build_model, full_blocks
from ooc.models.layers import Layer, run_layers
from ooc.stores.errors import ConfigError, InputError
from tests.ooc.graphs import hub_graph, sample

NAMES = ("sage", "gcn", "gat", "gin")


def batch_and_model(name: str, **settings: object) -> tuple[object, torch.nn.Module]:
    torch.manual_seed(0)
    edge_index, x = hub_graph(), torch.randn(60, 12)
    batch = sample(edge_index, x, torch.arange(9), [5, 5], generator=torch.Generator().manual_seed(1))
    return batch, build_model(name, 12, 16, 4, 2, **settings)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_checkpointing_changes_nothing(name: str, norm: str) -> None:
    batch, kept = batch_and_model(name, dropout=0.5, norm=norm, residual=True)
    again = copy.deepcopy(kept)
    results = []
    for model, checkpoint in ((kept, False), (again, True)):
        torch.manual_seed(7)
        out = model(batch.x, batch.blocks, checkpoint=checkpoint)
        out.square().sum().backward()
        results.append((out, [p.grad for p in model.parameters()], list(model.state_dict().values())))
    (out_a, grad_a, state_a), (out_b, grad_b, state_b) = results
    assert torch.equal(out_a, out_b)
    assert all(torch.equal(a, b) for a, b in zip(grad_a + state_a, grad_b + state_b, strict=True))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_dropout_with_the_relu_before_it_changes_nothing(monkeypatch: pytest.MonkeyPatch, name: str, checkpoint: bool) -> None:
    """What is seen between the layers is not dropped yet, and then the two are computed one after the other."""
    batch, model = batch_and_model(name, dropout=0.5, norm="layer", residual=True)
    fused, one_pass = [0], memory_efficient.relu_dropout

    def counted(x: Tensor, p: float, of: str) -> Tensor:
        fused[0] += 1
        return one_pass(x, p, of)

    monkeypatch.setattr(memory_efficient, "relu_dropout", counted)
    results = []
    for between in (None, lambda index, out: out):
        model.zero_grad()
        torch.manual_seed(7)
        out = model(batch.x, batch.blocks, checkpoint=checkpoint, between=between)
        out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert fused[0] == (0 if name == "gat" else 1 + checkpoint)
    model.eval()
    assert torch.equal(model(batch.x, batch.blocks), model(batch.x, batch.blocks, between=lambda index, out: out))


class Own(Layer):
    """Whose forward knows nothing of it."""

    def forward(self, x: Tensor, block: Block) -> Tensor:
        return super().forward(x, block)


def test_layers_with_a_forward_of_their_own_drop_themselves() -> None:
    batch, model = batch_and_model("sage", dropout=0.5)
    results = []
    for kinds in ((Layer, Layer), (Own, Layer), (Layer, Own)):
        for layer, kind in zip(model.layers, kinds, strict=True):
            layer.__class__ = kind
        torch.manual_seed(7)
        results.append(model(batch.x, batch.blocks))
    assert all(torch.equal(each, results[0]) for each in results)


def test_checkpointing_keeps_less() -> None:
    batch, model = batch_and_model("gin")

    def kept(checkpoint: bool) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(batch.x, batch.blocks, checkpoint=checkpoint)
        return sum(sizes)

    assert kept(True) < kept(False) / 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8])
def test_x_is_converted_to_the_parameters_dtype(name: str, dtype: torch.dtype) -> None:
    batch, model = batch_and_model(name)
    x = (batch.x * 10).to(dtype)
    out = model(x, batch.blocks)
    assert out.dtype == torch.float32
    assert torch.equal(out, model(x.float(), batch.blocks))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_is_near_full_precision(name: str, precision: torch.dtype, stored: torch.dtype) -> None:
    batch, model = batch_and_model(name, norm="layer")
    expected = model(batch.x, batch.blocks)
    with torch.autocast("cpu", dtype=precision):
        out = model(batch.x.to(stored), batch.blocks)
        loss = out.float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (out - expected).abs().max() < 0.1 * expected.abs().max()


def test_the_first_layer_gives_x_no_gradient() -> None:
    batch, model = batch_and_model("sage")
    model(batch.x, batch.blocks).sum().backward()
    assert batch.x.grad is None
    batch.x.requires_grad_(True)
    model(batch.x, batch.blocks).sum().backward()
    assert batch.x.grad is not None


def test_batch_norm_takes_a_single_row() -> None:
    model = build_model("sage", 12, 16, 4, 2, norm="batch")
    model(torch.randn(1, 12), full_blocks(torch.zeros(2, 0, dtype=torch.long), 1, 2))


def test_blocks_that_do_not_fit_are_refused() -> None:
    batch, model = batch_and_model("sage")
    with pytest.raises(ConfigError, match="2 layers but the batch has 1"):
        run_layers(model.layers, batch.x, batch.blocks[:1])
    with pytest.raises(InputError, match="sources"):
        run_layers(model.layers, batch.x[:-1], batch.blocks)


def test_hooks_see_rows_before_the_next_layers_dropout() -> None:
    batch, model = batch_and_model("sage", dropout=0.5)
    seen: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        torch.manual_seed(1)
        out: torch.Tensor = model(batch.x, batch.blocks)
        return out

    expected = run()
    model.layers[0].register_forward_hook(lambda layer, given, out: seen.append(out.detach().clone()))
    assert torch.equal(run(), expected)
    model.eval()
    run()
    assert torch.equal(seen[0], seen[1])


def test_a_layer_of_ones_own_finishes_rows_as_it_likes() -> None:
    class Own(Layer):
        def finished(self, out: torch.Tensor, self_row: torch.Tensor, norm: object = None) -> torch.Tensor:  # type: ignore[override]
            return self.activation(out) + 1

    batch, model = batch_and_model("sage", dropout=0.5)
    model.layers[0].__class__ = Own
    assert model(batch.x, batch.blocks).isfinite().all()
