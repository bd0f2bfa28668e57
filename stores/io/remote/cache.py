"""`CacheDir`: a bounded folder of stores far away; `Presence`: which chunks of an array it holds.

What is in use is never given up: an epoch reads an array in an order that never comes again, from end to end, so that the chunk
that was used last is as good as any other, and replacing one by one would lose all of them before they are used again. If the
cache is full, the chunks that are there serve their share of every epoch, and others are read past it.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import disk_errors, remove_tree

PRESENT = "present"
"""folder of a mirror with a `Presence` file for each array"""
LOCK = ".lock"
MISSING, WRITTEN, SYNCED = 0, 1, 2
_COUNTS = struct.Struct("<qq")
_BOOT_BYTES = 64
_RETRY_S = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE_PUNCH_HOLE = 3
_LOCK_OF_BYTES = struct.Struct("hhqqi4x")
"""struct flock: type, from where, first byte, bytes, process"""
_POLL_S = 0.005
_PATIENCE_S = 30.0
"""how long a chunk is waited for that another process fetches; if that was stopped, none is waited for any more"""


def default_folder() -> Path:
    """The cache of a user who names none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ooc" / "stores"


class CacheDir:
    """A folder of mirrors; its limit and what it holds are in the file `.lock`, shared by the processes that use it.

    Bytes are counted before they are written and counted anew from the files when the folder is opened with a limit, so what a
    killed process has counted is corrected then.

    >>> cache = CacheDir(Path("cache"))
    >>> cache.open(200 * 10**9)
    >>> cache.reserve(2**20)
    True
    """

    def __init__(self, folder: Path) -> None:
        """Raises StoreError if the folder cannot be made or written."""
        self.folder = folder
        self._full_until = 0.0
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._fd = fd
        self._threads = threading.Lock()
        weakref.finalize(self, os.close, fd)

    def open(self, limit: int | None) -> None:
        """Set the limit in bytes, count what is there and give up what exceeds it; None: half of what is free or used here."""
        with self.locked():
            used = self._measured()
            if limit is None:
                found = os.statvfs(self.folder)
                limit = max((found.f_bavail * found.f_frsize + used) // 2, 0)
            used -= self._give_up(used - limit)
            self._write(used, limit)

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes used, and the limit."""
        held = os.pread(self._fd, _COUNTS.size, 0)
        used, limit = _COUNTS.unpack(held) if len(held) == _COUNTS.size else (0, 0)
        return used, limit

    def reserve(self, nbytes: int, insist: bool = False) -> bool:
        """Count `nbytes` that are about to be written, after giving up what nobody uses if there is no room for them.

        False if there is none. A search that found too little is not repeated for some seconds, unless the caller insists.
        """
        with self.locked():
            used, limit = self.counts
            if used + nbytes > limit:
                if not insist and time.monotonic() < self._full_until:
                    return False
                used -= self._give_up(used + nbytes - limit)
                self._write(used, limit)
                if used + nbytes > limit:
                    self._full_until = time.monotonic() + _RETRY_S
                    return False
            self._write(used + nbytes, limit)
            return True

    def release(self, nbytes: int) -> None:
        """Take back a reservation of bytes that were not written."""
        with self.locked():
            used, limit = self.counts
            self._write(max(0, used - nbytes), limit)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The folder for one thread of one process."""
        with self._threads:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _write(self, used: int, limit: int) -> None:
        os.pwrite(self._fd, _COUNTS.pack(used, limit), 0)

    def _measured(self) -> int:
        return sum(_allocated(Path(where, name)) for where, _, names in os.walk(self.folder) for name in names)

    def _give_up(self, wanted: int) -> int:
        """Remove what nobody uses, the least recently opened first, until `wanted` bytes are free; returns the bytes freed."""
        freed = 0
        if wanted <= 0:
            return freed
        for left in self.folder.glob("*.removed"):
            freed += _removed(left)
        mirrors = sorted((each for each in self.folder.iterdir() if each.is_dir()), key=_opened_at)
        for mirror in mirrors:
            if freed < wanted:
                freed += _unused_mirror(mirror)
        for mirror in mirrors:
            for file in sorted((mirror / PRESENT).glob("*"), key=lambda each: each.stat().st_mtime):
                if freed < wanted:
                    freed += _unused_array(mirror, file)
        return freed


def mirror_lock(mirror: Path) -> Path:
    """The file whose lock keeps a mirror, or one being made, in the cache; it stands beside what may be removed."""
    return mirror.with_name(f".{mirror.name.removesuffix('.partial')}{LOCK}")


def _opened_at(mirror: Path) -> float:
    with suppress(OSError):
        return mirror_lock(mirror).stat().st_mtime
    return 0.0


def _allocated(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


def _removed(folder: Path) -> int:
    nbytes = sum(_allocated(Path(where, name)) for where, _, names in os.walk(folder) for name in names)
    shutil.rmtree(folder, ignore_errors=True)
    return nbytes


def _unused_mirror(mirror: Path) -> int:
    """Remove a mirror that no process has open; returns the bytes freed."""
    fd = os.open(mirror_lock(mirror), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nbytes = sum(_allocated(Path(where, name)) for where, _, names in os.walk(mirror) for name in names)
        remove_tree(mirror)
        return nbytes
    except OSError:  # in use
        return 0
    finally:
        os.close(fd)


def _unused_array(mirror: Path, file: Path) -> int:
    """Give up the chunks of an array that no process has open; returns the bytes freed."""
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nbytes = 0
        os.pwrite(fd, bytes(max(0, os.fstat(fd).st_size - _BOOT_BYTES)), _BOOT_BYTES)  # before the bytes are gone
        for line in (mirror / f"{PRESENT}.paths" / file.name).read_text().splitlines():
            payload, _, name = line.partition(" ")
            nbytes += _punch(mirror / name, int(payload))
        return nbytes
    except OSError:  # in use, or this file system has no holes
        return 0
    finally:
        os.close(fd)


def _punch(path: Path, payload: int) -> int:
    """Free the first `payload` bytes of a file, which keeps its size."""
    before, fd = _allocated(path), os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _LIBC.fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(payload)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)
    return before - _allocated(path)


class Presence:
    """Which chunks of an array are in its files: a byte for each, in a file that all processes map.

    A chunk is marked after it was written, which a killed process cannot undo. A machine that loses power can: marks that were
    not made durable count only until the machine starts again. Who fetches a chunk locks its byte of the file: of several
    processes one does; the kernel takes the lock from a process that is killed.

    >>> presence = Presence(file, 100, cache)
    >>> presence.mark(np.array([3]))
    >>> presence.missing(np.array([2, 3]))
    array([2])
    """

    def __init__(self, file: Path, chunks: int, cache: CacheDir) -> None:
        """Open the file, which stays as it is as long as the object lives. Raises StoreError if it is not of so many chunks."""
        with disk_errors(file), cache.locked():
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            weakref.finalize(self, os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_size != _BOOT_BYTES + chunks:
                raise StoreError(f"{file} is damaged: remove {file.parents[1]}, a copy in the cache")
            os.utime(file)
            mapped = np.frombuffer(mmap.mmap(fd, _BOOT_BYTES + chunks), np.uint8)
            self._fd, self._mapped, self._states = fd, mapped, mapped[_BOOT_BYTES:]
            self._waits = True
            """whether others fetch what they have taken, as far as this one knows"""
            boot = np.zeros(_BOOT_BYTES, np.uint8)
            boot[: len(_boot())] = np.frombuffer(_boot(), np.uint8)
            if not (mapped[:_BOOT_BYTES] == boot).all():
                self._states[self._states == WRITTEN] = MISSING
                mapped[:_BOOT_BYTES] = boot

    @staticmethod
    def create(file: Path, chunks: int) -> None:
        """Write the file of an array of which nothing is there."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(_BOOT_BYTES + chunks))

    def missing(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the chunks that are not there."""
        return numbers[self._states[numbers] == MISSING]

    @property
    def complete(self) -> bool:
        """Whether all chunks are there."""
        return bool((self._states != MISSING).all())

    def take(self, number: int) -> bool:
        """Take a missing chunk to fetch it; False if it is there by now, or another opened file of this array has taken it."""
        if not self._locked(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, number) and self._waits:
            return False
        if self._states[number] == MISSING:
            return True
        self.leave(number)
        return False

    def leave(self, number: int) -> None:
        """Let others fetch a chunk that was taken; idempotent."""
        self._locked(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, number)

    def wait(self, number: int) -> None:
        """Wait until no other opened file of this array has taken a chunk, or so long that `take` gives it to this one too."""
        until = time.monotonic() + _PATIENCE_S
        while self._waits and self._states[number] == MISSING and not self._is_free(number):
            self._waits = time.monotonic() < until
            time.sleep(_POLL_S)

    def _is_free(self, number: int) -> bool:
        return self._locked(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, number)

    def _locked(self, command: int, kind: int, number: int) -> bool:
        """Whether a lock of a chunk's byte is to be had; also where the file system knows no such locks."""
        asked = _LOCK_OF_BYTES.pack(kind, os.SEEK_SET, _BOOT_BYTES + number, 1, 0)
        try:
            found = _LOCK_OF_BYTES.unpack(fcntl.fcntl(self._fd, command, asked))
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return command != fcntl.F_OFD_GETLK or found[0] == fcntl.F_UNLCK

    def mark(self, number: int) -> None:
        """Mark a chunk as written."""
        self._states[number] = WRITTEN

    def sync(self, paths: tuple[Path, ...]) -> None:
        """Make the chunks that are marked durable, with their marks."""
        written = np.flatnonzero(self._states == WRITTEN)
        if not len(written):
            return
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        self._states[written] = SYNCED
        os.fsync(self._fd)


def _boot() -> bytes:
    """What the kernel calls this start of the machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:_BOOT_BYTES]
    return os.urandom(16)  # unknown: only what is durable counts
