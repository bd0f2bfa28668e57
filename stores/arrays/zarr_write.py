"""The appender: sharded, uncompressed Zarr v3 arrays written at the disk's speed with one chunk of memory.

zarr-python buffers or rewrites whole shards; here zarr writes only the metadata, and shard files are appended to: inner chunks
in order, then the shard's index, (offset, nbytes) as little-endian uint64 per chunk, and its crc32c. Any Zarr v3 reader can
open the result.
"""

import array
import os
import shutil
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from types import TracebackType
from typing import Any

import google_crc32c
import numpy as np
import zarr
from numpy.typing import DTypeLike, NDArray

from ooc.stores.arrays.descriptions import described, dimensions
from ooc.stores.errors import InputError, StoreError
from ooc.stores.io.atomic import disk_errors

PAGE_BYTES = 4096
CHUNK_BYTES = 2**20
SHARD_BYTES = 2**30
MISSING = np.uint64(2**64 - 1)
"""offset and size, in a shard's index, of a chunk that the shard does not contain"""


def layout(
    row_bytes: int, count: int | None = None, chunk_bytes: int = CHUNK_BYTES, shard_bytes: int = SHARD_BYTES
) -> tuple[int, int]:
    """Return the rows of an inner chunk and of a shard (a pure function).

    A chunk has about `chunk_bytes` and starts on a page: its rows are a multiple of 4096 / gcd(row_bytes, 4096). A shard is a
    whole number of chunks of about `shard_bytes`. With a known `count`, neither is larger than needed.

    >>> layout(512), layout(512, count=10)
    ((2048, 2097152), (16, 16))
    """
    step = PAGE_BYTES // gcd(row_bytes, PAGE_BYTES)
    chunk_rows = max(1, chunk_bytes // row_bytes // step) * step
    if count is not None:
        chunk_rows = min(chunk_rows, max(1, -(-count // step)) * step)
    chunks = max(1, shard_bytes // (chunk_rows * row_bytes))
    if count is not None:
        chunks = min(chunks, max(1, -(-count // chunk_rows)))
    return chunk_rows, chunks * chunk_rows


class Appender:
    """Writes one array `group_path/name` of shape [count, *row_shape], and `checksums/name`, sequentially.

    `checksums/name` is uint32[chunks], the crc32c of every inner chunk as stored (the last padded with zeros). The array
    appears (its zarr.json) only when `close` has synced every shard. As a context manager it closes on success; after an
    exception the shards remain, without metadata. Needs memory for one inner chunk.

    Args:
        group_path: The Zarr group.
        name: Path of the array in it.
        row_shape: Shape of one row, () for a column.
        dtype: Any fixed-size Zarr type (bfloat16 is stored as uint16 with an attribute).
        attributes: Attributes of the array.
        count: Number of rows if known, checked on closing.
        chunk_bytes: Approximate size of a chunk.
        shard_bytes: Approximate size of a shard.

    Raises:
        StoreError: If the array exists or the disk is full.
        InputError: If rows do not fit, or their number is not `count`.

    >>> with Appender("papers.ooc", "node/node/x", (128,), "float32") as x:
    ...     for block in blocks:  # float32[b, 128]
    ...         x.append(block)
    """

    def __init__(
        self,
        group_path: Path | str,
        name: str,
        row_shape: tuple[int, ...],
        dtype: DTypeLike,
        attributes: Mapping[str, Any] | None = None,
        count: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.group_path = Path(group_path)
        self.name = name
        self.row_shape = tuple(int(size) for size in row_shape)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.attributes = dict(attributes or {})
        self.expected = count
        self.count = 0
        self._sizes = chunk_bytes, shard_bytes
        self._row_bytes = self.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64))
        if self._row_bytes == 0:
            raise InputError(f"array {name}: rows of shape {list(self.row_shape)} hold no bytes")
        chunk_rows, shard_rows = layout(self._row_bytes, count, chunk_bytes, shard_bytes)
        self._shard_chunks = shard_rows // chunk_rows
        self._buffer = np.empty(chunk_rows * self._row_bytes, np.uint8)
        self._filled = 0
        self._checksums = array.array("I")  # 4 bytes per chunk instead of a list's 40
        self._paths: list[Path] = []
        self._fd: int | None = None
        self._closed = False
        self._begin()

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows [b, *row_shape] of the array's dtype; whole chunks are written without a copy.

        Memory maps and arrays that are not C-contiguous are read in slices.
        """
        assert not self._closed, "append after close"
        if rows.dtype != self.dtype or rows.shape[1:] != self.row_shape or rows.ndim == 0:
            expected, actual = [self.dtype.name, *self.row_shape], [rows.dtype.name, *rows.shape[1:]]
            raise InputError(f"array {self.name}: rows must be {expected}, not {actual}")
        chunk_rows = len(self._buffer) // self._row_bytes
        for first in range(0, len(rows), chunk_rows):
            part = np.ascontiguousarray(rows[first : first + chunk_rows], dtype=self.dtype)
            self._append_bytes(part.reshape(-1).view(np.uint8))
        self.count += len(rows)

    def close(self) -> int:
        """Write what is buffered, sync the shards, write the metadata; returns the number of rows. Idempotent."""
        try:
            return self._finish()
        finally:
            self._close_file()

    def _finish(self) -> int:
        if self._closed:
            return self.count
        if self.expected is not None and self.count != self.expected:
            raise InputError(f"array {self.name}: {self.count} rows were written, but {self.expected} were expected")
        chunk_rows, shard_rows = layout(self._row_bytes, self.count, *self._sizes)
        if self._filled:
            chunk = self._buffer[: chunk_rows * self._row_bytes]
            chunk[self._filled :] = 0
            self._write_chunk(chunk)
        self._shard_chunks = shard_rows // chunk_rows
        self._buffer = self._buffer[: chunk_rows * self._row_bytes]
        self._end_shard()
        self._sync()
        self._write_metadata(chunk_rows, shard_rows)
        self._closed = True
        return self.count

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._close_file()

    def _begin(self) -> None:
        directory = self.group_path / self.name
        for place in (directory, self.group_path / "checksums" / self.name):
            if (place / "zarr.json").exists():
                raise StoreError(f"{place} is already there; remove it or write elsewhere")
        with disk_errors(directory):
            shutil.rmtree(directory / "c", ignore_errors=True)  # shards of an appender that was killed
            directory.mkdir(parents=True, exist_ok=True)

    def _append_bytes(self, data: NDArray[np.uint8]) -> None:
        size = len(self._buffer)
        if self._filled == 0 and len(data) == size:
            self._write_chunk(data)
            return
        taken = min(len(data), size - self._filled)
        self._buffer[self._filled : self._filled + taken] = data[:taken]
        self._filled += taken
        if self._filled == size:
            self._write_chunk(self._buffer)
            rest = data[taken:]
            self._buffer[: len(rest)] = rest
            self._filled = len(rest)

    def _write_chunk(self, chunk: NDArray[np.uint8]) -> None:
        if self._fd is None:
            key = [str(len(self._paths)), *("0" for _ in self.row_shape)]
            path = self.group_path.joinpath(self.name, "c", *key)
            with disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._paths.append(path)
        self._write(chunk)
        self._checksums.append(google_crc32c.value(chunk))
        if len(self._checksums) % self._shard_chunks == 0:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._fd is None:
            return
        held = len(self._checksums) - (len(self._paths) - 1) * self._shard_chunks
        index = np.full((self._shard_chunks, 2), MISSING, "<u8")
        index[:held, 0] = np.arange(held, dtype=np.uint64) * np.uint64(len(self._buffer))
        index[:held, 1] = len(self._buffer)
        footer = index.reshape(-1).view(np.uint8)
        checksum = np.array([google_crc32c.value(footer)], "<u4").view(np.uint8)
        self._write(np.concatenate([footer, checksum]))
        self._close_file()

    def _close_file(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _write(self, data: NDArray[np.uint8]) -> None:
        assert self._fd is not None
        view = data.data
        with disk_errors(self._paths[-1]):
            while view:
                view = view[os.write(self._fd, view) :]

    def _sync(self) -> None:
        for path in self._paths:
            with disk_errors(path):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def _write_metadata(self, chunk_rows: int, shard_rows: int) -> None:
        checksums = np.array(self._checksums, np.uint32)
        with disk_errors(self.group_path / self.name):
            group = zarr.open_group(self.group_path, mode="a")
            sums = group.create_array(
                own := f"checksums/{self.name}",
                shape=checksums.shape,
                chunks=(min(max(1, len(checksums)), 2**16),),
                dtype="uint32",
                compressors=None,
                fill_value=0,
                attributes=described(own, {}),
                dimension_names=dimensions(own, 1),
            )
            sums[:] = checksums
            group.create_array(
                self.name,
                shape=(self.count, *self.row_shape),
                chunks=(chunk_rows, *self.row_shape),
                shards=(shard_rows, *self.row_shape),
                dtype=self.dtype,
                compressors=None,
                filters=None,
                fill_value=0,
                attributes=described(self.name, self.attributes),
                dimension_names=dimensions(self.name, 1 + len(self.row_shape)),
            )


def write_array(group_path: Path | str, name: str, array: NDArray[Any], attributes: Mapping[str, Any] | None = None) -> None:
    """Write `array` [count, ...] as `group_path/name` in the appender's layout; for arrays already at hand.

    >>> write_array("papers.ooc", "node/node/split", split)  # int8[N]
    """
    array = np.asarray(array)
    with Appender(group_path, name, array.shape[1:], array.dtype, attributes, count=len(array)) as appender:
        appender.append(array)
