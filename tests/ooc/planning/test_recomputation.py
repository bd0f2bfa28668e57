"""Plans for batch after batch: what they keep to, when they are made again, and that results do not depend on them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ooc.graph.blocks import Block
from ooc.models.builders import build_model
from ooc.planning.measure_layers import degrees_of, measured_layers, size_of
from ooc.planning.recomputation import RecomputationPlanner
from ooc.planning.recomputation_plan import predicted
from ooc.runtime.step_memory import StepMemory
from ooc.stores.errors import ConfigError

WIDTH = 48
KINDS: dict[str, dict[str, Any]] = {
    "sage": {},
    "gcn": {"norm": "batch"},
    "gin": {"norm": "layer", "residual": True},
    "gat": {"heads": 4},
    "gcnii": {},
    "sage jk": {"jk": "cat"},
}


def made(name: str, nodes: int, layers: int, sampled: bool = True) -> tuple[torch.nn.Module, Tensor, list[Block]]:
    """A model, and a batch whose destinations are a third of the sources, or all of them."""
    torch.manual_seed(0)
    model = build_model(name.split()[0], WIDTH, WIDTH, 8, layers, dropout=0.3, **KINDS.get(name, {}))
    return model, *batch(nodes, layers, sampled)


def batch(nodes: int, layers: int, sampled: bool = True) -> tuple[Tensor, list[Block]]:
    counts = [nodes // 3**i if sampled else nodes for i in range(layers + 1)]
    x, blocks = torch.randn(nodes, WIDTH), []
    for src, dst in pairwise(counts):
        degree = torch.where(torch.rand(dst) < 0.05, 60, 4)
        target = torch.arange(dst).repeat_interleave(degree)
        ends = torch.stack([torch.randint(src, target.shape), target])
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
        blocks.append(Block(ends, indptr, src, dst, torch.full((src,), 60), None, None, None))
    return x, blocks


def step(model: torch.nn.Module, x: Tensor, blocks: Any, checkpoint: Any) -> tuple[int, list[Tensor]]:
    """(bytes of activations at the peak, the loss and the gradients) of a step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    with StepMemory(model) as found:
        loss = model(x, blocks, checkpoint=checkpoint).square().mean()
        loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return found.peak - sum(each.nbytes for each in grads), [loss.detach(), *grads]


@pytest.mark.cases(2)
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_the_peak_is_within_what_was_planned(name: str, sampled: bool) -> None:
    """For memory from all that is kept down to the least; and losses and gradients are the same to the bit."""
    model, x, blocks = made(name, 9000 if sampled else 1500, 4, sampled)
    measured = measured_layers(model, x, blocks)
    plain_peak, plain = step(model, x, blocks, False)
    all_kept = predicted(measured.costs, RecomputationPlanner(10**12).of(model, x, blocks), measured.fixed, measured.least)
    assert plain_peak <= 1.05 * all_kept.peak
    assert all_kept.peak <= 1.35 * plain_peak
    rooms = [int(all_kept.peak * share) for share in (1.0, 0.95, 0.85, 0.6, 0.3)]
    fitting = 0
    for room in rooms:
        planner = RecomputationPlanner(room)
        plan = planner.of(model, x, blocks)
        assert planner.plan is not None
        peak, found = step(model, x, blocks, plan)
        assert all(torch.equal(*pair) for pair in zip(plain, found, strict=True))
        assert peak <= 1.05 * planner.plan.predicted.peak
        if planner.plan.fits:
            fitting += 1
            assert peak <= 1.05 * room
    assert fitting >= (1 if sampled else 2), "of sampled blocks most is in the first layer, which any plan takes"


def test_layers_are_measured_as_they_are() -> None:
    """GraphSAGE keeps a destination's sums and own row, and a mask; nothing of the first layer's gradients is its own."""
    model, x, blocks = made("sage", 9000, 2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (first, second), fixed, least = measured_layers(model, x, blocks)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert (fixed, least) == (0, 0)
    for found, block in ((first, blocks[0]), (second, blocks[1])):
        assert found.size == size_of(block)
        assert found.size == (block.num_src, block.num_dst, block.edge_index.size(1))
        assert found.sum_bytes == 4 * (WIDTH if block is blocks[0] else 8), "the second layer is narrowed before it sums"
        assert found.degrees == degrees_of(block)
        assert sum(degree * count for degree, count in found.degrees) == found.size.edges
        assert 0 < found.sum_seconds < found.seconds
    rows = 3000 * WIDTH * 4
    assert first.before == 0
    assert second.before == rows
    shares = 4 * first.size.edges
    assert 2 * rows + rows // 4 <= first.kept <= 2 * rows + rows // 4 + 2 * shares + 50_000


def test_plans_are_made_again_where_blocks_grow_or_shrink_and_where_memory_does() -> None:
    model, x, blocks = made("sage", 1500, 4, sampled=False)
    small = batch(400, 4, sampled=False)
    peak, _ = step(model, x, blocks, False)
    exceeded = [0]
    planner = RecomputationPlanner(int(0.95 * peak), lambda: exceeded[0])
    assert not planner.of(model, *small)
    assert planner.plans == 1
    assert not planner.of(model, *batch(500, 4, sampled=False)), "it fits the plan that there is"
    assert planner.plans == 1
    some = planner.of(model, x, blocks)
    assert some, "more rows do not fit what was planned"
    assert (planner.plans, planner.measurements) == (2, 1)
    assert step(model, x, blocks, some)[0] <= 0.97 * peak
    assert planner.of(model, x, blocks) is some
    assert not planner.of(model, *small), "fewer rows keep all again"
    assert planner.of(model, x, blocks) == some
    exceeded[0] = int(0.15 * peak)
    less = planner.of(model, x, blocks)
    assert planner.room == int(0.95 * peak) - exceeded[0]
    assert planner.measurements == 2
    assert less != some
    assert step(model, x, blocks, less)[0] < step(model, x, blocks, some)[0]
    plans = planner.plans
    assert planner.of(model, x, blocks) is less, "what was exceeded once is not taken off again"
    assert planner.plans == plans


def test_hubs_keep_their_sums_where_that_pays() -> None:
    """A few destinations have nearly all edges: with a little memory their sums are kept, and few others."""
    torch.manual_seed(0)
    nodes, hubs = 4000, 20
    degree = torch.ones(nodes, dtype=torch.int64).index_fill_(0, torch.arange(hubs), 20_000)
    target = torch.arange(nodes).repeat_interleave(degree)
    indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    block = Block(torch.stack([torch.randint(nodes, target.shape), target]), indptr, nodes, nodes, degree, None, None, None)
    model, x = build_model("sage", WIDTH, WIDTH, WIDTH, 4), torch.randn(nodes, WIDTH)
    blocks = [block] * 4
    peak, plain = step(model, x, blocks, False)
    planner = RecomputationPlanner(int(0.9 * peak))
    plan = planner.of(model, x, blocks)
    again = [layer for segment in plan.segments for layer in range(*segment)]
    assert again
    assert all(plan.kept_sums[layer] >= hubs for layer in again)
    found, grads = step(model, x, blocks, plan)
    assert all(torch.equal(*pair) for pair in zip(plain, grads, strict=True))
    assert found < 0.95 * peak


def test_a_model_without_layers_is_refused() -> None:
    x, blocks = batch(30, 2)
    with pytest.raises(ConfigError, match="Own has its own forward"):
        RecomputationPlanner(10**9).of(Own(), x, blocks)


class Own(torch.nn.Module):
    """What a user brings."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x
