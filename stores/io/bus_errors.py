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
    engine, address = _compile(_Handler(_table.ctypes.data, ctypes.addressof(before)).module)
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


class _Handler:
    """Writes the code of the handler, `void handle(int number, siginfo_t *info, void *context)`, into `module`.

    `table` and `before` are the addresses of the table and of the action to restore.
    """

    def __init__(self, table: int, before: int) -> None:
        self.module, self._table, self._before = ir.Module("bus_errors"), table, before
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), (_INT, _LONG, _LONG)), "handle")
        self._number, self._info, _ = function.args
        names = ("first", "loop", "found", "zeros", "fatal", "following", "elsewhere", "done")
        self._blocks = {name: function.append_basic_block(name) for name in names}
        self._build = ir.IRBuilder(self._blocks["first"])
        failed = self._build.load(self._place(self._info, _ADDRESS_AT // 8))
        row = self._look_up(failed)
        self._map_zeros(failed, row)
        self._end_process(row)
        self._hand_on()
        self._at("done").ret_void()

    def _at(self, block: str) -> ir.IRBuilder:
        """The builder, at the end of a block."""
        self._build.position_at_end(self._blocks[block])
        return self._build

    def _place(self, address: Any, field: int) -> Any:
        """Pointer to a field of the struct at an address."""
        return self._build.inttoptr(self._build.add(address, _LONG(8 * field)), _LONG.as_pointer())

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the C library, which returns a long."""
        kind = ir.FunctionType(_LONG, [each.type for each in arguments])
        return self._build.call(ir.Function(self.module, kind, name), arguments)

    def _look_up(self, failed: Any) -> Any:
        """The row of the table whose map has the address that failed, in the block "found"; "elsewhere" if none has."""
        blocks, build = self._blocks, self._build
        build.branch(blocks["loop"])
        self._at("loop")
        row = build.phi(_LONG)
        row.add_incoming(_LONG(self._table), blocks["first"])
        sides = ((">=", _FIRST), ("<", _END))
        inside = (build.icmp_signed(how, failed, build.load(self._place(row, at))) for how, at in sides)
        build.cbranch(build.and_(*inside), blocks["found"], blocks["following"])
        self._at("following")
        after = build.add(row, _LONG(_table.strides[0]))
        row.add_incoming(after, blocks["following"])
        end = _LONG(self._table + _table.nbytes)
        build.cbranch(build.icmp_signed("<", after, end), blocks["loop"], blocks["elsewhere"])
        self._at("found")
        checked = build.load(self._place(row, _CHECKED))
        build.cbranch(build.icmp_signed("!=", checked, _LONG(0)), blocks["zeros"], blocks["fatal"])
        return row

    def _map_zeros(self, failed: Any, row: Any) -> None:
        """Note the address for `check`, and put a page of zeros in place of the one that failed."""
        build = self._at("zeros")
        build.store(failed, self._place(row, _FAILED))
        page = build.and_(failed, _LONG(-mmap.PAGESIZE))
        how = (_INT(mmap.PROT_READ), _INT(_MAP), _INT(-1), _LONG(0))
        mapped = self._call("mmap", page, _LONG(mmap.PAGESIZE), *how)
        build.cbranch(build.icmp_signed("!=", mapped, _LONG(-1)), self._blocks["done"], self._blocks["fatal"])

    def _end_process(self, row: Any) -> None:
        """Write the map's message and end the process."""
        build = self._at("fatal")
        message, length = build.load(self._place(row, _MESSAGE)), build.load(self._place(row, _LENGTH))
        self._call("write", _INT(_STDERR), message, length)
        self._call("_exit", _INT(_EXIT_CODE))
        build.branch(self._blocks["done"])

    def _hand_on(self) -> None:
        """Restore the action of before: the access is repeated, and handled by it."""
        self._at("elsewhere")
        self._call("sigaction", self._number, _LONG(self._before), _LONG(0))
        self._build.branch(self._blocks["done"])
