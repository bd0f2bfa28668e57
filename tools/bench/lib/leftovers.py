"""Compares what a killed run left on disk with an uninterrupted run at the same point."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NOTHING = 3
"""result of `check` if the run was killed before there was anything to continue from"""
_COMMITS, _SWEEP = "commits.jsonl", "sweep"
_OWN = {"trace.json", "plan.json", "undo.log"}
"""files with times, or the number of starts"""


def record(folder: Path) -> None:
    """Make this process save digests of its state at every checkpoint, and the rows of a layer-wise pass, in `folder`."""
    from ooc.layerwise.layerwise_pass import LayerwisePass
    from ooc.layerwise.row_files import Files
    from ooc.training import checkpoint
    from ooc.training.run import Run

    sweep = folder / _SWEEP
    sweep.mkdir()
    save, note, deal = Run.checkpoint, Files.note, LayerwisePass._open_tiles

    def saving(self: Run) -> None:
        before = self._saved_cursor
        save(self)
        if self._saved_cursor != before:
            saved = checkpoint.load(self.config.out)
            assert saved is not None
            with (folder / _COMMITS).open("a") as file:
                file.write(json.dumps([_cursor(saved), _digest(saved, self.config.out / _rows_of(saved)[0])]) + "\n")

    def noting(self: Files, progress: dict[str, Any], written: list[Any]) -> None:
        note(self, progress, written)
        for rows in written if self.folder is not None else []:
            if progress["next"] == rows.shape[0]:
                shutil.copy(rows.path / "rows.bin", sweep / f"{progress['stage']} {rows.path.name}")

    def dealing(self: LayerwisePass, *more: Any) -> Any:
        made = deal(self, *more)
        if self.files.folder is not None:
            shutil.copy(self.files.folder / "tiles/rows.bin", sweep / "-1 tiles")
        return made

    Run.checkpoint, Files.note, LayerwisePass._open_tiles = saving, noting, dealing  # type: ignore


def check(cut: Path, kept: Path, scratch: Path) -> int:
    """Compare what a killed run left in `cut` with what `record` saved; returns 0 or NOTHING, raises if it differs."""
    sweeps = list(cut.glob("*.sweep"))
    if sweeps:
        return _check_sweep(sweeps[0], kept)
    return _check_run(cut / "run", kept, scratch)


def _check_run(run: Path, kept: Path, scratch: Path) -> int:
    """Check the state at the last checkpoint, with histories rolled back to it in a copy."""
    from ooc.stores.arrays.mutable_rows import DiskRows
    from ooc.stores.arrays.undo_log import UndoLog
    from ooc.training import checkpoint

    saved = checkpoint.load(run)
    if saved is None:
        return NOTHING
    folder, state = _rows_of(saved)
    if state:
        shutil.copytree(run / folder, scratch)
        rows = [DiskRows.open(path, "pread") for path in (*sorted(scratch.glob("layer*")), scratch / "steps")]
        UndoLog.open(scratch / "undo.log", rows, int(state["generation"])).close()
        for each in rows:
            each.close()
    wanted = [digest for at, digest in map(json.loads, (kept / _COMMITS).read_text().splitlines()) if at == _cursor(saved)]
    found = _digest(saved, scratch)
    assert found in wanted, f"at {_cursor(saved)} the run that nobody killed had {wanted}, and here is {found}"
    return 0


def _check_sweep(folder: Path, kept: Path) -> int:
    """Check the rows that the layer-wise pass recorded as finished, and its sorted edges."""
    copies = {path.name.split(" ")[1]: (int(path.name.split(" ")[0]), path) for path in (kept / _SWEEP).iterdir()}
    if (folder / "tiles.json").exists():
        assert (folder / "tiles/rows.bin").read_bytes() == copies["tiles"][1].read_bytes(), "the edges differ"
    if not (folder / "progress.json").exists():
        return NOTHING
    progress, checked = json.loads((folder / "progress.json").read_bytes()), 0
    for name, (stage, path) in copies.items():
        if not (folder / name).exists() or stage > progress["stage"] or name == "tiles":
            continue
        about = json.loads((folder / name / "rows.json").read_bytes())
        row_bytes = np.dtype(about["dtype"]).itemsize * int(np.prod(about["shape"][1:]))
        rows = progress["next"] if stage == progress["stage"] else about["shape"][0]
        with (folder / name / "rows.bin").open("rb") as found, path.open("rb") as wanted:
            assert found.read(rows * row_bytes) == wanted.read(rows * row_bytes), f"{name} differs before node {rows}"
        checked += rows
    return 0 if checked else NOTHING


def swept(cut: Path) -> bool:
    """Whether a layer-wise pass's output exists without its folder, so that the same call would be refused."""
    return any((cut / name).exists() and not (cut / f"{name}.sweep").exists() for name in ("p.parquet", "e.zarr"))


def differences(whole: Path, cut: Path) -> list[str]:
    """Files that only one of two directories has, or that differ in what does not depend on times and on where they are."""
    one, two = ({path.relative_to(top): path for path in top.rglob("*")} for top in (whole, cut))
    found = [f"{name} is in one only" for name in sorted(one.keys() ^ two.keys())]
    for name in sorted(one.keys() & two.keys()):
        held = {_content(each[name], top) for each, top in ((one, whole), (two, cut)) if each[name].is_file()}
        if len(held) > 1 and name.name not in _OWN:
            found.append(f"{name} differs")
    return found


def _content(path: Path, top: Path) -> bytes:
    """What two runs of the same command have alike in a file."""
    content = path.read_bytes()
    match path.name:
        case "summary.json":
            return json.dumps(json.loads(content)["metrics"]).encode()
        case "config.json":
            return content.replace(str(top).encode(), b"")
        case "report.html":
            return content[-10:]  # the rest has times
        case "checkpoint.pt":
            return _of_checkpoint(path)
    return content


def _of_checkpoint(path: Path) -> bytes:
    """State, model and optimizer in a checkpoint; histories beside it are files of their own."""
    from ooc.training import checkpoint

    saved = checkpoint.load(path.parent)
    assert saved is not None
    return _digest(saved, path.parent / "none").encode()


def _cursor(saved: dict[str, Any]) -> list[Any]:
    """Position of a checkpoint: epoch, step, and whether a refresh is in progress."""
    return [saved["state"]["epoch"], saved["state"]["step"], saved.get("refresh") is not None]


def _rows_of(saved: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(folder, state) of a run's stored rows: histories or node memory; an empty state without any."""
    memory = saved.get("mode", {}).get("memory")
    return ("memory", memory) if memory else ("history", saved.get("halo") or {})


def _digest(saved: dict[str, Any], history: Path) -> str:
    """Digest of a checkpoint's state and the histories' rows."""
    hashed = hashlib.sha256()
    pending = _rows_of(saved)[1].get("pending")
    for name in ("state", "model", "optimizer", "best_model", "metrics_bytes"):
        for part in _parts(saved[name]):
            hashed.update(part)
    for part in _parts(pending):
        hashed.update(part)
    for path in sorted(history.glob("*/rows.bin")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """All parts of a nested value as bytes."""
    if isinstance(value, dict):
        value = [each for item in value.items() for each in item]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each)
    elif hasattr(value, "numpy"):
        yield value.contiguous().numpy().tobytes()
    else:
        yield repr(value).encode()
