"""The composition root of a run: the only place that opens the store and picks device, model, optimizer and loaders.

Nothing is written before everything that can be refused has been checked, so a refused run leaves no directory behind.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from ooc.config.nodes import TrainConfig
from ooc.history.halo import AHEAD, Halo, HaloLoader, open_halo, widths_of
from ooc.layerwise.scores import ExactScores
from ooc.loading.arguments import weight_column_of
from ooc.loading.base import BatchLoader
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.subgraph_loaders import ClusterLoader, SaintLoader
from ooc.metrics.nodes import out_channels
from ooc.models.builders import pre_aggregation_of
from ooc.models.compile import compile_model
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory import MemoryMeter, keep_large_blocks
from ooc.runtime.memory_plan import MemoryPlan, plan_memory
from ooc.training import checkpoint
from ooc.training.grown import take_up
from ooc.training.node_run import SWEEP, Job
from ooc.training.open_run import (
    check_environment,
    make_model,
    make_optimizer,
    model_bytes,
    open_run,
    pick_device,
    write_config,
)
from ooc.training.run import environment
from ooc.training.tasks import check_task, make_loss
from ooc.training.watchers import TensorBoardWatcher, Watchers
from stores.dataset import Dataset

KEPT_A_NODE = {"saint": 4, "history": 6}
"""bytes in memory for every node: how often it came; the step that wrote its histories, and how often they were asked for"""


def open_job(
    config: TrainConfig, resume: bool, watchers: Watchers, dataset: Dataset | None = None, grown: bool = False
) -> AbstractContextManager[Job]:
    """The run on nodes of `config`; see `open_run`, and of `grown` `take_up`."""
    return open_run(config, resume, watchers, partial(compose, config, grown), dataset)


def columns_met(config: TrainConfig, dataset: Dataset) -> set[str]:
    """The graph's columns that batches of training look up: the weights, and what edges are drawn by."""
    drawn_by = weight_column_of(dataset.graph, config.weight_attr)
    return {name for name in ("weight", drawn_by) if name is not None and name in dataset.graph.columns}


def make_loader(
    config: TrainConfig, dataset: Dataset, device: torch.device, model: nn.Module, budget: MemoryPlan
) -> BatchLoader:
    """The training loader, of the configured mode."""
    if config.mode == "history":
        return make_halo_loader(config, dataset, device, model, budget)
    if config.mode != "sampled":
        return make_subgraph_loader(config, dataset, device, budget)
    return NeighborLoader(
        dataset,
        config.fanout,
        input_nodes=config.train_split,
        batch_size=config.batch_size,
        shuffle=True,
        seed=config.seed,
        **_sampling(config, device, model, budget),
    )


def make_subgraph_loader(
    config: TrainConfig, dataset: Dataset, device: torch.device, budget: MemoryPlan
) -> ClusterLoader | SaintLoader:
    """Batches of parts, or random subgraphs, whose coefficients are kept in the run's directory."""
    common: dict[str, Any] = {
        "input_nodes": config.train_split,
        "num_layers": config.layers,
        "width": config.layers * config.hidden,
        "seed": config.seed,
        "device": device,
        "edge_ids": False,
        "budget": budget,
    }
    if config.mode == "cluster":
        return ClusterLoader(dataset, config.parts_per_batch, shuffle=True, num_parts=config.parts, **common)
    sizes: dict[str, Any] = {"batch_size": config.roots, "walk_length": config.walk_length}
    coverage, folder = config.saint_coverage, config.out / "saint"
    return SaintLoader(dataset, config.saint, **sizes, sample_coverage=coverage, save_dir=folder, **common)


def make_halo_loader(
    config: TrainConfig, dataset: Dataset, device: torch.device, model: nn.Module, budget: MemoryPlan
) -> HaloLoader:
    """Batches of parts with their halo; rows pulled and pushed, and those kept in RAM, have their share of the memory."""
    widths = widths_of(model, dataset.num_features, "weight" in dataset.graph.columns)
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
        budget=budget.beside_history(),
    )


def make_evaluators(
    config: TrainConfig, dataset: Dataset, device: torch.device, model: nn.Module, budget: MemoryPlan
) -> dict[str, NeighborLoader]:
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
            **_sampling(config, device, model, budget),
        )
        for split in dict.fromkeys([config.val_split, *config.eval_splits])
        if split in dataset.splits and len(dataset.members(split))
    }


def _sampling(config: TrainConfig, device: torch.device, model: nn.Module, budget: MemoryPlan) -> dict[str, Any]:
    common: dict[str, Any] = {"replace": config.replace, "weight_attr": config.weight_attr, "device": device, "edge_ids": False}
    return {**common, "budget": budget, "pre_aggregation": pre_aggregation_of(model)}


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
    budget = plan_memory(dataset, model_bytes(config, model) + counts, columns_met(config, dataset))
    loader = make_loader(config, dataset, device, model, budget)
    evaluators = make_evaluators(config, dataset, device, model, budget)
    for each in evaluators.values():
        each.keeps_blocks = loader.keeps_blocks
    keep_large_blocks(loader.keeps_blocks)  # a profile of the run has no epoch that begins
    loss = make_loss(config, dataset, task, device)
    log = run_dir.claim(saved["metrics_bytes"] if saved else 0)
    job = Job(
        config=config,
        dataset=dataset,
        device=device,
        model=model,
        budget=budget,
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
        job.exact = ExactScores(model, dataset, config.out / SWEEP, engine, waiting, budget)
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
