"""A file without a name: what a process keeps on disk for itself, and what is gone with the process however that ends."""

import errno
import fcntl
import os
import tempfile
import threading
from pathlib import Path

from ooc.stores.io.atomic import disk_errors
from ooc.stores.io.pages import PAGE_BYTES, PageFile, page_buffer

_NO_PREALLOCATION = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class ScratchFile(PageFile):
    """An unnamed file in `folder`, empty at first, for page-aligned reads and writes; thread-safe, calls may run concurrently.

    Where the file system refuses O_DIRECT the page cache is used. Raises StoreError if the file cannot be made.

    >>> file = ScratchFile(Path("/fast"))
    >>> file.reserve(0, 2**20)
    >>> file.store(4096, page_buffer(8192))
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.nbytes, self.direct = folder, 0, True
        self._growing = threading.Lock()
        with disk_errors(folder), tempfile.TemporaryFile(dir=folder, prefix=".ooc-scratch-", buffering=0) as file:
            self._fd = os.dup(file.fileno())
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)
            os.preadv(self._fd, [page_buffer(PAGE_BYTES).data], 0)  # some file systems refuse only the read
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.direct = False

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate disk space for bytes offset:offset + nbytes. Raises StoreError if the disk is full."""
        with disk_errors(self.path), self._growing:
            try:
                os.posix_fallocate(self._fd, offset, nbytes)
            except OSError as error:
                if error.errno not in _NO_PREALLOCATION:
                    raise
                os.ftruncate(self._fd, max(self.nbytes, offset + nbytes))  # space is taken by writes then
            self.nbytes = max(self.nbytes, offset + nbytes)
