"""`ooc.stores.jit`: compiled code is kept under a key of the kernel and of what it uses, and of nothing else."""

import importlib
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import types

import ooc
from ooc.stores import jit
from ooc.stores.jit import COMPILATIONS, KernelCache, cache_folder, kernel, package_folder, remove_unused
from ooc.stores.kernel_key import NoKeyError, kernel_key
from tests.forked import python

HELPERS = '''
"""Kernels that others call."""
from typing import NamedTuple
import numpy as np
from numba import types
from numba.extending import intrinsic
from ooc.stores.jit import kernel, overload

STEP = 3
TABLE = np.arange(4)
_getpid = types.ExternalFunction("getpid", types.int32())

class Pair(NamedTuple):
    low: int
    high: int

def scaled(x):
    """For kernels."""

@overload(scaled)
def _scaled(x):
    return lambda x: x * 2

@intrinsic
def same(typing, x):
    def generate(context, builder, signature, arguments):
        return arguments[0]
    return x(x), generate

@kernel
def add(x, y):
    """Their sum."""
    return x + y
'''
CALLERS = """
import helpers
from helpers import STEP, TABLE, Pair, _getpid, add, same, scaled
from ooc.stores.jit import kernel

@kernel
def calls(x): return add(x, 1)

@kernel
def calls_a_caller(x): return calls(x) + 1

@kernel
def calls_by_module(x): return helpers.add(x, 1)

@kernel
def constant(x): return x + STEP

@kernel
def table(x): return x + TABLE[1]

@kernel
def overloaded(x): return scaled(x)

@kernel
def intrinsic(x): return same(x)

@kernel
def system(x): return x + _getpid()

@kernel
def makes(x): return Pair(x, 0).low

@kernel
def reads(pair): return pair.low

@kernel
def recursive(x): return x if x < 1 else recursive(x - 1)

@kernel
def alone(x): return x + 1
"""
NAMES = CALLERS.split("def ")[1:]


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, helpers: str = HELPERS, callers: str = CALLERS) -> tuple[Any, Any]:
    """The modules `helpers` and `callers`, anew, from files in the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in (("helpers", helpers), ("callers", callers)):
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module("helpers"), importlib.import_module("callers")


def keys(helpers: ModuleType, callers: ModuleType) -> dict[str, str]:
    """Each kernel's key for one argument of an integer, or a pair of them."""
    pair = types.NamedTuple((types.int64, types.int64), helpers.Pair)
    of = {**vars(helpers), **vars(callers)}
    found = {name: of[name] for name in of if isinstance(getattr(of[name], "_cache", None), KernelCache)}
    return {name: kernel_key(found[name], (pair if name == "reads" else types.int64,)) for name in found}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("x + y", "x - y", {"add", "calls", "calls_a_caller", "calls_by_module"}),
        ("STEP = 3", "STEP = 4", {"constant"}),
        ("arange(4)", "arange(4) * 2", {"table"}),
        ("x * 2", "x * 3", {"overloaded"}),
        ("@overload(scaled)", '@overload(scaled, inline="always")', {"overloaded"}),
        ("return arguments[0]", "return arguments[-1]", {"intrinsic"}),
        ('"getpid"', '"getppid"', {"system"}),
        ("low: int\n    high: int", "high: int\n    low: int", {"makes", "reads"}),
        ("STEP = 3", "\n# a comment\nUNUSED = 1\n\nSTEP = 3", set()),
        ("Their sum.", "What they are together.", set()),
        ("def add(x, y):", "def add(x: int, y: int) -> int:", set()),
    ],
)
def test_an_edit_changes_the_keys_of_what_uses_it_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, changed: set[str]
) -> None:
    before = keys(*load(tmp_path / "before", monkeypatch))
    after = keys(*load(tmp_path / "after", monkeypatch, HELPERS.replace(old, new)))
    assert set(before) == set(after) == {*(text.split("(")[0] for text in NAMES), "add"}
    assert {name for name in before if before[name] != after[name]} == changed
    assert len(set(before.values())) == len(before)


def test_an_edit_to_a_kernel_changes_its_own_key_and_its_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys(*load(tmp_path / "before", monkeypatch))
    edited = CALLERS.replace("calls(x): return add(x, 1)", "calls(x): return add(1, x)", 1)
    after = keys(*load(tmp_path / "after", monkeypatch, callers=edited))
    assert {name for name in before if before[name] != after[name]} == {"calls", "calls_a_caller"}


def test_types_and_processors_have_keys_of_their_own() -> None:
    @kernel
    def first(x: Any) -> Any:
        return x[0]

    one, readonly = types.Array(types.int64, 1, "C"), types.Array(types.int64, 1, "C", readonly=True)
    found = [kernel_key(first, (of,), cpu) for of in (one, readonly, types.Array(types.int32, 1, "C")) for cpu in ("a", "b")]
    assert len(set(found)) == 6


@pytest.mark.parametrize("unknown", [object(), pytest], ids=["object", "module"])
def test_what_cannot_be_described_has_no_key(unknown: Any) -> None:
    @kernel
    def total(x: int) -> int:
        return x + len(unknown)

    with pytest.raises(NoKeyError, match=r"cannot be described|used as a value"):
        kernel_key(total, (types.int64,))
    assert KernelCache(total)._path((types.int64,), SimpleNamespace(magic_tuple=tuple)) is None


def described(function: Callable[..., Any], **namespace: Any) -> str:
    """The key of a kernel with these globals."""
    return kernel_key(kernel(FunctionType(function.__code__, {"__name__": "made", **namespace})), (types.int64,))


def test_a_global_counts_under_its_name() -> None:
    def between(a: int, b: int) -> int:
        return max(min(a, b), b)

    @kernel
    def given(a: int, b: int) -> int:
        return a - b

    assert len({described(between), described(between, max=given), described(between, min=given)}) == 3


def test_an_attribute_may_have_the_name_of_what_cannot_be_described() -> None:
    def length(a: Any) -> Any:
        return helper(a.size)  # type: ignore[name-defined] # noqa: F821

    def one(x: int) -> int:
        return x + 1

    def two(x: int) -> int:
        return x + 2

    found = [described(length, helper=kernel(each), size=object()) for each in (one, two, one)]
    assert found[0] == found[2] != found[1]
    assert described(length, helper=kernel(one), size=3) != described(length, helper=kernel(one), size=4)  # it may be read


def test_where_exceptions_are_handled_counts() -> None:
    def guarded(x: int) -> int:
        try:
            return 1 // x
        except Exception:
            return 0

    code = guarded.__code__
    other = FunctionType(code.replace(co_exceptiontable=code.co_exceptiontable[:-1] + b"\x01"), globals())
    assert kernel_key(kernel(guarded), (types.int64,)) != kernel_key(kernel(other), (types.int64,))


def test_every_kernel_has_a_key() -> None:
    found = 0
    for entry in pkgutil.walk_packages(ooc.__path__, "ooc."):
        scripts = entry.name.endswith("__main__") or entry.name.startswith("ooc.examples.")
        if scripts or (".triton_" in entry.name and find_spec("triton") is None):
            continue
        for value in vars(importlib.import_module(entry.name)).values():
            if isinstance(getattr(value, "_cache", None), KernelCache) and value.__module__ == entry.name:
                assert len(kernel_key(value, ())) == 32
                found += 1
    assert found > 50


def child(folder: Path) -> list[str]:
    """Compiled and loaded kernels of a process that calls some of the folder's."""
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); sys.dont_write_bytecode = True\n"
        "import callers, helpers; print(callers.calls_a_caller(1), callers.overloaded(2), callers.reads(helpers.Pair(5, 6)));"
        "stats = [k.stats for k in (callers.calls_a_caller, callers.calls, helpers.add, callers.overloaded, callers.reads)];"
        "print(sum(sum(s.cache_misses.values()) for s in stats), sum(sum(s.cache_hits.values()) for s in stats))"
    )
    return python("-c", code).stdout.split("\n")[:2]


def test_a_second_process_compiles_nothing_wherever_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("one", "other", "edited"):
        load(tmp_path / name, monkeypatch, HELPERS.replace("x * 2", "x * 3") if name == "edited" else HELPERS)
    assert child(tmp_path / "one") == ["3 4 5", "5 0"]
    assert child(tmp_path / "other") == ["3 4 5", "0 3"]  # those that the callers hold are not even loaded
    assert child(tmp_path / "edited") == ["3 6 5", "1 2"]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for compiled code."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def double() -> Any:
    """A kernel, new each time."""

    @kernel
    def twice(x: float) -> float:
        return 2 * x

    return twice


def misses(compiled: Any) -> int:
    """How often the kernel was compiled."""
    return sum(compiled.stats.cache_misses.values())


def test_a_damaged_file_is_compiled_again(cached: Path) -> None:
    assert misses(compiled := double()) == 0
    assert compiled(1.0) == 2.0
    (path,) = cached.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        again = double()
        assert again(1.0) == 2.0
        assert misses(again) == 1
        loaded = double()
        assert loaded(1.0) == 2.0
        assert misses(loaded) == 0


def test_without_a_folder_to_write_to_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    before = COMPILATIONS.count
    assert double()(1.0) == 2.0
    assert COMPILATIONS.count == before, "it is not kept"


def test_kernels_that_are_compiled_and_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    before = COMPILATIONS.count
    double()(1.0)
    double()(1.0)
    assert COMPILATIONS.count == before + 1


def test_compiling_is_noted_once_where_none_is_kept_or_it_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    notes: list[str] = []

    def compile_in(folder: str, quiet_seconds: float) -> int:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / folder))
        monkeypatch.setattr(jit, "_QUIET_SECONDS", quiet_seconds)
        before = len(notes)
        with COMPILATIONS.noted(notes.append):
            for kind in (1, 1.0):
                double()(kind)
        return len(notes) - before

    assert compile_in("new", 60.0) == 1
    assert compile_in("new", 0.0) == 0, "all are kept"
    for path in (tmp_path / "new").glob("*.kernel"):
        path.rename(tmp_path / "new" / f"another-{path.name}")
    assert compile_in("new", 60.0) == 0
    for path in (tmp_path / "new").glob("tests*.kernel"):
        path.unlink()
    assert compile_in("new", 0.0) == 1
    assert {*notes} == {"compiling kernels, which is done once on a machine ..."}


def test_code_that_nobody_loads_is_removed(cached: Path) -> None:
    double()(1.0)
    (path,) = cached.iterdir()
    long_ago = time.time() - 10 * 86_400
    os.utime(path, (long_ago, long_ago))
    assert misses(double()) == 0
    compiled = double()
    compiled(1.0)  # loaded, so not unused
    old = cached / f"other-{'0' * 32}.kernel"
    other = cached / "other.txt"
    of_numba = cached / f"numba-{'0' * 16}"
    of_numba.mkdir()
    (of_numba / "kernel.nbi").touch()
    for file in (old, other, of_numba):
        file.touch()
        os.utime(file, (long_ago, long_ago))
    remove_unused.__wrapped__(cached, 5)
    assert {*cached.iterdir()} == {path, other}


def test_a_numba_with_other_internals_caches_by_itself(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "NUMBA_IS_KNOWN", False)
    package_folder.cache_clear()
    assert double()(1.0) == 2.0
    assert (again := double())(1.0) == 2.0
    assert misses(again) == 0
    assert again.stats.cache_path.startswith(package_folder(__name__.split(".")[0]))
    assert str(cache_folder()) == str(cached)


def test_array_constants_are_told_apart_by_what_is_in_them() -> None:
    def reads(table: np.ndarray) -> Any:
        @kernel
        def read(k: int) -> int:
            return table[k]

        return read

    tables = (np.arange(3), np.arange(3) + 1, np.arange(3, dtype=np.int32))
    assert len({kernel_key(reads(table), (types.int64,)) for table in tables}) == 3


class Interrupting(KernelCache):
    """Has Ctrl-C pressed `times` times while numba looks for compiled code."""

    times = 1

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # handlers run here
        return super().load_overload(sig, target_context)


def interrupting(times: int) -> Any:
    @kernel
    def double(x: int) -> int:
        return x + x

    compiled: Any = double
    compiled._cache = Interrupting(double)
    compiled._cache.times = times
    return compiled


def test_an_interrupt_waits_until_a_kernel_is_compiled() -> None:
    double, before = interrupting(1), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        double(2)
    assert len(double.signatures) == 1
    assert signal.getsignal(signal.SIGINT) is before
    double._cache.times = 0
    assert double(2) == 4


def test_a_second_interrupt_does_not_wait() -> None:
    double, before = interrupting(2), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        double(2)
    assert not double.signatures
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("times", [1, 2])
def test_a_handler_of_the_user_gets_each_interrupt(times: int) -> None:
    double, got = interrupting(times), list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    try:
        assert double(2) == 4
    finally:
        signal.signal(signal.SIGINT, before)
    assert got == [signal.SIGINT] * times


def test_ignored_interrupts_are_ignored_while_a_kernel_is_compiled() -> None:
    double, before = interrupting(1), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert double(2) == 4
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_kernels_are_compiled_in_other_threads_too() -> None:
    double, results = interrupting(0), list[int]()
    thread = threading.Thread(target=lambda: results.append(double(2)))
    thread.start()
    thread.join()
    assert results == [4]


def test_a_handler_that_is_set_while_a_kernel_is_compiled_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    double, before = interrupting(0), signal.getsignal(signal.SIGINT)
    load = KernelCache.load_overload

    def ignoring(self: KernelCache, sig: Any, target_context: Any) -> Any:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return load(self, sig, target_context)

    monkeypatch.setattr(Interrupting, "load_overload", ignoring)
    try:
        assert double(2) == 4
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
