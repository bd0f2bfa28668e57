"""Training on a store that grew: as on one that was ingested whole, to the bit; readers that follow."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import ooc
from ooc.config import TrainConfig
from ooc.train import train
from stores.errors import ConfigError
from stores.growth.append import append
from stores.growth.compact import compact
from stores.growth.spec import AppendSpec
from stores.ingest import IngestSpec, ingest
from tests.ooc.runs import SMALL, KillAt, Killed, configure, curve

N, E, NEW_N, NEW_E = 200, 1500, 20, 100
NODES: dict[str, Any] = {"label": "y", "split": "split", "x_cols": "f*"}


def tables(folder: Path) -> dict[str, str]:
    """Parquet files of the first edges and nodes, the later ones, and all."""
    rng = np.random.default_rng(0)
    every = np.concatenate([rng.integers(0, N, (2, E)), rng.integers(0, N + NEW_N, (2, NEW_E))], axis=1)
    ids = np.arange(N + NEW_N)
    described: dict[str, Any] = {
        "id": ids,
        "y": rng.integers(0, 3, len(ids)),
        "split": np.array(["train", "val", "test"])[ids % 3],
    }
    described |= {f"f{j}": column for j, column in enumerate(rng.standard_normal((16, len(ids)), np.float32))}
    edges, nodes = pa.table({"src": every[0], "dst": every[1]}), pa.table(described)
    made = {}
    for name, edge_part, node_part in (
        ("base", edges[:E], nodes[:N]),
        ("new", edges[E:], nodes[N:]),
        ("all", edges, nodes),
    ):
        for kind, part in (("edges", edge_part), ("nodes", node_part)):
            made[f"{name}-{kind}"] = str(folder / f"{name}-{kind}.parquet")
            pq.write_table(part, made[f"{name}-{kind}"])
    return made


def given(files: dict[str, str], name: str) -> dict[str, Any]:
    return {"edges": files[f"{name}-edges"], "nodes": files[f"{name}-nodes"], **NODES}


MODES: dict[str, dict[str, Any]] = {
    "sums": {},
    "windows": {"model": "gat", "heads": 2},
    "histories": {"mode": "history", "parts": 5, "layers": 2},
    "layer by layer": {"evaluate": "layerwise"},
}


@pytest.mark.parametrize("name", MODES)
def test_a_model_trained_after_growth_is_one_trained_on_everything(tmp_path: Path, name: str) -> None:
    files, settings = tables(tmp_path), SMALL | MODES[name]
    if settings.get("mode") == "history":
        del settings["fanout"], settings["batch_size"]
    for store in ("grown", "whole"):
        ingest(IngestSpec(out=tmp_path / f"{store}.ooc", **given(files, "base" if store == "grown" else "all")))
    append(AppendSpec(out=tmp_path / "grown.ooc", **given(files, "new")))
    runs = {"whole": "whole.ooc", "appended": "grown.ooc", "compacted": "grown.ooc"}
    found = {}
    for run, store in runs.items():
        if run == "compacted":
            compact(tmp_path / store)
        config = TrainConfig(store=tmp_path / store, out=tmp_path / run, **settings)
        found[run] = train(config)["metrics"], curve(config.out), torch.load(config.out / "model.pt")["model"]
    for run in ("appended", "compacted"):
        assert found[run][:2] == found["whole"][:2]
        assert all(torch.equal(each, found["whole"][2][key]) for key, each in found[run][2].items())


def test_a_run_is_not_resumed_on_a_store_that_grew(tmp_path: Path) -> None:
    files = tables(tmp_path)
    store = ingest(IngestSpec(out=tmp_path / "s.ooc", **given(files, "base"))).path
    config = configure(store, tmp_path / "run", checkpoint_every=2)
    with pytest.raises(Killed):
        train(config, watcher=KillAt(5))
    append(AppendSpec(out=store, **given(files, "new")))
    with pytest.raises(ConfigError, match=r"cannot resume .* another store"):
        train(config, resume=True)


def test_a_reader_that_follows_trains_the_next_epoch_on_what_was_appended(tmp_path: Path) -> None:
    files = tables(tmp_path)
    store = ingest(IngestSpec(out=tmp_path / "s.ooc", **given(files, "base"))).path
    seen, ds = [], ooc.open(store)
    for epoch in range(3):
        if epoch == 1:
            append(AppendSpec(out=store, **given(files, "new")))
        newer = ds.follow()
        if newer is not ds:
            ds.close()
        ds = newer
        loader = ooc.NeighborLoader(ds, num_neighbors=[3], input_nodes="train", batch_size=32)
        seen.append(sum(batch.batch_size for batch in loader))
    ds.close()
    assert seen == [(N + 2) // 3, (N + NEW_N + 2) // 3, (N + NEW_N + 2) // 3]
