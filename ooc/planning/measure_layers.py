"""What each layer of a model takes for one batch: bytes that autograd keeps, bytes while it is computed, seconds.

Layers run one by one, forward and backward, so that one layer's activations stand at a time: no more memory than a step in
which every layer is recomputed. Gradients, batch statistics and torch's generator are as they were.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ooc.models.kept_sums import timed_sums
from ooc.models.layers import LayerStack, as_input, recording_nothing
from ooc.planning.recomputation_plan import Degrees, LayerCosts, Size
from ooc.runtime.step_memory import StepMemory, TimelinePoint

RUNS = 3
"""of each layer that are timed; the fastest counts"""


class MeasuredLayers(NamedTuple):
    """What a model takes. fixed: bytes that are kept however its layers are computed, as by its encoder; least: the peak of its
    encoder alone."""

    costs: list[LayerCosts]
    fixed: int
    least: int = 0


def size_of(block: Any) -> Size:
    """Numbers of sources, destinations and edges of a layer's block; of all edge types together.

    >>> size_of(batch.blocks[0])
    Size(sources=5120, destinations=640, edges=6400)
    """
    if hasattr(block, "blocks"):
        sizes = [size_of(each) for each in block.blocks.values()]
        return Size(*(sum(numbers) for numbers in zip(*sizes, strict=True)))
    return Size(int(block.num_src), int(block.num_dst), int(block.edge_index.size(1)))


def degrees_of(block: Any) -> Degrees:
    """How many destinations of a block have how many in-edges: see `LayerCosts.degrees`; () with several edge types."""
    if hasattr(block, "blocks"):
        return ()
    degree, count = torch.unique(block.indptr.diff(), return_counts=True)
    return tuple(zip(degree.flip(0).tolist(), count.flip(0).tolist(), strict=True))


def measured_layers(model: Any, x: Any, blocks: Sequence[Any]) -> MeasuredLayers:
    """Run each layer of a model by itself, forward and backward, and measure it.

    Args:
        model: With `layers`, and maybe `encoder` and `jump`; see `ooc.models.layers.run_model`.
        x: The batch's rows, or what stands for them.
        blocks: One for each layer.

    >>> measured_layers(model, batch.x, batch.blocks).costs[0].kept
    1048576
    """
    encoder, device = getattr(model, "encoder", None), next(model.parameters()).device
    on_gpu = device.type == "cuda"
    wait = partial(torch.cuda.synchronize, device) if on_gpu else _at_once
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        x, fixed = as_input(x, *(part for part in (encoder, *model.layers) if part is not None)), 0
        least = 0
        if encoder is not None:
            with recording_nothing(encoder), StepMemory() as step:
                x = encoder(x)
                _backward(x, list(encoder.parameters()))
            fixed, least, x = max(0, (step.kept or 0) - _nbytes(x)), step.peak, _fresh(x)
        stack, rows = LayerStack.of(model.layers, x, blocks, jumps=getattr(model, "jump", None) is not None)
        costs, seeds = list[LayerCosts](), list[Tensor]()
        for index, layer in enumerate(model.layers):
            own = index > 0 or encoder is not None  # else the batch has these rows anyway
            with recording_nothing(layer):
                found, behind, kept = _measured(stack, index, rows, own, wait)
            costs.append(found)
            rows, seeds = _fresh(behind), [*seeds, *map(_fresh, kept)]
        fixed += _after(model, rows, seeds)
    return _with_rows_that_stay(MeasuredLayers(costs, fixed, least), stack)


def _after(model: Any, rows: Any, seeds: list[Tensor]) -> int:
    """Bytes that jumping knowledge and the decoder keep."""
    jump, decoder = getattr(model, "jump", None), getattr(model, "decoder", None)
    parts = [part for part in (jump, decoder) if part is not None]
    with recording_nothing(*parts), StepMemory() as step:
        rows = rows if jump is None else jump(seeds)
        rows = rows if decoder is None else decoder(rows)
    return step.kept or 0


def _with_rows_that_stay(found: MeasuredLayers, stack: LayerStack) -> MeasuredLayers:
    """Count rows between layers that are there in any case as such: those that all layers are given, and where jumping
    knowledge takes all rows of every layer."""
    costs, fixed = list(found.costs), found.fixed
    given = any(getattr(layer, "needs_initial", False) for layer in stack.layers)
    every = stack.jumps and all(size_of(block).sources == size_of(block).destinations for block in stack.blocks)
    for index, own in enumerate(costs):
        if (given and index == 0) or (every and index > 0):
            fixed += own.before * (2 if index == 0 else 1)  # and their gradient, to which every layer adds
            costs[index] = replace(own, before=0)
    return MeasuredLayers(costs, fixed, found.least)


def _measured(
    stack: LayerStack, index: int, rows: Any, own: bool, wait: Callable[[], None]
) -> tuple[LayerCosts, Any, list[Tensor]]:
    """(what a layer takes, the rows behind it, those of seeds that jumping knowledge is given). own: whether the rows before it
    are the model's, not the batch's."""
    layer, last = stack.layers[index], index + 1 == len(stack.layers)
    saved, before = set[int](), _addresses(rows)

    def seen(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            saved.add(tensor.untyped_storage()._cdata)
        return tensor

    with saved_tensors_hooks(seen, lambda tensor: tensor), StepMemory(layer) as step:
        behind, seeds = outputs = stack.segment(rows, index, index + 1)
        in_forward = max((_at(point) for point in step.timeline), default=0)
        _backward(outputs, [*_tensors(rows), *layer.parameters()])
    rows_behind, holds_behind = _nbytes(behind), bool(saved & _addresses(behind))
    holds_before, kept = own and bool(saved & before), max(0, (step.kept or 0) - rows_behind)
    in_backward = max((_at(point) for point in step.timeline if point.backward), default=0)
    del outputs
    seconds, sum_seconds, sum_bytes = min(_timed(stack, index, rows, wait) for _ in range(RUNS))
    size, nbytes = size_of(stack.blocks[index]), _nbytes(rows) if own else 0
    return (
        LayerCosts(
            size=size,
            kept=kept + rows_behind * (last and holds_behind),
            before=nbytes,
            behind=rows_behind,
            forward=max(0, in_forward - kept),
            backward=max(0, in_backward - kept - rows_behind),
            seconds=seconds,
            holds_before=holds_before,
            holds_behind=holds_behind,
            sum_seconds=sum_seconds,
            sum_bytes=sum_bytes // max(1, size.destinations),
            degrees=degrees_of(stack.blocks[index]),
        ),
        behind,
        seeds,
    )


def _timed(stack: LayerStack, index: int, rows: Any, wait: Callable[[], None]) -> tuple[float, float, int]:
    """(seconds of a layer's forward pass, of its sums over neighbors, bytes of these)."""
    with timed_sums(wait) as sums:
        wait()
        begun = time.perf_counter()
        stack.segment(rows, index, index + 1)
        wait()
        return time.perf_counter() - begun, sums.seconds, sums.nbytes


def _at(point: TimelinePoint) -> int:
    return sum(point.bytes.values())


class _Ones(torch.autograd.Function):
    """A number whose gradient by x is ones, which autograd frees as it frees those of a step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)


def _backward(outputs: Any, inputs: Sequence[Tensor]) -> None:
    """Compute the gradients of what requires one, and leave none behind."""
    ends = [_Ones.apply(each) for each in _tensors(outputs) if each.requires_grad]  # type: ignore[no-untyped-call]
    wanted = [each for each in inputs if each.requires_grad]
    if ends and wanted:
        torch.autograd.grad(ends, wanted, allow_unused=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _addresses(value: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in _tensors(value)}


def _nbytes(value: Any) -> int:
    """Of storages, each once."""
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in _tensors(value)}.values())


def _fresh(rows: Any) -> Any:
    """The rows apart from what made them, with a gradient of their own."""
    if isinstance(rows, Tensor):
        return rows.detach().requires_grad_(rows.is_floating_point())
    return {name: _fresh(each) for name, each in rows.items()}


def _at_once() -> None:
    """The CPU has done what it was told."""
