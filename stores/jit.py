"""One decorator for hot loops: a numba kernel that releases the GIL and is compiled once for a machine.

numba's own cache notices an edit to the file that holds a kernel, but not to a helper kernel in another file, and any edit to
that file throws away all its kernels. Here compiled code is kept under a key of the kernel and of all it uses
(`ooc.stores.kernel_key`), one file each: an edit recompiles what it changes and nothing else, and another checkout with the
same kernels finds them compiled.
"""

import contextlib
import hashlib
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy.ma  # noqa: F401  # numba's first call of a kernel imports it, where an interrupt would leave its lock taken
from numba.core.compiler import CompileResult
from numba.extending import overload as numba_overload

from ooc.stores.kernel_key import kernel_key

try:
    from numba.core.caching import NullCache
    from numba.core.serialize import dumps

    NUMBA_IS_KNOWN = hasattr(CompileResult, "_reduce") and hasattr(CompileResult, "_rebuild")
except ImportError:
    NUMBA_IS_KNOWN, NullCache = False, object

F = TypeVar("F", bound=Callable[..., object])
UNUSED_DAYS = 60
"""Compiled code that nobody has loaded for so long is removed"""
_QUIET_SECONDS = 1.0
"""of compiling, of which nobody is told"""
_DAY = 86_400
_CHECKSUM = hashlib.sha256().digest_size
_OWN_FOLDER = re.compile(r"numba-[0-9a-f]{16}")
"""of `package_folder`"""


def cache_folder() -> Path:
    """Where compiled kernels are kept: $NUMBA_CACHE_DIR, or `ooc/kernels` in the user's cache.

    >>> cache_folder()
    PosixPath('/home/me/.cache/ooc/kernels')
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ooc" / "kernels"


class Compilations:
    """Kernels that this process has compiled and kept, so that no process after it does.

    count: how many. A new machine compiles for half a minute, of which somebody may be told.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seconds = 0.0
        self._note: Callable[[str], None] | None = None

    @contextlib.contextmanager
    def noted(self, note: Callable[[str], None]) -> Iterator[None]:
        """Call `note` once with a line, if kernels are compiled in the block: at once where none are kept yet, else when they
        have taken a second."""
        before, self._note, self._seconds = self._note, note, 0.0
        try:
            yield
        finally:
            self._note = before

    def begin(self) -> None:
        """A kernel is compiled now."""
        if self._note is not None and next(cache_folder().glob("*.kernel"), None) is None:
            self._say()

    def end(self, seconds: float) -> None:
        """A kernel is compiled, and kept."""
        self.count += 1
        self._seconds += seconds
        if self._seconds > _QUIET_SECONDS:
            self._say()

    def _say(self) -> None:
        note, self._note = self._note, None
        if note is not None:
            note("compiling kernels, which is done once on a machine ...")


COMPILATIONS = Compilations()


class KernelCache(NullCache):  # type: ignore[misc]
    """The compiled code of one kernel on disk, a file for each signature. What cannot be read or written is compiled again.

    kernel: numba's dispatcher.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._since = kernel, 0.0

    @property
    def cache_path(self) -> str:
        """For numba's statistics."""
        return str(cache_folder())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """numba's result of compiling for the signature, or None."""
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        data = None if path is None else _read(path)
        if data is not None:
            with contextlib.suppress(Exception):  # whatever cannot be loaded is compiled again
                return CompileResult._rebuild(target_context, *pickle.loads(data))
        COMPILATIONS.begin()
        self._since = time.monotonic()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep numba's result, if it has no address of this process in it."""
        path = self._path(sig, data.codegen)
        if path is None or data.library.has_dynamic_globals or any(not lifted.can_cache for lifted in data.lifted):
            return
        with contextlib.suppress(Exception):  # whatever cannot be written is compiled again
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, dumps(data._reduce()))
            COMPILATIONS.end(time.monotonic() - self._since)
        remove_unused(path.parent)

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        try:
            key = kernel_key(self._kernel, sig, codegen.magic_tuple())
        except Exception:  # what cannot be described (NoKeyError), or has surprises, is compiled again
            return None
        function = self._kernel.py_func
        return cache_folder() / f"{function.__module__}.{function.__name__}-{key}.kernel"


def _read(path: Path) -> bytes | None:
    """What was written, unless it is not there or damaged."""
    try:
        checksum, data = (content := path.read_bytes())[:_CHECKSUM], content[_CHECKSUM:]
    except OSError:
        return None
    if checksum != hashlib.sha256(data).digest():
        return None
    with contextlib.suppress(OSError):  # where it is not ours to change
        if time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)
    return data


def _write(path: Path, data: bytes) -> None:
    """All of the file or nothing: other processes read it meanwhile."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


@cache
def remove_unused(folder: Path, days: int = UNUSED_DAYS) -> None:
    """Remove compiled code that was not loaded for `days` days, and folders of numba's own cache; once a process."""
    oldest = time.time() - days * _DAY
    parents = [folder] if os.environ.get("NUMBA_CACHE_DIR") else [folder, folder.parent]  # where earlier versions had theirs
    for path in [path for parent in parents if parent.is_dir() for path in parent.iterdir()]:
        with contextlib.suppress(OSError):  # another process removes it too
            if path.stat().st_mtime >= oldest:
                continue
            if _OWN_FOLDER.fullmatch(path.name):
                shutil.rmtree(path)
            elif path.suffix in (".kernel", ".tmp") and path.parent == folder:
                path.unlink()


@cache
def package_folder(package: str) -> str:
    """numba's own cache, for a numba that is not as `KernelCache` knows it: keyed by all kernel sources of a package."""
    digest = hashlib.sha256(numba.__version__.encode())
    for name in sorted({package, "ooc.stores"}):
        for root in sorted(getattr(sys.modules.get(name), "__path__", [])):
            for path in sorted(Path(root).rglob("*.py")):
                text = path.read_bytes()
                if b"@kernel" in text:
                    digest.update(path.name.encode() + text)
    folder = cache_folder() / f"numba-{digest.hexdigest()[:16]}"
    with contextlib.suppress(OSError):  # not there yet, or not ours to change
        os.utime(folder)
    return str(folder)


class _InterruptsWait:
    """Ctrl-C is handled at the end of the block; a second one at once.

    An exception within numba or LLVM leaves their locks taken and their registries half filled: no kernel could be compiled
    later in the process, and a thread that tries would wait forever.
    """

    def __enter__(self) -> None:
        before, self._late = signal.getsignal(signal.SIGINT), list[tuple[int, Any]]()
        # Python handles signals in the main thread.
        self._handler = before if callable(before) and threading.current_thread() is threading.main_thread() else None
        if self._handler:
            signal.signal(signal.SIGINT, self._keep)

    def __exit__(self, *_: object) -> None:
        if self._handler:
            if signal.getsignal(signal.SIGINT) == self._keep:  # else it was replaced within
                signal.signal(signal.SIGINT, self._handler)
            if self._late:
                self._handler(*self._late[0])

    def _keep(self, number: int, frame: Any) -> None:
        if self._late and self._handler:
            self._handler(number, frame)
        else:
            self._late.append((number, frame))


def _uninterrupted(compile_it: Callable[..., object]) -> Callable[..., object]:
    def compile_or_load(signature: object) -> object:
        with _InterruptsWait():
            return compile_it(signature)

    return compile_or_load


def kernel(function: F) -> F:
    """`numba.njit(nogil=True)`, with the compiled code kept on disk. Ctrl-C waits for the end of loading or compiling it.

    >>> @kernel
    ... def total(values: np.ndarray) -> float: ...
    """
    compiled: Any = numba.njit(nogil=True)(function)
    if NUMBA_IS_KNOWN and isinstance(getattr(compiled, "_cache", None), NullCache):
        compiled._cache = KernelCache(compiled)
    elif hasattr(compiled, "py_func"):  # else numba is disabled
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, package_folder(function.__module__.split(".")[0])
        try:
            compiled = numba.njit(nogil=True, cache=True)(function)
        finally:
            numba.config.CACHE_DIR = before
    if hasattr(compiled, "py_func"):
        compiled.compile = _uninterrupted(compiled.compile)
    return compiled


def overload(function: Any, **options: Any) -> Callable[[F], F]:
    """`numba.extending.overload`, whose implementation and options count in the keys of the kernels that call `function`.

    >>> @overload(value, inline="always")
    ... def _value(row, j): ...
    """

    def register(implementation: F) -> F:
        described = (implementation, repr(sorted(options.items())))
        function.overloads = [*getattr(function, "overloads", ()), described]
        return numba_overload(function, **options)(implementation)

    return register


@kernel
def _nothing() -> None:
    pass


def load_numba() -> None:
    """Load what numba needs to run any kernel, which takes the first one half a second, if none ran yet."""
    _nothing()
