"""Loaders under Lightning's Trainer: two processes train as one, each node is scored once, checkpoints resume mid-epoch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from tests.conftest import MakeStore

pl = pytest.importorskip("lightning.pytorch")

SCRIPT = """
import json
import sys

import lightning.pytorch as pl
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn import SAGEConv

import ooc


class Model(pl.LightningModule):
    '''Notes which seeds each batch has, and the losses of training.'''

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.seen = SAGEConv(8, 8), SAGEConv(8, 3), {}

    def forward(self, batch):
        return self.last(self.first(batch.x, batch.edge_index).relu(), batch.edge_index)[: batch.batch_size]

    def note(self, stage, batch, loss=0.0):
        self.seen.setdefault(stage, []).append([batch.input_id.tolist(), loss])

    def training_step(self, batch, number):
        loss = cross_entropy(self(batch), batch.y[: batch.batch_size])
        self.note(f"train {self.current_epoch}", batch, loss.item())
        return loss

    def validation_step(self, batch, number):
        if not self.trainer.sanity_checking:
            self.note(f"val {self.current_epoch}", batch)
        self.log("val", self(batch).mean(), batch_size=batch.batch_size, sync_dist=True)

    def test_step(self, batch, number):
        self.note("test", batch)

    def predict_step(self, batch, number):
        self.note("predict", batch)
        return self(batch).argmax(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder, devices=1, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = "ddp" if devices > 1 else "auto"
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, default_root_dir=folder, **{**quiet, **options})


if __name__ == "__main__":
    store, out, devices, batch_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    data = ooc.LightningData(store, num_neighbors=[-1, -1], batch_size=batch_size, memory="4GB", train={"seed": 0})
    model, runs = Model(), trainer(out, devices, max_epochs=2)
    runs.fit(model, data)
    runs.test(model, data, verbose=False)
    runs.predict(model, data)
    with open(f"{out}/rank{runs.global_rank}.json", "w") as file:
        json.dump(model.seen, file)
"""
OURS: dict[str, Any] = {"__name__": "script"}
exec(SCRIPT, OURS)
Seen = dict[str, list[tuple[list[int], float]]]


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    """33 training nodes."""
    order = np.random.default_rng(0).permutation(50)
    return make_store(splits={"train": order[:33], "val": order[33:40], "test": order[40:]})


def run(store: Path, folder: Path, devices: int, batch_size: int) -> list[Seen]:
    """What each of so many processes saw."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(folder / "script.py"), str(store), str(folder), str(devices), str(batch_size)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(devices)]


@pytest.mark.slow
def test_two_processes_train_as_one_and_score_each_node_once(store: Path, tmp_path: Path) -> None:
    (alone,) = run(store, tmp_path / "one", 1, 16)
    both = run(store, tmp_path / "two", 2, 8)
    for epoch in ("train 0", "train 1"):
        assert len(alone[epoch]) == 3
        for seen in both:
            assert len(seen[epoch]) == 2, "the last step has fewer nodes than ranks"
        for step in range(2):
            parts = [seen[epoch][step] for seen in both]
            assert sorted(parts[0][0] + parts[1][0]) == sorted(alone[epoch][step][0])
    for step in range(2):  # of the first epoch: then one process takes a step more
        losses = [seen["train 0"][step][1] for seen in both]
        assert np.mean(losses) == pytest.approx(alone["train 0"][step][1], abs=1e-6)
    for stage, count in (("val 0", 7), ("val 1", 7), ("test", 10), ("predict", 50)):
        assert sorted(node for seen in both for nodes, _ in seen[stage] for node in nodes) == list(range(count))


def fit(store: Path, folder: Path, resumed: Path | None = None, **options: Any) -> Seen:
    """What a model sees in two epochs of a Trainer with these options."""
    data = ooc.LightningData(store, num_neighbors=[2, 2], batch_size=8, train={"seed": 3})
    model = OURS["Model"]()
    OURS["trainer"](folder, max_epochs=2, **options).fit(model, data, ckpt_path=resumed)
    return {stage: seen for stage, seen in model.seen.items() if stage.startswith("train")}


def test_a_checkpoint_resumes_in_the_middle_of_an_epoch(store: Path, tmp_path: Path) -> None:
    whole = fit(store, tmp_path)
    assert [len(seen) for seen in whole.values()] == [5, 5]
    keep = pl.callbacks.ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(store, tmp_path, callbacks=[keep], enable_checkpointing=True)
    for step in (2, 5, 7):
        resumed = fit(store, tmp_path, tmp_path / "kept" / f"step={step}.ckpt")
        steps = [each for seen in whole.values() for each in seen]
        assert [each for seen in resumed.values() for each in seen] == steps[step:], f"from step {step}"


def test_lightnings_own_check_of_all_loops(store: Path, tmp_path: Path) -> None:
    data, model = ooc.LightningData(store, num_neighbors=[2, 2], batch_size=8), OURS["Model"]()
    trainer = OURS["trainer"](tmp_path, fast_dev_run=True)
    trainer.fit(model, data)
    trainer.validate(model, data, verbose=False)
    trainer.test(model, data, verbose=False)
    assert len(trainer.predict(model, data)) == 1
    assert data._data is None, "closed"
    assert set(model.seen) == {"train 0", "val 0", "val 1", "test", "predict"}


def test_overfit_batches_are_the_same_in_every_epoch(store: Path, tmp_path: Path) -> None:
    seen = fit(store, tmp_path, overfit_batches=2)
    seeds = {stage: [nodes for nodes, _ in each] for stage, each in seen.items()}
    assert seeds["train 0"] == seeds["train 1"]
    assert len(seeds["train 0"]) == 2
    assert fit(store, tmp_path)["train 0"][:2] == seen["train 0"]


def test_options_are_of_a_stage_or_of_all(store: Path) -> None:
    with ooc.open(store) as ds:
        data = ooc.LightningData(
            ds, num_neighbors=[2, 2], batch_size=8, val=None, predict={"input_nodes": "test", "batch_size": 3}
        )
        assert data.data is ds
        assert data.val_dataloader() == []
        assert [len(each.loader.dataset) for each in (data.train_dataloader(), data.predict_dataloader())] == [33, 10]
        assert [batch.batch_size for batch in data.predict_dataloader()] == [3, 3, 3, 1]
        with pytest.raises(ooc.ConfigError, match="`test` is None, so there is no loader for it"):
            ooc.LightningData(ds, num_neighbors=[2], test=None).test_dataloader()
        data.teardown("fit")
        assert len(ds.split("train")) == 33, "what was given open stays open"


def test_a_store_without_a_split_for_validation(make_store: MakeStore) -> None:
    with ooc.open(make_store(splits={"train": [0, 1]})) as ds:
        data = ooc.LightningData(ds, num_neighbors=[2])
        assert data.val_dataloader() == []
        with pytest.raises(ooc.InputError, match="test"):
            data.test_dataloader()


def test_links_and_clusters(store: Path) -> None:
    with ooc.open(store) as ds:
        links = torch.tensor([[0, 1, 2], [3, 4, 5]])
        data = ooc.LightningData(ds, ooc.LinkNeighborLoader, num_neighbors=[2], batch_size=2, train={"edge_label_index": links})
        assert [batch.edge_label_index.shape[1] for batch in data.train_dataloader()] == [2, 1]
        clusters = ooc.LightningData(ds, ooc.ClusterLoader, num_parts=5, batch_size=2)
        assert len(list(clusters.train_dataloader())) == len(clusters.train_dataloader()) == 3


def graphs() -> Iterator[Data]:
    for i in range(12):
        yield Data(x=torch.full((3, 2), float(i)), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([i % 2]))


def test_whole_graphs(tmp_path: Path) -> None:
    ds = ooc.from_data({"train": list(graphs()), "val": list(graphs())}, tmp_path / "g.ooc")
    with ds:
        data = ooc.LightningData(ds, ooc.GraphLoader, batch_size=5)
        assert [batch.num_graphs for batch in data.train_dataloader()] == [5, 5, 2]
        assert [batch.num_graphs for batch in data.val_dataloader()] == [5, 5, 2]
        assert sum(batch.num_graphs for batch in data.predict_dataloader()) == 24


def test_loaders_of_time_are_refused(store: Path) -> None:
    with pytest.raises(ooc.ConfigError, match="EventLoader has no share for ranks: iterate over it in a loop of your own"):
        ooc.LightningData(store, ooc.EventLoader)


def test_without_lightning_it_says_what_it_needs(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.loading.lightning.LightningDataModule", object)
    with pytest.raises(ooc.ConfigError, match=r"LightningData needs a package: pip install 'ooc\[lightning\]'"):
        ooc.LightningData(store)


@pytest.mark.slow
def test_all_names_are_there_without_lightning() -> None:
    code = "import sys; sys.modules['lightning'] = None; from ooc import *; LightningData('s.ooc')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert "ConfigError: LightningData needs a package" in done.stderr
