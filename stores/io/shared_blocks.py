"""`SharedBlocks`: blocks of files in memory that processes of one host share, so that what one has read the others copy.

The memory is a file without a name (memfd), so nothing is left of it however the processes end. A process that is killed holds
nobody up: the kernel releases its locks, by which the others see that it has gone.
"""

import fcntl
import mmap
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ooc.stores.io.block_table import (
    ACTIVE,
    BLOCK_BYTES,
    BROKEN,
    COLUMNS,
    DIRTY,
    GONE,
    LANE,
    PAGE_BYTES,
)

LEAST_SLOTS = 16
_HEADER, _LANES, _ENDS, _NAMES, _COUNTED = 8, 32, 256, 16, 24
_LOCK, _LIVES = 0, 64
"""bytes of the file that are locked: by who changes the table, and by each member as long as it lives"""
_MOST_MEMBERS = 62


class Address(NamedTuple):
    """Where another process of the host finds the memory."""

    process: int
    file: int
    members: int


class SharedBlocks:
    """Memory for `slots` blocks of files that `members` processes share, of which this is number `member`. Thread-safe.

    Give the `address` of one to the other processes, which `attach`. A block stays until all members that go through its file
    have taken it, or until room is needed.

    >>> blocks = SharedBlocks.create(2**25, members=2)
    >>> SharedBlocks.attach(blocks.address, member=1)  # in another process
    """

    def __init__(self, file: int, member: int, members: int) -> None:
        self._file, self.member, self.members = file, member, members
        self._process = os.getpid()
        nbytes = os.fstat(file).st_size
        self._map = mmap.mmap(file, nbytes)
        table = _table_bytes(members)
        self.slot_count = (nbytes - table[0]) // (BLOCK_BYTES + table[1])
        ints = np.frombuffer(self._map, np.int64)
        sizes = (
            _HEADER,
            _LANES,
            3 * _LANES * members,
            4 * _ENDS,
            2 * _NAMES,
            COLUMNS * self.slot_count,
            2 * members * self.slot_count,
        )
        at = np.cumsum([0, *sizes])
        parts = [ints[a:b] for a, b in pairwise(at.tolist())]
        self.header, self._keys = parts[0], parts[1]
        self.reading = parts[2].reshape(_LANES, members, 3)
        """int64[files, members, 3]: how far each member is in each file, see `block_table.ACTIVE`"""
        self._ends, self._spares = parts[3].reshape(_ENDS, 4), parts[4].reshape(_NAMES, 2)
        self.slots, self.pages = parts[5].reshape(-1, COLUMNS), parts[6].reshape(-1, 2, members)
        data = nbytes - self.slot_count * BLOCK_BYTES
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[data:]
        self._lock = threading.Lock()
        self._sessions: Counter[int] = Counter()
        self._closed = False
        fcntl.lockf(file, fcntl.LOCK_EX, 1, _LIVES + member)
        with self.locked():
            self.header[GONE] &= ~(1 << member)

    @classmethod
    def create(cls, nbytes: int, members: int) -> Self:
        """Memory of about `nbytes` bytes, LEAST_SLOTS blocks at least, of which this process is member 0."""
        assert 0 < members <= _MOST_MEMBERS
        fixed, each = _table_bytes(members)
        slots = max(LEAST_SLOTS, (nbytes - fixed) // (BLOCK_BYTES + each))
        size = -(-(fixed + slots * each) // PAGE_BYTES) * PAGE_BYTES + slots * BLOCK_BYTES
        file = os.memfd_create("ooc-blocks")
        os.ftruncate(file, size)
        made = cls(file, 0, members)
        made.slots[:, LANE] = -1
        return made

    @classmethod
    def attach(cls, address: Address, member: int) -> Self:
        """The memory that another process of the host created. Raises OSError where it cannot be opened."""
        file = os.open(f"/proc/{address.process}/fd/{address.file}", os.O_RDWR | os.O_CLOEXEC)
        return cls(file, member, address.members)

    @property
    def address(self) -> Address:
        """What `attach` needs, as long as this process lives and has not closed it."""
        return Address(self._process, self._file, self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, once for all members."""
        return len(self._map)

    @property
    def works(self) -> bool:
        """Whether blocks may still be shared: not once a member ended while it changed the table, in a fork, or when closed."""
        return not self._closed and self.header[BROKEN] == 0 and os.getpid() == self._process

    def session_key(self, name: str) -> int:
        """A number for the next session of that name, the same for all members that have had as many."""
        key = zlib.crc32(name.encode())
        self._sessions[key] += 1
        return key << _COUNTED | self._sessions[key]

    def lane(self, file: str) -> int | None:
        """The number of a file; None where there are too many."""
        key = zlib.crc32(file.encode()) << 1 | 1
        with self.locked():
            if not self.works:
                return None
            for lane in range(_LANES):
                if self._keys[lane] in (0, key):
                    self._keys[lane] = key
                    return lane
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Change the table alone. Where a member ended in the middle, nothing is shared from then on: see `works`."""
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _LOCK)
            try:
                if self.header[DIRTY]:
                    self.header[BROKEN] = 1
                self.header[DIRTY] = 1
                yield
                self.header[DIRTY] = 0
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _LOCK)

    def look_for_gone(self) -> None:
        """Take note of members that have ended, or never came."""
        for other in range(self.members):
            bit = 1 << other
            if other == self.member or self.header[GONE] & bit:
                continue
            with suppress(OSError):  # it lives
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LIVES + other)
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _LIVES + other)
                with self.locked():
                    self.header[GONE] |= bit

    def goes_on(self, session: int, group: int, taken: int) -> bool:
        """Whether group number `group` of a session goes on behind `taken` batches: not where another member ended it there."""
        with self.locked():
            end = self._end_of(session, group)
            if end[2] > 0:
                return bool(taken < end[2])
            end[3] = max(end[3], taken + 1)
            return True

    def ends(self, session: int, group: int, taken: int, full: bool) -> bool:
        """A group of `taken` batches is full, or as good as full; whether it ends here, or another member has more already.

        Where it is full, and others have more, groups of the session keep more room free from then on: see `spares`.
        """
        with self.locked():
            end = self._end_of(session, group)
            if end[2] == 0:
                end[2] = max(end[3], taken)
            more = bool(taken < end[2])
            if more and full:
                self._unlike(session)[1] += 1
            return full or not more

    def spares(self, session: int) -> int:
        """How often groups of a session came out unlike."""
        with self.locked():
            return int(self._unlike(session)[1])

    def _end_of(self, session: int, group: int) -> NDArray[np.int64]:
        """(session, group, batches that it has in the end or 0, most that a member has of them so far)."""
        end = self._ends[(session + group) % _ENDS]
        if end[0] != session or end[1] != group:
            end[:] = session, group, 0, 0
        return end

    def _unlike(self, session: int) -> NDArray[np.int64]:
        """(name of a session, how often its groups came out unlike)."""
        name = session >> _COUNTED
        found = self._spares[name % _NAMES]
        if found[0] != name:
            found[:] = name, 0
        return found

    def close(self) -> None:
        """Take part no more; idempotent. Not while rows are read."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self.reading[:, self.member, ACTIVE] = 0
        os.close(self._file)


def _table_bytes(members: int) -> tuple[int, int]:
    """Bytes of the table, and of each slot in it."""
    return 8 * (_HEADER + _LANES * (1 + 3 * members) + 4 * _ENDS + 2 * _NAMES), 8 * (COLUMNS + 2 * members)
