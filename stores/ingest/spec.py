"""`IngestSpec`: what to ingest; its fields are the flags of `ooc ingest`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ooc.stores.array_names import HOMOGENEOUS, NODE, EdgeKey
from ooc.stores.errors import ConfigError
from ooc.stores.ingest.reductions import Reduction
from ooc.stores.ingest.shards import Shard
from ooc.stores.manifest import Partition, TimeUnit
from ooc.stores.sizes import parse_bytes

OF_EVENTS = ("src", "dst", "time", "weight")
"""names of event columns that features cannot have"""


BY_NODE_TYPE = (
    *("nodes", "num_nodes", "id", "label", "split", "x_cols", "one_hot", "codes", "features", "labels"),
    *("task", "train", "val", "test", "random_split", "split_index", "reduce", "select"),
)
BY_EDGE_TYPE = ("edges", "src", "dst", "weight", "time", "edge_features", "edge_label", "edge_split", "task")
"""fields that an ingest of several types has by type; see `ooc.stores.ingest.typed_spec`"""


class IngestSpec(BaseModel):
    """One ingest. Edges come from exactly one of `edges`, `npz`, `pyg`, `ogb` and `graphbolt`.

    Raises ConfigError if settings contradict each other (a misspelt field is pydantic's ValidationError).

    >>> spec = IngestSpec(out="papers.ooc", edges="edges/*.parquet", features=["x=x.npy"], labels="y.npy")
    >>> ingest(spec).num_nodes
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    out: Path
    edges: str | None = None
    """path or glob: Parquet, CSV/TSV, .edgelist (also gzipped), npy [2, E] or [E, 2], npz (also SciPy's sparse matrices)"""
    src: str = "src"
    dst: str = "dst"
    """column names; in a table without a header the defaults mean the first and second column, `column7` the eighth"""
    weight: str | None = None
    time: str | None = None
    """column of edge times, numbers or timestamps: events in that order, ties in input order"""
    time_unit: TimeUnit = "s"
    """unit of numeric times; timestamps are stored in microseconds"""
    edge_features: list[str] = []
    """NAME=PATTERNS of the edge table's columns, comma-separated (msg=f*), or NAME=GLOB of npy files in edge order; edge_attr
    is in all batches, others on request"""
    edge_label: str | None = None
    """column of the edge table with labels of the edges: classes or numbers, as `label` for nodes"""
    edge_split: str | None = None
    """column of the edge table with the edges' splits, or boolean columns, as `split` for nodes"""
    header: bool | None = None
    """whether text tables start with a header line; None: detect"""
    id_type: Literal["auto", "int", "str"] = "auto"
    edge_ids: bool = True
    """store the position of each edge in the input, 8 bytes an edge: by it edges have features, labels, splits and times, and
    a store is appended to; without, the id of an edge is its place in the store"""
    undirected: bool = False
    reverse: bool = False
    """add a reverse edge type rev_NAME to every edge type; needs types"""
    sorted: bool = False
    """edges are in order of their destinations (with types that have times: of destination and time), and are not sorted
    again; node ids are 0..N-1"""
    drop_duplicates: bool = False
    """keep the first edge of each (source, destination)"""
    drop_self_loops: bool = False
    drop_missing: bool = False
    """drop and count edges with an empty or unknown endpoint"""
    allow_nan: bool = False
    nodes: str | None = None
    """path or glob of a node table, Parquet or CSV/TSV; its order is the order of rows"""
    id: str = "id"
    label: str | None = None
    """column of the node table: classes (numbers from 0 on, or names) or numbers to predict; comma-separated patterns of
    several columns, of 0 and 1 or of numbers, each a label of its own"""
    task: Literal["auto", "classification", "regression"] = "auto"
    """what the labels are: classes, or numbers to predict (regression); auto: numbers where a tenth or more have a fraction"""
    split: str | None = None
    """column of the node table with train, val or test (or 0, 1, 2), or boolean columns whose names begin with these words:
    train_mask,val_mask,test_mask"""
    graph_id: str | None = None
    """column of the node table with each node's graph: a store of many graphs, whose edges join nodes of one graph. `train`,
    `val`, `test` and `random_split` are then of graphs"""
    graphs: str | None = None
    """path or glob of a table with a row per graph, whose column of ids is called as that of the node table, or `id`; its order
    is the order of graphs, otherwise that of their first nodes"""
    graph_label: str | None = None
    """column of the graphs' labels, in the table of graphs or, without one, in the node table, where all nodes of a graph have
    the same; as `label`"""
    graph_split: str | None = None
    """column of the graphs' splits, found as `graph_label`; as `split`"""
    birth: str | None = None
    """column of the nodes' first times; empty for nodes that always exist"""
    x_cols: str | None = None
    """comma-separated patterns of the node table's feature columns: `f*` or `age,f_*`; numbers, or lists of numbers"""
    one_hot: str | None = None
    """patterns of further feature columns, or of some of `x_cols`: a column of 0 and 1 for each value, sorted; an empty cell
    has no 1"""
    codes: str | None = None
    """the same, with the position among the sorted values instead; -1 for an empty cell"""
    num_nodes: int | None = Field(default=None, ge=1)
    features: list[str] = []
    """NAME=GLOB of npy files; the parts of one feature are joined in natural order (part_2 before part_10)"""
    labels: Path | None = None
    train: Path | None = None
    val: Path | None = None
    test: Path | None = None
    random_split: str | None = None
    """shares of train, val and test, such as 0.6,0.2,0.2: drawn among the labelled nodes if there are labels"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """seed of the random split, and of `reduce` and `select`"""
    split_index: int | None = Field(default=None, ge=0)
    """which split of masks [S, N] or [N, S] to use"""
    dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "int64"] = "auto"
    """how features are stored; auto: integers as they are, everything else as float32, and integers that float32 would round
    are refused. float32 rounds them, also in weights. int64: whole numbers, also from text and floats. int8 has a scale per
    column, its largest magnitude / 127. Edge features are numbers with a fraction: float32 for int64, and bfloat16 for int8,
    where a scale would leak later events"""
    normalize: Literal["none", "row", "standard"] = "none"
    reduce: str | None = None
    """METHOD:COLUMNS, fewer columns of x: pca:64, svd:64, or random:64 (Gaussian, of Johnson and Lindenstrauss). The map is
    that of all rows and stays in the store, which applies it to rows that are appended"""
    select: str | None = None
    """METHOD:COLUMNS, the columns of x with the most variance (variance:64), or most mutual information with the classes of the
    training nodes (mutual:64)"""
    parts: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """renumber nodes so that each of this many parts is a range of ids; auto: about 1,000 nodes each"""
    partitioner: Literal["auto", "metis", "stream"] = "auto"
    """metis (the extra ooc[metis]) if the graph fits the memory, stream in bounded memory; auto: the first possible"""
    order: Literal["input", "degree"] = "input"
    """order of the nodes (within parts): the input's, or by number of out-edges, largest first"""
    npz: Path | None = None
    pyg: str | None = None
    """class of torch_geometric.datasets, `package.module:Class`, or a file (.pt) in which torch.save put graphs"""
    arg: list[str] = []
    """NAME=VALUE arguments of the PyG data set"""
    ogb: Path | None = None
    """folder in OGB's raw layout: of one graph, also of several types, or of many graphs"""
    graphbolt: Path | None = None
    """folder of DGL GraphBolt's OnDiskDataset (metadata.yaml), with one type of nodes and edges"""
    shard: str | None = None
    """i/n: build the i-th of n ranges of the nodes and edges, which `ooc join` puts together"""
    memory: str | int = "2GB"

    @model_validator(mode="after")
    def _fits_together(self) -> "IngestSpec":
        given = [name for name in ("edges", "npz", "pyg", "ogb", "graphbolt") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"`{name}`" for name in given) or "none"
            raise ConfigError(f"edges come from exactly one of `edges`, `npz`, `pyg`, `ogb` and `graphbolt`; given: {found}")
        if given != ["edges"]:
            own = (
                "nodes",
                "features",
                "labels",
                "train",
                "val",
                "test",
                "weight",
                "num_nodes",
                "header",
                "time",
                "edge_features",
                "edge_label",
                "edge_split",
            )
            self._refuse(given[0], own)
            for name, default in (("src", "src"), ("dst", "dst"), ("id_type", "auto")):
                if getattr(self, name) != default:
                    self._refuse(given[0], (name,))
        if self.reverse and self.pyg is None and self.ogb is None:
            raise ConfigError("`reverse` adds edge types, and the edges have none: give `undirected`, or `edges` by type")
        self._check_nodes()
        self._check_graphs()
        self._check_times()
        self._check_split()
        self._check_order()
        self._check_shard()
        _ = self.reduction
        if self.arg and self.pyg is None:
            raise ConfigError("`arg` is an argument of a PyG data set: give `pyg` too")
        if self.parts is None and self.partitioner != "auto":
            raise ConfigError(f"`partitioner={self.partitioner!r}` makes parts: say how many with `parts`")
        parse_bytes(self.memory, "memory")
        self.feature_globs()
        self.edge_feature_patterns()
        return self

    def _check_nodes(self) -> None:
        if self.nodes is None:
            for name in ("label", "split", "birth", "x_cols", "one_hot", "codes", "graph_id"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"`{name}` names a column of the node table: give `nodes` too")
            if self.id != "id":
                raise ConfigError("`id` names a column of the node table: give `nodes` too")
        for one, other in (("label", "labels"), ("split", "train"), ("split", "val"), ("split", "test")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ConfigError(f"`{one}` and `{other}` say the same thing twice: give one of them")

    def _check_graphs(self) -> None:
        if self.graph_id is None:
            for name in ("graphs", "graph_label", "graph_split"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"`{name}` is of the graphs that `graph_id` names: give `graph_id` too")
            return
        for name in ("train", "val", "test", "random_split"):
            if self.graph_split is not None and getattr(self, name) is not None:
                raise ConfigError(f"`graph_split` and `{name}` say the same thing twice: give one of them")
        self.with_graphs()

    def with_graphs(self) -> "IngestSpec":
        """Return these settings for many graphs. Raises ConfigError where a setting does not go with them."""
        for name in ("parts", "time", "shard", "sorted"):
            if getattr(self, name):
                raise ConfigError(f"`{name}` does not go with many graphs: leave it out, or ingest one graph")
        if self.order != "input":
            raise ConfigError("`order` does not go with many graphs, whose nodes stay together: leave it out")
        return self

    def _check_order(self, events: bool = True) -> None:
        """`events`: whether edges with times are stored in their order, too."""
        if not self.sorted:
            return
        if self.edges is None:
            raise ConfigError("`sorted` says that the rows of `edges` are in order: give that, or leave it out")
        for name in ("undirected", "drop_duplicates"):
            if getattr(self, name):
                raise ConfigError(f"`{name}` sorts edges again: do it before you sort them, or leave out `sorted`")
        if events and self.time is not None:
            raise ConfigError("`time` sorts edges again, because events are stored in order of time: leave out `sorted`")
        if self._renumbers:
            raise ConfigError(f"`{self._renumbers}` numbers nodes anew and sorts edges again: leave out it, or `sorted`")

    def _check_shard(self) -> None:
        if self.shard is None:
            return
        Shard.parse(self.shard)
        if self._renumbers:
            raise ConfigError(
                f"`{self._renumbers}` numbers nodes by the whole graph, of which `shard` has a part: leave it out"
            )
        self._check_statistics()

    def _check_statistics(self) -> None:
        if self.reduction is not None:
            raise ConfigError("`reduce` and `select` need the rows of all shards: leave them out, and use `ooc reduce` later")
        if self.normalize == "standard":
            raise ConfigError("`normalize='standard'` needs the training rows of all shards: leave it out, or `shard`")

    @property
    def _renumbers(self) -> str:
        """The setting that gives nodes another order, "" for none."""
        return "parts" if self.parts is not None else "order" if self.order != "input" else ""

    def _check_split(self) -> None:
        if self.random_split is None:
            if self.seed and self.reduction is None:
                raise ConfigError("`seed` is that of a random split: give `random_split` too")
            return
        parse_shares(self.random_split)
        for name in ("split", "train", "val", "test", "split_index"):
            if getattr(self, name) is not None:
                raise ConfigError(f"`random_split` draws the splits that `{name}` gives: give one of them")

    def _check_times(self) -> None:
        if self.time is None and self.birth is not None:
            raise ConfigError("`birth` is in the time of the edges: give `time` too")
        if self.time is None and self.time_unit != "s" and self.pyg is None:
            raise ConfigError("`time_unit` says what the times' numbers mean: give `time` too")
        for name in () if self.edge_ids else ("time", "edge_features", "edge_label", "edge_split", "graph_id"):
            if getattr(self, name):
                raise ConfigError(f"`{name}` needs the edges' ids: leave out `edge_ids=False`")
        if self.time is not None and self.drop_duplicates:
            raise ConfigError("`drop_duplicates` does not go with `time`: an event may come again, at another time")

    def with_times(self, column: str) -> "IngestSpec":
        """Return these settings for a data set that brings the edges' times, called `column`.

        Raises ConfigError where a setting does not go with times.
        """
        found = self.model_copy(update={"time": column})
        found._check_times()
        return found

    def _refuse(self, source: str, names: tuple[str, ...]) -> None:
        for name in names:
            if getattr(self, name):
                raise ConfigError(f"`{name}` does not go with `{source}`, which brings its own")

    def feature_globs(self) -> dict[str, str]:
        """Name -> glob of each NAME=GLOB of `features`."""
        own = ["x"] if self.x_cols or self.one_hot or self.codes else []
        found = self._named("features", self.features, "NAME=FILE, as in x=x.npy", ("y", "split", *own))
        for name in own:
            self._check_scale("features", name, found)
        return found

    def edge_feature_patterns(self) -> dict[str, str]:
        """Name -> column patterns or npy glob of each of `edge_features`."""
        form = "NAME=COLUMNS or NAME=FILE.npy, as in msg=f*"
        labelled = (("y", self.edge_label), ("split", self.edge_split))
        own = (name for name, column in labelled if column is not None)
        return self._named("edge_features", self.edge_features, form, (*OF_EVENTS, *own))

    def _named(self, argument: str, given: list[str], form: str, taken: tuple[str, ...]) -> dict[str, str]:
        """Values of an argument NAME=WHAT, which may be given several times, by name."""
        found: dict[str, str] = {}
        for text in given:
            name, sign, what = text.partition("=")
            if not sign or not what or not name.isidentifier():
                raise ConfigError(f"`{argument}={text!r}`: write it {form}")
            if name in found or name in taken or ("split" in taken and name.startswith("split_")):
                raise ConfigError(f"`{argument}={text!r}`: the name {name!r} is taken; choose another")
            found[name] = what
        for name in found:
            self._check_scale(argument, name, found)
        return found

    def _check_scale(self, argument: str, name: str, found: dict[str, str]) -> None:
        if self.dtype == "int8" and f"{name}_scale" in found:
            raise ConfigError(f"`{argument}` {name}_scale: with `dtype='int8'` {name}'s scales have that name; choose another")

    @property
    def node_types(self) -> "Mapping[str, IngestSpec]":
        """The specification of each node type."""
        return {NODE: self}

    @property
    def edge_types(self) -> "Mapping[EdgeKey, IngestSpec]":
        """The specification of each edge type."""
        return {HOMOGENEOUS: self}

    @property
    def added_reverses(self) -> dict[EdgeKey, EdgeKey]:
        """Edge type -> the reverse type that is added."""
        return {}

    @property
    def known_reverses(self) -> dict[EdgeKey, EdgeKey]:
        """Edge type of the input -> the one that it is the reverse of."""
        return {}

    @property
    def shares(self) -> tuple[float, float, float] | None:
        """Shares of train, val and test, of a random split."""
        return None if self.random_split is None else parse_shares(self.random_split)

    @property
    def part(self) -> Shard:
        """The shard to build; one of one for a whole store."""
        return Shard() if self.shard is None else Shard.parse(self.shard)

    @property
    def reduction(self) -> Reduction | None:
        """How features are made narrower. Raises ConfigError if that is said twice, or wrongly."""
        return Reduction.of(self.reduce, self.select)

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory)


def parse_shares(text: str) -> tuple[float, float, float]:
    """Parse the shares of train, val and test of a random split. Raises ConfigError unless they are such.

    >>> parse_shares("0.6,0.2,0.2")
    (0.6, 0.2, 0.2)
    """
    try:
        train, val, test = (float(share) for share in text.split(","))
    except ValueError:
        raise ConfigError(f"`random_split={text!r}`: give the shares of train, val and test, as in 0.6,0.2,0.2") from None
    if not (min(train, val, test) >= 0 and 0 < train + val + test <= 1 + 1e-9):
        raise ConfigError(f"`random_split={text!r}`: shares are 0 or more and add up to 1 at most")
    return train, val, test


@dataclass(frozen=True)
class IngestResult:
    """Result of an ingest."""

    path: Path
    num_nodes: int
    num_edges: int
    """edges in the store: slots of the CSC"""
    dropped: dict[str, int] = field(default_factory=dict)
    """dropped edges by reason: missing (input edges), self_loops (input edges), duplicates (slots)"""
    non_finite: int = 0
    """NaN and infinite values kept by `allow_nan`"""
    num_graphs: int | None = None
    """graphs in a store of many"""
    shard: str | None = None
    """i/n, if that is what was built: `num_edges` are then its own"""
    seconds: float = 0.0
    resumed: tuple[str, ...] = ()
    """steps finished by an earlier, interrupted run"""
    partition: Partition | None = None
    """for an ingest with `parts`"""
    notes: tuple[str, ...] = ()
    """possible mistakes in the input, one line each"""
