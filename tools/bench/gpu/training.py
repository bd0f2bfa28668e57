"""Seconds a batch on a GPU as `ooc train` runs, against loading as GraphBolt's: a gather from page-locked rows and a copy.

    python -m tools.bench.gpu.training WORK --fanout 10,10 --out OUT
    python -m tools.bench.gpu.training WORK --fanout 15,10,5 --out OUT

GraphSAGE on a graph of `tools.graphs.make_graph`, numbered by degree, made in WORK unless it is there. Every arm but the last
is `ooc train` with these settings: batches have first-layer aggregates; the clock begins at step --warm. Losses of the arms in
float32 are compared to the bit, and an arm that is refused (too little memory) says why. The arm "gathered and copied" draws
batches with `ooc`'s sampler, gathers their rows from a page-locked array in a thread, and copies them on a stream of their own
two batches ahead; the model computes all layers from rows. "loader alone" iterates over batches on the device without a model;
"copies of ready batches" delivers the same ones again and again.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import copy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import ooc
from ooc.config.nodes import TrainConfig
from ooc.models import pre_aggregation_of
from ooc.models.builders import build_model
from ooc.models.user_models import forward_batch
from ooc.runtime.buffers import Buffers
from ooc.runtime.device_reads import pinned_copy_rate
from ooc.runtime.transfer import Copier, StorageRegions, map_leaves, moved, on_device, pin
from ooc.stores.errors import OocError
from ooc.training.callbacks import Callback
from ooc.training.loop import train
from tools.bench.gpu.device import Waits, counted_waits, device_of, synchronize, write
from tools.bench.lib.stores import make_store

AHEAD = 2
"""batches that are gathered and copied before the model asks for them"""
GATHERED = "gathered and copied"
FEW = "few"
"""stands for --gpu-memory"""
ARMS: dict[str, dict[str, Any]] = {
    "rows in RAM": {"in_memory": True},
    "rows in RAM, TF32": {"in_memory": True, "tf32": True},
    "rows in RAM, bf16": {"in_memory": True, "precision": "bf16"},
    "rows in RAM, sampled on the GPU": {"in_memory": True, "sample_device": "cuda"},
    "rows in RAM, few on the GPU": {"in_memory": True, "gpu_memory": FEW},
    "rows on disk": {},
    "rows on disk, sampled by the CPU": {"sample_device": "cpu"},
    "rows on disk, few on the GPU": {"gpu_memory": FEW},
}
"""settings of `ooc train`; on a GPU its memory has the feature rows, all of them unless there are few"""
_OF_GPUS = {"tf32", "precision", "sample_device", "gpu_memory"}
_READY = 8
"""batches that are delivered in turn"""


class Clocked(Callback):
    """When each step was logged, its loss, and how often the host had waited by then."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self.steps: list[tuple[float, int]] = []
        self.losses: list[float] = []

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        self.steps.append((time.perf_counter(), self._waits.count))
        self.losses.append(loss)

    def since(self, warm: int) -> dict[str, float]:
        """Seconds and waits of a batch, from step `warm` on."""
        (begin, before), (end, after) = self.steps[warm], self.steps[-1]
        count = len(self.steps) - 1 - warm
        each = np.diff([at for at, _ in self.steps[warm:]])
        return {
            "seconds_per_batch": (end - begin) / count,
            "median_seconds": float(np.median(each)),
            "waits_per_batch": (after - before) / count,
        }


def arms_of(a: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings of `ooc train` by arm; on the CPU without what only GPUs have."""
    arms = {name: dict(own) for name, own in ARMS.items() if a.device == "cuda" or not _OF_GPUS & own.keys()}
    for own in arms.values():
        own |= {} if "in_memory" in own else {"memory": a.memory}
        own |= {"gpu_memory": a.gpu_memory} if "gpu_memory" in own else {}
    return arms


def trained(
    a: argparse.Namespace, store: Path, settings: dict[str, Any], device: torch.device, counting: bool
) -> dict[str, Any]:
    """A run of `ooc train`: its times, stages, losses and peak. counting: the host's waits, which takes time of its own."""
    steps = a.warm + (a.counted if counting else a.batches) + 1
    with TemporaryDirectory(dir=a.work) as folder, counted_waits(device if counting else torch.device("cpu")) as waits:
        config = TrainConfig(
            store=store,
            out=Path(folder) / "run",
            fanout=a.fanout,
            batch_size=a.batch_size,
            hidden=a.hidden,
            dropout=0.0,
            lr=1e-3,
            epochs=1,
            max_steps=steps,
            device=a.device,
            eval_splits=[],
            checkpoint_every=10 * steps,
            **settings,
        )
        clocked = Clocked(waits)
        summary = train(config, callbacks=[clocked])
    stages = {name: each["work_s"] / each["items"] for name, each in summary["stages"].items() if each["items"]}
    return {
        **clocked.since(a.warm),
        "stage_seconds_per_item": stages,
        "read_bytes_per_batch": summary["bytes_read"] / summary["steps"],
        "peak_cuda_bytes": summary["peak_cuda_bytes"],
        "losses": clocked.losses,
    }


def loader_of(ds: Any, a: argparse.Namespace, **options: Any) -> Any:
    """A loader of training batches."""
    order: dict[str, Any] = {"batch_size": a.batch_size, "shuffle": True, "seed": 0}
    return ooc.NeighborLoader(ds, a.fanout, "train", **order, edge_ids=False, split_masks=False, **options)


class GatheredRows:
    """Batches with their rows on the device: gathered from a page-locked array and copied, in a thread and on its stream."""

    def __init__(self, rows: Tensor, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=on_cuda).copy_(rows)
        self._device, self._on_cuda = device, on_cuda
        self._stream: Any = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]

    def _fetch(self, batch: Any) -> tuple[Any, Any]:
        ids = batch.n_id
        own = torch.empty((len(ids), self._rows.shape[1]), dtype=self._rows.dtype, pin_memory=self._on_cuda)
        torch.index_select(self._rows, 0, ids, out=own)
        if not self._on_cuda:
            batch.x = own
            return batch, None
        batch = pin(batch)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = moved(batch, self._device)
            batch.x = own.to(self._device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return batch, event

    def batches(self, loader: Any) -> Iterator[Any]:
        """The loader's batches, `AHEAD` of them fetched before they are asked for."""
        with ThreadPoolExecutor(1) as thread, closing(iter(loader)) as source:
            waiting = [thread.submit(self._fetch, next(source)) for _ in range(AHEAD)]
            for batch in source:
                yield self._ready(waiting.pop(0))
                waiting.append(thread.submit(self._fetch, batch))
            for future in waiting:
                yield self._ready(future)

    def _ready(self, future: Any) -> Any:
        batch, event = future.result()
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            map_leaves(batch, partial(_used_on, stream))
        return batch


def _used_on(stream: Any, leaf: Any) -> Any:
    """Keep a tensor's memory until the stream is done with it."""
    if isinstance(leaf, Tensor):
        leaf.record_stream(stream)
    return leaf


def gathered(a: argparse.Namespace, ds: Any, device: torch.device) -> dict[str, Any]:
    """Training on batches whose rows are gathered and copied."""
    torch.manual_seed(0)
    model = build_model("sage", ds.num_features, a.hidden, ds.num_classes, len(a.fanout)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    clocked, last = Clocked(Waits()), None
    rows = GatheredRows(torch.from_numpy(np.asarray(ds.stored("x").array)), device)
    with closing(rows.batches(loader_of(ds, a, features=False))) as batches:  # type: ignore[type-var]
        for number, batch in zip(range(a.warm + a.batches + 1), batches, strict=False):
            loss = F.cross_entropy(forward_batch(model, batch), batch.y[: batch.batch_size])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if last is not None:  # a step late, as `ooc train` reads losses
                clocked.step(0, number, number, last.item())
            last = loss.detach()
    synchronize(device)
    return {**clocked.since(a.warm - 1), "losses": clocked.losses}


def nbytes(batch: Any) -> int:
    """Bytes of a batch's arrays in the host's memory."""
    return sum(region.nbytes for region in StorageRegions(batch).at.values())


def delivered(a: argparse.Namespace, ds: Any, device: torch.device, pinned: float) -> dict[str, Any]:
    """Batches to the device, without a model: from the loader, and ready ones copied again and again."""
    model = build_model("sage", ds.num_features, a.hidden, ds.num_classes, len(a.fanout))
    how = {"pre_aggregation": pre_aggregation_of(model)}
    with closing(iter(loader_of(ds, a, **how))) as source:
        ready = [next(source) for _ in range(_READY)]
    size = statistics.mean(map(nbytes, ready))
    rate = copied(ready, max(_READY, a.batches), device)
    taken = []
    with closing(iter(loader_of(ds, a, device=device, **how))) as source:
        for _, _batch in zip(range(a.warm + a.batches), source, strict=False):
            taken.append(time.perf_counter())
    seconds = (taken[-1] - taken[a.warm]) / (len(taken) - 1 - a.warm)
    return {
        "batch_bytes": size,
        "loader": {"seconds_per_batch": seconds},
        "copies": {"bytes_per_s": rate, "of_pinned": rate / pinned},
    }


def copied(ready: list[Any], count: int, device: torch.device) -> float:
    """Bytes a second of the loaders' copier over ready batches, whose rows are in page-locked leases, as in loaders."""
    leases = Buffers(_READY, pinned=device.type == "cuda", least_bytes=1)

    def leased(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim() == 2):
            return leaf
        own = leases.empty(tuple(leaf.shape), np.dtype(np.float32))
        np.copyto(own, leaf.numpy())
        return torch.from_numpy(own)

    batches = [map_leaves(batch, leased) for batch in ready]
    sizes = [nbytes(batch) for batch in batches]
    again = (copy(batches[number % len(batches)]) for number in range(_READY + count))
    with closing(on_device(again, device, Copier(device, leases))) as source:
        for _, _batch in zip(range(_READY), source, strict=False):
            pass
        synchronize(device)
        begin = time.perf_counter()
        total = sum(sizes[number % len(sizes)] for number, _batch in enumerate(source))
        synchronize(device)
    return total / (time.perf_counter() - begin)


def table(figures: dict[str, Any]) -> list[str]:
    """The figures in Markdown."""
    lines = ["| | ms a batch | median | waits a step | CUDA peak, MB |", "|---|---|---|---|---|"]
    for name, each in figures["arms"].items():
        waits = f"{each['counted_waits']:.2f}" if "counted_waits" in each else ""
        peak = f"{each['peak_cuda_bytes'] / 1e6:.0f}" if "peak_cuda_bytes" in each else ""
        taken = " | ".join(f"{1e3 * each[kind]:.2f}" for kind in ("seconds_per_batch", "median_seconds"))
        lines.append(f"| {name} | {taken} | {waits} | {peak} |")
    loader, copies = figures["delivered"]["loader"], figures["delivered"]["copies"]
    lines += ["", f"loader alone: {1e3 * loader['seconds_per_batch']:.2f} ms a batch"]
    lines.append(f"copies of ready batches: {copies['bytes_per_s'] / 1e9:.2f} GB/s, {copies['of_pinned']:.2f} of torch's")
    for name, each in figures["arms"].items():
        stages = each.get("stage_seconds_per_item", {})
        lines += [f"{name}: " + ", ".join(f"{stage} {1e3 * s:.2f} ms" for stage, s in stages.items())] if stages else []
    lines += [f"{name}: refused, {why}" for name, why in figures["refused"].items()]
    return [*lines, f"losses of `ooc train` in float32 are equal: {figures['losses_equal']}"]


def measure(a: argparse.Namespace, store: Path, device: torch.device) -> dict[str, Any]:
    """All arms in turn."""
    arms: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, settings in arms_of(a).items():
        try:
            timed = trained(a, store, settings, device, counting=False)
            waits = trained(a, store, settings, device, counting=True)["waits_per_batch"]
        except (OocError, torch.OutOfMemoryError) as error:
            refused[name] = str(error)
            continue
        arms[name] = {**timed, "counted_waits": waits}
    pinned = pinned_copy_rate(device)
    with ooc.open(store, in_memory=True) as ds:
        arms[GATHERED] = gathered(a, ds, device)
        found = delivered(a, ds, device, pinned)
    alike = [arms[name].pop("losses") for name in list(arms)]
    exact = [name for name, settings in ARMS.items() if not {"tf32", "precision"} & settings.keys()]
    own = [losses for name, losses in zip(arms, alike, strict=True) if name in exact]
    equal = all(each == own[0] for each in own)
    return {"arms": arms, "refused": refused, "pinned_bytes_per_s": pinned, "delivered": found, "losses_equal": equal}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for the graph")
    parser.add_argument("--out", type=Path, default=Path("gpu-bench"))
    parser.add_argument("--fanout", type=lambda text: [int(count) for count in text.split(",")], default=[10, 10])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--counted", type=int, default=30, help="batches whose waits are counted")
    parser.add_argument("--warm", type=int, default=20, help="batches before the clock runs")
    parser.add_argument("--memory", default="4GB", help="of the arms with rows on disk")
    parser.add_argument("--gpu-memory", default="3GB", help="of the arms with few rows on the GPU")
    parser.add_argument("--nodes", type=int, default=8_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--kind", default="rmat")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    return parser.parse_args()


def main() -> None:
    a = parse()
    device = device_of(a.device)
    a.work.mkdir(parents=True, exist_ok=True)
    store = a.work / f"{a.kind}-{a.nodes}.ooc"
    shape = {"nodes": a.nodes, "edges": a.edges, "width": a.width, "kind": a.kind}
    make_store(store, **shape, memory="8GB", order="degree", eval_share=8 * a.batch_size / a.nodes)
    figures = measure(a, store, device)
    settings = {name: getattr(a, name) for name in ("fanout", "batch_size", "hidden", "batches", "memory")}
    write(a.out, "training-" + "-".join(map(str, a.fanout)), device, {**shape, **settings, **figures}, table(figures))


if __name__ == "__main__":
    main()
