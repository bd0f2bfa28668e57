"""`ooc init`: a configuration that trains as no configuration does."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch_geometric.data import HeteroData

import ooc
from ooc.cli.main import main
from ooc.cli.template import template
from ooc.cli.train_verbs import TRAIN
from ooc.config.modes import applies, classes, load_config, suggested
from tests.conftest import MakeStore

FLAGS = {flag.name: flag for flag in TRAIN}


def test_what_is_printed_trains(make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, config = make_store(), tmp_path / "run.toml"
    capsys.readouterr()
    assert main(["init", str(store)]) == 0
    config.write_text(capsys.readouterr().out)
    assert f"{store}: 50 nodes" in config.read_text()
    assert main(["train", str(store), "--config", str(config), "--out", f"{tmp_path}/a", "--max-steps", "1", "--no-plan"]) == 0
    assert main(["init", str(tmp_path / "none")]) == 2
    assert main(["init", str(store), "--mode", "sampling"]) == 2
    assert "'sampled', 'cluster'" in capsys.readouterr().err


@pytest.mark.parametrize("mode", classes())
def test_a_template_holds_the_defaults_and_every_setting_of_its_mode(tmp_path: Path, mode: str) -> None:
    text = template(Path("a.ooc"), mode, FLAGS, "a store")
    (tmp_path / "run.toml").write_text(text)
    task, _, plain = mode.rpartition(" ")
    given = {"store": "a.ooc", "out": "run", "mode": plain} | ({"window": "7d"} if mode == "snapshots" else {})
    given |= {"task": task} if task else {}
    assert load_config(tmp_path / "run.toml", {"out": "run"}) == load_config(None, given)
    named = re.findall(r"^(?:# )?([a-z0-9_]+) = ", text, re.M)
    assert sorted(named) == sorted(name for name in classes()[mode].model_fields if applies(name, mode))
    assert all(
        re.search(r"\S +# \w", line) for line in text.splitlines() if " = " in line and not re.match("(# )?(store|out)", line)
    )


@pytest.mark.parametrize("mode", classes())
def test_settings_with_defaults_can_be_uncommented(tmp_path: Path, mode: str) -> None:
    text = template(Path("a.ooc"), mode, FLAGS, "a store")
    lines = [re.sub("^# ([a-z0-9_]+ = )", r"\1", line) for line in text.splitlines()]
    lines = [line for line in lines if not re.search(r" = ([A-Z]|LIST|NAME)", line) and "|" not in line.split("#")[0]]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert len(tomllib.loads("\n".join(lines))) > 15
    assert load_config(tmp_path / "run.toml", {}).mode == mode.rpartition(" ")[2]


def test_a_template_is_of_the_task_that_is_asked_for(make_store: MakeStore, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(make_store())
    for task, mode in (("link", "events"), ("node", "snapshots")):
        assert main(["init", store, "--task", task, "--mode", mode]) == 0
        text = capsys.readouterr().out
        assert re.search(rf'^task = "{task}"', text, re.M)
        assert re.search(rf'^mode = "{mode}"', text, re.M)
    assert main(["init", store, "--task", "link", "--mode", "full"]) == 2
    assert "task = 'link' is not trained by mode full" in capsys.readouterr().err


def test_tables_are_shown_as_toml_has_them() -> None:
    text = template(Path("a.ooc"), "sampled", FLAGS, "a store")
    assert re.search(r'^# features = { NAME = "VALUE" } +# ', text, re.M)
    assert re.search(r"^# model_args = { NAME = VALUE } +# ", text, re.M)


@pytest.mark.parametrize(
    ("labelled", "temporal", "expected"),
    [
        (["node"], False, ("node", "sampled")),
        (["edge", "node"], True, ("node", "sampled")),
        ([], True, ("link", "events")),
        (["graph"], False, ("graph", "graphs")),
        (["edge"], True, ("edge", "sampled")),
        ([], False, ("node", "sampled")),
    ],
)
def test_stores_begin_with_what_has_labels_and_else_with_events(
    labelled: list[str], temporal: bool, expected: tuple[str, str]
) -> None:
    assert suggested(labelled, temporal) == expected


def test_a_template_of_embedding_tables_on_several_types_names_no_gnn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = HeteroData({"a": {"num_nodes": 3}, "b": {"num_nodes": 3}})
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    with ooc.from_data(data, tmp_path / "typed.ooc") as ds:
        store = str(ds.path)
    for mode in ("table", "lightgcn", "sampled"):
        capsys.readouterr()
        assert main(["init", store, "--task", "link", "--mode", mode]) == 0
        text = capsys.readouterr().out
        tomllib.loads(text)
        assert ('model = "rsage"' in text) == (mode == "sampled")
