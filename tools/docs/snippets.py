"""Runs the fenced `bash` and `python` blocks of a Markdown page in order, as a reader would paste them.

    python -m tools.docs.snippets docs/quickstart.md WORK

All blocks of a page run in the folder WORK, and its Python blocks share one namespace, as in an interpreter left open. A block
whose first line is a comment with a file name (`# my_model.py`, `# run.toml`) is that file: it is saved, not run. A block under
the comment `<!-- not run: REASON -->` is left out. A page with the comment `<!-- continues: quickstart.md -->` goes on where
that page ends: WORK must then have what that page leaves.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OOC = f'"{sys.executable}" -m ooc.cli'
"""what runs a line of `ooc`"""

_FENCE = re.compile(r"^(`{3,})(\S*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*$")
_FILE = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
_CONTINUES = re.compile(r"<!-- continues: (\S+) -->")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    line: int
    """line of the page its code begins on"""
    not_run: str | None
    """why it is not run; None if it is"""

    @property
    def runs(self) -> bool:
        """Whether it is run or saved."""
        return self.not_run is None and (self.language in ("bash", "python") or self.file is not None)

    @property
    def file(self) -> str | None:
        """Name of the file that the block is; None for code to run."""
        match = _FILE.match(self.code)
        return match[1] if match else None


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order.

    >>> [block.language for block in blocks("Text\\n```bash\\nls\\n```\\n")]
    ['bash']
    """
    for match in _FENCE.finditer(page):
        before = page[: match.start()]
        reason = _NOT_RUN.search(before)
        yield Block(match[2], match[3], before.count("\n") + 2, reason[1] if reason else None)


def continues(path: Path) -> Path | None:
    """The page whose files a page goes on with; None for a page that begins in an empty folder."""
    match = _CONTINUES.search(path.read_text())
    return (path.parent / match[1]).resolve() if match else None


def pages() -> list[Path]:
    """README.md and the pages of docs/ with blocks to run, by path."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if "_build" not in path.parts and any(each.runs for each in blocks(path.read_text()))]


def run_page(path: Path, work: Path, ooc: str = OOC) -> int:
    """Run the blocks of a page in the folder `work`; returns how many ran. One that fails raises, named by page and line.

    ooc: the words that a shell puts in place of `ooc`.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    sys.path.insert(0, str(work))  # as `python` started there has it
    with chdir(work):
        for block in blocks(path.read_text()):
            if not block.runs:
                continue
            where = f"{path.name}:{block.line}"
            if block.file is not None:
                (work / block.file).write_text(block.code)
            elif block.language == "python":
                exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), namespace)
            else:
                _bash(block.code, where, ooc)
            ran += 1
    return ran


def _bash(code: str, where: str, command: str) -> None:
    """Run a block in bash, with `ooc` and `python` those of this process."""
    bin_folder = Path(sys.executable).parent
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ooc = f'ooc() {{ {command} "$@"; }}\n'
    env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": python_path, "MPLBACKEND": "agg"}
    print(f"{where}: {code.strip()}", flush=True)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", ooc + code], env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{where}: this block ended with exit code {done.returncode}:\n{code}")


if __name__ == "__main__":
    print(run_page(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()), "blocks ran")
