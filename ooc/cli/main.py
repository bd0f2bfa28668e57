"""Entry point of the command line: runs a verb of `ooc.cli.commands`; user errors become one line and exit code 2.

It imports next to nothing before Ctrl-C is handled, because `ooc train` spends its first second importing.
"""

import errno
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ooc.cli.interrupted import Interrupted, writes_here
from ooc.stores.errors import OocError, OocWarning

INTERRUPTED = 130
"""exit code after Ctrl-C, as in shells; some versions of typer return it themselves"""


@contextmanager
def interrupts_in_one_line() -> Iterator[None]:
    """End the process at once on Ctrl-C during an import, where the exception could surface as another one or a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(_interrupted())
        at = at.f_back
    signal.default_int_handler(number, frame)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for user errors, 130 after Ctrl-C."""
    if sys.stderr is None:  # closed by the caller: `2>&-`
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    with interrupts_in_one_line(), _warnings_in_one_line():
        code = _outcome(arguments)
    if arguments is None and code == 0 and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends, and what it did stands
    return code


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print our warnings without a line of code, which is none of the user's."""
    before = warnings.formatwarning

    def in_one_line(message: Any, category: type[Warning], *where: Any, **line: Any) -> str:
        if issubclass(category, OocWarning):
            return _line("warning", str(message))
        return before(message, category, *where, **line)

    warnings.formatwarning = in_one_line
    try:
        yield
    finally:
        warnings.formatwarning = before


def _outcome(arguments: Sequence[str] | None) -> int:
    try:
        # Waiting torch threads would spin on the cores the loaders need (measured: a quarter of all cycles).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from ooc.cli.commands import app

        code = app(list(arguments) if arguments is not None else None, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe is handled, and not at interpreter exit
        return _interrupted() if code == INTERRUPTED else int(code or 0)
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # `ooc info STORE | head`
        return _unread()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # as raised by typer
            return _unread()
        raise
    except Interrupted as error:
        return _fail(str(error), INTERRUPTED) if writes_here() else INTERRUPTED
    except OocError as error:
        if type(error).__name__ == "RankLost":  # that rank says why
            return 2
        from ooc.cli.messages import name_flags

        return _fail(name_flags(str(error)))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "; free some space there" if error.errno == errno.ENOSPC else ""
        return _fail(f"{where}{error.strerror or error}{hint}")
    except MemoryError as error:
        found = f" ({error})" if str(error) else ""
        return _fail(f"out of memory{found}: set --memory, or reduce --batch-size, --fanout or --hidden")
    except Exception as error:
        code = _usage(error)
        if code is None:
            raise
        return code


def _usage(error: Exception) -> int | None:
    """The exit code of typer's own exceptions (whose classes moved between versions), None for others."""
    kind = type(error).__name__
    if kind == "Exit":
        code = int(getattr(error, "exit_code", 0))
        return _interrupted() if code == INTERRUPTED else code
    if kind == "Abort":
        return _interrupted()
    if kind == "OutOfMemoryError":  # torch's, for CUDA
        from ooc.runtime.device_full import device_full

        return _fail(
            device_full(error, None, "it more, by ending what else uses the GPU, or compute on the CPU with --device cpu")
        )
    if kind == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]  # the help, of many lines
        return 2
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        text = _unknown_option(error) if kind == "NoSuchOption" else str(error.format_message())
        return _fail(f"{text} (see `{context.command_path} --help`)" if context is not None and text else text) if text else 2
    return None


def _unknown_option(error: Any) -> str:
    """Name an option that a command does not have, and the one that may be meant; typer's own suggestions are often far off."""
    from ooc.stores.closest import closest

    options = {name for each in error.ctx.command.params for name in [*each.opts, *each.secondary_opts]} if error.ctx else set()
    meant = closest(error.option_name.lstrip("-"), [name.lstrip("-") for name in options])
    return f"{error.message}; did you mean --{meant}?" if meant else str(error.message)


def _unread() -> int:
    """Discard buffered output after stdout was closed, without an error at interpreter exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - in place of typer's wrapper around the closed pipe
    return 0


def _interrupted() -> int:
    return _fail("interrupted", INTERRUPTED)


def _fail(message: str, code: int = 2) -> int:
    print(_line("error", message), end="", file=sys.stderr, flush=True)
    _tell_torchrun(_line("error", message).strip())
    return code


def _tell_torchrun(line: str) -> None:
    """Give torchrun, where it has started this process, the line for its own report of which process has failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with suppress(OSError), open(path, "w") as file:
            file.write(f'{{"message": {{"message": {json.dumps(line)}, "extraInfo": {{"timestamp": "{int(time.time())}"}}}}}}')


def _line(kind: str, message: str) -> str:
    return f"ooc: {kind}: {' '.join(message.split())}\n"


if __name__ == "__main__":
    sys.exit(main())
