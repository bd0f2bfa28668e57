"""The draws of `device_draws` in two Triton kernels, where Triton is installed: one number at a time in registers.

Imported only where it is used: torch's builds for CUDA bring Triton along, those for the CPU do not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ooc.sampling.device_draws import DENSE, DrawnNodes

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-53)
_ROWS = 256
"""nodes of a program that goes through in-edges one by one"""
_PAIRS = 4096
"""pairs of numbers that a program compares at once"""
MOST_DRAWS = 64
"""numbers of a node whose pairs are compared"""


@triton.jit
def _uniform(stream, counter):  # type: ignore[no-untyped-def]
    """See `keyed_tensors.uniform`; both are uint64."""
    value = stream + counter * _GOLDEN + _GOLDEN
    value = (value ^ (value >> 30)) * _MIX_1
    value = (value ^ (value >> 27)) * _MIX_2
    value = value ^ (value >> 31)
    return (value >> 11).to(tl.int64).to(tl.float64) * _UNIT


@triton.jit(do_not_specialize=["rows"])
def _select(  # type: ignore[no-untyped-def]
    stream_at,
    first_at,
    degree_at,
    begin_at,
    slot_at,
    rows,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """See `device_draws.selected`: at nodes of COUNT + 1 to WIDTH in-edges."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    degree = tl.load(degree_at + row, mask=there, other=0)
    there = there & (degree > COUNT) & (degree <= WIDTH)
    stream = tl.load(stream_at + row, mask=there, other=0).to(tl.uint64, bitcast=True)
    first = tl.load(first_at + row, mask=there, other=0)
    begin = tl.load(begin_at + row, mask=there, other=0)
    taken = tl.zeros([ROWS], dtype=tl.int64)
    for counter in range(WIDTH):
        scaled = _uniform(stream, tl.full([ROWS], counter, tl.uint64)) * (degree - counter).to(tl.float64)
        takes = there & (counter < degree) & (scaled < (COUNT - taken).to(tl.float64))
        tl.store(slot_at + begin + taken, first + counter, mask=takes)
        taken += takes.to(tl.int64)


@triton.jit(do_not_specialize=["rows"])
def _draw(  # type: ignore[no-untyped-def]
    stream_at,
    first_at,
    degree_at,
    begin_at,
    slot_at,
    fewer_at,
    rows,
    COUNT: tl.constexpr,
    ABOVE: tl.constexpr,
    REPLACE: tl.constexpr,
    DRAWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """See `device_draws.first_distinct` and, with REPLACE, `with_replacement`: at nodes of more than ABOVE in-edges. A number's
    place among those of its node is how many of them are smaller. WIDTH: a power of two, at least DRAWS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    degree = tl.load(degree_at + row, mask=there, other=0)
    there = there & (degree > ABOVE)
    stream = tl.load(stream_at + row, mask=there, other=0).to(tl.uint64, bitcast=True)
    first = tl.load(first_at + row, mask=there, other=0)
    begin = tl.load(begin_at + row, mask=there, other=0)
    counter = tl.arange(0, WIDTH)
    number = (_uniform(stream[:, None], counter[None, :].to(tl.uint64)) * degree.to(tl.float64)[:, None]).to(tl.int64)
    drawn = counter < DRAWS
    mine, other = number[:, :, None], number[:, None, :]
    earlier = (counter[None, None, :] < counter[None, :, None]) & drawn[None, None, :]
    if REPLACE:
        kept = tl.broadcast_to(drawn[None, :], [ROWS, WIDTH])
        before = ((other < mine) & drawn[None, None, :]) | ((other == mine) & earlier)
    else:
        new = (tl.sum(((other == mine) & earlier).to(tl.int32), axis=2) == 0) & drawn[None, :]
        found = tl.cumsum(new.to(tl.int32), axis=1)
        kept = new & (found <= COUNT)
        before = (other < mine) & kept[:, None, :]
        missing = there & (tl.sum(new.to(tl.int32), axis=1) < COUNT)
        tl.store(fewer_at + tl.zeros([ROWS], dtype=tl.int64), tl.full([ROWS], 1, tl.int32), mask=missing)
    place = tl.sum(before.to(tl.int64), axis=2)
    tl.store(slot_at + begin[:, None] + place, first[:, None] + number, mask=kept & there[:, None])


def select(nodes: DrawnNodes, stream: Tensor, slot: Tensor) -> None:
    """Set the slots of the nodes of many in-edges of which few are left out: see `device_draws.selected`."""
    settings = {"COUNT": nodes.fanout, "WIDTH": DENSE * nodes.fanout, "ROWS": _ROWS}
    _select[(triton.cdiv(len(stream), _ROWS),)](stream, *_arrays(nodes), slot, len(stream), **settings)


def draw_numbers(nodes: DrawnNodes, stream: Tensor, slot: Tensor, draws: int) -> Tensor:
    """Set the slots of the nodes of which few in-edges are drawn, or all with replacement, by `draws` <= `MOST_DRAWS` numbers.
    Gives whether a node has too few distinct ones, int32[]."""
    fewer = torch.zeros(1, dtype=torch.int32, device=slot.device)
    width = max(2, triton.next_power_of_2(draws))
    rows = max(1, _PAIRS // width**2)
    above = 0 if nodes.replace else DENSE * nodes.fanout
    settings = {"COUNT": nodes.fanout, "ABOVE": above, "REPLACE": nodes.replace, "DRAWS": draws, "WIDTH": width, "ROWS": rows}
    _draw[(triton.cdiv(len(stream), rows),)](stream, *_arrays(nodes), slot, fewer, len(stream), **settings)
    return fewer[0]


def _arrays(nodes: DrawnNodes) -> tuple[Tensor, Tensor, Tensor]:
    return nodes.first, nodes.degree, nodes.begin
