"""Object storage in memory, and an array there with its cache on disk."""

import fcntl
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ooc.stores.errors import StoreError
from ooc.stores.io.chunk_sums import ChunkSums
from ooc.stores.io.read_plan import ReadCost
from ooc.stores.io.remote.array import RemoteArray
from ooc.stores.io.remote.cache import PRESENT, CacheDir, Presence, mirror_lock
from ooc.stores.io.segments import Segments

Bytes = Any


class Objects:
    """Objects by key in place of a `Client`: `answers(number, bytes)` is what comes of request `number`, from 1 on."""

    cost = ReadCost(1e-3, 1e-8, 0.03)

    def __init__(self, objects: dict[str, bytes], answers: Callable[[int, Bytes], Bytes] = lambda number, data: data) -> None:
        self.objects, self.answers = objects, answers
        self.asked: list[tuple[str, int, int]] = []

    def range(self, key: str, begin: int, nbytes: int) -> Bytes:
        self.asked.append((key, begin, nbytes))
        data = np.frombuffer(self.objects[key], np.uint8)[begin : begin + nbytes]
        assert len(data) == nbytes, "no request goes beyond an object"
        return self.answers(len(self.asked), data)


def failing(number: int) -> Callable[[int, Bytes], Bytes]:
    """Answers of which one fails for good."""

    def answer(asked: int, data: Bytes) -> Bytes:
        if asked == number:
            raise StoreError("the network is gone")
        return data

    return answer


def remote_array(
    folder: Path,
    data: Bytes,
    chunk_bytes: int,
    chunks_a_file: int,
    limit: int = 2**40,
    answers: Callable[[int, Bytes], Bytes] = lambda number, data: data,
) -> tuple[Segments, Objects]:
    """An array of whole chunks in memory, whose files in the mirror `folder/m` are made if they are missing."""
    step = chunks_a_file * chunk_bytes
    parts = [data[at : at + step] for at in range(0, len(data), step)]
    objects = Objects({f"c/{number}": part.tobytes() for number, part in enumerate(parts)}, answers)
    mirror, chunks = folder / "m", len(data) // chunk_bytes
    record, paths = mirror / PRESENT / "x", tuple(mirror / "store" / key for key in objects.objects)
    if not record.exists():
        for path, part in zip(paths, parts, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with path.open("r+b") as file:
                file.truncate(len(part))
        Presence.create(record, chunks)
        listed = mirror / f"{PRESENT}.paths" / "x"
        listed.parent.mkdir()
        listed.write_text("\n".join(f"{len(p)} {path.relative_to(mirror)}" for p, path in zip(parts, paths, strict=True)))
    cache, lock = CacheDir(folder), _in_use(mirror)
    cache.open(limit)
    known = np.array([google_crc32c.value(each.tobytes()) for each in data.reshape(-1, chunk_bytes)], np.uint32)
    sums = ChunkSums(Path("x"), chunk_bytes, 1, chunks, lambda: known)
    payload = np.array([len(part) for part in parts])
    copies = paths, payload, chunk_bytes, sums, Presence(record, chunks, cache), cache
    far = RemoteArray(Path("s3://b/s.ooc"), "x", objects, list(objects.objects), *copies)
    weakref.finalize(far, os.close, lock)
    return Segments(paths, payload, sums, far), objects


def _in_use(mirror: Path) -> int:
    """A descriptor that keeps a mirror in the cache, as an open one has it."""
    lock = os.open(mirror_lock(mirror), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock
