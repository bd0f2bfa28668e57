"""Ranks of one host read the disk once: the memory in which they share what they read."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ooc.runtime.memory_plan import SHARED_READS_SHARE
from ooc.runtime.ranks import Ranks
from ooc.stores.io.shared_blocks import Address, SharedBlocks

SHARED_BYTES = 32 * 2**20
"""for what one rank has read and another has not taken yet: ranks go through a file together, a few pieces apart"""


@contextmanager
def shared_blocks(ranks: Ranks, memory: int | None) -> Iterator[SharedBlocks | None]:
    """Memory that the ranks of this host share, for `Dataset.share_reads`; None where there is one, or one cannot see another.

    Collective. memory: limit of a rank, None without one.

    >>> with shared_blocks(ranks, 4 * 10**9) as blocks:
    ...     ds.share_reads(blocks)
    """
    made = None if ranks.alone else _joined(ranks, SHARED_BYTES if memory is None else memory // SHARED_READS_SHARE)
    try:
        yield made
    finally:
        if made is not None:
            made.close()


def _joined(ranks: Ranks, nbytes: int) -> SharedBlocks | None:
    """The memory that the first rank of this host makes; None on all of them where one has none."""
    host = f"{socket.gethostname()} {_boot()} {ranks.rank - ranks.local_rank}"
    leads = ranks.local_rank == 0 and ranks.local_world_size > 1
    made = SharedBlocks.create(min(SHARED_BYTES, nbytes), ranks.local_world_size) if leads else None
    addresses: dict[str, Address] = dict(filter(None, ranks.gather((host, made.address) if made is not None else None)))
    if made is None and host in addresses and ranks.local_rank < ranks.local_world_size:
        with suppress(OSError):  # in another container, say
            made = SharedBlocks.attach(addresses[host], ranks.local_rank)
    there = [works for each, works in ranks.gather((host, made is not None)) if each == host]
    if made is not None and not (all(there) and len(there) == ranks.local_world_size):
        made.close()
        return None
    return made


def _boot() -> str:
    """What tells this machine from others of its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(os.getuid())
