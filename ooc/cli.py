"""The command line: a verb is one call. Heavy imports stand inside the verbs, so `ooc --help` is fast.

The flags of `ingest` and `train` are the fields of `IngestSpec` and `TrainConfig`, so a flag, a key of a configuration file
and an argument in Python cannot drift apart. What a user can act on is printed as one line, with exit code 2.
"""

import errno
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ooc.config import TrainConfig, load_config, read_config
from stores.errors import OocError

app = typer.Typer(
    name="ooc",
    help="Train graph neural networks on graphs larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="A store built by `ooc ingest`.")]


def _is(annotation: Any, *kinds: type) -> bool:
    """Whether an annotation is one of `kinds`, maybe within Annotated, a union or its parameters."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is(get_args(annotation)[0], *kinds)
    if origin in (Union, UnionType):
        return any(_is(part, *kinds) for part in get_args(annotation))
    return (origin or annotation) in kinds


def _metavar(annotation: Any) -> str | None:
    """What a flag's value is called in the help; None for a flag without one."""
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


def _flag(name: str, field: FieldInfo, repeat: bool) -> inspect.Parameter:
    """One keyword parameter with its typer.Option; None means that the flag was not given."""
    flag, help_text = f"--{name.replace('_', '-')}", field.description or ""
    default = field.get_default(call_default_factory=True)
    if default not in (None, [], {}, False) and not field.is_required():
        help_text += f" [{','.join(map(str, default)) if isinstance(default, list | tuple) else default}]"
    annotation: Any = list[str] | None if repeat else str | None
    if _is(field.annotation, bool):
        flag, annotation = f"{flag}/--no-{name.replace('_', '-')}", bool | None
    option = typer.Option(flag, help=help_text, show_default=False, metavar=_metavar(field.annotation))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option])


def flags_of(model: type[BaseModel], without: Sequence[str] = (), repeatable: Sequence[str] = ()) -> Callable[..., Any]:
    """A decorator: a function `f(..., **flags)` gets a flag for every field of `model` that is not in `without`.

    repeatable: the fields whose flag may be given several times; all others take one text, which `model` parses.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        flags = [_flag(name, f, name in repeatable) for name, f in model.model_fields.items() if name not in without]
        function.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
        return function

    return decorate


@app.command()
def info(
    store: StoreArgument,
    id: Annotated[str | None, typer.Option("--id", help="Look up the row of an external id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a store holds, or which row an external id has."""
    if id is not None:
        from stores.dataset import Dataset

        with Dataset.open(store) as dataset:
            print(dataset.row(id))
        return
    from stores.info import describe

    found = describe(store)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value if isinstance(value, str) else json.dumps(value, default=str)}")


@app.command()
def verify(store: StoreArgument) -> None:
    """Check every chunk of a store against its checksum; exit code 2 where one is damaged."""
    from stores.integrity import verify as check

    damages = check(store)
    for damage in damages:
        print(f"ooc: error: {damage}", file=sys.stderr)
    if damages:
        raise typer.Exit(2)
    print(f"{store}: whole")


@app.command()
@flags_of(TrainConfig, without=("store", "out"), repeatable=("features",))
def train(
    store: Annotated[Path | None, typer.Argument(metavar="STORE", help="The store to train on.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory of the run, new unless --resume.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML or JSON with any of these keys; flags override it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT at its last checkpoint.")] = False,
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

    from ooc.progress import terminal_watcher
    from ooc.train import train as run

    summary = run(settings, resume=resume, watcher=terminal_watcher())
    _print_summary(settings.out, summary)


def _print_summary(out: Path, summary: dict[str, Any]) -> None:
    for split, scores in summary["metrics"].items():
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if value is not None)
        print(f"{split}: {shown}")
    print(f"{out}: {summary['total_steps']} steps; `ooc report {out}` writes the page")


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]) -> None:
    """Write RUN/report.html: curves, stage times, memory and I/O on one page."""
    from ooc.report import write_report

    print(write_report(run))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for what a user can act on, 130 after Ctrl-C."""
    try:
        code = app(list(arguments) if arguments is not None else None, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _fail(
            "interrupted; what was finished is kept, and running it again (train: with --resume) goes on from there", 130
        )
    except BrokenPipeError:  # `ooc info STORE | head`
        sys.stderr.close()
        return 0
    except OocError as error:
        return _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "; free some space there" if error.errno == errno.ENOSPC else ""
        return _fail(f"{where}{error.strerror or error}{hint}")
    except MemoryError as error:
        return _fail(
            f"out of memory{f' ({error})' if str(error) else ''}: give --memory, or a smaller --batch-size or --fanout"
        )
    except Exception as error:
        code = _usage(error)
        if code is None:
            raise
        return code


def _usage(error: Exception) -> int | None:
    """The exit code of typer's own exceptions (whose classes moved between versions), None for any other."""
    kind = type(error).__name__
    if kind == "Exit":
        return int(getattr(error, "exit_code", 0))
    if kind == "Abort":
        return _fail("interrupted", 130)
    if kind == "OutOfMemoryError":  # torch's, for CUDA
        return _fail(f"out of CUDA memory: use a smaller --batch-size or --fanout ({str(error).split('. ')[0]})")
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        text = str(error.format_message())
        return _fail(f"{text} (see `{context.command_path} --help`)" if context is not None and text else text) if text else 2
    return None


def _fail(message: str, code: int = 2) -> int:
    print(f"ooc: error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
