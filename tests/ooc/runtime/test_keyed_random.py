"""Laws of the order of seeds: a bijection chosen by a key, slices of it, and batches that cover an epoch once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ooc.runtime.keyed_random import Cursor, KeyedPermutation, Purpose, key, mix, mix64, seeds_of, steps_of

KEYS = st.integers(0, 2**64 - 1)
compiling = settings(deadline=None)  # the first example may compile a kernel


def feistel(n: int, key: int, position: int) -> int:
    """The permutation as KeyedPermutation's docstring has it, in Python's integers."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for r in range(8):
            left, right = right, left ^ (mix(mix(mix(key) ^ r) ^ right) & mask)
        value = left << half | right
        if value < n:
            return value


@compiling
@given(st.integers(0, 5000), KEYS)
def test_a_permutation_is_a_bijection(n: int, seed: int) -> None:
    assert np.array_equal(np.sort(KeyedPermutation(n, seed)[:]), np.arange(n))


@compiling
@given(st.integers(1, 2**62), KEYS, st.data())
def test_it_is_the_feistel_network_and_every_slice_agrees(n: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1))
    order = KeyedPermutation(n, seed)
    part = order[start : start + 5]
    assert part.dtype == np.int64
    assert part.tolist() == [feistel(n, seed, position) for position in range(start, min(n, start + 5))]
    assert len({*part.tolist()}) == len(part)


@compiling
@given(st.integers(1, 3000), KEYS, st.data())
def test_slices_are_slices_of_the_whole(n: int, seed: int, data: st.DataObject) -> None:
    start, stop = data.draw(st.integers(-n, n)), data.draw(st.integers(-n, n + 3))
    order = KeyedPermutation(n, seed)
    assert np.array_equal(order[start:stop], order[:][start:stop])


@compiling
@given(st.integers(50, 2**40), KEYS, KEYS)
def test_another_key_gives_another_permutation(n: int, first: int, second: int) -> None:
    same = np.array_equal(KeyedPermutation(n, first)[:50], KeyedPermutation(n, second)[:50])
    assert same == (first == second)


def test_every_image_is_equally_likely_at_every_position() -> None:
    n, keys = 11, 11_000
    count = np.zeros((n, n))
    for seed in range(keys):
        count[np.arange(n), KeyedPermutation(n, seed)[:]] += 1
    # n * n cells with fixed row and column sums: (n - 1)**2 degrees of freedom.
    statistic = ((count - keys / n) ** 2 / (keys / n)).sum()
    assert stats.chi2.sf(statistic, (n - 1) ** 2) > 1e-4


def test_neighboring_positions_are_unrelated() -> None:
    images = KeyedPermutation(100_003, 5)[:].astype(float)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(images, np.arange(len(images)))[0, 1]) < 0.015


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="2\\*\\*62"):
        KeyedPermutation(-1, 0)
    with pytest.raises(ValueError, match="step 1"):
        KeyedPermutation(9, 0)[::2]
    with pytest.raises(IndexError, match=r"steps 0\.\.2"):
        seeds_of(range(10), Cursor(0, 3), 4, shuffle=False, seed=0)
    with pytest.raises(ValueError, match="rank 2"):
        seeds_of(range(10), Cursor(0, 0), 4, shuffle=False, seed=0, rank=2, world_size=2)


@compiling
@given(KEYS)
def test_the_kernels_mix_is_mix(value: int) -> None:
    assert int(mix64(np.uint64(value))) == mix(value)


def test_keys_of_different_uses_differ() -> None:
    parts = [(s, p, e, t, r) for s in range(3) for p in Purpose for e in range(4) for t in range(5) for r in range(3)]
    assert len({key(*part) for part in parts}) == len(parts)


@compiling
@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 9))
def test_an_epoch_visits_every_position_once(
    n: int, batch_size: int, world_size: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    steps = steps_of(n, batch_size, drop_last, world_size)
    batches = [
        seeds_of(range(n), Cursor(epoch, step), batch_size, shuffle, 3, drop_last, rank, world_size)
        for step in range(steps)
        for rank in range(world_size)
    ]
    seen = np.concatenate([np.empty(0, np.int64), *batches])
    assert len(np.unique(seen)) == len(seen)
    assert all(len(batch) == batch_size for batch in batches[: world_size * (n // (batch_size * world_size))])
    sizes = [len(batch) for batch in batches[len(batches) - world_size :]]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(seen) == (n // (batch_size * world_size) * batch_size * world_size if drop_last else n)
    if not shuffle:
        assert np.array_equal(seen, np.arange(len(seen)))


def test_shuffling_depends_on_seed_and_epoch() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return seeds_of(range(100), Cursor(number, 0), 100, True, seed).tolist()

    orders = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert epoch(1, 2) == orders[5]
