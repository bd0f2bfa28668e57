"""Buckets in slots: against arrays in memory, and killed at every moment, while a bucket is written too."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.arrays.bucket_rows import DATA, BucketRows
from ooc.stores.errors import StoreError
from ooc.stores.io.pages import page_buffer

BUCKETS, NBYTES = 5, 3 * 4096


def filled(number: int, nbytes: int = NBYTES) -> Any:
    buffer = page_buffer(nbytes)
    buffer[:] = np.random.default_rng(number).integers(0, 256, nbytes)
    return buffer


def held(rows: BucketRows, kept: str | None = None) -> list[Any]:
    found: list[Any] = []
    for bucket in range(rows.buckets):
        out = page_buffer(rows.bucket_bytes)
        if not rows.is_written(bucket, kept):
            found.append(None)
            continue
        rows.load_part(bucket, 0, out, kept)
        found.append(out.tobytes())
    return found


actions = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, BUCKETS - 1), st.integers(0, 2**31)),
        st.tuples(st.sampled_from(["keep", "drop"]), st.sampled_from(["best", "ended"])),
        st.sampled_from([("checkpoint",), ("reopen",), ("state",)]),
    ),
    max_size=40,
)


@given(actions)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_buckets_and_checkpoints_against_arrays(tmp_path_factory: pytest.TempPathFactory, todo: list[Any]) -> None:
    path = tmp_path_factory.mktemp("rows") / "table"
    rows, saved = BucketRows.create(path, BUCKETS, NBYTES), None
    double: Any = {None: [None] * BUCKETS}
    final = {name: list(each) for name, each in double.items()}
    for action in todo:
        if action[0] == "store":
            data = filled(action[2])
            rows.store(action[1], data)
            double[None][action[1]] = data.tobytes()
        elif action[0] == "keep":
            rows.keep(action[1])
            double[action[1]] = list(double[None])
        elif action[0] == "drop":
            rows.drop(action[1])
            double.pop(action[1], None)
        elif action[0] == "state":  # a checkpoint that never became durable
            rows.state()
        elif action[0] == "checkpoint":
            saved = rows.state()
            rows.commit()
            final = {name: list(each) for name, each in double.items()}
        else:
            rows.close()
            rows, double = BucketRows.open(path, saved), {name: list(each) for name, each in final.items()}
        assert {name: held(rows, name) for name in (None, *rows.kept)} == double
    out = page_buffer(NBYTES)
    for bucket, content in enumerate(double[None]):
        if content is not None:
            rows.load(bucket, out)
            assert out.tobytes() == content
    assert rows.slots <= 5 * BUCKETS, "the buckets, those of the checkpoint and its state, and those of two views"
    rows.close()


def test_no_byte_is_written_twice_and_slots_come_free(tmp_path: Path) -> None:
    with closing(BucketRows.create(tmp_path / "table", BUCKETS, NBYTES)) as rows:
        for turn in range(4):
            for bucket in range(BUCKETS):
                rows.store(bucket, filled(turn))
            rows.state()
            rows.commit()
        assert rows.bytes_written == 4 * BUCKETS * NBYTES
        assert rows.slots == 2 * BUCKETS
        assert rows.spare == BUCKETS


def test_a_view_that_is_kept_costs_no_write(tmp_path: Path) -> None:
    with closing(BucketRows.create(tmp_path / "table", 1, NBYTES)) as rows:
        rows.store(0, filled(1))
        rows.keep("best")
        assert rows.bytes_written == NBYTES
        rows.store(0, filled(2))
        assert held(rows, "best") == [filled(1).tobytes()]


_CHILD = """
import json, sys
from pathlib import Path
from ooc.stores.arrays.bucket_rows import BucketRows
from ooc.stores.io.atomic import write_file
from ooc.stores.io.pages import page_buffer
path, nbytes = Path(sys.argv[1]), int(sys.argv[2])
saved = json.loads((path / "checkpoint").read_text())
rows, turn = BucketRows.open(path / "table", saved["rows"]), saved["turn"]
data = page_buffer(nbytes)
print("ready", flush=True)
while True:
    turn += 1
    for bucket in range(rows.buckets):
        if (turn + bucket) % 2:
            data[:] = (turn * 7 + bucket) % 251
            rows.store(bucket, data)
    write_file(path / "checkpoint", json.dumps({"rows": rows.state(), "turn": turn}).encode())
    rows.commit()
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment_the_last_checkpoint_is_there(tmp_path: Path, seed: int) -> None:
    """Buckets of 8 MB take milliseconds to write, so most kills are in the middle of one."""
    import json

    nbytes, rng = 2**23, random.Random(seed)
    BucketRows.create(tmp_path / "table", BUCKETS, nbytes).close()
    (tmp_path / "checkpoint").write_text(json.dumps({"rows": None, "turn": 0}))
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path), str(nbytes)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        saved = json.loads((tmp_path / "checkpoint").read_text())
        with closing(BucketRows.open(tmp_path / "table", saved["rows"])) as rows:
            out = page_buffer(nbytes)
            for bucket in range(BUCKETS):
                last = max((turn for turn in range(1, saved["turn"] + 1) if (turn + bucket) % 2), default=None)
                assert rows.is_written(bucket) == (last is not None)
                if last is not None:
                    rows.load(bucket, out)
                    assert (out == (last * 7 + bucket) % 251).all()


@pytest.fixture
def small_files() -> Any:
    """No file grows beyond ten buckets, as on a disk that is full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7 * NBYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_one_line_and_the_checkpoint_stays(tmp_path: Path, small_files: Any) -> None:
    rows = BucketRows.create(tmp_path / "table", BUCKETS, NBYTES)
    for bucket in range(BUCKETS):
        rows.store(bucket, filled(bucket))
    saved = rows.state()
    rows.commit()
    rows.store(0, filled(10))
    rows.store(1, filled(11))
    with pytest.raises(StoreError, match=r"cannot write .*slots\.bin: File too large; ") as caught:
        rows.store(2, filled(12))
    assert "\n" not in str(caught.value)
    assert held(rows)[2] == filled(2).tobytes()
    rows.close()
    with closing(BucketRows.open(tmp_path / "table", saved)) as rows:
        assert held(rows) == [filled(bucket).tobytes() for bucket in range(BUCKETS)]


def test_damage_is_named(tmp_path: Path) -> None:
    rows = BucketRows.create(tmp_path / "table", BUCKETS, NBYTES)
    rows.store(4, filled(1))
    saved = rows.state()
    rows.close()
    with (tmp_path / "table" / DATA).open("r+b") as file:
        file.seek(100)
        file.write(b"!!")
    with closing(BucketRows.open(tmp_path / "table", saved)) as rows, pytest.raises(StoreError, match="damaged at bucket 4"):
        rows.load(4, page_buffer(NBYTES))
    os.truncate(tmp_path / "table" / DATA, 4096)
    with pytest.raises(StoreError, match="it was cut"):
        BucketRows.open(tmp_path / "table", saved)
    (tmp_path / "table" / DATA).unlink()
    with pytest.raises(StoreError, match=r"slots\.bin"):
        BucketRows.open(tmp_path / "table", saved)
    with pytest.raises(StoreError, match="is missing"):
        BucketRows.open(tmp_path / "other", saved)


def test_what_a_kill_left_of_a_growing_file_is_cut_off(tmp_path: Path) -> None:
    rows = BucketRows.create(tmp_path / "table", BUCKETS, NBYTES)
    rows.store(0, filled(1))
    saved = rows.state()
    rows.close()
    with (tmp_path / "table" / DATA).open("ab") as file:
        file.write(b"x" * 100)
    with closing(BucketRows.open(tmp_path / "table", saved)) as rows:
        rows.store(1, filled(2))
        assert held(rows)[:2] == [filled(1).tobytes(), filled(2).tobytes()]
