"""The verbs beside stores and runs: the machine, and examples."""

from pathlib import Path
from typing import Annotated

import typer

from ooc.cli.app import OTHERS, app
from ooc.cli.help import Verb
from ooc.stores.errors import ConfigError


@app.command(cls=Verb, rich_help_panel=OTHERS, epilog="ooc machine papers.ooc")
def machine(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="A store, or any path on the disk to measure.")] = Path(),
    engine: Annotated[str, typer.Option("--engine", help="How rows are read: auto, uring, pread or gds.")] = "auto",
) -> None:
    """Measure reads from a disk, and what reaches a GPU, in a few seconds.

    The result is saved and used to plan reads. On a GPU: the rate of copies to it, of reads into its memory through page-locked
    memory and by kvikio, and whether GPUDirect is active.
    """
    from ooc.stores.io.disk import calibrate
    from ooc.stores.io.engines.gds import no_gpu

    print(calibrate(path, engine))
    if (why_not := no_gpu()) is not None:
        print(f"GPU: none, {why_not}")
        return
    from ooc.runtime.device_reads import describe_gpu

    print(describe_gpu(path, engine))


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
