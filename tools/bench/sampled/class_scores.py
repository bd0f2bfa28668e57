"""Scores of a batch of seeds with many classes, under deterministic algorithms as in runs: milliseconds and memory.

    python -m tools.bench.sampled.class_scores --classes 172 --seeds 1024

Prints a line for each task, for scores that are kept (of splits of few nodes) and binned (of many): medians of updates, and of
what is computed from one in the end, as processor time of one thread (wall time with several, or on a GPU), and the most memory
beside the logits and the labels.
"""

import argparse
import json
import statistics
import sys
import time
from typing import NamedTuple

import torch

from ooc.metrics.nodes import Scores
from ooc.runtime.memory import MemoryMeter
from tools.bench.gpu.device import device_of, synchronize
from tools.bench.lib.machine import describe

TASKS = ("multiclass", "multilabel")
FEW, MANY = 1024, 10**9
"""nodes of a split: their scores are kept, or counted in bins"""
_REPEATS, _SAMPLE_S = 9, 0.001


class ScoreCost(NamedTuple):
    """What scores of one batch take. update_s: to count it; compute_s: all scores from that; nbytes: of memory at most, the
    device's if that is a GPU."""

    update_s: float
    compute_s: float
    nbytes: int


def measure(task: str, classes: int, seeds: int, count: int, device: torch.device) -> ScoreCost:
    """Scores of a split of `count` nodes, in batches of `seeds`."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(seeds, classes, generator=rng).to(device)
    labels = torch.randint(classes, (seeds,), generator=rng)
    if task == "multilabel":
        labels = torch.randint(2, (seeds, classes), generator=rng).float()
    labels = labels.to(device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        taken: list[tuple[float, float]] = []
        now = time.perf_counter if device.type == "cuda" or torch.get_num_threads() > 1 else time.thread_time
        with MemoryMeter("scores", _SAMPLE_S) as meter:
            for _ in range(1 + _REPEATS):
                scores, began = Scores(task, classes, count), now()
                scores.update(logits, labels)
                synchronize(device)
                updated = now()
                scores.compute()
                taken.append((updated - began, now() - updated))
    finally:
        torch.use_deterministic_algorithms(before)
    read = meter.reading
    nbytes = read.cuda_peak - read.cuda_before if device.type == "cuda" else read.peak - read.before
    update_s, compute_s = (statistics.median(each) for each in zip(*taken[1:], strict=True))
    return ScoreCost(update_s, compute_s, nbytes)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=172)
    parser.add_argument("--seeds", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    a = parser.parse_args(arguments)
    torch.set_num_threads(a.threads)
    print(json.dumps({"machine": describe(), "device": a.device}))
    for task in TASKS:
        for name, count in (("kept", FEW), ("binned", MANY)):
            found = measure(task, a.classes, a.seeds, count, device_of(a.device))
            print(
                f"{task}, {name}: {1000 * found.update_s:.1f} ms an update, {1000 * found.compute_s:.1f} ms in the end, "
                f"{found.nbytes / 1e6:.0f} MB"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
