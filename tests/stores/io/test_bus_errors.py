"""A mapped page that cannot be read ends in an error of one line: files are truncated under their maps."""

import os
from pathlib import Path

import numpy as np
import pytest

from ooc.stores.arrays.lmdb_rows import write_lmdb_rows
from ooc.stores.errors import StoreError
from ooc.stores.io.engines.mmap import MmapEngine
from ooc.stores.io.read_plan import plan_reads
from ooc.stores.io.segments import Segments, map_segments, warm
from tests.forked import python

PAGES = 64


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    paths = tuple(tmp_path / name for name in ("0", "1"))
    for path in paths:
        path.write_bytes(np.arange(PAGES * 4096).astype(np.uint8).tobytes())
    return Segments(paths, np.array([PAGES * 4096] * 2))


def test_the_mmap_engine_raises_for_a_file_that_was_truncated(segments: Segments) -> None:
    engine, other = MmapEngine(segments), MmapEngine(Segments(segments.paths[:1], segments.payload[:1]))
    os.truncate(segments.paths[1], 4096)
    out = np.empty(100 * 4096, np.uint8)
    for ids in (np.arange(100), np.array([PAGES + 9])):
        with pytest.raises(StoreError, match=f"{segments.paths[1]} cannot be read: .* near byte"):
            engine.gather(plan_reads(ids, 4096, count=2 * PAGES), out[: len(ids) * 4096])
    other.gather(plan_reads(np.arange(PAGES), 4096, count=PAGES), out[: PAGES * 4096])
    assert (out[: PAGES * 4096] == np.arange(PAGES * 4096).astype(np.uint8)).all()
    engine.close()
    other.close()


def test_a_map_can_not_be_warmed_from_a_file_that_was_truncated(segments: Segments) -> None:
    array = map_segments(segments)
    os.truncate(segments.paths[1], 4096)
    with pytest.raises(StoreError, match=r"1 is truncated: 4096 bytes where"):
        warm(array)


CODE = """
import os, sys, threading
import numpy as np
from pathlib import Path
from ooc.stores.io.segments import Segments, map_segments
from ooc.stores.arrays.members import Members
path = Path(sys.argv[1])
array = map_segments(Segments((path,), np.array([path.stat().st_size])))
Members.of(array[:4096])  # the handler works in the midst of anything
os.truncate(path, 4096)
threads = [threading.Thread(target=lambda: print(Members.of(array))) for _ in range(4)]
[each.start() for each in threads]
[each.join() for each in threads]
print("not reached")
"""


def test_a_process_that_touches_a_missing_page_ends_with_one_line(segments: Segments) -> None:
    done = python("-c", CODE, segments.paths[0])
    assert (done.returncode, done.stdout) == (2, "")
    first, *rest = done.stderr.splitlines()
    message = "cannot be read: it was truncated, or the disk fails; run `ooc verify` on the store, "
    assert first.startswith(f"ooc: error: {segments.paths[0]} {message}")
    assert set(rest) <= {first}, "threads that fail at the same moment say the same"


OTHER = """
import mmap, os, signal, sys
from pathlib import Path
import numpy as np
from ooc.stores.io.segments import Segments, map_segments
signal.signal(signal.SIGBUS, signal.SIG_DFL)
path = Path(sys.argv[1])
array = map_segments(Segments((path,), np.array([path.stat().st_size])))
with open(sys.argv[2], "rb") as file:
    another = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(sys.argv[2], 0)
another[5]
"""


def test_other_maps_fail_as_before(segments: Segments) -> None:
    done = python("-c", OTHER, *segments.paths)
    assert done.returncode == -7, "SIGBUS"


LMDB = """
import os, sys
import numpy as np
from ooc.stores.arrays.lmdb_rows import LmdbRows
rows = LmdbRows(sys.argv[1], dtype="float32", shape=(2000, 64))
out = np.empty((2000, 64), np.float32)
rows.read(np.arange(1000), out[:1000])
os.truncate(sys.argv[1] + "/data.mdb", 16384)
rows.read(np.arange(2000), out)
print("not reached")
"""


def test_an_lmdb_environment_that_is_truncated_ends_the_process_with_one_line(tmp_path: Path) -> None:
    write_lmdb_rows(tmp_path / "x.lmdb", np.ones((2000, 64), np.float32))
    done = python("-c", LMDB, tmp_path / "x.lmdb")
    assert (done.returncode, done.stdout) == (2, "")
    lines = set(done.stderr.splitlines())
    assert len(lines) == 1, "threads that fail at the same moment say the same"
    assert lines.pop().startswith(f"ooc: error: {tmp_path}/x.lmdb/data.mdb cannot be read: it was truncated, or the disk fails")
