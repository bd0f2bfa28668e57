"""What torchrun's restarts need to know of a run: that it began in an earlier life of the same command, and where.

torchrun starts all processes anew when one has ended, with the same command, in which the run's directory "must not exist". The
agents' store outlives the processes; it has the directory of each run that was begun.
"""

import hashlib
import os
import socket
from pathlib import Path

from ooc.config.base import RunConfig
from ooc.runtime.ranks import agents_store


def begun_before(config: RunConfig) -> Path | None:
    """The directory in which an earlier life of this command began the run; None where it did not."""
    store, name = agents_store(), _name(config)
    if store is None or not store.check([name]):
        return None
    process, _, out = store.get(name).decode().partition("\n")
    return None if process == _process() or not os.path.lexists(out) else Path(out)


def begins(config: RunConfig) -> None:
    """Remember where the run begins, for a later life of this command."""
    store = agents_store()
    if store is not None:
        store.set(_name(config), f"{_process()}\n{Path(config.out).absolute()}")


def _process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _name(config: RunConfig) -> str:
    """What the run is called there: by its directory, or where that is numbered, by its settings."""
    out, stem = Path(config.out), Path(os.path.realpath(config.store)).stem
    first, _, number = out.name.rpartition("-")
    if out.parent == Path("runs") and first == stem and number.isdigit():
        settings = config.model_dump_json(exclude={"out"})
        return f"ooc/{stem}/{hashlib.sha256(settings.encode()).hexdigest()}"
    return f"ooc/{out.absolute()}"
