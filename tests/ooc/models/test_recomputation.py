"""Layers computed again in the backward pass: the same gradients to the bit whatever is recomputed, and less memory."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ooc.graph.bag_sum import HUB_EDGES, bag_sum
from ooc.models.builders import build_model, full_blocks
from ooc.models.kept_sums import KeptSums, neighbor_sum
from ooc.models.recomputation import Given, Recomputation
from ooc.runtime.step_memory import StepMemory
from ooc.stores.errors import ConfigError
from tests.ooc.graphs import hub_graph, sample

PLANS: list[Given] = [
    True,
    "sqrt",
    Recomputation(((0, 2),)),
    Recomputation(((1, 3),), (0, 4, 100)),
    Recomputation(((0, 3),), (3, 100, 1)),
]


def gradients(model: torch.nn.Module, x: Tensor, blocks: Any, checkpoint: Given) -> list[Tensor]:
    """Outputs, gradients and statistics of a step, and the generator's state after it."""
    model = copy.deepcopy(model)
    torch.manual_seed(7)
    out = model(x, blocks, checkpoint=checkpoint)
    out.square().sum().backward()
    return [
        out,
        *(p.grad for p in model.parameters() if p.grad is not None),
        *model.state_dict().values(),
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("settings", [{}, {"norm": "batch"}, {"jk": "cat", "residual": True, "norm": "layer"}], ids=str)
@pytest.mark.parametrize("name", ["sage", "gcn", "gat", "gin", "gcnii"])
def test_gradients_are_those_of_the_plain_model_to_the_bit(name: str, settings: dict[str, Any]) -> None:
    if name == "gcnii":
        settings = {key: value for key, value in settings.items() if key != "jk"}
    torch.manual_seed(0)
    batch: Any = sample(
        hub_graph(), torch.randn(60, 12), torch.arange(9), [5, 5, 5], generator=torch.Generator().manual_seed(1)
    )
    model = build_model(name, 12, 16, 4, 3, dropout=0.5, **settings)
    plain = gradients(model, batch.x, batch.blocks, False)
    for plan in PLANS:
        found = gradients(model, batch.x, batch.blocks, plan)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), plan


def test_a_graph_is_gone_through_twice() -> None:
    torch.manual_seed(0)
    edges, x = hub_graph(), torch.randn(60, 12)
    model = build_model("sage", 12, 16, 4, 3, dropout=0.5)
    found = []
    for plan in (False, Recomputation(((0, 2),), (7, 60, 0))):
        torch.manual_seed(1)
        loss = model(x, full_blocks(edges, 60, 3), checkpoint=plan).square().sum()
        found.append([torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)])
    (plain, _), (first, second) = found
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(plain, first, second, strict=True))


@given(
    degrees=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    kept=st.integers(0, 32),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_sums_of_hubs_are_kept_and_all_are_the_same_to_the_bit(
    degrees: list[int], kept: int, weighted: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    edges = int(indptr[-1])
    rows, index = torch.randn(11, 20, generator=generator), torch.randint(11, (edges,), generator=generator)
    value = torch.rand(edges, generator=generator) if weighted else None
    sums = KeptSums([kept])
    with sums.recording():
        first = neighbor_sum(index, rows, indptr, value)
    with sums.using():
        again = neighbor_sum(index, rows, indptr, value)
    assert torch.equal(first, bag_sum(index, rows, indptr, value))
    assert torch.equal(first, again)
    (found,) = sums._kept
    if found is not None and found[0] is not None:
        others = sorted(degrees)[: len(degrees) - kept]
        assert len(found[0]) == len(found[1]) == kept
        assert min(degrees[i] for i in found[0].tolist()) >= max(others), "those with the most in-edges"


def test_sums_of_very_large_hubs_are_the_same_to_the_bit() -> None:
    """All threads sum a hub's rows; without the hub, which is kept, none is left for them."""
    torch.manual_seed(0)
    indptr = torch.tensor([0, 3, 3 + HUB_EDGES + 5, 9 + HUB_EDGES, 9 + 2 * HUB_EDGES])
    index, rows = torch.randint(500, (int(indptr[-1]),)), torch.randn(500, 40)
    value = torch.rand(len(index))
    for kept in range(5):
        sums = KeptSums([kept])
        with sums.recording():
            first = neighbor_sum(index, rows, indptr, value)
        with sums.using():
            assert torch.equal(first, neighbor_sum(index, rows, indptr, value))


@pytest.mark.parametrize(("layers", "segments"), [(1, ()), (2, ()), (3, ((0, 1),)), (9, ((0, 3), (3, 6))), (112, None)])
def test_about_sqrt_segments_of_equal_length(layers: int, segments: Any) -> None:
    plan = Recomputation.by_sqrt(layers)
    if segments is not None:
        assert plan.segments == segments
    else:
        lengths = [stop - first for first, stop in plan.segments]
        assert len(lengths) == 10
        assert {*lengths} == {10, 11}
    parts = list(plan.parts(layers))
    assert [first for first, *_ in parts] == [0, *(stop for _, stop, _ in parts[:-1])]
    assert parts[-1][1] == layers


@pytest.mark.slow
def test_a_deep_model_takes_the_memory_of_the_square_root_of_its_layers() -> None:
    """Of 64 layers, 8 segments of 8: the rows before 7 of them, and a segment's activations."""
    torch.manual_seed(0)
    nodes, hidden, layers = 2000, 32, 64
    blocks = full_blocks(torch.randint(nodes, (2, 4 * nodes)), nodes, layers)
    model = build_model("sage", hidden, hidden, hidden, layers)
    x, peaks, grads = torch.randn(nodes, hidden), {}, {}
    for name, plan in {"plain": False, "layers": True, "sqrt": "sqrt"}.items():
        model.zero_grad(set_to_none=True)
        with StepMemory(model) as step:
            F.mse_loss(model(x, blocks, checkpoint=plan), x).backward()  # type: ignore[no-untyped-call]
        parameters = sum(p.nbytes for p in model.parameters())
        peaks[name] = (step.peak - parameters) / (4 * nodes * hidden)
        grads[name] = [p.grad for p in model.parameters() if p.grad is not None]
    assert peaks["plain"] > 2 * layers, "sums and own rows of every layer"
    assert layers - 1 < peaks["layers"] < layers + 12, "the rows before every layer"
    assert peaks["sqrt"] < 7 + 3 * 8 + 10
    assert peaks["sqrt"] < peaks["layers"] / 1.7
    for name in ("layers", "sqrt"):
        assert all(torch.equal(*pair) for pair in zip(grads["plain"], grads[name], strict=True))


def test_segments_that_are_none_are_refused() -> None:
    for segments in (((0, 0),), ((0, 2), (1, 3)), ((2, 3), (0, 1)), ((-1, 1),)):
        with pytest.raises(ConfigError, match="are not ranges of layers, ascending and apart"):
            Recomputation(segments)
    model, blocks = build_model("sage", 4, 8, 2, 2), full_blocks(torch.tensor([[0, 1], [1, 0]]), 2, 2)
    with pytest.raises(ConfigError, match=r"segment \(1, 3\) is beyond the 2 layers"):
        model(torch.randn(2, 4), blocks, checkpoint=Recomputation(((1, 3),)))
    with pytest.raises(ConfigError, match="segments of several layers cannot be recomputed"):
        model(torch.randn(2, 4), blocks, checkpoint=Recomputation(((0, 2),)), between=lambda layer, out: out)


def test_parts_are_all_layers_once() -> None:
    plan = Recomputation(((1, 3), (3, 4)))
    assert list(plan.parts(6)) == [(0, 1, False), (1, 3, True), (3, 4, True), (4, 5, False), (5, 6, False)]
    assert all(stop == first for (_, stop, _), (first, *_) in pairwise(plan.parts(6)))
