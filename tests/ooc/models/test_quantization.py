"""Codes of 8, 4 and 2 bits against numpy in float64: right on average, within a step, the same however they are made."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ooc.models import quantization
from ooc.models.quantization import BITS, GROUP, kept_share, quantized, restored, rounded_down, rounded_up
from ooc.runtime.keyed_dropout import number, run_of
from ooc.runtime.keyed_tensors import number32
from ooc.runtime.restoring import settings_restored

KEY = 0x1234_5678_9ABC_DEF0


def as_float(bits: int) -> float:
    """The bfloat16 of these bits."""
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def reference(x: NDArray[np.float32], key: int, bits: int) -> NDArray[np.float64]:
    """What comes back, element by element, in float64 but for the ends."""
    out, levels = np.empty(len(x)), 2**bits - 1
    for first in range(0, len(x), GROUP):
        own = x[first : first + GROUP].astype(np.float64)
        low = as_float(int(rounded_down(np.float32(own.min()))))
        step = as_float(int(rounded_up(np.float32(np.float32(own.max() - low) / np.float32(levels)))))
        for i, value in enumerate(own):
            _, at, one, other = run_of(np.uint64(key), first + i, first + i + 1)
            drawn = (int(number(at, one, other)) >> 8) / 2**24
            steps = 0.0 if step == 0 else min(np.floor((value - low) / step + drawn), levels)
            out[first + i] = low + steps * step
    return out


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("size", [1, 3, GROUP, 3 * GROUP + 77])
def test_values_are_those_of_the_reference(name: str, size: int) -> None:
    x = (np.random.default_rng(size).normal(size=size) * 3).astype(np.float32)
    packed = quantized(torch.from_numpy(x), KEY, BITS[name])
    found, wanted = restored(packed, (size,)).numpy(), reference(x, KEY, BITS[name])
    step = np.repeat(packed.ends[:, 1].float().numpy(), GROUP)[:size]
    differing = ~np.isclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert differing.mean() < 0.002, "a draw on the edge, in float32"
    assert (abs(found - x) <= step * 1.0001).all()


@pytest.mark.parametrize("name", BITS)
def test_bytes_are_a_quarter_an_eighth_and_a_sixteenth_and_four_a_group(name: str) -> None:
    x = torch.randn(512, 256)
    packed = quantized(x, KEY, BITS[name])
    assert packed.nbytes == x.numel() * BITS[name] // 8 + 4 * x.numel() // GROUP
    assert packed.nbytes == x.nbytes * kept_share(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BITS)
def test_rounding_is_right_on_average(name: str) -> None:
    """Of an element over many keys, and of all elements: the error is noise of mean 0, in units of its deviation."""
    torch.manual_seed(0)
    x = torch.randn(4 * GROUP)
    step = quantized(x, 0, BITS[name]).ends[:, 1].double().repeat_interleave(GROUP)
    many = torch.stack([restored(quantized(x, key, BITS[name]), x.shape) for key in range(2000)]).double()
    deviation = many.std(0).clamp(min=1e-7) / len(many) ** 0.5
    off = (many.mean(0) - x.double()) / deviation
    moving = many.std(0) > 0.2 * step  # else a draw in a hundred decides
    assert off[moving].abs().max() < 5
    assert abs(off[moving].mean()) < 5 / moving.sum() ** 0.5
    assert moving.float().mean() > 0.8


@pytest.mark.parametrize("name", BITS)
def test_torch_makes_the_bits_of_the_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; in pieces, with a group that is not full, groups of one value, and some that are not finite."""
    bits, x = BITS[name], torch.randn(9 * GROUP + 5)
    x[:GROUP] = 0.1
    x[GROUP : 2 * GROUP] = 0
    x[2 * GROUP + 9], x[3 * GROUP + 1], x[4 * GROUP] = torch.inf, torch.nan, -torch.inf
    x[5 * GROUP : 6 * GROUP] *= 1e38
    x[6 * GROUP : 7 * GROUP] *= 1e-38
    monkeypatch.setattr(quantization, "_AT_ONCE", 2 * GROUP)
    packed = quantized(x, KEY, bits)
    for begin in range(0, len(x), 2 * GROUP):
        part = x[begin : begin + 2 * GROUP]
        codes, ends = quantization._quantized_by_torch(part, KEY, begin, bits)
        first, group = begin * bits // 8, begin // GROUP
        assert torch.equal(codes, packed.codes[first : first + len(codes)])
        assert torch.equal(ends.view(torch.int16), packed.ends[group : group + len(ends)].view(torch.int16))
        values = quantization._restored_by_torch(codes, ends, bits)[: len(part)]
        assert torch.equal(values.nan_to_num(), restored(packed, x.shape)[begin : begin + len(part)].nan_to_num())
    found = restored(packed, x.shape).view(-1)
    lost = found.isnan().nonzero().view(-1) // GROUP
    assert set(lost.tolist()) == {2, 3, 4, *({5} if found[5 * GROUP].isnan() else set())}
    assert torch.equal(found[GROUP : 2 * GROUP], torch.zeros(GROUP))
    assert (found[:GROUP] - 0.1).abs().max() < 1e-3


def test_draws_of_torch_are_those_of_the_kernel_beyond_two_to_the_32_too() -> None:
    for begin in (0, 2**32 - 256, 2**32, 5 * 2**32 + 512):
        _, at, one, other = run_of(np.uint64(KEY), begin, begin + 256)
        wanted = [int(number(np.uint32(int(at) + i), one, other)) for i in range(256)]
        assert number32(torch.arange(int(at), int(at) + 256), int(one), int(other)).tolist() == wanted


def test_bits_do_not_depend_on_the_threads() -> None:
    x, found = torch.randn(2**13, 513), []
    with settings_restored():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            packed = quantized(x, KEY, 4)
            found.append((packed.codes, restored(packed, x.shape)))
    assert all(torch.equal(codes, found[0][0]) and torch.equal(values, found[0][1]) for codes, values in found)
    other = quantized(x, KEY + 1, 4)
    assert not torch.equal(other.codes, found[0][0])


@settings(deadline=None)  # the kernels are compiled
@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126))
def test_ends_are_rounded_outwards_to_the_nearest_bfloat16(value: float) -> None:
    exact, down = np.float32(value), as_float(int(rounded_down(np.float32(value))))
    nearest = float(torch.tensor(value).bfloat16())
    assert down <= exact
    assert exact - down <= max(abs(value) * 2**-7, 1e-40)
    assert (down == exact) == (nearest == exact)
    if value >= 0:
        up = as_float(int(rounded_up(exact)))
        assert exact <= up <= max(value * (1 + 2**-7), value + 1e-40)


def test_any_shape_and_layout_comes_back() -> None:
    x: Tensor = torch.randn(7, 5, 33).transpose(0, 2)
    packed = quantized(x, KEY, 8)
    assert (restored(packed, x.shape) - x).abs().max() < 0.05
