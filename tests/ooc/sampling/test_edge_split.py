"""Splits of edges: the shares asked for, the same part for both directions, and nothing stored."""

import numpy as np
import pytest

from ooc.sampling.edge_split import EdgeSplit
from ooc.stores.errors import ConfigError


def test_parts_have_their_shares_and_are_those_of_pairs() -> None:
    src, dst = np.random.default_rng(0).integers(0, 5000, (2, 20_000))
    split = EdgeSplit(0.1, 0.3, seed=7)
    part = split.parts(src, dst)
    np.testing.assert_array_equal(part, split.parts(dst, src))
    np.testing.assert_array_equal(part[::-3], split.parts(src[::-3].copy(), dst[::-3].copy()))
    assert np.abs(np.bincount(part) / len(part) - [0.6, 0.1, 0.3]).max() < 0.015
    other = EdgeSplit(0.1, 0.3, seed=8).parts(src, dst)
    assert abs((other == part).mean() - (0.6**2 + 0.1**2 + 0.3**2)) < 0.02
    assert (EdgeSplit(0.05, 0.35, seed=7).parts(src, dst) == 1).sum() < (part == 1).sum()


def test_members_are_the_slots_of_each_part() -> None:
    src, dst = np.random.default_rng(0).integers(0, 50, (2, 700))
    split = EdgeSplit(0.2, 0.2)
    part = split.parts(src, dst)
    for number, name in enumerate(("train", "val", "test")):
        pieces = ((src[at : at + 304], dst[at : at + 304]) for at in range(0, 700, 304))
        assert np.asarray(split.members(name, pieces, 700)).tolist() == np.flatnonzero(part == number).tolist()


@pytest.mark.parametrize("shares", [(-0.1, 0.1), (0.5, 0.5), (float("nan"), 0), ("a", 0)])
def test_shares_that_leave_nothing_to_train_on_are_refused(shares: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="val and test must be 0 or more and together below 1"):
        EdgeSplit(*shares)


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(ConfigError, match=r"seed must be a whole number, not 1\.5"):
        EdgeSplit(seed=1.5)  # type: ignore[arg-type]
