"""GraphSAGE's layers in one function: the bits of the layers one by one, and what they should be, in float64."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ooc.graph import bag_sum
from ooc.graph.aggregation import FirstLayerAggregates
from ooc.graph.blocks import Block
from ooc.models import layers as layers_module
from ooc.models import products
from ooc.models.builders import build_model
from ooc.models.convs import BlockSAGEConv
from ooc.models.dropout import rows_of_nodes
from ooc.models.kept_sums import timed_sums
from ooc.models.layers import autocast, run_model
from ooc.models.sage_stack import runs_as_one
from ooc.runtime.product_kernels import here
from ooc.runtime.restoring import settings_restored

pytestmark = pytest.mark.skipif(not here(), reason="torch is built without MKL")
SIZES = {2: (3000, 1700, 900), 3: (6000, 1900, 700, 300), 1: (3000, 900), 4: (3000, 1900, 900, 600, 300)}
"""rows of x, and behind each layer, by the number of layers"""
FEATURES, HIDDEN, CLASSES = 96, 128, 40
NODES = 10_000


def a_block(rng: np.random.Generator, sources: int, rows: int) -> Block:
    """Some 5 in-edges a row, none at two fifths of them."""
    count = rng.integers(1, 9, rows) * (rng.random(rows) > 0.4)
    indptr = np.concatenate([[0], count.cumsum()])
    edges = np.stack([rng.integers(0, sources, indptr[-1]), np.repeat(np.arange(rows), count)])
    degree = torch.ones(sources, dtype=torch.int64)
    return Block(torch.tensor(edges), torch.tensor(indptr), sources, rows, degree, None, None, None)


class Case:
    """A model, blocks and input. aggregates: whether the first layer's sums are loaded with the batch."""

    def __init__(self, layers: int = 2, dropout: float = 0.0, aggregates: bool = True) -> None:
        rng = np.random.default_rng(layers)
        torch.manual_seed(layers)
        sizes = SIZES[layers]
        self.blocks = [a_block(rng, *each) for each in pairwise(sizes)]
        self.x: Any = torch.randn(sizes[0], FEATURES)
        if aggregates:
            self.blocks[0] = self.blocks[0]._replace(num_src=sizes[1])
            self.x = FirstLayerAggregates(torch.randn(sizes[1], FEATURES), torch.randn(sizes[1], FEATURES))
        self.model: Any = build_model("sage", FEATURES, HIDDEN, CLASSES, layers, dropout)
        if not aggregates:
            self.model.layers[0].dropout = 0.0
        self.nodes = {"sources": rng.permutation(NODES)[: sizes[0]]}
        self.factors = torch.randn(sizes[-1], CLASSES)

    def run(self, checkpoint: bool = False, seed: int = 7) -> list[Tensor]:
        """The output and the gradients of the weights."""
        torch.manual_seed(seed)
        self.model.zero_grad()
        with rows_of_nodes(self.nodes):
            out = run_model(self.model, self.x, self.blocks, checkpoint)
        (out * self.factors).sum().backward()
        return [out.detach(), *(each.grad.clone() for each in self.model.parameters())]

    def runs_as_one(self) -> bool:
        return runs_as_one(self.model.layers, self.x, self.blocks)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function with layers that run one by one."""

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(layers_module, "runs_as_one", lambda *_: False)
            return function()

    return call


def equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("aggregates", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_it_has_the_bits_of_the_layers_one_by_one(
    layers: int, dropout: float, aggregates: bool, threads: int, one_by_one: Callable[..., Any]
) -> None:
    case = Case(layers, dropout, aggregates)
    assert case.runs_as_one()
    with settings_restored():
        torch.set_num_threads(threads)
        assert equal(case.run(), one_by_one(case.run))


@pytest.mark.parametrize("aggregates", [True, False])
@pytest.mark.parametrize("layers", [2, 3])
def test_products_by_onednn_have_the_bits_of_the_layers_one_by_one(
    layers: int, aggregates: bool, one_by_one: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST_BY_ONEDNN", 2**20)
    case = Case(layers, 0.3, aggregates)
    with settings_restored():
        torch.set_num_threads(3)
        assert equal(case.run(), one_by_one(case.run))


def in_float64(case: Case) -> list[Tensor]:
    """The output and gradients by dense matrices, without dropout."""
    weights = [p.detach().double().requires_grad_() for p in case.model.parameters()]
    named = dict(zip((name for name, _ in case.model.named_parameters()), weights, strict=True))
    x = case.x if isinstance(case.x, FirstLayerAggregates) else case.x.double()
    for i, block in enumerate(case.blocks):
        if isinstance(x, FirstLayerAggregates):
            mean, own = x.neighbor.double(), x.self_row.double()
        else:
            edges = torch.zeros(block.num_dst, block.num_src, dtype=torch.float64)
            edges.index_put_((block.edge_index[1], block.edge_index[0]), torch.ones((), dtype=torch.float64), accumulate=True)
            mean, own = edges @ x / edges.sum(1, keepdim=True).clamp(min=1), x[: block.num_dst]
        left, bias, right = (named[f"layers.{i}.conv.{name}"] for name in ("lin_l.weight", "lin_l.bias", "lin_r.weight"))
        x = mean @ left.t() + bias + own @ right.t()
        x = x.relu() if i + 1 < len(case.blocks) else x
    (x * case.factors.double()).sum().backward()
    return [x.detach(), *(each.grad for each in weights if each.grad is not None)]


@pytest.mark.parametrize("aggregates", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_it_is_right_to_the_last_digits_of_float32(layers: int, aggregates: bool) -> None:
    case = Case(layers, 0.0, aggregates)
    for own, wanted in zip(case.run(), in_float64(case), strict=True):
        assert torch.allclose(own.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_losses_do_not_depend_on_recomputation() -> None:
    """Layers that are recomputed run one by one."""
    case = Case(3, 0.3)
    assert equal(case.run(), case.run(checkpoint=True))


def test_rows_without_gradients_are_the_same(one_by_one: Callable[..., Any]) -> None:
    case = Case(2, 0.3)
    case.model.eval()

    def run() -> Tensor:
        with torch.inference_mode():
            out: Tensor = run_model(case.model, case.x, case.blocks)
            return out

    assert torch.equal(run(), one_by_one(run))


def test_a_batch_without_numbers_of_nodes_is_dropped_by_its_rows(one_by_one: Callable[..., Any]) -> None:
    case = Case(2, 0.5)
    case.nodes = {}
    assert equal(case.run(), one_by_one(case.run))


@pytest.mark.parametrize("name", ["sum", "part"])
def test_gradients_that_lie_otherwise_are_the_same(name: str, one_by_one: Callable[..., Any]) -> None:
    case = Case(2)

    def run() -> list[Tensor]:
        case.model.zero_grad()
        out = run_model(case.model, case.x, case.blocks)
        (out.sum() if name == "sum" else out[:500].square().sum()).backward()
        return [each.grad.clone() for each in case.model.parameters()]

    assert equal(run(), one_by_one(run))


def test_a_second_backward_pass_has_the_same_gradients() -> None:
    case = Case(2, 0.3)
    out = run_model(case.model, case.x, case.blocks)
    found = []
    for _ in range(2):
        case.model.zero_grad()
        (out * case.factors).sum().backward(retain_graph=True)
        found.append([each.grad.clone() for each in case.model.parameters()])
    assert equal(*found)


def test_a_second_backward_pass_is_refused_where_the_graph_is_freed() -> None:
    case = Case(2)
    loss = run_model(case.model, case.x, case.blocks).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_no_more_is_saved_than_by_layers_one_by_one(one_by_one: Callable[..., Any]) -> None:
    """Each tensor counts once."""
    case = Case(3, 0.3)

    def saved() -> int:
        seen: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = run_model(case.model, case.x, case.blocks)
        del out
        return sum(seen.values())

    assert saved() <= one_by_one(saved)


def with_hook(case: Case) -> None:
    case.model.layers[1].conv.register_forward_hook(lambda *_: None)


def frozen(case: Case) -> None:
    case.model.layers[0].conv.lin_l.weight.requires_grad_(False)


def few_classes(case: Case) -> None:
    """The linear map comes before the sum."""
    case.model.layers[1].conv = BlockSAGEConv(HIDDEN, 2)


def wants_x(case: Case) -> None:
    case.x = FirstLayerAggregates(case.x.neighbor.requires_grad_(), case.x.self_row)


def in_float16(case: Case) -> None:
    case.x = FirstLayerAggregates(case.x.neighbor.half(), case.x.self_row.half())


def with_a_norm(case: Case) -> None:
    case.model.layers[0].norm = nn.LayerNorm(HIDDEN)


def with_residual(case: Case) -> None:
    case.model.layers[0].residual = True


def with_tanh(case: Case) -> None:
    case.model.layers[0].activation = nn.Tanh()


def activated_at_the_end(case: Case) -> None:
    case.model.layers[1].activation = nn.ReLU()


def inherited(case: Case) -> None:
    class Mine(type(case.model.layers[0].conv)):  # type: ignore[misc]
        pass

    case.model.layers[0].conv.__class__ = Mine


def parametrized(case: Case) -> None:
    nn.utils.parametrizations.weight_norm(case.model.layers[0].conv.lin_l)


def with_an_index_too_large(case: Case) -> None:
    """`bag_sum` says which."""
    case.blocks[1].edge_index[0, 3] = case.blocks[1].num_src


def with_a_negative_index(case: Case) -> None:
    case.blocks[1].edge_index[0, 3] = -1


def with_pointers_too_few(case: Case) -> None:
    case.blocks[1] = case.blocks[1]._replace(indptr=case.blocks[1].indptr[:-1])


def with_pointers_that_begin_later(case: Case) -> None:
    case.blocks[1].indptr[0] = 1


def with_pointers_that_descend(case: Case) -> None:
    case.blocks[1].indptr[1] = case.blocks[1].indptr[2] + 1


def with_shares_too_few(case: Case) -> None:
    case.blocks[1] = case.blocks[1]._replace(share=torch.ones(3))


def of_widths_that_do_not_follow(case: Case) -> None:
    case.model.layers[1].conv = BlockSAGEConv(HIDDEN // 2, CLASSES)


def of_another_weight(case: Case) -> None:
    case.model.layers[1].conv.lin_r.weight = nn.Parameter(torch.randn(CLASSES, HIDDEN // 2))


def with_a_function_of_its_own(case: Case) -> None:
    conv = case.model.layers[1].conv
    conv.forward = lambda x, block: 2 * type(conv).forward(conv, x, block)


def with_an_adapter(case: Case) -> None:
    """As for fine-tuning: a layer's own parameters stay where they are, and its product is another one."""

    class Adapter(type(case.model.layers[0].conv.lin_r)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    case.model.layers[0].conv.lin_r.__class__ = Adapter


def that_comes_twice(case: Case) -> None:
    case.model.layers[1].conv.lin_r.weight = case.model.layers[1].conv.lin_l.weight


OTHERWISE = [
    with_an_index_too_large,
    with_a_negative_index,
    with_pointers_too_few,
    with_pointers_that_begin_later,
    with_pointers_that_descend,
    with_shares_too_few,
    of_widths_that_do_not_follow,
    of_another_weight,
    with_a_function_of_its_own,
    with_an_adapter,
    that_comes_twice,
    with_hook,
    frozen,
    few_classes,
    wants_x,
    in_float16,
    with_a_norm,
    with_residual,
    with_tanh,
    activated_at_the_end,
    inherited,
    parametrized,
]


@pytest.mark.parametrize("change", OTHERWISE)
def test_what_it_does_not_know_runs_layer_by_layer(change: Callable[[Case], None]) -> None:
    case = Case(2)
    assert case.runs_as_one()
    change(case)
    assert not case.runs_as_one()


def test_sums_that_are_measured_and_autocast_run_layer_by_layer() -> None:
    case = Case(2)
    with timed_sums(lambda: None):
        assert not case.runs_as_one()
    with autocast(torch.device("cpu"), "bf16"):
        assert not case.runs_as_one()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not case.runs_as_one()
    hook.remove()
    assert case.runs_as_one()


def test_an_index_that_is_too_large_is_refused() -> None:
    case = Case(2)
    with_an_index_too_large(case)
    with pytest.raises(RuntimeError, match="valid range"):
        case.run()


def test_what_runs_layer_by_layer_is_computed() -> None:
    case, again = Case(2), Case(2)
    with_a_function_of_its_own(case)
    assert torch.allclose(case.run()[0], 2 * again.run()[0])


def test_torchs_default_type_changes_nothing() -> None:
    case = Case(2, 0.3)
    wanted, default = case.run(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert equal(case.run(), wanted)
    finally:
        torch.set_default_dtype(default)


def test_saved_tensors_may_come_back_in_another_layout() -> None:
    case = Case(2)
    wanted = case.run()[1:]

    def turned(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    case.model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(turned, lambda tensor: tensor):
        out = run_model(case.model, case.x, case.blocks)
    (out * case.factors).sum().backward()
    assert equal([each.grad for each in case.model.parameters()], wanted)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_numbers_of_nodes_may_have_another_type(dtype: Any) -> None:
    case = Case(2, 0.3)
    wanted = case.run()
    case.nodes["sources"] = case.nodes["sources"].astype(dtype)
    assert equal(case.run(), wanted)


def test_more_layers_run_one_by_one() -> None:
    """Memory that the pass needs at once would grow with them."""
    assert not Case(4).runs_as_one()


def test_blocks_that_do_not_follow_one_another_run_one_by_one() -> None:
    case = Case(2)
    case.blocks[1] = case.blocks[1]._replace(num_src=case.blocks[1].num_src - 1)
    assert not case.runs_as_one()


def test_hubs_have_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2)
    monkeypatch.setattr(bag_sum, "HUB_EDGES", 8)
    assert not case.runs_as_one()


def test_layers_of_another_class_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError

    class Mine(layers_module.Layer):
        pass

    case = Case(2)
    monkeypatch.setattr(layers_module, "sage_stack", never)
    with pytest.raises(AssertionError):
        run_model(case.model, case.x, case.blocks)
    for change in ("class", "dropout ahead"):
        case = Case(2, 0.3)
        if change == "class":
            case.model.layers[0].__class__ = Mine
        else:
            case.model.layers[1].register_forward_pre_hook(lambda *_: None)  # sees rows that are not dropped yet
        run_model(case.model, case.x, case.blocks)
