"""The composition root: the only place that opens the store of a run, its directory, lock and checkpoint."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ooc.config.base import CONFIG, RunConfig, parse, saved_config
from ooc.config.modes import class_of, trained_otherwise
from ooc.history.history import Growth
from ooc.models.dropout import STREAM
from ooc.runtime.memory import MemoryMeter
from ooc.runtime.ranks import RankLost, Ranks, joined_ranks, lost_ranks_named
from ooc.runtime.restoring import settings_restored
from ooc.runtime.shared_reads import shared_blocks
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.working import scratch_folder
from ooc.stores.jit import COMPILATIONS
from ooc.stores.sizes import format_bytes, parse_bytes
from ooc.training import checkpoint
from ooc.training.build import takes_floats
from ooc.training.compressed_gradients import check_compression
from ooc.training.loggers import LOGGERS
from ooc.training.mode import Mode
from ooc.training.registry import MODES, mode_of
from ooc.training.restarts import begins, begun_before
from ooc.training.run import Run, environment
from ooc.training.watchers import Watchers


@contextmanager
def open_run(
    config: RunConfig, resume: bool, watchers: Watchers, dataset: Dataset | None = None, grown: bool = False
) -> Iterator[Run]:
    """A run of `config`, new or, with `resume`, from the checkpoint in `config.out` where there is one.

    A run that fails before its first checkpoint leaves no directory. The watchers are closed too; a data set that is given
    stays open. grown: whether to go on though the store has grown. Of several ranks the first one writes the directory; the
    others have one of their own beside it, which goes with the block, and no watchers.

    Raises ConfigError, StoreError or BudgetError where something does not fit, MemoryError where torch cannot allocate what it
    needs, RankLost where another rank has ended.
    """
    with settings_restored(), joined_ranks(config.device) as ranks, closing(watchers), ExitStack() as opened:
        given = config
        config, resume, saved, began = ranks.decided(lambda: beginning(given, resume, ranks.world_size))
        if not ranks.first:
            own = opened.enter_context(scratch_folder(checkpoint.nearest_folder(config.out), f"ooc-rank-{ranks.rank}"))
            config, watchers, resume = config.model_copy(update={"out": own / "run"}), Watchers([]), False
        if watchers.all:
            opened.enter_context(COMPILATIONS.noted(watchers.note))
        run_dir = opened.enter_context(kept_if_saved(checkpoint.RunDir(config.out, resume)))
        opened.enter_context(lost_ranks_named())  # before kept_if_saved sees the error
        limit = None if config.memory is None else parse_bytes(config.memory, "memory")
        blocks = opened.enter_context(shared_blocks(ranks, limit))

        def composed() -> Run:
            meter = opened.enter_context(MemoryMeter("run"))
            data = opened.enter_context(open_dataset(config)) if dataset is None else dataset
            data.share_reads(blocks)
            opened.callback(data.share_reads, None)
            return compose(config, data, watchers, meter, run_dir, saved, grown, resume, ranks, began)

        run = ranks.together(composed)
        with closing(run.mode):
            yield run


def beginning(config: RunConfig, resume: bool, world_size: int) -> tuple[RunConfig, bool, dict[str, Any] | None, int]:
    """(the configuration, whether to go on with its run, from which checkpoint, by how many processes it was begun) of a
    command, which torchrun may have started before: then it goes on with the run that it began."""
    before = None if resume else begun_before(config)
    if before is not None:
        config, resume = config.model_copy(update={"out": before}), True
    if resume:
        config = as_it_began(config)
    saved = check_out(config, resume)
    begins(config)
    found = checkpoint.read_json(config.out / checkpoint.RANKS, "start the run again elsewhere") if resume else None
    began = (found or {"world_size": 1})["world_size"] if (config.out / CONFIG).exists() else world_size
    return config, resume, saved, began


def as_it_began(config: RunConfig) -> RunConfig:
    """`config` with what its run chose by itself when it began."""
    before = saved_config(config.out) or {}
    open_ones = [name for name in config.automatic if getattr(config, name) in (None, "auto")]
    chosen = {name: before[name] for name in open_ones if before.get(name) is not None}
    return config.model_copy(update=chosen)


def share_of_batch(config: RunConfig, saved: dict[str, Any], ranks: Ranks) -> tuple[RunConfig, str | None]:
    """(the configuration of a rank, what to say of it) of a run that goes on with as many seeds a step as before, in whatever
    number of processes. Raises ConfigError where these do not divide them evenly."""
    before, now = saved["world_size"], ranks.world_size
    of_a_rank = {name: saved.get("of_a_rank", {}).get(name, getattr(config, name)) for name in config.of_a_rank}
    was = {name: count for name, count in of_a_rank.items() if count is not None}
    for name, count in was.items():
        if count * before % now:
            raise ConfigError(
                f"cannot resume {config.out}: its {before} process{'es' * (before != 1)} had {name} = {count}, "
                f"{count * before} in all, which {now} do not divide evenly: start a number of processes that does"
            )
    share = {name: count * before // now for name, count in was.items()}
    words = ", ".join(f"{name} = {count}" for name, count in share.items() if name != "eval_batch_size")
    text = f"the run goes on by {now} process{'es' * (now != 1)} in place of {before}{': ' * bool(words)}{words}"
    note = text if now != before else None
    return config.model_copy(update=share), note


def notes_of_ranks(ranks: Ranks) -> list[str]:
    """What a person should know of several processes: how many share a host's memory and disk, and by which way."""
    if ranks.alone:
        return []
    here = ranks.local_world_size
    shared = (
        f"{here} of them on this host, which share its disk; `memory` is that of one of them"
        if here > 1
        else "one on this host, which has its disk for itself; `memory` is that of one of them"
    )
    return [f"{ranks.world_size} processes train together, {shared}"]


def notes_of_rate(config: RunConfig) -> list[str]:
    """What a person should know of a learning rate that never gets to `lr`, or that is 0 for whole epochs."""
    if config.lr_schedule == "cosine" and config.epochs > (config.lr_epochs or config.epochs):
        return [
            f"after {config.lr_epochs} epochs the cosine ends and the learning rate is 0: give a larger lr_epochs to a new run"
        ]
    if config.lr_warm_up <= config.epochs:
        return []
    return [f"lr_warm_up = {config.lr_warm_up:g} is longer than epochs = {config.epochs}: the learning rate never reaches lr"]


@contextmanager
def kept_if_saved(run_dir: checkpoint.RunDir) -> Iterator[checkpoint.RunDir]:
    """Remove the directory of a run that fails before its first checkpoint, and give up its lock.

    A run that another rank's end stopped in its steps has not failed: it is resumed, in any number of processes.
    """
    try:
        yield run_dir
    except Exception as error:
        if not (isinstance(error, RankLost) and run_dir.has_steps):
            run_dir.discard_unsaved()
        if isinstance(error, RuntimeError) and (refused := _refused_allocation(error)) is not None:
            raise MemoryError(refused) from error
        raise
    finally:
        run_dir.close()


def _refused_allocation(error: RuntimeError) -> str | None:
    """What torch could not allocate on the CPU, by its error's words; None for another error."""
    asked = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
    if asked is not None:
        return f"torch asked for {format_bytes(int(asked[1]))} at once"
    return "torch asked for more than 2**63 bytes" if "Storage size calculation overflowed" in str(error) else None


def compose(
    config: RunConfig,
    dataset: Dataset,
    watchers: Watchers,
    meter: MemoryMeter,
    run_dir: checkpoint.RunDir,
    saved: dict[str, Any] | None,
    grown: bool,
    resumed: bool,
    ranks: Ranks,
    began: int,
) -> Run:
    """Put the run together, and take up the checkpoint `saved` where there is one. resumed: whether one is expected; began: by
    how many processes the run was.

    Nothing is written before everything that can be refused without files has been checked.
    """
    given = config
    config, note = share_of_batch(config, saved or {"world_size": began}, ranks)
    touched = touched_since(config, dataset, saved, grown) if saved else None
    threads = saved["threads"] if saved else config.threads
    if threads is not None:
        torch.set_num_threads(threads)
    check_types(config, dataset)
    mode = mode_of(config)(config, dataset, replace(ranks, begun_by=began))
    with ExitStack() as refused:
        refused.enter_context(closing(mode))
        check_compression(config, ranks, mode.device)
        config, given = (each.model_copy(update=mode.chosen()) for each in (config, given))
        saved, growth = _adapted(config, dataset, mode, saved, touched)
        optimizer = mode.make_optimizer()
        log = run_dir.claim(saved["metrics_bytes"] if saved and ranks.first else 0)
        run = Run(config, dataset, mode, optimizer, log, watchers, meter)
        if not saved:
            if began > 1:
                checkpoint.write_json(config.out / checkpoint.RANKS, {"world_size": began})
            write_config(given)  # from here on it is a run, which --resume takes
        for text in (note, growth and growth.note):
            if text:
                watchers.note(text)
        mode.open(run, saved, growth)
        if saved:
            run.restore(saved)
        watchers.all += [LOGGERS[name]() for name in config.loggers]
        watchers.begin(config, run.state.total_steps)
        if saved:  # settings that were refused are not those of the next --resume
            write_config(given)
        begun = [*_notes_of_beginning(config, saved, resumed), *_notes_of_end(run)]
        for text in [*begun, *notes_of_ranks(ranks), *mode.notes(), *notes_of_rate(config)]:
            watchers.note(text)
        refused.pop_all()
    return run


def _adapted(
    config: RunConfig, dataset: Dataset, mode: Mode, saved: dict[str, Any] | None, touched: Ids | None
) -> tuple[dict[str, Any] | None, Growth | None]:
    """The checkpoint as it applies to the store as it is now, and what has grown. Raises ConfigError where it does not."""
    if not saved:
        return saved, None
    growth = None
    saved["store_fingerprint"] = dataset.fingerprint
    if touched is not None:
        if dataset.manifest.is_hetero and not mode.has_table:
            raise ConfigError(
                f"cannot resume {config.out}: only runs of modes table and lightgcn go on where a store of several "
                "types has grown: start another run"
            )
        saved, growth = mode.adapt(saved, touched)
    check_environment(config, saved, environment(mode))
    return saved, growth


def _notes_of_beginning(config: RunConfig, saved: dict[str, Any] | None, resumed: bool) -> list[str]:
    """What is said of where the run begins, if it is not where one would expect. resumed: whether a checkpoint is expected."""
    if not saved:
        return [f"{config.out} holds no checkpoint: the run starts from the beginning"] if resumed else []
    if not draws_otherwise(config, saved):
        return []
    return [
        f"the run in {config.out} began with another version of ooc, whose dropout drew other random numbers: from "
        "here on its losses are not those it would have had"
    ]


def _notes_of_end(run: Run) -> list[str]:
    """What is said of a run that is resumed with nothing left to train, and how it goes on."""
    config, state = run.config, run.state
    if state.epoch >= config.epochs:
        done, more = f"{state.epoch} epochs are trained", f"more than {state.epoch} epochs"
    elif run.steps_left <= 0:
        done, more = f"{state.total_steps} steps are trained", f"max_steps above {state.total_steps}"
    elif run.out_of_patience:
        done, more = f"{state.stale} evaluations did not improve", f"patience above {state.stale}"
    else:
        return []
    return [f"nothing is left to train in {config.out}: {done}; resume it with {more} to go on"]


def check_types(config: RunConfig, dataset: Dataset) -> None:
    """Raise ConfigError for a heterogeneous store that the mode does not train on."""
    if dataset.is_hetero and not mode_of(config).typed:
        tasks: dict[str, list[str]] = {}
        for (task, name), made in MODES.items():
            if made.typed:
                tasks.setdefault(name, []).append(task)
        others = " or ".join(f"mode {name} (task {', '.join(own)})" for name, own in tasks.items())
        raise ConfigError(
            f"mode {config.mode} of task {config.task} trains on homogeneous graphs, and {config.store} is heterogeneous: use "
            f"{others}"
        )


def touched_since(config: RunConfig, dataset: Dataset, saved: dict[str, Any], grown: bool) -> Ids | None:
    """Nodes that were touched since the checkpoint `saved`, int64[k]; None where the store holds what it held.

    A compacted store holds what it held, and the run goes on to the bit. A store with more needs `grown`, and gets
    a best model chosen anew. On nodes: from the next epoch on, with all histories but those of touched nodes. On events and
    windows: within the epoch where all that it has seen is as it was, and to the bit as a run that began on what is there now,
    unless there are new nodes, from which negatives are drawn too; else from the next epoch on, which begins with no state.

    Raises ConfigError for another store, and for one that has grown without `grown`.
    """
    if saved["store_fingerprint"] == dataset.fingerprint:
        return None
    touched = dataset.grown_since(saved["store_fingerprint"])
    if touched is None:
        raise ConfigError(
            f"cannot resume {config.out}: it was trained with another store than {config.store}: give the one it was trained "
            "on, or start another run"
        )
    if len(touched) and not grown:
        raise ConfigError(
            f"cannot resume {config.out}: {dataset.path} has grown since: `grown=True` goes on with what is there now, or "
            "start another run"
        )
    return touched if len(touched) else None


def open_dataset(config: RunConfig) -> Dataset:
    """The store, as configured."""
    return Dataset.open(
        config.store,
        memory=config.memory,
        engine=config.engine,
        in_memory=config.in_memory,
        features=config.features,
        float_features=takes_floats(config),
        verify_reads=config.verify_reads,
        cache_dir=config.cache_dir,
        cache=config.cache,
    )


def check_out(config: RunConfig, resume: bool) -> dict[str, Any] | None:
    """The checkpoint to go on from, None to begin. Raises ConfigError where `out` exists, or holds another run."""
    out = config.out
    if not resume:
        if os.path.lexists(out):
            raise ConfigError(f"{out} exists already: choose another `out`, or go on with that run by `resume=True`")
        return None
    before = saved_config(out)
    if before is None:
        if not out.is_dir() or not all(_left_by_a_killed_start(path) for path in out.iterdir()):
            raise ConfigError(f"{out} is not a run of `ooc train`: it holds no {CONFIG}, so there is nothing to resume")
        return None
    where = f"{out / CONFIG}: "
    for name in config.differences(parse(class_of(before, where), before, where)):
        raise trained_otherwise(out, name, before.get(name), config.model_dump(mode="json")[name])
    return checkpoint.load(out)


def _left_by_a_killed_start(path: Path) -> bool:
    """Whether a run killed before its config.json stood leaves such a file: half of it, or the empty log."""
    half = path.name.startswith(".") and path.name.endswith(".tmp")
    return (
        half
        or path.name == checkpoint.RANKS
        or (path.name == checkpoint.METRICS and path.is_file() and not path.stat().st_size)
    )


def write_config(config: RunConfig) -> None:
    """Keep the configuration in the run's directory; only under its log's lock."""
    checkpoint.write_json(config.out / CONFIG, config.model_dump(mode="json"))


def draws_otherwise(config: RunConfig, saved: dict[str, Any]) -> bool:
    """Whether the checkpoint `saved` was taken when the run's dropout drew other numbers than it now does."""
    drops = any(getattr(config, name, None) for name in ("dropout", "input_dropout"))
    return drops and saved["device"] == "cpu" and saved.get("dropout_stream", 1) != STREAM


def check_environment(config: RunConfig, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError where a checkpoint was taken with another model, device or number of threads."""
    for name, what in (
        ("model_fingerprint", f"a model of other shapes than {config.model} now has: restore its source"),
        ("device", f"the device {saved['device']}, not {now['device']}: resume it there"),
        ("threads", f"{saved['threads']} torch threads, not {now['threads']}: resume it with as many"),
    ):
        if saved[name] != now[name]:
            raise ConfigError(f"cannot resume {config.out}: it was trained with {what}, or start another run")
