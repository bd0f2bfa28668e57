"""A process group of torch without other processes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def process_group(rank: int, size: int = 2) -> Iterator[None]:
    """torch's process group as rank `rank` has it; nothing is ever sent."""
    distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
