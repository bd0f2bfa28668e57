"""A temporal graph's events in batches with their nodes' past, from disk: events per second, and peak memory as events grow.

    python -m tools.bench.io.events WORK --nodes 20000000 --events 200000000 --limit 2GB --plot stream.png

The stores of `tools.bench.io.snapshots`, of all events and of a sixteenth. Each run is a cold pass of `EventLoader` over
--pass-events events from the middle of the stream, with the --neighbors latest edges of sources, destinations and random
negatives and their features, without a model, in a separate process under a memory limit that counts page cache (needs root).
The clock runs from the first request to the last batch, after one batch that loads the kernels. Prints JSON: for every size
events per second, past edges per event and peak RSS, and the disk's random reads per second in between (fio).
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import limit_memory
from tools.bench.lib.temporal import Result, answer, cold_pass, flags_of, stores_of

NAMES = "pass_events", "batch_size", "neighbors", "columns"
SHARES = 1, 16
"""shares of the events for which peak memory is measured"""


def stream(a: argparse.Namespace) -> Result:
    """A pass over some events under the limit, in a separate process."""
    if a.limit:
        limit_memory(a.limit)
    import ooc
    from ooc.loading.event_loader import EventLoader
    from ooc.sampling.negatives import RandomNegatives

    with ooc.open(a.child, memory=a.memory or a.limit or None) as ds:
        middle = len(ds.events) // 2
        span = middle, min(middle + a.pass_events, len(ds.events))
        loader = EventLoader(
            ds,
            a.batch_size,
            events=span,
            seed=0,
            num_neighbors=[a.neighbors],
            negatives=RandomNegatives(0, ds.num_nodes),
            columns=a.columns.split(",") if a.columns else [],
        )
        first = iter(loader)
        next(first)  # loads the kernels
        first.close()
        loader.load_state_dict(loader.state_dict() | {"epoch": 0, "event": span[0]})
        begin, cpu = time.perf_counter(), time.process_time()
        events = past = 0
        for batch in loader:
            events, past = events + len(batch.src), past + batch.edge_index.shape[1]
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        return {
            "of_events": len(ds.events),
            "events": events,
            "past_per_event": past / events,
            "seconds": seconds,
            "core": cpu / seconds,
            "events_per_s": events / seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "stages": loader.times(),
        }


def compare(a: argparse.Namespace) -> dict[str, Any]:
    """A pass over each size, with the disk measured in between."""
    from tools.bench.lib.disk_rates import Rates

    stores = stores_of(a, SHARES)
    rates = Rates(stores[a.events], a.rate_seconds, events="msg")
    passes: list[Result] = []
    for store in stores.values():
        rates.measure()
        passes.append(cold_pass("io.events", a, store, NAMES))
        print(json.dumps({key: passes[-1][key] for key in ("of_events", "events_per_s", "peak_rss_bytes")}), file=sys.stderr)
    rates.measure()
    return {"passes": passes, "disk": rates.asdict()}


def plot(path: Path, result: dict[str, Any]) -> None:
    """Events per second and peak memory by the number of events."""
    from tools.bench.lib.chart import Panel, lines

    passes = sorted(result["passes"], key=lambda each: int(each["of_events"]))
    at = [each["of_events"] / 1e6 for each in passes]
    speed = {"EventLoader": [each["events_per_s"] for each in passes]}
    peak = {"peak RSS": [each["peak_rss_bytes"] / 1e6 for each in passes]}
    lines(path, [Panel(at, speed, "million events", "events per second"), Panel(at, peak, "million events", "MB")])


def main() -> None:
    """Parse the command line, measure, print JSON."""
    parser = flags_of(__doc__)
    parser.add_argument("--pass-events", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--neighbors", type=int, default=10)
    parser.add_argument("--columns", default="msg", help="of the events; '' for none")
    answer(parser.parse_args(), NAMES, stream, compare, plot)


if __name__ == "__main__":
    main()
