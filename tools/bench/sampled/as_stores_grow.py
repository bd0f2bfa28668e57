"""Cost of a batch from disk as the store grows, with one budget: seconds and bytes compared with the bound.

    python -m tools.bench.sampled.as_stores_grow WORK --nodes 4000000 --factors 1 2 4 8 --limit 2GB --plot grow.png

Makes each store in turn (10 edges per node) and removes it again. Prints JSON; most of the time is spent making the stores.
Needs root for the limit and the cold cache.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from tools.bench.lib.disk_rates import Rates
from tools.bench.lib.machine import describe
from tools.bench.lib.stores import make_store
from tools.bench.sampled.cost import Job, Result, measure, plot


def one_size(a: argparse.Namespace, nodes: int) -> Result:
    """Make the store, measure, remove it."""
    store = a.work / f"{a.kind}-{nodes}.ooc"
    print(f"{nodes} nodes", file=sys.stderr)
    make_store(store, nodes=nodes, edges=a.degree * nodes, width=a.width, kind=a.kind)
    try:
        job = Job(store, "disk", a.fanout, a.batches, a.batch_size, a.limit, a.rows)
        found = measure(job, Rates(store, a.rate_seconds), a.rounds)
    finally:
        shutil.rmtree(store)
    return {"nodes": nodes, "feature_bytes": 4 * a.width * nodes, **found}


def main() -> None:
    """Parse the command line, measure every size, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=4_000_000)
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--degree", type=int, default=10, help="edges per node")
    parser.add_argument("--width", type=int, default=128, help="feature columns")
    parser.add_argument("--kind", default="uniform")
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--rows", action="store_true", help="batches with rows, not with the first layer's sums")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate-seconds", type=float, default=3.0)
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    results = [one_size(a, a.nodes * factor) for factor in a.factors]
    if a.plot:
        plot(a.plot, [each["feature_bytes"] / 1e9 for each in results], results, f"features (GB); {a.limit} of memory")
    print(
        json.dumps(
            {"machine": describe(), "kind": a.kind, "fanout": a.fanout, "limit": a.limit, "rows": a.rows, "sizes": results}
        )
    )


if __name__ == "__main__":
    main()
