"""How far a pass came, kept in its folder: by one process in one file, by several ranks in a file each.

Ranks work on the same op at the same time, each on its own range of nodes; an op is done where all of them are at its end. What
some number of ranks noted is taken up by any number of them.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ooc.layerwise.node_ranges import NodeRange
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.io.atomic import sync_dir, write_file

PROGRESS = "progress.json"
_OF_ALL, _OF_RANKS = "progress*.json", "progress-*-*.json"
Note = dict[str, Any]


class PassStart(NamedTuple):
    """Where a rank goes on."""

    op: int
    node: int


class PassNotes:
    """The notes of a pass in `folder` (None: none are kept)."""

    def __init__(self, folder: Path | None, ranks: Ranks = ALONE) -> None:
        self._folder, self._ranks = folder, ranks

    def read(self) -> list[Note]:
        """What each rank noted last, by rank; none where something is missing or unreadable: the pass then begins anew."""
        return list(self._ranks.broadcast(self._found() if self._ranks.first else None))

    def _found(self) -> list[Note]:
        if self._folder is None:
            return []
        sizes = {int(path.stem.rpartition("-")[2]) for path in self._folder.glob(_OF_RANKS)}
        for names in ([PROGRESS], *([_name(rank, size) for rank in range(size)] for size in sorted(sizes))):
            with suppress(FileNotFoundError, ValueError):
                return [json.loads((self._folder / name).read_bytes()) for name in names]
        return []

    def write(self, note: Note, own: NodeRange) -> None:
        """Note how far this rank came, whose range of nodes is `own`."""
        if self._folder is None:
            return
        if not self._ranks.alone:
            note = {**note, "first": own[0], "stop": own[1]}
        write_file(self._folder / _name(self._ranks.rank, self._ranks.world_size), json.dumps(note).encode() + b"\n")

    def remove_others(self) -> None:
        """Remove what another number of ranks noted; every rank has noted as much."""
        self._ranks.barrier()
        own = {_name(rank, self._ranks.world_size) for rank in range(self._ranks.world_size)}
        self._remove(own)

    def forget(self) -> None:
        """Remove all notes, before rows are changed otherwise than they say."""
        self._remove(set())
        self._ranks.barrier()

    def _remove(self, kept: set[str]) -> None:
        folder = self._folder
        if folder is None or not self._ranks.first:
            return
        gone = [path for path in folder.glob(_OF_ALL) if path.name not in kept]
        for path in gone:
            path.unlink()
        if gone:
            sync_dir(folder)


def start_of(notes: list[Note], own: NodeRange) -> PassStart:
    """Where a rank, whose range is `own`, goes on behind `notes`, one or more.

    >>> start_of([{"stage": 2, "next": 50, "first": 0, "stop": 60}, {"stage": 2, "next": 90, "first": 60, "stop": 90}], (0, 60))
    PassStart(op=2, node=50)
    """
    if len(notes) == 1:
        op, done = int(notes[0].get("stage", 0)), [(0, int(notes[0]["next"]))]
    else:  # a rank that has not begun the next op may wait for it
        op = min(int(note.get("stage", 0)) + (note["next"] >= note["stop"]) for note in notes)
        done = [(int(note["first"]), int(note["next"])) for note in notes if note.get("stage", 0) == op]
    node = own[0]
    for first, stop in sorted(done):
        if first <= node < stop:
            node = min(stop, own[1])
    return PassStart(op, node)


def _name(rank: int, size: int) -> str:
    return PROGRESS if size == 1 else f"progress-{rank}-{size}.json"
