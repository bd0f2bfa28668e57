"""The checksums beside an array: `checksums/<name>`, the crc32c (uint32) of each of its inner chunks."""

from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

from ooc.stores.errors import StoreError

FOLDER = "checksums"


def has_checksums(group: Path, name: str) -> bool:
    return (group / FOLDER / name / "zarr.json").exists()


def checksums(group: Path, name: str) -> NDArray[np.uint32]:
    """Return the checksums of the array `name`, uint32[chunks]. Raises StoreError if they cannot be read."""
    try:
        return np.asarray(zarr.open_array(group / FOLDER / name, mode="r")[:], dtype=np.uint32)
    except Exception as error:  # zarr passes on any exception
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"{group / FOLDER / name} is damaged: {detail}; build the store again") from error
