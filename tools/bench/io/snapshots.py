"""Windows of a temporal graph streamed from disk: bytes per second compared with the disk's, and peak memory as events grow.

    python -m tools.bench.io.snapshots WORK --nodes 20000000 --events 200000000 --limit 2GB --plot windows.png

Uniform random events with --width features, ingested into WORK if missing (`tools.bench.lib.stores`), and a quarter and a
sixteenth as many. Each round is the disk's sequential speed (fio), a cold pass of `SnapshotLoader` over all tumbling windows of
--window, without a model, in a separate process under a memory limit that counts page cache (needs root), and the disk again.
The bytes are those of the events (ends, time, features), each counted once; the clock runs from the first request to the last
window, after one window that loads the kernels. Prints JSON: the median ratio to the disk, events per second, and the peak RSS
of every size.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import limit_memory
from tools.bench.lib.temporal import Result, answer, cold_pass, flags_of, stores_of

SHARES = 1, 4, 16
"""shares of the events for which peak memory is measured"""


def stream(a: argparse.Namespace) -> Result:
    """One pass over the windows under the limit, in a separate process."""
    if a.limit:
        limit_memory(a.limit)
    import ooc
    from ooc.loading.snapshot_loader import SnapshotLoader

    window = int(a.window) if a.window.isdigit() else a.window
    with ooc.open(a.child, memory=a.memory or a.limit or None) as ds:
        loader = SnapshotLoader(ds, window, by="count" if isinstance(window, int) else "time")
        first = iter(loader)
        next(first)  # loads the kernels
        first.close()
        begin, cpu = time.perf_counter(), time.process_time()
        windows = events = nodes = 0
        for snapshot in loader:
            windows, events, nodes = windows + 1, events + snapshot.edge_index.shape[1], nodes + len(snapshot.n_id)
            if windows == a.most:
                break
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        nbytes = events * ds.events.row_bytes()
        return {
            "events": events,
            "windows": windows,
            "nodes_per_window": nodes / windows,
            "seconds": seconds,
            "core": cpu / seconds,
            "bytes": nbytes,
            "bytes_per_s": nbytes / seconds,
            "events_per_s": events / seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "stages": loader.times(),
        }


def share_of_disk(bytes_per_s: float, before: float, after: float) -> float:
    """Ratio of a speed to the mean of the disk's before and after it, in bytes per second.

    >>> share_of_disk(1.5e9, 1.8e9, 2.2e9)
    0.75
    """
    return bytes_per_s / ((before + after) / 2)


def compare(a: argparse.Namespace) -> dict[str, Any]:
    """All rounds over all events, then a pass over each smaller number."""
    from tools.bench.lib.disk_rates import Rates

    stores = stores_of(a, SHARES)
    whole = stores.pop(a.events)

    def run(store: Path, *flags: str) -> Result:
        return cold_pass("io.snapshots", a, store, ["window"], *flags)

    run(whole, "--most", "3")  # compiles the kernels
    rates, rounds = Rates(whole, a.rate_seconds, events="msg"), []
    rates.measure()
    for _ in range(a.rounds):
        found = run(whole)
        rates.measure()
        before, after = (disk.sequential_bytes_per_s for disk in rates.taken[-2:])
        rounds.append({**found, "share_of_disk": share_of_disk(found["bytes_per_s"], before, after)})
        print(json.dumps({key: rounds[-1][key] for key in ("seconds", "share_of_disk")}), file=sys.stderr)
    fewer = [run(store) for store in stores.values()]
    peaks = {each["events"]: each["peak_rss_bytes"] for each in [rounds[0], *fewer]}
    return {
        "share_of_disk": statistics.median(each["share_of_disk"] for each in rounds),
        "events_per_s": statistics.median(each["events_per_s"] for each in rounds),
        "bytes_per_s": statistics.median(each["bytes_per_s"] for each in rounds),
        "peak_rss_bytes": peaks,
        "rounds": rounds,
        "fewer": fewer,
        "disk": rates.asdict(),
    }


def plot(path: Path, result: dict[str, Any]) -> None:
    """Speed compared with the disk's per round, and peak memory by the number of events."""
    from tools.bench.lib.chart import Panel, lines

    rounds, disk = result["rounds"], [each["sequential_bytes_per_s"] / 1e9 for each in result["disk"]["taken"]]
    mean = [(before + after) / 2 for before, after in pairwise(disk)]
    speed = {"windows": [each["bytes_per_s"] / 1e9 for each in rounds], "the disk, in sequence": mean}
    events = sorted(result["peak_rss_bytes"])
    peak = {"peak RSS": [result["peak_rss_bytes"][count] / 1e6 for count in events]}
    at = [count / 1e6 for count in events]
    lines(
        path,
        [Panel(list(range(1, len(rounds) + 1)), speed, "round", "GB per second"), Panel(at, peak, "million events", "MB")],
    )


def main() -> None:
    """Parse the command line, measure, print JSON."""
    parser = flags_of(__doc__)
    parser.add_argument("--window", default="30m", help="a duration (an event comes every 10 ms), or a number of events")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    answer(parser.parse_args(), ["window"], stream, compare, plot)


if __name__ == "__main__":
    main()
