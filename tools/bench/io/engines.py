"""Reads per second of every engine compared with fio's on the same file, and their CPU usage.

    python -m tools.bench.io.engines WORK --size 4GB --seconds 3 --rounds 5 --plot engines.png

Prints JSON. Random blocks of 4 KiB to 1 MiB; fio (O_DIRECT, io_uring, queue depth 128) and the engines take turns, because a
virtual disk's speed drifts by the minute: `of_fio` is the median over rounds of the ratio within a round. An engine's request
is 256 MiB of distinct random blocks that never touch, in file order like plans; planning is not timed, copying into the
caller's memory is. The file is dropped from the page cache before each request.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ooc.runtime.buffers import Buffers
from ooc.stores.io.engines import describe as name_of
from ooc.stores.io.engines import open_engine
from ooc.stores.io.read_plan import plan_reads
from ooc.stores.io.segments import Segments
from ooc.stores.sizes import parse_bytes
from tools.bench.lib.machine import describe

ENGINES = ("uring", "pread", "mmap")
STRAIGHT = "uring, straight"
"""extents read in place, without copying each row to its destination"""
BLOCKS = (4096, 16 * 1024, 128 * 1024, 2**20)
REQUEST_BYTES = 256 * 2**20
_PIECE_BYTES = 64 * 2**20

Figures = dict[str, float]


def make_file(path: Path, nbytes: int) -> None:
    """Write random bytes; holes and zeros might never reach the disk."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for begin in range(0, nbytes, _PIECE_BYTES):
            file.write(rng.bytes(min(_PIECE_BYTES, nbytes - begin)))
        file.flush()
        os.fsync(file.fileno())


def drop(path: Path) -> None:
    """Drop the file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def measure(engine: Any, path: Path, nbytes: int, block: int, seconds: float, seed: int, straight: bool = False) -> Figures:
    """Reads per second, and CPU seconds per second, of whole requests for at least `seconds`.

    `straight` reads extents as they are in the file (`Engine.read`), which io_uring does in place, like fio.
    """
    rng = np.random.default_rng(seed)
    count = nbytes // block
    out = Buffers(1, direct=True, least_bytes=1).empty((min(REQUEST_BYTES // block, count // 2) * block,), np.dtype(np.uint8))
    out[:] = 1
    wall = cpu = 0.0
    reads = 0
    while wall < seconds:
        ids = 2 * rng.choice(count // 2, len(out) // block, replace=False)  # every other block: no two touch
        plan = plan_reads(ids, block, count=count, gap_bytes=0, max_extent_bytes=block)
        drop(path)  # what the map read before
        began, cpu_began = time.perf_counter(), time.process_time()
        _ = engine.read(plan, out) if straight else engine.gather(plan, out)
        wall += time.perf_counter() - began
        cpu += time.process_time() - cpu_began
        reads += len(plan.length)
    return {"reads_per_s": reads / wall, "core": cpu / wall}


def fio(path: Path, nbytes: int, block: int, seconds: float, seed: int) -> Figures:
    """The same for fio."""
    options = {"filename": path, "size": nbytes, "bs": block, "runtime": seconds, "randseed": seed + 1}
    fixed = (
        "--name=bench --readonly --rw=randread --direct=1 --ioengine=io_uring --iodepth=128 --time_based --output-format=json"
    )
    command = ["fio", *fixed.split(), *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return {"reads_per_s": job["read"]["iops"], "core": (job["usr_cpu"] + job["sys_cpu"]) / 100}


def summarize(rounds: list[dict[str, Figures]]) -> dict[str, Figures]:
    """Medians over the rounds of every contender, and of its ratio to fio within each round.

    >>> summarize([{"fio": {"reads_per_s": 100, "core": 0.5}, "uring": {"reads_per_s": 99, "core": 0.25}}])["uring"]["of_fio"]
    0.99
    """
    summary = {}
    for name in rounds[0]:
        summary[name] = {key: statistics.median(one[name][key] for one in rounds) for key in ("reads_per_s", "core")}
        if name != "fio" and "fio" in rounds[0]:
            ratios = [one[name]["reads_per_s"] / one["fio"]["reads_per_s"] for one in rounds]
            summary[name] |= {"of_fio": statistics.median(ratios), "worst_of_fio": min(ratios), "best_of_fio": max(ratios)}
    return summary


def compare(path: Path, nbytes: int, blocks: list[int], seconds: float, rounds: int) -> dict[str, Any]:
    """All contenders in turn, for each block size."""
    has_fio = shutil.which("fio") is not None
    results: dict[str, Any] = {"fio": "installed" if has_fio else "not installed: nothing to compare with", "blocks": {}}
    for block in blocks:
        taken = []
        for number in range(rounds):
            one = {"fio": fio(path, nbytes, block, seconds, number)} if has_fio else {}
            for name in ENGINES:
                engine = open_engine(name, Segments((path,), np.array([nbytes])))
                results.setdefault("engines", {})[name] = name_of(engine)
                engine.gather(plan_reads(np.arange(0, 99, 2), 4096, count=99), np.empty(50 * 4096, np.uint8))  # compiled by now
                one[name] = measure(engine, path, nbytes, block, seconds, number)
                if name == "uring":
                    one[STRAIGHT] = measure(engine, path, nbytes, block, seconds, number, straight=True)
                engine.close()
            print(
                block, number, {key: (round(f["reads_per_s"]), round(f["core"], 2)) for key, f in one.items()}, file=sys.stderr
            )
            taken.append(one)
        results["blocks"][block] = summarize(taken)
    return results


def plot(results: dict[str, Any], path: Path) -> None:
    """Bandwidth and CPU usage of every contender by block size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bandwidth, cpu) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    sizes = list(results["blocks"])
    for name in results["blocks"][sizes[0]]:
        figures = [results["blocks"][size][name] for size in sizes]
        kib = [size / 1024 for size in sizes]
        bandwidth.loglog(kib, [f["reads_per_s"] * size / 1e9 for f, size in zip(figures, sizes, strict=True)], "o-", label=name)
        cpu.semilogx(kib, [f["core"] for f in figures], "o-", label=name)
    bandwidth.set(xlabel="block (KiB)", ylabel="GB/s")
    cpu.set(xlabel="block (KiB)", ylabel="cores")
    bandwidth.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for the file")
    parser.add_argument("--file", type=Path, help="a file to read instead of a fresh one")
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("4GB"))
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="+", default=list(BLOCKS), help="bytes, multiples of 4096")
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    path = a.file or a.work / "engines.bin"
    try:
        if a.file is None:
            make_file(path, a.size)
        nbytes = path.stat().st_size // max(a.blocks) * max(a.blocks)
        results = compare(path, nbytes, a.blocks, a.seconds, a.rounds)
    finally:
        if a.file is None:
            path.unlink(missing_ok=True)
    if a.plot:
        plot(results, a.plot)
    print(json.dumps({"machine": describe(), "file_bytes": nbytes, **results}))


if __name__ == "__main__":
    main()
