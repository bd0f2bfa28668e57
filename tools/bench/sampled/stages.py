"""Cycles of every stage of a batch beside the processor's bound: GraphSAGE steps on a store in RAM, one stage after the other.

    python -m tools.bench.sampled.stages STORE --fanout 10,10 --dropout 0.5 --batches 20

Everything runs in one thread, and counts its processor time, so that other processes disturb it little; medians over batches,
kernels warm. Cycles are seconds times the clock, which a chain of dependent multiplications measures. The bound of what moves
bytes is a copy of as many (a stage's inputs and outputs, each once); that of matrix products, with the sums over neighbors and
the cuts of the pieces that make them, the same products alone. Prints a table in Markdown, or with --json one line.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ooc
from ooc.graph.aggregation import FirstLayerAggregates
from ooc.models import products
from ooc.models.builders import build_model
from ooc.models.user_models import forward_batch
from ooc.runtime import shared_products
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import Blocks, keep_large_blocks
from ooc.runtime.product_kernels import BIAS, LDA, LDB, LDC, SUMS_BY_MKL, SUMS_BY_ONEDNN, A, B, C, K, M, N
from ooc.runtime.row_kernels import RANGES, ROWS, WAY
from ooc.runtime.shared_work import Work, number_of, share_work
from ooc.stores.jit import kernel
from tools.bench.lib.machine import describe
from tools.bench.sampled.steps import loader_of, seeds_of_run, sums_of

PRODUCTS = {"addmm", "addmm_", "mm"}
CHAIN, CHAIN_CYCLES = 20_000_000, 5
"""links of the chain that measures the clock; cycles of one, a shift, an xor and a multiplication, on x86 since 2010"""
COPY_BYTES = 2**28
TRIES = 5
ADAM_BYTES = 7 * 4
"""that a parameter's step moves: it, its gradient and two moments read, all but the gradient written"""


Product = Callable[[], object]
"""a call that makes it again"""


class Times(NamedTuple):
    """Seconds of processor time of one batch, by stage; bytes and products, of which bounds are made."""

    seconds: dict[str, float]
    nbytes: dict[str, int]
    products: dict[str, list[Product]]


@kernel
def chain(links: int, value: int) -> int:
    """Shift, xor and multiply so many times, each result the next one's input; no algebra makes two links one."""
    state = np.uint64(value)
    for _ in range(links):
        state = (state ^ (state >> np.uint64(1))) * np.uint64(6364136223846793005)
    return int(state >> np.uint64(2))


def least_seconds(work: Callable[[], Any], tries: int = TRIES) -> float:
    """Processor time of a call, the best of several after one to warm up."""
    work()
    found = []
    for _ in range(tries):
        begin = time.thread_time()
        work()
        found.append(time.thread_time() - begin)
    return min(found)


def clock_hz() -> float:
    """Cycles a second of the core at work."""
    return CHAIN * CHAIN_CYCLES / least_seconds(lambda: chain(CHAIN, 1))


def copy_rate() -> float:
    """Bytes a second that a copy moves, read and written, of arrays beyond the caches."""
    source = np.ones(COPY_BYTES, np.uint8)
    return 2 * COPY_BYTES / least_seconds(partial(np.copyto, np.empty_like(source), source))


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times matrix products, torch's operations and works that threads share, with the sums and cuts of their pieces, and keeps
    them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self.found: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        return self._timed(call, partial(func, *map(_detached, args), **(kwargs or {}))) if _is_product(func) else call()

    def __enter__(self) -> Any:
        self._patches = [patch.object(module, "share_work", self._share_work) for module in (products, shared_products)]
        for each in self._patches:
            each.start()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        for each in self._patches:
            each.stop()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _share_work(self, phases: Sequence[Sequence[Work]], threads: int) -> None:
        bare = [[BareWork.of(work) for work in phase if work.calls] for phase in phases]
        self._timed(partial(share_work, phases, threads), partial(_share_bare, [each for each in bare if each]))

    def _timed(self, call: Callable[[], Any], again: Product) -> Any:
        begin = time.thread_time()
        out = call()
        self.seconds += time.thread_time() - begin
        self.found.append(again)
        return out


class BareWork(NamedTuple):
    """The products of a work alone, of matrices of their own: those of the work are freed when it is done."""

    work: Work
    memory: list[torch.Tensor]

    @classmethod
    def of(cls, work: Work) -> Self:
        numbers = {at: value for at, value in work.numbers.items() if at in (RANGES, ROWS, WAY)}
        sums = work.pieces if numbers[WAY] in (SUMS_BY_MKL, SUMS_BY_ONEDNN) else 1
        sizes, given = dict[int, int](), [[*map(number_of, call)] for call in work.calls]
        for call in given:
            right, left = max(call[K], call[M]) * call[LDA], max(call[N], call[K]) * call[LDB]
            of_bias = 2 * sums * max(call[N], call[M])
            for at, size in ((A, right), (B, left), (C, sums * call[N] * call[LDC]), (BIAS, of_bias)):
                sizes[call[at]] = max(size, sizes.get(call[at], 0))
        memory = {address: torch.zeros(size) for address, size in sizes.items() if address}
        moved = {address: matrix.data_ptr() for address, matrix in memory.items()} | {0: 0}
        calls = [[moved[value] if at in (A, B, C, BIAS) else value for at, value in enumerate(call)] for call in given]
        return cls(work._replace(numbers=numbers, calls=calls), [*memory.values()])


def _share_bare(phases: list[list[BareWork]]) -> None:
    share_work([[each.work for each in phase] for phase in phases], 1)


def _is_product(func: Any) -> bool:
    return func.overloadpacket.__name__ in PRODUCTS


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def products_seconds(found: list[Product]) -> float:
    """Processor time of these products alone."""
    return sum(map(least_seconds, found))


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.thread_time()
    yield
    seconds[name] += time.thread_time() - begin


def one_batch(stages: Any, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, hidden: int) -> Times:
    """One batch through all stages. hidden: width of the rows between layers."""
    seconds: dict[str, float] = defaultdict(float)
    with timed(seconds, "sample"):
        drawn = stages.sample.sample(Cursor(0, step))
    with timed(seconds, "gather and sum"):
        loaded = stages.load.load(drawn)
    with timed(seconds, "collate"):
        batch = stages.collate.collate(loaded)[1]
    forward, backward = Products(), Products()
    with timed(seconds, "forward"), forward:
        loss = F.cross_entropy(forward_batch(model, batch), batch.y[: batch.batch_size])
    with timed(seconds, "backward"), backward:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
    with timed(seconds, "optimizer"):
        optimizer.step()
    split = {"sample": seconds["sample"], "gather and sum": seconds["gather and sum"], "collate": seconds["collate"]}
    for name, mode in (("forward", forward), ("backward", backward)):
        split |= {f"{name}: products": mode.seconds, f"{name}: rest": seconds[name] - mode.seconds}
    split["optimizer"] = seconds["optimizer"]
    found = {"forward: products": forward.found, "backward: products": backward.found}
    return Times(split, moved(drawn, loaded, batch, model, stages, hidden), found)


def moved(drawn: Any, loaded: Any, batch: Any, model: torch.nn.Module, stages: Any, hidden: int) -> dict[str, int]:
    """Bytes that each stage has to read and write, once."""
    subgraph, summed = drawn.subgraph, isinstance(loaded.x, FirstLayerAggregates)
    rows = len(subgraph.source) + len(subgraph.indptr) - 1 if summed else len(subgraph.node)
    arrays = subgraph.node, subgraph.source, subgraph.slot, subgraph.indptr
    between = 4 * hidden * sum(block.num_dst for block in batch.blocks[:-1])
    return {
        "sample": 2 * sum(each.nbytes for each in arrays),
        "gather and sum": rows * stages.load.x.row_bytes + sum(each.nbytes for each in (loaded.x if summed else (loaded.x,))),
        "collate": 2 * batch.y.nbytes,
        "forward: rest": 2 * between + between // 4,
        "backward: rest": 2 * between + between // 4,
        "optimizer": ADAM_BYTES * sum(parameter.numel() for parameter in model.parameters()),
    }


def table(times: list[Times], hz: float, rate: float) -> list[dict[str, Any]]:
    """A row for each stage: its seconds, cycles and bound a batch, medians."""
    last = times[-1]
    found: list[dict[str, Any]] = []
    for name in last.seconds:
        taken = statistics.median(each.seconds[name] for each in times)
        if name in last.products:
            bound, by = products_seconds(last.products[name]), "the same products alone"
        else:
            bound, by = statistics.median(each.nbytes[name] for each in times) / rate, "a copy of its bytes"
        found.append({"stage": name, "ms": taken * 1e3, "cycles": taken * hz, "bound_ms": bound * 1e3, "by": by})
    whole: dict[str, Any] = {key: sum(each[key] for each in found) for key in ("ms", "cycles", "bound_ms")}
    return [*found, {"stage": "all", **whole, "by": ""}]


def run(a: argparse.Namespace) -> dict[str, Any]:
    """Open the store in RAM, run the batches, measure the bounds."""
    torch.set_num_threads(1)
    keep_large_blocks(Blocks.KEEP_ALL)  # as a run without a limit does
    fanout = [int(f) for f in a.fanout.split(",")]
    with ooc.open(a.store, in_memory=True) as ds:
        seeds = seeds_of_run(ds.num_nodes, a.batch_size, a.batches + a.warmup, 0)
        loader = loader_of(ds, seeds, fanout, a.batch_size, None, sums_of(a, fanout, ds))
        stages = loader.strategy.stages
        torch.manual_seed(0)
        assert ds.num_features is not None
        assert ds.num_classes is not None
        model = build_model("sage", ds.num_features, a.hidden, ds.num_classes, len(fanout), a.dropout)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        times: list[Times] = []
        for step in range(a.warmup + a.batches):
            times.append(one_batch(stages, step, model, optimizer, a.hidden))
            if step < a.warmup + a.batches - 1:  # operands that are kept make the next batch's memory fresh
                times[-1] = times[-1]._replace(products={})
        times = times[a.warmup :]
        hz, rate = clock_hz(), copy_rate()
        rows = table(times, hz, rate)
    return {
        "fanout": fanout,
        "dropout": a.dropout,
        "batches": a.batches,
        "clock_hz": hz,
        "copy_bytes_per_s": rate,
        "stages": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table as the page of benchmarks has it.

    >>> print(markdown({"stages": [{"stage": "sample", "ms": 2, "cycles": 7e6, "bound_ms": 1, "by": "a copy of its bytes"}]}))
    | stage | ms | M cycles | bound, ms | times the bound | bound by |
    |---|---|---|---|---|---|
    | sample | 2.00 | 7.0 | 1.00 | 2.0 | a copy of its bytes |
    """
    lines = ["| stage | ms | M cycles | bound, ms | times the bound | bound by |", "|---|---|---|---|---|---|"]
    for row in result["stages"]:
        cells = f"{row['ms']:.2f} | {row['cycles'] / 1e6:.1f} | {row['bound_ms']:.2f} | {row['ms'] / row['bound_ms']:.1f}"
        lines.append(f"| {row['stage']} | {cells} | {row['by']} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--dropout", type=float, default=0.0, help="of hidden rows")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rows", action="store_true", help="batches with rows, not with the first layer's sums")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    result = run(a)
    print(json.dumps({"machine": describe(), **result}) if a.json else markdown(result))


if __name__ == "__main__":
    main()
