"""The public names of `ooc`: one list, typed, light, and enough for a whole script."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data

import ooc
from tests.conftest import MakeStore
from tests.forked import python

ROOT = Path(__file__).resolve().parents[1]
SMALL: dict[str, Any] = {"hidden": 8, "fanout": [3, 3], "batch_size": 16, "plan": False}


def typed() -> dict[str, str]:
    """Public name -> the module that type checkers import it from."""
    tree = ast.parse((ROOT / "ooc" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found = [node for node in [*tree.body, *block.body] if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in found for alias in node.names}


def test_all_names_are_typed_where_they_are_defined() -> None:
    shown = typed()
    for name in ooc.__all__:
        if name != "open":
            assert getattr(ooc, name) is getattr(__import__(shown[name], fromlist=[name]), name)
    assert dir(ooc) == sorted(ooc.__all__)
    asked = "train plan infer embed append split verify open TrainConfig FullConfig EventsConfig SnapshotsConfig MemoryMeter"
    assert {*asked.split(), "build_model", "RandomNegatives", "__version__"} <= set(ooc.__all__)


@pytest.mark.parametrize("name", ["train", "plan", "infer", "embed", "append", "split", "verify", "compact"])
def test_functions_are_documented(name: str) -> None:
    function, text = getattr(ooc, name), inspect.getdoc(getattr(ooc, name)) or ""
    for section in ("Args:", "Returns:", "Raises:", ">>> "):
        assert section in text
    for parameter in inspect.signature(function).parameters:
        assert parameter in text


def test_naming_the_api_imports_nothing_heavy() -> None:
    heavy = ["torch", "numba", "zarr", "numpy", "pydantic"]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, ooc; dir(ooc); print([name for name in {heavy!r} if name in sys.modules])"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


SCRIPT = """
from pathlib import Path
import ooc

def script() -> None:
    config: ooc.TrainConfig = ooc.TrainConfig(store=Path("s"), out=Path("o"), fanout=[10, 10])
    summary: dict[str, object] = ooc.train(config)
    rows: ooc.NodeRows = ooc.infer("run", "store")
    written: ooc.WrittenRows = ooc.infer("run", "store", "p.parquet", memory="2GB")
    counted: int = ooc.append("store", edges="e.parquet").appended.edges
    text: str = ooc.__version__
    columns: tuple[int, ...] = ooc.embed("run", "store", layer=1).shape
    sizes: dict[str, int] = ooc.split("store", (0.6, 0.2, 0.2), seed=1).sizes
    ooc.infer("run", "store", memry="2GB")
"""


@pytest.mark.slow
def test_mypy_sees_the_types(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", str(tmp_path / "script.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert errors, done.stdout
    assert all("script.py:14: error: " in line for line in errors), done.stdout
    assert "memry" in errors[0]


def test_a_script_of_the_api_alone(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan, train, infer, append, resume; the runs are those of the command line."""
    store, run = make_store(), tmp_path / "run"
    monkeypatch.setattr("ooc.training.loop.PLAN_SECONDS", 0.1)
    assert ooc.verify(store) == []
    assert ooc.plan(store=store, mode="sampled", **SMALL).prediction.seconds_per_epoch > 0
    summary = ooc.train(store=store, out=run, model="gcn", epochs=1, **SMALL)
    assert json.loads((run / "summary.json").read_text())["metrics"] == summary["metrics"]
    with ooc.infer(run, store) as logits, ooc.embed(run, store) as hidden:
        assert (logits.shape, hidden.shape, logits.dtype) == ((50, 3), (50, 8), np.float32)
        assert repr(logits) == "NodeRows(shape=[50, 3], dtype=float32)"
        rows = np.asarray(logits)
        np.testing.assert_array_equal(logits[[3, -1, 3]], rows[[3, -1, 3]])
        np.testing.assert_array_equal(logits[7], rows[7])
        np.testing.assert_array_equal(logits[10:20:3], rows[10:20:3])
        np.testing.assert_array_equal(logits[rows[:, 0] > 0], rows[rows[:, 0] > 0])
        for wrong in (50, -51, 1.5, np.ones(3, bool)):
            with pytest.raises(IndexError):
                logits[wrong]
    ooc.infer(run, store, tmp_path / "p.parquet")
    assert pq.read_table(tmp_path / "p.parquet")["class"].to_pylist() == rows.argmax(1).tolist()
    np.save(tmp_path / "edges.npy", np.array([[0, 1], [2, 3]]))
    assert ooc.append(store, edges=tmp_path / "edges.npy").appended.edges == 2
    with pytest.raises(ooc.ConfigError, match="has grown since"):
        ooc.train(out=run, resume=True, epochs=2)
    resumed = ooc.train(out=run, resume=True, grown=True, epochs=2)
    assert (resumed["config"]["model"], resumed["config"]["epochs"]) == ("gcn", 2)
    assert ooc.compact(store).appended.edges == 2


def test_a_configuration_is_an_object_a_file_or_names(make_store: MakeStore, tmp_path: Path) -> None:
    config = ooc.TrainConfig(store=make_store(), out=tmp_path / "one", epochs=1, **SMALL)
    one = ooc.train(config)["metrics"]
    assert ooc.train(config, out=tmp_path / "two")["metrics"] == one
    assert ooc.train(tmp_path / "one" / "config.json", out=tmp_path / "three")["metrics"] == one
    with pytest.raises(ooc.ConfigError, match="unknown key 'epoch'; did you mean 'epochs'"):
        ooc.train(config, epoch=3)
    with pytest.raises(ooc.ConfigError, match="give `resume=True` too"):
        ooc.train(config, grown=True)
    for callbacks in (ooc.Callback(), [print]):
        with pytest.raises(ooc.ConfigError, match=r"callbacks must be a list of objects of ooc\.Callback"):
            ooc.train(config, callbacks=callbacks)  # type: ignore[arg-type]
    numbers: dict[str, Any] = {"fanout": np.array([3, 3]), "lr": np.float32(0.5), "epochs": torch.tensor(2)}
    found = ooc.load_config(None, {"store": "a.ooc", "out": "o", **numbers})
    assert isinstance(found, ooc.TrainConfig)
    assert (found.fanout, found.lr, found.epochs) == ([3, 3], 0.5, 2)


def test_a_live_module_is_inferred_without_its_features_in_memory(make_store: MakeStore, tmp_path: Path) -> None:
    """A list of layers layer by layer, on an open data set; its outputs are those on the whole graph."""
    model = ooc.build_model("gcn", 8, 8, 3, num_layers=2).eval()
    with ooc.open(make_store(), memory="4GB") as ds:
        target = np.repeat(np.arange(50), np.diff(ds.graph.indptr))
        edges = torch.from_numpy(np.stack([np.asarray(ds.graph.indices, np.int64), target]))
        x = torch.empty(50, 8)
        ds.rows("x").read(np.arange(50), x.numpy())
        with torch.inference_mode():
            expected = model(x, ooc.full_blocks(edges, 50, 2))
        with ooc.infer(model, ds) as rows:
            np.testing.assert_allclose(rows, expected, atol=1e-5)
        assert ooc.infer(model, ds, tmp_path / "p.parquet").rows == 50
        assert pq.read_table(tmp_path / "p.parquet")["class"].to_pylist() == expected.argmax(1).tolist()
        ooc.infer(ooc.build_model("gcn", 8, 8, 5, num_layers=1), ds, tmp_path / "o.parquet")
        assert pq.read_table(tmp_path / "o.parquet").column_names == ["id", "outputs"]
        with pytest.raises(ooc.ConfigError, match="memory is a property of an open data set"):
            ooc.infer(model, ds, memory="2GB")
        with pytest.raises(ooc.ConfigError, match="no such directory"):
            ooc.infer(model, ds, folder=tmp_path / "no")
        with pytest.raises(ooc.ConfigError, match="model must be a module or the directory of a run, not a function"):
            ooc.infer(lambda x: x, ds)  # type: ignore[arg-type]


def test_a_data_set_is_taken_where_a_path_is(make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is opened again as it was; what is given beside it comes first."""
    np.save(tmp_path / "edges.npy", np.array([[0], [1]]))
    with ooc.open(make_store(), memory="4GB", engine="pread") as ds:
        assert ooc.verify(ds) == []
        done = ooc.train(store=ds, out=tmp_path / "run", epochs=1, progress=True, **{**SMALL, "engine": "mmap"})
        assert {name: done["config"][name] for name in ("store", "memory", "engine", "in_memory")} == {
            "store": str(ds.path),
            "memory": "4GB",
            "engine": "mmap",
            "in_memory": False,
        }
        assert "epoch 1/1: loss" in capsys.readouterr().err
        assert ooc.append(ds, edges=np.array([[0], [1]])).appended.edges == 1
        assert "manifest" not in repr(ooc.compact(ds))
        assert ooc.split(ds, (1.0, 0.0, 0.0), replace=True).sizes == {"train": 50}
        for config in (ds, ds.path):
            with pytest.raises(ooc.ConfigError, match=r"is a directory, not a configuration .*: a store is given as `store`"):
                ooc.train(config, model="gcn")


def test_what_is_no_store_or_layer_is_refused_in_a_line(make_store: MakeStore, tmp_path: Path) -> None:
    graph, store = Data(x=torch.zeros(2, 3), edge_index=torch.zeros(2, 1, dtype=torch.long)), make_store()
    model = ooc.build_model("gcn", 8, 8, 3, num_layers=2)
    for call in (lambda: ooc.train(store=graph), lambda: ooc.plan(store=graph), lambda: ooc.infer(model, graph)):
        with pytest.raises(ooc.ConfigError, match=r"store is a Data in memory: make a store of it once, ds = ooc.from_data"):
            call()
    with pytest.raises(ooc.ConfigError, match=r"store must be a data set .* not int"):
        ooc.embed(model, 3)  # type: ignore[call-overload]
    for layer in ("last", 1.5, -1):
        with pytest.raises(ooc.ConfigError, match=f"`layer={layer!r}`: the model has layers 1 to 2"):
            ooc.embed(model, store, layer=layer)  # type: ignore[call-overload]
    with pytest.raises(ooc.ConfigError, match=r"random_split='0.5'`: give the shares"):
        ooc.split(store, 0.5, replace=True)  # type: ignore[arg-type]
    (tmp_path / "run.toml").write_text(f'store = "{store}"\nlr = 0.5\n')
    assert ooc.load_config(f"{tmp_path}/run.toml").lr == 0.5
    assert "digest" not in repr(ooc.append(store, edges=np.array([[0], [1]])))


def test_a_plan_is_shown_in_one_line(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.training.loop.PLAN_SECONDS", 0.1)
    store = make_store()
    for settings in ({"mode": "sampled", **SMALL}, {"mode": "full", "hidden": 8, "memory": "4GB"}):
        found = ooc.plan(store=store, **settings)
        assert repr(found) == f"{type(found).__name__}({found})"
        assert " s an epoch, " in str(found)
        assert len(repr(found)) < 400


def test_the_old_module_of_that_name_is_gone() -> None:
    """`ooc.train` is a function now."""
    assert "No module named 'ooc.train'" in python("-c", "import ooc.train").stderr
