"""Atomic and durable writes: a reader sees the old state or the new one, never a mixture.

A file is written under a temporary name, synced and renamed; a directory is built next to its final place, synced and renamed
when complete. (As in zarr-python's LocalStore; Pillai et al., OSDI 2014, list what breaks without the syncs.)
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ooc.stores.errors import StoreError

_ADVICE = {
    errno.ENOSPC: "free some space there, or choose another disk",
    errno.EDQUOT: "the quota there is used up: free some space, or choose another disk",
    errno.EFBIG: "that disk, or a limit of this process (`ulimit -f`), allows no larger file",
    errno.EACCES: "check the permissions",
    errno.EROFS: "that disk is read-only: choose another one",
}


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException | None) -> bool:
    """Whether an OSError says that the disk, a quota or a limit leaves no space."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Convert an OSError of the block into a one-line StoreError that says what failed, where, and what to do.

    >>> with disk_errors("papers.ooc"):
    ...     write_everything()
    """
    try:
        yield
    except OSError as error:
        raise write_error(error, path) from error


def write_error(error: OSError, path: Path | str) -> StoreError:
    """Return a StoreError for `error`, raised while writing `path`."""
    where, code = error.filename or path, error.errno or 0
    why = os.strerror(code) if code in _ADVICE else error.strerror or error  # pyarrow's strerror tells of its own calls
    return StoreError(f"cannot write {where}: {why}; {_ADVICE.get(code, 'check the path and the disk')}")


def database_error(error: Exception, path: Path | str) -> StoreError:
    """Return a StoreError for LMDB's error while writing `path`; LMDB reports short writes as I/O errors."""
    words = str(error)
    code = next((code for code in _ADVICE if os.strerror(code) in words), None)
    if code is not None:
        return write_error(OSError(code, os.strerror(code)), path)
    short = "only a part was written, so the disk is full, or allows no larger files; free some space there"
    return StoreError(f"cannot write {path}: {short if os.strerror(errno.EIO) in words else words}")


def sync_dir(path: Path | str) -> None:
    """Make the names in directory `path` durable."""
    _sync(Path(path), os.O_DIRECTORY)


def write_file(path: Path | str, content: bytes) -> None:
    """Replace `path` by `content`; see `replacing`.

    >>> write_file("run/summary.json", b"{}")
    """
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path | str) -> Iterator[BinaryIO]:
    """Write a replacement of `path` atomically and durably; after a failure only the old file remains.

    Raises StoreError if the disk is full or refuses.

    >>> with replacing("store/ages.npy") as file: np.save(file, ages)
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException as error:
            with suppress(OSError):  # of a folder that is none, which is what failed before
                temporary.unlink()
            if isinstance(error, OSError) and error.filename == str(temporary):
                error.filename = str(path)  # the name that the caller knows
            raise
        sync_dir(path.parent)


def remove_leftovers(folder: Path | str) -> None:
    """Remove temporary files of `write_file` in `folder` that were left by killed processes."""
    for path in Path(folder).glob(".*.*.tmp"):
        number = path.name.split(".")[-2]
        if number.isdecimal() and not _lives(int(number)):
            path.unlink(missing_ok=True)


def remove_unfinished(folder: Path | str) -> None:
    """Remove temporary files of `write_file` and of zarr that were left anywhere in `folder`; nobody else may write there."""
    for pattern in (".*.*.tmp", "zarr.*.partial"):
        for path in Path(folder).rglob(pattern):
            path.unlink()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        pass
    return True


def removed_path(path: Path | str) -> Path:
    """Path to which `remove_tree` renames a directory; what is there was left by a killed process."""
    path = Path(path)
    return path.with_name(f"{path.name}.removed")


def remove_tree(path: Path | str) -> None:
    """Remove a directory; a process killed meanwhile leaves all of it at `path` or none.

    >>> remove_tree("run/sweep")
    """
    path, gone = Path(path), removed_path(path)
    shutil.rmtree(gone, ignore_errors=True)
    with disk_errors(path):
        try:
            os.rename(path, gone)
        except FileNotFoundError:
            return
        sync_dir(path.parent)
    shutil.rmtree(gone, ignore_errors=True)


def partial_path(final: Path | str) -> Path:
    """Path at which `final` is built, a sibling, so that the rename stays within one file system."""
    final = Path(final)
    return final.with_name(f"{final.name}.partial")


def publish(tmp_dir: Path | str, final_dir: Path | str) -> Path:
    """Sync everything under `tmp_dir`, rename it to `final_dir` and return that.

    Raises StoreError if `final_dir` exists or the disk refuses; both directories are then unchanged.

    >>> publish(partial_path("papers.ooc"), "papers.ooc")
    """
    tmp_dir, final_dir = Path(tmp_dir), Path(final_dir)
    check_absent(final_dir)
    with disk_errors(final_dir):
        for folder, _, files in os.walk(tmp_dir, topdown=False):
            for name in files:
                _sync(Path(folder, name))
            sync_dir(folder)
        try:
            os.rename(tmp_dir, final_dir)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):  # created meanwhile
                raise _exists(final_dir) from None
            raise
        sync_dir(final_dir.parent)
    return final_dir


def check_absent(path: Path | str) -> None:
    """Raise StoreError if `path` exists, including a dangling link."""
    if os.path.lexists(path):
        raise _exists(path)


def _exists(path: Path | str) -> StoreError:
    return StoreError(f"{path} exists already: choose another name, or remove it first")


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
