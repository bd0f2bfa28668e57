"""Edges sorted by the buckets of their ends, against numpy."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.loading import bucket_edges
from ooc.loading.bucket_edges import ABOUT, DATA, BucketEdges, EdgeShape, shuffled
from ooc.stores.errors import StoreError


def drawn(nodes: int, count: int, relations: bool) -> Any:
    rng = np.random.default_rng(count)
    ends = (rng.random((count, 2)) ** 3 * nodes).astype(np.int64)
    return np.concatenate([ends, rng.integers(0, 5, (count, 1))], 1)[:, : 2 + relations]


def pieces(edges: Any) -> Any:
    for first in range(0, len(edges), 700):
        part = edges[first : first + 700]
        yield part[:, 0].copy(), part[:, 1].copy(), part[:, 2].copy() if part.shape[1] == 3 else None


@given(st.integers(1, 3000), st.integers(1, 7), st.booleans(), st.integers(1, 4), st.sampled_from([10**4, 10**8]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_edge_is_in_one_part_of_its_pair(
    tmp_path_factory: pytest.TempPathFactory, count: int, buckets: int, relations: bool, parts: int, room: int
) -> None:
    path, edges = tmp_path_factory.mktemp("edges") / "edges", drawn(100, count, relations)
    shape = EdgeShape(100, count, buckets, relations)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bucket_edges, "PART_EDGES", -(-count // (buckets**2 * parts)))
        BucketEdges.sort(path, shape, pieces(edges), seed=1, room=room).close()
        with closing(BucketEdges.open(path, shape)) as found:
            counts = found.counts()
            assert counts.sum() == count
            assert found.most == counts.max()
            for i in range(buckets):
                for j in range(buckets):
                    own = edges[(edges[:, 0] % buckets == i) & (edges[:, 1] % buckets == j)]
                    read = [found.read(i, j, part) for part in range(shape.parts)]
                    assert [len(each) for each in read] == counts[i, j].tolist()
                    together = np.concatenate(read)
                    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, own.tolist()))
                    if shape.parts == 1:
                        assert (together == own).all(), "in the order of the input"
    assert sorted(each.name for each in path.iterdir()) == ["checksums.npy", "edges.bin", "edges.json", "offsets.npy"]


def test_parts_are_even_and_an_epoch_shuffles_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_edges, "PART_EDGES", 1000)
    edges = drawn(1000, 20_000, True)
    shape = EdgeShape(1000, 20_000, 2, True)
    with closing(BucketEdges.sort(tmp_path / "edges", shape, pieces(edges), 3, 10**6)) as found:
        assert shape.parts == 5
        counts = found.counts()
        assert (np.abs(counts - counts.mean(2, keepdims=True)) < 6 * np.sqrt(counts.mean(2, keepdims=True))).all()
        own = found.read(1, 1, 2)
        once, again, other = (shuffled(own, 0, epoch, 4) for epoch in (1, 1, 2))
        assert (once == again).all()
        assert (once != other).any()
        assert (once != own).any()
        assert sorted(map(tuple, once.tolist())) == sorted(map(tuple, own.tolist()))


def test_edges_of_large_graphs_have_64_bits() -> None:
    assert EdgeShape(2**31, 10, 1, False).edge_bytes == 16
    assert EdgeShape(2**31 - 1, 10, 1, True).edge_bytes == 12


def test_others_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    edges, shape = drawn(50, 500, False), EdgeShape(50, 500, 3, False)
    BucketEdges.sort(tmp_path / "edges", shape, pieces(edges), 0, 10**6).close()
    with pytest.raises(StoreError, match="of other edges"):
        BucketEdges.open(tmp_path / "edges", EdgeShape(50, 500, 2, False))
    with (tmp_path / "edges" / DATA).open("ab") as file:
        file.write(b"x")
    with pytest.raises(StoreError, match=r"edges\.bin was cut"):
        BucketEdges.open(tmp_path / "edges", shape)
    (tmp_path / "edges" / ABOUT).write_text("{")
    with pytest.raises(StoreError, match="sorts its edges again"):
        BucketEdges.open(tmp_path / "edges", shape)


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Any:
        yield from pieces(drawn(50, 1000, False))
        raise StoreError("a damaged slot")

    with pytest.raises(StoreError, match="a damaged slot"):
        BucketEdges.sort(tmp_path / "edges", EdgeShape(50, 10**7, 3, False), failing(), 0, 10**4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["edges.bin", "offsets.npy", "checksums.npy"])
def test_damaged_or_cut_edges_are_named(tmp_path: Path, name: str) -> None:
    shape, path = EdgeShape(100, 3000, 2, True), tmp_path / "edges"
    BucketEdges.sort(path, shape, pieces(drawn(100, 3000, True)), 3, 10**4).close()
    kept = (path / name).read_bytes()
    (path / name).write_bytes(kept[:4096] if name == DATA else kept[:60])
    with pytest.raises(StoreError, match=r"edges.*: remove .*, and the run sorts its edges again"):
        BucketEdges.open(path, shape)
    if name == DATA:
        (path / name).write_bytes(bytes([kept[0] ^ 64]) + kept[1:])
        with closing(BucketEdges.open(path, shape)) as edges, pytest.raises(StoreError, match="damaged: remove"):
            edges.read(0, 0, 0)
