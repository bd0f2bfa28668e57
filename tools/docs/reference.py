"""Writes the reference pages of the command line and of the Python API from the code; Sphinx calls it at every build.

    python -m tools.docs.reference docs/reference

`cli.md` has every verb with its flags as typer knows them; `api.md` names what `ooc.__all__` names, for autodoc.
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

import ooc

_CLI = """# Command line

Every verb prints its help with `--help`. A user error is one line on stderr and exit code 2. The flags of `train` and `plan`
are also the keys of a TOML or JSON file (`--config run.toml`), with underscores for dashes.
"""
_API = """# Python API

Everything on this page is imported from `ooc`. Importing it is light: what needs torch or numba is imported on first use.
"""
_OTHERS = "Module, Data, dict"
"""classes of other packages, whose methods this page does not list"""
_KINDS = (("Functions", inspect.isroutine), ("Classes", inspect.isclass), ("Values", lambda value: True))


def write_reference(folder: Path) -> None:
    """Write `cli.md` and `api.md` into a folder, each only if it changed, so that Sphinx builds no page twice."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("cli.md", cli_page()), ("api.md", api_page())):
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def cli_page() -> str:
    """The page of the command line, in Markdown."""
    from ooc.cli.commands import app

    return "\n".join([_CLI, *_command(typer.main.get_command(app), "ooc", 1)])


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    """A verb and those below it."""
    inner = getattr(command, "commands", {})
    if level > 1:
        yield f"{'#' * level} {name}\n"
        yield f"{_plain(command.help or '')}\n"
    if not inner:
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join([name, *(_argument(each) for each in arguments), "[OPTIONS]"])
        yield f"```text\n{usage}\n```\n"
        if command.epilog:  # examples, one a line
            yield f"```text\n{inspect.cleandoc(command.epilog)}\n```\n"
        yield from _options([p for p in command.params if p.param_type_name != "argument"], arguments)
    for verb, below in inner.items():
        yield from _command(below, f"{name} {verb}", level + 1)


def _argument(parameter: Any) -> str:
    text = (parameter.metavar or parameter.name.upper()).strip("[]")
    return text if parameter.required else f"[{text}]"


def _options(options: list[Any], arguments: list[Any]) -> Iterator[str]:
    """Arguments and options as definition lists, one a panel of the help."""
    for each in arguments:
        yield f"`{_argument(each)}`\n: {_plain(each.help or '')}\n"
    panels: dict[str, list[Any]] = {}
    for each in options:
        panels.setdefault(getattr(each, "rich_help_panel", None) or "", []).append(each)
    for panel, members in panels.items():
        if panel:
            yield f"**{panel}**\n"
        for each in members:
            value = "" if each.is_flag else f" {each.metavar or each.name.upper()}"
            names = ", ".join([*each.opts, *each.secondary_opts])
            yield f"`{names}{value}`\n: {_plain(each.help or '')}\n"


def _plain(text: str) -> str:
    """A help text as Markdown: no markup is meant in it but code in backticks and paragraphs."""
    special = str.maketrans({each: f"\\{each}" for each in "*_[]<>$"})
    lines = (line.strip() for line in inspect.cleandoc(text).replace("\b", "").replace("\f", "").splitlines())
    parts = "\n".join(lines).split("`")
    return "`".join(part if k % 2 else part.translate(special) for k, part in enumerate(parts)).replace("\n", "\n  ")


def api_page() -> str:
    """The page of the Python API: an autodoc directive for each public name, by kind."""
    rest, lines = sorted(set(ooc.__all__)), [_API]
    for title, is_kind in _KINDS:
        names = [name for name in rest if is_kind(getattr(ooc, name))]
        rest = [name for name in rest if name not in names]
        if names:
            lines.append(f"## {title}\n")
            lines += [_directive(name) for name in names]
    return "\n".join(lines)


def _directive(name: str) -> str:
    value, after = getattr(ooc, name), ""
    if inspect.isclass(value) and issubclass(value, BaseModel):
        body = [f".. autoclass:: ooc.{name}(**settings)"]  # annotations of its fields are for pydantic, not for people
        after = "\n".join(_fields(value))
    elif inspect.isclass(value):
        members = [] if issubclass(value, Exception) else [":members:", f":inherited-members: {_OTHERS}"]
        body = [f".. autoclass:: ooc.{name}", *(f"   {each}" for each in [*members, ":show-inheritance:"])]
    elif inspect.isroutine(value):
        body = [f".. autofunction:: ooc.{name}"]
    else:
        body = [f".. autodata:: ooc.{name}", "   :no-value:"]
    return f"### {name}\n\n```{{eval-rst}}\n" + "\n".join(body) + f"\n```\n\n{after}"


def _fields(model: type[BaseModel]) -> Iterator[str]:
    """The settings of a configuration as a definition list."""
    for name, field in model.model_fields.items():
        default = "" if field.is_required() else f" = {field.get_default(call_default_factory=True)!r}"
        yield f"`{name}{default}`\n: {_plain(field.description or name)}\n"


if __name__ == "__main__":
    write_reference(Path(sys.argv[1]))
