"""A preallocated file that is read and overwritten in whole pages, bypassing the page cache if possible."""

import errno
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import disk_errors

PAGE_BYTES = 4096
Bytes = NDArray[np.uint8]


def page_buffer(nbytes: int) -> Bytes:
    """Return page-aligned uint8[nbytes], as direct reads and writes require."""
    return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)[:nbytes]


class PageFile:
    """The file at `path`, open for page-aligned reads and writes; thread-safe, calls may run concurrently.

    Args:
        path: The file.
        nbytes: Its size, a multiple of 4096.
        direct: Whether to use O_DIRECT; if the file system refuses it, the page cache is used and `direct` becomes False.

    Raises:
        StoreError: If the file is missing or has another size.

    >>> file = PageFile(Path("rows.bin"), 2**20)
    >>> file.store(4096, page_buffer(8192))
    """

    def __init__(self, path: Path, nbytes: int, direct: bool = True) -> None:
        self.path, self.nbytes = path, nbytes
        self.direct = direct
        self._fd: int = self._open(os.O_DIRECT) if direct else self._open(0)
        size = os.fstat(self._fd).st_size
        if size != nbytes or nbytes % PAGE_BYTES:
            os.close(self._fd)
            raise StoreError(
                f"{path} holds {size} bytes where {nbytes} belong: it was cut or changed; begin anew what it is kept for"
            )

    def _open(self, flags: int) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flags)
            if flags and self.nbytes:
                try:
                    os.preadv(fd, [page_buffer(PAGE_BYTES).data], 0)  # some file systems refuse only the read
                except OSError:
                    os.close(fd)
                    raise
            return fd
        except FileNotFoundError as error:
            raise StoreError(f"{self.path} is missing: put it back, or begin anew what it is kept for") from error
        except OSError as error:
            if flags and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                self.direct = False
                return self._open(0)
            raise StoreError(f"{self.path} cannot be opened: {error.strerror}; check the path and the permissions") from error

    @staticmethod
    def allocate(path: Path, nbytes: int) -> None:
        """Create a file of `nbytes` zeros with its disk space allocated. Raises StoreError, leaving no file, if the disk is
        full."""
        with disk_errors(path):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                if nbytes:
                    os.posix_fallocate(fd, 0, nbytes)
                os.fsync(fd)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    @staticmethod
    def extend(path: Path, nbytes: int) -> None:
        """Extend a file to `nbytes` with allocated zeros. Raises StoreError if the disk is full."""
        with disk_errors(path):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                os.fsync(fd)
            finally:
                os.close(fd)

    def load(self, offset: int, out: Bytes) -> None:
        """Fill `out` (whole pages, page-aligned) from byte `offset` on. Raises StoreError if the disk fails."""
        done = 0
        try:
            while done < len(out):
                got = os.preadv(self._fd, [out[done:].data], offset + done)
                if got <= 0 or got % PAGE_BYTES:
                    raise OSError(errno.EIO, "the file ends there" if got == 0 else "a read of part of a page")
                done += got
        except OSError as error:
            where = f"{self.path} cannot be read at byte {offset + done}"
            raise StoreError(f"{where}: {error.strerror}; check the disk") from error

    def store(self, offset: int, data: Bytes) -> None:
        """Overwrite from byte `offset` on with `data` (whole pages, page-aligned). Raises StoreError if the disk fails."""
        done = 0
        with disk_errors(self.path):
            while done < len(data):
                put = os.pwritev(self._fd, [data[done:].data], offset + done)
                if put <= 0 or put % PAGE_BYTES:
                    raise OSError(errno.EIO, "part of a page was written", str(self.path))
                done += put

    def sync(self) -> None:
        """Make what was stored durable."""
        with disk_errors(self.path):
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
