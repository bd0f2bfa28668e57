"""Train on windows of a temporal graph: a script to copy and change.

    python -m tools.examples.train_snapshots STORE RUN                 # or CollegeMsg.txt, flights-3m.parquet instead
    python -m tools.examples.train_snapshots STORE RUN window=7d stride=1d model=evolvegcn epochs=5
    python -m tools.examples.train_snapshots STORE RUN --resume        # after a crash, or with more epochs

Each window predicts the events of the next one; the state of nodes is stored in RUN. `ooc train --mode snapshots` is the same
loop; NAME=VALUE are its flags (`ooc train --help`). For your own loop use `ooc.SnapshotLoader`.
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
    "window": "1d",  # "12h", "250ms", or with by=count a number of events; stride: distance between the starts of windows
    "model": "roland",  # every layer's rows are updated by a GRU; or recurrent, evolvegcn
    "conv": "sage",
    "hidden": "64",
    "layers": "2",
    "epochs": "8",
    "lr": "0.003",
    "threads": "1",  # small windows do not benefit from more
}


def main() -> None:
    """Train, print the scores beside EdgeBank's, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a temporal store (`ooc ingest --time`), or a known file")
    parser.add_argument("run", type=Path, help="where the run's files go")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--resume", action="store_true")
    a = parser.parse_args()
    given = {**SETTINGS, **settings_of(a.settings)}
    config = load_config(None, {"mode": "snapshots", "store": store_of(a.store, a.run.parent), "out": a.run, **given})

    summary = train(config, resume=a.resume, watcher=terminal_watcher())

    print(*score_lines(summary), sep="\n")
    print(f"{summary['train_seconds']:.1f} s of training, {summary['total_steps']} steps; {write_report(a.run)}")


if __name__ == "__main__":
    with one_line_errors():
        main()
