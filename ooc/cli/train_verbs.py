"""The verbs that train, plan, report and predict."""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ooc.cli.app import RUNS, CacheDirOption, CacheOption, StoreArgument, app, merge_appended
from ooc.cli.flags import flags_of_modes, with_flags
from ooc.cli.help import Verb, verb
from ooc.cli.interrupted import RUN_AGAIN, after_ctrl_c, say_results
from ooc.cli.messages import name_flags
from ooc.config import topics
from ooc.config.modes import applies, choice_of, classes, name_of, settings_of, suggested
from ooc.config.techniques import TECHNIQUES, compared_in
from ooc.stores.io.remote.url import store_path

if TYPE_CHECKING:
    from ooc.training.node_rows import WrittenRows

TRAIN = flags_of_modes(classes(), without=("store", "out"), repeatable=("features", "fanout", "eval_fanout"))
PLAN = [flag for flag in TRAIN if flag.name != "plan"]
TrainedStore = Annotated[
    Path | None, typer.Argument(metavar="STORE", help="The store to train on.", show_default=False, parser=store_path)
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML or JSON with any of these keys; flags override it.")
]
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
    config: ConfigOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT from its last checkpoint.")] = False,
    grown: Annotated[bool, typer.Option("--grown", help="With --resume: continue although the store has grown.")] = False,
    allow_code: AllowCode = False,
    **flags: Any,
) -> None:
    """Train a model on a store and write the results to OUT."""
    from ooc.config.beforehand import check_run

    settings = settings_of(config, {"store": store, "out": out, **flags}, resume, allow_code)
    check_run(settings, starts=not resume)
    from ooc.training.watchers import terminal_watcher

    merge_appended(settings.store, settings.memory, settings.cache_dir, settings.cache)
    from ooc.training.loop import train as run
    from ooc.training.summary import score_lines

    def continuing() -> str:
        begun = settings.out.exists()
        return f"`ooc train --out {settings.out} --resume` continues" if begun else "nothing was trained yet"

    with after_ctrl_c(continuing):
        watcher = terminal_watcher(names_run=out is None and not resume)
        summary = run(settings, resume=resume, watcher=watcher, grown=grown)
    out = summary["config"]["out"]
    count = summary["total_steps"]
    steps = f"{out}: {count} step{'s' * (count != 1)}; `ooc report {out}` writes a report"
    say_results(*map(name_flags, score_lines(summary)), steps)


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
        typer.Option("--mode", metavar="MODE", help="The mode of `ooc train`; by default one for the store's labels or times."),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="What is predicted: node, edge, graph or link.")
    ] = None,
    cache_dir: CacheDirOption = None,
    cache: CacheOption = None,
) -> None:
    """Print a configuration with comments, for `ooc train --config`."""
    from ooc.cli.template import template
    from ooc.config.beforehand import labelled
    from ooc.config.nodes import NodeConfig
    from ooc.stores.metadata import arrays_of, read_manifest
    from ooc.stores.remote.mirror import opened

    with opened(store, cache_dir, cache) as path:
        manifest = read_manifest(arrays_of(path))
    typed, learnable = manifest.is_hetero, labelled(manifest)
    given_none = task is None and mode is None
    chosen = suggested(learnable, manifest.time is not None) if given_none else choice_of({"mode": mode, "task": task})
    own = learnable.get(chosen[0], {})
    kinds = ", ".join(f"{name}: {kind}" if name else kind for name, (kind, _) in own.items())
    splits = ", ".join(dict.fromkeys(split for _, names in own.values() for split in names)) or "none"
    about = f"{store}: {manifest.num_nodes:,} nodes, {manifest.num_edges:,} edges; task {kinds or 'none'}; splits {splits}"
    trains_gnn = issubclass(classes()[name_of(*chosen)], NodeConfig)
    of_types = typed and trains_gnn and any(applies(each, name_of(*chosen)) for each in ("node_type", "edge_type"))
    given = {"task": chosen[0], **({"model": "rsage"} if of_types else {})}
    print(template(store, name_of(*chosen), {flag.name: flag for flag in TRAIN}, about, given), end="")


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
    config: ConfigOption = None,
    nproc: Annotated[int, typer.Option("--nproc", help="Processes that would train together, under torchrun.")] = 1,
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", help="With --nproc: bytes a second that a process sends, such as 1GB.")
    ] = "1GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **flags: Any,
) -> None:
    """Predict memory, time and bottleneck of `ooc train` with the same options.

    Without --mode, modes sampled, cluster, saint and history are tried briefly, and the recommended one is planned.
    """
    from ooc.config.beforehand import check_run

    settings = settings_of(config, {"store": store, **flags})
    check_run(settings, starts=False)
    from ooc.training.registry import mode_of

    mode_of(settings).planned(settings)  # a mode without a plan is refused before the store is merged
    merge_appended(settings.store, settings.memory, settings.cache_dir, settings.cache)
    from ooc.training.verbs import plan_of

    result = plan_of(settings, nproc, bandwidth, note=lambda text: print(text, file=sys.stderr, flush=True))
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
    advised = any(each.name == "advice" for each in fields(cast(Any, result)))
    for each in tables(replace(cast(Any, result), advice=name_flags(cast(Any, result).advice)) if advised else result):
        console.print(each)


@app.command(
    cls=verb(PLAN, topics.TRAIN),
    rich_help_panel=RUNS,
    epilog="""
    ooc compare tolokers.ooc --out runs/compare --fanout 10,10
    ooc compare papers.ooc --techniques labor,history --memory 4GB --epochs 3
    """,
)
@with_flags(PLAN, topics.TRAIN)
def compare(
    store: TrainedStore = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Directory of all runs; by default runs/compare-STORE.")
    ] = None,
    config: ConfigOption = None,
    techniques: Annotated[
        str | None, typer.Option("--techniques", metavar="NAMES", help=f"Of {', '.join(TECHNIQUES)}; by default all.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each technique.")] = 1,
    **flags: Any,
) -> None:
    """Compare techniques against memory, each in a short training.

    Every technique trains the same model from the same settings, 10 epochs unless --epochs says, in a process of its own.
    Writes OUT/comparison.html with a chart, and OUT/comparison.json. What is finished in OUT with the same data is kept.
    """
    settings = settings_of(config, {"store": store, "out": out or compared_in(store), **flags})
    merge_appended(settings.store, settings.memory, settings.cache_dir, settings.cache)
    from rich.console import Console

    from ooc.report.comparison import comparison_table, refusals, write_comparison
    from ooc.training.comparison import compare as run
    from ooc.training.watchers import StepBars

    with after_ctrl_c(RUN_AGAIN), StepBars() as bars:
        trials = run(settings, techniques=techniques, seeds=seeds, progress=bars)
    console = Console(highlight=False)
    page = write_comparison(settings.out, settings.store, trials, seeds)
    console.print(comparison_table(trials, console.width))
    say_results(*map(name_flags, refusals(trials)), f"{page}")


@app.command(cls=Verb, rich_help_panel=RUNS, epilog="ooc report runs/sage")
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]) -> None:
    """Write RUN/report.html: curves, stage times, memory and I/O."""
    from ooc.config.beforehand import check_is_run

    check_is_run(run)
    from ooc.report.page import write_report

    say_results(f"{write_report(run)}")


CheckpointOption = Annotated[Path, typer.Option("--checkpoint", metavar="RUN", help="Directory of a run of `ooc train`.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", help="Memory for the process, such as 2GB.")]
EngineOption = Annotated[str, typer.Option("--engine", help="How rows are read: auto, uring, pread or mmap.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Where the model computes: auto, cpu or cuda.")]
NodeTypeOption = Annotated[
    str | None,
    typer.Option("--node-type", metavar="TYPE", help="Node type of a heterogeneous store; by default the one learned."),
]
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
        Path,
        typer.Option(
            "--out",
            metavar="PATH",
            help="The Parquet or CSV file to write: id, class, probabilities (of a regression: id, prediction).",
        ),
    ],
    top: Annotated[
        int | None,
        typer.Option("--top", help="Answers to keep for each source, or source and relation (mode table, lightgcn)."),
    ] = None,
    node_type: NodeTypeOption = None,
    memory: MemoryOption = None,
    engine: EngineOption = "auto",
    device: DeviceOption = "auto",
    model: ModelOption = None,
    allow_code: AllowCode = False,
    verify_reads: VerifyReadsOption = False,
    cache_dir: CacheDirOption = None,
    cache: CacheOption = None,
) -> None:
    """Predict the class, or the number, of every node, exactly, in bounded memory.

    The model is computed layer by layer. After a crash, run the command again to continue. By a run of whole graphs (--task
    graph), of every graph, and of labels of edges (--task edge), of every edge, by neighborhoods sampled as for its scores;
    these begin again after a crash.

    By a run of mode table or lightgcn, the --top best targets of every source, or of every source and relation that the store
    has, without the links that it has: source, relation, target, rank, score.
    """
    options: dict[str, Any] = {
        "top": top,
        "model_class": model,
        "allow_code": allow_code,
        "verify_reads": verify_reads,
        "device": device,
    }
    options |= {"node_type": node_type, "cache_dir": cache_dir, "cache": cache}
    result = _layer_by_layer("infer", checkpoint, store, out, memory=memory, engine=engine, **options)
    kind, each = ("answer", " each") if top is not None else ("model output", "")
    outputs = f"{result.columns} {kind}{'s' * (result.columns != 1)}{each}"
    say_results(f"{result.path}: {result.rows:,} {result.of}, {outputs}; {result.moved}")


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
    node_type: NodeTypeOption = None,
    memory: MemoryOption = None,
    engine: EngineOption = "auto",
    device: DeviceOption = "auto",
    model: ModelOption = None,
    allow_code: AllowCode = False,
    verify_reads: VerifyReadsOption = False,
    cache_dir: CacheDirOption = None,
    cache: CacheOption = None,
) -> None:
    """Write a layer's output for every node as a Zarr array.

    The model is computed layer by layer, in bounded memory. After a crash, run the command again to continue.
    """
    options: dict[str, Any] = {"model_class": model, "allow_code": allow_code, "verify_reads": verify_reads, "device": device}
    options |= {"layer": layer, "node_type": node_type, "cache_dir": cache_dir, "cache": cache}
    result = _layer_by_layer("embed", checkpoint, store, out, memory=memory, engine=engine, **options)
    say_results(f"{result.path}/x: {result.rows:,} nodes x {result.columns}; {result.moved}")


@app.command(
    cls=Verb, rich_help_panel=RUNS, epilog="ooc rank shop.ooc --checkpoint runs/links --out best.parquet --k 20 --memory 2GB"
)
def rank(
    store: StoreArgument,
    checkpoint: CheckpointOption,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="PATH", help="The Parquet or CSV file to write: source, target, rank, score."),
    ],
    k: Annotated[int, typer.Option("--k", help="Destinations to keep for each source.")] = 10,
    sources: Annotated[
        str | None, typer.Option("--sources", metavar="SPLIT", help="Split of the nodes to rank for; by default all.")
    ] = None,
    memory: MemoryOption = None,
    engine: EngineOption = "auto",
    device: DeviceOption = "auto",
    model: ModelOption = None,
    allow_code: AllowCode = False,
    verify_reads: VerifyReadsOption = False,
    cache_dir: CacheDirOption = None,
    cache: CacheOption = None,
) -> None:
    """Rank all destinations for every source, by a run of links (--task link).

    The best of each source are written, without the links that the store has. Scores are computed in blocks that fit the
    memory. After a crash, run the command again to continue.
    """
    options: dict[str, Any] = {"model_class": model, "allow_code": allow_code, "verify_reads": verify_reads}
    options |= {"device": device, "k": k, "sources": sources, "cache_dir": cache_dir, "cache": cache}
    result = _layer_by_layer("rank", checkpoint, store, out, memory=memory, engine=engine, **options)
    say_results(f"{result.path}: the best {result.columns} of {result.rows:,} sources; {result.moved}")


def _layer_by_layer(verb: str, run: Path, store: Path, out: Path, **settings: Any) -> "WrittenRows":
    """Carry out a verb that computes outputs of a run, with progress; by all processes that torchrun has started."""
    from ooc.config.beforehand import check_outputs

    check_outputs(run, store)
    import ooc
    from ooc.training.watchers import StepBars

    merge_appended(store, settings["memory"], settings["cache_dir"], settings["cache"])
    with after_ctrl_c(RUN_AGAIN), StepBars() as bars:
        units = {"graphs": "graphs", "edges": "edges", "ranking": "sources"}
        settings["progress"] = lambda what, done, total: bars(what, done, total, units.get(what, "nodes"))
        return cast("WrittenRows", getattr(ooc, verb)(run, store, out, all_ranks=True, **settings))
