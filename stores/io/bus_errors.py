"""Memory-mapped files that cannot be read: an error of one line instead of a process killed by SIGBUS.

A page of a map that the disk cannot deliver, or that lies beyond the end of a truncated file, raises SIGBUS in the thread that
touches it. A kernel or numpy cannot continue there, and a signal handler written in Python would never run. So the handler is
machine code, built with llvmlite, that only makes system calls. In a map whose owner checks it afterwards (`Watched.check`), it
puts a page of zeros in the place of the missing one and continues; otherwise it prints the message of the map and ends the
process with exit code 2, as errors do on the command line. Signals outside of these maps go to the previous handler.
"""

import ctypes
import mmap
import os
import signal
import threading
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ooc.stores.errors import StoreError

MOST = 4096
"""mapped files that are watched at most; those beyond are not"""
_FIRST, _END, _MESSAGE, _LENGTH, _CHECKED, _FAILED = range(6)
_ADDRESS_AT = 16  # of si_addr in a siginfo_t, on every 64-bit Linux
_EXIT_CODE, _STDERR = 2, 2
_MAP = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED

_INT, _LONG = ir.IntType(32), ir.IntType(64)

_lock = threading.RLock()  # a map may be collected while another one is added
_table: NDArray[np.int64] = np.zeros((MOST, 6), np.int64)
"""of each map: first address, end, address and length of its message, whether its owner checks it, the address that failed"""
_installed: list[Any] = []
"""the compiled handler, and the action that was there before, which must outlive it"""


class Watched:
    """A part of the address space onto which a file is mapped; `close` it before it is unmapped.

    Args:
        first: Its first address.
        nbytes: Its size.
        path: The file.
        checked: Whether the owner calls `check` after each access, before it uses what it has read.
    """

    def __init__(self, first: int, nbytes: int, path: os.PathLike[str], checked: bool) -> None:
        self._first, self._path = first, path
        text = f"ooc: error: {self._complaint('it was truncated, or the disk fails')}\n".encode()
        self._message = ctypes.create_string_buffer(text, len(text))
        self._row = -1
        with _lock:
            _install()
            free = np.flatnonzero(_table[:, _END] == 0)
            if len(free):
                self._row = int(free[0])
                row = first, 0, ctypes.addressof(self._message), len(text), int(checked), 0
                _table[self._row] = row
                _table[self._row, _END] = first + nbytes

    def _complaint(self, why: str) -> str:
        return f"{self._path} cannot be read: {why}; run `ooc verify` on the store, then restore it or ingest it again"

    def check(self) -> None:
        """Raise StoreError if a page could not be read."""
        if self._row >= 0 and (failed := int(_table[self._row, _FAILED])):
            raise StoreError(self._complaint(f"it was truncated or the disk fails, near byte {failed - self._first}"))

    def close(self) -> None:
        """Forget the map; idempotent."""
        if self._row >= 0:
            with _lock:
                _table[self._row] = 0
                self._row = -1


class _Action(ctypes.Structure):
    """glibc's struct sigaction on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _install() -> None:
    """Install the handler, once; a fork inherits it."""
    if _installed:
        return
    before = _Action()
    libc = ctypes.CDLL(None, use_errno=True)
    engine, address = _compile(_handler(_table.ctypes.data, ctypes.addressof(before)))
    action = _Action(address, flags=4 | 0x08000000)  # SA_SIGINFO, SA_ONSTACK
    _installed.extend([engine, before])
    libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))


def _compile(module: ir.Module) -> tuple[Any, int]:
    """Compile a module with the function "handle"; returns the owner of the code and its address."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    return engine, engine.get_function_address("handle")


def _handler(table: int, before: int) -> ir.Module:
    """Return the code of the handler, `void handle(int number, siginfo_t *info, void *context)`.

    `table` and `before` are the addresses of the table and of the action to restore.
    """
    module = ir.Module("bus_errors")

    def external(name: str, *arguments: ir.Type) -> ir.Function:
        return ir.Function(module, ir.FunctionType(_LONG, arguments), name)

    handle = ir.Function(module, ir.FunctionType(ir.VoidType(), (_INT, _LONG, _LONG)), "handle")
    number, info, _ = handle.args
    first, loop, found, zeros, fatal, following, elsewhere, done = (
        handle.append_basic_block(name)
        for name in ("first", "loop", "found", "zeros", "fatal", "following", "elsewhere", "done")
    )
    build = ir.IRBuilder(first)

    def place(address: Any, field: int) -> Any:
        return build.inttoptr(build.add(address, _LONG(8 * field)), _LONG.as_pointer())

    failed = build.load(place(info, _ADDRESS_AT // 8))
    build.branch(loop)

    build.position_at_end(loop)  # over the rows of the table
    row = build.phi(_LONG)
    row.add_incoming(_LONG(table), first)
    inside = (build.icmp_signed(how, failed, build.load(place(row, at))) for how, at in ((">=", _FIRST), ("<", _END)))
    build.cbranch(build.and_(*inside), found, following)

    build.position_at_end(following)
    after = build.add(row, _LONG(_table.strides[0]))
    row.add_incoming(after, following)
    build.cbranch(build.icmp_signed("<", after, _LONG(table + _table.nbytes)), loop, elsewhere)

    build.position_at_end(found)
    build.cbranch(build.icmp_signed("!=", build.load(place(row, _CHECKED)), _LONG(0)), zeros, fatal)

    build.position_at_end(zeros)
    build.store(failed, place(row, _FAILED))
    page = build.and_(failed, _LONG(-mmap.PAGESIZE))
    mapper = external("mmap", _LONG, _LONG, _INT, _INT, _INT, _LONG)
    mapped = build.call(mapper, (page, _LONG(mmap.PAGESIZE), _INT(mmap.PROT_READ), _INT(_MAP), _INT(-1), _LONG(0)))
    build.cbranch(build.icmp_signed("!=", mapped, _LONG(-1)), done, fatal)

    build.position_at_end(fatal)
    message, length = build.load(place(row, _MESSAGE)), build.load(place(row, _LENGTH))
    build.call(external("write", _INT, _LONG, _LONG), (_INT(_STDERR), message, length))
    build.call(external("_exit", _INT), (_INT(_EXIT_CODE),))
    build.branch(done)

    build.position_at_end(elsewhere)  # the access is repeated, and handled as before
    build.call(external("sigaction", _INT, _LONG, _LONG), (number, _LONG(before), _LONG(0)))
    build.branch(done)

    build.position_at_end(done)
    build.ret_void()
    return module
