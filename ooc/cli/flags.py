"""Flags of the command line from the fields of a pydantic model, or from a table that a test holds against one."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import typer
from pydantic import BaseModel


class Flag(NamedTuple):
    """One flag; its value reaches the verb as text, as bool for a switch, as a list of texts for a repeatable one."""

    name: str
    """the parameter's name: `batch_size` is `--batch-size`"""
    metavar: str | None
    """what its value is called; None makes it a switch"""
    help: str
    repeat: bool = False
    panel: str | None = None
    """where the help shows it; None: among the others"""


def flags_of(model: type[BaseModel], without: Iterable[str] = (), repeatable: Iterable[str] = ()) -> list[Flag]:
    """A flag for every field of `model` that is not in `without`.

    >>> [flag.name for flag in flags_of(TrainConfig, without=("store", "out"))][:2]
    ['model', 'model_args']
    """
    flags = []
    for name, field in model.model_fields.items():
        if name in without:
            continue
        text, default = field.description or "", field.get_default(call_default_factory=True)
        if default not in (None, [], {}, False) and not field.is_required():
            text += f" [{','.join(map(str, default)) if isinstance(default, list | tuple) else default}]"
        flags.append(Flag(name, metavar_of(field.annotation), text, name in repeatable))
    return flags


def flags_of_modes(
    models: Mapping[str, type[BaseModel]], without: Iterable[str] = (), repeatable: Iterable[str] = ()
) -> list[Flag]:
    """The flags of several models, each once, in the order they come up: of the first, then what the others have besides.

    models: mode -> model; one model may stand for several. What only one has is shown in a panel of its mode; defaults and
    words that differ are told for each.
    """
    main = next(iter(models.values()))
    found: dict[str, Flag] = {flag.name: flag for flag in flags_of(main, without, repeatable)}
    for mode, model in models.items():
        if model is main:
            continue
        for flag in flags_of(model, without, repeatable):
            known = found.get(flag.name)
            if known is None:
                found[flag.name] = flag._replace(panel=f"Mode {mode}")
            elif known.panel is not None:
                found[flag.name] = known._replace(panel=f"{known.panel} and {mode}")
            elif known.help != flag.help:
                kind = known.metavar if known.metavar == flag.metavar else "|".join(filter(None, [known.metavar, flag.metavar]))
                found[flag.name] = known._replace(help=f"{known.help} {mode}: {flag.help}", metavar=kind)
    return list(found.values())


def metavar_of(annotation: Any) -> str | None:
    """What the value of a field of that type is called in the help; None for a bool."""
    if _is(annotation, bool):
        return None
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    names: dict[str, tuple[type, ...]] = {
        "NAME=VALUE": (dict,),
        "LIST": (list,),
        "INT": (int,),
        "NUMBER": (float,),
        "PATH": (Path,),
    }
    return next((name for name, kinds in names.items() if _is(annotation, *kinds)), "TEXT")


def _is(annotation: Any, *kinds: type) -> bool:
    """Whether an annotation is one of `kinds`, maybe within Annotated or a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is(get_args(annotation)[0], *kinds)
    if origin in (Union, UnionType):
        return any(_is(part, *kinds) for part in get_args(annotation))
    return (origin or annotation) in kinds


def with_flags(flags: Iterable[Flag]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: typer sees `f(..., **flags)` with these flags after f's own parameters; None means not given."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*own, *map(_parameter, flags)]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


def _parameter(flag: Flag) -> inspect.Parameter:
    text = f"--{flag.name.replace('_', '-')}"
    annotation: Any = list[str] | None if flag.repeat else str | None
    if flag.metavar is None:
        text, annotation = f"{text}/--no-{text[2:]}", bool | None
    option = typer.Option(text, help=flag.help, show_default=False, metavar=flag.metavar, rich_help_panel=flag.panel)
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option])


INGEST = [
    Flag("edges", "GLOB", "Edges: Parquet, CSV/TSV (also .gz), or an npy/npz array of shape 2 x E or E x 2."),
    Flag("src", "COLUMN", "Column of the sources. [src]"),
    Flag("dst", "COLUMN", "Column of the destinations. [dst]"),
    Flag("weight", "COLUMN", "Column of the edge weights."),
    Flag("time", "COLUMN", "Column of the edges' times, numbers or timestamps: a temporal graph, events in that order."),
    Flag("time_unit", "s|ms|us|ns", "Unit of times that are numbers. [s]"),
    Flag("edge_features", "NAME=WHAT", "Edge features: columns of the edges, msg=f*, or npy files; repeatable.", repeat=True),
    Flag("header", None, "Whether text tables begin with a line of names; by default found out."),
    Flag("id_type", "auto|int|str", "Kind of the ids. [auto]"),
    Flag("undirected", None, "Add every edge's reverse."),
    Flag("drop_duplicates", None, "Keep the first of equal edges."),
    Flag("drop_self_loops", None, "Leave out edges from a node to itself."),
    Flag("drop_missing", None, "Leave out, and count, edges with an endpoint that is no node."),
    Flag("allow_nan", None, "Let NaN and infinite features in, counted."),
    Flag("nodes", "GLOB", "Table of nodes, Parquet or CSV/TSV; its order gives the rows."),
    Flag("id", "COLUMN", "Its column of ids. [id]"),
    Flag("label", "COLUMN", "Its column of labels."),
    Flag("split", "COLUMN", "Its column of splits: train, val, test."),
    Flag("birth", "COLUMN", "Its column of the nodes' first times; empty: there from the beginning."),
    Flag("x_cols", "PATTERNS", "Its feature columns, patterns joined by commas: f*,age."),
    Flag("num_nodes", "INT", "Number of nodes, where ids are 0..N-1."),
    Flag("features", "NAME=GLOB", "npy files of a node feature: x=x.npy or 'x=part_*.npy'; repeatable.", repeat=True),
    Flag("labels", "FILE", "npy file of labels: N, or N x C for several labels a node."),
    Flag("train", "FILE", "npy file of the training nodes: indices or a boolean mask."),
    Flag("val", "FILE", "The same for validation."),
    Flag("test", "FILE", "The same for testing."),
    Flag("split_index", "INT", "Which split of two-dimensional masks."),
    Flag(
        "dtype", "float32|float16|bfloat16|int8", "How features are stored; int8: a scale a column (edges: bfloat16). [float32]"
    ),
    Flag("normalize", "none|row|standard", "Normalise features, by statistics of the training rows. [none]"),
    Flag("npz", "FILE", "One file with x, y, edge_index and train_mask, val_mask, test_mask."),
    Flag("pyg", "CLASS", "A PyG data set: Planetoid, or package.module:Class; item 0 is taken."),
    Flag("arg", "NAME=VALUE", "An argument of that data set; repeatable.", repeat=True),
    Flag("ogb", "DIR", "A data set in OGB's raw layout, on disk already."),
    Flag(
        "parts", "INT|auto", "Number nodes so that each of so many parts of the graph is a range; auto: about 1,000 nodes each."
    ),
    Flag("partitioner", "auto|metis|stream", "METIS (extra ooc[metis]) where the graph fits memory, or streaming. [auto]"),
    Flag("order", "input|degree", "Number nodes, or each part's, as the input does or by edges, hubs first. [input]"),
    Flag("memory", "SIZE", "Memory to keep to. [2GB]"),
]
"""`IngestSpec`'s fields but `out`. Importing the specification would import what ingest needs, too slow for `--help`."""

_APPENDED = (
    "edges src dst weight time time_unit edge_features header drop_missing allow_nan nodes id label split birth x_cols features"
)
APPEND = [flag for flag in INGEST if flag.name in [*_APPENDED.split(), "labels", "memory"]]
"""The flags of an ingest that an append has: `stores.growth.spec.FIELDS`."""
