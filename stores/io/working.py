"""Working directories, and what is removed of them when: that of an ingest, `<out>.partial`, and those that go with a block."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def scratch_folder(above: Path | None, name: str) -> Iterator[Path]:
    """Yield a new folder `.NAME-*.tmp` in `above` (None: the system's temporary folder), which goes with the block.

    Folders of that name that killed processes left there are removed first: nobody holds their lock.

    >>> with scratch_folder(run.parent, "ooc-plan") as folder: ...
    """
    top = Path(tempfile.gettempdir()) if above is None else above
    for left in top.glob(f".{name}-*.tmp"):
        _remove_unlocked(left)
    folder, lock = _new_folder(top, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _new_folder(top: Path, name: str) -> tuple[Path, int]:
    """A new folder and the descriptor that locks it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=".tmp", dir=top))
        with suppress(FileNotFoundError):  # another process took it for one that was left
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_unlocked(folder: Path) -> None:
    with suppress(OSError):  # in use, another user's, or gone
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)
