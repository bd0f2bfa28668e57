"""`ooc.append`: an append by keyword arguments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ooc.config.base import parse
from ooc.stores.growth import append as growth
from ooc.stores.growth.append import AppendResult
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.ingest.duck import Progress, silent

Names = Sequence[str] | Mapping[str, str] | str


def append(
    store: Path | str,
    *,
    edges: Path | str | None = None,
    src: str | None = None,
    dst: str | None = None,
    weight: str | None = None,
    time: str | None = None,
    time_unit: str | None = None,
    edge_features: Names | None = None,
    header: bool | None = None,
    drop_missing: bool | None = None,
    allow_nan: bool | None = None,
    nodes: Path | str | None = None,
    id: str | None = None,
    label: str | None = None,
    split: str | None = None,
    birth: str | None = None,
    x_cols: str | None = None,
    features: Names | None = None,
    labels: Path | str | None = None,
    memory: int | str | None = None,
    progress: Progress = silent,
) -> AppendResult:
    """Add edges, nodes, or rows of existing nodes to a store, in one transaction; the next reader sees them.

    Time and disk space are proportional to what is added. Killed, it has no effect. `ooc.compact` merges what was added.

    Args:
        store: The store's path.
        edges: Files of new edges: Parquet, CSV/TSV, or an array of shape 2 x E or E x 2 (a glob).
        src, dst, weight, time: Columns of the edges; `time_unit` is s, ms, us or ns.
        edge_features: Edge columns by name of the feature, such as "msg=f*".
        header: Whether text tables start with a header line; by default detected.
        drop_missing: Drop and count edges with an unknown endpoint.
        allow_nan: Keep and count NaN and infinite features.
        nodes: Table of nodes by id: existing ones get the given rows, others are new.
        id, label, split, birth, x_cols: Columns of that table.
        features, labels: Files with a row for each row of `nodes`, or without it for each new node.
        memory: Limit for the process, by default "2GB".
        progress: Called with (step, done, total, unit).

    Returns:
        `AppendResult`: `appended` (counts of edges, nodes and rows), `seconds`, `notes`.

    Raises:
        InputError: If the input is wrong; names file, row and value.
        ConfigError: If columns that the store's edges or nodes have are missing, or arguments contradict each other.
        StoreError: If there is no store, the disk is full, or another append is in progress.

    >>> ooc.append("papers.ooc", edges="new.parquet", nodes="new_papers.parquet", x_cols="f*").appended.edges
    1000000
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name not in ("store", "progress")}
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in given.items() if value is not None}
    return growth.append(parse(AppendSpec, {"out": Path(store), **texts}), progress)
