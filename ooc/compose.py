"""The composition root of a run: the only place that opens the store and picks device, model, optimizer and loaders.

Nothing is written before everything that can be refused has been checked, so a refused run leaves no directory behind.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ooc import checkpoint
from ooc.arguments import weight_column_of
from ooc.baserun import Run, environment
from ooc.compiled import compile_model
from ooc.config import NodeConfig, RunConfig, TrainConfig, changed, class_of, parse, read_config
from ooc.epochs import BatchLoader
from ooc.exact import ExactScores
from ooc.grown import take_up
from ooc.halo import AHEAD, SHARE, Halo, HaloLoader, open_halo, widths_of
from ooc.induced import ClusterLoader, SaintLoader
from ooc.loaders import NeighborLoader, budget_of
from ooc.memory import MemoryMeter
from ooc.metrics import out_channels
from ooc.models import build_model, summing_of
from ooc.order import Purpose, key
from ooc.progress import TensorBoardWatcher, Watchers
from ooc.run import SWEEP, Job
from ooc.tasks import check_task, make_loss
from ooc.user_models import kind_of, load_model
from stores.dataset import Dataset
from stores.errors import ConfigError, OocError

CONFIG = "config.json"
AnyRun = TypeVar("AnyRun", bound=Run, covariant=True)
KEPT_A_NODE = {"saint": 4, "history": 6}
"""bytes in memory for every node: how often it came; the step that wrote its histories, and how often they were asked for"""


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


def open_job(
    config: TrainConfig, resume: bool, watchers: Watchers, dataset: Dataset | None = None, grown: bool = False
) -> AbstractContextManager[Job]:
    """The run on nodes of `config`; see `open_run`, and of `grown` `take_up`."""
    return open_run(config, resume, watchers, partial(compose, config, grown), dataset)


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


def columns_met(config: TrainConfig, dataset: Dataset) -> set[str]:
    """The graph's columns that batches of training look up: the weights, and what edges are drawn by."""
    drawn_by = weight_column_of(dataset.graph, config.weight_attr)
    return {name for name in ("weight", drawn_by) if name is not None and name in dataset.graph.columns}


def make_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Adam, AdamW or SGD, weight decay on every parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"model {config.model} has no parameter to train")
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[config.optimizer](parameters, lr=config.lr, weight_decay=config.weight_decay)


def make_loader(config: TrainConfig, dataset: Dataset, device: torch.device, model: nn.Module) -> BatchLoader:
    """The training loader, of the configured mode."""
    if config.mode == "history":
        return make_halo_loader(config, dataset, device, model)
    if config.mode != "sampled":
        return make_subgraph_loader(config, dataset, device)
    return NeighborLoader(
        dataset,
        config.fanout,
        input_nodes=config.train_split,
        batch_size=config.batch_size,
        shuffle=True,
        seed=config.seed,
        **_sampling(config, device, model),
    )


def make_subgraph_loader(config: TrainConfig, dataset: Dataset, device: torch.device) -> ClusterLoader | SaintLoader:
    """Batches of parts, or random subgraphs, whose coefficients are kept in the run's directory."""
    common: dict[str, Any] = {
        "input_nodes": config.train_split,
        "num_layers": config.layers,
        "width": config.layers * config.hidden,
        "seed": config.seed,
        "device": device,
        "edge_ids": False,
    }
    if config.mode == "cluster":
        return ClusterLoader(dataset, config.parts_per_batch, shuffle=True, num_parts=config.parts, **common)
    sizes: dict[str, Any] = {"batch_size": config.roots, "walk_length": config.walk_length}
    coverage, folder = config.saint_coverage, config.out / "saint"
    return SaintLoader(dataset, config.saint, **sizes, sample_coverage=coverage, save_dir=folder, **common)


def make_halo_loader(config: TrainConfig, dataset: Dataset, device: torch.device, model: nn.Module) -> HaloLoader:
    """Batches of parts with their halo; rows pulled and pushed, and those kept in RAM, have their share of the memory."""
    widths = widths_of(model, dataset.num_features, "weight" in dataset.graph.columns)
    whole = budget_of(dataset)
    left = {name: getattr(whole, name) * (SHARE - 1) // SHARE for name in ("in_flight", "max_batch")}
    itemsize = 2 if config.history_dtype == "float16" else 4
    return HaloLoader(
        dataset,
        per_batch=config.parts_per_batch,
        halo=True,
        layers=config.layers,
        parts=config.parts,
        shuffle=True,
        train=dataset.members(config.train_split),
        width=sum(widths),
        beside=itemsize * sum(widths) * AHEAD,
        seed=config.seed,
        device=device,
        budget=replace(whole, **left),
    )


def make_evaluators(config: TrainConfig, dataset: Dataset, device: torch.device, model: nn.Module) -> dict[str, NeighborLoader]:
    """A loader for each split to score that the store has; none where a sweep scores them."""
    if config.evaluate == "layerwise":
        return {}
    return {
        split: NeighborLoader(
            dataset,
            config.eval_fanout,
            input_nodes=split,
            batch_size=config.eval_batch_size or config.batch_size,
            seed=key(config.seed, Purpose.EVALUATE) >> 1,
            split_seeds=True,
            **_sampling(config, device, model),
        )
        for split in dict.fromkeys([config.val_split, *config.eval_splits])
        if split in dataset.splits and len(dataset.members(split))
    }


def _sampling(config: TrainConfig, device: torch.device, model: nn.Module) -> dict[str, Any]:
    common: dict[str, Any] = {"replace": config.replace, "weight_attr": config.weight_attr, "device": device, "edge_ids": False}
    return {**common, "summing": summing_of(model)}


def compose(
    config: TrainConfig,
    grown: bool,
    dataset: Dataset,
    watchers: Watchers,
    meter: MemoryMeter,
    run_dir: checkpoint.RunDir,
    saved: dict[str, Any] | None,
) -> Job:
    """Put the run together, and take up the checkpoint `saved` where there is one."""
    task = check_task(config, dataset)
    threads = saved["threads"] if saved else config.threads
    if threads is not None:
        torch.set_num_threads(threads)
    device = pick_device(config.device)
    channels = out_channels(task, dataset.num_classes or 2)
    model = make_model(config, dataset.num_features, channels).to(device)
    if config.compile:
        compile_model(model, device)
    if saved:
        saved = take_up(config.out, dataset, saved, grown)
        check_environment(config, saved, environment(device, dataset, model))
    counts = KEPT_A_NODE.get(config.mode, 0) * dataset.num_nodes
    budget_of(dataset, model_bytes(config, model) + counts, columns_met(config, dataset))
    loader, evaluators = make_loader(config, dataset, device, model), make_evaluators(config, dataset, device, model)
    loss = make_loss(config, dataset, task, device)
    log = run_dir.claim(saved["metrics_bytes"] if saved else 0)
    job = Job(
        config=config,
        dataset=dataset,
        device=device,
        model=model,
        optimizer=make_optimizer(config, model),
        scaler=torch.amp.GradScaler(device.type, enabled=config.precision == "fp16"),
        loss=loss,
        loader=loader,
        evaluators=evaluators,
        log=log,
        watchers=watchers,
        meter=meter,
    )
    if saved:
        job.restore(saved)
    if config.evaluate == "layerwise":
        engine = "auto" if config.engine == "gds" else config.engine
        waiting = loader.kept_bytes if isinstance(loader, HaloLoader) and config.history_lag else 0  # pushes
        job.exact = ExactScores(model, dataset, config.out / SWEEP, engine, beside=waiting)
    if saved is None:  # from here on it is a run, which --resume takes
        write_config(config)
    if config.tensorboard:
        watchers.all.append(TensorBoardWatcher(config.out, job.state.total_steps))
    if isinstance(loader, HaloLoader):  # the last that may be refused: it has files, and a thread
        job.halo = make_halo(config, loader, model, saved)
    if saved is not None:  # settings that were refused are not those of the next --resume
        write_config(config)
    if config.memory is not None:
        watchers.note(str(loader.budget))
    watchers.note(f"features are read: {dataset.reading('x')}")
    return job


def make_halo(config: TrainConfig, loader: HaloLoader, model: nn.Module, saved: dict[str, Any] | None) -> Halo:
    """The run's histories, anew or as they were at the checkpoint `saved`."""
    widths = widths_of(model, loader.data.num_features, "weight" in loader.data.graph.columns)
    engine = "auto" if config.engine == "gds" else config.engine  # histories are pulled into the host's memory
    settings: dict[str, Any] = {"dtype": config.history_dtype, "lag": config.history_lag, "engine": engine}
    return open_halo(config.out, loader, widths, saved and saved["halo"], zero=config.history == "zero", **settings)


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
