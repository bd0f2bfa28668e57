"""The verbs of the command line, each a single call. Heavy imports are inside them, so `ooc --help` is fast.

The flags of `ingest` and `train` are the fields of `IngestSpec` and of the modes' configurations: flags, configuration keys and
Python arguments have the same names.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ooc.cli.flags import APPEND, INGEST, flags_of_modes, with_flags
from ooc.cli.help import Verb, Verbs, verb
from ooc.cli.interrupted import RUN_AGAIN, WHOLE_OR_NOT, after_ctrl_c
from ooc.cli.messages import name_flags
from ooc.config import topics
from ooc.config.modes import class_of, classes, settings_of, suggested
from ooc.stores.errors import ConfigError

if TYPE_CHECKING:
    from ooc.training.infer import WrittenRows

app = typer.Typer(
    name="ooc",
    cls=Verbs,
    help="Train graph neural networks on graphs larger than memory.",
    epilog="Options and examples of a command: ooc COMMAND --help",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
STORES, RUNS, OTHERS = "Stores", "Training and prediction", "Other"
"""topics of the commands"""
TRAIN = flags_of_modes(classes(), without=("store", "out"), repeatable=("features",))
PLAN = [flag for flag in TRAIN if flag.name != "plan"]


def _version(wanted: bool) -> None:
    if wanted:
        from ooc.runtime.version import __version__

        print(f"ooc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="A store built by `ooc ingest`.")]
TrainedStore = Annotated[Path | None, typer.Argument(metavar="STORE", help="The store to train on.", show_default=False)]


def merge_appended(store: Path, memory: str | None) -> None:
    """Merge appended data with progress bars on a terminal; elsewhere the next reader merges it silently."""
    if not sys.stderr.isatty():
        return
    from ooc.stores.growth.place import open_place
    from ooc.stores.sizes import parse_bytes
    from ooc.training.watchers import StepBars

    with StepBars() as bars:
        open_place(store, None if memory is None else parse_bytes(memory), bars).close()


@app.command(
    cls=verb(INGEST, topics.INGEST),
    rich_help_panel=STORES,
    epilog="""
    ooc ingest cora.ooc --pyg Planetoid --arg root=data --arg name=Cora
    ooc ingest papers.ooc --edges 'edges/*.parquet' --src src --dst dst --nodes nodes.parquet --id id \\
        --label y --split split --x-cols 'f*' --memory 2GB
    ooc ingest papers.ooc --edges edges.npy --num-nodes 40000 --features x=x.npy --labels y.npy --train train.npy
    """,
)
@with_flags(INGEST, topics.INGEST)
def ingest(out: Annotated[Path, typer.Argument(metavar="OUT", help="The store to write.")], **flags: Any) -> None:
    """Build a store from edges, features, labels and splits, in bounded memory."""
    from ooc.pyg.build_store import ingest as build
    from ooc.training.watchers import StepBars

    with after_ctrl_c(RUN_AGAIN), StepBars() as bars:
        result = build(out, **_given(flags), progress=bars)
    left_out = "".join(f"; {_left_out(reason, count)} dropped" for reason, count in result.dropped.items() if count)
    odd = f"; {result.non_finite:,} NaN or infinite values kept" if result.non_finite else ""
    resumed = f"; resumed after: {', '.join(result.resumed)}" if result.resumed else ""
    made = f"{result.num_nodes:,} nodes, {result.num_edges:,} edges in {result.seconds:.1f} s"
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


@app.command(
    cls=verb(APPEND, topics.INGEST, short=False),
    rich_help_panel=STORES,
    epilog="""
    ooc append papers.ooc --edges new.parquet
    ooc append papers.ooc --edges new.parquet --nodes new_nodes.parquet --x-cols 'f*' --label y
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
) -> None:
    """Give a store splits, at random among the labelled nodes or from files.

    Runs that were trained on earlier splits are not resumed with the new ones.
    """
    from ooc.pyg.change_store import split as give

    with after_ctrl_c(WHOLE_OR_NOT):
        result = give(store, random_split, seed=seed, train=train, val=val, test=test, replace=replace)
    print(f"{store}: " + ", ".join(f"{name} {count:,}" for name, count in result.sizes.items()) + " nodes")
    for note in result.notes:
        print(f"note: {name_flags(note)}")


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
    ooc info papers.ooc --json
    """,
)
def info(
    store: StoreArgument,
    id: Annotated[str | None, typer.Option("--id", help="Look up the row of an external id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a store, or print the row of an external id."""
    if id is not None:
        from ooc.stores.dataset import Dataset

        merge_appended(store, None)
        with Dataset.open(store) as dataset:
            print(dataset.row(id))
        return
    from ooc.stores.info import describe

    fields = describe(store)
    print(json.dumps(fields, indent=2, default=str) if as_json else "\n".join(_info_lines(fields)))


def _info_lines(fields: dict[str, Any]) -> list[str]:
    """Format the result of `describe`."""
    from ooc.stores.sizes import format_bytes

    lines = [
        f"{fields['path']}: {fields['num_nodes']:,} nodes, {fields['num_edges']:,} edges, {format_bytes(fields['bytes'])}",
        f"  task         {fields['task'] or 'none'}" + (f", {_classes(fields)}" if fields["num_classes"] else ""),
        "  splits       " + (", ".join(f"{name} {count:,}" for name, count in fields["splits"].items()) or "none"),
        f"  ids          {'external (ids.lmdb)' if fields['has_ids'] else 'rows'}",
        f"  edges        {'undirected' if fields['undirected'] else 'directed'}, {'' if fields['weighted'] else 'un'}weighted, "
        f"{'with' if fields['has_self_loops'] else 'without'} self-loops",
        *([f"  parts        {_parts(fields['partition'])}"] if fields.get("partition") else []),
        *([f"  events       {fields['time']['events']:,}, {_time(fields['time'])}"] if fields.get("time") else []),
        *(["  order        by degree, the sources of most edges first"] if fields["order"] == "degree" else []),
        *(
            [f"  appended     {_appended(fields['appended'])}; not counted above, see `ooc compact`"]
            if fields["appends"]
            else []
        ),
        f"  format       {fields['format_version']}",
        f"  fingerprint  {fields['fingerprint']}",
        "  arrays",
    ]
    for name, array in fields["arrays"].items():
        shape = " x ".join(f"{size:,}" for size in array["shape"])
        lines.append(f"    {name:<24} {array['dtype']:<11} {shape:<20} {format_bytes(array['bytes'])}")
    return lines


def _classes(fields: dict[str, Any]) -> str:
    """The number of classes and, if they have names, the first of these."""
    names, what = fields["class_names"] or [], "labels" if fields["task"] == "multilabel" else "classes"
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f"{fields['num_classes']} {what}" + (f": {shown}" if names else "")


def _time(time: dict[str, Any]) -> str:
    kind = "integers" if time["dtype"] == "int64" else "numbers"
    event_order = "in the input's order" if time["sorted"] else "sorted by time"
    return f"times are {kind} in {time['unit']}, {event_order}"


@app.command(cls=Verb, rich_help_panel=STORES, epilog="ooc verify papers.ooc")
def verify(store: StoreArgument) -> None:
    """Check every chunk of a store against its checksum.

    The exit code is 2 if one is damaged.
    """
    from ooc.stores.integrity import verify as check
    from ooc.training.watchers import StepBars

    with StepBars() as bars:
        damages = check(store, lambda done, total: bars("verify", done, total, "bytes"))
    for damage in damages:
        print(f"ooc: error: {damage}", file=sys.stderr)
    if damages:
        raise typer.Exit(2)
    print(f"{store}: no damage found")


AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Import the model class that the run names: it runs code, so trust the run.")
]


@app.command(
    cls=verb(TRAIN, topics.TRAIN),
    rich_help_panel=RUNS,
    epilog="""
    ooc train papers.ooc --out runs/sage --fanout 10,10 --hidden 256 --epochs 5 --memory 2GB
    ooc train papers.ooc --config run.toml --lr 0.001
    ooc train --out runs/sage --resume --epochs 10
    ooc train messages.ooc --mode events --model tgn
    """,
)
@with_flags(TRAIN, topics.TRAIN)
def train(
    store: TrainedStore = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Directory of the run; by default runs/STORE-1, -2, ...")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML or JSON with any of these keys; flags override it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT from its last checkpoint.")] = False,
    grown: Annotated[bool, typer.Option("--grown", help="With --resume: continue although the store has grown.")] = False,
    allow_code: AllowCode = False,
    **flags: Any,
) -> None:
    """Train a model on a store and write the results to OUT."""
    settings = settings_of(config, {"store": store, "out": out, **flags}, resume, allow_code)

    from ooc.training.watchers import terminal_watcher

    merge_appended(settings.store, settings.memory)
    from ooc.training.loop import train as run
    from ooc.training.summary import score_lines

    def continuing() -> str:
        begun = settings.out.exists()
        return f"`ooc train --out {settings.out} --resume` continues" if begun else "nothing was trained yet"

    with after_ctrl_c(continuing):
        watcher = terminal_watcher(names_run=out is None and not resume)
        summary = run(settings, resume=resume, watcher=watcher, grown=grown)
    steps = f"{settings.out}: {summary['total_steps']} steps; `ooc report {settings.out}` writes a report"
    print(*map(name_flags, score_lines(summary)), steps, sep="\n")


@app.command(
    cls=Verb,
    rich_help_panel=RUNS,
    epilog="""
    ooc init papers.ooc > run.toml
    ooc init papers.ooc --mode history > run.toml
    """,
)
def init(
    store: StoreArgument,
    mode: Annotated[
        str | None,
        typer.Option("--mode", metavar="MODE", help="The mode of `ooc train`; by default sampled, or events without labels."),
    ] = None,
) -> None:
    """Print a configuration with comments, for `ooc train --config`."""
    from ooc.cli.template import template
    from ooc.stores.manifest import arrays_of, read_manifest

    manifest = read_manifest(arrays_of(store))
    chosen = mode or suggested(manifest.task is not None, manifest.time is not None)
    class_of({"mode": chosen})
    splits = ", ".join(manifest.node_type().splits) or "none"
    about = (
        f"{store}: {manifest.num_nodes:,} nodes, {manifest.num_edges:,} edges; task {manifest.task or 'none'}; splits {splits}"
    )
    print(template(store, chosen, {flag.name: flag for flag in TRAIN}, about), end="")


@app.command(
    cls=verb(PLAN, topics.TRAIN),
    rich_help_panel=RUNS,
    epilog="""
    ooc plan papers.ooc --memory 2GB
    ooc plan papers.ooc --mode sampled --fanout 10,10 --hidden 256 --memory 2GB
    """,
)
@with_flags(PLAN, topics.TRAIN)
def plan(
    store: TrainedStore = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML or JSON with any of these keys.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **flags: Any,
) -> None:
    """Predict memory, time and bottleneck of `ooc train` with the same options.

    Without --mode, all modes are tried briefly and compared, and the recommended one is planned.
    """
    from ooc.training.registry import mode_of

    settings = settings_of(config, {"store": store, **flags})
    mode_of(settings).planned(settings)  # a mode without a plan is refused before the store is merged
    merge_appended(settings.store, settings.memory)
    from ooc.training.verbs import plan_of

    result = plan_of(settings)
    if as_json:
        print(json.dumps(result.asdict(), indent=2))
        return
    from rich.console import Console

    from ooc.report.tables import compared, tables

    console = Console(highlight=False)
    if (choice := getattr(result, "choice", None)) is not None:
        console.print(compared(choice))
        refused = [f"{each.mode} is not possible: {name_flags(each.fix)}" for each in choice.candidates if each.fix is not None]
        command = f"  ooc train {settings.store} {choice.best.flags}"
        console.print("\n".join([*refused, choice.reason, command]), markup=False, soft_wrap=True)
    for each in tables(result):
        console.print(each)


@app.command(cls=Verb, rich_help_panel=RUNS, epilog="ooc report runs/sage")
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]) -> None:
    """Write RUN/report.html: curves, stage times, memory and I/O."""
    from ooc.report.page import write_report

    print(write_report(run))


@app.command(cls=Verb, rich_help_panel=OTHERS, epilog="ooc machine papers.ooc")
def machine(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="A store, or any path on the disk to measure.")] = Path(),
    engine: Annotated[str, typer.Option("--engine", help="How rows are read: auto, uring, pread or gds.")] = "auto",
) -> None:
    """Measure the cost of reads on a disk, in a few seconds.

    The result is saved and used to plan reads.
    """
    from ooc.stores.io.disk import calibrate

    print(calibrate(path, engine))


@app.command(
    cls=Verb,
    rich_help_panel=OTHERS,
    epilog="""
    ooc example
    ooc example train_nodes > train_nodes.py
    ooc example graph demo
    """,
)
def example(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A script to print, or graph.", show_default=False)] = None,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Where graph writes its files.", show_default=False)
    ] = None,
) -> None:
    """Print an example script, or write a small graph; without NAME, list them."""
    from ooc.examples import GRAPH, NEXT, SCRIPTS, source

    if name is None:
        rows = {**{f"{script} > FILE": text for script, text in SCRIPTS.items()}, "graph DIR": GRAPH}
        print(*(f"ooc example {row:<24} {text}" for row, text in rows.items()), sep="\n")
    elif name == "graph":
        if folder is None:
            raise ConfigError("name the directory for its files: ooc example graph DIR")
        from ooc.examples.graph import write_graph

        write_graph(folder)
        print(f"{folder}/edges.parquet, {folder}/nodes.parquet; to ingest and train:")
        print(*NEXT.format(folder=folder, name=folder.name).splitlines(), sep="\n")
    elif name not in SCRIPTS or folder is not None:
        what = f"{name!r} is no example" if name not in SCRIPTS else f"{name} is printed: ooc example {name} > FILE"
        raise ConfigError(f"{what}; there are {', '.join(SCRIPTS)} and graph")
    else:
        print(source(name), end="")


CheckpointOption = Annotated[Path, typer.Option("--checkpoint", metavar="RUN", help="Directory of a run of `ooc train`.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", help="Memory for the process, such as 2GB.")]
EngineOption = Annotated[str, typer.Option("--engine", help="How rows are read: auto, uring, pread or mmap.")]
VerifyReadsOption = Annotated[
    bool, typer.Option("--verify-reads", help="Compare every chunk with its checksum before rows are read from it.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="CLASS", help="The run's own class, package.module:Class: agrees to import it.")
]


@app.command(
    cls=Verb, rich_help_panel=RUNS, epilog="ooc infer papers.ooc --checkpoint runs/sage --out predictions.parquet --memory 2GB"
)
def infer(
    store: StoreArgument,
    checkpoint: CheckpointOption,
    out: Annotated[
        Path, typer.Option("--out", metavar="PATH", help="The Parquet or CSV file to write: id, class, probabilities.")
    ],
    memory: MemoryOption = None,
    engine: EngineOption = "auto",
    model: ModelOption = None,
    allow_code: AllowCode = False,
    verify_reads: VerifyReadsOption = False,
) -> None:
    """Predict the class of every node, exactly.

    The model is computed layer by layer, in bounded memory. After a crash, run the command again to continue.
    """
    result = _layer_by_layer(
        "infer",
        checkpoint,
        store,
        out,
        memory=memory,
        engine=engine,
        model_class=model,
        allow_code=allow_code,
        verify_reads=verify_reads,
    )
    print(f"{result.path}: {result.rows:,} nodes, {result.columns} model outputs; {result.moved}")


@app.command(
    cls=Verb, rich_help_panel=RUNS, epilog="ooc embed papers.ooc --checkpoint runs/sage --out embeddings.zarr --layer 1"
)
def embed(
    store: StoreArgument,
    checkpoint: CheckpointOption,
    out: Annotated[
        Path, typer.Option("--out", metavar="PATH", help="The Zarr group to write; the embeddings are its array x.")
    ],
    layer: Annotated[int | None, typer.Option("--layer", help="Layer number, from 1; by default the last but one.")] = None,
    memory: MemoryOption = None,
    engine: EngineOption = "auto",
    model: ModelOption = None,
    allow_code: AllowCode = False,
    verify_reads: VerifyReadsOption = False,
) -> None:
    """Write a layer's output for every node as a Zarr array.

    The model is computed layer by layer, in bounded memory. After a crash, run the command again to continue.
    """
    agreed: dict[str, Any] = {"model_class": model, "allow_code": allow_code, "verify_reads": verify_reads}
    result = _layer_by_layer("embed", checkpoint, store, out, memory=memory, engine=engine, layer=layer, **agreed)
    print(f"{result.path}/x: {result.rows:,} nodes x {result.columns}; {result.moved}")


def _layer_by_layer(verb: str, run: Path, store: Path, out: Path, **settings: Any) -> "WrittenRows":
    """Carry out a verb of `ooc.training.infer`, with progress."""
    from ooc.training import infer as verbs
    from ooc.training.watchers import StepBars

    merge_appended(store, settings["memory"])
    with after_ctrl_c(RUN_AGAIN), StepBars() as bars:
        settings["progress"] = lambda what, done, total: bars(what, done, total, "nodes")
        return cast("WrittenRows", getattr(verbs, verb)(run, store, out, **settings))
