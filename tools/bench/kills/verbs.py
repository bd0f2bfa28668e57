"""kill -9 of every verb and mode, at system calls and at random moments: what is left opens, and the same call completes it.

    python -m tools.bench.kills.verbs WORK --kills 1000 [--places ingest append ...] [--seed 7]

Each kill takes a copy of a small store, run or input, kills one command there as it opens, writes, renames, removes or syncs a
file, or a random time after its start, and gives the command again, as a user would. A kill is a finding if a store cannot be
opened or is damaged, if an error is not one line, if a command hangs, or if the folder then differs from that of a command that
nobody killed, by a result or by something that was left behind. All findings are collected. Prints JSON; exits with 1 and keeps
WORK if there are any.
"""

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.kills.runs import event_flags, make_events, make_store, train_flags, window_flags
from tools.bench.lib import leftovers as remains
from tools.bench.lib.killed_process import Difference, command, end_of, fork
from tools.bench.lib.killed_syscall import run_until

_SECONDS = 120
"""a command that takes longer hangs"""
_STORE, _EVENTS, _RUN = "graph.ooc", "events.ooc", "model"
_EDGES = ["--edges", "edges.csv", "--time", "t", "--edge-features", "msg=m"]
_ENDS = ["--src", "src", "--dst", "dst"]
_NODES = ["--nodes", "nodes.csv", "--label", "y", "--split", "split", "--x-cols", "f*"]
_PASSES = {"infer": "p.parquet", "embed": "e.zarr"}
"""verbs that refuse an output that is there -> their output"""
_BATCHES: dict[str, dict[str, Any]] = {
    "sampled": {"fanout": "4,4", "batch_size": 60},
    "cluster": {"parts": 6},
    "saint": {"roots": 40, "saint_coverage": 2},
    "history": {"parts": 6, "history_dtype": "float32", "refresh": 1},
    "full": {},
}


@dataclass(frozen=True)
class Verb:
    """A command that is killed, in a folder with copies of `needs`."""

    name: str
    words: list[str]
    needs: tuple[str, ...]
    out: str | None = None
    """what the command refuses to overwrite once it is complete"""


def verbs() -> list[Verb]:
    """Every verb that writes, or that reads what another one wrote, and `train` in every mode."""
    small = {"hidden": 8, "layers": 2, "epochs": 2, "checkpoint_every": 3}
    found = [
        Verb("ingest", ["ingest", "new.ooc", *_EDGES, *_ENDS, *_NODES], ("edges.csv", "nodes.csv"), "new.ooc"),
        Verb("append", ["append", "grown.ooc", *_EDGES, *_ENDS, *_NODES], ("grown.ooc", "edges.csv", "nodes.csv")),
        Verb("compact", ["compact", "appended.ooc"], ("appended.ooc",)),
        Verb("verify", ["verify", _STORE], (_STORE,)),
        Verb("plan", ["plan", _STORE, *train_flags(1, **small, fanout="4,4")[1:]], (_STORE,)),
        Verb("report", ["report", _RUN], (_RUN,)),
        *(Verb(verb, [verb, _STORE, "--checkpoint", _RUN, "--out", out], (_STORE, _RUN), out) for verb, out in _PASSES.items()),
    ]
    for mode, settings in _BATCHES.items():
        flags = train_flags(1, **small | settings, mode=mode)
        if mode == "full":  # scores every epoch by itself
            at = flags.index("--evaluate")
            del flags[at : at + 4]
        found.append(Verb(mode, ["train", _STORE, *flags, "--out", "run"], (_STORE,)))
    for mode, flags in (("events", event_flags(1)), ("snapshots", window_flags(1))):
        found.append(Verb(mode, ["train", _EVENTS, *flags, "--checkpoint-every", "4", "--out", "run"], (_EVENTS,)))
    return found


PLACES = tuple(verb.name for verb in verbs())


def run(words: list[str], folder: Path) -> int:
    """One process: a command of `ooc` in a folder; killed by a signal if it hangs."""
    import torch

    from ooc.cli import main as cli

    torch.set_num_threads(1)
    signal.alarm(_SECONDS)
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


def make_inputs(work: Path, nodes: int, needs: set[str]) -> None:
    """Make what the commands need; doing so imports and compiles what forks then have."""
    rng = np.random.default_rng(0)
    ends = rng.integers(0, 40, (60, 2)).tolist()
    edges = [f"n{a},n{b},{t},{t % 7}" for t, (a, b) in enumerate(ends)]
    described = [f"n{v},{v % 3},{('train', 'val', 'test')[v % 3]},{v},{-v}" for v in range(40)]
    (work / "edges.csv").write_text("\n".join(["src,dst,t,m", *edges]))
    (work / "nodes.csv").write_text("\n".join(["id,y,split,f1,f2", *described]))
    os.chdir(work)
    if _STORE in needs:
        make_store(work / _STORE, nodes)
    if _EVENTS in needs:
        make_events(work / _EVENTS)
    for name in sorted(needs & {"grown.ooc", "appended.ooc"}):
        _succeed(["ingest", name, *_EDGES, *_ENDS, *_NODES])
    if "appended.ooc" in needs:
        _succeed(["append", "appended.ooc", *_EDGES, *_ENDS])
    if _RUN in needs:
        _succeed(["train", _STORE, *train_flags(1, hidden=8, layers=2, epochs=2, fanout="4,4"), "--out", _RUN])


def _succeed(words: list[str]) -> None:
    from ooc.cli import main as cli

    if cli.main(words):
        raise Difference(f"ooc {words[0]} fails before anything is killed")


def folder_for(verb: Verb, work: Path, name: str) -> Path:
    """A new folder with what a command needs."""
    folder = work / name
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

    def __init__(self, verb: Verb, work: Path) -> None:
        self.verb, self.work, self.log = verb, work, work / f"log-{verb.name}"
        self.findings: list[str] = []
        self.at = Counter[str]()
        whole = folder_for(verb, work, f"whole-{verb.name}")
        began = time.perf_counter()
        code, self.calls = run_until(partial(run, verb.words, whole), self.log)
        self.seconds = time.perf_counter() - began
        if code:
            raise Difference(f"{verb.name} fails with nobody killing it: exit code {code}; see {self.log}")
        self._settle(whole)
        self.whole = whole

    def kill(self, chance: random.Random) -> None:
        """Kill the command once, at a call or a moment, look, and give it again; notes what is wrong."""
        folder = folder_for(self.verb, self.work, f"cut-{self.verb.name}")
        self.log.write_bytes(b"")
        moment = self._killed_in(folder, chance)
        if moment is None:
            return
        self.at[moment.split()[0]] += 1
        problems = [*self._problems(folder)]
        if problems:
            self.findings.append(f"{self.verb.name} killed at {moment}: {'; '.join(problems)}")

    def _killed_in(self, folder: Path, chance: random.Random) -> str | None:
        """Where the command was killed, None if it was complete before."""
        program = partial(run, self.verb.words, folder)
        if self.calls and chance.random() < 0.7:
            kind = chance.choice(sorted(set(self.calls)))
            nth = chance.randrange(self.calls.count(kind))
            code, _ = run_until(program, self.log, nth, kind)
            moment = f"{kind} {nth}"
        else:
            delay = chance.uniform(0, self.seconds)
            child = fork(program, self.log)
            killer = threading.Timer(delay, os.kill, (child, signal.SIGKILL))
            killer.start()
            code = end_of(child)
            killer.cancel()
            moment = f"time {delay:.3f}"
        return moment if code == -signal.SIGKILL else None

    def _problems(self, folder: Path) -> Iterable[str]:
        """What is wrong after a kill, and after the same command was given again."""
        if end_of(fork(partial(look, folder), self.log)):
            yield f"a store is damaged: {self._last_line()}"
        words = [*self.verb.words, *(["--resume"] if (folder / "run").exists() else [])]
        before = self.log.stat().st_size
        done = self._is_done(folder)
        code = 0 if done and self.verb.name == "append" else end_of(fork(partial(run, words, folder), self.log))
        if code != (2 if done and self.verb.out else 0):
            yield f"the same call ends with {code}: {self._last_line()}"
        text = self.log.read_bytes()[before:].decode(errors="replace")
        if "Traceback" in text or (code == 2 and text.count("\n") > 1):
            yield f"an error is not one line: {text.splitlines()[-1]}"
        self._settle(folder)
        yield from remains.differences(self.whole, folder)

    def _is_done(self, folder: Path) -> bool:
        """Whether the command had its effect before it was killed."""
        from ooc.stores.info import describe

        if self.verb.name == "append":
            return bool(describe(folder / "grown.ooc")["appends"])
        return self.verb.out is not None and (folder / self.verb.out).exists()

    def _settle(self, folder: Path) -> None:
        """Bring what may differ to one form: appended data into arrays, without times and locks; a store found is opened."""
        if self.verb.name == "append" and end_of(fork(partial(run, ["compact", "grown.ooc"], folder), self.log)):
            raise Difference(f"the store that an append was killed in is not compacted; see {self.log}")
        end_of(fork(partial(look, folder), self.log))

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing was printed"


def kill(work: Path, kills: int, chosen: list[str], seed: int, nodes: int) -> dict[str, Any]:
    """Run everything; see the module. kills: of all verbs together."""
    work.mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    with (work / "log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        killed = [verb for verb in verbs() if verb.name in chosen]
        make_inputs(work, nodes, {each for verb in killed for each in verb.needs})
    found = {verb.name: Killed(verb, work) for verb in killed}
    chance, began, done = random.Random(seed), time.perf_counter(), 0
    while done < kills:
        for each in found.values():
            before = each.at.total()
            each.kill(chance)
            done += each.at.total() - before
            if done >= kills:
                break
    findings = [text for each in found.values() for text in each.findings]
    result = {"seed": seed, "kills": done, "seconds": round(time.perf_counter() - began, 1), "findings": findings}
    result["places"] = {name: {"kills": each.at.total(), "at": dict(each.at)} for name, each in found.items()}
    if findings:
        raise Difference("\n".join([f"{len(findings)} findings in {done} kills", *findings]))
    shutil.rmtree(work)
    return result


if __name__ == "__main__":
    command(__doc__, PLACES, 300, kill)
