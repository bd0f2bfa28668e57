"""The verbs that build, change, describe and check stores."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ooc.cli.app import STORES, CacheDirOption, CacheOption, StoreArgument, app, merge_appended
from ooc.cli.flags import APPEND, INGEST, with_flags
from ooc.cli.help import Verb, verb
from ooc.cli.interrupted import RUN_AGAIN, WHOLE_OR_NOT, after_ctrl_c, unless_whole
from ooc.cli.messages import name_flags
from ooc.config import topics
from ooc.stores.errors import ConfigError
from ooc.stores.io.remote.url import store_path


@app.command(
    cls=verb(INGEST, topics.INGEST),
    rich_help_panel=STORES,
    epilog="""
    ooc ingest cora.ooc --pyg Planetoid --arg root=data --arg name=Cora
    ooc ingest papers.ooc --edges 'edges/*.parquet' --src src --dst dst --nodes nodes.parquet --id id \\
        --label y --split split --x-cols 'f*' --memory 2GB
    ooc ingest molecules.ooc --edges bonds.parquet --nodes atoms.parquet --graph-id molecule --x-cols 'f*' \\
        --graphs molecules.parquet --graph-label toxic --random-split 0.8,0.1,0.1
    ooc ingest academic.ooc --nodes paper=papers.parquet --nodes author=authors.csv --label paper=topic \\
        --edges 'author:writes:paper=writes/*.parquet' --edges paper:cites:paper=cites.parquet --reverse
    ooc ingest papers.ooc --edges edges.npy --num-nodes 40000 --features x=x.npy --labels y.npy --train train.npy
    ooc ingest papers-1 --edges 'edges/*.parquet' --num-nodes 40000 --shard 1/2
    """,
)
@with_flags(INGEST, topics.INGEST)
def ingest(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The store to write: a directory, or a URL.", parser=store_path)],
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", metavar="PATH", help="Where a store for a URL is built before its upload.")
    ] = None,
    **flags: Any,
) -> None:
    """Build a store from edges, features, labels and splits, in bounded memory."""
    from ooc.pyg.build_store import ingest as build
    from ooc.training.watchers import StepBars

    with after_ctrl_c(unless_whole(out)), StepBars() as bars:
        result = build(out, **_given(flags), cache_dir=cache_dir, progress=bars)
    left_out = "".join(f"; {_left_out(reason, count)} dropped" for reason, count in result.dropped.items() if count)
    odd = f"; {result.non_finite:,} NaN or infinite values kept" if result.non_finite else ""
    resumed = f"; resumed after: {', '.join(result.resumed)}" if result.resumed else ""
    graphs = f"{result.num_graphs:,} graphs, " if result.num_graphs is not None else ""
    shard = f"shard {result.shard} of " if result.shard is not None else ""
    made = f"{shard}{graphs}{result.num_nodes:,} nodes, {result.num_edges:,} edges in {result.seconds:.1f} s"
    print(f"{result.path}: {made}{left_out}{odd}{resumed}")
    if result.partition is not None:
        print(f"  parts: {_parts(result.partition.model_dump())}")
    for note in result.notes:
        print(f"note: {name_flags(note)}")


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _parts(fields: dict[str, Any]) -> str:
    """Describe a partition."""
    cut = f"{fields['cut']:.1%} of the edges between parts, largest part {fields['balance']:.2f} times the mean"
    return f"{fields['parts']:,} ({fields['method']}), {cut}"


def _left_out(reason: str, count: int) -> str:
    """Describe edges of a kind."""
    one, many = {
        "missing": ("edge with an empty or unknown endpoint", "edges with an empty or unknown endpoint"),
        "self_loops": ("self-loop", "self-loops"),
        "duplicates": ("duplicate edge", "duplicate edges"),
    }[reason]
    return f"{count:,} {one if count == 1 else many}"


@app.command(cls=Verb, rich_help_panel=STORES, epilog="ooc join papers.ooc papers-1 papers-2")
def join(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The store to write.", parser=store_path)],
    shards: Annotated[list[Path], typer.Argument(metavar="SHARD...", help="What ingests with --shard wrote, all of them.")],
) -> None:
    """Put the shards of a store together.

    The store is, byte for byte, that of one ingest. The shards remain.
    """
    from ooc.stores.ingest.join import join as put_together
    from ooc.training.watchers import StepBars

    with after_ctrl_c(unless_whole(out)), StepBars() as bars:
        result = put_together(out, shards, bars)
    resumed = f"; resumed after: {', '.join(result.resumed)}" if result.resumed else ""
    print(f"{out}: {result.num_nodes:,} nodes, {result.num_edges:,} edges in {result.seconds:.1f} s{resumed}")


@app.command(
    cls=verb(APPEND, topics.INGEST, short=False),
    rich_help_panel=STORES,
    epilog="""
    ooc append papers.ooc --edges new.parquet
    ooc append papers.ooc --edges new.parquet --nodes new_nodes.parquet --x-cols 'f*' --label y
    ooc append shop.ooc --nodes user=new.parquet --edges user:visits:item=visits.parquet
    """,
)
@with_flags(APPEND, topics.INGEST)
def append(store: StoreArgument, **flags: Any) -> None:
    """Add edges, nodes, or rows of existing nodes to a store, in one transaction."""
    from ooc.pyg.change_store import append as add
    from ooc.training.watchers import StepBars

    with after_ctrl_c(WHOLE_OR_NOT), StepBars() as bars:
        result = add(store, **_given(flags), progress=bars)
    print(f"{store}: {_appended(asdict(result.appended))} appended in {result.seconds:.2f} s")
    for note in result.notes:
        print(f"note: {name_flags(note)}")


def _appended(fields: dict[str, Any]) -> str:
    """Describe what was appended."""
    parts = [f"{fields['edges']:,} edges", f"{fields['nodes']:,} new nodes"]
    parts += [f"{count:,} rows of {name}" for name, count in sorted(fields["rows"].items())]
    return ", ".join(parts + [f"{_left_out(kind, fields[kind])} dropped" for kind in ("missing", "self_loops") if fields[kind]])


@app.command(cls=Verb, rich_help_panel=STORES, epilog="ooc split papers.ooc --random-split 0.6,0.2,0.2 --seed 1")
def split(
    store: StoreArgument,
    random_split: Annotated[str | None, typer.Option(metavar="SHARES", help="Shares of train, val and test.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random split.")] = 0,
    train: Annotated[Path | None, typer.Option(help="npy file of the training nodes: rows or a boolean mask.")] = None,
    val: Annotated[Path | None, typer.Option(help="The same for validation.")] = None,
    test: Annotated[Path | None, typer.Option(help="The same for testing.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the splits that the store has.")] = False,
    node_type: Annotated[str | None, typer.Option(metavar="TYPE", help="Node type to split, of several.")] = None,
) -> None:
    """Give a store splits, at random among the labelled nodes or from files.

    Of a store of many graphs, the splits are of graphs.
    Runs that were trained on earlier splits are not resumed with the new ones.
    """
    from ooc.pyg.change_store import split as give

    with after_ctrl_c(WHOLE_OR_NOT):
        files = {"train": train, "val": val, "test": test}
        result = give(store, random_split, seed=seed, **files, replace=replace, node_type=node_type)
    print(f"{store}: " + ", ".join(f"{name} {count:,}" for name, count in result.sizes.items()) + f" {result.what}s")
    for note in result.notes:
        print(f"note: {name_flags(note)}")


@app.command(
    cls=Verb,
    rich_help_panel=STORES,
    epilog="""
    ooc reduce papers.ooc pca:64
    ooc reduce academic.ooc mutual:32 --node-type paper
    """,
)
def reduce(
    store: StoreArgument,
    method: Annotated[
        str, typer.Argument(metavar="METHOD:COLUMNS", help="pca:64, svd:64, random:64, or columns: variance:64, mutual:64.")
    ],
    node_type: Annotated[str | None, typer.Option(metavar="TYPE", help="Node type, of several.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is drawn.")] = 0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory limit.")] = "2GB",
) -> None:
    """Make the features of a store narrower.

    The map stays in the store, which applies it to rows that are appended.
    Open readers keep the wide rows. Earlier runs cannot be resumed.
    """
    from ooc.pyg.change_store import reduce as make_narrower
    from ooc.stores.sizes import format_bytes
    from ooc.training.watchers import StepBars

    with after_ctrl_c(WHOLE_OR_NOT), StepBars() as bars:
        result = make_narrower(store, method, node_type=node_type, seed=seed, memory=memory, progress=bars)
    sizes = f"{format_bytes(result.before)} of features are {format_bytes(result.now)}"
    print(f"{store}: {result.reduced.text}; {sizes}, in {result.seconds:.1f} s")


@app.command(cls=Verb, rich_help_panel=STORES, epilog="ooc compact papers.ooc")
def compact(store: StoreArgument) -> None:
    """Merge appended data into a store's arrays.

    Open readers keep reading the old ones.
    """
    from ooc.stores.growth.compact import compact as fold
    from ooc.training.watchers import StepBars

    with after_ctrl_c(RUN_AGAIN), StepBars() as bars:
        result = fold(store, bars)
    if not result.appends:
        print(f"{store}: nothing was appended")
        return
    times = "once" if result.appends == 1 else f"{result.appends:,} times"
    now = f"{result.manifest.num_nodes:,} nodes, {result.manifest.num_edges:,} edges"
    print(f"{store}: {_appended(asdict(result.appended))}, appended {times}, merged; {now} in {result.seconds:.1f} s")


@app.command(
    cls=Verb,
    rich_help_panel=STORES,
    epilog="""
    ooc info papers.ooc
    ooc info papers.ooc --id paper_17
    ooc info academic.ooc --id author:ann
    ooc info papers.ooc --json
    """,
)
def info(
    store: StoreArgument,
    id: Annotated[str | None, typer.Option("--id", help="Look up the row of an external id; of several types TYPE:ID.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cache_dir: CacheDirOption = None,
    cache: CacheOption = None,
) -> None:
    """Describe a store, or print the row of an external id."""
    if id is not None:
        from ooc.stores.dataset import Dataset

        merge_appended(store, None, cache_dir, cache)
        with Dataset.open(store, cache_dir=cache_dir, cache=cache) as dataset:
            print(_row(dataset, id))
        return
    from ooc.config.base import CONFIG
    from ooc.stores.info import describe

    if (store / CONFIG).is_file():
        raise ConfigError(f"{store} is a run of `ooc train`, and no store: `ooc report {store}` describes it")
    fields = describe(store, cache_dir, cache)
    print(json.dumps(fields, indent=2, default=str) if as_json else "\n".join(_info_lines(fields)))


def _row(dataset: Any, text: str) -> int:
    """The row of an external id, TYPE:ID in a heterogeneous store."""
    if not dataset.is_hetero:
        return int(dataset.row(text))
    node_type, sign, external = text.partition(":")
    if not sign:
        example = f"{dataset.node_types[0]}:{text}"
        raise ConfigError(f"`id={text!r}`: {dataset.path} has several node types: say of which, as in {example}")
    return int(dataset.nodes(node_type).row(external))


def _info_lines(fields: dict[str, Any]) -> list[str]:
    """Format the result of `describe`."""
    from ooc.stores.sizes import format_bytes

    many = fields.get("graphs")
    graphs = f"{many['count']:,} graphs, " if many else ""
    counts = f"{graphs}{fields['num_nodes']:,} nodes, {fields['num_edges']:,} edges"
    lines = [
        f"{fields['path']}: {counts}, {format_bytes(fields['bytes'])}",
        *(_lines_of_graph(fields) if "task" in fields else _lines_of_types(fields)),
        f"  format       {fields['format_version']}",
        f"  fingerprint  {fields['fingerprint']}",
        "  arrays",
    ]
    width = _width(fields["arrays"])
    for name, array in fields["arrays"].items():
        shape = " x ".join(f"{size:,}" for size in array["shape"])
        lines.append(
            f"    {name:<{width}} {array['dtype']:<11} {shape:<20} {format_bytes(array['bytes'])}{_narrower(fields, name)}"
        )
    return lines


def _narrower(fields: dict[str, Any], name: str) -> str:
    """How an array was made narrower, if it was."""
    return f"  ({fields['reduced'][name]})" if name in fields["reduced"] else ""


def _width(names: Iterable[str]) -> int:
    """Of a column of these names."""
    return max(24, *map(len, names))


def _lines_of_graph(fields: dict[str, Any]) -> list[str]:
    return [
        f"  task         {fields['task'] or 'none'}" + (f", {_classes(fields)}" if fields["num_classes"] else ""),
        "  splits       " + (", ".join(f"{name} {count:,}" for name, count in fields["splits"].items()) or "none"),
        f"  ids          {'external (ids.lmdb)' if fields['has_ids'] else 'rows'}",
        f"  edges        {', '.join([_directions(fields), *_of_labels(fields['edge_types'][0])])}",
        *(_lines_of_graphs(fields["graphs"]) if fields["graphs"] else []),
        *([f"  parts        {_parts(fields['partition'])}"] if fields.get("partition") else []),
        *([f"  events       {fields['time']['events']:,}, {_time(fields['time'])}"] if fields.get("time") else []),
        *(["  order        by degree, the sources of most edges first"] if fields["order"] == "degree" else []),
        *_line_of_appends(fields),
    ]


def _line_of_appends(fields: dict[str, Any]) -> list[str]:
    if not fields["appends"]:
        return []
    return [f"  appended     {_appended(fields['appended'])}; not counted above, see `ooc compact`"]


def _lines_of_types(fields: dict[str, Any]) -> list[str]:
    """A line for each type of nodes and edges of a heterogeneous store."""
    lines = ["  node types"]
    width = _width([*(own["name"] for own in fields["node_types"]), *map(_shown, fields["edge_types"])])
    for own in fields["node_types"]:
        parts = [f"{own['count']:,} nodes", *_of_labels(own)]
        lines.append(f"    {own['name']:<{width}} " + ", ".join([*parts, *(["external ids"] if own["id_kind"] else [])]))
    lines.append("  edge types")
    for own in fields["edge_types"]:
        back = own.get("reverse_of")
        parts = [f"{own['count']:,} edges", _directions(own), *([f"times in {own['time']['unit']}"] if own.get("time") else [])]
        parts += _of_labels(own)
        lines.append(f"    {_shown(own):<{width}} " + ", ".join([*parts, *([f"reverse of {':'.join(back)}"] if back else [])]))
    return lines + _line_of_appends(fields)


def _of_labels(own: dict[str, Any]) -> list[str]:
    """The task and the sizes of the splits of a type of nodes or edges, if it has labels and splits."""
    task = [f"{own['task']}, {_classes(own)}"] if own.get("task") else []
    return task + [f"{name} {count:,}" for name, count in own.get("splits", {}).items()]


def _shown(edge_type: dict[str, Any]) -> str:
    return ":".join(edge_type[part] for part in ("source", "name", "target"))


def _directions(edges: dict[str, Any]) -> str:
    """Describe the edges of a type; fields that are not there have their defaults."""
    weighted, loops = "" if edges.get("weighted") else "un", "with" if edges.get("has_self_loops") else "without"
    return f"{'undirected' if edges.get('undirected') else 'directed'}, {weighted}weighted, {loops} self-loops"


def _lines_of_graphs(many: dict[str, Any]) -> list[str]:
    """Describe the graphs of a store of many."""
    splits = ", ".join(f"{name} {count:,}" for name, count in many["splits"].items()) or "none"
    task = (many["task"] or "none") + (f", {_classes(many)}" if many["num_classes"] else "")
    ids = "external (graph_ids.lmdb)" if many["id_kind"] is not None else "rows"
    return [f"  graphs       task {task}; splits {splits}; ids {ids}"]


def _classes(fields: dict[str, Any]) -> str:
    """The number of classes or targets and, if they have names, the first of these."""
    count, names = fields["num_classes"], fields.get("class_names") or []
    targets = "target" if count == 1 else "targets"
    what = {"multilabel": "labels", "regression": targets}.get(fields["task"], "classes")
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f"{count} {what}" + (f": {shown}" if names else "")


def _time(time: dict[str, Any]) -> str:
    kind = "integers" if time["dtype"] == "int64" else "numbers"
    event_order = "in the input's order" if time["sorted"] else "sorted by time"
    return f"times are {kind} in {time['unit']}, {event_order}"


@app.command(cls=Verb, rich_help_panel=STORES, epilog="ooc verify papers.ooc")
def verify(store: StoreArgument, cache_dir: CacheDirOption = None, cache: CacheOption = None) -> None:
    """Check every chunk of a store against its checksum.

    The exit code is 2 if one is damaged.
    """
    from ooc.stores.integrity import verify as check
    from ooc.training.watchers import StepBars

    with StepBars() as bars:
        damages = check(store, lambda done, total: bars("verify", done, total, "bytes"), cache_dir, cache)
    for damage in damages:
        print(f"ooc: error: {damage}", file=sys.stderr)
    if damages:
        raise typer.Exit(2)
    print(f"{store}: no damage found")
