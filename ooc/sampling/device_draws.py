"""The draws of a hop as torch operations, on any device: the slots that `kernels.draw_uniform` draws, to the bit.

Rows are nodes, one a random stream. A matrix of `_ELEMENTS` numbers is computed at once, so that memory is bounded.
"""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ooc.runtime.keyed_tensors import stream_of, uniform
from ooc.runtime.messages import warn_user

DENSE = 4
"""As `kernels.draw_distinct` has it: up to so many in-edges for each that is drawn are gone through one by one"""
_ELEMENTS = 2**22


def num_drawn(degree: Tensor, fanout: int, replace: bool) -> Tensor:
    """`kernels.num_drawn` of nodes with these in-degrees (int64[n])."""
    if fanout < 0:
        return degree
    return (degree > 0).to(torch.int64) * fanout if replace else degree.clamp(max=fanout)


def drawn_rows(degree: Tensor, fanout: int, replace: bool) -> tuple[Tensor, Tensor]:
    """(many, few): bool[n] each, where in-edges are drawn at random: many of a node's, and few of many or with replacement."""
    none = torch.zeros_like(degree, dtype=torch.bool)
    if fanout <= 0:
        return none, none
    if replace:
        return none, degree > 0
    many = (degree > fanout) & (degree <= DENSE * fanout)
    return many, degree > DENSE * fanout


def most_draws(fanout: int, attempt: int) -> int:
    """Numbers drawn at once at each node for `fanout` distinct ones of more than four times as many: at first enough for all
    but about one node in 10**9, and twice as many each further time."""
    return (1 if fanout == 1 else 2 * fanout + 12) << attempt


def selected(stream: Tensor, degree: Tensor, count: int) -> Tensor:
    """`count` of `degree` <= 4 * `count` in-edges by Knuth's algorithm S: int64[n, count], ascending."""
    width, device = DENSE * count, stream.device
    counter = torch.arange(width, device=device)[:, None]
    scaled = uniform(stream, counter).mul_((degree - counter).clamp_(min=0))
    taken = torch.empty(scaled.shape, dtype=torch.bool, device=device)
    left = torch.full_like(degree, count)
    for column in range(width):
        torch.lt(scaled[column], left, out=taken[column])
        left.add_(taken[column], alpha=-1)
    out = torch.empty((count + 1, len(stream)), dtype=torch.int64, device=device)  # the last for what is not taken
    at = torch.where(taken, taken.cumsum(0) - 1, count)
    out.scatter_(0, at, counter.expand_as(at))
    return out[:count].t()


def first_distinct(stream: Tensor, degree: Tensor, count: int, draws: int) -> tuple[Tensor, Tensor]:
    """The first `count` distinct numbers below `degree` that a stream gives: (int64[n, count], ascending, and whether there are
    fewer among `draws` numbers of any stream, bool)."""
    number, at = _numbers(stream, degree, draws).sort(dim=1, stable=True)
    new = torch.ones_like(number, dtype=torch.bool)
    torch.ne(number[:, 1:], number[:, :-1], out=new[:, 1:])
    in_order = torch.empty_like(new).scatter_(1, at, new)  # as they are drawn: of equal ones the first
    found = in_order.cumsum(1)
    kept = (in_order & (found <= count)).gather(1, at)
    out = torch.zeros((len(stream), count + 1), dtype=torch.int64, device=stream.device)
    out.scatter_(1, torch.where(kept, kept.cumsum(1) - 1, count), number)
    return out[:, :count], (found[:, -1] < count).any()


def with_replacement(stream: Tensor, degree: Tensor, count: int) -> Tensor:
    """`count` numbers below `degree` of each stream: int64[n, count], ascending."""
    return _numbers(stream, degree, count).sort(dim=1).values


def _numbers(stream: Tensor, degree: Tensor, count: int) -> Tensor:
    counter = torch.arange(count, device=stream.device)
    return uniform(stream[:, None], counter).mul_(degree[:, None]).to(torch.int64)


class DrawnNodes(NamedTuple):
    """The nodes of a hop, int64[n] each."""

    node: Tensor
    first: Tensor
    """first slot of each"""
    degree: Tensor
    begin: Tensor
    """where its edges begin among those of the hop"""
    fanout: int
    replace: bool
    many: int
    few: int
    """nodes of each kind of `drawn_rows`"""


def draw(nodes: DrawnNodes, key: int, attempt: int, slot: Tensor, compiled: Any = None) -> Tensor:
    """Set the slots (of int64[e], those of the hop) at nodes whose in-edges are drawn at random. Gives whether some have to be
    drawn again by a further attempt, bool[]. compiled: the module `triton_draws`, where it can be used."""
    fewer = torch.zeros((), dtype=torch.bool, device=slot.device)
    if not (nodes.many or nodes.few):
        return fewer
    draws = nodes.fanout if nodes.replace else most_draws(nodes.fanout, attempt)
    if compiled is None or draws > compiled.MOST_DRAWS:
        return _draw_by_torch(nodes, key, draws, slot, fewer)
    stream = stream_of(key, nodes.node)
    if nodes.many:
        compiled.select(nodes, stream, slot)
    return compiled.draw_numbers(nodes, stream, slot, draws) > 0 if nodes.few else fewer


def _draw_by_torch(nodes: DrawnNodes, key: int, draws: int, slot: Tensor, fewer: Tensor) -> Tensor:
    count = nodes.fanout

    def put(rows: Tensor, number: Tensor) -> None:
        at = nodes.begin[rows, None] + torch.arange(count, device=slot.device)
        slot.scatter_(0, at.reshape(-1), (nodes.first[rows, None] + number).reshape(-1))

    many, few = drawn_rows(nodes.degree, nodes.fanout, nodes.replace)
    for rows in _pieces(many, nodes.many, DENSE * count):
        put(rows, selected(stream_of(key, nodes.node[rows]), nodes.degree[rows], count))
    for rows in _pieces(few, nodes.few, draws):
        stream, degree = stream_of(key, nodes.node[rows]), nodes.degree[rows]
        if nodes.replace:
            put(rows, with_replacement(stream, degree, count))
        else:
            number, missing = first_distinct(stream, degree, count, draws)
            put(rows, number)
            fewer = fewer | missing
    return fewer


def _pieces(mask: Tensor, count: int, width: int) -> Iterable[Tensor]:
    """The positions at which `mask` (bool[n]) is true, of which there are `count`, in pieces whose matrices of so many columns
    are bounded: as `nonzero`, but without waiting for their number."""
    if not count:
        return ()
    at = torch.where(mask, mask.cumsum(0) - 1, count)
    out = torch.empty(count + 1, dtype=torch.int64, device=mask.device)  # the last for where it is false
    out.scatter_(0, at, torch.arange(len(mask), device=mask.device))
    return torch.split(out[:count], max(1, _ELEMENTS // width))


@cache
def compiled_for(fanout: int, replace: bool, device: torch.device) -> Any:
    """The module `triton_draws`, where Triton is installed and its kernels for a fan-out, compiled here, give what torch does
    on this device; else None. A Triton that finds no C compiler costs speed and a warning, not a run."""
    if fanout <= 0 or find_spec("triton") is None:
        return None
    try:
        module = import_module("ooc.sampling.triton_draws")
        if agree(module, fanout, replace, device):
            return module
        why = "its draws are others"
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
    warn_user(f"torch draws neighbors on the GPU, as Triton cannot: {why}")
    return None


def agree(module: Any, fanout: int, replace: bool, device: torch.device) -> bool:
    """Whether `triton_draws` gives the draws of torch at nodes of 1 to 8 * `fanout` + 64 in-edges."""
    degree = torch.arange(1, 8 * fanout + 65, device=device)
    count = num_drawn(degree, fanout, replace)
    begin, rows = count.cumsum(0) - count, [int(each.sum()) for each in drawn_rows(degree, fanout, replace)]
    nodes = DrawnNodes(degree * 7, degree * 11, degree, begin, fanout, replace, *rows)
    slots = [torch.zeros(int(count.sum()), dtype=torch.int64, device=device) for _ in range(2)]
    found = [bool(draw(nodes, 2**63 + 5, 0, slot, each)) for slot, each in zip(slots, (None, module), strict=True)]
    return found[0] == found[1] and torch.equal(*slots)
