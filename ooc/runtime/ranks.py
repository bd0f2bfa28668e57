"""The processes of a run: which one this is, and the few collectives that they share.

`torchrun` starts the processes and `torch.distributed` connects them; one process is the case of one rank, in which every
collective returns at once. A `Ranks` is made when a run is opened and passed on, never looked up.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor, distributed

from ooc.stores.errors import ConfigError, OocError

JOIN_SECONDS = 300.0
"""how long a rank waits for the others to start"""
_LOOK_SECONDS = 0.02
"""between two looks at who has started"""
WORK_DAYS = 7
"""how long one waits for another that works alone, as on exact scores; one that ends is noticed at once, by its connection"""
_LOST = ("gloo", "nccl", "connection", "socket")
"""words of what torch raises where a process at the other end is gone"""
Found = TypeVar("Found")


class RankLost(OocError):
    """Another process of the run has ended; its own message says why. The command line prints nothing of it."""


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
    group: Any = field(default=None, compare=False, repr=False)
    """torch's process group, None for the default one"""
    begun_by: int | None = None
    """how many processes the run began with; None: so many"""

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
            distributed.all_reduce(values, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if not self.alone:
            distributed.barrier(group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable), by rank, on all ranks."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.world_size
        distributed.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value` (picklable), on all ranks."""
        if self.alone:
            return value
        found = [value]
        distributed.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def any(self, *flags: bool) -> list[bool]:
        """Which of the flags some rank has set; the same on all ranks."""
        if self.alone:
            return list(flags)
        return [bool(each) for each in self.sum(torch.tensor(flags, dtype=torch.int32, device=self.place))]

    def decided(self, work: Callable[[], Found]) -> Found:
        """What `work` returns on rank 0, which does it alone, on all ranks. Where it raises, the others raise `RankLost`."""
        if self.alone:
            return work()
        found, error = None, None
        if self.first:
            try:
                found = work()
            except Exception as raised:
                error = raised
        found, failed = self.broadcast((found, error is not None))
        if error is not None:
            raise error
        if failed:
            raise RankLost("rank 0 has ended; its message says why")
        return found

    def together(self, work: Callable[[], Found]) -> Found:
        """What `work` returns here, once it is done on all ranks. Where it raises on some, the first of these raises that, and
        all others `RankLost`: so no rank waits, and one line says what is wrong. work: where it has collectives of its own,
        what comes between them is done together too."""
        if self.alone:
            return work()
        found, error = None, None
        try:
            found = work()
        except Exception as raised:
            error = raised
        failed = self.gather(error is not None and not isinstance(error, RankLost))
        if error is not None and failed.index(True) == self.rank:
            raise error
        if any(failed):
            raise RankLost(f"rank {failed.index(True)} has ended; its message says why") from error
        if error is not None:
            raise error
        return found  # type: ignore[return-value]

    @property
    def place(self) -> torch.device:
        """Where values are that the group's backend takes."""
        on_cpu = "cpu" in distributed.get_backend_config(self.group)
        return torch.device("cpu" if on_cpu else "cuda")

    def gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Every rank's `rows` ([n, ...], n of its own, of one width and type, in the host's memory), by rank."""
        if self.alone:
            return [rows]
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        distributed.all_gather(counts, torch.tensor([len(rows)]), group=self.group)
        most = max(int(count) for count in counts)
        found = [rows.new_empty(most, *rows.shape[1:]) for _ in counts]
        padded = rows if len(rows) == most else torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        distributed.all_gather(found, padded.contiguous(), group=self.group)
        return [each[: int(count)] for each, count in zip(found, counts, strict=True)]

    def exchange(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Send rows parts[r] ([n_r, ...], all of one width and type) to rank r, and return what each rank sent to this one.

        counts: rows that come from each rank, which the receiver knows.
        """
        if self.alone:
            return [parts[0]]
        given = torch.cat(list(parts))
        found = given.new_empty(sum(counts), *given.shape[1:])
        distributed.all_to_all_single(found, given, list(counts), [len(part) for part in parts], group=self.group)
        return list(torch.split(found, list(counts)))


ALONE = Ranks()
"""one process"""


@contextmanager
def joined_ranks(device: str = "cpu") -> Iterator[Ranks]:
    """The ranks of torch's process group, where one is initialized; else of torchrun's environment, whose group is left again
    at the end; else one process.

    device: auto, cpu or cuda. With several GPUs each rank of a host has its own, by `LOCAL_RANK`. Raises RankLost where another
    process ends first.
    """
    if not distributed.is_available():
        yield ALONE
        return
    made = not distributed.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        with lost_ranks_named():
            group = _join(device) if made else None
            yield _of_group(group) if distributed.is_initialized() else ALONE
    finally:
        if made and distributed.is_initialized():
            distributed.destroy_process_group()


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Raise RankLost in place of torch's error of a process that is gone."""
    try:
        yield
    except (RuntimeError, distributed.DistError) as error:
        if not distributed.is_initialized() or not _is_lost(error):
            raise
        raise RankLost("another process of the run has ended; its message says why") from error


def _join(device: str) -> Any:
    """Join torchrun's processes; the group that they work in, which waits longer for a rank than joining does."""
    on_gpu = device != "cpu" and torch.cuda.is_available() and distributed.is_nccl_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    place: dict[str, Any] = {}
    try:
        if (store := agents_store()) is not None:  # it outlives restarts, with the addresses of processes that have ended
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            ours = distributed.PrefixStore(f"ooc/ranks/{_life(store, rank, size)}", store)  # type: ignore[attr-defined]
            place = {"store": ours, "rank": rank, "world_size": size}
        distributed.init_process_group(backend, timeout=timedelta(seconds=JOIN_SECONDS), **place)
        return distributed.new_group(timeout=timedelta(days=WORK_DAYS))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"rank {os.environ['RANK']} cannot join the {os.environ['WORLD_SIZE']} processes of the run ({reason[:200]}): "
            "check that all were started, and that MASTER_ADDR and MASTER_PORT are reachable"
        ) from error


def _life(store: Any, rank: int, size: int) -> str:
    """A name that the processes which torchrun has started together agree on; earlier ones had another.

    torchrun's own count of restarts differs between machines: one whose agent learns of a failure from another agent does not
    count it. So every rank says who it is, and rank 0 repeats whom it has found until all have found themselves there.
    """
    own, end = uuid4().hex, time.monotonic() + JOIN_SECONDS
    here, found = [f"ooc/here/{size}/{each}" for each in range(size)], list[str]()
    store.set(here[rank], own)
    answers = [f"ooc/found/{own}/{each}" for each in range(1, size)]
    while time.monotonic() < end:
        if rank == 0 and store.check(here) and (now := [each.decode() for each in store.multi_get(here)]) != found:
            found = now
            store.set("ooc/found", " ".join(found))
        if rank == 0 and store.check(answers):
            return own
        if rank > 0 and store.check(["ooc/found"]):
            found = store.get("ooc/found").decode().split()
            if len(found) == size and found[rank] == own:
                store.set(f"ooc/found/{found[0]}/{rank}", "")
                return found[0]
        time.sleep(_LOOK_SECONDS)
    raise RuntimeError(f"not all of them came within {JOIN_SECONDS:.0f} s")


def agents_store() -> Any:
    """The store of torchrun's agents, which outlives the processes; None where they have started none of them."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not distributed.is_available():
        return None
    host, port, wait = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=JOIN_SECONDS)
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=wait, wait_for_workers=False
    )


def ranks_now() -> Ranks:
    """The ranks of torch's process group as it is, for loaders in scripts; one process where none is initialized."""
    return _of_group(None) if distributed.is_available() and distributed.is_initialized() else ALONE


def cores_of_a_rank() -> int:
    """Cores of this host that a process may use, where torchrun's others have as many."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _is_lost(error: Exception) -> bool:
    """Whether an error is torch's of a process that is gone."""
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or any(word in text for word in _LOST)


def _of_group(group: Any) -> Ranks:
    """Those of the process group; the places on the host are torchrun's, one host where it says nothing."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return Ranks(rank, size, *local, group)
