"""The command line's verbs: each is one call. Heavy imports stand inside them, so `ooc --help` is fast.

The flags of `ingest` and `train` are the fields of `IngestSpec` and of the modes' configurations: a flag, a key of a
configuration file and an argument in Python are one name.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ooc.cli.flags import APPEND, INGEST, flags_of_modes, with_flags
from ooc.config.base import parse, read_config
from ooc.config.full import FullConfig
from ooc.config.modes import classes, load_config
from ooc.config.nodes import TrainConfig
from stores.errors import ConfigError

app = typer.Typer(
    name="ooc",
    help="Train graph neural networks on graphs larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="A store built by `ooc ingest`.")]


def merge_appended(store: Path, memory: str | None) -> None:
    """Merge what was appended since a reader last looked, with bars where there is a terminal for them: elsewhere whoever opens
    the store does it, in silence."""
    if not sys.stderr.isatty():
        return
    from ooc.training.watchers import StepBars
    from stores.growth.place import open_place
    from stores.sizes import parse_bytes

    with StepBars() as bars:
        open_place(store, None if memory is None else parse_bytes(memory), bars).close()


@app.command()
@with_flags(INGEST)
def ingest(out: Annotated[Path, typer.Argument(metavar="OUT", help="The store to write.")], **flags: Any) -> None:
    """Build a store from edges, features, labels and splits, in bounded memory."""
    from ooc.training.watchers import StepBars
    from stores.ingest import IngestSpec
    from stores.ingest import ingest as from_files

    spec = parse(IngestSpec, {"out": out, **{name: value for name, value in flags.items() if value is not None}})
    with StepBars() as bars:
        if spec.pyg is None:
            made = from_files(spec, bars)
        else:
            from ooc.pyg.source import ingest as from_pyg  # only this imports torch

            made = from_pyg(spec, bars)
    left_out = "".join(f"; {_left_out(reason, count)} left out" for reason, count in made.dropped.items() if count)
    odd = f"; {made.non_finite:,} NaN or infinite values let in" if made.non_finite else ""
    resumed = f"; resumed after: {', '.join(made.resumed)}" if made.resumed else ""
    print(f"{made.path}: {made.num_nodes:,} nodes, {made.num_edges:,} edges in {made.seconds:.1f} s{left_out}{odd}{resumed}")
    if made.partition is not None:
        print(f"  parts: {_parts(made.partition.model_dump())}")
    for note in made.notes:
        print(f"note: {note}")


def _parts(found: dict[str, Any]) -> str:
    """A partition, in words."""
    cut = f"{found['cut']:.1%} of the edges between them, the largest {found['balance']:.2f} times the mean"
    return f"{found['parts']:,} ({found['method']}), {cut}"


def _left_out(reason: str, count: int) -> str:
    """Edges of a kind, in words."""
    one, many = {
        "missing": ("edge with an unknown endpoint", "edges with an unknown endpoint"),
        "self_loops": ("self-loop", "self-loops"),
        "duplicates": ("duplicate edge", "duplicate edges"),
    }[reason]
    return f"{count:,} {one if count == 1 else many}"


@app.command()
@with_flags(APPEND)
def append(store: StoreArgument, **flags: Any) -> None:
    """Add edges, nodes, or rows of known nodes to a store, in one transaction; the next reader sees them."""
    from ooc.training.watchers import StepBars
    from stores.growth.append import append as add
    from stores.growth.spec import AppendSpec

    with StepBars() as bars:
        made = add(
            parse(AppendSpec, {"out": store, **{name: value for name, value in flags.items() if value is not None}}), bars
        )
    print(f"{store}: {_appended(asdict(made.appended))} appended in {made.seconds:.2f} s")
    for note in made.notes:
        print(f"note: {note}")


def _appended(found: dict[str, Any]) -> str:
    """What was appended, in words."""
    kept = [f"{found['edges']:,} edges", f"{found['nodes']:,} new nodes"]
    kept += [f"{count:,} rows of {name}" for name, count in sorted(found["rows"].items())]
    return ", ".join(
        kept + [f"{_left_out(reason, found[reason])} left out" for reason in ("missing", "self_loops") if found[reason]]
    )


@app.command()
def compact(store: StoreArgument) -> None:
    """Fold what was appended to a store into its arrays; who has the store open goes on reading the old ones."""
    from ooc.training.watchers import StepBars
    from stores.growth.compact import compact as fold

    with StepBars() as bars:
        made = fold(store, bars)
    if not made.appends:
        print(f"{store}: nothing was appended")
        return
    times = "once" if made.appends == 1 else f"{made.appends:,} times"
    now = f"{made.manifest.num_nodes:,} nodes, {made.manifest.num_edges:,} edges"
    print(f"{store}: {_appended(asdict(made.appended))}, appended {times}, are in the arrays; {now} in {made.seconds:.1f} s")


@app.command()
def info(
    store: StoreArgument,
    id: Annotated[str | None, typer.Option("--id", help="Look up the row of an external id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a store holds, or which row an external id has."""
    if id is not None:
        from stores.dataset import Dataset

        merge_appended(store, None)
        with Dataset.open(store) as dataset:
            print(dataset.row(id))
        return
    from stores.info import describe

    found = describe(store)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    print("\n".join(_info_lines(found)))


def _info_lines(found: dict[str, Any]) -> list[str]:
    """What `describe` tells, for people."""
    from stores.sizes import format_bytes

    lines = [
        f"{found['path']}: {found['num_nodes']:,} nodes, {found['num_edges']:,} edges, {format_bytes(found['bytes'])}",
        f"  task         {found['task'] or 'none'}" + (f", {found['num_classes']} classes" if found["num_classes"] else ""),
        "  splits       " + (", ".join(f"{name} {count:,}" for name, count in found["splits"].items()) or "none"),
        f"  ids          {'external (ids.lmdb)' if found['has_ids'] else 'rows'}",
        f"  edges        {'undirected' if found['undirected'] else 'directed'}, {'' if found['weighted'] else 'un'}weighted, "
        f"{'with' if found['has_self_loops'] else 'without'} self-loops",
        *([f"  parts        {_parts(found['partition'])}"] if found.get("partition") else []),
        *([f"  events       {found['time']['events']:,}, {_time(found['time'])}"] if found.get("time") else []),
        *(["  order        by degree, the sources of most edges first"] if found["order"] == "degree" else []),
        *([f"  appended     {_appended(found['appended'])}; not counted above, see `ooc compact`"] if found["appends"] else []),
        f"  format       {found['format_version']}",
        f"  fingerprint  {found['fingerprint']}",
        "  arrays",
    ]
    for name, array in found["arrays"].items():
        shape = " x ".join(f"{size:,}" for size in array["shape"])
        lines.append(f"    {name:<24} {array['dtype']:<11} {shape:<20} {format_bytes(array['bytes'])}")
    return lines


def _time(time: dict[str, Any]) -> str:
    kind = "whole numbers" if time["dtype"] == "int64" else "numbers"
    order = "in the input's order" if time["sorted"] else "put in order of time"
    return f"times are {kind} in {time['unit']}, {order}"


@app.command()
def verify(store: StoreArgument) -> None:
    """Check every chunk of a store against its checksum; exit code 2 where one is damaged."""
    from ooc.training.watchers import StepBars
    from stores.integrity import verify as check

    with StepBars() as bars:
        damages = check(store, lambda done, total: bars("verify", done, total, "bytes"))
    for damage in damages:
        print(f"ooc: error: {damage}", file=sys.stderr)
    if damages:
        raise typer.Exit(2)
    print(f"{store}: whole")


@app.command()
@with_flags(flags_of_modes(classes(), without=("store", "out"), repeatable=("features",)))
def train(
    store: Annotated[Path | None, typer.Argument(metavar="STORE", help="The store to train on.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory of the run, new unless --resume.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML or JSON with any of these keys; flags override it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT at its last checkpoint.")] = False,
    grown: Annotated[bool, typer.Option("--grown", help="With --resume: go on though the store has grown.")] = False,
    **flags: Any,
) -> None:
    """Train a model on a store; the results come into OUT."""
    given = {"store": store, "out": out, **flags}
    base: dict[str, Any] = {}
    if resume:
        where = out or (read_config(config).get("out") if config else None)
        saved = Path(where) / "config.json" if where else None
        base = read_config(saved) if saved and saved.is_file() else {}
    settings = load_config(config, given, base)
    if grown and not resume:
        raise ConfigError("--grown says how to go on with a run: give --resume too")

    from ooc.training.watchers import terminal_watcher

    merge_appended(settings.store, settings.memory)
    if isinstance(settings, TrainConfig):
        from ooc.training.node_loop import train as on_nodes

        summary = on_nodes(settings, resume=resume, watcher=terminal_watcher(), grown=grown)
    elif isinstance(settings, FullConfig):
        from ooc.training.full_run import train as exactly

        summary = exactly(settings, resume=resume, watcher=terminal_watcher(), grown=grown)
    else:
        from ooc.training.temporal_run import train as in_time

        summary = in_time(settings, resume=resume, watcher=terminal_watcher(), grown=grown)
    _print_summary(settings.out, summary)


@app.command()
@with_flags(flags_of_modes(classes(), without=("store", "out", "plan"), repeatable=("features",)))
def plan(
    store: Annotated[Path | None, typer.Argument(metavar="STORE", help="The store to train on.", show_default=False)] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML or JSON with any of these keys.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **flags: Any,
) -> None:
    """Predict what `ooc train` with the same flags would take: memory, time, bytes, and what holds it up.

    Without --mode all modes are tried shortly and compared, one is recommended, and that one is planned.
    """
    settings = load_config(config, {"store": store, **flags}, {"out": "run"})
    if isinstance(settings, FullConfig):
        _plan_full(settings, as_json)
        return
    if not isinstance(settings, TrainConfig):
        raise ConfigError(
            f"`ooc plan` predicts training on nodes, not mode {settings.mode}: try `ooc train ... --mode {settings.mode} "
            "--max-steps 200`, whose summary.json says what a batch took"
        )

    merge_appended(settings.store, settings.memory)
    choice = None
    if "mode" in settings.model_fields_set:
        from ooc.training.node_loop import plan as make

        made = make(settings)
    else:
        from ooc.training.compare_modes import compare

        choice, made = compare(settings)
    if as_json:
        chosen = {} if choice is None else {"choice": choice.asdict()}
        print(json.dumps({**made.asdict(), **chosen}, indent=2))
        return
    from rich.console import Console

    from ooc.report.plan_tables import compared, tables

    console = Console(highlight=False)
    if choice is not None:
        console.print(compared(choice))
        refused = [f"{each.mode} does not do: {each.fix}" for each in choice.candidates if each.fix is not None]
        command = f"  ooc train {settings.store} {choice.best.flags}"
        console.print("\n".join([*refused, choice.reason, command]), markup=False, soft_wrap=True)
    for table in tables(made):
        console.print(table)
    console.print(f"features are read: {made.reading}", markup=False)
    console.print(made.advice, markup=False)


def _plan_full(settings: FullConfig, as_json: bool) -> None:
    from rich.console import Console

    from ooc.report.full_tables import step_tables
    from ooc.training.full_run import plan as make

    merge_appended(settings.store, settings.memory)
    program, made = make(settings)
    if as_json:
        print(json.dumps(made.asdict(), indent=2))
        return
    for table in step_tables(program, made):
        Console(highlight=False).print(table)


def _print_summary(out: Path, summary: dict[str, Any]) -> None:
    from ooc.training.summary import score_lines

    print(*score_lines(summary), f"{out}: {summary['total_steps']} steps; `ooc report {out}` writes the page", sep="\n")


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]) -> None:
    """Write RUN/report.html: curves, stage times, memory and I/O on one page."""
    from ooc.report.page import write_report

    print(write_report(run))


@app.command()
def machine(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="A store, or anything on the disk to measure.")] = Path(),
    engine: Annotated[str, typer.Option("--engine", help="How rows are read: auto, uring, pread or gds.")] = "auto",
) -> None:
    """Measure what reads cost on a disk (a few seconds); kept, and used to plan reads from then on."""
    from stores.io.disk import calibrate

    print(calibrate(path, engine))


CheckpointOption = Annotated[Path, typer.Option("--checkpoint", metavar="RUN", help="Directory of a run of `ooc train`.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", help="Memory for the process, such as 2GB.")]
EngineOption = Annotated[str, typer.Option("--engine", help="How rows are read: auto, uring, pread or mmap.")]


@app.command()
def infer(
    store: StoreArgument,
    checkpoint: CheckpointOption,
    out: Annotated[Path, typer.Option("--out", help="The Parquet file to write: id, class, probabilities.")],
    memory: MemoryOption = None,
    engine: EngineOption = "auto",
) -> None:
    """Predict the class of every node, exactly, layer by layer in bounded memory; run it again after a crash to go on."""
    from ooc.training.infer import infer as run
    from ooc.training.watchers import StepBars
    from stores.sizes import format_bytes

    merge_appended(store, memory)
    with StepBars() as bars:
        made = run(store, checkpoint, out, memory, engine, lambda what, done, total: bars(what, done, total, "nodes"))
    moved = f"{format_bytes(made.bytes_read)} read, {format_bytes(made.bytes_written)} written"
    print(f"{made.path}: {made.rows:,} nodes, {made.columns} columns of the model; {moved}; features by {made.reading}")


@app.command()
def embed(
    store: StoreArgument,
    checkpoint: CheckpointOption,
    out: Annotated[Path, typer.Option("--out", help="The Zarr group to write; the embeddings are its array x.")],
    layer: Annotated[int | None, typer.Option("--layer", help="From 1 on; by default the last but one.")] = None,
    memory: MemoryOption = None,
    engine: EngineOption = "auto",
) -> None:
    """Write the output of a layer for every node as a Zarr array; run it again after a crash to go on."""
    from ooc.training.infer import embed as run
    from ooc.training.watchers import StepBars
    from stores.sizes import format_bytes

    merge_appended(store, memory)
    with StepBars() as bars:
        made = run(store, checkpoint, out, layer, memory, engine, lambda what, done, total: bars(what, done, total, "nodes"))
    moved = f"{format_bytes(made.bytes_read)} read, {format_bytes(made.bytes_written)} written"
    print(f"{made.path}/x: {made.rows:,} nodes x {made.columns}; {moved}; features by {made.reading}")
