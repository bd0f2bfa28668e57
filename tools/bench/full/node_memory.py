"""Node memory larger than RAM: TGN trained on an event stream under a limit; events per second and bytes moved.

    python -m tools.bench.full.node_memory WORK --nodes 20000000 --memory-dim 100 --limit 2GB

Uniform random events in both directions with --width features, ingested into WORK if missing, and a row for every node written
to disk first, so that every read goes to the disk. Then --steps steps of `ooc train --mode events` with TGN on the CPU, from
the middle of the training events, in a separate process under a memory limit that counts page cache (needs root). The clock
runs from the first request to the end of the last step, after one batch that loads the kernels. Prints JSON: events per second,
bytes of each kind per event (including reads for later steps), times of the pipeline's stages and of the checkpoint, peak RSS,
and the disk's random reads per second before and after (fio). The rows are removed.
"""

import argparse
import resource
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import limit_memory
from tools.bench.lib.temporal import Result, answer, cold_pass, flags_of, stores_of

NAMES = "steps", "batch_size", "memory_dim"

PAGE_BYTES, _PIECE_BYTES = 4096, 2**24


def fill(history: Any, width: int) -> int:
    """Write a row [width] for every node, as if at step 0, without the undo log; returns the bytes written."""
    import numpy as np

    rng, rows = np.random.default_rng(0), history.rows[0]

    def noise(piece: Any) -> None:
        held = piece.view(rows.dtype).reshape(-1, rows.shape[1])
        held[:, :width] = rng.standard_normal((len(held), width), np.float32)
        held[:, width:] = 0  # the time of the first event

    def first_step(piece: Any) -> None:
        piece.view(np.int32)[:] = 1

    return _write(rows, noise) + _write(history.steps, first_step)


def _write(rows: Any, make: Callable[[Any], None]) -> int:
    """Write all rows to disk in pieces of whole rows and pages filled by `make`; returns the bytes."""
    import numpy as np

    from ooc.runtime.buffers import Buffers

    count = PAGE_BYTES * max(1, _PIECE_BYTES // (PAGE_BYTES * rows.row_bytes))
    total = -(-rows.shape[0] * rows.row_bytes // PAGE_BYTES) * PAGE_BYTES
    piece = Buffers(1, direct=True, least_bytes=1).empty((count * rows.row_bytes,), np.dtype(np.uint8))
    for begin in range(0, total, len(piece)):
        make(piece)
        rows.file.store(begin, piece[: min(len(piece), total - begin)])
    rows.sync()
    return total


def train(a: argparse.Namespace) -> Result:
    """Run the steps under the limit, in a separate process."""
    if a.limit:
        limit_memory(a.limit)
    import torch

    import ooc
    from ooc.config.events import EventsConfig
    from ooc.temporal.node_memory import NodeMemory
    from ooc.training.event_mode import EventMode

    out = a.work / "nodememory"
    shutil.rmtree(out, ignore_errors=True)
    settings: dict[str, Any] = {"batch_size": a.batch_size, "memory_dim": a.memory_dim}
    config = EventsConfig(store=a.child, out=out, **settings)
    torch.manual_seed(0)
    memory = a.memory or a.limit or None
    with ooc.open(a.child, memory=memory) as ds, closing(EventMode(config, ds)) as mode:
        most = mode.budget.history
        mode.memory = NodeMemory.create(out, ds, a.memory_dim, columns=mode.columns, max_bytes=most)
        loader: Any = mode.loaders["train"]
        loader.memory = mode.memory
        mode.history = history = mode.opened.enter_context(closing(mode.memory.history))
        filled = fill(history, a.memory_dim)
        optimizer = torch.optim.Adam(mode.model.parameters(), config.lr)
        state = loader.state_dict() | {"event": loader.num_events // 2}
        for steps in (1, a.steps):
            loader.load_state_dict(state)
            before = mode.counts()
            begin, cpu, events, losses = time.perf_counter(), time.process_time(), 0, []
            with closing(iter(loader)) as batches:
                for batch in islice(batches, steps):
                    loss = mode.loss(batch)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    events += len(batch.src)
                    losses.append(float(loss.detach()))
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            mode.memory.end_pass()
        begin = time.perf_counter()
        history.state()
        mode.commit()
        checkpoint = time.perf_counter() - begin
        after = mode.counts()
        moved = {name: after[name] - before[name] for name in after if "bytes" in name}
        found = {
            "events": events,
            "steps": len(losses),
            "seconds": seconds,
            "events_per_s": events / seconds,
            "core": cpu / seconds,
            "checkpoint_seconds": checkpoint,
            "memory_bytes": filled,
            "bytes_per_event": {name: value / events for name, value in moved.items()},
            "losses": [losses[0], losses[-1]],
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "stages": after["stages"],
        }
    shutil.rmtree(out)
    return found


def measure(a: argparse.Namespace) -> Result:
    """The store, the run, and the disk before and after it."""
    from tools.bench.lib.disk_rates import Rates

    (store,) = stores_of(a, [1], undirected=True).values()
    rates = Rates(store, a.rate_seconds, events="msg")
    rates.measure()
    found = cold_pass("full.node_memory", a, store, NAMES)
    rates.measure()
    return {"of_events": a.events, **found, "disk": rates.asdict()}


def plot(path: Path, result: Result) -> None:
    """Bytes per event, by kind."""
    from tools.bench.lib.chart import bars

    bars(path, {name: value for name, value in result["bytes_per_event"].items() if value}, "bytes per event")


def main() -> None:
    """Parse the command line, measure, print JSON."""
    parser = flags_of(__doc__, events=20_000_000)
    parser.add_argument("--memory-dim", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=200)
    answer(parser.parse_args(), NAMES, train, measure, plot)


if __name__ == "__main__":
    main()
