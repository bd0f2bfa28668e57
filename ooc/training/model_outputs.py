"""Whose outputs are computed, and of what: a model in memory or that of a run, on the data set that is given."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ooc.config.base import CONFIG, parse, saved_config
from ooc.config.edges import EdgeConfig
from ooc.config.models import ModelConfig
from ooc.config.modes import check_consent, class_of
from ooc.config.nodes import NodeConfig
from ooc.history.embedding_tables import FOLDER as TABLES
from ooc.history.embedding_tables import kept_rows
from ooc.layerwise.exact_pass import ExactPass, exact_pass
from ooc.layerwise.layerwise_pass import Progress
from ooc.layerwise.shape import has_layers
from ooc.loading.arguments import check_store, refuse_of_open
from ooc.metrics.tasks import LabelTask
from ooc.models.pyg_models import degree_histogram
from ooc.models.user_models import edge_dim_of, find_class, kind_of
from ooc.runtime.ranks import ALONE, Ranks, joined_ranks
from ooc.runtime.restoring import settings_restored
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.remote.url import store_path
from ooc.stores.node_set import NodeSet
from ooc.stores.sizes import parse_bytes
from ooc.training import checkpoint
from ooc.training.build import (
    check_device,
    check_homogeneous,
    make_hetero_model,
    make_model,
    placed,
    table_shapes,
    takes_floats,
)
from ooc.training.learned import Learned, labels_of_nodes, learned_labels
from ooc.training.link_mode import ends_of, link_type
from ooc.training.run import MODEL

Model = nn.Module | Path | str
Store = Dataset | Path | str


def ranks_of_pass(all_ranks: bool, device: str) -> AbstractContextManager[Ranks]:
    """The ranks that compute together; one process where it was not said that all of them do."""
    return joined_ranks(device) if all_ranks else nullcontext(ALONE)


@dataclass(frozen=True)
class Subject:
    """What outputs are computed of. task: None for outputs of no task; class_names: of the model's classes; tables, num_layers:
    as of `exact_pass`; learned: the node types that a run on a heterogeneous store has outputs of."""

    dataset: Dataset
    model: nn.Module
    task: LabelTask | None
    nodes: NodeSet
    class_names: list[str] | None = None
    tables: Mapping[str, Rows] = field(default_factory=dict)
    num_layers: int | None = None
    learned: tuple[str, ...] = ()

    @property
    def node_type(self) -> str | None:
        """The nodes' type, of a heterogeneous graph."""
        return self.nodes.name if self.dataset.is_hetero else None


@dataclass(frozen=True)
class ModelOutputs:
    """What is computed. layer: as of `exact_pass`; node_type: as of `infer`; ranks: those that do it together."""

    model: Model
    store: Store
    layer: int | Literal["hidden"] | None = None
    num_layers: int | None = None
    engine: str = "auto"
    memory: str | int | None = None
    consent: Any = None
    progress: Progress | None = None
    verify_reads: bool = False
    node_type: str | None = None
    device: str = "auto"
    cache_dir: Path | str | None = None
    cache: str | int | None = None
    ranks: Ranks = ALONE

    @contextmanager
    def opened(self) -> Iterator[Subject]:
        """The open data set, and the model in memory, that of a run on its device."""
        with settings_restored(), self._opened() as found:
            if not isinstance(self.model, nn.Module):
                placed(found.model, self.device)
            yield found

    @contextmanager
    def _opened(self) -> Iterator[Subject]:
        if isinstance(self.model, nn.Module):
            with self.dataset(has_layers(self.model)) as dataset:
                self._check_types(dataset)
                nodes = dataset.nodes(self.node_type)
                task = None if nodes.task is None else LabelTask.of(nodes)
                yield Subject(dataset, self.model, task, nodes, nodes.class_names, num_layers=self.num_layers)
            return
        run = run_of(self.model)
        config = self.consent(run, self.store.path if isinstance(self.store, Dataset) else store_path(self.store))
        with self.dataset(takes_floats(config)) as dataset:
            if dataset.is_hetero:
                with _of_types(dataset, config, run, self.num_layers) as found:
                    yield self._of_wanted_type(found)
                return
            self._check_types(dataset)
            check_homogeneous(config, dataset.path)
            task, names, channels = None, None, config.embedding  # of links
            if config.link_decoder is None:
                learned = learned_of_nodes(run, config, dataset)
                task, names, channels = learned.task, learned.class_names, learned.task.channels
            degrees = partial(degree_histogram, dataset.graph)
            made = make_model(config, dataset.num_features, channels, degrees, edge_dim_of(dataset))
            load_best(made, run)
            yield Subject(dataset, made, task, dataset.nodes(), names, num_layers=self.num_layers)

    def _check_types(self, dataset: Dataset) -> None:
        """Raise ConfigError if a node type must be given and is not, or the other way round."""
        types = ", ".join(dataset.node_types)
        if dataset.is_hetero and self.node_type is None:
            raise ConfigError(f"{dataset.path} is heterogeneous: give the type of the nodes, `node_type` (it has: {types})")
        if not dataset.is_hetero and self.node_type is not None:
            raise ConfigError(f"node_type applies to heterogeneous stores, and {dataset.path} has one node type: leave it out")

    def _of_wanted_type(self, subject: Subject) -> Subject:
        """Of a run, whose outputs are of the types that it learned; a layer's are of all types."""
        wanted, learned = self.node_type, subject.learned
        if wanted is None and len(learned) > 1:
            there = " and ".join(learned)
            raise ConfigError(f"{self.model} has embeddings of {there}: choose one, as in `node_type={learned[0]!r}`")
        if wanted not in (None, *learned) and (self.layer is None or not has_layers(subject.model)):
            what = " and ".join(learned)
            raise ConfigError(f"{self.model} gives outputs of {what}, and node_type = {wanted!r}: leave it out")
        return replace(subject, nodes=subject.dataset.nodes(wanted or learned[0]))

    def __post_init__(self) -> None:
        check_store(self.store, "store")
        check_device(self.device)
        if isinstance(self.model, nn.Module) and self.device != "auto":
            raise ConfigError("device is for the model of a run; a module computes where its parameters are: move it there")
        if isinstance(self.store, Dataset):
            other = {"verify_reads": self.verify_reads and not self.store.verify_reads, "engine": self.engine != "auto"}
            refuse_of_open(**other, memory=self.memory, cache_dir=self.cache_dir, cache=self.cache)

    def dataset(self, float_features: bool) -> Any:
        """A context with the data set: its own, opened as configured, or the one that was given, which stays open."""
        if not isinstance(self.store, Dataset):
            given: dict[str, Any] = {"memory": self.memory, "engine": self.engine, "verify_reads": self.verify_reads}
            given |= {"cache_dir": self.cache_dir, "cache": self.cache}
            return Dataset.open(self.store, **given, float_features=float_features)
        return nullcontext(self.store)

    def begun(self, subject: Subject, folder: Path) -> ExactPass:
        """The pass that computes it, in `folder`."""
        if self.num_layers is not None:
            _check_num_layers(subject)
        limit = None if self.memory is None else parse_bytes(self.memory, "memory")
        engine = "auto" if subject.dataset.engine == "gds" else subject.dataset.engine
        types: dict[str, Any] = {"node_type": subject.node_type, "tables": subject.tables, "num_layers": subject.num_layers}
        types |= {"engine": engine, "memory": limit, "ranks": self.ranks}
        return exact_pass(subject.model, subject.dataset, folder, layer=self.layer, **types)

    @property
    def watched(self) -> list[Progress]:
        return [] if self.progress is None or not self.ranks.first else [self.progress]


def _check_num_layers(subject: Subject) -> None:
    """Raise ConfigError for a model whose layers or hops are known."""
    name = type(subject.model).__name__
    if has_layers(subject.model):
        raise ConfigError(f"`num_layers` applies to models with their own forward, and {name} has layers: leave it out")
    if kind_of(subject.model) != "blocks" and not subject.dataset.is_hetero:
        raise ConfigError(
            f"`num_layers` applies to models with forward(x, blocks), and the hops of {name} are found by trying: leave it out"
        )


@contextmanager
def _of_types(dataset: Dataset, config: Any, run: Path, num_layers: int | None) -> Iterator[Subject]:
    """The model of a run on a heterogeneous store, with the embedding tables of its best epoch."""
    if config.link_decoder is not None:  # embeddings of both ends
        learned, task, names, channels = ends_of(link_type(config.edge_type, dataset)), None, None, config.embedding
    else:
        labels = learned_of_nodes(run, config, dataset)
        learned = (_type_in(dataset, run, labels.of),)
        task, names, channels = labels.task, labels.class_names, labels.task.channels
    shapes, made = table_shapes(config, dataset), make_hetero_model(config, dataset, learned, channels)
    load_best(made, run)
    with ExitStack() as opened:
        tables = tables_of(run, dataset, shapes) if shapes else {}
        for rows in tables.values():
            opened.enter_context(closing(rows))
        nodes = dataset.nodes(learned[0])
        yield Subject(dataset, made, task, nodes, names, tables, num_layers or config.layers, learned)


def learned_of_nodes(run: Path, config: Any, dataset: Dataset) -> Learned:
    """The labels of nodes that a run learned; see `learned_labels`."""
    return learned_labels(run, config, dataset, partial(labels_of_nodes, config))


def _type_in(dataset: Dataset, run: Path, name: str | None) -> str:
    """The node type that a run has outputs of. Raises ConfigError where a store has no such type."""
    if name not in dataset.node_types:
        what, there = "nodes of a homogeneous store" if name is None else f"nodes {name}", ", ".join(dataset.node_types)
        raise ConfigError(
            f"{run} gives outputs of {what}, and {dataset.path} has the types {there}: give a store with these nodes"
        )
    return name


def tables_of(run: Path, dataset: Dataset, shapes: Mapping[str, tuple[int, int]]) -> dict[str, DiskRows]:
    """The rows of embedding tables that belong to the parameters that `load_best` takes."""
    state, ended = checkpoint.load(run), checkpoint.load(run, MODEL)
    if state is None:
        raise ConfigError(f"{run} has no {checkpoint.CHECKPOINT}, which says of what epoch its embedding tables are")
    if state["store_fingerprint"] != dataset.fingerprint:
        raise ConfigError(f"{run} has embedding tables of the nodes of another store than {dataset.path}: give that store")
    kept = state["state"]["best_epoch"] if ended is None else ended.get("tables", state["state"]["best_epoch"])
    if kept is None:
        names = ", ".join(shapes)
        raise ConfigError(
            f"{run} has not ended, nor scored an epoch, and so kept no embedding tables of {names}: resume it (`resume=True`)"
        )
    return dict(kept_rows(run / TABLES, shapes, kept))


def agreed(run: Path, store: Path, *, model_class: str | None, allow_code: bool, kind: type[ModelConfig] = NodeConfig) -> Any:
    """The configuration, of that kind, of a run whose model may be made. Nothing of it has been imported before."""
    config = _config(run, kind)
    if ":" in config.model:
        if model_class is not None and model_class != config.model:
            raise ConfigError(f"{run} was trained with model {config.model}, not {model_class}: name that class")
        check_consent(config.model, model_class, allow_code, run, "model_class")
        find_class(config.model, [run, store, config.store])
    return config


def consent_of(model: Model, model_class: str | None, allow_code: bool) -> Any:
    """`agreed` with what the user has said. Raises ConfigError for a class that is not asked for."""
    if model_class is not None:
        what = "the model is in memory"
        if not isinstance(model, nn.Module):
            name = settings_of_run(run_of(model)).get("model", "")
            what = "" if ":" in name else f"{model} has model {name}"
        if what:
            raise ConfigError(f"`model_class` names the class of a run's model, and {what}: leave it out")
    return partial(agreed, model_class=model_class, allow_code=allow_code)


def run_of(model: Any) -> Path:
    """The directory of a run. Raises ConfigError for what is no path."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model must be a module or the directory of a run, not a {type(model).__name__}")
    return Path(model)


def settings_of_run(run: Path) -> dict[str, Any]:
    """The settings that a run has saved. Raises ConfigError where there is no run."""
    found = saved_config(run)
    if found is None:
        raise ConfigError(f"{run} is not a run of `ooc train`: it holds no config.json; give the directory of a run")
    return found


def _config(run: Path, wanted: type[ModelConfig] = NodeConfig) -> Any:
    found = settings_of_run(run)
    kind = class_of(found)
    if found.get("task") == "edge" and wanted is not EdgeConfig:
        raise ConfigError(f"{run} was trained on labels of edges, and this verb computes nodes: see `ooc infer`")
    if not issubclass(kind, wanted):
        raise ConfigError(f"{run} was trained with mode {found['mode']}: this verb takes models of nodes")
    return parse(kind, found, where=f"{run}: ")


def load_best(model: torch.nn.Module, run: Path) -> None:
    """The best parameters of a run: those it ended with, else those of its last checkpoint."""
    ended = checkpoint.load(run, MODEL)
    state = checkpoint.load(run) if ended is None else ended
    if state is None:
        raise ConfigError(f"{run} holds no model yet: it has neither {MODEL} nor a checkpoint")
    parameters = state["model"] if ended is not None or state.get("best_model") is None else state["best_model"]
    try:
        model.load_state_dict(parameters)
    except RuntimeError as error:
        path = run / (checkpoint.CHECKPOINT if ended is None else MODEL)
        misfit = _misfit(parameters, model.state_dict()) or " ".join(str(error).split()[:40])
        raise ConfigError(
            f"{path} does not fit this store's features and classes and the run's {CONFIG}: {misfit}; give the store that the "
            "run was trained on, or one like it"
        ) from None


def _misfit(saved: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """The first parameter in which a saved model differs from one that was made for a store; empty where none does."""
    for name in dict.fromkeys([*made, *saved]):
        shapes = [list(each[name].shape) if hasattr(each.get(name), "shape") else None for each in (saved, made)]
        if shapes[0] != shapes[1]:
            there, here = ("absent" if shape is None else shape for shape in shapes)
            return f"{name} is {there} in the file, and {here} in the model that they make"
    return ""
