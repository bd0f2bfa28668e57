"""Edges with labels and splits are appended as if all had been ingested at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ooc
from ooc.cli.main import main
from ooc.stores.errors import ConfigError, InputError

WORDS = ["eats", "fears", "is"]


def table(seed: int, count: int, nodes: int) -> dict[str, list[Any]]:
    draw = np.random.default_rng(seed)
    found: dict[str, list[Any]] = {name: [f"n{i:03}" for i in draw.integers(0, nodes, count)] for name in ("src", "dst")}
    found["relation"] = [WORDS[i] for i in np.concatenate([np.arange(3), draw.integers(0, 3, count - 3)])]
    found["split"] = [["train", "val", "test", ""][i] for i in draw.integers(0, 4, count)]
    found["t"] = draw.integers(0, 50, count).tolist()
    return found


def facts(store: Path) -> tuple[Any, ...]:
    """Edges with the user's ids, labels and splits, in order; and what the store says of them."""
    with ooc.open(store) as ds:
        edges = ds.edges()
        slot = np.arange(ds.num_edges)
        target = np.searchsorted(edges.graph.indptr, slot, side="right") - 1
        label = np.asarray(edges.labels)[edges.graph.edge_ids(slot)]
        source = ds.external(np.asarray(edges.graph.indices[:], np.int64))
        part = np.full(len(slot), "", "U5")
        for name in edges.splits:
            part[edges.members(name)[np.arange(len(edges.members(name)))]] = name
        rows = zip(source, ds.external(target), label.tolist(), part.tolist(), strict=True)
        return sorted(rows), edges.class_names, edges.splits, edges.task


@pytest.mark.cases(1)
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("columns", [["relation", "split"], ["relation"], ["split"]])
def test_a_store_that_grew_has_what_one_of_all_has(tmp_path: Path, columns: list[str], timed: bool) -> None:
    first, more, last = table(0, 60, 20), table(1, 30, 30), table(2, 11, 30)
    given = {"edge_label": "relation", "edge_split": "split"}
    how: dict[str, Any] = {name: column for name, column in given.items() if column in columns}
    how |= {"time": "t"} if timed else {}
    for name, parts in (("grown", [first]), ("whole", [first, more, last])):
        every = pa.concat_tables([pa.table(part) for part in parts])
        pq.write_table(every, tmp_path / f"{name}.parquet")
        ooc.ingest(tmp_path / f"{name}.ooc", edges=tmp_path / f"{name}.parquet", **how)
    for part in (more, last):
        pq.write_table(pa.table(part), tmp_path / "new.parquet")
        ooc.append(tmp_path / "grown.ooc", edges=tmp_path / "new.parquet", **how)
    if "relation" in columns:
        assert facts(tmp_path / "grown.ooc") == facts(tmp_path / "whole.ooc")
    ooc.compact(tmp_path / "grown.ooc")
    assert not ooc.verify(tmp_path / "grown.ooc")
    with ooc.open(tmp_path / "grown.ooc") as grown, ooc.open(tmp_path / "whole.ooc") as whole:
        assert grown.edges().splits == whole.edges().splits
        for name in whole.edges().splits:
            assert len(grown.edges().members(name)) == len(whole.edges().members(name))
    if "relation" in columns:
        assert facts(tmp_path / "grown.ooc") == facts(tmp_path / "whole.ooc")


def test_rows_of_edges_that_were_dropped_are_none(tmp_path: Path) -> None:
    nodes = pa.table({"id": [f"n{i:03}" for i in range(20)]})
    pq.write_table(nodes, tmp_path / "nodes.parquet")
    how: dict[str, Any] = {"edge_label": "relation", "edge_split": "split", "drop_missing": True}
    pq.write_table(pa.table(table(0, 50, 24)), tmp_path / "first.parquet")
    ooc.ingest(tmp_path / "links.ooc", edges=tmp_path / "first.parquet", nodes=tmp_path / "nodes.parquet", **how)
    before = facts(tmp_path / "links.ooc")[0]
    new = table(1, 40, 24)
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    done = ooc.append(tmp_path / "links.ooc", edges=tmp_path / "new.parquet", nodes=tmp_path / "nodes.parquet", **how)
    assert done.appended.missing > 0
    kept = [
        (s, d, WORDS.index(r), p)
        for s, d, r, p in zip(new["src"], new["dst"], new["relation"], new["split"], strict=True)
        if max(s, d) < "n020"
    ]
    assert facts(tmp_path / "links.ooc")[0] == sorted([*before, *kept])


def test_what_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = table(0, 30, 10)
    pq.write_table(pa.table(first), tmp_path / "first.parquet")
    store, path = tmp_path / "links.ooc", tmp_path / "new.parquet"
    ooc.ingest(store, edges=tmp_path / "first.parquet", edge_label="relation", edge_split="split")
    pq.write_table(pa.table({**first, "relation": ["likes"] * 30}), path)
    with pytest.raises(ConfigError, match="have labels: name the column of the new edges' as `edge_label`"):
        ooc.append(store, edges=path, edge_split="split")
    with pytest.raises(ConfigError, match="have a split: name the column of the new edges' as `edge_split`"):
        ooc.append(store, edges=path, edge_label="relation")
    with pytest.raises(InputError, match="likes"):
        ooc.append(store, edges=path, edge_label="relation", edge_split="split")
    ooc.ingest(tmp_path / "plain.ooc", edges=tmp_path / "first.parquet")
    with pytest.raises(ConfigError, match="have not labels: leave `edge_label` out"):
        ooc.append(tmp_path / "plain.ooc", edges=path, edge_label="relation")
    with pytest.raises(ConfigError, match="`edge_label` is of edges: give `edges` too"):
        ooc.append(store, nodes=path, id="src", edge_label="relation")
    assert main(["append", str(store), "--edges", str(tmp_path / "first.parquet"), "--edge-label", "relation"]) == 2
    assert "--edge-split" in capsys.readouterr().err
