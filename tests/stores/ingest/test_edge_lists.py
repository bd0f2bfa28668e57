"""Edge lists: fields between blanks or tabs, with comments."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.dataset import Dataset
from ooc.stores.errors import InputError
from ooc.stores.ingest import IngestSpec, ingest

LINES = "# nodes and weights\n% more\n\n0   1  0.5\n1\t2\t2\n# between\n 2 0 1 \n"


@pytest.mark.parametrize("name", ["e.edgelist", "e.el.gz"])
def test_an_edge_list(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(LINES.encode()) if name.endswith(".gz") else LINES.encode())
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / name), weight="column2"))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert np.asarray(ds.graph.indices).tolist() == [2, 0, 1]
        assert np.asarray(ds.graph.columns["weight"]).tolist() == [1, 0.5, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0 1\n1 2 3\n", r"e\.edgelist: the line 1 2 3 has 3 fields, the first one 2; correct the line"),
        ("# x\n", "is empty: it has no rows"),
        ("0 1 {'weight': 2}\n", r"is no edge; an edge is a source, a destination, .*write_edgelist"),
        ("0 1\n" * 20 + "2 x\n", r"e\.edgelist line 21: column1 'x' is not a whole number"),
    ],
)
def test_lines_that_are_no_edges(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "e.edgelist").write_text(content)
    with pytest.raises(InputError, match=message):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.edgelist")))
    assert [path.name for path in tmp_path.iterdir()] == ["e.edgelist"]


@pytest.mark.parametrize(
    ("named", "notes"),
    [
        ({}, ["e.tsv has no header: sources are column0, destinations column1 of 3 columns; src and dst name others"]),
        ({"src": "column0", "dst": "column2"}, []),
        ({"weight": "column2"}, []),
    ],
)
def test_columns_taken_by_place_are_told_where_others_may_be_meant(
    tmp_path: Path, named: dict[str, Any], notes: list[str]
) -> None:
    (tmp_path / "e.tsv").write_text("10\t5\t20\n20\t6\t30\n")
    found = ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.tsv"), **named)).notes
    assert [note.removeprefix(f"{tmp_path}/") for note in found] == notes
