"""Train on a stream of events: a script to copy and change.

    python -m tools.examples.train_events STORE RUN                    # or CollegeMsg.txt, flights-3m.parquet instead
    python -m tools.examples.train_events STORE RUN model=graphmixer batch_size=100 epochs=5
    python -m tools.examples.train_events STORE RUN --resume           # after a crash, or with more epochs

Each event's destination is ranked against negatives, using only earlier events; node memory is stored in RUN. `ooc train --mode
events` is the same loop; NAME=VALUE are its flags (`ooc train --help`). For your own loop use `ooc.EventLoader`.
"""

import argparse
from pathlib import Path

from ooc.config.modes import load_config
from ooc.report.page import write_report
from ooc.training.loop import train
from ooc.training.summary import score_lines
from ooc.training.watchers import terminal_watcher
from tools.graphs.temporal import one_line_errors, settings_of, store_of

SETTINGS = {
    "model": "tgn",  # node memory on disk and attention; or tgat, graphmixer, without memory
    "num_neighbors": "10",  # past events sampled per node; tgat: one number per hop
    "batch_size": "200",
    "epochs": "8",
    "lr": "0.0005",
    "threads": "1",  # small batches do not benefit from more
}


def main() -> None:
    """Train, print the scores beside EdgeBank's, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a temporal store (`ooc ingest --time ... --undirected`), or a known file")
    parser.add_argument("run", type=Path, help="where the run's files go")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--resume", action="store_true")
    a = parser.parse_args()
    given = {**SETTINGS, **settings_of(a.settings)}
    store = store_of(a.store, a.run.parent)
    config = load_config(None, {"mode": "events", "store": store, "out": a.run, **given})

    summary = train(config, resume=a.resume, watcher=terminal_watcher())

    print(*score_lines(summary), sep="\n")
    print(f"{summary['units_per_second']:,.0f} events/s, {summary['total_steps']} steps; {write_report(a.run)}")


if __name__ == "__main__":
    with one_line_errors():
        main()
