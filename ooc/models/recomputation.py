"""Layers that are computed again in the backward pass, in place of keeping what autograd needs of them (Chen et al., 2016).

Layers are recomputed in segments: of each only the rows before it are kept. With about sqrt(n) segments of n layers, what is
kept and what a segment takes while it is recomputed are both about sqrt(n) layers. The last layers are kept as they are, as
the backward pass begins with them. Random numbers are repeated and batch statistics recorded once, so results are the same to
the bit. Sums over neighbors, which cost by in-edges, may be kept for some destinations: see `ooc.models.kept_sums`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ooc.models.dropout import dropping_as_now
from ooc.models.kept_sums import KeptSums
from ooc.stores.errors import ConfigError

Segment = tuple[int, int]
"""layers first:stop"""


@dataclass(frozen=True)
class Recomputation:
    """Which layers are computed again in the backward pass.

    Args:
        segments: Ranges (first, stop) of layers, ascending and apart. Those of a segment are recomputed together.
        kept_sums: For each layer, of how many destinations the sums over neighbors are kept all the same, those with the most
            in-edges first; () for none.

    >>> Recomputation.by_sqrt(9).segments
    ((0, 3), (3, 6))
    """

    segments: tuple[Segment, ...] = ()
    kept_sums: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ends = [end for segment in self.segments for end in segment]
        apart = all(first < stop for first, stop in self.segments) and ends == sorted(ends) and min(ends, default=0) >= 0
        if not apart:
            raise ConfigError(
                f"segments {self.segments} are not ranges of layers, ascending and apart: give such as (0, 2), (2, 4)"
            )

    @classmethod
    def of(cls, given: "Given", layers: int) -> Self:
        """What was given, of a model with so many layers: True is each by itself, "sqrt" is `by_sqrt`."""
        if isinstance(given, cls):
            if given.segments and given.segments[-1][1] > layers:
                raise ConfigError(f"segment {given.segments[-1]} is beyond the {layers} layers of the model: give one within")
            return given
        return cls.by_sqrt(layers) if given == "sqrt" else cls(tuple((i, i + 1) for i in range(layers)) if given else ())

    @classmethod
    def by_sqrt(cls, layers: int) -> Self:
        """About sqrt(layers) segments of equal length, the last of which is kept, not recomputed."""
        count = max(1, round(math.sqrt(layers)))
        ends = [layers * i // count for i in range(count + 1)]
        return cls(tuple(pairwise(ends[:-1])))

    def __bool__(self) -> bool:
        return bool(self.segments)

    def parts(self, layers: int) -> Iterator[tuple[int, int, bool]]:
        """All layers in order, as (first, stop, whether they are recomputed); those that are not one by one."""
        at = 0
        for first, stop in (*self.segments, (layers, layers)):
            yield from ((i, i + 1, False) for i in range(at, first))
            if first < stop:
                yield first, stop, True
            at = stop

    def sums_of(self, segment: Segment) -> tuple[int, ...]:
        """`kept_sums` of a segment's layers."""
        return self.kept_sums[slice(*segment)] or (0,) * (segment[1] - segment[0])


Given = bool | Literal["sqrt"] | Recomputation
"""how callers say what is recomputed; see `Recomputation.of`"""
Run = Callable[[Any, KeptSums], Any]
"""run(x, sums): what a segment computes of x, telling `sums` the layer that it is at"""


def recomputed(run: Run, x: Any, layers: Sequence[nn.Module], kept_sums: Sequence[int]) -> Any:
    """Return run(x, sums), of which autograd keeps x and what else it refers to, and `kept_sums` of each layer."""
    sums = KeptSums(kept_sums)
    return checkpoint(run, x, sums, use_reentrant=False, context_fn=lambda: (sums.recording(), _Again(layers, sums)))


class _Again:
    """A context in which layers are computed once more, with the same dropout; for every backward pass through them."""

    def __init__(self, layers: Sequence[nn.Module], sums: KeptSums) -> None:
        self._layers, self._sums, self._dropping = layers, sums, dropping_as_now()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for each in (recording_nothing(*self._layers), self._dropping(), self._sums.using()):
                entered.enter_context(each)
            self._entered.append(entered.pop_all())

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().close()


@contextmanager
def recording_nothing(*layers: nn.Module) -> Iterator[None]:
    """Keep the running statistics of batch norms unchanged; they normalize as usual."""
    norms = [m for layer in layers for m in layer.modules() if isinstance(m, _BatchNorm)]
    before = [(norm.momentum, deepcopy(norm.num_batches_tracked)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
