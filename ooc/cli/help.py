"""The help of the command line: options by topic, the common ones first, and examples."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup

from ooc.cli.flags import Flag
from ooc.config.modes import applies, choice_of, classes, name_of
from ooc.config.topics import Topics, by_topic, common
from ooc.stores.errors import ConfigError

ALL = "--help-all"
_OWN = "Options"
"""topic of options that no table names"""
_SUMMARY = 78
"""most characters of what the list of commands says of one"""


class Verb(TyperCommand):
    """A command whose help lists options by topic; its epilog holds examples, one a line."""

    flags: ClassVar[Mapping[str, Flag]] = {}
    topics: ClassVar[Topics] = {}
    common: ClassVar[frozenset[str] | None] = None
    """names of what `--help` shows, beside a mode's own options; None for everything"""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the help of all options where it is asked for, and that of a mode behind `--mode` or `--task`."""
        ctx.meta["mode"] = _mode_in(args) if any(flag.modes for flag in self.flags.values()) else None
        if self.common is not None and ALL in args:
            ctx.meta["all"] = True
            print(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options of each topic."""
        mode = ctx.meta.get("mode")
        rows = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx)}
        rows |= {name: _row(flag, mode) for name, flag in self.flags.items()}
        left_out = {"allow_code"} if mode and not applies("model_args", mode) else set()  # no class of one's own
        rows = {name: row for name, row in rows.items() if row is not None and name not in left_out}
        everything = self.common is None or "all" in ctx.meta
        often = classes()[mode].often if mode else ()
        chosen = {*(self.common or ()), *often, *(name for name, flag in self.flags.items() if _is_own(flag, mode))}
        shown = [name for name in rows if everything or name in chosen or name not in self.flags]
        arguments = [each.name for each in self.params if each.param_type_name == "argument"]
        sections = {"Arguments": arguments} | by_topic([name for name in shown if name not in arguments], self.topics, _OWN)
        for topic, names in sections.items():
            if names:
                with formatter.section(topic):
                    formatter.write_dl([rows[name] for name in names])
        if left := len(rows) - len(shown):
            formatter.write_paragraph()
            formatter.write_text(f"{left} more options: {ctx.command_path} {ALL}")
            if any(flag.modes for flag in self.flags.values()):
                formatter.write_text(f"Options of one mode: {ctx.command_path} --mode history --help")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they stand."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in inspect.cleandoc(self.epilog).splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Verbs(TyperGroup):
    """The list of commands by topic: that of a command is its `rich_help_panel`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for every topic, in the order of their first commands."""
        topics: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            topic = command.rich_help_panel if isinstance(command.rich_help_panel, str) else "Commands"
            topics.setdefault(topic, []).append((name, command.get_short_help_str(_SUMMARY)))
        for topic, rows in topics.items():
            with formatter.section(topic):
                formatter.write_dl(rows)


def verb(flags: Iterable[Flag], topics: Topics, short: bool = True) -> type[Verb]:
    """Return the class of a command with these flags, for `app.command(cls=...)`; short: whether its help has two lengths."""
    return type(
        "Verb",
        (Verb,),
        {"flags": {flag.name: flag for flag in flags}, "topics": topics, "common": common(topics) if short else None},
    )


def _is_own(flag: Flag, mode: str | None) -> bool:
    """Whether a flag is one of a mode's that the default mode does not have."""
    return mode in flag.modes and next(iter(classes())) not in flag.modes


def _row(flag: Flag, mode: str | None) -> tuple[str, str] | None:
    """A flag's line in the help; in that of a mode None where it does not apply."""
    if not mode or not flag.modes:
        return flag.option, flag.text
    return (flag.modes[mode].option, flag.modes[mode].text) if mode in flag.modes else None


def _mode_in(args: Sequence[str]) -> str | None:
    """The mode that `--mode` and `--task` among arguments ask for, by its name in `classes`; None without them."""
    given = {name: _value_of(f"--{name}", args) for name in ("mode", "task")}
    try:
        return name_of(*choice_of(given)) if any(given.values()) else None
    except ConfigError:  # said when the command runs
        return None


def _value_of(option: str, args: Sequence[str]) -> str | None:
    """The value of an option among arguments."""
    for number, word in enumerate(args):
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
        if word == option and args[number + 1 :]:
            return args[number + 1]
    return None
