"""The configuration: every fault is one line that says what to do."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from ooc.config.base import FREE_TO_CHANGE
from ooc.config.models import OF_MODEL
from ooc.config.modes import classes, load_config
from ooc.config.nodes import TrainConfig
from ooc.models.builders import ModelName
from ooc.stores.errors import ConfigError

BASE = {"store": "a.ooc", "out": "run"}


def test_a_run_is_not_gone_on_with_in_another_mode() -> None:
    base = {"mode": "events", "memory_dim": 8, "out": "run", "store": "s.ooc"}
    with pytest.raises(ConfigError, match="was trained with mode = 'events', not 'snapshots': resume it unchanged"):
        load_config(None, {"mode": "snapshots", "window": "7d"}, base)
    assert load_config(None, {"mode": "events"}, base).mode == "events"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, ("node", "sampled")),
        ({"task": "node"}, ("node", "sampled")),
        ({"mode": "full"}, ("node", "full")),
        ({"mode": "snapshots"}, ("link", "snapshots")),
        ({"mode": "snapshots", "task": "node"}, ("node", "snapshots")),
        ({"mode": "snapshots", "task": "nodes"}, ("node", "snapshots")),
        ({"mode": "events", "task": "link"}, ("link", "events")),
    ],
)
def test_a_task_has_a_default_mode_and_a_mode_a_default_task(values: dict[str, str], found: tuple[str, str]) -> None:
    config = load_config(None, {**BASE, **values} | ({"window": 5} if found[1] == "snapshots" else {}))
    assert (config.task, config.mode) == found
    assert load_config(None, config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"task": "edges"}, "task = 'edges' is invalid: expected 'node', .*'link'"),
        (
            {"task": "link", "mode": "cluster"},
            "task = 'link' is not trained by mode cluster, which trains node.*: use mode .*events",
        ),
        (
            {"task": "node", "mode": "events"},
            "task = 'node' is not trained by mode events, which trains link: use mode sampled",
        ),
        ({"loss": "mae", "mode": "events"}, "loss does not apply to mode events"),
        ({"huber_delta": 2}, "huber_delta applies to loss = huber only"),
    ],
)
def test_tasks_that_do_not_go_with_a_mode_are_refused(values: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {**BASE, **values})


def test_a_run_is_not_gone_on_with_for_another_task() -> None:
    base = {"mode": "snapshots", "task": "links", "out": "run", "store": "s.ooc", "window": "7d"}
    assert load_config(None, {"mode": "snapshots"}, base).task == "link"
    with pytest.raises(ConfigError, match="was trained with task = 'link', not 'node': resume it unchanged"):
        load_config(None, {"task": "node"}, base)


@pytest.mark.parametrize(
    ("saved", "given", "words"),
    [
        ({"sampler": "labor", "layer_dependency": True}, {"sampler": "neighbor"}, "sampler = 'labor', not 'neighbor'"),
        ({"model": "gat", "heads": 4}, {"model": "gcn"}, "model = 'gat', not 'gcn'"),
    ],
)
def test_a_resumed_run_keeps_its_settings(saved: dict[str, object], given: dict[str, str], words: str) -> None:
    """What it was saved with does not go with the new one, and is not what the user gave."""
    base = load_config(None, {**BASE, **saved}).model_dump(mode="json")
    with pytest.raises(ConfigError, match=f"run was trained with {words}: resume it unchanged"):
        load_config(None, given, base)
    with pytest.raises(ConfigError, match="lr = '-1' is invalid"):
        load_config(None, {"lr": "-1"}, base)


def test_flags_override_the_file_and_the_file_the_base(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "gcn"\nlr = 0.5\nfanout = [3, 4, 5]\nclass_weights = "balanced"\n')
    config = load_config(file, {**BASE, "lr": "0.25", "hidden": None}, base={"hidden": 7, "model": "gin"})
    assert (config.model, config.lr, config.hidden, config.fanout) == ("gcn", 0.25, 7, [3, 4, 5])
    assert config.layers == 3
    assert config.class_weights == "balanced"


def test_json_holds_every_option_and_reads_back(tmp_path: Path) -> None:
    config = load_config(
        None, {**BASE, "model": "nets:Net", "fanout": "-1,-1", "features": ["x=a", "z=b"], "model_args": '{"k": [1]}'}
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.model_dump(mode="json")))
    assert load_config(file, {}) == config
    assert config.features == {"x": "a", "z": "b"}
    assert config.model_args == {"k": [1]}
    assert set(json.loads(file.read_text())) == set(TrainConfig.model_fields)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layrs": 2}, ["'layrs'", "'layers'"]),
        ({"epochs": "many"}, ["epochs", "'many'", "integer"]),
        ({"lr": -1}, ["lr", "greater than 0"]),
        ({"fanout": "10,10,10", "layers": 2}, ["fanout", "3 numbers", "2 layers"]),
        ({"fanout": "10", "layers": 2}, ["fanout", "1 number ", "2 layers"]),
        ({"fanout": "10,10", "eval_fanout": "5"}, ["eval_fanout", "1 number ", "2 layers"]),
        ({"fanout": "10,0"}, ["fanout", "-1"]),
        ({"fanout": "a,b"}, ["fanout", "integer"]),
        ({"memory": "two"}, ["'two'", "2GB"]),
        ({"precision": "fp8"}, ["precision", "bf16"]),
        ({"model": torch.nn.Sequential(torch.nn.ReLU())}, ["model = Sequential( (0): ReLU() ) ", "package.module:Class"]),
        ({"class_weights": "some"}, ["class_weights"]),
        ({"features": ["x"]}, ["features", "name=value"]),
        ({"model_args": "{"}, ["model_args"]),
        ({"dropout": 1.5}, ["dropout"]),
        ({"mode": "history", "refresh": "sometimes"}, ["refresh", "integer or 'auto'"]),
        ({"task": "link", "monitor": "hits@10", "eval_ratio": 9}, ["monitor = hits@10 is 1 for every model", "eval_ratio = 9"]),
    ],
)
def test_a_fault_is_one_line_naming_the_key(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**BASE, **values})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "sage", "model_args": {"a": 1}}, "model_args apply to your own class .*, not to sage"),
        ({"model": "rsage", "model_args": {"a": 1}}, "model_args apply to your own class .*, not to rsage"),
        ({"edge_type": "a:b:c"}, "edge_type does not apply to task node: leave it out, or use task edge or link"),
        ({"parts": 3, "mode": "full"}, "parts does not apply to mode full: leave it out, or use another mode"),
        ({"sampler": "labor", "mode": "cluster"}, "sampler does not apply to mode cluster: leave it out, or use another mode"),
        ({"batch_dependency": 4}, "batch_dependency applies to sampler = labor only: set that too, or leave it out"),
        ({"importance": "*"}, "importance applies to sampler = labor only: set that too, or leave it out"),
        ({"sampler": "labor", "importance": 1, "model": "gcn", "rescale": False}, "leave out rescale = false, or importance"),
        ({"sampler": "labor", "replace": True}, "replace does not apply to sampler = labor: leave it out"),
        (
            {"sampler": "labor", "importance": 65},
            r"importance = .* is invalid: expected a number less than or equal to 64 or '\*'",
        ),
        (
            {"normalize": False},
            "normalize applies to sampler = ladies, fastgcn, degree, gradient, learned only: set that too, or leave it out",
        ),
        ({"sampler": "ladies", "replace": True}, "replace does not apply to sampler = ladies: leave it out"),
        ({"sampler": "degree", "weight_attr": "w"}, "weight_attr does not apply to sampler = degree: leave it out"),
        ({"sampler": "fastgcn", "model": "gcn", "rescale": False}, "sampler = fastgcn weights sums .* leave out rescale"),
        ({"sampler": "ladies", "mode": "saint"}, "sampler does not apply to mode saint"),
        ({"sampler": "ladies", "batch_dependency": 4}, "batch_dependency applies to sampler = labor only"),
        ({"sampler": "ladies", "evaluate": "sampled"}, "give eval_fanout = 10,10, or evaluate = layerwise"),
        ({"sampler": "ladies", "eval_batch_size": 9}, "give eval_fanout = 10,10$"),
        ({"model": "gcn", "heads": 4}, "heads does not apply to model gcn: leave it out"),
        ({"model": "appnp", "theta": 0.1}, "theta does not apply to model appnp"),
        ({"rescale": False}, "rescale does not apply to model sage"),
        ({"model": "own.nets:Net", "alpha": 0.3}, "alpha does not apply to model own.nets:Net: leave it out, or give it in"),
    ],
)
def test_settings_of_another_model_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {**BASE, **values})


def test_settings_go_with_the_models_that_take_them() -> None:
    for name, models in OF_MODEL.items():
        value = {"rescale": False, "heads": 4, "output_heads": 2, "groups": 4, "init": "kaiming"}.get(name, 0.25)
        for model in get_args(ModelName):
            if model in models:
                assert getattr(load_config(None, {**BASE, "model": model, name: value}), name) == value
            else:
                with pytest.raises(ConfigError, match=name):
                    load_config(None, {**BASE, "model": model, name: value})
    assert load_config(None, {**BASE, "model": "own.nets:Net", "heads": 2}).heads == 2


def test_deep_models_are_scored_by_sweeps() -> None:
    def scored(**values: object) -> str:
        config = load_config(None, {**BASE, **values})
        assert load_config(None, config.model_dump(mode="json")) == config
        return config.evaluate

    assert scored(mode="history", layers=16) == "layerwise"
    assert scored(mode="history", eval_fanout="5,5") == scored(mode="history", eval_batch_size=64) == "sampled"
    assert scored(mode="history", evaluate="sampled") == scored() == "sampled"
    assert scored(mode="cluster") == scored(mode="saint") == "auto"  # the run sees whether full neighborhoods fit
    assert scored(mode="cluster", eval_fanout="5,5") == scored(mode="saint", eval_batch_size=64) == "sampled"
    assert scored(evaluate="layerwise") == "layerwise"


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="store is not set: give it as `store`"):
        load_config(None, {"out": "a"})
    with pytest.raises(ConfigError, match="window is not set: give it as `window`"):
        load_config(None, {"store": "a", "mode": "snapshots"})


def test_runs_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("runs/papers-1", "runs/papers-2"):
        out = load_config(None, {"store": "data/papers.ooc"}).out
        assert out == Path(expected)
        out.mkdir(parents=True)
    assert load_config(None, {"store": "data/papers.ooc", "out": "x"}).out == Path("x")


def test_a_store_that_is_a_link_to_itself_names_a_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "papers.ooc").symlink_to("papers.ooc")
    assert load_config(None, {"store": "papers.ooc"}).out == Path("runs/papers-1")


@pytest.mark.parametrize(("name", "text"), [("a.toml", "lr = "), ("a.json", "{"), ("b.json", "[1]"), ("c.toml", "\xff")])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=name):
        load_config(tmp_path / name, BASE)
    with pytest.raises(ConfigError, match="absent"):
        load_config(tmp_path / "absent.toml", BASE)


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ({"sampler": "LABOUR"}, ": did you mean 'labor'?"),
        ({"optimizer": "adm"}, "did you mean 'adam'?"),
        ({"sampler": "x"}, "'learned'"),
    ],
)
def test_a_word_that_is_misspelt_is_named(values: dict[str, object], end: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**BASE, **values})
    assert str(caught.value).endswith(end)


def test_defaults_fill_in_a_fanout_a_layer() -> None:
    config = load_config(None, {**BASE, "layers": 3, "batch_size": 7})
    assert config.fanout == config.eval_fanout == [10, 10, 10]
    assert config.eval_batch_size == 7


def test_differences_are_the_keys_that_change_a_loss() -> None:
    one, two = load_config(None, BASE), load_config(None, {**BASE, "lr": 1, "memory": "3GB", "epochs": 5, "fanout": "3,3"})
    assert one.differences(two) == ["lr", "fanout", "eval_fanout"]
    assert {name for each in classes().values() for name in each.model_fields} >= FREE_TO_CHANGE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layers": "99999999999999999999"},
            "layers = '99999999999999999999' is invalid: expected a number less than or equal to 10000",
        ),
        ({"hidden": 10**6}, "hidden = 1000000 is invalid: expected a number less than or equal to 65536"),
        ({"batch_size": 10**12}, "batch_size = 1000000000000 is invalid: expected a number less than 2147483648"),
        ({"fanout": "10,99999999999999999999"}, "fanout = .* is invalid: expected a number less than 2147483648"),
        ({"fanout": ["x"]}, "^fanout = x is invalid: expected a valid integer$"),
        ({"fanout": ["10,10", "a:b:c=5,x"]}, "^fanout = 10,10, a:b:c=5,x is invalid: expected a valid integer$"),
        ({"mode": "lightgcn", "model": "mf"}, "^model mf is trained by mode table: give that mode, or leave the model out$"),
        ({"threads": 10**20}, "threads = .* is invalid: expected a number less than or equal to 1024"),
        ({"memory": "9" * 400}, "`memory`: '9{60}' is not a size in bytes"),
        ({"mode": "events", "ratio": 10**6}, "ratio = 1000000 is invalid: expected a number less than or equal to 10000"),
        ({"mode": "snapshots", "window": 5, "eval_ratio": 10**6}, "eval_ratio = 1000000 is invalid"),
        ({"class_weights": "1,-1"}, "class_weights = '1,-1' is invalid: weights must be 0 or more"),
        ({"mode": "saint", "walk_length": 10**6}, "walk_length = 1000000 is invalid"),
        ({"model_args": '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}"}, "model_args = .*is invalid: it is nested too deeply"),
    ],
)
def test_numbers_that_no_machine_can_serve(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, {**BASE, **settings})
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["run.json", "run.toml"])
def test_a_deeply_nested_file(tmp_path: Path, name: str) -> None:
    content = "[" * 100_000 + "]" * 100_000
    (tmp_path / name).write_text(f'{{"model_args": {content}}}' if name.endswith("json") else f"model_args = {content}")
    with pytest.raises(ConfigError, match=r"run\.\w+: the configuration is nested too deeply"):
        load_config(tmp_path / name, BASE)


def test_training_is_scored_and_predicted_on_request_only() -> None:
    fields = [each.model_fields for each in classes().values()]
    assert all(each["eval_splits"].default == ["val", "test"] for each in fields if "eval_splits" in each)
    assert not any(each["plan"].default for each in fields if "plan" in each)


def test_a_budget_of_nodes_is_not_a_fan_out_of_scores() -> None:
    config = load_config(None, {**BASE, "sampler": "ladies"})
    assert (config.fanout, config.evaluate) == ([512, 512], "layerwise")
    assert config.batches == "ladies, 512, 512 nodes a layer, batches of 1,024"
    config = load_config(None, {**BASE, "sampler": "ladies", "fanout": "64,128", "eval_fanout": "5,5"})
    assert (config.fanout, config.eval_fanout, config.evaluate) == ([64, 128], [5, 5], "sampled")


MISSING = "a value is missing beside a comma: give it, or leave the comma out"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": "256,,64"}, f"hidden = '256,,64' is invalid: {MISSING}"),
        ({"hidden": "256,64,"}, f"hidden = '256,64,' is invalid: {MISSING}"),
        ({"hidden": ""}, "hidden = '' is invalid: expected a number greater than 0"),
        ({"hidden": "256,0,64"}, "hidden = '256,0,64' is invalid: expected a number greater than 0"),
        ({"hidden": "-4"}, "hidden = '-4' is invalid: expected a number greater than 0"),
        ({"fanout": ["10,,10"]}, f"fanout = 10,,10 is invalid: {MISSING}"),
        ({"fanout": [""]}, "fanout = [''] is invalid: give a number for each layer"),
        ({"fanout": ["5,5", "a:to:b="]}, "fanout = 5,5, a:to:b= is invalid: give a number for each layer"),
        ({"eval_splits": "val,,test"}, f"eval_splits = 'val,,test' is invalid: {MISSING}"),
        ({"log": ",wandb"}, f"log = ',wandb' is invalid: {MISSING}"),
        ({"class_weights": "1,x"}, "class_weights = '1,x' is invalid: expected a valid number or 'none' or 'balanced'"),
        ({"mode": "events", "num_neighbors": "10,,3"}, f"num_neighbors = '10,,3' is invalid: {MISSING}"),
    ],
)
def test_a_value_missing_in_a_list_is_refused(settings: dict[str, object], message: str) -> None:
    given = {**BASE, **settings}
    with pytest.raises(ConfigError) as caught:
        load_config(None, given)
    assert str(caught.value) == message


def test_a_list_of_no_splits_stays_one() -> None:
    assert load_config(None, {**BASE, "eval_splits": ""}).eval_splits == []


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("[]", "blocks = '[]' is invalid: give a block for each layer, or leave it out"),
        ("3", "blocks = '3' is invalid: expected a valid list"),
        ('[{}, "gat"]', 'block 2 = \'gat\' is invalid: expected a table of settings, such as {"conv": "gat"}'),
        ('[{"conv": "gat", "activation": "swish"}, {}]', "block 1: activation = 'swish' is invalid: expected 'relu', 'elu', "),
        ([{}, {"heads": 0}], "block 2: heads = 0 is invalid: expected a number greater than 0"),
        ([{}, {"width": 1}], "block 2: width = 1 is invalid: 'width' is no setting there"),
        ([{}], "blocks are 1 and layers are 2: give a block for each layer"),
    ],
)
def test_a_fault_of_a_block_says_of_which(blocks: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**BASE, "layers": 2, "blocks": blocks})
    assert str(caught.value).startswith(message)
