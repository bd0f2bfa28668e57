"""Rates between disk, host and GPU: torch's copies, the disk's own, and files into the GPU's memory by every engine.

    python -m tools.bench.gpu.rates WORK --size 8GB --out OUT

The engines take turns, because a disk's speed varies: medians over rounds, ratios within a round. The disk's own rate is that
of io_uring (pread where the system has none) reading 1 MiB at random into the host's memory. Reads pass by the page cache.
"""

import argparse
import statistics
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ooc.runtime.device_reads import DeviceRing, measured_rate, pinned_copy_rate
from ooc.stores.io.engines import describe as name_of
from ooc.stores.io.engines import gds, open_engine
from ooc.stores.io.segments import Segments
from ooc.stores.sizes import format_bytes, parse_bytes
from tools.bench.gpu.device import device_of, write
from tools.bench.io.engines import make_file, measure

ENGINES = ("uring", "pread", "gds")
_BLOCK = 2**20


def disk_rate(segments: Segments, seconds: float, seed: int) -> float:
    """Bytes a second into the host's memory."""
    with closing(open_engine("auto", segments)) as engine:
        found = measure(engine, segments.paths[0], segments.total, _BLOCK, seconds, seed, straight=True)
    return found["reads_per_s"] * _BLOCK


def device_rate(name: str, segments: Segments, device: torch.device, seconds: float) -> tuple[float, str]:
    """(bytes a second into the device's memory, what the engine says of itself)."""
    with closing(open_engine(name, segments)) as engine, closing(DeviceRing(engine, device)) as ring:
        taken = [measured_rate(ring, segments.total, device)]
        spent = 0.0
        while spent < seconds or len(taken) < 3:
            taken.append(measured_rate(ring, segments.total, device))
            spent += min(segments.total, 2**26) / taken[-1]
        return statistics.median(taken[1:]), name_of(engine)


def compare(path: Path, device: torch.device, seconds: float, rounds: int) -> dict[str, Any]:
    """Rates of all engines and of the disk, in turn."""
    segments = Segments((path,), np.array([path.stat().st_size // _BLOCK * _BLOCK]))
    why_not = gds.unavailable() if device.type == "cuda" else "the device is no GPU"
    names = [name for name in ENGINES if name != "gds" or why_not is None]
    disk: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in names}
    notes: dict[str, str] = {} if why_not is None else {"gds": f"not measured: {why_not}"}
    for number in range(rounds):
        disk.append(disk_rate(segments, seconds, number))
        for name in names:
            rate, notes[name] = device_rate(name, segments, device, seconds)
            rates[name].append(rate)
    return {
        "disk_bytes_per_s": statistics.median(disk),
        "engines": {
            name: {
                "bytes_per_s": statistics.median(found),
                "of_disk": statistics.median(one / own for one, own in zip(found, disk, strict=True)),
            }
            for name, found in rates.items()
        },
        "notes": notes,
        "gpudirect": gds.why_not_direct() or "active" if why_not is None else None,
    }


def table(figures: dict[str, Any]) -> list[str]:
    """The figures in Markdown."""
    lines = ["| | rate | of the disk's |", "|---|---|---|"]
    lines.append(f"| torch's copies from page-locked memory | {format_bytes(figures['pinned_bytes_per_s'])}/s | |")
    lines.append(f"| the disk, into the host's memory | {format_bytes(figures['disk_bytes_per_s'])}/s | |")
    lines += [
        f"| into the device's memory, {name} | {format_bytes(each['bytes_per_s'])}/s | {each['of_disk']:.2f} |"
        for name, each in figures["engines"].items()
    ]
    return [*lines, "", *(f"{name}: {note}" for name, note in figures["notes"].items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for the file")
    parser.add_argument("--out", type=Path, default=Path("gpu-bench"))
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("8GB"))
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    a = parser.parse_args()
    device = device_of(a.device)
    a.work.mkdir(parents=True, exist_ok=True)
    path = a.work / "rates.bin"
    try:
        make_file(path, a.size)
        figures = {"file_bytes": a.size, "pinned_bytes_per_s": pinned_copy_rate(device, min(a.size, 2**30))}
        figures |= compare(path, device, a.seconds, a.rounds)
    finally:
        path.unlink(missing_ok=True)
    write(a.out, "rates", device, figures, table(figures))


if __name__ == "__main__":
    main()
