"""The command line itself, and what its verbs share."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ooc.cli.help import Verbs
from ooc.stores.io.remote.url import StoreUrl, store_path

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


StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="A store built by `ooc ingest`.", parser=store_path)]
CacheDirOption = Annotated[
    Path | None, typer.Option("--cache-dir", metavar="PATH", help="Directory that keeps what was read of a store at a URL.")
]
CacheOption = Annotated[str | None, typer.Option("--cache", metavar="SIZE", help="Size of that cache, such as 200GB.")]


def merge_appended(store: Path, memory: str | None, cache_dir: Path | str | None = None, cache: str | None = None) -> None:
    """Merge appended data, or fetch the topology from a URL, with progress bars on a terminal; elsewhere that is silent."""
    if not sys.stderr.isatty():
        return
    if isinstance(store, StoreUrl):
        from ooc.stores.dataset import Dataset
        from ooc.training.watchers import StepBars

        with StepBars() as bars:
            Dataset.open(store, memory, progress=bars, cache_dir=cache_dir, cache=cache).close()
        return
    from ooc.stores.growth.place import open_place
    from ooc.stores.sizes import parse_bytes
    from ooc.training.watchers import StepBars

    with StepBars() as bars:
        open_place(store, None if memory is None else parse_bytes(memory, "memory"), bars).close()
