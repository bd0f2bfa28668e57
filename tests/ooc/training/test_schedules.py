"""Schedules of the learning rate, momentum: those of torch; runs that ended early go on with them to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from ooc.config.nodes import TrainConfig
from ooc.runtime.crew import FEW, few
from ooc.runtime.restoring import settings_restored
from ooc.stores.errors import ConfigError
from ooc.training import build
from ooc.training.build import make_optimizer, model_bytes
from ooc.training.loop import train
from ooc.training.open_run import notes_of_rate
from ooc.training.schedules import scheduled
from tests.conftest import MakeStore
from tests.ooc.runs import KillAt, Killed, configure, curve


def settings(**more: Any) -> TrainConfig:
    return TrainConfig(**{"store": "a.ooc", "out": "run", "lr": 0.5, "epochs": 12, **more})


@pytest.mark.parametrize(
    ("more", "theirs"),
    [
        ({"lr_schedule": "cosine"}, lambda optimizer: CosineAnnealingLR(optimizer, T_max=12 * 4)),
        ({"lr_schedule": "step", "lr_epochs": 5, "lr_factor": 0.3}, lambda optimizer: StepLR(optimizer, 5 * 4, 0.3)),
        ({}, lambda optimizer: StepLR(optimizer, 1000)),
    ],
    ids=["cosine", "step", "constant"],
)
def test_rates_are_those_of_torch(more: dict[str, Any], theirs: Any) -> None:
    config, optimizer = settings(**more), torch.optim.SGD([torch.zeros(1)], lr=0.5)
    schedule = theirs(optimizer)
    for number in range(12 * 4):
        rate = config.lr * scheduled(config, *divmod(number, 4), 4)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_the_rate_rises_step_by_step_before_the_schedule_begins() -> None:
    config = settings(lr_schedule="cosine", lr_warm_up=1.5)
    found = [scheduled(config, *divmod(number, 4), 4) for number in range(12 * 4)]
    assert found[:6] == pytest.approx([(number + 1) / 6 for number in range(6)])
    assert found[6] == 1.0
    assert found[6:] == sorted(found[6:], reverse=True)
    assert 0 < found[-1] < 0.01


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "schedule", [{"lr_schedule": "cosine", "lr_warm_up": 0.5}, {"lr_schedule": "plateau", "lr_patience": 1}]
)
def test_a_killed_run_goes_on_with_its_schedule_to_the_bit(
    make_store: MakeStore, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    store, more = make_store(), {"optimizer": "sgd", "momentum": 0.9, "lr": 1.0, "epochs": 6, "checkpoint_every": 1, **schedule}
    whole, cut = (configure(store, tmp_path / name, **more) for name in ("whole", "cut"))
    train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(9))
    train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)
    plain = configure(store, tmp_path / "plain", **{**more, "lr_warm_up": 0.0, "lr_schedule": "constant", "lr_patience": 5})
    train(plain)
    assert curve(plain.out) != curve(whole.out)


def test_a_plateau_lowers_the_rate_and_says_so(make_store: MakeStore, tmp_path: Path) -> None:
    """A rate so low that no score improves."""
    more = {"lr": 1e-12, "lr_factor": 0.5, "lr_patience": 2, "epochs": 6}
    config = configure(make_store(), tmp_path / "run", **more)
    assert config.lr_schedule == "plateau"
    train(config)
    lines = [json.loads(line) for line in curve(config.out).splitlines()]
    assert [line["lr"] for line in lines if "lr" in line] == [5e-13, 2.5e-13]


def test_momentum_is_sgds_and_counts_for_the_memory() -> None:
    model = torch.nn.Linear(10, 10)
    config, plain = settings(optimizer="sgd", momentum=0.9), settings(optimizer="sgd")
    assert make_optimizer(config, model).param_groups[0]["momentum"] == 0.9
    assert model_bytes(config, model) - model_bytes(plain, model) == 4 * 110


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_step_of_few_parameters_is_one_call_whose_bits_do_not_depend_on_threads(optimizer: str) -> None:
    """It is torch's step; where parameters are many, it is torch's own choice."""
    same: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    config, theirs = settings(optimizer=optimizer, **same), {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    torch.manual_seed(0)
    start, gradients = torch.randn(701, 131), [torch.randn(701, 131) for _ in range(3)]

    def trained(threads: int, make: Any) -> torch.Tensor:
        model = torch.nn.Linear(131, 701, bias=False)
        with torch.no_grad():
            model.weight.copy_(start)
        made = make(model)
        with settings_restored():
            torch.set_num_threads(threads)
            for gradient in gradients:
                model.weight.grad = gradient.clone()
                with few(model.weight.numel()):  # as a run does
                    made.step()
        return model.weight.detach()

    own = [trained(threads, lambda model: make_optimizer(config, model)) for threads in (1, 2)]
    plain = trained(1, lambda model: theirs(model.parameters(), foreach=False, **same))
    assert torch.equal(*own)
    torch.testing.assert_close(own[0], plain, rtol=1e-5, atol=1e-6)
    assert make_optimizer(config, torch.nn.Linear(131, 701)).defaults["fused"]
    assert make_optimizer(config, torch.nn.Linear(1, FEW + 1)).defaults["fused"] is None


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_step_of_parameters_with_strides_is_torchs(optimizer: str) -> None:
    """Slices and transposed matrices are not one range of numbers, which torch's fused step takes them for."""
    theirs = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    torch.manual_seed(0)
    table = torch.randn(6, 8)

    def trained(make: Any) -> torch.Tensor:
        whole, model = table.clone(), torch.nn.Module()
        model.sliced, model.turned = torch.nn.Parameter(whole[:, :3]), torch.nn.Parameter(whole[:, 4:].t())
        model.sliced.grad, model.turned.grad = torch.ones(6, 3), torch.arange(24.0).view(4, 6)
        make(model).step()
        return whole

    own = trained(lambda model: make_optimizer(settings(optimizer=optimizer), model))
    assert torch.equal(own, trained(lambda model: theirs(model.parameters(), lr=0.5, weight_decay=0.0)))
    assert torch.equal(own[:, 3], table[:, 3])


def test_an_fp16_run_of_a_version_without_fused_steps_goes_on(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    with monkeypatch.context() as earlier:
        earlier.setattr(build, "in_one_call", lambda parameters: None)
        train(configure(store, tmp_path / "run", precision="fp16", epochs=1))
    found = train(configure(store, tmp_path / "run", precision="fp16", epochs=2), resume=True)
    assert found["epochs"] == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"momentum": 0.9}, "momentum applies to optimizer = sgd"),
        ({"lr_schedule": "cosine", "lr_factor": 0.5}, "lr_factor applies to lr_schedule = step or plateau"),
        ({"lr_epochs": 3}, "lr_epochs applies to lr_schedule = cosine or step"),
        ({"lr_schedule": "step", "lr_patience": 2}, "lr_patience applies to lr_schedule = plateau"),
        ({"lr_schedule": "cosine", "lr_warm_up": 12}, "lr_warm_up = 12 leaves nothing"),
        ({"lr_factor": 1.0, "lr_patience": 2}, "lr_factor = 1 leaves the rate of lr_schedule = plateau as it is"),
    ],
)
def test_settings_of_other_schedules_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(**more)


def test_a_constant_rate_with_the_factor_that_tables_had_by_default_is_the_same_run() -> None:
    assert not settings(lr_factor=1.0).differences(settings())
    assert settings(lr_factor=1.0).lr_schedule == "constant"
    assert settings(lr_factor=0.5).differences(settings()) == ["lr_schedule", "lr_factor"]


def test_the_end_of_a_cosine_stays_where_it_was_when_there_are_more_epochs(make_store: MakeStore, tmp_path: Path) -> None:
    from ooc.config.modes import load_config

    config = configure(make_store(), tmp_path / "run", lr_schedule="cosine", epochs=2)
    train(config)
    saved = json.loads((config.out / "config.json").read_text())
    assert load_config(None, {"epochs": 5}, saved).lr_epochs == 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="lr_epochs"):
        train(load_config(None, {"lr_epochs": 5}, saved), resume=True)


def test_a_warm_up_longer_than_the_run_is_noted() -> None:
    (note,) = notes_of_rate(settings(epochs=2, lr_warm_up=5))
    assert note == "lr_warm_up = 5 is longer than epochs = 2: the learning rate never reaches lr"
    assert not notes_of_rate(settings(epochs=5, lr_warm_up=5))


def test_epochs_behind_the_end_of_a_cosine_are_noted() -> None:
    (note,) = notes_of_rate(settings(epochs=5, lr_schedule="cosine", lr_epochs=2))
    assert note.startswith("after 2 epochs the cosine ends and the learning rate is 0")
    assert not notes_of_rate(settings(epochs=5, lr_schedule="cosine"))
