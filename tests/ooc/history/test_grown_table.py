"""Tables of grown stores against plain arrays."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.history import grown_table
from ooc.history.bucket_table import TableShape
from ooc.history.grown_table import GrownTable, moved_rows
from ooc.runtime.keyed_random import keyed_uniform
from ooc.stores.arrays.bucket_rows import BucketRows
from ooc.stores.io.pages import PAGE_BYTES, page_buffer

STREAM, BOUND = 5, 0.5


def initial(ids, width):
    rows = np.empty((len(ids), width), np.float32)
    keyed_uniform(np.uint64(STREAM), np.asarray(ids, np.int64), np.float32(BOUND), rows)
    return rows


def packed_of(files, shape):
    """All rows with their state, by id."""
    found = np.zeros((shape.rows, shape.packed), np.float32)
    for bucket in range(shape.buckets):
        buffer, ids = page_buffer(shape.bucket_bytes), shape.ids(bucket)
        files.load(bucket, buffer)
        found[ids] = buffer.view(np.float32).reshape(-1, shape.packed)[: len(ids)]
    return found


@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 700)), min_size=1, max_size=3),
)
@settings(max_examples=15, deadline=None)
def test_rows_go_on_and_new_ones_begin(tmp_path_factory, seed, buckets, types):
    folder, draw = tmp_path_factory.mktemp("grown"), np.random.default_rng(seed)
    before = {f"t{i}": sum(n for n, _ in types[:i]) for i in range(len(types))}
    after = {f"t{i}": sum(n + more for n, more in types[:i]) for i in range(len(types))}
    shapes = [TableShape(rows=n, width=3, optimizer="adagrad", buckets=buckets)
              for n in (sum(n for n, _ in types), sum(n + more for n, more in types))]  # fmt: skip
    with closing(BucketRows.create(folder / "old", buckets, shapes[0].bucket_bytes)) as old:
        wanted_old = np.zeros((shapes[0].rows, 6), np.float32)
        wanted_old[:, :3] = initial(np.arange(shapes[0].rows), 3)
        for bucket in range(buckets):
            if draw.random() < 0.7:  # others were never trained
                ids, buffer = shapes[0].ids(bucket), page_buffer(shapes[0].bucket_bytes)
                wanted_old[ids] = draw.normal(size=(len(ids), 6))
                buffer.view(np.float32).reshape(-1, 6)[: len(ids)] = wanted_old[ids]
                old.store(bucket, buffer)
        with (
            closing(BucketRows.create(folder / "new", buckets, shapes[1].bucket_bytes)) as new,
            pytest.MonkeyPatch.context() as patched,
        ):
            patched.setattr(grown_table, "PIECE_BYTES", PAGE_BYTES)
            GrownTable(old, shapes[0], shapes[1], STREAM, BOUND).write(new, moved_rows(before, shapes[0].rows, after))
            found = packed_of(new, shapes[1])
    wanted = np.zeros((shapes[1].rows, 6), np.float32)
    wanted[:, :3] = initial(np.arange(shapes[1].rows), 3)
    for (name, first), (count, _) in zip(before.items(), types, strict=True):
        wanted[after[name] : after[name] + count] = wanted_old[first : first + count]
    np.testing.assert_array_equal(found, wanted)
