"""Cost of a batch from disk as the memory shrinks, on one store: seconds and bytes compared with the bound.

    python -m tools.bench.sampled.as_memory_shrinks STORE --limits 6GB 4GB 3GB 2GB 1.5GB --plot shrink.png

Prints JSON; a limit that is too small is listed with its error. Needs root for the limit and the cold cache.
"""

import argparse
import json
import sys
from pathlib import Path

from ooc.stores.sizes import parse_bytes
from tools.bench.lib.disk_rates import Rates
from tools.bench.lib.machine import describe
from tools.bench.sampled.cost import Job, Result, measure, plot


def main() -> None:
    """Parse the command line, measure every limit, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--limits", nargs="+", default=["6GB", "4GB", "3GB", "2GB", "1.5GB"])
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--rows", action="store_true", help="batches with rows, not with the first layer's sums")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate-seconds", type=float, default=3.0)
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    results: list[Result] = []
    for limit in a.limits:
        print(limit, file=sys.stderr)
        job = Job(a.store, "disk", a.fanout, a.batches, a.batch_size, limit, a.rows)
        results.append({"limit": limit, **measure(job, Rates(a.store, a.rate_seconds), a.rounds)})
    if a.plot:
        plot(a.plot, [parse_bytes(limit) / 1e9 for limit in a.limits], results, "memory limit (GB)")
    print(json.dumps({"machine": describe(), "store": a.store.name, "fanout": a.fanout, "rows": a.rows, "limits": results}))


if __name__ == "__main__":
    main()
