"""Warnings that name the user's line."""

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line of the stack that is outside of `ooc`.

    >>> warn_user("prefetch_factor changes nothing")
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
