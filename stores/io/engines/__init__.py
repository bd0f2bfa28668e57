"""Engines carry out read plans: they know files and bytes, not rows of anything."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stores.errors import ConfigError
from stores.io.read_plan import ReadPlan
from stores.io.segments import Segments


class Engine(Protocol):
    """Reads extents of the files behind one array. Thread-safe: several calls may run at once."""

    name: str
    alignment: int
    """Bytes that the offsets and lengths of a plan must be multiples of."""
    reaches_device: bool
    """Whether a buffer may lie in GPU memory."""
    reason: str | None
    """Why the engine does less than its name says (no O_DIRECT here), or None."""
    note: str | None
    """What else a user may want to know: why it was chosen, what is active; or None."""

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        """Fill buffer, uint8[plan.nbytes], with the extents one behind the other; returns the bytes read from disk.

        Bytes beyond the end of the array (the last extent is aligned) are left as they were. Raises StoreError naming the
        file where it holds fewer bytes than wanted or cannot be read.
        """

    def gather(self, plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None = None) -> int:
        """Fill out, uint8[n * row_bytes], with the n wanted rows in the order they were asked for.

        at: int64[n], distinct: row i goes to out[at[i] * row_bytes :] instead, and `out` may be longer.
        The rows are copied out of each extent while it is hot, so the extents never stand in memory together. Returns
        and raises as `read` does.
        """

    def close(self) -> None:
        """Give back descriptors, maps and threads; idempotent."""


def open_engine(name: str, segments: Segments) -> Engine:
    """The engine called `name` over `segments`: "uring", "pread", "mmap", "gds", or "auto": uring where the system allows it.

    Where it does not, "uring" and "auto" are pread, whose `reason` says why. "gds" is never chosen by "auto": windows are read
    into the host's memory, where uring takes the least processor time. ConfigError for another name, and for "gds" without
    CUDA or kvikio.

    >>> open_engine("pread", segments).read(plan, buffer)
    """
    from stores.io.engines.gds import GdsEngine
    from stores.io.engines.mmap import MmapEngine
    from stores.io.engines.pread import PreadEngine
    from stores.io.engines.ring import unavailable
    from stores.io.engines.uring import UringEngine

    engines: dict[str, Any] = {"uring": UringEngine, "pread": PreadEngine, "mmap": MmapEngine, "gds": GdsEngine}
    if name not in {"auto", *engines}:
        raise ConfigError(f"no engine is called {name!r}; there are auto, {', '.join(sorted(engines))}")
    why_not = unavailable() if name in ("auto", "uring") else None
    kind = engines["uring" if name == "auto" else name] if why_not is None else PreadEngine
    engine: Engine = kind(segments)
    if why_not is not None:
        engine.reason = "; ".join(filter(None, [why_not, engine.reason]))
    if name == "auto":
        engine.note = "auto" if why_not else "auto: the system allows io_uring"
    return engine


def describe(engine: Engine) -> str:
    """The engine in use, why it was chosen, and why it does less than was asked of it.

    >>> describe(open_engine("auto", segments))
    'uring (auto: the system allows io_uring)'
    """
    told = "; ".join(filter(None, [engine.note, engine.reason]))
    return f"{engine.name} ({told})" if told else engine.name
