"""Runs `ooc` on malformed files and settings: no traceback, no hang, nothing left behind, exit code 2 and one line.

    nice -n 19 python -m tools.bench.malformed.campaign WORK [--only WORD] [--seed 7] [--seconds 10]

Each case runs in a process forked from one that has imported everything, in a folder of its own. A finding is a traceback, a
process that a signal ends or that hangs for --seconds, more memory than --memory, a message of more or less than one line, an
accepted input that cannot be right (or a refused one that is), and a file left behind. Results are kept in WORK: given again,
the command goes on where it was stopped, and runs what it found again. Prints JSON; exits with 1 if there are findings.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

from tools.bench.lib.killed_process import ended, fork
from tools.bench.lib.results import Results, clear
from tools.bench.malformed.cases import INGESTS, Case, well_formed
from tools.bench.malformed.files import file_cases
from tools.bench.malformed.settings import setting_cases

_MEMORY = 4 * 10**9
"""most bytes that a process may take beyond what it is forked with"""
_FILE_BYTES = 2 * 10**9
"""largest file that a process may write"""


def cases(seed: int, only: str = "") -> Iterator[Case]:
    """All cases whose name contains a word."""
    for case in (*file_cases(seed), *setting_cases(seed)):
        if only in case.name:
            yield case


def prepare(work: Path) -> None:
    """Make the stores and the run that cases use; import and compile what they will."""
    import torch

    from ooc.cli import main as cli
    from ooc.training import infer as _  # noqa: F401 - so that forks do not import it

    torch.set_num_threads(1)
    (work / "files").mkdir(parents=True)
    well_formed(work / "files")
    os.chdir(work / "files")
    flags = ["--edges", "edges.csv", "--nodes", "nodes.csv", "--x-cols", "f*", "--label", "y", "--split", "split"]
    run = ["train", str(work / "graph.ooc"), "--out", str(work / "run"), "--epochs", "1", "--hidden", "8"]
    commands = [
        ["ingest", str(work / "graph.ooc"), *flags],
        ["ingest", str(work / "events.ooc"), *flags, "--time", "t", "--edge-features", "msg=w", "--undirected"],
        ["ingest", str(work / "types.ooc"), *INGESTS["writes.csv"].split()],
        ["ingest", str(work / "graphs.ooc"), *INGESTS["atoms.csv"].split()],
        run,
    ]
    for mode in ("events", "snapshots --by count --window 50"):
        out = str(work / mode.split()[0])
        commands.append(["train", str(work / "events.ooc"), "--out", out, "--mode", *mode.split(), "--epochs", "1"])
    with (work / "log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        for command in commands:
            if cli.main(command):
                raise SystemExit(f"ooc {' '.join(command)} fails; see {work / 'log'}")


def _call(case: Case, work: Path, folder: Path) -> int:
    """In a child: the call."""
    from ooc.cli import main as cli

    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond it is an error, as on a full disk
    os.chdir(folder)
    return cli.main([word.replace("{work}", str(work)) for word in case.command])


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with its size and modification time (of a folder: neither); without a store's locks, which
    the first append makes, and the metadata of the groups that they stand in."""
    found = {}
    for top, folders, files in os.walk(folder):
        locked = "versions" in Path(top).parts
        found.update({str(Path(top, name)): (0, 0) for name in folders if name != "versions" and not locked})
        for name in files:
            if not (locked and (name.endswith(".lock") or name == "zarr.json")):
                status = os.lstat(Path(top, name))
                found[str(Path(top, name))] = (status.st_size, status.st_mtime_ns)
    return found


def judge(case: Case, code: int | None, peak: int, said: str, changed: list[str]) -> list[str]:
    """Findings of a case."""
    errors = [line for line in said.splitlines() if line.startswith("ooc: error:")]
    found = []
    if code is None:
        found.append("hang")
    elif "Traceback (most recent call last)" in said:
        found.append("traceback: " + said.strip().splitlines()[-1][:200])
    elif code not in (0, 2):
        found.append(f"exit code {code}: {said.strip()[-200:]}")
    elif code == 2 and len(errors) != 1:
        found.append(f"{len(errors)} lines of errors: {said.strip()[:200]}")
    if code == 0 and case.outcome == "refused":
        found.append(f"accepted: {said.strip()[:200]}")
    if code == 2 and case.outcome == "accepted":
        found.append(f"refused: {errors[0][:200] if errors else said[:200]}")
    if peak > _MEMORY:
        found.append(f"peak of {peak / 1e9:.1f} GB")
    if code != 0 and changed:
        found.append(f"left or changed: {', '.join(changed[:3])}")
    return found


def run(case: Case, work: Path, seconds: float) -> tuple[list[str], str]:
    """(findings, outcome) of a case."""
    folder, log = work / "case", work / "said"
    folder.mkdir()
    log.unlink(missing_ok=True)
    case.write(folder)
    shared = [work / name for name in ("files", "graph.ooc", "events.ooc", "types.ooc", "graphs.ooc", "run")]
    before = {path: held for each in (folder, *shared) for path, held in contents(each).items()}
    code, peak = ended(fork(partial(_call, case, work, folder), log), seconds)
    after = {path: held for each in (folder, *shared) for path, held in contents(each).items()}
    changed = [os.path.relpath(path, folder) for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    said = log.read_text(errors="replace") if log.exists() else ""
    found = judge(case, code, peak, said, sorted(changed))
    if (work / "outside.npy").exists() or (folder / "pwned").exists():
        found.append("wrote or ran what a file told it")
    for left in (folder, *work.glob("*.removed")):
        shutil.rmtree(left)
    return found, {None: "hang", 0: "accepted", 2: "refused"}.get(code, "failed")


def campaign(work: Path, seed: int, only: str, seconds: float) -> dict[str, object]:
    """Run all cases; see the module."""
    results = Results(work, every=50)
    clear(work)
    prepare(work)
    for case in cases(seed, only):
        if case.name not in results:
            found, outcome = run(case, work, seconds)
            results.add(case.name, outcome, found)
    os.chdir("/")
    if not results.findings:
        shutil.rmtree(work)
    return {"cases": len(results), **results.counts(), "findings": results.findings, "seed": seed, "files": len(INGESTS)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a directory to make, or to go on in; removed if there are no findings")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seed", type=int, default=0, help="of random damage and values")
    parser.add_argument("--seconds", type=float, default=10.0, help="a longer process hangs")
    a = parser.parse_args()
    told = campaign(a.work.absolute(), a.seed, a.only, a.seconds)
    print(json.dumps(told))
    sys.exit(1 if told["findings"] else 0)
