"""Encodings of feature rows on disk and their float32 values: float16, bfloat16, int8 with a scale per column.

Caches and superbatches keep rows as stored, so that more fit; rows are converted as a batch's rows are gathered. The conversion
of one element is a kernel (`of_float16`, `of_bfloat16`, `of_int8`) for use by other kernels. Symmetric 8-bit quantization as in
Jacob et al. (2018), per column.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr
from numpy.typing import NDArray

from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows, check_request
from ooc.stores.errors import StoreError
from ooc.stores.io.threads import Background
from ooc.stores.jit import kernel

DTYPE, SCALE = "ooc_dtype", "ooc_scale"
"""attributes of an array: the type of its values if Zarr lacks it, and the name of the array of scales next to it"""
INT8_MOST = 127
_PIECE_BYTES = 16 * 2**20
_NO_SCALE = np.empty(0, np.float32)
_LARGEST_SCALE = np.nextafter(np.float32(np.finfo(np.float32).max / INT8_MOST), np.float32(0))  # 127 times this is still finite


@dataclass(frozen=True, eq=False)
class Encoding:
    """The meaning of a row's bytes.

    Attributes:
        stored: Dtype on disk and in caches.
        name: "float16", "bfloat16" (stored as uint16), "int8" (with `scale`), or the dtype's own name.
        scale: float32[F] for int8, else empty.
        as_float: Whether integers are given as float32.

    >>> encoding = Encoding.plain(np.dtype(np.float16))
    >>> out = np.empty((3, 128), encoding.dtype)  # float32
    >>> encoding.gather(stored_rows, np.array([5, 0, 5]), out)
    """

    stored: np.dtype[Any]
    name: str
    scale: NDArray[np.float32]
    as_float: bool = False

    @classmethod
    def plain(cls, dtype: np.dtype[Any]) -> "Encoding":
        """The encoding of an array without attributes about its dtype."""
        return cls(dtype, str(dtype), _NO_SCALE)

    @classmethod
    def raw(cls, dtype: np.dtype[Any]) -> "Encoding":
        """An encoding that leaves rows as stored."""
        return cls(dtype, "", _NO_SCALE)

    def floats(self) -> "Encoding":
        """The encoding whose values are float32 where they would be integers."""
        return replace(self, as_float=True) if self.stored.kind in "iu" and self.is_native else self

    @property
    def is_native(self) -> bool:
        """Whether numpy's dtype describes the values."""
        return self.name == str(self.stored) and not len(self.scale)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values: float32 for the three short types and integers given as such, else as stored."""
        return np.dtype(np.float32) if self.is_short else self.stored

    @property
    def is_short(self) -> bool:
        """Whether values are converted from what is stored."""
        return self.name in ("float16", "bfloat16") or bool(len(self.scale)) or self.as_float

    @property
    def shown(self) -> str:
        """Name for messages: "bfloat16", "int8 scaled" (a plain int8 array holds integers)."""
        return f"{self.name} scaled" if len(self.scale) else self.name

    @property
    def digest(self) -> str:
        """Hash that distinguishes encodings, including the scale."""
        return f"{self.shown}:{google_crc32c.value(self.scale.tobytes()):08x}" if len(self.scale) else self.shown

    def gather(self, rows: AnyArray, at: NDArray[Any], out: AnyArray) -> None:
        """Set out[i] to the value of rows[at[i]], converting each row as it is copied.

        Args:
            rows: [count, *row shape] of `stored`, C-contiguous.
            at: int32|int64[n] of 0..count-1, not checked.
            out: [n, *row shape] of `dtype`, C-contiguous.
        """
        if not self.is_short:
            np.take(rows, at, axis=0, out=out, mode="clip")  # "clip" writes directly to out
            return
        width = int(np.prod(rows.shape[1:], dtype=np.int64))
        flat, values = rows.reshape(len(rows), width), out.reshape(len(out), width)
        if self.as_float:
            gather_integers(flat, at, self.scale, values)
        elif self.name == "int8":
            gather_int8(flat, at, self.scale, values)
        elif self.name == "bfloat16":
            gather_bfloat16(flat, at, self.scale, values)
        else:
            gather_float16(flat.view(np.uint16), at, self.scale, values)


@kernel
def of_float16(stored: np.uint16) -> np.float32:
    """Convert a float16's bits, exactly and including subnormals, regardless of the processor's float32 mode.

    Uses integer arithmetic, because numba has no float16 on the CPU; a table of all 65,536 values was half as fast.
    """
    bits = np.uint32(stored)
    size = np.uint32(bits & np.uint32(0x7FFF))
    raised = (
        np.uint32(224 << 23) if size >= np.uint32(0x7C00) else np.uint32(112 << 23)
    )  # exponent offset of infinity and NaN; of all others
    normal = np.uint32(np.uint32(size << np.uint32(13)) + raised)
    subnormal = np.float32(np.float32(np.int32(size)) * np.float32(2.0**-24)).view(np.uint32)
    value = subnormal if size < np.uint32(0x400) else normal
    return np.uint32(value | np.uint32(np.uint32(bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@kernel
def of_bfloat16(stored: np.uint16) -> np.float32:
    """Convert a bfloat16's bits, the upper half of a float32's."""
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


@kernel
def of_int8(stored: np.int8, scale: np.float32) -> np.float32:
    """Convert a quantized value; `scale` is its column's step."""
    return np.float32(np.float32(stored) * scale)


@kernel
def gather_integers(rows: AnyArray, at: AnyArray, scale: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out[i] = rows[at[i]]: integers[count, F], int32|int64[n], float32[0] (none), float32[n, F]."""
    for i in range(len(at)):
        row, values = rows[at[i]], out[i]
        for j in range(len(values)):
            values[j] = np.float32(row[j])


@kernel
def gather_float16(rows: AnyArray, at: AnyArray, scale: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out[i] = rows[at[i]]: uint16[count, F] (the bits), int32|int64[n], float32[0] (none), float32[n, F]."""
    for i in range(len(at)):
        row, values = rows[at[i]], out[i]
        for j in range(len(values)):
            values[j] = of_float16(row[j])


@kernel
def gather_bfloat16(rows: AnyArray, at: AnyArray, scale: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out[i] = rows[at[i]]: uint16[count, F] (the bits), int32|int64[n], float32[0] (none), float32[n, F]."""
    for i in range(len(at)):
        row, values = rows[at[i]], out[i]
        for j in range(len(values)):
            values[j] = of_bfloat16(row[j])


@kernel
def gather_int8(rows: AnyArray, at: AnyArray, scale: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out[i] = rows[at[i]] * scale: int8[count, F], int32|int64[n], float32[F], float32[n, F]."""
    for i in range(len(at)):
        row, values = rows[at[i]], out[i]
        for j in range(len(values)):
            values[j] = of_int8(row[j], scale[j])


def encoding_of(rows: Rows, folder: Path | str) -> Encoding:
    """Return the encoding stated in an array's attributes; `folder` contains it and its scales.

    Raises StoreError if the attributes are unknown, or the scales are missing or do not fit.

    >>> encoding_of(open_zarr_rows("papers.ooc", "node/node/x"), "papers.ooc/node/node").name
    'bfloat16'
    """
    attributes: Mapping[str, Any] = getattr(rows, "attributes", {})
    name = attributes.get(DTYPE)
    if name is None:
        return Encoding.plain(rows.dtype)
    if (name, str(rows.dtype)) == ("bfloat16", "uint16"):
        return Encoding(rows.dtype, "bfloat16", _NO_SCALE)
    if (name, str(rows.dtype)) == ("int8", "int8"):
        if attributes.get(SCALE) is None:
            raise StoreError(
                f"an array in {folder} claims to hold scaled int8, but lacks the attribute {SCALE}, "
                f"the name of the array with its scales; set that attribute, or build the store again"
            )
        width = int(np.prod(rows.shape[1:], dtype=np.int64))
        return Encoding(rows.dtype, "int8", _read_scale(Path(folder) / str(attributes.get(SCALE)), width))
    raise StoreError(
        f"an array in {folder} claims to hold {name!r} in {rows.dtype}, which this version of ooc does not know: upgrade ooc"
    )


def meaning(array: Path) -> str:
    """Return what an array's attributes say about its values, "" if nothing; scales are a separate array."""
    attributes = _attributes(array)
    return f"\0{attributes[DTYPE]}\0{attributes.get(SCALE, '')}" if DTYPE in attributes else ""


def names_of_scales(folder: Path) -> set[str]:
    """Names of the arrays in `folder` that are scales of others."""
    names = (_attributes(metadata.parent).get(SCALE) for metadata in folder.glob("*/zarr.json"))
    return {str(name) for name in names if name is not None}


def arrays_in(folder: Path) -> list[str]:
    """Names of the arrays in `folder`, sorted, without scales."""
    return sorted({metadata.parent.name for metadata in folder.glob("*/zarr.json")} - names_of_scales(folder))


def _attributes(array: Path) -> dict[str, Any]:
    """The array's attributes, {} if it cannot be read; opening it reports the error."""
    try:
        return dict(json.loads((array / "zarr.json").read_bytes())["attributes"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read_scale(path: Path, width: int) -> NDArray[np.float32]:
    try:
        scale = np.asarray(zarr.open_array(path, mode="r")[:])
    except Exception as error:  # zarr passes on any exception
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"{path}, the scales of int8 rows, cannot be read: {detail}; build the store again") from error
    if scale.dtype != np.float32 or scale.shape != (width,) or not ((scale > 0) & np.isfinite(scale)).all():
        raise StoreError(
            f"{path} holds {scale.dtype}{list(scale.shape)}: it needs one positive float32 for each of {width} columns; "
            "build the store again"
        )
    return np.ascontiguousarray(scale)


class DecodedRows(Background):
    """The decoded values of `stored` rows (see `Encoding`), converted as they are read.

    >>> DecodedRows(stored, encoding).read(ids, out)  # float32[n, F]
    """

    def __init__(self, stored: Rows, encoding: Encoding) -> None:
        self.stored, self.encoding = stored, encoding
        self.shape: tuple[int, ...] = stored.shape
        self.dtype: np.dtype[Any] = encoding.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's values."""
        return int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=np.int64))

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """Set out[i] to row ids[i]; see `Rows.read`. Needs at most 16 MiB besides `out`, none for rows in memory."""
        check_request(self, ids, out, at)
        if at is None and isinstance(self.stored, ArrayRows):
            self.encoding.gather(self.stored.array, ids, out)
            return 0
        nbytes, step = 0, max(1, _PIECE_BYTES // (self.stored.row_bytes + self.row_bytes))
        for first in range(0, len(ids), step):
            part = slice(first, min(first + step, len(ids)))
            raw = np.empty((part.stop - first, *self.shape[1:]), self.stored.dtype)
            nbytes += self.stored.read(ids[part], raw)
            values = out[part] if at is None else np.empty(raw.shape, self.dtype)
            self.encoding.gather(raw, np.arange(len(raw)), values)
            if at is not None:
                out[at[part]] = values
        return nbytes

    def close(self) -> None:
        """Release the resources of `stored`; idempotent."""
        self._end_background()
        self.stored.close()


def scale_name(name: str) -> str:
    """Name of the array with the scales of array `name`."""
    return f"{name}_scale"


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 values to the nearest bfloat16 (ties to even) and return the bits; NaN stays NaN."""
    out = np.empty(values.shape, np.uint16)
    _round(np.ascontiguousarray(values).reshape(-1).view(np.uint32), out.reshape(-1))
    return out


@kernel
def _round(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    for i in range(len(bits)):
        odd = np.uint32((bits[i] >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        quiet = np.uint32(bits[i] >> np.uint32(16)) | np.uint32(0x40)
        out[i] = np.uint16(quiet if np.uint32(bits[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded)


def scale_of(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the step of each column from its largest magnitude, float32[F]; 1 for a column of zeros."""
    scale = np.minimum((largest.astype(np.float64) / INT8_MOST).astype(np.float32), _LARGEST_SCALE)
    return np.where(scale > 0, scale, np.float32(1))


def to_int8(values: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.int8]:
    """Round values (float32[n, F], no NaN) to multiples of each column's `scale` (float32[F]): int8[n, F], -127 to 127."""
    out = np.empty(values.shape, np.int8)
    _quantise(np.ascontiguousarray(values), scale, out)
    return out


@kernel
def _quantise(values: NDArray[np.float32], scale: NDArray[np.float32], out: NDArray[np.int8]) -> None:
    for i in range(len(values)):
        for j in range(len(scale)):
            step = np.rint(np.float64(values[i, j]) / np.float64(scale[j]))
            out[i, j] = np.int8(min(max(step, -127.0), 127.0))
