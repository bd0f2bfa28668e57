"""`BucketRows`: rows in buckets of equal size on disk, each written whole and never over the one that a checkpoint needs.

A file of slots, each as large as a bucket. A bucket is always written to a free slot, and a map says which slot has which
bucket. A checkpoint holds the map; only what no map needs is free. So no byte is written twice, as an undo log would, and a
process killed at any moment, or a full disk, leaves all buckets of its last checkpoint as they were. (Copy on write, as of
LMDB's pages.)

Reads and writes bypass the page cache, which would hold what the process's own memory already has.
"""

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import google_crc32c

from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import check_absent, disk_errors, partial_path, publish, write_file
from ooc.stores.io.pages import PAGE_BYTES, Bytes, PageFile, page_buffer

DATA, ABOUT = "slots.bin", "buckets.json"
PIECE_BYTES = 2**23
"""read or written at a time; its checksum is made meanwhile"""
NOWHERE = -1
"""the slot of a bucket that was never written"""
_FORMAT = 1
State = Mapping[str, Any]


class _Map:
    """Which slot has which bucket, and the checksums of what is there."""

    def __init__(self, slots: Sequence[int], checksums: Sequence[int]) -> None:
        self.slots, self.checksums = list(slots), list(checksums)

    @classmethod
    def of(cls, state: State) -> Self:
        return cls(state["slots"], state["checksums"])

    def state(self) -> dict[str, list[int]]:
        return {"slots": list(self.slots), "checksums": list(self.checksums)}


class BucketRows:
    """Buckets 0 to buckets - 1 in the directory `path`, each of `bucket_bytes`; use `create` or `open`.

    Thread-safe: buckets may be read and written at once, each bucket by one thread at a time. A view of all buckets as they are
    may be kept under a name (`keep`), which writes nothing.

    >>> rows = BucketRows.create(Path("run/table"), buckets=8, bucket_bytes=2**20)
    >>> rows.store(3, page_buffer(2**20))
    >>> saved = rows.state()  # once `saved` is durable elsewhere: rows.commit()
    """

    def __init__(self, path: Path, buckets: int, bucket_bytes: int, state: State | None) -> None:
        self.path, self.buckets, self.bucket_bytes = path, buckets, bucket_bytes
        self.bytes_read = self.bytes_written = 0
        none = {"slots": [NOWHERE] * buckets, "checksums": [0] * buckets}
        self._now = _Map.of(state or none)
        self._kept = {name: _Map.of(each) for name, each in (state or {}).get("kept", {}).items()}
        self._saved = self._committed = self._in_maps()
        self._writing: set[int] = set()
        self._lock = threading.Lock()
        with disk_errors(path):
            size = (path / DATA).stat().st_size
        self._slots = size // bucket_bytes
        most = max(self._committed, default=NOWHERE)
        if most >= self._slots:
            raise StoreError(f"{path / DATA} holds {self._slots} buckets, and the checkpoint has one at {most}: it was cut; "
                             "put it back, or start another run")  # fmt: skip
        if size != self._slots * bucket_bytes:  # killed while it grew
            with disk_errors(path), (path / DATA).open("r+b") as file:
                file.truncate(self._slots * bucket_bytes)
        self._file = PageFile(path / DATA, self._slots * bucket_bytes)

    @classmethod
    def create(cls, path: Path | str, buckets: int, bucket_bytes: int) -> Self:
        """Make a directory of buckets that were never written, and take no space on the disk yet.

        Args:
            path: The directory, which must not exist.
            buckets: Number of buckets.
            bucket_bytes: Size of each, a multiple of 4096.

        Raises:
            StoreError: `path` exists, or the disk refuses.
        """
        path = Path(path)
        if bucket_bytes <= 0 or bucket_bytes % PAGE_BYTES:
            raise ValueError(f"a bucket has whole pages of {PAGE_BYTES} bytes, not {bucket_bytes} bytes")
        check_absent(path)
        partial = partial_path(path)
        with disk_errors(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        try:
            PageFile.allocate(partial / DATA, 0)
            about = {"format": _FORMAT, "buckets": buckets, "bucket_bytes": bucket_bytes}
            write_file(partial / ABOUT, json.dumps(about).encode() + b"\n")
            publish(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return cls(path, buckets, bucket_bytes, None)

    @classmethod
    def open(cls, path: Path | str, state: State | None) -> Self:
        """Open the buckets as they were when `state` was taken; None: none was, and all are as they were created.

        Raises:
            StoreError: The directory is missing, damaged, or was cut.
        """
        path = Path(path)
        try:
            about = json.loads((path / ABOUT).read_bytes())
            buckets, bucket_bytes, version = (int(about[name]) for name in ("buckets", "bucket_bytes", "format"))
        except FileNotFoundError:
            raise StoreError(f"{path} is missing: put it back, or start another run") from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise StoreError(f"{path / ABOUT} cannot be read ({error}): put it back, or start another run") from None
        if version != _FORMAT:
            raise StoreError(f"{path} has format {version}, not {_FORMAT}: use the version of ooc that wrote it")
        if state is not None and len(state["slots"]) != buckets:
            raise StoreError(f"{path} has {buckets} buckets, and the checkpoint {len(state['slots'])}: it is another run's")
        return cls(path, buckets, bucket_bytes, state)

    def is_written(self, bucket: int, kept: str | None = None) -> bool:
        """Whether there is something to `load`."""
        return self._map(kept).slots[bucket] != NOWHERE

    def load(self, bucket: int, out: Bytes) -> None:
        """Fill `out` (uint8[bucket_bytes], page-aligned) with a bucket that was written.

        Raises:
            StoreError: The disk fails, or the bytes are not those that were written.
        """
        slot, checksum = self._now.slots[bucket], 0
        assert slot != NOWHERE, "a bucket is written before it is read"
        for first in range(0, self.bucket_bytes, PIECE_BYTES):
            piece = out[first : first + PIECE_BYTES]
            self._file.load(slot * self.bucket_bytes + first, piece)
            checksum = google_crc32c.extend(checksum, piece)
        self.check(bucket, checksum)
        with self._lock:
            self.bytes_read += self.bucket_bytes

    def check(self, bucket: int, checksum: int, kept: str | None = None) -> None:
        """Raise StoreError where the CRC-32C of a bucket that was read, whole and in order, is not that of what was written."""
        if checksum != self._map(kept).checksums[bucket]:
            raise StoreError(f"{self.path / DATA} is damaged at bucket {bucket}: start another run, or put a copy back")

    def load_part(self, bucket: int, first: int, out: Bytes, kept: str | None = None) -> None:
        """Fill `out` (whole pages, page-aligned) from byte `first` of a bucket on, `first` a multiple of 4096.

        Args:
            bucket: One that was written.
            first: Where in it.
            out: What to fill.
            kept: Name of the view to read from; None: as the buckets are.

        What reads all parts of a bucket compares them with `check`.
        """
        self._file.load(self._map(kept).slots[bucket] * self.bucket_bytes + first, out)
        with self._lock:
            self.bytes_read += len(out)

    def store(self, bucket: int, data: Bytes) -> None:
        """Write a bucket (uint8[bucket_bytes], page-aligned) to a free slot; from then on it is what `load` gives.

        Raises:
            StoreError: The disk is full, or fails; the bucket is as it was.
        """
        slot = self._take_slot()
        try:
            checksum = 0
            for first in range(0, self.bucket_bytes, PIECE_BYTES):
                piece = data[first : first + PIECE_BYTES]
                self._file.store(slot * self.bucket_bytes + first, piece)
                checksum = google_crc32c.extend(checksum, piece)
            with self._lock:
                self._now.slots[bucket], self._now.checksums[bucket] = slot, checksum
                self.bytes_written += self.bucket_bytes
        finally:
            with self._lock:
                self._writing.discard(slot)

    def sync(self) -> None:
        """Make what was stored durable."""
        self._file.sync()

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, plain lists: the buckets as they are, durable, and the views that are kept."""
        self.sync()
        with self._lock:
            self._saved = self._in_maps()
            return {**self._now.state(), "kept": {name: each.state() for name, each in self._kept.items()}}

    def commit(self) -> None:
        """What `state` returned last is durable: the slots that only earlier checkpoints needed are free."""
        with self._lock:
            self._committed = self._saved

    def keep(self, name: str, view: State | str | None = None) -> None:
        """Keep the buckets as they are under a name, in place of what had it; a checkpoint stores that too.

        view: another view to keep: the name of one, or what `view` gave.
        """
        own = view if isinstance(view, Mapping) else self.view(view)
        with self._lock:
            self._kept[name] = _Map.of(own)

    def view(self, kept: str | None = None) -> dict[str, Any]:
        """The map of a view, or of the buckets as they are: plain lists, by which `open` finds these again."""
        return self._map(kept).state()

    def drop(self, name: str) -> None:
        """Keep the view of that name no more, if there is one."""
        with self._lock:
            self._kept.pop(name, None)

    @property
    def kept(self) -> list[str]:
        """Names of the views."""
        return list(self._kept)

    @property
    def spare(self) -> int:
        """Buckets that can be written before the file grows."""
        with self._lock:
            return self._slots - len(self._needed())

    @property
    def slots(self) -> int:
        """Slots of the file."""
        return self._slots

    def close(self) -> None:
        """Close the file; idempotent. What was written since the last checkpoint does not count."""
        self._file.close()

    def _map(self, kept: str | None) -> _Map:
        return self._now if kept is None else self._kept[kept]

    def _in_maps(self) -> frozenset[int]:
        return frozenset(slot for each in (self._now, *self._kept.values()) for slot in each.slots if slot != NOWHERE)

    def _needed(self) -> frozenset[int]:
        return self._in_maps() | self._committed | self._saved | self._writing

    def _take_slot(self) -> int:
        """The first free slot, one behind the last if there is none."""
        with self._lock:
            needed = self._needed()
            slot = next((slot for slot in range(self._slots) if slot not in needed), self._slots)
            if slot == self._slots:
                PageFile.extend(self.path / DATA, (self._slots + 1) * self.bucket_bytes)
                self._slots += 1
                self._file.nbytes = self._slots * self.bucket_bytes
            self._writing.add(slot)
            return slot


def bucket_buffer(buckets: int, bucket_bytes: int) -> Bytes:
    """Return page-aligned memory for so many buckets, uint8[buckets * bucket_bytes], that takes none before it is written."""
    return page_buffer(buckets * bucket_bytes)
