"""Runs a page as `tools.docs.snippets` does, with every `ooc` of its shell blocks forked from here, where all is imported.

    python -m tests.tools.docs.forked_ooc PAGE WORK

A shell's `ooc` is then this file as a script: it imports nothing of ours, sends its words, folder, environment and open files
to the process that forks, and ends with the exit code that comes back.
"""

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path


def ask(address: str, words: list[str]) -> int:
    """Have `ooc WORDS` run with this process's files and folder; its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [b"."], [0, 1, 2])
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(16) or 1)


def serve(listener: socket.socket) -> None:
    """Answer `ask`, each in a process of its own, until killed. Returns in the forked processes that ran `ooc`, never here."""
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    files = socket.recv_fds(connection, 1, 3)[1]
    request = b"".join(iter(lambda: connection.recv(2**16), b""))
    child = os.fork()
    if child == 0:
        run(*json.loads(request), files)
    connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    os._exit(0)


def run(words: list[str], folder: str, env: dict[str, str], files: list[int]) -> None:
    """What `python -m ooc.cli WORDS` does in a folder, and the end of the process."""
    for descriptor, opened in enumerate(files):
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.path[:0], code = ["ooc", *words], [folder], 0
    try:
        runpy.run_module("ooc.cli", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(page: Path, work: Path) -> None:
    """Run the page."""
    from tools.docs.snippets import run_page

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/ooc"
        listener.bind(address)
        listener.listen()
        server = os.fork()
        if server == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            serve(listener)
        try:
            print(run_page(page, work, f'"{sys.executable}" -ISE "{__file__}" "{address}"'), "blocks ran")
        finally:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


if __name__ == "__main__":
    if Path(sys.argv[1]).suffix == ".md":
        main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
