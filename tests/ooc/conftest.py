"""For all tests of the package."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Runs set torch's threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _nothing_waits_for_its_collection() -> Iterator[None]:
    """Tests that stand for killed processes leave open what they had; its threads end as it is collected."""
    yield
    gc.collect()
