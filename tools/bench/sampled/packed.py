"""Packed epochs (DiskGNN, Liu et al., 2024) beside shared scans and superbatches: the same batches, memory limit and disk.

    python -m tools.bench.sampled.packed WORK --nodes 8000000 --edges 80000000 --limit 2GB --batches 300 --disk 8GB

Packing: the batches of an epoch are sampled beforehand; rows that most of them need stay in memory; one pass over the features
writes the other rows of each batch together, and training reads these back in one piece a batch. As many batches are packed at
a time as the disk (`--disk`) takes, a pass for each such group. Packing once for P epochs repeats their samples, which changes
training; its figures are (pass + writing) / P + reading, and it needs the disk for a whole epoch.

Arms: ooc in RAM, shared scans and superbatches (`tools.bench.sampled.steps`, whose seconds hold sampling and training), and
packing, whose seconds are those of the pass, of writing and of reading back alone; "with training" adds the larger of these and
RAM, as if all overlapped. Prints JSON. Needs root.
"""

import argparse
import json
import queue
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.io.pages import PageFile, page_buffer
from ooc.stores.jit import kernel
from ooc.stores.sizes import parse_bytes
from tools.bench.lib.machine import describe, limit_memory
from tools.bench.lib.pages import PAGE_BYTES

PIECE_BYTES = 2**19
"""of one batch, written at a time"""
CHUNK_ROWS = 2**16
ENTRY_BYTES = 24
"""memory for a row of a batch while it is packed: ids, batches, their order"""
SPARE = 16
"""pieces that are written while others fill"""
THREADS = 8
Rows = NDArray[np.uint8]


def hot_rows(batches: list[Any], num_nodes: int, count: int) -> NDArray[np.bool_]:
    """bool[N]: the `count` rows that most of the batches need."""
    uses = np.zeros(num_nodes, np.int32)
    for ids in batches:
        uses[ids] += 1
    hot = np.zeros(num_nodes, np.bool_)
    if count:
        hot[np.argpartition(-uses, min(count, num_nodes) - 1)[:count]] = True
    return hot & (uses > 1)


def groups_of(sizes: list[int], row_bytes: int, disk: int, memory: int) -> Iterator[range]:
    """Batches that are packed together: as many as the disk takes their rows, and memory their ids and pieces."""
    first = 0
    while first < len(sizes):
        last, rows = first, 0
        while last < len(sizes):
            rows += sizes[last]
            held = rows * ENTRY_BYTES + (last + 1 - first) * PIECE_BYTES
            if last > first and (rows * row_bytes + (last + 1 - first) * PAGE_BYTES > disk or held > memory):
                break
            last += 1
        yield range(first, last)
        first = last


class Packer:
    """Writes the rows of a group's batches together, and reads them back; counts bytes and seconds."""

    def __init__(self, rows: Any, path: Path, disk: int) -> None:
        self.rows, self.row_bytes = rows, int(rows.row_bytes)
        assert PIECE_BYTES % self.row_bytes == 0, "rows fill pieces"
        size = disk // PAGE_BYTES * PAGE_BYTES + PIECE_BYTES
        PageFile.allocate(path, size)
        self.path, self.file = path, PageFile(path, size)
        self.threads = ThreadPoolExecutor(THREADS)
        self.seconds = {"pass and write": 0.0, "read": 0.0}
        self.bytes = {"pass": 0, "write": 0, "read": 0}

    def pack(self, batches: list[NDArray[Any]]) -> NDArray[np.int64]:
        """Write rows `batches[k]` (ascending ids) one behind the other from byte start[k] on; returns int64[batches]."""
        begin = time.perf_counter()
        sizes = np.array([-(-len(ids) * self.row_bytes // PAGE_BYTES) * PAGE_BYTES for ids in batches])
        start = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        row = np.concatenate(batches)
        owner = np.repeat(np.arange(len(batches), dtype=np.int16), [len(ids) for ids in batches])
        order = np.argsort(row, kind="stable")  # runs in ascending order are merged
        row, owner = row[order], owner[order]
        del order
        pieces = _Pieces(self, start, len(batches))
        distinct = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]]))
        for chunk, first, last in self._chunks(row, distinct):
            at = np.searchsorted(row[distinct[first:last]], row[distinct[first] : _end(distinct, last, row)])
            pieces.add(chunk, at, owner[distinct[first] : _end(distinct, last, row)])
        pieces.finish()
        self.seconds["pass and write"] += time.perf_counter() - begin
        return start

    def _chunks(self, row: NDArray[Any], distinct: NDArray[np.int64]) -> Iterator[tuple[Rows, int, int]]:
        """Rows in ascending order, CHUNK_ROWS at a time, the next ones being read."""
        width = self.rows.shape[1:]
        buffers = [np.empty((CHUNK_ROWS, *width), self.rows.dtype) for _ in range(2)]

        def submit(number: int) -> "tuple[Future[int], int, int] | None":
            first = number * CHUNK_ROWS
            if first >= len(distinct):
                return None
            last = min(first + CHUNK_ROWS, len(distinct))
            ids = row[distinct[first:last]].astype(np.int64)
            return self.rows.submit(ids, buffers[number % 2][: last - first]), first, last

        coming, number = submit(0), 0
        while coming is not None:
            future, first, last = coming
            self.bytes["pass"] += future.result()
            coming = submit(number + 1)
            yield buffers[number % 2][: last - first].reshape(last - first, -1).view(np.uint8), first, last
            number += 1

    def read(self, start: int, count: int, out: Rows) -> None:
        """Read `count` rows that were packed from byte `start` on to the page-aligned `out`."""
        begin = time.perf_counter()
        size = -(-count * self.row_bytes // PAGE_BYTES) * PAGE_BYTES
        at = range(0, size, PIECE_BYTES)
        list(self.threads.map(lambda i: self.file.load(start + i, out[i : min(i + PIECE_BYTES, size)]), at))
        self.bytes["read"] += size
        self.seconds["read"] += time.perf_counter() - begin

    def close(self) -> None:
        """Remove the file."""
        self.threads.shutdown()
        self.file.close()
        self.path.unlink()


def _end(distinct: NDArray[np.int64], last: int, row: NDArray[Any]) -> int:
    return int(distinct[last]) if last < len(distinct) else len(row)


class _Pieces:
    """A piece of each batch in memory, written by threads as it fills up."""

    def __init__(self, packer: Packer, start: NDArray[np.int64], batches: int) -> None:
        self._packer, self._at = packer, start.copy()
        self._rows = PIECE_BYTES // packer.row_bytes
        self._buffers = page_buffer((batches + SPARE) * PIECE_BYTES).reshape(batches + SPARE, self._rows, packer.row_bytes)
        self._slot, self._filled = np.arange(batches), np.zeros(batches, np.int64)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._writes: list[Future[None]] = []
        for slot in range(batches, batches + SPARE):
            self._free.put(slot)

    def add(self, chunk: Rows, at: NDArray[np.int64], owner: NDArray[np.int16]) -> None:
        """Give row chunk[at[i]] to batch owner[i]."""
        done = 0
        while done < len(at):
            done, full = _spread(chunk, at, owner, done, self._slot, self._filled, self._buffers)
            if full >= 0:
                self._write(full)
                self._slot[full] = self._free.get()

    def _write(self, batch: int) -> None:
        size = -(-int(self._filled[batch]) * self._packer.row_bytes // PAGE_BYTES) * PAGE_BYTES
        slot, at = int(self._slot[batch]), int(self._at[batch])
        self._at[batch] += size
        self._filled[batch] = 0
        self._packer.bytes["write"] += size
        self._writes.append(self._packer.threads.submit(self._store, at, slot, size))

    def _store(self, at: int, slot: int, size: int) -> None:
        try:
            self._packer.file.store(at, self._buffers[slot].reshape(-1)[:size])
        finally:
            self._free.put(slot)

    def finish(self) -> None:
        """Write what remains, and wait."""
        for batch in np.flatnonzero(self._filled).tolist():
            self._write(batch)
        for write in self._writes:
            write.result()


@kernel
def _spread(
    chunk: Rows,
    at: NDArray[np.int64],
    owner: NDArray[np.int16],
    first: int,
    slot: NDArray[np.int64],
    filled: NDArray[np.int64],
    buffers: NDArray[np.uint8],
) -> tuple[int, int]:
    """Copy rows until a batch's piece is full; returns how far that is, and the batch (-1)."""
    for i in range(first, len(at)):
        batch = owner[i]
        buffers[slot[batch], filled[batch]] = chunk[at[i]]
        filled[batch] += 1
        if filled[batch] == buffers.shape[1]:
            return i + 1, batch
    return len(at), -1


def packed(a: argparse.Namespace) -> dict[str, Any]:
    """The arm: pack and read every batch of the trace below `a.work`, in the memory that the run of scans had for batches.

    Beside the batch that is read, one is ready and one at the model.
    """
    limit_memory(a.limit, "ooc_packed")
    import ooc
    from ooc.stores.arrays.zarr_rows import ShardedRows

    budget = json.loads((a.work / "budget.json").read_text())
    batches = [np.load(path, mmap_mode="r") for path in sorted((a.work / "trace").glob("*.npy"))]
    left = budget["in_flight"] + 3 * budget["max_batch"]  # what runs have for batches
    with ooc.open(a.store, memory=a.limit) as ds:
        rows = ds.stored("x")
        assert isinstance(rows, ShardedRows)
        most = max(map(len, batches)) * rows.row_bytes + PIECE_BYTES
        fixed = 3 * most + 2 * CHUNK_ROWS * rows.row_bytes + SPARE * PIECE_BYTES
        room = max(0, left - fixed)
        count = room // 2 // rows.row_bytes  # half for the hot rows, half for ids and pieces of a group
        hot = hot_rows(batches, ds.num_nodes, count)
        held = np.empty((int(hot.sum()), *rows.shape[1:]), rows.dtype)
        begin = time.perf_counter()
        cache_bytes = rows.read(np.flatnonzero(hot), held)
        cache_seconds = time.perf_counter() - begin
        cold = [np.asarray(ids)[~hot[ids]] for ids in batches] if a.check else None
        sizes = [int((~hot[ids]).sum()) for ids in batches]
        groups = list(groups_of(sizes, rows.row_bytes, parse_bytes(a.disk), room // 2))
        packer = Packer(rows, a.work / "packed.bin", parse_bytes(a.disk))
        try:
            out = page_buffer(most)
            for group in groups:
                mine = [np.asarray(batches[k])[~hot[batches[k]]] for k in group]
                for k, at in zip(group, packer.pack(mine).tolist(), strict=True):
                    packer.read(at, sizes[k], out)
                    if cold is not None:
                        _check(rows, cold[k], out)
        finally:
            packer.close()
    n = len(batches)
    return {
        "batches": n,
        "groups": len(groups),
        "rows_in_memory": int(hot.sum()),
        "rows_per_batch": sum(map(len, batches)) / n,
        "rows_packed_per_batch": sum(sizes) / n,
        "disk_of_all_batches": sum(sizes) * rows.row_bytes,
        "bytes_per_batch": {name: value / n for name, value in packer.bytes.items()},
        "seconds_per_batch": {name: value / n for name, value in packer.seconds.items()},
        "cache": {"bytes": cache_bytes, "seconds": cache_seconds},
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _check(rows: Any, ids: NDArray[Any], out: Rows) -> None:
    want = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
    rows.read(ids.astype(np.int64), want)
    found = out[: len(ids) * rows.row_bytes].view(rows.dtype).reshape(want.shape)
    assert np.array_equal(want, found), "packed rows are not those of the store"


def save_trace(store: Path, run: dict[str, Any], work: Path) -> None:
    """The ids of every batch, ascending, as int32 files; and the division of the memory."""
    from tools.bench.sampled.trace import Trace

    shutil.rmtree(work / "trace", ignore_errors=True)
    (work / "trace").mkdir(parents=True)
    (work / "budget.json").write_text(json.dumps(run["budget"]))
    with Trace.of(store, run) as trace:
        for number, ids in enumerate(trace.nodes()):
            np.save(work / "trace" / f"{number:05d}.npy", np.sort(ids).astype(np.int32))


def compare(a: argparse.Namespace, kind: str, fanout: str) -> dict[str, Any]:
    """All arms on one graph."""
    from tools.bench.lib.stores import make_store
    from tools.bench.sampled.cost import Job, last_json, run_cold

    store, work = a.work / f"{kind}-{a.nodes}.ooc", a.work / "packing"
    make_store(store, nodes=a.nodes, edges=a.edges, width=a.width, kind=kind, order="degree" if kind == "rmat" else "input")
    job = {"store": store, "fanout": fanout, "batches": a.batches, "batch_size": a.batch_size, "limit": a.limit}
    runs = {
        "ram": last_json(Job(**{**job, "limit": None}, features="ram").command),
        "scans": run_cold(Job(**job, features="disk").command),
        "superbatches": run_cold(Job(**job, features="disk", rows=True).command),
    }
    arms = {name: _arm(run) for name, run in runs.items()}
    run = runs["scans"] if "failed" not in runs["scans"] else runs["superbatches"]
    if "failed" in run:
        return {"kind": kind, "fanout": fanout, "arms": arms}
    save_trace(store, run, work)
    for disk in a.disk.split(","):
        own = ["--arm", "--store", str(store), "--limit", a.limit, "--disk", disk, *(["--check"] if a.check else [])]
        found = run_cold([sys.executable, "-m", "tools.bench.sampled.packed", str(work), *own])
        arms[f"packed, {disk}"] = found if "failed" in found else with_epochs(found, arms["ram"].get("seconds_per_batch", 0.0))
    shutil.rmtree(work)
    return {"kind": kind, "fanout": fanout, "arms": arms}


def _arm(run: dict[str, Any]) -> dict[str, Any]:
    if "failed" in run:
        return run
    moved = {"bytes_per_batch": (run["bytes_read"] + run["topology_bytes_read"]) / run["batches"]}
    return moved | {name: run[name] for name in ("seconds_per_batch", "windows", "nodes_per_batch", "peak_rss_bytes", "losses")}


def with_epochs(found: dict[str, Any], in_ram: float) -> dict[str, Any]:
    """Bytes and seconds a batch where each epoch is packed anew, and where P epochs use what is packed once."""
    moved, seconds = found["bytes_per_batch"], found["seconds_per_batch"]
    epochs = {}
    for count in (1, 5, 20):
        took = seconds["pass and write"] / count + seconds["read"]
        epochs[str(count)] = {
            "bytes_per_batch": (moved["pass"] + moved["write"]) / count + moved["read"],
            "seconds_per_batch": took,
            "with_training": max(took, in_ram),
        }
    return found | {"epochs": epochs}


def main() -> None:
    """Parse the command line, run every arm, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=8_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", default=["uniform", "rmat"])
    parser.add_argument("--fanout", nargs="+", default=["10,10"])
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--limit", default="2GB", help="of memory, page cache counted")
    parser.add_argument("--disk", default="8GB", help="for packed rows; several: 4GB,16GB")
    parser.add_argument("--check", action="store_true", help="compare every packed batch with the store's rows")
    parser.add_argument("--arm", action="store_true", help="internal: pack, in this process")
    parser.add_argument("--store", type=Path, help="internal: the store of --arm")
    a = parser.parse_args()
    if a.arm:
        print(json.dumps(packed(a)))
        return
    a.work.mkdir(parents=True, exist_ok=True)
    graph = {"nodes": a.nodes, "edges": a.edges, "width": a.width}
    results = []
    for kind in a.kinds:
        for fanout in a.fanout:
            results.append(compare(a, kind, fanout))
            shown = {name: _without_losses(arm) for name, arm in results[-1]["arms"].items()}
            print(json.dumps({"kind": kind, "fanout": fanout, "arms": shown}), file=sys.stderr, flush=True)
    same = [_equal(result["arms"]) for result in results]
    for result in results:
        result["arms"] = {name: _without_losses(arm) for name, arm in result["arms"].items()}
    settings = {"batches": a.batches, "batch_size": a.batch_size, "limit": a.limit, "disk": a.disk}
    print(json.dumps({"machine": describe(), "graph": graph, **settings, "results": results, "losses_equal": same}))


def _without_losses(arm: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arm.items() if key != "losses"}


def _equal(arms: dict[str, Any]) -> bool:
    losses = [arm["losses"] for arm in arms.values() if "losses" in arm]
    return all(each == losses[0] for each in losses)


if __name__ == "__main__":
    main()
