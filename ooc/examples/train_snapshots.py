"""Train on windows of a temporal graph: a script to copy and change.

    ooc ingest msg.ooc --edges CollegeMsg.txt --no-header --src column0 --dst column1 --time column2 --undirected
    ooc example train_snapshots > train_snapshots.py
    python train_snapshots.py msg.ooc runs/days
    python train_snapshots.py msg.ooc runs/weeks window=7d stride=1d model=evolvegcn epochs=5
    python train_snapshots.py msg.ooc runs/days --resume        # after a crash, or with more epochs

Each window predicts the events of the next one; the state of nodes is stored in the run's directory. `ooc train --mode
snapshots` is the same loop; NAME=VALUE are its options (`ooc train --mode snapshots --help`). For your own loop use
`ooc.SnapshotLoader`. CollegeMsg.txt is SNAP's: source, destination and seconds in each line.
"""

import argparse
import sys
from pathlib import Path

from ooc.config.modes import load_config
from ooc.report.page import write_report
from ooc.stores.errors import OocError
from ooc.training.loop import train
from ooc.training.summary import score_lines
from ooc.training.watchers import terminal_watcher

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
    parser.add_argument("store", type=Path, help="a temporal store (`ooc ingest --time`)")
    parser.add_argument("run", type=Path, help="where the run's files go")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--resume", action="store_true")
    a = parser.parse_args()
    if wrong := [each for each in a.settings if "=" not in each]:
        parser.error(f"{wrong[0]!r} is not a setting: write NAME=VALUE, as in epochs=5")
    given = {**SETTINGS, **dict(each.split("=", 1) for each in a.settings)}
    config = load_config(None, {"mode": "snapshots", "store": a.store, "out": a.run, **given})

    summary = train(config, resume=a.resume, watcher=terminal_watcher())

    print(*score_lines(summary), sep="\n")
    print(f"{summary['train_seconds']:.1f} s of training, {summary['total_steps']} steps; {write_report(a.run)}")


if __name__ == "__main__":
    try:
        main()
    except OocError as error:  # what a user can mend, in one line
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; --resume continues at the last checkpoint", file=sys.stderr)
        sys.exit(130)
