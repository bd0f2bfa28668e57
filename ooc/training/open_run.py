"""Opening a run: its store, directory, lock and checkpoint; model, optimizer and device of a configuration."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ooc.config.base import RunConfig, changed, parse, read_config
from ooc.config.modes import class_of
from ooc.config.nodes import NodeConfig, TrainConfig
from ooc.models.builders import build_model
from ooc.models.user import kind_of, load_model
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory import MemoryMeter
from ooc.training import checkpoint
from ooc.training.run import Run
from ooc.training.watchers import Watchers
from stores.dataset import Dataset
from stores.errors import ConfigError, OocError

CONFIG = "config.json"


AnyRun = TypeVar("AnyRun", bound=Run, covariant=True)


class Compose(Protocol[AnyRun]):
    """Puts a run together, and takes up the checkpoint `saved` where there is one."""

    def __call__(
        self,
        dataset: Dataset,
        watchers: Watchers,
        meter: MemoryMeter,
        run_dir: checkpoint.RunDir,
        saved: dict[str, Any] | None,
    ) -> AnyRun: ...


@contextmanager
def open_run(
    config: RunConfig, resume: bool, watchers: Watchers, make: Compose[AnyRun], dataset: Dataset | None = None
) -> Iterator[AnyRun]:
    """What `make` composes of `config`, anew or from its checkpoint; all is closed at the end, but `dataset` where given.

    Raises ConfigError, StoreError or BudgetError where something does not fit; a run that fails before its first step
    leaves no directory.
    """
    saved = check_out(config, resume)
    run_dir = checkpoint.RunDir(config.out, resume)
    meter = MemoryMeter("run")
    try:
        with (
            meter,
            open_dataset(config) if dataset is None else nullcontext(dataset) as opened,
        ):
            try:
                run = make(opened, watchers, meter, run_dir, saved)
                try:
                    yield run
                finally:
                    run.close()
            finally:
                watchers.close()
    except (OocError, OSError):
        run_dir.discard_unstarted()
        raise
    finally:
        run_dir.close()


def open_dataset(config: RunConfig) -> Dataset:
    """The store, as configured."""
    return Dataset.open(
        config.store, memory=config.memory, engine=config.engine, in_memory=config.in_memory, features=config.features
    )


def check_out(config: RunConfig, resume: bool) -> dict[str, Any] | None:
    """The checkpoint to go on from, None to begin. Raises ConfigError where `out` exists, or holds another run."""
    out = config.out
    if not resume:
        if os.path.lexists(out):
            raise ConfigError(f"{out} exists already: choose another --out, or go on with that run by --resume")
        return None
    if not os.path.lexists(out):
        return None
    before = saved_config(out)
    if before is None:
        if not out.is_dir() or not all(_left_by_a_killed_start(path) for path in out.iterdir()):
            raise ConfigError(f"{out} is not a run of `ooc train`: it holds no {CONFIG}, so there is nothing to resume")
        return None
    where = f"{out / CONFIG}: "
    for name in config.differences(parse(class_of(before, where), before, where)):
        was, now = before.get(name), config.model_dump(mode="json")[name]
        raise ConfigError(f"{out} was trained with {name} = {was!r}, not {now!r}: resume it unchanged, or start another run")
    return checkpoint.load(out)


def _left_by_a_killed_start(path: Path) -> bool:
    """Whether a run killed before its config.json stood leaves such a file: half of it, or the empty log."""
    half = path.name.startswith(".") and path.name.endswith(".tmp")
    return half or (path.name == checkpoint.METRICS and path.is_file() and not path.stat().st_size)


def saved_config(out: Path) -> dict[str, Any] | None:
    """The resolved configuration of the run in `out`, None where there is none."""
    return read_config(out / CONFIG) if (out / CONFIG).is_file() else None


def write_config(config: RunConfig) -> None:
    """Keep the configuration in the run's directory; only under its log's lock."""
    checkpoint.write_json(config.out / CONFIG, config.model_dump(mode="json"))


def pick_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one. Deterministic kernels are switched on for CUDA."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device auto or cpu")
    device = torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda")
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device


def make_model(config: NodeConfig, in_channels: int, channels: int) -> nn.Module:
    """The configured model, its parameters drawn from the seed alone."""
    torch.manual_seed(key(config.seed, Purpose.INIT) >> 1)
    shape: dict[str, Any] = {
        "in_channels": in_channels,
        "hidden_channels": config.hidden,
        "out_channels": channels,
        "num_layers": config.layers,
        "dropout": config.dropout,
        "heads": config.heads,
        "norm": config.norm,
        "residual": config.residual,
    }
    if ":" in config.model:
        asked = [name for name in changed(config, "dropout", "heads", "norm", "residual") if getattr(config, name)]
        made = load_model(config.model, shape, config.model_args, asked)
        count = len(made.layers) if kind_of(made) == "layers" else config.layers  # type: ignore[arg-type]
        if count != config.layers:
            raise ConfigError(f"model {config.model} has {count} layers, and layers is {config.layers}: give --layers {count}")
        return made
    if config.model_args:
        raise ConfigError(f"model_args are for a class of your own (package.module:Class), not for {config.model}")
    own = {name: getattr(config, name) for name in ("output_heads", "input_dropout", "alpha", "theta")}
    own |= {"rescale": config.rescale} if isinstance(config, TrainConfig) else {}
    return build_model(config.model, **shape, **own)


def model_bytes(config: RunConfig, model: nn.Module) -> int:
    """What training adds to a model that stands in the process's memory: gradients, the optimizer's state, and the best
    model so far with one being saved. Nothing where it stands on a GPU, but for the latter."""
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.device.type == "cpu"]
    states = {"adam": 2, "adamw": 2, "sgd": 0}
    kept = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    return sum(sizes) * (1 + states[config.optimizer]) + 2 * kept


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Adam, AdamW or SGD, weight decay on every parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"model {config.model} has no parameter to train")
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[config.optimizer](parameters, lr=config.lr, weight_decay=config.weight_decay)


def check_environment(config: RunConfig, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError where a checkpoint was taken with another store, model, device or number of processes."""
    for name, what in (
        ("store_fingerprint", f"another store than {config.store}: give the one it was trained on"),
        ("model_fingerprint", f"a model of other shapes than {config.model} now has: restore its source"),
        ("device", f"the device {saved['device']}, not {now['device']}: resume it there"),
        ("threads", f"{saved['threads']} torch threads, not {now['threads']}: resume it with as many"),
        ("world_size", f"{saved['world_size']} processes, not {now['world_size']}: resume it with as many"),
    ):
        if saved[name] != now[name]:
            raise ConfigError(f"cannot resume {config.out}: it was trained with {what}, or start another run")
