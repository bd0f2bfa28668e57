"""Versions of a store's arrays: which one is current, and who uses which.

A store's `zarr.json` names the folder of its arrays: the store itself or, after `compact`, one of `versions/`. Publishing a
version replaces that small file, which is atomic on every file system; a resolved path means the same files for as long as it
is used. Users of a folder hold a shared lock on it; it is removed by the first process that finds it outdated and gets an
exclusive lock.
"""

import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ooc.stores import manifest as names
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import disk_errors, remove_tree, removed_path
from ooc.stores.io.working import tidy
from ooc.stores.manifest import VERSIONS, arrays_of, version_of

_TOP = ("graph", names.EVENTS, "node", "edge", names.CHECKSUMS, names.IDS)
"""what a store without versions has at its top level"""
AGAIN_SECONDS = 0.001
"""delay before retrying a folder that another process removes or checks"""


class Hold:
    """A shared lock on a folder that prevents its removal, until `close`. Needs no write access."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder. Raises FileNotFoundError if it does not exist, BlockingIOError if it is being removed."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise
        except OSError:  # a file system without locks: nothing is removed
            return
        try:
            there = os.path.samestat(os.fstat(fd), os.stat(folder))
        except FileNotFoundError:
            there = False
        if not there:  # removed before it was locked
            self.close()
            raise FileNotFoundError(folder)

    def close(self) -> None:
        self._close()


def hold_current(path: Path) -> tuple[str, Hold]:
    """Return the current version of the store at `path`, and a hold on its arrays."""
    while True:
        version = version_of(path)
        try:
            hold = Hold(arrays_of(path, version))
        except FileNotFoundError:
            if version == version_of(path):
                raise StoreError(f"{arrays_of(path, version)}, where {path} has its arrays, is missing") from None
            continue
        except BlockingIOError:
            time.sleep(AGAIN_SECONDS)
            continue
        if version == version_of(path):
            return version, hold
        hold.close()


def view_folder(path: Path, version: str, appends: int) -> Path:
    """Folder of the merged view of so many appends, shared by all readers."""
    return path / VERSIONS / f"view-{version or 0}-{appends}"


@contextmanager
def alone(path: Path, what: str, wait: bool) -> Iterator[None]:
    """The store's lock `what`, for one process or thread at a time. Raises StoreError if it is taken, unless `wait`."""
    tidy(path)
    with disk_errors(path):
        (path / VERSIONS).mkdir(exist_ok=True)
        fd = os.open(path / VERSIONS / f"{what}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise StoreError(f"another append to {path}, or its compaction, is under way: wait for it") from None
        yield
    finally:
        os.close(fd)


def remove_views(path: Path, keep: Path) -> None:
    """Remove unused views of earlier appends; the caller must have the view lock."""
    for each in sorted((path / VERSIONS).glob("view-*")):
        if each != keep:
            _remove(each)


def remove_unused(path: Path, version: str, keep: Path | None) -> None:
    """Remove unused versions, views and unfinished ones, except `version` and `keep`; the caller must have the locks."""
    folder = path / VERSIONS
    for each in sorted(folder.iterdir()):
        if each.is_dir() and each != keep and each.name != version:
            _remove(each)
    if version:
        with _for_itself(path) as unused:
            for each in (path / name for name in _TOP):
                if unused and (each.exists() or removed_path(each).exists()):
                    remove_tree(each)


def _remove(folder: Path) -> None:
    with _for_itself(folder) as unused:
        if unused:
            remove_tree(folder)


@contextmanager
def _for_itself(folder: Path) -> Iterator[bool]:
    """Yield whether the folder is unused; if so, it stays unused meanwhile."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)
