"""A run's state on disk: one atomic checkpoint file, and metrics.jsonl, which a resume rolls back to it.

The checkpoint records how long metrics.jsonl was when it was taken. What a killed run wrote after that is cut off and
written again by the resumed one, so every step stands in the file once, and an interrupted run's file equals an
uninterrupted one's, byte for byte: its lines hold no times.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.atomic import disk_errors, remove_leftovers, replacing, write_file

FORMAT = 1
CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
PLAN = "plan.json"
SUMMARY = "summary.json"
RANKS = "ranks.json"
"""by how many processes the run was begun, where there were several: what `batch_size` in its configuration is a part of"""


def save(run_dir: Path, state: dict[str, Any], name: str = CHECKPOINT) -> Path:
    """Replace the checkpoint by `state` (tensors and plain values) atomically. Raises StoreError where the disk refuses."""
    import torch

    path = run_dir / name
    with replacing(path) as file:
        try:
            torch.save({"format": FORMAT, **state}, file)
        except RuntimeError as error:  # how torch's writer reports a short write
            free = shutil.disk_usage(run_dir).free
            raise OSError(errno.ENOSPC if free < 1 << 20 else errno.EIO, f"{error}", str(path)) from error
    return path


def load(run_dir: Path, name: str = CHECKPOINT) -> dict[str, Any] | None:
    """The state last saved, on the CPU, or None where there is none yet. Raises StoreError where it cannot be read."""
    import torch

    path = run_dir / name
    if not path.exists():
        return None
    path.open("rb").close()  # where that is not permitted, the system's words say so
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, in words about its own files
        raise _unreadable(path) from error
    if not isinstance(state, dict):
        raise _unreadable(path)
    if state.get("format") != FORMAT:
        raise StoreError(f"{path}: checkpoint format {state.get('format')}, not {FORMAT}: use the version of ooc that wrote it")
    return state


def _unreadable(path: Path) -> StoreError:
    return StoreError(
        f"{path}: not a readable checkpoint: its {path.stat().st_size:,} bytes are damaged, cut short, or of another program; "
        "restore it from a copy, or start the run again elsewhere"
    )


def nearest_folder(path: Path) -> Path:
    """The nearest folder above `path` that there is: its disk is that of what will be there."""
    return next(folder for folder in Path(path).resolve().parents if folder.is_dir())


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically. Raises StoreError where the disk refuses."""
    write_file(path, json.dumps(value, indent=2, default=str).encode() + b"\n")


def read_json(path: Path, advice: str) -> dict[str, Any] | None:
    """What a JSON file holds, None where there is none. Raises ConfigError, with the advice, where it is damaged."""
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); {advice}") from None


def read_plan(run_dir: Path) -> dict[str, Any] | None:
    """The plan made before the run began (`ooc.planning.run_plan.Plan.asdict`), None where none was."""
    return read_json(run_dir / PLAN, "delete it")


def fingerprint(state_shapes: dict[str, Any]) -> str:
    """A short hash of names and shapes of a state_dict: tells one model from another."""
    shapes = [(name, list(getattr(value, "shape", []))) for name, value in state_shapes.items()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]


class MetricsLog:
    """metrics.jsonl, opened at a byte offset: what stands behind it is cut off. One process at a time may hold it.

    Raises ConfigError where the file is shorter than the checkpoint says (it is not this run's) or held by another run.
    """

    def __init__(self, run_dir: Path, offset: int = 0) -> None:
        self._path = path = run_dir / METRICS
        with disk_errors(path):
            self._file = open(path, "ab")  # noqa: SIM115 - closed by close()
        with ExitStack() as refused:
            refused.callback(self._file.close)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it with the process
            except BlockingIOError:
                another = f"{run_dir}: another process is training there; wait for it or choose another `out`"
                raise ConfigError(another) from None
            if (size := self.size) < offset:
                raise ConfigError(
                    f"{path}: {size} bytes, but {offset} when the checkpoint was taken: it was changed, start anew"
                )
            self._file.truncate(offset)
            refused.pop_all()

    def write(self, line: dict[str, Any]) -> None:
        """Append one line. Floats are written so that they read back to the bit."""
        with disk_errors(self._path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def sync(self) -> int:
        """Make all lines durable and return the file's length: what a checkpoint records."""
        with disk_errors(self._path):
            os.fsync(self._file.fileno())
        return self.size

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


class RunDir:
    """The directory of a run: made and locked by `claim` once all is checked, removed again if the run fails before its first
    checkpoint.

    Only a directory that this object made and locked is ever removed: of two runs that begin at once, one is refused.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self._resume = path, resume
        self._made = False
        self._log: MetricsLog | None = None

    def claim(self, offset: int) -> MetricsLog:
        """Make the directory, or with `resume` take the one that is there, and open its log at byte `offset`.

        Raises ConfigError where another run has it, StoreError where the disk refuses.
        """
        with disk_errors(self.path):
            try:
                self.path.mkdir(parents=True)
                self._made = True
            except FileExistsError:
                if not self._resume:
                    raise ConfigError(f"{self.path} exists already: another run has just begun there") from None
        try:
            self._log = MetricsLog(self.path, offset)
        except StoreError:
            if self._made:
                with suppress(OSError):  # another run may have come in between
                    self.path.rmdir()
            raise
        remove_leftovers(self.path)
        return self._log

    def discard_unsaved(self) -> None:
        """Remove the directory if it is this object's own and has no checkpoint: nothing could be resumed, and it would be in
        the way of the next try."""
        if self._made and self._log is not None and not (self.path / CHECKPOINT).exists():
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def has_steps(self) -> bool:
        """Whether a step was logged."""
        return self._log is not None and self._log.size > 0

    def close(self) -> None:
        """Give up the log's lock; idempotent."""
        if self._log is not None:
            self._log.close()


def read_metrics(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(step lines, epoch lines) of a run; a line that a kill cut short is left out.

    Raises ConfigError where there is no run, StoreError for a damaged line.
    """
    steps: list[dict[str, Any]] = []
    epochs: list[dict[str, Any]] = []
    path = run_dir / METRICS
    if not path.exists():
        raise ConfigError(f"{run_dir}: not a run of `ooc train`: it holds no {METRICS}")
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not {"step", "epoch"} & line.keys():
            raise StoreError(f"{path}: line {number} is damaged: remove it, or resume the run")
        (steps if "step" in line else epochs).append(line)
    return steps, epochs
