"""Zarr arrays as Rows: byte arithmetic for shards stored in order, zarr's own decoder for all others."""

import os
import threading
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, ShardingCodec
from zarr.core.metadata.v3 import ArrayV3Metadata

from ooc.stores.arrays.checksums import checksums, has_checksums
from ooc.stores.arrays.rows import AnyArray, Ids, check_request
from ooc.stores.arrays.segment_rows import SegmentRows
from ooc.stores.arrays.zarr_write import MISSING, PAGE_BYTES
from ooc.stores.errors import StoreError
from ooc.stores.io.chunk_sums import ADVICE, ChunkSums
from ooc.stores.io.remote.group import RemoteGroup
from ooc.stores.io.segments import Segments, open_for_reading
from ooc.stores.io.threads import Background

BLOCK_BYTES = 16 * 2**20
"""decoded at a time by zarr, unless one chunk is larger"""


class ShardedRows(SegmentRows):
    """Rows of uncompressed shards, read by an engine directly from the files; `attributes` are the array's."""

    def __init__(self, array: "zarr.Array[Any]", segments: Segments, engine: str = "auto", verify: bool = False) -> None:
        super().__init__(array.shape, np.dtype(array.dtype), segments, engine, verify)
        self.attributes: dict[str, Any] = dict(array.attrs)


class ForeignRows(Background):
    """Rows of any Zarr array, decoded by zarr: compressed, in another order, or with missing chunks.

    Reads requested rows in runs of neighboring chunks, at most about 16 MiB (or one chunk) at a time and one thread at a time
    (zarr has its own threads).
    """

    def __init__(self, array: "zarr.Array[Any]", path: Path) -> None:
        self.array = array
        self.path = path
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self.attributes: dict[str, Any] = dict(array.attrs)
        self._decoding = threading.Lock()

    @property
    def row_bytes(self) -> int:
        """Bytes of one decoded row."""
        return _row_bytes(self.shape, self.dtype)

    @property
    def block_bytes(self) -> int:
        """Most bytes decoded at a time."""
        return self._block_rows * self.row_bytes

    @property
    def _block_rows(self) -> int:
        chunk_rows = int(self.array.chunks[0])
        return max(chunk_rows, BLOCK_BYTES // max(1, self.row_bytes) // chunk_rows * chunk_rows)

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """Set out[i] to row ids[i]; see `Rows.read`. Returns the bytes decoded."""
        check_request(self, ids, out, at)
        if self._ended:
            raise StoreError(f"{self.path} is closed: open it again to read from it")
        order = np.argsort(ids, kind="stable")
        ascending = ids[order]
        chunk_rows, most_rows = self.array.chunks[0], self._block_rows
        nbytes = position = 0
        while position < len(ids):
            begin = int(ascending[position])
            limit = begin // chunk_rows * chunk_rows + most_rows
            stop = position + int(np.searchsorted(ascending[position:], limit))
            chunks = ascending[position:stop] // chunk_rows
            jumps = np.flatnonzero(np.diff(chunks) > 1)  # unneeded chunks are not decoded
            stop = position + int(jumps[0]) + 1 if len(jumps) else stop
            places = order[position:stop]
            with self._decoding:
                block = self._decode(begin, int(ascending[stop - 1]) + 1)
                out[places if at is None else at[places]] = block[ascending[position:stop] - begin]
                nbytes += block.nbytes
                del block
            position = stop
        return nbytes

    def _decode(self, begin: int, end: int) -> AnyArray:
        try:
            return np.asarray(self.array[begin:end])
        except Exception as error:  # zarr passes on any exception of its codecs
            detail = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StoreError(f"{self.path}: rows {begin} to {end - 1} cannot be decoded: {detail}") from error

    def map(self, private: bool = False) -> AnyArray:
        """Return the whole array in memory, because decoded bytes cannot be mapped."""
        return self._decode(0, self.shape[0])

    def close(self) -> None:
        """Release the threads; idempotent."""
        self._end_background()


def open_zarr_rows(group_path: Path | str, name: str, engine: str = "auto", verify: bool = False) -> ShardedRows | ForeignRows:
    """Open the array `group_path/name`, reading the index of each of its shards.

    Shards with uncompressed, complete and ordered chunks are read by byte arithmetic through `engine` (see `open_engine`), all
    others through zarr. With `verify` every chunk is compared with its checksum before rows are read from it, otherwise those
    that are read whole. Raises StoreError if the array is missing, or a shard is truncated, damaged or, in arrays of
    `ooc.stores.arrays.zarr_write` (which have checksums), missing.

    >>> open_zarr_rows("papers.ooc", "node/node/x").read(ids, out)
    """
    path = Path(group_path) / name
    try:
        array = zarr.open_array(path, mode="r")
    except Exception as error:  # missing, or metadata zarr cannot parse: exceptions of many types
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"{path} cannot be opened as a Zarr array: {detail}") from error
    if array.ndim == 0 or _row_bytes(array.shape, np.dtype(array.dtype)) == 0:
        raise StoreError(f"{path} has no rows: its shape is {list(array.shape)}")
    segments = _segments(array, path, Path(group_path))
    return ForeignRows(array, path) if segments is None else ShardedRows(array, segments, engine, verify)


def _row_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(dtype.itemsize * np.prod(shape[1:], dtype=np.int64))


class Shards(NamedTuple):
    """Where an array of plain shards has its bytes."""

    keys: list[str]
    """files of the shards, below the array"""
    chunks: NDArray[np.int64]
    """int64[k], chunks in use of each"""
    entries: int
    """of a shard's index"""
    chunk_rows: int
    chunk_bytes: int

    @property
    def index_bytes(self) -> int:
        """Size of the index at the end of a shard."""
        return self.entries * 16 + 4

    @classmethod
    def of(cls, array: "zarr.Array[Any]") -> "Shards | None":
        """Return them by the array's metadata; None if its bytes are not simply the rows in order."""
        if not _plain_shards(array):
            return None
        assert array.shards is not None
        shard_rows, chunk_rows = array.shards[0], array.chunks[0]
        row_bytes = _row_bytes(array.shape, np.dtype(array.dtype))
        shards = -(-array.shape[0] // shard_rows)
        chunks = np.full(shards, shard_rows // chunk_rows)
        if shards:
            chunks[-1] = -(-(array.shape[0] - (shards - 1) * shard_rows) // chunk_rows)
        if shards > 1 and shard_rows * row_bytes % PAGE_BYTES:
            return None  # the next shard would start within a page
        return cls(chunk_keys(array), chunks, shard_rows // chunk_rows, chunk_rows, chunk_rows * row_bytes)


def chunk_keys(array: "zarr.Array[Any]") -> list[str]:
    """Files of an array's chunks or shards, below the array, in order."""
    size = array.shards or array.chunks
    grid = (range(-(-length // step)) for length, step in zip(array.shape, size, strict=True))
    return [array.metadata.encode_chunk_key(place) for place in product(*grid)]


def _segments(array: "zarr.Array[Any]", path: Path, group_path: Path) -> Segments | None:
    """Return the shards as segments, or None if their bytes are not simply the rows in order."""
    name = path.relative_to(group_path).as_posix()
    own, shards = has_checksums(group_path, name), Shards.of(array)
    if shards is None:
        return None
    paths = tuple(path / key for key in shards.keys)
    for file, count in zip(paths, shards.chunks.tolist(), strict=True):
        if not own and not file.exists():
            return None  # a shard of fill values only
        if not _in_order(file, shards.entries, count, shards.chunk_bytes, own):
            return None
    remote, payload = RemoteGroup.at(group_path), shards.chunks * shards.chunk_bytes
    sums = None
    if own and array.shape[0]:
        shown, advice = (path, ADVICE) if remote is None else (remote.url / name, remote.advice)
        load = partial(checksums, group_path, name)
        sums = ChunkSums(shown, shards.chunk_bytes, shards.chunk_rows, array.shape[0], load, advice)
    far = None if remote is None or not own else remote.array(name, paths, payload, shards.chunk_bytes, sums)
    return Segments(paths, payload, sums, far)


def _plain_shards(array: "zarr.Array[Any]") -> bool:
    """Whether the metadata describe shards of whole rows, plain little-endian chunks and an index at the end."""
    metadata = array.metadata
    if not isinstance(metadata, ArrayV3Metadata) or len(metadata.codecs) != 1:
        return False
    codec = metadata.codecs[0]
    if not isinstance(codec, ShardingCodec) or codec.index_location.value != "end" or array.shards is None:
        return False
    inner, index = codec.codecs, [type(part).__name__ for part in codec.index_codecs]
    if len(inner) != 1 or not isinstance(inner[0], BytesCodec) or index != ["BytesCodec", "Crc32cCodec"]:
        return False
    endian = inner[0].endian is None or inner[0].endian.value == "little"
    whole_rows = array.shards[1:] == array.shape[1:] and array.chunks[1:] == array.shape[1:]
    return endian and whole_rows and np.dtype(array.dtype).kind in "biufc"


def _in_order(file: Path, entries: int, chunks: int, chunk_bytes: int, own: bool) -> bool:
    """Whether the first `chunks` chunks of a shard are stored consecutively in its file, from byte 0.

    Raises StoreError if the file is too short or its index does not match the checksum.
    """
    index_bytes = entries * 16 + 4
    needed = chunks * chunk_bytes + index_bytes if own else index_bytes
    fd = open_for_reading(file, needed)
    try:
        size = os.fstat(fd).st_size
        footer = os.pread(fd, index_bytes, size - index_bytes)
    finally:
        os.close(fd)
    crc = int.from_bytes(footer[-4:], "little")
    if len(footer) != index_bytes or google_crc32c.value(footer[:-4]) != crc:
        raise StoreError(f"{file} is truncated or damaged: the checksum of its index does not match")
    index: NDArray[np.uint64] = np.frombuffer(footer, "<u8", entries * 2).reshape(entries, 2)
    present = index[index[:, 0] != MISSING]
    if len(present) and int(present.sum(axis=1).max()) > size - index_bytes:
        raise StoreError(f"{file} is truncated: {size} bytes are fewer than its index requires")
    expected = np.arange(chunks, dtype=np.uint64) * np.uint64(chunk_bytes)
    in_order = bool((index[:chunks, 0] == expected).all() and (index[:chunks, 1] == np.uint64(chunk_bytes)).all())
    if own and not in_order:
        raise StoreError(f"{file} is damaged: its index does not list the chunks that were written")
    return in_order
