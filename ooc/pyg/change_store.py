"""Changing stores from Python: `ooc.append`, `ooc.split` and `ooc.reduce`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from ooc.config.base import parse
from ooc.pyg.staging import FileOrArray, joined, staged
from ooc.stores.errors import ConfigError
from ooc.stores.growth import append as growth
from ooc.stores.growth.append import AppendResult
from ooc.stores.growth.reduce import ReduceResult
from ooc.stores.growth.reduce import reduce as narrow
from ooc.stores.growth.resplit import SplitResult, resplit
from ooc.stores.growth.spec import append_spec_of
from ooc.stores.ingest.duck import Progress, silent
from ooc.stores.ingest.reductions import METHODS, Reduction, listed
from ooc.stores.ingest.spec import parse_shares
from ooc.stores.io.remote.url import refuse_url
from ooc.stores.sizes import parse_bytes


def append(
    store: str | PathLike[str],
    *,
    edges: Any = None,
    src: str = "src",
    dst: str = "dst",
    weight: str | None = None,
    time: str | None = None,
    time_unit: Literal["s", "ms", "us", "ns"] | None = None,
    edge_features: Mapping[str, FileOrArray] | Sequence[str] = (),
    edge_label: str | None = None,
    edge_split: str | None = None,
    header: bool | None = None,
    drop_missing: bool = False,
    allow_nan: bool = False,
    nodes: Any = None,
    id: str = "id",
    label: str | Sequence[str] | None = None,
    split: str | None = None,
    birth: str | None = None,
    x_cols: str | Sequence[str] | None = None,
    features: Mapping[str, FileOrArray] | Sequence[str] = (),
    labels: FileOrArray | None = None,
    memory: str | int = "2GB",
    progress: Progress | None = None,
) -> AppendResult:
    """Add edges, nodes, or rows of existing nodes to a store, in one transaction; the next reader sees them.

    Time and disk space are proportional to what is added. Killed, it has no effect. `ooc.compact` merges what was added. To a
    heterogeneous store, `edges`, `nodes` and what is of one type are given by type, as of `ooc.ingest`.

    Args:
        store: The store's path, or a data set.
        edges: New edges: files (a glob), an integer array [2, E] or [E, 2], or a data frame, as of `ooc.ingest`.
        src, dst, weight, time: Columns of the edges. time_unit: Of numeric times; None: that of the store.
        edge_features: Name -> column patterns of the edge table, npy files, or an array [E] or [E, F].
        edge_label, edge_split: Columns of the edge table, where the store's edges have labels or a split.
        header: Whether text tables start with a header line; by default detected.
        drop_missing: Drop and count edges with an unknown endpoint.
        allow_nan: Keep and count NaN and infinite features.
        nodes: Table of nodes by id, or a data frame: existing ones get the given rows, others are new.
        id, label, split, birth, x_cols: Columns of that table.
        features, labels: npy files or arrays with a row for each row of `nodes`, or without it for each new node.
        memory: Limit for the process, in bytes or such as "2GB".
        progress: Called with the step, the units done, and in total.

    Returns:
        `AppendResult`: `appended` (counts of edges, nodes and rows), `seconds`, `notes`.

    Raises:
        InputError: If the input is wrong; names file, row and value.
        ConfigError: If columns that the store's edges or nodes have are missing, or arguments contradict each other.
        StoreError: If there is no store, the disk is full, or another append is in progress.

    >>> ooc.append("papers.ooc", edges="new.parquet", nodes="new_papers.parquet", x_cols="f*").appended.edges
    1000000
    >>> ooc.append("shop.ooc", nodes={"user": "new.parquet"}, edges={("user", "visits", "item"): "visits.parquet"})
    """
    given = {name: value for name, value in locals().items() if name not in ("store", "progress")}
    with staged(given) as settings:
        spec = append_spec_of({"out": refuse_url(store, "appended to"), **settings}, parse)
        return growth.append(spec, progress or silent)


def split(
    store: str | PathLike[str],
    random_split: str | Sequence[float] | None = None,
    *,
    seed: int = 0,
    train: FileOrArray | None = None,
    val: FileOrArray | None = None,
    test: FileOrArray | None = None,
    replace: bool = False,
    node_type: str | None = None,
) -> SplitResult:
    """Give a store splits, at random among the labelled nodes or by lists of nodes, in one transaction.

    Open data sets keep the splits they have. A run that was trained on earlier splits is not resumed with the new ones.

    Args:
        store: The store's path, or a data set.
        random_split: Shares of train, val and test, such as (0.6, 0.2, 0.2), drawn among the labelled nodes (among all nodes of
            a store without labels). The sizes are exact.
        seed: Seed of the random split.
        train: npy file or array of the training nodes: rows, or a boolean mask; instead of `random_split`.
        val: The same for validation.
        test: The same for testing.
        replace: Replace the splits that the store has.
        node_type: The type of the nodes to split, in a heterogeneous store.

    Returns:
        `SplitResult`: `sizes` (split -> nodes), `notes` about empty and overlapping splits.

    Raises:
        ConfigError: If the store has splits and `replace` is False, or appended data; arguments contradict each other, or there
            is no such node type.
        InputError: If nodes are out of range or no integers.
        StoreError: If there is no store, the disk is full, or an append or compaction is in progress.

    >>> ooc.split("papers.ooc", (0.6, 0.2, 0.2), seed=1).sizes
    {'train': 6000, 'val': 2000, 'test': 2000}
    """
    if random_split is None and seed:
        raise ConfigError("`seed` is that of a random split: give `random_split` too")
    shares = None if random_split is None else parse_shares(joined(random_split))
    with staged({"train": train, "val": val, "test": test}) as files:
        return resplit(refuse_url(store, "split again"), shares, files, seed, replace, node_type)


def reduce(
    store: str | PathLike[str],
    method: str,
    *,
    node_type: str | None = None,
    seed: int = 0,
    memory: str | int = "2GB",
    progress: Progress | None = None,
) -> ReduceResult:
    """Make the features x of a store narrower, in one transaction, as `ooc.ingest(reduce=...)` does while it is built.

    The map is that of all nodes, of "mutual" of the training nodes. It stays in the store, which applies it to rows that are
    appended (`Dataset.feature_map`). Open data sets keep the wide rows. Earlier runs cannot be resumed.

    Args:
        store: The store's path, or a data set.
        method: "pca:64", "svd:64", "random:64", "variance:64" or "mutual:64": the method and the number of columns.
        node_type: The type of the nodes, in a heterogeneous store.
        seed: Of "random" and "mutual", and of the start of "pca" and "svd" for more than 4,096 columns.
        memory: Limit for the process, in bytes or such as "2GB".
        progress: Called with the step, the units done, and in total.

    Returns:
        `ReduceResult`: `reduced` (what was done), `before` and `now` (bytes of the features), `seconds`.

    Raises:
        ConfigError: If features are narrower already, or were appended to; there are none, or no such node type.
        InputError: If there are too few columns or rows, or a value is NaN or infinite.
        BudgetError: If the matrices do not fit in the memory.
        StoreError: If there is no store, the disk is full, or an append or compaction is in progress.

    >>> ooc.reduce("papers.ooc", "pca:64").now
    5120000
    """
    path, room = refuse_url(store, "reduced"), parse_bytes(memory, "memory")
    asked = Reduction.of_any(method)
    if asked is None:
        raise ConfigError(f"{method!r} is no METHOD:COLUMNS: write {listed(sum(METHODS.values(), ()))}")
    return narrow(path, asked, node_type=node_type, seed=seed, memory=room, progress=progress or silent)
