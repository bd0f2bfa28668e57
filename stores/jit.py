"""One decorator for hot loops: a numba kernel that releases the GIL and is cached on disk.

numba's cache notices an edit to the file that holds a kernel but not to a helper kernel in another file, so the cache
folder's name carries a hash of every kernel source of the package (and of `stores`, whose kernels other packages call).
"""

import hashlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


@cache
def cache_dir(package: str) -> str:
    """Where the compiled kernels of an imported package are kept, as its sources are now.

    >>> cache_dir("ooc")
    '/home/me/.cache/ooc/numba-3f0c...'
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for name in sorted({package, "stores"}):
        roots = getattr(sys.modules.get(name), "__path__", [])
        for root in sorted(roots):
            for path in sorted(Path(root).rglob("*.py")):
                text = path.read_bytes()
                if b"@kernel" in text:
                    digest.update(path.name.encode() + text)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(base / "ooc" / f"numba-{digest.hexdigest()[:16]}")


def kernel(function: F) -> F:
    """`numba.njit(nogil=True, cache=True)` with a cache folder keyed by all kernel sources.

    >>> @kernel
    ... def total(values: np.ndarray) -> float: ...
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = os.environ.get("NUMBA_CACHE_DIR") or cache_dir(function.__module__.split(".")[0])
    try:
        return numba.njit(nogil=True, cache=True)(function)
    finally:
        numba.config.CACHE_DIR = before
