"""For all tests of the package."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_seed() -> None:
    """Loaders that are given no seed take one from torch."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Runs set torch's threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
