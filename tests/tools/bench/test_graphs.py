"""The benchmark of whole graphs: both passes count every graph once."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

import ooc
from tools.bench.io.graphs import Shape, by_ooc, by_pyg, make_on_disk, make_store


@pytest.fixture
def shape() -> Shape:
    return Shape(graphs=60, nodes=6, width=4)


def test_a_pass_of_ooc_counts_every_graph(tmp_path: Path, shape: Shape) -> None:
    make_store(tmp_path / "g.ooc", shape, "2GB")
    with ooc.open(tmp_path / "g.ooc") as ds:
        assert (ds.num_graphs, ds.num_nodes, ds.num_edges) == (60, shape.ptr[-1], 2 * shape.ptr[-1])
        x = np.empty((ds.num_nodes, 4), np.float32)
        ds.rows("x").read(np.arange(ds.num_nodes), x)
    np.testing.assert_array_equal(x, np.concatenate(list(shape.x())))
    found = by_ooc(Namespace(child=tmp_path / "g.ooc", limit="", memory="", batch_size=7, shuffle_block="1MB"))
    nodes = int(shape.ptr[-1])
    assert (found["graphs"], found["bytes"]) == (60, nodes * (4 * 4 + 8) + 2 * nodes * 4 + 60)
    assert found["graphs_per_s"] == 60 / found["seconds"]


def test_a_pass_of_pyg_counts_as_much(tmp_path: Path, shape: Shape) -> None:
    make_on_disk(tmp_path / "pyg", shape)
    found = by_pyg(Namespace(child=tmp_path / "pyg", limit="", width=4, batch_size=7, pyg_read=60))
    nodes = int(shape.ptr[-1])
    assert (found["graphs"], found["bytes"]) == (60, nodes * (4 * 4 + 8) + 2 * nodes * 4 + 60)
