"""Published temporal graphs as stores, for the scores."""

from pathlib import Path
from typing import Any

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
