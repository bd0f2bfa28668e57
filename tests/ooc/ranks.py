"""Processes that train together, as torchrun starts them."""

import random
import socket
import subprocess
from pathlib import Path

from tests.forked import Python


def free_port() -> int:
    """A port that nobody listens on, below those that Linux gives to outgoing connections: one of these may take a port of
    theirs between this call and its use."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # not seeded: test workers with one seed would choose the same
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def start_ranks(count: int, *words: str | Path, **env: str) -> list[Python]:
    """So many processes of the same command, a rank each, in threads of their own. env: further variables."""
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    common |= {"OMP_NUM_THREADS": "1", **env}
    return [Python(*words, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]


def run_ranks(count: int, *words: str | Path, timeout: float = 120, **env: str) -> list[subprocess.CompletedProcess[str]]:
    """What each rank printed, and its exit code, once all have ended."""
    return [each.wait(timeout) for each in start_ranks(count, *words, **env)]


def ended(ranks: list[Python], timeout: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """What each rank printed, and its exit code."""
    return [each.wait(timeout) for each in ranks]
