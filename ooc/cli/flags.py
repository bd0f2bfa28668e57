"""Command-line flags from the fields of a pydantic model, or from a table that a test compares with one."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from ooc.config.modes import applies
from ooc.config.topics import Topics, by_topic


class Flag(NamedTuple):
    """A flag; its value is passed as text, as bool for a switch, as a list of texts if repeatable."""

    name: str
    """the parameter's name: `batch_size` is `--batch-size`"""
    metavar: str | None
    """name of its value in the help; None for a switch"""
    help: str
    repeat: bool = False
    default: str = ""
    modes: Mapping[str, "Flag"] = MappingProxyType({})
    """mode -> the flag as it is there, of a flag of several modes"""

    @property
    def option(self) -> str:
        """The option with the name of its value: `--batch-size INT`; of a switch that is on, both of its forms."""
        name = self.name.replace("_", "-")
        if self.metavar is not None:
            return f"--{name} {self.metavar}"
        return f"--{name}, --no-{name}" if self.default else f"--{name}"

    @property
    def text(self) -> str:
        """What the flag is for and its default; of each mode where they differ."""
        texts = _same({mode: flag.help for mode, flag in self.modes.items()})
        defaults = _same({mode: flag.default for mode, flag in self.modes.items()})
        own = next(iter(texts), "")
        words = [self.help, *(f"{modes}: {text}" for text, modes in texts.items() if text != own)]
        shown = [self.default, *(f"{modes} {text}" for text, modes in defaults.items() if text not in ("", self.default))]
        bracket = "; ".join(filter(None, shown))
        return " ".join([*words, *([f"[{bracket}]"] if bracket else [])])


def _same(values: Mapping[str, str]) -> dict[str, str]:
    """Value -> the modes that have it."""
    return {value: _listed(mode for mode, its in values.items() if its == value) for value in values.values()}


def _listed(modes: Iterable[str]) -> str:
    """Modes by their names in `classes`, a task behind its mode."""
    parted = (name.rpartition(" ") for name in modes)
    return ", ".join(f"{mode} for {task}" if task else mode for task, _, mode in parted)


def flags_of(model: type[BaseModel], without: Iterable[str] = (), repeatable: Iterable[str] = ()) -> list[Flag]:
    """Return a flag for every field of `model` that is not in `without`.

    >>> [flag.name for flag in flags_of(TrainConfig, without=("store", "out"))][:2]
    ['model', 'model_args']
    """
    flags = []
    for name, field in model.model_fields.items():
        if name in without:
            continue
        value, shown = field.get_default(call_default_factory=True), ""
        fixed = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if value not in (None, [], {}, False) and not field.is_required() and not fixed:
            shown = ",".join(map(str, value)) if isinstance(value, list | tuple) else "on" if value is True else str(value)
        metavar = metavar_of(field.annotation)
        if metavar == "NAME=VALUE" and name not in repeatable:  # all of it in one text
            metavar = "JSON"
        flags.append(Flag(name, metavar, field.description or "", name in repeatable, shown))
    return flags


def flags_of_modes(
    models: Mapping[str, type[BaseModel]], without: Iterable[str] = (), repeatable: Iterable[str] = ()
) -> list[Flag]:
    """Return the flags of several models by mode, each once, with the modes that it applies to."""
    found: dict[str, dict[str, Flag]] = {}
    for mode, model in models.items():
        for flag in flags_of(model, without, repeatable):
            if applies(flag.name, mode):
                found.setdefault(flag.name, {})[mode] = flag
    return [_of_modes(flags, next(iter(models))) for flags in found.values()]


def _of_modes(flags: Mapping[str, Flag], default_mode: str) -> Flag:
    """One flag for those of several modes."""
    first = next(iter(flags.values()))
    words = [word for flag in flags.values() if flag.metavar is not None for word in flag.metavar.split("|")]
    only = "" if default_mode in flags else f" ({_listed(flags)})"
    text = first.help if not only or only in first.help else f"{first.help.removesuffix('.')}{only}."
    return first._replace(help=text, metavar="|".join(dict.fromkeys(words)) or None, modes=flags)


def metavar_of(annotation: Any) -> str | None:
    """What a field's value may be, in the help, by its type; None for a bool.

    >>> metavar_of(int | Literal["auto"] | None)
    'INT|auto'
    """
    if _is(annotation, bool):
        return None
    names = {"LIST": list, "NAME=VALUE": dict, "INT": int, "NUMBER": float, "PATH": Path, "TEXT": str}
    kinds = [name for name, kind in names.items() if _is(annotation, kind)][:1]
    return "|".join([*kinds, *_texts_of(annotation)]) or "TEXT"


def _texts_of(annotation: Any) -> list[str]:
    """The values of a Literal, possibly inside Annotated or a union."""
    origin = get_origin(annotation)
    if origin is Literal:
        return [str(value) for value in get_args(annotation)]
    parts = get_args(annotation)[:1] if origin is Annotated else get_args(annotation) if origin in (Union, UnionType) else ()
    return [text for part in parts for text in _texts_of(part)]


def _is(annotation: Any, kind: type) -> bool:
    """Whether an annotation is `kind`, possibly inside Annotated or a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is(get_args(annotation)[0], kind)
    if origin in (Union, UnionType):
        return any(_is(part, kind) for part in get_args(annotation))
    return (origin or annotation) is kind


def with_flags(flags: Sequence[Flag], topics: Topics) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that shows typer `f(..., **flags)` with these flags after f's own parameters; None means not given."""
    topic_of = {name: topic for topic, names in by_topic([flag.name for flag in flags], topics).items() for name in names}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*own, *(_parameter(flag, topic_of[flag.name]) for flag in flags)]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


def _parameter(flag: Flag, topic: str) -> inspect.Parameter:
    text = f"--{flag.name.replace('_', '-')}"
    annotation: Any = list[str] | None if flag.repeat else str | None
    if flag.metavar is None:
        text, annotation = f"{text}/--no-{text[2:]}", bool | None
    option = typer.Option(text, help=flag.text, show_default=False, metavar=flag.metavar, rich_help_panel=topic)
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option])


INGEST = [
    Flag(
        "edges",
        "GLOB",
        "Edges: Parquet, CSV/TSV or .edgelist (also .gz), npy/npz of shape 2 x E or E x 2, or a SciPy npz. Of several types: "
        "author:writes:paper=GLOB, repeated; other options then are paper=VALUE or author:writes:paper=VALUE.",
    ),
    Flag("src", "COLUMN", "Column of the sources. [src]"),
    Flag("dst", "COLUMN", "Column of the destinations. [dst]"),
    Flag("weight", "COLUMN", "Column of the edge weights."),
    Flag("time", "COLUMN", "Column of edge times, numbers or timestamps; makes the graph temporal."),
    Flag("time_unit", "s|ms|us|ns", "Unit of numeric times. [s]"),
    Flag("edge_features", "NAME=WHAT", "Edge features: edge columns (msg=f*) or npy files; repeatable.", repeat=True),
    Flag("edge_label", "COLUMN", "Label column of the edge table: classes or numbers, as --label of nodes."),
    Flag("edge_split", "COLUMN", "Split column of the edge table (train, val, test), or boolean ones."),
    Flag(
        "header",
        None,
        "Whether text tables start with a header line; by default detected. Without one, columns are column0, column1, ...: "
        "sources, destinations (of nodes: ids).",
    ),
    Flag("id_type", "auto|int|str", "Type of the ids. [auto]"),
    Flag("edge_ids", None, "Store each edge's position in the input, by which it has features (8 bytes an edge). [on]"),
    Flag("undirected", None, "Add the reverse of every edge."),
    Flag("sorted", None, "Edges are in order of their destinations already, and only packed; see the guide."),
    Flag("reverse", None, "Add a reverse edge type rev_NAME to every edge type."),
    Flag("drop_duplicates", None, "Keep the first of equal edges."),
    Flag("drop_self_loops", None, "Drop edges from a node to itself."),
    Flag("drop_missing", None, "Drop and count edges with an empty or unknown endpoint."),
    Flag("allow_nan", None, "Keep and count NaN and infinite features."),
    Flag("nodes", "GLOB", "Node table, Parquet or CSV/TSV; its order is the order of rows. Of several types: paper=GLOB."),
    Flag("id", "COLUMN", "Id column of the node table. [id]"),
    Flag(
        "label",
        "COLUMN",
        "Label column of the node table: classes (numbers from 0 on, or names) or numbers to predict; several: spam,phishing.",
    ),
    Flag(
        "task",
        "auto|classification|regression",
        "What labels are: classes, or numbers to predict; auto: a regression where many have a fraction. [auto]",
    ),
    Flag("split", "COLUMN", "Split column of the node table (train, val, test), or boolean ones: train_mask,val_mask."),
    Flag("graph_id", "COLUMN", "Column of the node table with each node's graph: many graphs; splits are of graphs then."),
    Flag("graphs", "GLOB", "Table with a row per graph; its column of ids is named as --graph-id, or id."),
    Flag("graph_label", "COLUMN", "Label column of the graphs: of --graphs or, the same at all nodes of a graph, of --nodes."),
    Flag("graph_split", "COLUMN", "Split column of the graphs, found likewise."),
    Flag("birth", "COLUMN", "Column of the nodes' first times; empty for nodes that always exist."),
    Flag("x_cols", "PATTERNS", "Feature columns of the node table, comma-separated patterns: f*,age."),
    Flag("one_hot", "PATTERNS", "Feature columns of words (or codes) of which each value becomes a column of 0 and 1."),
    Flag("codes", "PATTERNS", "Feature columns of words that become their positions among the sorted values."),
    Flag("num_nodes", "INT", "Number of nodes, if ids are 0..N-1."),
    Flag("features", "NAME=GLOB", "npy files of a node feature: x=x.npy or 'x=part_*.npy'; repeatable.", repeat=True),
    Flag("labels", "FILE", "npy file of labels: N, or N x C for several labels or targets per node."),
    Flag("train", "FILE", "npy file of the training nodes (graphs): indices or a boolean mask."),
    Flag("val", "FILE", "The same for validation."),
    Flag("test", "FILE", "The same for testing."),
    Flag(
        "random_split",
        "SHARES",
        "Random splits of the labelled nodes (graphs): shares of train, val, test: 0.6,0.2,0.2.",
    ),
    Flag("seed", "INT", "Seed of the random split, and of --reduce and --select. [0]"),
    Flag("split_index", "INT", "Which column of two-dimensional masks to use."),
    Flag(
        "dtype",
        "auto|float32|float16|bfloat16|int8|int64",
        "How features are stored; auto: integers as they are, all else as float32; int8 has a scale per column (edges: "
        "bfloat16). [auto]",
    ),
    Flag(
        "normalize",
        "none|row|standard",
        "Normalize features: row (each row by its sum, as in PyG) or standard (each column by the training rows). [none]",
    ),
    Flag("reduce", "METHOD:INT", "Store fewer columns of x: pca:64, svd:64 or random:64; the map is kept for appended rows."),
    Flag(
        "select",
        "METHOD:INT",
        "Store the columns of x of most variance, variance:64, or mutual information with the training labels, mutual:64.",
    ),
    Flag("npz", "FILE", "One file with x, y, edge_index and train_mask, val_mask, test_mask."),
    Flag("pyg", "CLASS", "A PyG data set: Planetoid, package.module:Class, or a file (.pt) of graphs by torch.save."),
    Flag("arg", "NAME=VALUE", "An argument of that data set; repeatable.", repeat=True),
    Flag("ogb", "DIR", "A downloaded data set in OGB's raw layout: one graph, also of several types, or many."),
    Flag("graphbolt", "DIR", "An OnDiskDataset of DGL's GraphBolt (metadata.yaml), with one type of nodes and edges."),
    Flag(
        "parts", "INT|auto", "Renumber nodes so that each of this many parts is a range of ids; auto: about 1,000 nodes each."
    ),
    Flag("partitioner", "auto|metis|stream", "METIS (extra ooc[metis]) if the graph fits memory, or streaming. [auto]"),
    Flag("order", "input|degree", "Order of the nodes (within parts): as in the input, or by degree, hubs first. [input]"),
    Flag("shard", "I/N", "Build the I-th of N ranges of nodes and edges, on any machine; `ooc join` puts them together."),
    Flag("memory", "SIZE", "Memory limit. [2GB]"),
]
"""`IngestSpec`'s fields except `out`; importing the specification would be too slow for `--help`."""

_APPENDED = (
    "edges src dst weight time time_unit edge_features edge_label edge_split header drop_missing allow_nan nodes id label "
    "split birth x_cols features"
)
_BY_TYPE = (
    *("nodes", "num_nodes", "id", "label", "split", "x_cols", "one_hot", "codes", "features", "labels", "task"),
    *("train", "val", "test", "random_split", "split_index", "reduce", "select"),
    *("edges", "src", "dst", "weight", "time", "edge_features", "edge_label", "edge_split"),
)
"""flags that are repeated for several types: `ooc.stores.ingest.spec.BY_NODE_TYPE` and `BY_EDGE_TYPE`"""
INGEST = [flag._replace(repeat=True) if flag.name in _BY_TYPE else flag for flag in INGEST]
APPEND = [flag for flag in INGEST if flag.name in [*_APPENDED.split(), "labels", "memory"]]
"""the ingest flags that an append has: `ooc.stores.growth.spec.FIELDS`"""
