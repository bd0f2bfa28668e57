"""kill -9 of every verb and mode, at system calls and at random moments: what is left opens, and the same call completes it.

    python -m tools.bench.kills.verbs WORK --kills 1000 [--places append "history auto" ...] [--seed 7]

Each case takes a copy of a small store, run or input, kills one command there as it opens, writes, renames, removes or syncs a
file, or a random time after its start, and gives the command again, as a user would; one time in three that call is killed too.
A kill is a finding if a store cannot be opened or is damaged, if an error is not one line, if a command hangs, or if the folder
then differs from that of a command that nobody killed, by a result (of a run: by a bit of its log, model or checkpoint) or by
something that was left behind. Results are kept in WORK: given again, the command goes on where it was stopped, and repeats
what it found. Prints JSON; exits with 1 and keeps WORK if there are findings.
"""

import itertools
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.kills.commands import Verb, make_inputs, succeed, verbs
from tools.bench.lib import leftovers as remains
from tools.bench.lib.killed_process import Difference, command, end_of, fork
from tools.bench.lib.killed_syscall import run_until
from tools.bench.lib.results import Results, clear

_SECONDS = 600
"""a command that takes longer hangs"""
_TIME = "time"
"""beside the kinds of system calls: a random moment"""
_TWICE = 3
"""in each third case the command that is given again is killed too"""
_CACHE = "cache"
PLACES = tuple(verb.name for verb in verbs())


def run(words: list[str], folder: Path, on_disk: bool = False) -> int:
    """One process: a command of `ooc` in a folder; killed by a signal if it hangs."""
    import torch

    from ooc.cli import main as cli
    from ooc.history.rows import ResidentRows

    if on_disk:
        setattr(ResidentRows, "nbytes", lambda *_: 1 << 62)  # noqa: B010 - for mypy
    torch.set_num_threads(1)
    signal.alarm(_SECONDS)
    tempfile.tempdir = str(folder)  # what is left behind there is a finding too
    os.chdir(folder)
    return cli.main(words)


def look(folder: Path) -> int:
    """One process: every store in a folder opens and is not damaged."""
    from ooc.stores.dataset import Dataset
    from ooc.stores.integrity import verify

    damages = []
    for store in folder.glob("*.ooc"):
        damages += verify(store)
        Dataset.open(store).close()
    print(*damages, sep="\n")
    return 3 if damages else 0


def folder_for(verb: Verb, work: Path, name: str) -> Path:
    """A new folder with what a command needs."""
    folder = work / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for each in verb.needs:
        source = work / each
        if source.is_dir():
            shutil.copytree(source, folder / each, symlinks=True)
        else:
            shutil.copy(source, folder / each)
    return folder


class Killed:
    """The kills of one verb."""

    def __init__(self, verb: Verb, work: Path, seed: int = 0) -> None:
        self.verb, self.work, self.seed = verb, work, seed
        self.log = work / f"log-{verb.name.replace(' ', '-')}"
        self.program = partial(run, on_disk=True) if verb.on_disk else run
        whole = folder_for(verb, work, f"whole-{verb.name}")
        began = time.perf_counter()
        code, self.calls = run_until(partial(self.program, verb.words, whole), self.log)
        self.seconds = time.perf_counter() - began
        if code:
            raise Difference(f"{verb.name} fails with nobody killing it: exit code {code}; see {self.log}")
        self._settle(whole)
        self.whole = whole

    def moment(self, number: int) -> tuple[str, float]:
        """Where kill `number` comes: (a kind of system calls, its nth), all of a kind in turn, or ("time", seconds)."""
        counts = Counter(self.calls)
        kinds = [*sorted(counts), _TIME]
        turn, kind = number // len(kinds), kinds[number % len(kinds)]
        if kind == _TIME:
            return kind, random.Random(f"{self.seed} {self.verb.name} {number}").uniform(0, self.seconds)
        order = [*range(counts[kind])]
        random.Random(f"{self.seed} {self.verb.name} {kind}").shuffle(order)
        return kind, order[turn % len(order)]

    def kill(self, number: int) -> tuple[list[str], list[str]]:
        """Kill the command, look, and give it again: (the kinds of moments it was killed at, what is wrong)."""
        folder = folder_for(self.verb, self.work, f"cut-{self.verb.name}")
        self.log.write_bytes(b"")
        kinds, problems = [], []
        for attempt in range(2 if number % _TWICE == _TWICE - 1 else 1):
            if attempt and (self._is_complete(folder) or self._is_done(folder)):
                break
            kind, place = self.moment(number + 7919 * attempt)
            if not self._is_killed(self._again(folder), folder, kind, place):
                break
            kinds.append(kind)
            where = f"killed at {kind} {place:.5g}"
            problems += [f"{where}: {text}" for text in self._damage(folder)]
        if kinds:
            problems += [f"{where}: {text}" for text in self._completed(folder)]
        return kinds, problems

    def _is_killed(self, words: list[str], folder: Path, kind: str, place: float) -> bool:
        """Whether the command was killed there, or was complete before."""
        program = partial(self.program, words, folder)
        if kind != _TIME:
            return run_until(program, self.log, int(place), kind)[0] == -signal.SIGKILL
        child = fork(program, self.log)
        killer = threading.Timer(place, os.kill, (child, signal.SIGKILL))
        killer.start()
        code = end_of(child)
        killer.cancel()
        return code == -signal.SIGKILL

    def _damage(self, folder: Path) -> Iterable[str]:
        if end_of(fork(partial(look, folder), self.log)):
            yield f"a store is damaged: {self._last_line()}"

    def _again(self, folder: Path) -> list[str]:
        """The command as a user gives it again."""
        resumed = "--resume" not in self.verb.words and (folder / "run").exists()
        return [*self.verb.words, *(["--resume"] if resumed else [])]

    def _completed(self, folder: Path) -> Iterable[str]:
        """What is wrong after the command was given again."""
        words = self._again(folder)
        before, wanted = self.log.stat().st_size, self._wanted(folder)
        code = 0 if self._is_done(folder) else end_of(fork(partial(self.program, words, folder), self.log))
        if code not in wanted:
            yield f"the same call ends with {code}: {self._last_line()}"
        text = self.log.read_bytes()[before:].decode(errors="replace")
        if "Traceback" in text or (code == 2 and text.count("\n") > 1):
            yield f"an error is not one line: {text.splitlines()[-1]}"
        self._settle(folder)
        yield from remains.differences(self.whole, folder)

    def _is_complete(self, folder: Path) -> bool:
        """Whether the command's output is there, which it refuses to overwrite."""
        return self.verb.out is not None and (folder / self.verb.out).exists()

    def _wanted(self, folder: Path) -> set[int]:
        """The exit codes that the same call may have."""
        if not self._is_complete(folder):
            return {0}
        # The folder of a layer-wise pass that wrote the output: the call removes it, and may also refuse.
        return {0, 2} if (folder / f"{self.verb.out}.sweep").exists() else {2}

    def _is_done(self, folder: Path) -> bool:
        """Whether the command had its effect, and would have it again."""
        return self.verb.done is not None and self.verb.done(folder)

    def _settle(self, folder: Path) -> None:
        """Bring what may differ to one form, without times and locks; a store found is opened."""
        if self.verb.settle and end_of(fork(partial(run, [*self.verb.settle], folder), self.log)):
            raise Difference(f"{' '.join(self.verb.settle)} fails in {folder}; see {self.log}")
        end_of(fork(partial(look, folder), self.log))

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing was printed"


def _prepare(work: Path, chosen: list[Verb], nodes: int) -> None:
    """Make what the commands need, and give each of them once, so that forks have imported and compiled everything."""
    import torch

    from ooc.training.loop import train as _  # noqa: F401

    torch.set_num_threads(1)
    make_inputs(work, nodes, {each for verb in chosen for each in verb.needs})
    for verb in chosen:
        os.chdir(folder_for(verb, work, "warm"))
        succeed(verb.words)
    os.chdir(work)
    shutil.rmtree(work / "warm")


def kill(work: Path, kills: int, chosen: list[str], seed: int, nodes: int) -> dict[str, Any]:
    """Run everything; see the module. kills: of all verbs together."""
    results = Results(work)
    clear(work, _CACHE)
    os.environ["XDG_CACHE_HOME"] = str(work / _CACHE)
    mine = [verb for verb in verbs() if verb.name in chosen]
    with (work / "log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        _prepare(work, mine, nodes)
    found = {verb.name: Killed(verb, work, seed) for verb in mine}
    for number in itertools.count():
        for verb in mine:
            case = f"{verb.name} {number // verb.every} seed {seed}"
            if number % verb.every or case in results or results.total("kills") >= kills:
                continue
            at, problems = found[verb.name].kill(number // verb.every)
            results.add(case, " and ".join(at) or "complete before", problems, verb=verb.name, kills=len(at))
        if results.total("kills") >= kills:
            break
    told = {"kills": results.total("kills"), "findings": results.findings, "at": results.counts()}
    told["verbs"] = {verb: results.total("kills", verb=verb) for verb in results.counts("verb")}
    if told["findings"]:
        raise Difference("\n".join([f"{len(results.findings)} findings in {told['kills']} kills", *results.findings]))
    shutil.rmtree(work)
    return told


if __name__ == "__main__":
    command(__doc__, PLACES, 300, kill)
