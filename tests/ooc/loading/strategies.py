"""Loaders with other rows, or with a stage that somebody watches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ooc.loading.batch_bytes import PackBytes, ScanBytes
from ooc.loading.read_strategy import InMemory
from ooc.stores.arrays.rows import ArrayRows


def over(loader: Any, rows: Any) -> Any:
    """The same loader over other rows, those of an `ArrayRows` in memory; what it says of batches stays."""
    strategy = loader.strategy.over(rows)
    if isinstance(rows, ArrayRows):
        memory = strategy.memory
        strategy = InMemory(strategy.stages, memory.batch if isinstance(memory, ScanBytes | PackBytes) else memory)
    loader.strategy = strategy
    return loader


def with_stage(loader: Any, stage: str, run: Callable[[Any], Any]) -> None:
    """Run `run` in place of a loader's "sample" or "collate"."""
    stages = loader.strategy.stages
    before = getattr(stages, stage)
    other = type("Other", (type(before),), {stage: lambda self, item: run(item)})(**vars(before))
    loader.strategy = replace(loader.strategy, stages=replace(stages, **{stage: other}))
