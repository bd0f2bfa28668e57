"""Training on a GPU from disk: batches copied on demand or one ahead, compiled, and in bfloat16.

    python -m tools.bench.sampled.gpu STORE --out gpu-bench --fanout 10,10 --batch-size 1024 --batches 50 --memory 4GB

Writes OUT/gpu.json and OUT/gpu.png, and prints the JSON. The clock starts at batch `WARM`, so that compilation and the first
fill of the pipeline do not count; both are reported separately. Without a CUDA device it says so and does nothing.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import ooc
from ooc.models.builders import build_model
from ooc.models.compile import compile_model, many_variants
from ooc.models.layers import autocast
from ooc.models.user_models import forward_batch
from tools.bench.lib.machine import describe

WARM = 5
"""Batches before the clock runs"""
VARIANTS: dict[str, dict[str, Any]] = {
    "copied when asked for": {"ahead": False},
    "copied ahead": {},
    "ahead, bf16": {"precision": "bf16"},
    "ahead, compiled": {"compiled": True},
}


def measure(ds: Any, a: argparse.Namespace, *, ahead: bool = True, compiled: bool = False, precision: str = "fp32") -> Any:
    """Seconds per batch, of which waited for batches; the stages' work; the losses."""
    device = torch.device("cuda", torch.cuda.current_device())
    fanout = [int(count) for count in a.fanout.split(",")]
    options = {"device": device} if ahead else {"pin_memory": True}
    loader = ooc.NeighborLoader(ds, fanout, a.split, batch_size=a.batch_size, shuffle=True, edge_ids=False, seed=0, **options)
    torch.manual_seed(0)
    model = build_model("sage", ds.num_features, a.hidden, ds.num_classes or 2, len(fanout)).to(device)
    if compiled:
        compile_model(model, device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    torch.cuda.reset_peak_memory_stats(device)
    losses: list[float] = []
    began = start = time.perf_counter()
    waited = 0.0
    epoch = iter(loader)
    for step in range(min(a.batches + WARM, len(loader))):
        if step == WARM:
            torch.cuda.synchronize(device)
            start, waited = time.perf_counter(), 0.0
        asked = time.perf_counter()
        batch = next(epoch).to(device, non_blocking=True)
        waited += time.perf_counter() - asked
        with autocast(device, precision):
            out = forward_batch(model, batch)
        loss = F.cross_entropy(out.float(), batch.y[: batch.batch_size].long(), ignore_index=-1)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    ended = time.perf_counter()
    epoch.close()
    batches = len(losses) - WARM
    if batches < 1:
        raise SystemExit(f"the split has {len(loader)} batches, and the first {WARM} are not counted: lower --batch-size")
    return {
        "seconds_per_batch": (ended - start) / batches,
        "waited_per_batch": waited / batches,
        "seconds_before": start - began,
        "stages": loader.times(),
        "peak_cuda_bytes": torch.cuda.max_memory_allocated(device),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars: seconds per batch, and what of them was waiting for the batch."""
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.barh(list(results), [each["seconds_per_batch"] for each in results.values()], label="a batch")
    axes.barh(list(results), [each["waited_per_batch"] for each in results.values()], label="of it waiting and copying")
    axes.set_xlabel("seconds")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu-bench"))
    parser.add_argument("--split", default=None, help="of the seeds; by default all nodes")
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--engine", default="auto")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        print("tools.bench.sampled.gpu: skipped, torch sees no CUDA device here", file=sys.stderr)
        return
    results: dict[str, Any] = {}
    for name, settings in VARIANTS.items():
        with many_variants(), ooc.open(a.store, memory=a.memory, engine=a.engine) as ds:
            results[name] = {**measure(ds, a, **settings), "reading": ds.reading("x")}
    a.out.mkdir(parents=True, exist_ok=True)
    found = {"machine": describe(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    (a.out / "gpu.json").write_text(json.dumps(found, indent=2))
    plot(results, a.out / "gpu.png")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
