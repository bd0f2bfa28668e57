"""Published temporal graphs as stores, for the training scripts."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ooc.stores.errors import ConfigError, OocError

COLLEGEMSG: dict[str, Any] = {"header": False, "src": "column0", "dst": "column1", "time": "column2"}
FLIGHTS: dict[str, Any] = {"src": "origin", "dst": "destination", "time": "date", "edge_features": ["msg=delay,distance"]}
KNOWN = {"CollegeMsg.txt": COLLEGEMSG, "flights-3m.parquet": FLIGHTS}
"""file -> how it is read. CollegeMsg (SNAP): src dst seconds; flights (vega-datasets): Parquet with dates"""


def store_of(path: Path, folder: Path) -> Path:
    """`path` where it is a store; a file of KNOWN is ingested into `folder`, once, with every event's reverse.

    >>> store_of(Path("data/CollegeMsg.txt"), Path("runs"))
    PosixPath('runs/CollegeMsg.ooc')
    """
    if path.name not in KNOWN:
        return path
    from ooc.stores.ingest import IngestSpec, ingest

    store = folder / f"{path.stem}.ooc"
    if not store.exists():
        ingest(IngestSpec(out=store, edges=str(path), undirected=True, **KNOWN[path.name]))
    return store


def settings_of(given: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE arguments by name. Raises ConfigError for another.

    >>> settings_of(["epochs=5"])
    {'epochs': '5'}
    """
    found = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not sign:
            raise ConfigError(f"{each!r} is no setting: write NAME=VALUE, as in epochs=5")
        found[name] = value
    return found


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's errors as `ooc` shows them: one line and exit code 2, or 130 where the run was interrupted."""
    try:
        yield
    except OocError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; --resume goes on at the last checkpoint", file=sys.stderr)
        sys.exit(130)
