"""The processes of a run: which one this is, and the few collectives that they share.

`torchrun` starts the processes and `torch.distributed` connects them; one process is the case of one rank, in which every
collective returns at once. A `Ranks` is made when a run is opened and passed on, never looked up.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

JOIN_SECONDS = 300.0
"""how long a rank waits for the others to start"""


@dataclass(frozen=True)
class Ranks:
    """One process of those that train together.

    rank, world_size: this process among all. local_rank, local_world_size: among those of its host.

    >>> Ranks().sum(torch.ones(2))
    tensor([1., 1.])
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self.world_size == 1

    @property
    def first(self) -> bool:
        """Whether this process writes what all of them share."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`, in place; the same bits on every rank."""
        if not self.alone:
            distributed.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if not self.alone:
            distributed.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), by rank, on all ranks."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.world_size
        distributed.all_gather_object(found, value)
        return found

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` (picklable), on all ranks."""
        if self.alone:
            return value
        found = [value]
        distributed.broadcast_object_list(found, src=0)
        return found[0]

    def exchange(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Send rows parts[r] ([n_r, ...], all of one width and type) to rank r, and return what each rank sent to this one.

        counts: rows that come from each rank, which the receiver knows.
        """
        if self.alone:
            return [parts[0]]
        given = torch.cat(list(parts))
        found = given.new_empty(sum(counts), *given.shape[1:])
        distributed.all_to_all_single(found, given, list(counts), [len(part) for part in parts])
        return list(torch.split(found, list(counts)))


ALONE = Ranks()
"""one process"""


@contextmanager
def joined_ranks(device: torch.device | str = "cpu") -> Iterator[Ranks]:
    """The ranks of torch's process group, where one is initialized; else of torchrun's environment, whose group is left again
    at the end; else one process."""
    if not distributed.is_available():
        yield ALONE
        return
    made = not distributed.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if made:
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=JOIN_SECONDS))
    try:
        yield _of_group() if distributed.is_initialized() else ALONE
    finally:
        if made:
            distributed.destroy_process_group()


def _of_group() -> Ranks:
    """Those of the process group; the places on the host are torchrun's, one host where it says nothing."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return Ranks(rank, size, *local)
