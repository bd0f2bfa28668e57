"""Arguments of PyG's loader, brought into our own form."""

from typing import Any

import numpy as np
import pytest
import torch

from ooc.loading.arguments import fanout_of
from stores.errors import ConfigError


@pytest.mark.parametrize("given", [[10, -1], (10, -1), np.array([10, -1]), torch.tensor([10, -1])])
def test_a_fanout_may_be_any_sequence_of_whole_numbers(given: Any) -> None:
    assert fanout_of(given) == [10, -1]


@pytest.mark.parametrize("given", [[2, 0.5], ["2"], [None], np.array([2.5]), torch.tensor([1.5])])
def test_other_than_whole_numbers_are_refused_as_a_fanout(given: Any) -> None:
    with pytest.raises(ConfigError, match="whole numbers"):
        fanout_of(given)
