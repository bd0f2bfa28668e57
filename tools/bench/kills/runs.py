"""kill -9 in a push, refresh, layer-wise pass, checkpoint, step, or run on events or windows: no damage, and identical results.

    python -m tools.bench.kills.runs WORK --kills 100 [--places push refresh sweep] [--seed 7]

For each place, runs are killed repeatedly until --kills kills fell inside it, a random time after it was entered, as reported
by memory that outlives the process (`tools.bench.lib.killed_process`). After every kill the files are compared with an
uninterrupted run: the rolled-back histories with those at the same checkpoint, and the finished rows of a layer-wise pass.
Finally the run is completed: its directory must have the same files with the same bytes, including metrics.jsonl. Prints JSON;
exits with 1 and keeps WORK if something differs.
"""

import random
import shutil
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib import leftovers as remains
from tools.bench.lib.killed_process import Difference, Places, command, end_of, fork, killed_inside

TEMPORAL = ("events", "windows")
PLACES = ("push", "refresh", "sweep", "checkpoint", "training", *TEMPORAL)
_WITHIN = ("undo log", "rows", "commit", "saving", "noting", "edges", "removal", "roll-back", "scoring")
"""what a kill inside a place may hit"""
_A_RUN = 12
"""most kills of one run; then it is completed, and another one starts"""
_MODELS = ("gcnii", "sage", "gcn", "gat")


@dataclass(frozen=True)
class Case:
    """A run that is killed. command: of `ooc`, called repeatedly; nth: most entries of the place before the kill; share: of a
    stay there, within which the kill comes."""

    place: str
    name: str
    command: list[str]
    nth: int
    share: float


@dataclass
class Tally:
    """Counts of the kills at one place."""

    kills: int = 0
    elsewhere: int = 0
    """kills that narrowly missed it"""
    runs: int = 0
    checked: int = 0
    """kills after which there was something on disk to check"""
    within: Counter[str] = field(default_factory=Counter)
    """what the kills inside hit"""


def make_store(path: Path, nodes: int) -> Path:
    """Make a random graph with a hub, 32 features and three classes."""
    from ooc.stores.build import write_store
    from ooc.stores.graph import Graph

    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, nodes, (2, 5 * nodes))
    dst[: nodes // 4] = 7
    order = rng.permutation(nodes)
    return write_store(
        path,
        Graph.from_edges(src, dst, nodes),
        x=rng.standard_normal((nodes, 32), dtype=np.float32),
        y=rng.integers(0, 3, nodes),
        task="multiclass",
        num_classes=3,
        splits={name: order[k::3] for k, name in enumerate(("train", "val", "test"))},
    )


def make_events(path: Path) -> Path:
    """2,000 events between 100 nodes, with two columns."""
    from ooc.stores.ingest import IngestSpec, ingest

    rng = np.random.default_rng(0)
    ends, values = rng.integers(0, 100, (2000, 2)), rng.standard_normal((2000, 2))
    lines = [f"{a},{b},{t},{x:.3f},{y:.3f}" for t, ((a, b), (x, y)) in enumerate(zip(ends, values, strict=True))]
    path.with_suffix(".csv").write_text("\n".join(["src,dst,t,m0,m1", *lines]))
    ingest(IngestSpec(out=path, edges=str(path.with_suffix(".csv")), time="t", edge_features=["msg=m*"], undirected=True))
    return path


def event_flags(seed: int, **settings: Any) -> list[str]:
    """Flags of a run on those events, with node memory."""
    every = {"mode": "events", "hidden": 16, "memory-dim": 16, "time-dim": 8, "num-neighbors": 5, "batch-size": 50, "epochs": 2}
    every |= {"past": ("event", "batch")[seed % 2], "threads": 1, "seed": seed} | settings
    return [part for name, value in every.items() for part in (f"--{name}", str(value))]


def window_flags(seed: int, **settings: Any) -> list[str]:
    """Flags of a run on windows of those events, in which nodes or weights carry state."""
    every = {"mode": "snapshots", "by": "count", "window": 150, "stride": 100, "hidden": 16, "identity": 8, "epochs": 2}
    every |= {"model": ("roland", "recurrent", "roland", "evolvegcn")[seed % 4], "dropout": 0.2, "threads": 1, "seed": seed}
    return [*(part for name, value in (every | settings).items() for part in (f"--{name}", str(value))), "--live"]


def train_flags(seed: int, **settings: Any) -> list[str]:
    """Flags of `ooc train`, the settings' last."""
    every = {"hidden": 32, "layers": 3, "threads": 1, "seed": seed, "evaluate": "layerwise", "eval_every": 100} | settings
    return ["--no-plan", *[part for name, value in every.items() for part in (f"--{name.replace('_', '-')}", str(value))]]


def case_of(place: str, work: Path, store: Path, seed: int) -> Case:
    """The run of that seed that is killed inside that place."""
    name, model = f"{place}{seed}", _MODELS[seed % 4]
    histories = {"mode": "history", "parts": 12, "history_lag": seed % 3, "history_dtype": ("float16", "float32")[seed % 2]}
    settings: dict[str, Any] = {"model": model, "checkpoint_every": 2 + seed % 2}
    if place in TEMPORAL:
        flags = {"events": event_flags, "windows": window_flags}[place](seed, **{"checkpoint-every": 4 + seed % 2})
        return Case(place, name, ["train", str(work / "events.ooc"), *flags, "--out", "run", "--resume"], 1, 1.0)
    if place == "sweep":
        return Case(place, name, sweep_command(work, store, model, ("infer", "embed")[seed % 2]), 1, 0.5)
    if place == "training":
        batches = {"fanout": "4,4,4", "batch_size": 500, "epochs": 1, "norm": "batch"}
        flags = train_flags(seed, **settings | batches | {"evaluate": "sampled"})
    else:
        flags = train_flags(seed, **settings | histories | {"refresh": 3 if place == "push" else 1, "epochs": 4})
    nth, share = {"push": (8, 1.0), "refresh": (2, 0.5), "checkpoint": (4, 1.0), "training": (1, 0.3)}[place]
    return Case(place, name, ["train", str(store), *flags, "--out", "run", "--resume"], nth, share)


def sweep_command(work: Path, store: Path, model: str, verb: str) -> list[str]:
    """A layer-wise pass over all nodes by one of the models that `warm` trains."""
    out = {"infer": "p.parquet", "embed": "e.zarr"}[verb]
    return [verb, str(store), "--checkpoint", str(work / f"model-{model}"), "--out", out]


def live(case: Case, folder: Path, places: Places, record: Path | None) -> int:
    """One process of a run in `folder`; record: where an uninterrupted one saves its intermediate states."""
    import os

    import torch

    import ooc.layerwise.exact_pass
    import ooc.layerwise.scores
    from ooc.cli import main as cli
    from ooc.history import history
    from ooc.history.rows import ResidentRows
    from ooc.layerwise import row_files as sweepfiles
    from ooc.layerwise.layerwise_pass import LayerwisePass
    from ooc.stores.arrays.mutable_rows import DiskRows
    from ooc.stores.arrays.undo_log import UndoLog
    from ooc.training import checkpoint, history_mode, loop
    from ooc.training.event_mode import EventMode
    from ooc.training.run import Run
    from ooc.training.snapshot_mode import SnapshotMode

    watched: list[tuple[Any, str, str]] = [
        (history.History, "_write", "push"),
        (history_mode, "refresh", "refresh"),
        (LayerwisePass, "run", "sweep"),
        (Run, "checkpoint", "checkpoint"),
        (UndoLog, "_protect", "undo log"),
        (DiskRows, "store", "rows"),
        (sweepfiles, "write_range", "rows"),
        (UndoLog, "commit", "commit"),
        (checkpoint, "save", "saving"),
        (sweepfiles.Files, "note", "noting"),
        (UndoLog, "_put_back", "roll-back"),
        (LayerwisePass, "_open_tiles", "edges"),
        (LayerwisePass, "discard", "removal"),
        (sweepfiles.Files, "keep_only", "removal"),
        (loop, "fit", case.place if case.place in TEMPORAL else "training"),
        (EventMode, "score", "scoring"),
        (SnapshotMode, "score", "scoring"),
    ]
    if not case.name.endswith("0"):  # rows of the memory are read and written as if they were too many for RAM
        setattr(ResidentRows, "nbytes", lambda *_: 1 << 62)  # noqa: B010 - for mypy
    for owner, function, name in watched:
        places.watch(owner, function, name)
    room = (
        24 << 20 if "gat" in " ".join(case.command) else 2 << 20
    )  # memory for a few ranges of nodes: sweeps are of many steps
    for module in (ooc.layerwise.exact_pass, ooc.layerwise.scores, history_mode):
        setattr(module, "LayerwisePass", partial(LayerwisePass, room=room))  # noqa: B010 - for mypy
    if record is not None:
        remains.record(record)
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    return cli.main([word for word in case.command if word != "--resume" or os.path.exists("run")])


def through(work: Path, case: Case, folder: Path, places: Places, record: Path | None = None) -> None:
    """Run to completion; a layer-wise pass that was complete when killed is refused."""
    places.reset()
    wanted = 2 if remains.swept(folder) else 0
    code = end_of(fork(partial(live, case, folder, places, record), work / "log"))
    if code != wanted:
        raise Difference(f"{case.name}: exit code {code}; see {work / 'log'}")


def kill_often(work: Path, case: Case, chance: random.Random, most: int, places: Places, tally: Tally) -> None:
    """An uninterrupted run, and the same one killed until `most` kills are counted, it is complete, or _A_RUN is reached."""
    whole, cut, record = (work / f"{case.name}-{name}" for name in ("whole", "cut", "record"))
    record.mkdir(parents=True)
    through(work, case, whole, places, record)
    stay, killed = places.seconds(case.place) * case.share, 0
    tally.runs += 1
    while killed < _A_RUN and tally.kills < most:
        places.reset()
        child = fork(partial(live, case, cut, places, None), work / "log")
        code = killed_inside(child, places, case.place, chance.randint(1, case.nth), chance.uniform(0, stay))
        if code == 0:
            break
        if code > 0:
            raise Difference(f"{case.name}: exit code {code} after a kill; see {work / 'log'}")
        killed += 1
        hit = places.inside()
        tally.kills += case.place in hit
        tally.elsewhere += case.place not in hit
        if case.place in hit:
            tally.within.update([name for name in _WITHIN if name in hit] or ["between"])
        tally.checked += _checked(work, case, cut, record)
        if remains.swept(cut):
            break
    through(work, case, cut, places)
    found = remains.differences(whole, cut)
    if found:
        raise Difference(f"{case.name}: killed {killed} times, and then other than never killed: {', '.join(found)}")
    for folder in (whole, cut, record):
        shutil.rmtree(folder)


def _checked(work: Path, case: Case, cut: Path, record: Path) -> bool:
    """Check what a killed run left, in a separate process; returns whether there was something."""
    code = end_of(fork(partial(remains.check, cut, record, work / "scratch"), work / "log"))
    shutil.rmtree(work / "scratch", ignore_errors=True)
    if code not in (0, remains.NOTHING):
        raise Difference(f"{case.name}: damaged by a kill; see {work / 'log'}")
    return code == 0


def warm(work: Path, store: Path, places: Places) -> None:
    """Do everything once, to import, compile and train the models of layer-wise passes."""
    import torch

    from ooc.cli import main as cli
    from ooc.training.loop import train as _  # noqa: F401 - so that forks do not import it

    torch.set_num_threads(1)
    for model in _MODELS:
        flags = train_flags(1, model=model, mode="history", parts=12, refresh=1, epochs=1)
        if cli.main(["train", str(store), "--out", str(work / f"model-{model}"), *flags]):
            raise Difference("training fails")
    if cli.main(["train", str(store), "--out", str(work / "sampled"), *train_flags(1, fanout="4,4,4", max_steps=3)]):
        raise Difference("training fails")
    for name, flags in (("events", event_flags(1)), ("windows", window_flags(1))):
        if cli.main(["train", str(work / "events.ooc"), "--out", str(work / name), *flags, "--max-steps", "3"]):
            raise Difference("training fails")
    for verb in ("infer", "embed"):
        case = Case("sweep", f"warm-{verb}", sweep_command(work, store, "gcnii", verb), 1, 0)
        through(work, case, work / case.name, places)


def kill(work: Path, kills: int, chosen: list[str], seed: int, nodes: int) -> dict[str, Any]:
    """Run everything; see the module."""
    places = Places(*PLACES, *_WITHIN)
    work.mkdir(parents=True)
    store = make_store(work / "graph.ooc", nodes)
    make_events(work / "events.ooc")
    with (work / "log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        warm(work, store, places)
    found: dict[str, Any] = {"seed": seed, "nodes": nodes, "places": {}}
    for place in chosen:
        chance, tally, began = random.Random(f"{seed} {place}"), Tally(), time.perf_counter()
        while tally.kills < kills:
            kill_often(work, case_of(place, work, store, tally.runs), chance, kills, places, tally)
        seconds = time.perf_counter() - began
        found["places"][place] = {**vars(tally), "within": dict(tally.within.most_common()), "seconds": round(seconds, 1)}
    shutil.rmtree(work)
    return found


if __name__ == "__main__":
    command(__doc__, PLACES, 10_000, kill)
