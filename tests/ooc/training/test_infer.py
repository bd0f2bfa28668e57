"""Predictions and embeddings of a trained run against the model on the whole graph; exact scores while training."""

import errno
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
import torch_geometric.nn
import zarr

import ooc
from ooc.cli.main import main
from ooc.layerwise import exact_pass as exact_pass_module
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.metrics.nodes import Scores, out_channels
from ooc.models.builders import full_blocks
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, StoreError
from ooc.training import infer as infer_module
from ooc.training import predictions as predictions_module
from ooc.training.build import make_model
from ooc.training.infer import embed, infer
from ooc.training.loop import train
from ooc.training.predictions import flat, predictions, write_parts
from tests.conftest import MakeStore
from tests.ooc.runs import configure


def trained(make_store: MakeStore, tmp_path: Path, num_nodes: int = 50, **settings: Any) -> tuple[Path, Path]:
    store = make_store(num_nodes=num_nodes)
    train(configure(store, tmp_path / "run", epochs=2, plan=False, **settings))
    return store, tmp_path / "run"


def outputs(store: Path, run: Path, **settings: Any) -> torch.Tensor:
    """The run's model on the whole graph."""
    config = configure(store, run, epochs=2, plan=False, **settings)
    with Dataset.open(store) as ds:
        model = make_model(config, ds.num_features, out_channels(str(ds.task), ds.num_classes or 2)).eval()
        model.load_state_dict(torch.load(run / "model.pt", weights_only=True)["model"])
        graph, x = ds.graph, torch.empty(ds.num_nodes, ds.num_features)
        ds.rows("x").read(np.arange(ds.num_nodes), x.numpy())
        target = np.repeat(np.arange(ds.num_nodes), np.diff(graph.indptr))
        edges = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
        with torch.inference_mode():
            return model(x, full_blocks(edges, ds.num_nodes, config.layers))


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_predictions_have_the_names_of_classes(make_store: MakeStore, tmp_path: Path, ending: str) -> None:
    names = ["Agents", "Theory", "Vision"]
    store, out = make_store(class_names=names), tmp_path / f"p.{ending}"
    assert train(configure(store, tmp_path / "run", epochs=1, plan=False))["class_names"] == names
    infer(tmp_path / "run", store, out)
    table = pq.read_table(out) if ending == "parquet" else pyarrow.csv.read_csv(out)
    assert table["class_name"].to_pylist() == [names[number] for number in table["class"].to_pylist()]
    if ending == "parquet":
        assert json.loads(table.schema.metadata[b"class_names"]) == names
    else:
        assert table.column_names[3:] == [f"probability_{name}" for name in names]
    assert predictions([1], torch.tensor([[1.0]]), "binary", ["no", "yes"])["class_name"].to_pylist() == ["yes"]


def test_names_of_classes_are_those_that_the_run_learned(make_store: MakeStore, tmp_path: Path) -> None:
    """Also where the store it was trained on is gone, and the other one has names of its own."""
    learned = make_store(class_names=["a", "b", "c"], name="learned.ooc")
    other = make_store(class_names=["b", "c", "d"], name="other.ooc")
    train(configure(learned, tmp_path / "run", epochs=1, plan=False))
    shutil.rmtree(learned)
    infer(tmp_path / "run", other, tmp_path / "p.csv")
    assert pyarrow.csv.read_csv(tmp_path / "p.csv").column_names[3:] == ["probability_a", "probability_b", "probability_c"]


def test_predictions_of_every_node(make_store: MakeStore, tmp_path: Path, capsys: Any) -> None:
    store, run = trained(make_store, tmp_path)
    out = tmp_path / "predictions.parquet"
    assert main(["infer", str(store), "--checkpoint", str(run), "--out", str(out), "--memory", "4GB"]) == 0
    assert "50 nodes" in capsys.readouterr().out
    table, expected = pq.read_table(out), outputs(store, run)
    assert table["id"].to_pylist() == list(range(50))
    assert table["class"].to_pylist() == expected.argmax(1).tolist()
    np.testing.assert_allclose(table["probabilities"].to_pylist(), expected.softmax(1), atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.parquet", "run", "test.ooc"]
    with pytest.raises(StoreError, match="exists already"):
        infer(run, store, out)


def test_predictions_as_csv(make_store: MakeStore, tmp_path: Path, capsys: Any) -> None:
    store, run = trained(make_store, tmp_path)
    command = ["infer", str(store), "--checkpoint", str(run), "--out"]
    assert main([*command, f"{tmp_path}/p.csv"]) == 0
    assert main([*command, f"{tmp_path}/p.parquet"]) == 0
    table, expected = pyarrow.csv.read_csv(tmp_path / "p.csv"), pq.read_table(tmp_path / "p.parquet")
    for name in ("id", "class"):
        assert table[name].to_pylist() == expected[name].to_pylist()
    rows = np.array(expected["probabilities"].to_pylist(), np.float32)
    for number in range(rows.shape[1]):
        np.testing.assert_array_equal(np.array(table[f"probability_{number}"], np.float32), rows[:, number])
    capsys.readouterr()
    for name in ("p.txt", "p"):
        assert main([*command, f"{tmp_path}/{name}"]) == 2
        assert "end the name in .parquet or .csv" in capsys.readouterr().err
        assert not list(tmp_path.glob(f"{name}.sweep"))


def test_embeddings_of_a_layer(make_store: MakeStore, tmp_path: Path) -> None:
    store, run = trained(make_store, tmp_path, model="gcnii", layers=3, fanout=[3, 3, 3])
    made = embed(run, store, tmp_path / "e.zarr", layer=3)
    rows = zarr.open_group(tmp_path / "e.zarr", mode="r")["x"][:]
    assert rows.shape == (made.rows, made.columns) == (50, 8)
    state = torch.load(run / "model.pt", weights_only=True)["model"]
    logits = torch.from_numpy(rows) @ state["decoder.lin.weight"].T + state["decoder.lin.bias"]
    torch.testing.assert_close(logits, outputs(store, run, model="gcnii", layers=3, fanout=[3, 3, 3]), atol=1e-4, rtol=1e-4)
    with Dataset.open(store, features={"x": tmp_path / "e.zarr" / "x"}) as ds:
        assert ds.num_features == 8
    for layer in (4, 0, -1, -2):
        with pytest.raises(ConfigError, match=f"`layer={layer}`: the model has layers 1 to 3; without it, the last but one"):
            embed(run, store, tmp_path / "f.zarr", layer=layer)
    with pytest.raises(ConfigError, match=r"end the name in \.zarr"):
        embed(run, store, tmp_path / "e.parquet")


@pytest.mark.slow
def test_a_kill_after_the_output_was_there(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sweep's folder still stood: the same call removes it, without doing anything twice; another one is refused."""
    store, run = trained(make_store, tmp_path, num_nodes=9000, max_steps=2)
    monkeypatch.setattr(exact_pass_module, "LayerwisePass", partial(LayerwisePass, room=300_000))
    monkeypatch.setattr(LayerwisePass, "discard", LayerwisePass.close)
    table, group = tmp_path / "p.parquet", tmp_path / "e.zarr"
    made, other = infer(run, store, table), embed(run, store, group)
    assert made.reading.startswith("engine ")
    assert (tmp_path / "p.parquet.sweep").is_dir()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="exists already"):
        embed(run, store, group, layer=2)
    assert infer(run, store, table) == replace(made, bytes_read=0, bytes_written=0)
    assert embed(run, store, group) == replace(other, bytes_read=0, bytes_written=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.zarr", "p.parquet", "run", "test.ooc"]


ENDING = {infer: ".parquet", embed: ".zarr"}


@pytest.mark.parametrize("write", [infer, embed])
def test_an_output_that_cannot_be_written_leaves_nothing_half(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    store, run = trained(make_store, tmp_path)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Appender, "append", full)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(StoreError, match=r"No space left.*free some space"):
        write(run, store, tmp_path / f"output{ENDING[write]}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "test.ooc"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("write", [infer, embed])
def test_two_into_one_output(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """The second is refused while the first is at it, be it wholly in memory; what the first writes is whole."""
    store, run = trained(make_store, tmp_path)
    for name in ("write_table", "write_zarr"):
        real = getattr(infer_module, name)

        def writing(*arguments: Any, real: Any = real) -> None:
            with pytest.raises(StoreError, match="another process computes there"):
                write(run, store, tmp_path / f"output{ENDING[write]}")
            real(*arguments)
            with pytest.raises(StoreError, match="another process computes there"):
                write(run, store, tmp_path / f"output{ENDING[write]}")

        monkeypatch.setattr(infer_module, name, writing)
    assert write(run, store, tmp_path / f"output{ENDING[write]}").rows == 50
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"output{ENDING[write]}", "run", "test.ooc"]


def test_tables_by_task() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, -2.0, -1.0]])
    many = predictions(["a", "b"], logits, "multilabel")
    assert many["id"].to_pylist() == ["a", "b"]
    assert many["classes"].to_pylist() == [[0, 2], []]
    assert flat(many)["classes"].to_pylist() == ["0 2", ""]
    assert flat(many[:0]).column_names == ["id", "classes", "probability_0", "probability_1", "probability_2"]
    named = predictions(["a", "b"], logits, "multilabel", ["new", "very long", "spam"])
    assert named["class_names"].to_pylist() == [["new", "spam"], []]
    text = flat(named)
    assert text["class_names"].to_pylist() == ["new;spam", ""]
    assert text.column_names[3:] == ["probability_new", "probability_very long", "probability_spam"]
    assert text["probability_spam"].to_pylist() == [row[2] for row in named["probabilities"].to_pylist()]
    np.testing.assert_allclose(many["probabilities"].to_pylist(), logits.sigmoid())
    one = predictions(np.array([4, 9]), torch.tensor([[1.0], [-1.0]]), "binary")
    assert one["class"].to_pylist() == [1, 0]
    np.testing.assert_allclose(one["probability"].to_pylist(), torch.tensor([1.0, -1.0]).sigmoid())


def test_what_does_not_fit_is_named(make_store: MakeStore, tmp_path: Path) -> None:
    store, run = trained(make_store, tmp_path)
    other = make_store("other.ooc", x=np.zeros((50, 3), np.float32))
    width = r"model\.pt does not fit .*: layers\.0\.\S+ is \[8, 8\] in the file, and \[8, 3\] in the model that they make; give"
    with pytest.raises(ConfigError, match=width) as caught:
        infer(run, other, tmp_path / "p.parquet")
    assert "state_dict" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        infer(tmp_path, store, tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="directory does not exist"):
        infer(run, store, tmp_path / "absent" / "p.parquet")
    for named, words in (
        ({"model_class": "mine:Net"}, "has model sage: leave it out"),
        ({"num_layers": 2}, "`num_layers` applies to models with their own forward, and Model has layers: leave it out"),
    ):
        with pytest.raises(ConfigError, match=words):
            infer(run, store, tmp_path / "p.parquet", **named)  # type: ignore[arg-type]
    with Dataset.open(store) as ds, pytest.raises(ConfigError, match="engine is a property of an open data set"):
        infer(run, ds, tmp_path / "p.parquet", engine="pread")
    with Dataset.open(store) as ds, pytest.raises(ConfigError, match="cache is a property of an open data set"):
        infer(run, ds, tmp_path / "p.parquet", cache=0)
    module: Any = torch.nn.ModuleList()
    with pytest.raises(ConfigError, match="`model_class` names the class of a run's model, and the model is in memory"):
        infer(module, store, tmp_path / "p.parquet", model_class="mine:Net")
    assert not list(tmp_path.glob("p.parquet*"))


def test_a_run_of_classes_on_a_store_of_numbers_predicts_classes(make_store: MakeStore, tmp_path: Path) -> None:
    """The kind of labels is the run's, though the other store's labels are numbers."""
    rng = np.random.default_rng(0)
    learned = make_store("learned.ooc", y=rng.integers(0, 2, 50), task="binary", num_classes=2)
    numbers = make_store("numbers.ooc", y=rng.random(50, np.float32), task="regression", num_classes=None)
    train(configure(learned, tmp_path / "run", epochs=1, plan=False))
    infer(tmp_path / "run", numbers, tmp_path / "p.parquet")
    assert pq.read_table(tmp_path / "p.parquet").column_names == ["id", "class", "probability"]
    shutil.rmtree(learned)
    assert infer(tmp_path / "run", numbers).shape == (50, 1)
    summary = tmp_path / "run" / "summary.json"
    older = {key: value for key, value in json.loads(summary.read_text()).items() if key not in ("num_classes", "labels_of")}
    summary.write_text(json.dumps(older))
    with pytest.raises(ConfigError, match=r"run does not say which binary labels it learned, and neither does"):
        infer(tmp_path / "run", numbers, tmp_path / "q.parquet")


def test_fewer_classes_and_other_names_change_no_predictions(make_store: MakeStore, tmp_path: Path) -> None:
    """Of labels of the same kind, and of numbers: classes and names are the run's, also where it learned no names."""
    learned = make_store("learned.ooc", y=np.arange(50) % 4, num_classes=4)
    fewer = make_store("fewer.ooc", class_names=["x", "y", "z"])
    y = np.zeros((50, 2), np.float32)
    numbers = make_store("numbers.ooc", y=y, task="regression", num_classes=2, class_names=["length", "width"])
    train(configure(learned, tmp_path / "run", epochs=1, plan=False))
    for number, store in enumerate((fewer, numbers)):
        infer(tmp_path / "run", store, tmp_path / f"{number}.csv")
        names = pyarrow.csv.read_csv(tmp_path / f"{number}.csv").column_names
        assert names == ["id", "class", *(f"probability_{each}" for each in range(4))]


def test_arguments_without_an_effect_are_refused(
    make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Python by the argument's name, on the command line by the flag's."""
    store, run = trained(make_store, tmp_path)
    with pytest.raises(ConfigError, match="model must be a module or the directory of a run, not a int"):
        infer(7, store, model_class="mine:Net")  # type: ignore[call-overload]
    gcn = torch_geometric.nn.GCN(8, 4, 2, 3)
    with pytest.raises(ConfigError, match=r"`num_layers` applies to .*, and the hops of GCN are found by trying: leave it out"):
        infer(gcn, store, num_layers=7)
    assert infer(gcn, store).shape == (50, 3)
    command = ["infer", str(store), "--checkpoint", str(run), "--out", f"{tmp_path}/p.csv", "--model", "mine:Net"]
    assert main(command) == 2
    assert "--model names the class of a run's model, and" in capsys.readouterr().err


def test_paths_with_a_colon(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow takes relative ones for URIs."""
    run = trained(make_store, tmp_path)[1]
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"src": [0, 1], "dst": [1, 2]}), tmp_path / "e-1:2.parquet")
    np.save("x-1.npy", np.zeros((50, 8), np.float32))
    np.save("y-1.npy", np.arange(50) % 3)
    given: dict[str, Any] = {"features": {"x": "x-1.npy"}, "labels": "y-1.npy"}
    ooc.ingest("s-1:2.ooc", edges="e-1:2.parquet", **given)
    assert ooc.append("s-1:2.ooc", edges="e-1:2.parquet").appended.edges == 2
    assert infer(run, "s-1:2.ooc", "p-1:2.parquet").rows == 50
    assert pq.read_table(tmp_path / "p-1:2.parquet").num_rows == 50


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["sage", "gat"])
def test_training_scores_all_splits_by_one_sweep(make_store: MakeStore, tmp_path: Path, model: str) -> None:
    store = make_store()
    splits = ["train", "val", "test"]
    summary = train(configure(store, tmp_path / "run", epochs=2, model=model, evaluate="layerwise", eval_splits=splits))
    logits = outputs(store, tmp_path / "run", model=model)
    with Dataset.open(store) as ds:
        for split, found in summary["metrics"].items():
            node = ds.split(split)
            scores = Scores("multiclass", 3, len(node))
            scores.update(logits[node], torch.from_numpy(np.asarray(ds.labels[node])))
            assert found == pytest.approx(scores.compute(), abs=1e-5)
    assert list(summary["metrics"]) == splits
    assert not (tmp_path / "run" / "sweep").exists()


def test_sampled_settings_mean_nothing_layerwise(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="eval_fanout"):
        configure(tmp_path, tmp_path / "run", evaluate="layerwise", eval_fanout=[2, 2])


def test_parts_share_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of graphs or edges is a part, and no row group of its own; a group has so many rows or bytes."""
    parts = [(np.arange(at, at + 3), np.full((3, 2), at, np.float32)) for at in range(0, 60, 3)]
    write_parts(tmp_path / "one.parquet", iter(parts), "regression")
    assert pq.ParquetFile(tmp_path / "one.parquet").num_row_groups == 1
    monkeypatch.setattr(predictions_module, "ROWS_AT_ONCE", 7)
    write_parts(tmp_path / "some.parquet", iter(parts), "regression")
    assert pq.ParquetFile(tmp_path / "some.parquet").num_row_groups == 7
    assert pq.read_table(tmp_path / "some.parquet").equals(pq.read_table(tmp_path / "one.parquet"))
    assert pq.read_table(tmp_path / "one.parquet")["id"].to_pylist() == list(range(60))
