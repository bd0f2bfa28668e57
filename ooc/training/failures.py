"""A last line for a failure that keeps its traceback, such as one in a model of the user's: where, what, in which batch."""

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ooc.stores.errors import OocError

_ENDS_IN_ONE_LINE = (OocError, OSError, MemoryError, torch.OutOfMemoryError)
"""on the command line, without a traceback"""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OWN = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")


@contextmanager
def failures_placed(during: Callable[[], str]) -> Iterator[None]:
    """Add to an exception that is not for one line a note with the file and line of the user's code, and what went on.

    >>> with failures_placed(lambda: "mode sampled, epoch 0, step 3"): ...
    """
    try:
        yield
    except _ENDS_IN_ONE_LINE:
        raise
    except Exception as error:
        words = next(iter(str(error).splitlines()), "")
        error.add_note(f"{_place(error)}: {type(error).__name__}: {words} ({during()})")
        raise


def _place(error: Exception) -> str:
    """FILE:LINE of the innermost call in the user's code, or of the innermost one at all where none is."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if _is_users(frame.filename)]
    where = (users or frames)[-1]
    path = Path(where.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{where.lineno}"


def _is_users(file: str) -> bool:
    """Whether code in a file is neither of `ooc` nor of Python or what is installed beside it."""
    shipped = file.startswith((_OWN + os.sep, _STANDARD + os.sep)) or _INSTALLED & {*Path(file).parts}
    return os.path.isabs(file) and not shipped
