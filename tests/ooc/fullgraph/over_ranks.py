"""Exact steps over several processes that gloo connects, for tests: what every rank came to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from ooc.runtime.ranks import Ranks
from tests.forked import FORKED
from tests.ooc.ranks import free_port


def run_over(ranks: int, work: Callable[..., Any], *arguments: Any, folder: Path) -> list[Any]:
    """work(ranks, *arguments) in so many processes of one thread each; what each rank returned, through files in `folder`."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    multiprocessing.start_processes(_one, (ranks, port, work, arguments, folder), nprocs=ranks, start_method=FORKED)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def _one(rank: int, size: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...], folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        torch.save(work(Ranks(rank, size, rank, size), *arguments), folder / f"rank{rank}.pt")
    finally:
        distributed.destroy_process_group()
