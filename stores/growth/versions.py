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
from contextlib import contextmanager, suppress
from pathlib import Path

from ooc.stores import array_names as names
from ooc.stores.array_names import VERSIONS
from ooc.stores.arrays.descriptions import DESCRIPTION, write_placeholder
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import disk_errors, remove_leftovers, remove_tree, removed_path
from ooc.stores.io.working import tidy
from ooc.stores.metadata import arrays_of, version_of, write_group

_TOP = ("graph", names.GRAPHS, names.EVENTS, "node", "edge", names.REDUCTIONS, names.CHECKSUMS, names.IDS, names.GRAPH_IDS)
"""what a store without versions has at its top level"""
STATE = "state"
"""folder in `versions/`"""
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


def state_folder(path: Path) -> Path:
    """The folder of locks and of what is known of earlier states, made if it is missing."""
    state = path / VERSIONS / STATE
    if not (state / "zarr.json").exists():
        state.mkdir(parents=True, exist_ok=True)
        write_group(path / VERSIONS, {DESCRIPTION: "versions of the arrays; `ooc_arrays` of the store names the current one"})
        write_placeholder(state, "files of ooc: locks, and what is known of earlier states")
    return state


@contextmanager
def alone(path: Path, what: str, wait: bool) -> Iterator[None]:
    """The store's lock `what`, for one process or thread at a time. Raises StoreError if it is taken, unless `wait`."""
    tidy(path)
    with disk_errors(path):
        state = state_folder(path)
        fd = os.open(state / f"{what}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise StoreError(f"another append to {path}, or its compaction, is under way: wait for it") from None
        for folder in (path, path / VERSIONS, state):
            remove_leftovers(folder)
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
    if version:
        with _for_itself(path) as unused:
            for name in _TOP if unused else ():
                _lead_to(path, name, version)
    for each in sorted(folder.iterdir()):
        if each.is_dir() and each != keep and each.name not in (version, STATE):
            _remove(each)


def _lead_to(path: Path, name: str, version: str) -> None:
    """Replace what is at `name` in the store by a link to the current version's, so that Zarr readers find it there."""
    own, target = path / name, Path(VERSIONS, version, name)
    if not own.is_symlink() and (own.exists() or removed_path(own).exists()):
        remove_tree(own)
    if not (path / target).exists() or (own.is_symlink() and os.readlink(own) == str(target)):
        return
    link = path / VERSIONS / STATE / "link.tmp"
    with suppress(OSError):  # a file system without links: the attribute says where the arrays are
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        os.replace(link, own)


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
