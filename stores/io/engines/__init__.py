"""Engines execute read plans; they know files and bytes, not rows."""

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import ConfigError
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.io.segments import Segments


class Engine(Protocol):
    """Reads extents of the files behind one array. Thread-safe: several calls may run at once."""

    name: str
    alignment: int
    """offsets and lengths of a plan must be multiples of this many bytes"""
    reaches_device: bool
    """whether the buffer of `read` may also be in GPU memory (anything with a `__cuda_array_interface__`)"""
    reason: str | None
    """why the engine does less than its name says (no O_DIRECT here), or None"""
    note: str | None
    """further information for the user, such as why it was chosen, or None"""

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        """Fill `buffer`, uint8[plan.nbytes], with the concatenated extents; returns the bytes read from disk.

        Bytes beyond the end of the array (the last extent is aligned) are left unchanged. Raises StoreError naming the file if
        it is too short or cannot be read.
        """

    def gather(self, plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None = None) -> int:
        """Fill `out`, uint8[n * row_bytes], with the n requested rows in the order requested.

        With `at` (int64[n], distinct), row i goes to out[at[i] * row_bytes :] instead, and `out` may be longer. Rows are copied
        from each extent as it arrives, so the extents are never all in memory. Returns and raises as `read` does.
        """

    def close(self) -> None:
        """Release descriptors, maps and threads; idempotent."""


def open_engine(name: str, segments: Segments) -> Engine:
    """Open the engine `name` over `segments`: "uring", "pread", "mmap", "gds" or "auto".

    "auto" is uring. If the system does not allow io_uring, both "uring" and "auto" are pread, whose `reason` says why. "auto"
    never selects "gds": into host memory uring needs the least CPU time, and whether gds is faster into GPU memory is measured
    where such a buffer is filled (`ooc.runtime.device_reads`). Of an array far away, the engine reads what the cache holds.

    Raises:
        ConfigError: If the name is unknown, or "gds" is requested without CUDA or kvikio, or for an array far away.

    >>> open_engine("pread", segments).read(plan, buffer)
    """
    from ooc.stores.io.engines.gds import GdsEngine
    from ooc.stores.io.engines.mmap import MmapEngine
    from ooc.stores.io.engines.pread import PreadEngine
    from ooc.stores.io.engines.remote import RemoteEngine
    from ooc.stores.io.engines.ring import unavailable
    from ooc.stores.io.engines.uring import UringEngine
    from ooc.stores.io.remote.array import RemoteArray

    engines: dict[str, Any] = {"uring": UringEngine, "pread": PreadEngine, "mmap": MmapEngine, "gds": GdsEngine}
    if name not in {"auto", *engines}:
        raise ConfigError(f"no engine is called {name!r}; there are auto, {', '.join(sorted(engines))}")
    if isinstance(segments.far, RemoteArray):
        if name == "gds":
            raise ConfigError(f"engine gds reads files of a local disk, and {segments.far.name} is none: leave `engine` out")
        inner: Any = open_engine(name, replace(segments, far=None))
        return RemoteEngine(inner, segments.far)
    why_not = unavailable() if name in ("auto", "uring") else None
    kind = engines["uring" if name == "auto" else name] if why_not is None else PreadEngine
    engine: Engine = kind(segments)
    if why_not is not None:
        engine.reason = "; ".join(filter(None, [why_not, engine.reason]))
    if name == "auto":
        engine.note = "auto" if why_not else "auto: the system allows io_uring"
    return engine


def describe(engine: Engine) -> str:
    """Describe the engine in use, why it was chosen, and its limitations.

    >>> describe(open_engine("auto", segments))
    'uring (auto: the system allows io_uring)'
    """
    details = "; ".join(filter(None, [engine.note, engine.reason]))
    return f"{engine.name} ({details})" if details else engine.name
