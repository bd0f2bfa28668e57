"""Progress of runs and of other commands: bars on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self

from ooc.config.base import RunConfig
from ooc.runtime.messages import LINE_SECONDS, say, speed
from ooc.stores.sizes import format_bytes
from ooc.training.callbacks import BATCHES, Callback, Rate


class Watchers:
    """Several callbacks as one: what is called of it is called of each."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.all = list(callbacks)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not hasattr(Callback, name):
            raise AttributeError(name)

        def call(*values: Any) -> None:
            for callback in self.all:
                getattr(callback, name)(*values)

        return call

    def close(self) -> None:
        """Close each, also where one before it fails."""
        with ExitStack() as closed:
            for callback in reversed(self.all):
                closed.callback(callback.close)


def _scores(
    line: dict[str, Any], names: Sequence[str] = ("loss", "accuracy", "rmse", "r2", "ap", "mrr", "auroc", "tgb_mrr")
) -> str:
    """The epoch line's main figures for a person; what a model must beat in brackets."""
    parts = [f"loss {line['train_loss']:.4f}"] if line.get("train_loss") is not None else []
    for split in ("val", "test"):
        scores = line.get(split) or {}
        lists = [next((name for name in scores if name.startswith(kind)), "") for kind in ("recall@", "ndcg@")]
        for name in [*names, *lists]:
            if scores.get(name) is not None:
                beside = [f"{who} {each[split][name]:.4f}" for who, each in line.get("baselines", {}).items()]
                parts.append(f"{split} {name} {scores[name]:.4f}" + (f" ({', '.join(beside)})" if beside else ""))
    return ", ".join(parts) + (" (best)" if line.get("best") else "")


class TerminalWatcher(Callback):
    """Counts the steps of an epoch and their seconds.

    names_run: whether to print the run's directory, once it is there.
    """

    def __init__(self, names_run: bool = False) -> None:
        self._names_run = names_run
        self._epochs = self._steps_per_epoch = self._seen = 0
        self._since = self._stepped = self._spoke = time.monotonic()
        self._unit, self._per_step = BATCHES

    def begin(self, config: RunConfig, total_steps: int) -> None:
        if self._names_run:
            self.note(f"writing to {config.out}")

    def start(self, epoch: int, step: int, epochs: int, steps_per_epoch: int, rate: Rate = BATCHES) -> None:
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._unit, self._per_step = rate
        self._since = time.monotonic()

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        self._seen += 1
        self._stepped = time.monotonic()

    def epoch(self, line: dict[str, Any]) -> None:
        self._seen, self._since = 0, time.monotonic()

    def _speed(self) -> str:
        """Of this epoch's steps so far."""
        return speed(self._seen * self._per_step, self._stepped - self._since, self._unit)


class LineWatcher(TerminalWatcher):
    """Plain lines on stderr: one an epoch, and one every ten seconds within it."""

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        super().step(epoch, step, total_steps, loss)
        if self._stepped - self._spoke >= LINE_SECONDS:
            left = (self._steps_per_epoch - step - 1) * (self._stepped - self._since) / self._seen
            where = f"epoch {epoch + 1}/{self._epochs} step {step + 1}/{self._steps_per_epoch}"
            self.note(f"{where}: loss {loss:.4f}, {self._speed()}, {left:.0f} s to the epoch's end")

    def epoch(self, line: dict[str, Any]) -> None:
        if time.monotonic() - self._spoke >= 1 or line["epoch"] + 1 == self._epochs or line["epoch"] == 0:
            rate = f", {self._speed()}" if self._seen else ""
            epoch = line["epoch"] + 1  # more than the epochs asked for, where a run with more is resumed
            self.note(f"epoch {epoch}/{max(epoch, self._epochs)}: {_scores(line)}{rate}")
        super().epoch(line)

    def note(self, text: str) -> None:
        say(text)
        self._spoke = time.monotonic()


class BarWatcher(TerminalWatcher):
    """rich bars on a terminal: epochs, and the steps of this one, with loss, batches a second and what remains."""

    def __init__(self, names_run: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(names_run)
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        self._bars = Progress(TextColumn("{task.description:<7}"), *columns, console=Console(stderr=True))

    def start(self, epoch: int, step: int, epochs: int, steps_per_epoch: int, rate: Rate = BATCHES) -> None:
        super().start(epoch, step, epochs, steps_per_epoch, rate)
        self._of_epochs = self._bars.add_task("epochs", total=epochs, completed=epoch, note="")
        self._of_steps = self._bars.add_task("steps", total=steps_per_epoch, completed=step, note="")
        self._bars.start()

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        super().step(epoch, step, total_steps, loss)
        self._bars.update(self._of_steps, completed=step + 1, note=f"loss {loss:.4f}, {self._speed()}")

    def epoch(self, line: dict[str, Any]) -> None:
        super().epoch(line)
        self._bars.update(
            self._of_epochs, completed=line["epoch"] + 1, note=_scores(line, ["accuracy", "rmse", "ap", "mrr", "tgb_mrr"])
        )

    def note(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bars.stop()


class StepBars:
    """Progress of ingest and verify: a bar a step, with units a second and what remains; plain lines off a terminal."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._begun: dict[str, float] = {}
        self._spoke = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
            self._bars = Progress(TextColumn("{task.description:<24}"), *columns, console=Console(stderr=True))
        return self

    def __call__(self, step: str, done: int, total: int | None, unit: str = "rows") -> None:
        """`done` of `total` units (None: unknown) of a step; from any thread."""
        now = time.monotonic()
        with self._lock:
            begun = self._begun.setdefault(step, now)
            rate = done / (now - begun) if now > begun else 0.0
            amount = format_bytes if unit == "bytes" else "{:,.0f}".format
            note = f"{amount(done)}{'' if unit == 'bytes' else f' {unit}'}" + (f", {amount(rate)}/s" if rate else "")
            if self._bars is not None:
                if step not in self._tasks:
                    self._bars.start()  # only now: where nothing is to be done, nothing is shown
                    self._tasks[step] = self._bars.add_task(step, total=total, note=note)
                self._bars.update(self._tasks[step], completed=done, total=total, note=note)
            elif now - self._spoke >= LINE_SECONDS:
                self._spoke = now
                left = f", {(total - done) / rate:.0f} s left" if total and rate and total > done else ""
                say(f"{step}: {note}{left}")

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


def terminal_watcher(names_run: bool = False) -> Callback:
    """Bars where stderr is a terminal, lines where it is not. names_run: whether to print the run's directory."""
    return (BarWatcher if sys.stderr.isatty() else LineWatcher)(names_run)
