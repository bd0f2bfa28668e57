"""Building stores from Python: `ooc.ingest` and `ooc.from_data`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ooc.config.base import parse
from ooc.pyg.staging import FileOrArray, joined, staged
from ooc.stores.dataset import Dataset
from ooc.stores.ingest import HeteroSpec, IngestResult, IngestSpec, spec_of
from ooc.stores.ingest.duck import Progress
from ooc.stores.io.remote.url import refuse_url, store_path
from ooc.stores.remote.upload import built_for

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData, TemporalData

LabelKind = Literal["auto", "classification", "regression"]
Dtype = Literal["auto", "float32", "float16", "bfloat16", "int8", "int64"]


ByType = Mapping[Any, Any]
"""values by name or by type"""


def ingest(
    out: Path | str,
    *,
    edges: Any = None,
    src: str | ByType = "src",
    dst: str | ByType = "dst",
    weight: str | ByType | None = None,
    time: str | ByType | None = None,
    time_unit: Literal["s", "ms", "us", "ns"] = "s",
    edge_features: ByType | Sequence[str] = (),
    edge_label: str | Sequence[str] | ByType | None = None,
    edge_split: str | ByType | None = None,
    header: bool | None = None,
    id_type: Literal["auto", "int", "str"] = "auto",
    edge_ids: bool = True,
    undirected: bool = False,
    reverse: bool = False,
    sorted: bool = False,
    drop_duplicates: bool = False,
    drop_self_loops: bool = False,
    drop_missing: bool = False,
    allow_nan: bool = False,
    nodes: Any = None,
    id: str | ByType = "id",
    label: str | Sequence[str] | ByType | None = None,
    task: LabelKind | ByType = "auto",
    split: str | ByType | None = None,
    graph_id: str | None = None,
    graphs: Any = None,
    graph_label: str | Sequence[str] | None = None,
    graph_split: str | None = None,
    birth: str | None = None,
    x_cols: str | Sequence[str] | ByType | None = None,
    one_hot: str | Sequence[str] | ByType | None = None,
    codes: str | Sequence[str] | ByType | None = None,
    num_nodes: int | ByType | None = None,
    features: ByType | Sequence[str] = (),
    labels: FileOrArray | ByType | None = None,
    train: FileOrArray | ByType | None = None,
    val: FileOrArray | ByType | None = None,
    test: FileOrArray | ByType | None = None,
    random_split: str | Sequence[float] | ByType | None = None,
    seed: int = 0,
    split_index: int | ByType | None = None,
    dtype: Dtype = "auto",
    normalize: Literal["none", "row", "standard"] = "none",
    reduce: str | ByType | None = None,
    select: str | ByType | None = None,
    parts: int | Literal["auto"] | None = None,
    partitioner: Literal["auto", "metis", "stream"] = "auto",
    order: Literal["input", "degree"] = "input",
    npz: Path | str | None = None,
    pyg: str | None = None,
    arg: Mapping[str, Any] | Sequence[str] = (),
    ogb: Path | str | None = None,
    graphbolt: Path | str | None = None,
    shard: str | None = None,
    memory: str | int = "2GB",
    cache_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> IngestResult:
    """Build the store `out` in bounded memory, as `ooc ingest` does with the options of the same names.

    Edges come from exactly one of `edges`, `npz`, `pyg`, `ogb` and `graphbolt`. The store appears whole; a killed ingest of
    files continues where it stopped if it is called again.

    With `edges` by edge type, (source type, name, target type) or "source:name:target", the graph is heterogeneous. Every
    argument about nodes is then a mapping by node type, every one about edges by edge type; one `id`, `src`, `dst`, `weight` or
    `time` may also be for all types. Node types without a table (None in `nodes`) have the ids of their edges.

    Args:
        out: Directory of the store to write, or its URL (s3://, gs://): it is then built in `cache_dir` and uploaded.
        edges: Path or glob of Parquet, CSV/TSV, npy or npz files; an integer array [2, E] or [E, 2]; or a data frame (pandas,
            Polars, PyArrow).
        src: Column of the sources.
        dst: Column of the destinations.
        weight: Column of the edge weights.
        time: Column of the edge times, numbers or timestamps; makes the graph temporal.
        time_unit: Unit of numeric times.
        edge_features: Name -> column patterns of the edge table ("f*,g"), npy files, or an array [E] or [E, F].
        edge_label: Column of the edge table with labels of the edges, or several, as `label` for nodes.
        edge_split: Column of the edge table with the edges' splits, as `split` for nodes.
        header: Whether text tables start with a header line; None: detect.
        id_type: Type of the ids.
        edge_ids: Store each edge's position in the input, by which it has features, labels and times, and a store is appended
            to (8 bytes an edge).
        undirected: Add the reverse of every edge (with types: of every edge between nodes of one type).
        reverse: Add a reverse edge type `"rev_" + name` to every edge type, with the same edge ids.
        sorted: Edges are in order of their destinations (with types that have times: of destination and time) and are only
            packed. Ids are 0..num_nodes - 1. The store is that of an ingest without `sorted`.
        drop_duplicates: Keep the first of equal edges.
        drop_self_loops: Drop edges from a node to itself.
        drop_missing: Drop and count edges with an empty or unknown end.
        allow_nan: Keep and count NaN and infinite values.
        nodes: Path or glob of a node table, or a data frame; its order is the order of rows.
        id: Its column of ids.
        label: Its column of labels: classes (numbers from 0 on, or names), or numbers to predict. Several columns, of 0 and 1
            (multilabel) or of numbers: "spam,phishing", ["spam", "phishing"] or patterns.
        task: What labels of nodes, edges or graphs are: "classification", "regression" (numbers to predict, NaN where unknown),
            or "auto": a regression where a tenth of the labels or more have a fraction. By node type and by edge type.
        split: Its column of splits (train, val, test), or boolean ones: "train_mask,val_mask,test_mask".
        graph_id: Its column of each node's graph: a store of many graphs, whose edges join nodes of one graph. `train`, `val`,
            `test` and `random_split` are then of graphs.
        graphs: Path or glob of a table with a row per graph, or a data frame; its column of ids is called as `graph_id`, or id.
            Its order is the order of graphs, otherwise that of their first nodes.
        graph_label: Column of the graphs' labels, in `graphs` or, the same at all nodes of a graph, in `nodes`; as `label`.
        graph_split: Column of the graphs' splits, found likewise; as `split`.
        birth: Its column of the nodes' first times.
        x_cols: Patterns of its feature columns, numbers or lists of numbers: "f*,age" or ["f*", "age"].
        one_hot: Patterns of feature columns of which each value becomes a column of 0 and 1.
        codes: Patterns of feature columns that become positions among their sorted values.
        num_nodes: Number of nodes, if ids are 0..N-1.
        features: Name -> npy files or an array [N] or [N, F].
        labels: npy file or array, [N], or [N, C] for several labels or targets per node.
        train: npy file or array of the training nodes (graphs): rows, or a boolean mask.
        val: The same for validation.
        test: The same for testing.
        random_split: Shares of train, val and test, such as (0.6, 0.2, 0.2), drawn among the labelled nodes (graphs).
        seed: Seed of the random split, and of `reduce` and `select`.
        split_index: Which of several masks to use.
        dtype: How features are stored; "auto": integers as they are, everything else as float32.
        normalize: Normalization of the features.
        reduce: Fewer columns of x, by all of its rows: "pca:64", "svd:64", or "random:64" (Gaussian). The store keeps the map
            (`Dataset.feature_map`) and applies it to rows that are appended, which have the input's width.
        select: The columns of x with the most variance, "variance:64", or the most mutual information with the classes of
            the training nodes, "mutual:64" (by scikit-learn's `mutual_info_classif`; extra ooc[select]).
        parts: Renumber nodes so that each of this many parts is a range of ids.
        partitioner: How parts are made.
        order: Order of the nodes: the input's, or by degree.
        npz: File with x, y, edge_index, train_mask, ...; or a SciPy sparse adjacency matrix.
        pyg: Name of a PyG data set, of one graph or many, or a file (.pt) in which torch.save put a graph or a list of graphs.
        arg: Its arguments.
        ogb: Folder of a downloaded OGB data set.
        graphbolt: Folder of an OnDiskDataset of DGL's GraphBolt, with labels of nodes.
        shard: "i/n": build the i-th of n ranges of nodes and edges, which `ooc.join` puts together. Each of n processes or
            machines builds one, with the same other arguments; all read the input.
        memory: Limit for the process, in bytes or such as "2GB".
        cache_dir: Where a store for a URL is built before it is uploaded; by default `~/.cache/ooc/stores`.
        progress: Called with the step, the units done, and in total.

    Returns:
        Path, counts, and notes about what was dropped or is not used.

    Raises:
        InputError: If the input is wrong; names file, row and value.
        ConfigError: If arguments contradict each other.
        StoreError: If `out` exists or the disk is full.

    >>> ooc.ingest("papers.ooc", edges="edges/*.parquet", nodes="nodes.parquet", label="y", x_cols="f*").num_nodes
    8000000
    >>> writes = ("author", "writes", "paper")
    >>> ooc.ingest("mag.ooc", nodes={"paper": "papers.csv", "author": None}, edges={writes: "writes/*.parquet"}, reverse=True)
    >>> ooc.ingest("tiny.ooc", edges=edge_index, features={"x": x}, labels=y, random_split=(0.6, 0.2, 0.2))
    """
    given = {name: value for name, value in locals().items() if name not in ("out", "cache_dir", "progress")}
    if shard is not None:
        refuse_url(out, "written in shards")
    with staged(given) as settings, built_for(out, cache_dir, progress) as path:
        spec = spec_of({"out": path, **settings}, parse)
        if isinstance(spec, HeteroSpec) or spec.pyg is None:
            from ooc.stores.ingest import ingest as build

            result = build(spec, progress)
        else:
            from ooc.pyg.dataset_source import ingest as from_pyg

            result = from_pyg(spec, progress)
    return replace(result, path=store_path(out))


def from_data(
    data: "Data | HeteroData | TemporalData | Iterable[Data] | Mapping[str, Iterable[Data]]",
    path: Path | str,
    *,
    edge_ids: bool = True,
    undirected: bool = False,
    reverse: bool = False,
    time_unit: Literal["s", "ms", "us", "ns"] = "s",
    dtype: Dtype = "auto",
    task: LabelKind = "auto",
    random_split: str | Sequence[float] | None = None,
    seed: int = 0,
    split_index: int | None = None,
    reduce: str | None = None,
    select: str | None = None,
    parts: int | Literal["auto"] | None = None,
    order: Literal["input", "degree"] = "input",
    allow_nan: bool = False,
    memory: str | int = "2GB",
    cache_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Write a PyG `Data`, `HeteroData`, `TemporalData` or data set of graphs to a new store, and open it.

    x, y, edge_index, edge_weight and the masks become features, labels, edges, weights and splits. Every other tensor or array
    with a row per node or per edge is stored under its name, read by `ds.rows(name)` and `ds.edge_features(name)`. What is left
    out, and what is stored but in no batch, is said in a warning. Arrays are copied a block at a time. Labels of edges are
    `edge_y` [E] or [E, T], and `edge_train_mask`, `edge_val_mask` and `edge_test_mask` [E] their splits.

    Of a `HeteroData`, the same by type, and `time` of edges is their time; an edge type `"rev_" + name` with the edges of
    another one in the other direction is known as its reverse. Random splits are of the node types with labels.

    Of a `TemporalData`, src, dst and t become the events, in order of time; msg, y and every other tensor with a row per event
    are their columns, [k, 1] where the tensor has one dimension.

    Of several graphs (a PyG data set, a `Batch`, a list or an iterator of `Data`, or split -> one of these), each attribute
    is stored of nodes, edges or graphs: what all graphs have as many rows of. One row a graph, or a number, is of graphs. They
    are read once, one by one; splits are of graphs.

    Args:
        data: A homogeneous or heterogeneous graph, events, or several graphs; tensors of any dtype, layout and device, numpy
            arrays and memory maps are taken. x, edge_index and other attributes of a `Data` may also be objects with `shape`,
            `dtype` and slices, such as arrays of Zarr, h5py or Dask, or your own that make their rows: these are read a slice
            at a time (`x[a:b]`, `edge_index[:, a:b]`), some of them twice, and never copied to disk.
        path: Directory or URL of the store, as `out` of `ingest`; it must not exist.
        edge_ids: Store each edge's position in `data`, by which edges have features, labels and times, and a store is appended
            to (8 bytes an edge).
        undirected: Add the reverse of every edge. PyG's undirected graphs have both directions already. Models of events need
            it, because a node's past includes the events it is the source of. Of a `HeteroData` those of edges between nodes
            of one type.
        reverse: Add a reverse edge type `"rev_" + name` to every edge type of a `HeteroData`.
        time_unit: Unit of a `TemporalData`'s times.
        dtype: How x is stored; "auto": integers as they are, everything else as float32.
        task: What y is: "classification", "regression" (numbers to predict, NaN where unknown), or "auto": a regression where
            a tenth of y or more has a fraction.
        random_split: Shares of train, val and test, such as (0.6, 0.2, 0.2), instead of the masks.
        seed: Seed of the random split, and of `reduce` and `select`.
        split_index: Which column of masks [N, S] to use.
        reduce, select: Fewer columns of x, as of `ingest`; of a `HeteroData` those of every node type that has x.
        parts: Renumber nodes so that each of this many parts is a range of ids; `ds.external` gives the rows of `data`. Only of
            one graph, as `order`.
        order: Order of the nodes: as in `data`, or by degree.
        allow_nan: Keep NaN and infinite values in x.
        memory: Limit for the process while writing, in bytes or such as "2GB"; the open data set has none.
        cache_dir: Of a URL, as of `ingest` and `ooc.open`.
        progress: Called with the step, the units done, and in total.

    Returns:
        The open data set.

    Raises:
        InputError: If `data` is none of these, has no edges or events, its arrays do not fit, or a graph of several has no
            nodes or other attributes than the first.
        ConfigError: If a setting is of no use for `data`, as `time_unit` for a graph without times.
        StoreError: If `path` exists or the disk is full.

    >>> ds = ooc.from_data(Planetoid("data", "Cora")[0], "cora.ooc")
    >>> loader = ooc.NeighborLoader(ds, num_neighbors=[10, 10], input_nodes="train", batch_size=128)
    >>> ds = ooc.from_data(TUDataset("data", "MUTAG"), "mutag.ooc", random_split=(0.8, 0.1, 0.1))
    >>> loader = ooc.GraphLoader(ds, input_graphs="train", batch_size=32, shuffle=True)
    """
    from ooc.pyg.dataset_source import ingest_data
    from ooc.runtime.messages import warn_user

    settings: dict[str, Any] = {
        "edge_ids": edge_ids,
        "undirected": undirected,
        "reverse": reverse,
        "dtype": dtype,
        "seed": seed,
        "split_index": split_index,
        "task": task,
        "reduce": reduce,
        "select": select,
    }
    settings |= {"parts": parts, "order": order, "allow_nan": allow_nan, "memory": memory, "time_unit": time_unit}
    settings["random_split"] = None if random_split is None else joined(random_split)
    with built_for(path, cache_dir, progress) as folder:
        spec = parse(IngestSpec, {"out": folder, "pyg": "data", **settings})
        for note in ingest_data(data, "data", spec, progress).notes:
            warn_user(note)
    return Dataset.open(path, cache_dir=cache_dir)
