"""The working directory of an ingest, `<out>.partial`: what it is made of, and what is removed of it when."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ooc.stores.io.atomic import partial_path

LOCK, JOURNAL = "ooc-ingest.lock", "steps.json"
STORE, STAGE, SPILL = "store", "stage", "spill"


def remove(path: Path) -> None:
    """Remove a file or a directory if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear(root: Path) -> None:
    """Remove what ingests make in the directory `root`, except the lock; the journal first, so that it never lists steps
    without outputs."""
    remove(root / JOURNAL)
    for path in (*root.glob(f".{JOURNAL}.*.tmp"), *(root / name for name in (SPILL, STAGE, STORE))):
        remove(path)


def remove_emptied(root: Path) -> None:
    """Remove a cleared directory and its lock; what is not an ingest's stays."""
    remove(root / LOCK)
    root.rmdir()


def tidy(out: Path) -> None:
    """Remove what an ingest left beside the store `out` if it was killed after it had published it.

    A directory that holds a store, or that an ingest uses, is left alone, and so is one that cannot be removed.
    """
    if not out.name:  # "." or "/", which nothing can stand beside
        return
    root = partial_path(out)
    if not root.is_dir() or (root / STORE).exists():
        return
    with suppress(OSError):
        if not os.listdir(root):
            root.rmdir()
            return
        lock = os.open(root / LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clear(root)
            remove_emptied(root)
        finally:
            os.close(lock)
