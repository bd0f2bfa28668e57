"""Kills a process as it enters a system call: the nth open for writing, write, rename, unlink or sync.

The process installs a seccomp filter that reports such calls to its parent, which lets each go on or kills the process. Threads
that it starts are reported too. Linux on x86-64; no privileges are needed.
"""

import ctypes
import fcntl
import os
import platform
import select
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from tools.bench.lib.killed_process import end_of, fork

CALLS = {
    1: "write",
    18: "write",
    20: "write",
    296: "write",
    426: "write",  # io_uring_enter
    26: "fsync",  # msync
    74: "fsync",
    75: "fsync",
    76: "truncate",
    77: "truncate",
    285: "truncate",  # fallocate
    82: "rename",
    264: "rename",
    316: "rename",
    83: "mkdir",
    258: "mkdir",
    86: "link",
    88: "link",
    265: "link",
    266: "link",
    84: "unlink",
    87: "unlink",
    263: "unlink",
    2: "open",
    257: "open",
}
"""number of a system call -> what it does to files"""
_FLAGS_OF = {2: 1, 257: 2}
"""calls that open files -> which argument has the flags"""
_OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_STANDARD = 2
"""descriptors up to this one are the process's output"""
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_SECCOMP, _SET_FILTER, _NEW_LISTENER, _NO_NEW_PRIVILEGES = 317, 1, 8, 38
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_libc = ctypes.CDLL(None, use_errno=True)


def _filter() -> bytes:
    """The BPF program: report CALLS, but not reads' opens and not what is printed."""

    def argument(number: int) -> bytes:
        return struct.pack("HBBI", _LOAD, 0, 0, 16 + 8 * number)

    program = [struct.pack("HBBI", _LOAD, 0, 0, 0)]
    for number, name in CALLS.items():
        if number in _FLAGS_OF:
            checks = [argument(_FLAGS_OF[number]), struct.pack("HBBI", _ANY_BIT, 1, 0, _OPENED_TO_WRITE)]
        elif name == "write":
            checks = [argument(0), struct.pack("HBBI", _ABOVE, 1, 0, _STANDARD)]
        else:
            checks = []
        ends = [struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)] if checks else []
        ends.append(struct.pack("HBBI", _RETURN, 0, 0, _NOTIFY))
        program += [struct.pack("HBBI", _EQUAL, 0, len(checks) + len(ends), number), *checks, *ends]
    return b"".join([*program, struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)])


def _report_to(parent: socket.socket) -> None:
    """Have the calls of this process reported; what reads the reports is sent to the parent."""
    code = ctypes.create_string_buffer(_filter())
    program = struct.pack("HxxxxxxP", (len(code) - 1) // 8, ctypes.addressof(code))
    if _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    listener = _libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    socket.send_fds(parent, [b"."], [listener])
    os.close(listener)
    parent.close()


def run_until(run: Callable[[], int], log: Path, nth: int | None = None, kind: str | None = None) -> tuple[int, list[str]]:
    """Fork a process that executes `run`, and kill it as it enters its nth call (from 0), or the nth of a kind.

    Returns `end_of` the process and the calls it made (kinds), the last being the one it was killed at. Without `nth` it runs
    to its end.
    """
    if platform.machine() != "x86_64":
        raise OSError("system calls are known by number on x86-64 only")
    mine, its = socket.socketpair()

    def reported() -> int:
        mine.close()
        _report_to(its)
        return run()

    child = fork(reported, log)
    its.close()
    with mine:
        listeners = socket.recv_fds(mine, 1, 1)[1]
    calls: list[str] = []
    if listeners:
        try:
            _serve(listeners[0], child, calls, nth, kind)
        finally:
            os.close(listeners[0])
    return end_of(child), calls


def _serve(listener: int, child: int, calls: list[str], nth: int | None, kind: str | None) -> None:
    """Let calls go on until the one to be killed at, or the end of the process."""
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    while ready.poll()[0][1] & select.POLLIN:
        report = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, report)
            call, number = struct.unpack_from("Q", report)[0], struct.unpack_from("i", report, 16)[0]
            calls.append(CALLS[number])
            at = len(calls) - 1 if kind is None else calls.count(kind) - 1
            if at == nth and kind in (None, calls[-1]):
                os.kill(child, signal.SIGKILL)
                return
            fcntl.ioctl(listener, _SEND, struct.pack("QqiI", call, 0, 0, _CONTINUE))
        except FileNotFoundError:  # the call was interrupted, or the process ended
            continue
