"""The graph of papers100M's shape that is made where it is read."""

from pathlib import Path

import numpy as np

import ooc
from tools.graphs.papers import CLASSES, EDGES, NODES, SPLITS, WIDTH, Edges, Features, Labels, Shape, classes_of, papers


def test_slices_are_parts_of_one_array() -> None:
    edges, x = Edges(NODES, EDGES, 0), Features(NODES, 0)
    whole, rows = edges[:, 1000:3000], x[NODES - 50 :]
    np.testing.assert_array_equal(edges[:, 1700:1710], whole[:, 700:710])
    np.testing.assert_array_equal(edges[1:, 1700:1710], whole[1:, 700:710])
    np.testing.assert_array_equal(x[NODES - 20 : NODES - 10], rows[30:40])
    assert (whole.dtype, rows.dtype, rows.shape) == (np.int32, np.float16, (50, WIDTH))
    assert not np.array_equal(whole, Edges(NODES, EDGES, 1)[:, 1000:3000])
    assert edges[:, EDGES - 3 : EDGES + 9].shape == (2, 3)


def test_edges_are_skewed_and_features_are_of_their_class() -> None:
    edges = Edges(1000, 200_000, 0)[:, :200_000]
    assert 0 <= edges.min() <= edges.max() == 999
    degree = np.sort(np.bincount(edges[1], minlength=1000))
    assert degree[-10:].sum() > 0.1 * degree.sum()
    x, label = Features(30_000, 0)[:30_000].astype(np.float32), classes_of(0, 30_000, 0)
    means = np.stack([x[label == each].mean(axis=0) for each in range(CLASSES)])
    assert 0.15 < np.abs(means).mean() < 0.35
    assert (np.argmax(x[:500] @ np.sign(means).T, axis=1) == label[:500]).mean() > 0.3


def test_a_store_of_a_scale(tmp_path: Path) -> None:
    shape = Shape.at(1e-5)
    with ooc.from_data(papers(1e-5), tmp_path / "p.ooc", dtype="float16", edge_ids=False) as ds:
        assert (ds.num_nodes, ds.num_edges) == (shape.nodes, shape.edges)
        assert {name: len(ds.split(name)) for name in SPLITS} == shape.splits
        labels = np.asarray(ds.labels)
        known = np.sort(np.concatenate([ds.split(name) for name in SPLITS]))
        np.testing.assert_array_equal(np.flatnonzero(labels >= 0), known)
        np.testing.assert_array_equal(labels[known], classes_of(0, shape.nodes, 0)[known])
        np.testing.assert_array_equal(Labels(shape.nodes, 0, known)[: shape.nodes], labels)
        assert ds.stored("x").dtype == np.float16
