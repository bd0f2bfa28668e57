"""A model's outputs for all nodes, as predictions, embeddings or rows, by one exact pass over the graph.

An interrupted pass continues where it stopped: while a file is written, a folder beside it holds what is finished, and the file
appears whole.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import nn

from ooc.config.base import parse, saved_config
from ooc.config.edges import EdgeConfig
from ooc.config.graphs import GraphConfig
from ooc.config.modes import check_consent, class_of
from ooc.config.nodes import ModelConfig, NodeConfig
from ooc.history.embedding_tables import FOLDER as TABLES
from ooc.history.embedding_tables import kept_rows
from ooc.layerwise.exact_pass import ExactPass, exact_pass
from ooc.layerwise.layerwise_pass import Progress
from ooc.layerwise.shape import has_layers
from ooc.loading.arguments import check_store
from ooc.metrics.tasks import LabelTask
from ooc.models.pyg_models import degree_histogram
from ooc.models.user_models import edge_dim_of, find_class
from ooc.runtime.ranks import ALONE, Ranks, joined_ranks
from ooc.runtime.restoring import settings_restored
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, OocError
from ooc.stores.io.atomic import check_absent, removed_path
from ooc.stores.io.remote.url import store_path
from ooc.stores.node_set import NodeSet
from ooc.stores.remote.mirror import manifest_at
from ooc.stores.sizes import format_bytes, parse_bytes
from ooc.training import checkpoint, infer_edges, infer_graphs
from ooc.training.build import (
    check_device,
    check_homogeneous,
    make_hetero_model,
    make_model,
    placed,
    table_shapes,
    takes_floats,
)
from ooc.training.edge_mode import edge_model, labelled_edges
from ooc.training.graph_mode import graph_model
from ooc.training.link_mode import ends_of, link_type
from ooc.training.node_mode import feature_reading, labelled_nodes
from ooc.training.predictions import check_group, check_table, write_table, write_zarr
from ooc.training.run import MODEL

Model = nn.Module | Path | str
Store = Dataset | Path | str


@dataclass(frozen=True)
class WrittenRows:
    """What was written, and the bytes read and written for it; reading: how features were read, by which engine and why;
    method: how the rows were computed; of: what each row is of, "nodes", "edges" or "graphs"."""

    path: Path
    rows: int
    columns: int
    bytes_read: int
    bytes_written: int
    reading: str
    method: str = ""
    of: str = "nodes"

    @property
    def moved(self) -> str:
        """What was read and written, for people."""
        moved = f"{format_bytes(self.bytes_read)} read, {format_bytes(self.bytes_written)} written"
        return "; ".join(filter(None, [moved, self.reading and f"features by {self.reading}", self.method]))


class NodeRows:
    """float32 rows of all nodes [N, columns], in memory or in a temporary folder; indexed as an array, by node.

    `rows[ids]` (an integer, a slice, ids or a boolean mask) are read when they are asked for; `np.asarray(rows)` reads all of
    them. `close`, or the end of a `with` block, removes what is on disk; so does garbage collection.
    """

    def __init__(self, rows: Rows, release: Any) -> None:
        self._rows = rows
        self.shape: tuple[int, ...] = rows.shape
        self.dtype = np.dtype(rows.dtype)
        self._release = weakref.finalize(self, release)

    @property
    def rows(self) -> Rows:
        """The rows themselves."""
        return self._rows

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, nodes: Any) -> AnyArray:
        """Read rows by node. Raises IndexError for ids out of range."""
        if isinstance(nodes, slice):
            ids = np.arange(*nodes.indices(len(self)))
        else:
            ids = np.asarray(nodes)
            if ids.dtype == bool:
                if ids.shape != self.shape[:1]:
                    raise IndexError(f"the mask has shape {ids.shape}: it must have one entry per node, ({len(self)},)")
                ids = np.flatnonzero(ids)
            elif ids.dtype.kind not in "iu" and ids.size:
                raise IndexError(f"rows are indexed by node ids, not by {ids.dtype}")
        flat = ids.reshape(-1).astype(np.int64)
        out = np.empty((len(flat), *self.shape[1:]), self.dtype)
        self._rows.read(np.where(flat < 0, flat + len(self), flat), out)
        return out.reshape(*ids.shape, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def close(self) -> None:
        """Release the rows; idempotent."""
        self._release()

    def __enter__(self) -> "NodeRows":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype})"


class PassOptions(TypedDict, total=False):
    """Keyword arguments of `infer` and `embed`, explained there."""

    memory: str | int | None
    engine: str
    num_layers: int | None
    model_class: str | None
    allow_code: bool
    folder: Path | str | None
    progress: Progress | None
    verify_reads: bool
    node_type: str | None
    device: str
    cache_dir: Path | str | None
    cache: str | int | None
    all_ranks: bool


@overload
def infer(model: Model, store: Store, out: None = None, **options: Unpack[PassOptions]) -> NodeRows: ...
@overload
def infer(model: Model, store: Store, out: Path | str, **options: Unpack[PassOptions]) -> WrittenRows: ...
def infer(
    model: Model,
    store: Store,
    out: Path | str | None = None,
    *,
    memory: str | int | None = None,
    engine: str = "auto",
    num_layers: int | None = None,
    model_class: str | None = None,
    allow_code: bool = False,
    folder: Path | str | None = None,
    progress: Progress | None = None,
    verify_reads: bool = False,
    node_type: str | None = None,
    device: str = "auto",
    cache_dir: Path | str | None = None,
    cache: str | int | None = None,
    all_ranks: bool = False,
) -> NodeRows | WrittenRows:
    """Compute a model's outputs for every node, exactly and in bounded memory; of a run of whole graphs, for every graph,
    and of labels of edges (`task="edge"`), for every edge of their type, by sampled neighborhoods.

    A model that is a list of layers goes layer by layer over all nodes. One with its own `forward(x, edge_index)` is computed
    on batches of full neighborhoods: the seeds of a batch with all their in-edges, over as many hops as their outputs depend
    on; batches are as large as the memory allows. So is every model of a heterogeneous store, for the nodes of one type; that
    of a run for the type that it learned, over as many hops as the run has `layers`, with the embedding tables of its best
    epoch.

    An edge's outputs come from the neighborhoods of its two ends, sampled as for the scores of its run (`eval_fanout`), without
    the edge itself; the table has its position in the input as `id`, and `source` and `target`. Without `out` the rows are by
    that position, NaN for an edge of the input that the store has not.

    Args:
        model: A module, or the directory of a run of `ooc.train`, finished or not (its best parameters are used).
        store: A data set, or the path or URL of a store.
        out: A file to write, Parquet or CSV by its ending: `id` (the user's own); of a multiclass task `class` (int32, the
            likeliest) and `probabilities` (float32, one per class); binary: `class` (0 or 1), `probability` (of 1); multilabel:
            `classes` (of at least one half), `probabilities`; of a regression `prediction` (float32), or `predictions` (one per
            target); of a module on a store without a matching task, `outputs`. Where classes have names, `class_name` (text)
            follows `class`, and `class_names` `classes`; Parquet's metadata has all of them, and those of targets, as
            `class_names`. In CSV, probabilities are columns `probability_NAME`, or `probability_0`, `probability_1`, ...
            without names, and predictions of several targets `prediction_NAME`. None returns the outputs (logits, or numbers).
        memory: Limit for the process, such as "2GB"; with a data set, that of `ooc.open` applies instead.
        engine: How rows are read: auto, uring, pread or mmap.
        num_layers: Of a module with its own forward(x, blocks), as many as it takes blocks; of a run of a class of one's own on
            a heterogeneous store, over how many hops its outputs depend on, where these are not `layers`.
        model_class: "package.module:Class" of a run that used such a class. Naming it again is consent to import it.
        allow_code: Import the class that the run names, because you trust the run.
        folder: Where rows that do not fit in memory are kept if `out` is None; default: the system's temporary folder.
        progress: Called with (what, nodes done, nodes in all).
        verify_reads: Compare every chunk with its checksum before rows are read from it, as `ooc.open(..., verify_reads=True)`.
        node_type: Of a module on a heterogeneous store, the type whose outputs are computed. Of types without features the
            module gets the nodes' numbers, int64[n]. Of a run of links between nodes of two types, those to embed.
        device: Where the model of a run computes: "cpu", "cuda", or "auto" for CUDA where there is one. A module computes
            where its parameters are.
        cache_dir, cache: Of a store at a URL, as of `ooc.open`; with a data set, those of `ooc.open` apply.
        all_ranks: Whether all processes of torch's process group, or of torchrun, call this together: each then computes a
            range of the nodes, in a folder that all of them see (beside `out`, or `folder`), and rank 0 writes `out`. Outputs
            of edges and of graphs are computed by rank 0 alone. False: this process computes all.

    Returns:
        `NodeRows` float32 [N, C] (of graphs [G, C]) if `out` is None, else `WrittenRows` about the file.

    Raises:
        ConfigError: If model and store do not fit, or the run names a class and there is no consent to import it.
        BudgetError: If the memory is too small.
        StoreError: If the disk fails or is full.

    >>> ooc.infer("runs/1", "papers.ooc", "predictions.parquet", memory="2GB").rows
    111059956
    >>> logits = ooc.infer(model, ds)
    >>> accuracy = (logits[ds.test_mask].argmax(1) == ds.y[ds.test_mask]).mean()
    """
    consent = partial(agreed, model_class=model_class, allow_code=allow_code)
    work = ModelOutputs(model, store, None, num_layers, engine, memory, consent, progress, verify_reads, node_type, device)
    with ranks_of_pass(all_ranks, device) as ranks:
        work = replace(work, ranks=ranks, cache_dir=cache_dir, cache=cache)
        if out is not None:
            ranks.decided(lambda: check_table(Path(out)))
        if (task := ranks.decided(lambda: _task_of(model))) in ("graph", "edge"):
            return _of_no_nodes(work, task, consent, None if out is None else Path(out))
        return _kept(work, folder) if out is None else _written(work, Path(out), embeds=False)


@overload
def embed(
    model: Model, store: Store, out: None = None, *, layer: int | None = None, **options: Unpack[PassOptions]
) -> NodeRows: ...
@overload
def embed(
    model: Model, store: Store, out: Path | str, *, layer: int | None = None, **options: Unpack[PassOptions]
) -> WrittenRows: ...
def embed(
    model: Model,
    store: Store,
    out: Path | str | None = None,
    *,
    layer: int | None = None,
    memory: str | int | None = None,
    engine: str = "auto",
    num_layers: int | None = None,
    model_class: str | None = None,
    allow_code: bool = False,
    folder: Path | str | None = None,
    progress: Progress | None = None,
    verify_reads: bool = False,
    node_type: str | None = None,
    device: str = "auto",
    cache_dir: Path | str | None = None,
    cache: str | int | None = None,
    all_ranks: bool = False,
) -> NodeRows | WrittenRows:
    """Compute a layer's output for every node, exactly and in bounded memory.

    Args:
        layer: Number of the layer, from 1 to the model's number of layers (without what follows it); by default the last but
            one. A model with its own forward has only the forward's result, so `layer` must be None.
        node_type: Of a heterogeneous store, the type whose rows are computed; of a run by default the one that it learned.
        out: A Zarr group to write: array `x` float32 [N, columns], which `ooc.open(features={"x": "embeddings.zarr/x"})` takes.
        model, store, memory, engine, num_layers, model_class, allow_code, folder, progress, verify_reads, device: As of
            `infer`.
        cache_dir, cache, all_ranks: As of `infer`.

    Returns:
        `NodeRows` float32 [N, columns] if `out` is None, else `WrittenRows` about the group.

    Raises:
        ConfigError: As `infer`, and if the model has no such layer.
        BudgetError, StoreError: As `infer`.

    >>> ooc.embed("runs/1", "papers.ooc", "embeddings.zarr", layer=2).columns
    256
    """
    consent = partial(agreed, model_class=model_class, allow_code=allow_code)
    which: Any = "hidden" if layer is None else layer
    work = ModelOutputs(model, store, which, num_layers, engine, memory, consent, progress, verify_reads, node_type, device)
    with ranks_of_pass(all_ranks, device) as ranks:
        work = replace(work, ranks=ranks, cache_dir=cache_dir, cache=cache)
        if out is not None:
            ranks.decided(lambda: check_group(Path(out)))
        return _kept(work, folder) if out is None else _written(work, Path(out), embeds=True)


def ranks_of_pass(all_ranks: bool, device: str) -> AbstractContextManager[Ranks]:
    """The ranks that compute together; one process where it was not said that all of them do."""
    return joined_ranks(device) if all_ranks else nullcontext(ALONE)


@dataclass(frozen=True)
class _Subject:
    """What outputs are computed of. task: None for outputs of no task; tables, num_layers: as of `exact_pass`; learned: the
    node types that a run on a heterogeneous store has outputs of."""

    dataset: Dataset
    model: nn.Module
    task: LabelTask | None
    nodes: NodeSet
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
    def opened(self) -> Iterator[_Subject]:
        """The open data set, and the model in memory, that of a run on its device."""
        with settings_restored(), self._opened() as found:
            if not isinstance(self.model, nn.Module):
                placed(found.model, self.device)
            yield found

    @contextmanager
    def _opened(self) -> Iterator[_Subject]:
        if isinstance(self.model, nn.Module):
            with self._dataset(has_layers(self.model)) as dataset:
                self._check_types(dataset)
                nodes = dataset.nodes(self.node_type)
                task = None if nodes.task is None else LabelTask.of(nodes)
                yield _Subject(dataset, self.model, task, nodes, num_layers=self.num_layers)
            return
        if not isinstance(self.model, str | os.PathLike):
            raise ConfigError(f"model must be a module or the directory of a run, not a {type(self.model).__name__}")
        run = Path(self.model)
        config = self.consent(run, self.store.path if isinstance(self.store, Dataset) else store_path(self.store))
        with self._dataset(takes_floats(config)) as dataset:
            if dataset.is_hetero:
                with _of_types(dataset, config, run, self.num_layers) as found:
                    yield self._of_wanted_type(found)
                return
            self._check_types(dataset)
            check_homogeneous(config, dataset.path)
            task = None if config.link_decoder is not None else _task(dataset, config)
            channels = config.hidden if task is None else task.channels  # embeddings, for links
            degrees = partial(degree_histogram, dataset.graph)
            made = make_model(config, dataset.num_features, channels, degrees, edge_dim_of(dataset))
            _load(made, run)
            yield _Subject(dataset, made, task, dataset.nodes(), num_layers=self.num_layers)

    def _check_types(self, dataset: Dataset) -> None:
        """Raise ConfigError if a node type must be given and is not, or the other way round."""
        types = ", ".join(dataset.node_types)
        if dataset.is_hetero and self.node_type is None:
            raise ConfigError(f"{dataset.path} is heterogeneous: give the type of the nodes, `node_type` (it has: {types})")
        if not dataset.is_hetero and self.node_type is not None:
            raise ConfigError(f"node_type applies to heterogeneous stores, and {dataset.path} has one node type: leave it out")

    def _of_wanted_type(self, subject: _Subject) -> _Subject:
        """Of a run, whose outputs are of the types that it learned; a layer's are of all types."""
        wanted, learned = self.node_type, subject.learned
        if wanted is None and len(learned) > 1:
            there = " and ".join(learned)
            raise ConfigError(f"{self.model} has embeddings of {there}: choose one, as in `node_type={learned[0]!r}`")
        if wanted not in (None, *learned) and (self.layer is None or not has_layers(subject.model)):
            what = " and ".join(learned)
            raise ConfigError(f"{self.model} gives outputs of {what}, and node_type = {wanted!r}: leave it out")
        return replace(subject, nodes=subject.dataset.nodes(wanted or learned[0]))

    def class_names(self, subject: _Subject) -> list[str] | None:
        """Names of the model's classes: of the store it was trained on, where that is still there, else of this one."""
        if isinstance(self.model, nn.Module) or subject.node_type is not None:
            return subject.nodes.class_names
        try:
            return manifest_at(_config(Path(self.model)).store).class_names
        except OocError:
            return subject.nodes.class_names

    def __post_init__(self) -> None:
        check_store(self.store, "store")
        check_device(self.device)
        if isinstance(self.model, nn.Module) and self.device != "auto":
            raise ConfigError("device is for the model of a run; a module computes where its parameters are: move it there")

    def _dataset(self, float_features: bool) -> Any:
        if not isinstance(self.store, Dataset):
            given: dict[str, Any] = {"memory": self.memory, "engine": self.engine, "verify_reads": self.verify_reads}
            given |= {"cache_dir": self.cache_dir, "cache": self.cache}
            return Dataset.open(self.store, **given, float_features=float_features)
        if self.verify_reads and not self.store.verify_reads:
            raise ConfigError("verify_reads is a property of an open data set: give it to `ooc.open`, and leave it out here")
        if self.cache_dir is not None or self.cache is not None:
            raise ConfigError("cache is a property of an open data set: give it to `ooc.open`, and leave it out here")
        if self.memory is not None:
            raise ConfigError("memory is a property of an open data set: give it to `ooc.open`, and leave it out here")
        return nullcontext(self.store)

    def begun(self, subject: _Subject, folder: Path) -> ExactPass:
        """The pass that computes it, in `folder`."""
        limit = None if self.memory is None else parse_bytes(self.memory, "memory")
        engine = "auto" if self.engine == "gds" else self.engine
        types: dict[str, Any] = {"node_type": subject.node_type, "tables": subject.tables, "num_layers": subject.num_layers}
        types |= {"engine": engine, "memory": limit, "ranks": self.ranks}
        return exact_pass(subject.model, subject.dataset, folder, layer=self.layer, **types)

    @property
    def watched(self) -> list[Progress]:
        return [] if self.progress is None or not self.ranks.first else [self.progress]


@contextmanager
def _of_types(dataset: Dataset, config: Any, run: Path, num_layers: int | None) -> Iterator[_Subject]:
    """The model of a run on a heterogeneous store, with the embedding tables of its best epoch."""
    if config.link_decoder is not None:  # embeddings of both ends
        learned = ends_of(link_type(config.edge_type, dataset))
        nodes, task, channels = dataset.nodes(learned[0]), None, config.hidden
    else:
        nodes = labelled_nodes(config, dataset)
        if nodes.task is None:
            raise ConfigError(f"{dataset.path} has no labels that give the task: use the store that was trained on")
        learned, task = (nodes.name,), LabelTask.of(nodes, config)
        channels = task.channels
    shapes, made = table_shapes(config, dataset), make_hetero_model(config, dataset, learned, channels)
    _load(made, run)
    with ExitStack() as opened:
        tables = _tables_of(run, dataset, shapes) if shapes else {}
        for rows in tables.values():
            opened.enter_context(closing(rows))
        yield _Subject(dataset, made, task, nodes, tables, num_layers or config.layers, learned)


def _tables_of(run: Path, dataset: Dataset, shapes: Mapping[str, tuple[int, int]]) -> dict[str, DiskRows]:
    """The rows of embedding tables that belong to the parameters that `_load` takes."""
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


def _kept(work: ModelOutputs, folder: Path | str | None) -> NodeRows:
    """The rows, in memory or in a temporary folder that goes with them, with those of rank 0."""
    ranks = work.ranks

    def made_folder() -> Path:
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"{folder}: there is no such directory; make it first")
        return Path(tempfile.mkdtemp(prefix="ooc-rows-", dir=folder))

    where = ranks.decided(made_folder)
    release: Any = partial(shutil.rmtree, where, ignore_errors=True) if ranks.first else (lambda: None)
    try:
        with ExitStack() as opened:
            subject = ranks.together(lambda: opened.enter_context(work.opened()))
            made = work.begun(subject, where / "pass")
            release = partial(_released, made, release)
            return NodeRows(made.run(*work.watched), release)
    except BaseException:
        release()
        raise


def _released(made: ExactPass, release: Any) -> None:
    made.close()
    release()


def _task_of(model: Model) -> str | None:
    """The task of a run; None of a module."""
    return (saved_config(Path(model)) or {}).get("task") if isinstance(model, str | os.PathLike) else None


def _refuse_of_nodes(run: Model, task: str | None, **given: Any) -> None:
    """Raise ConfigError for an argument that means nothing to a run of whole graphs, or of labels of edges."""
    of = "whole graphs" if task == "graph" else "labels of edges"
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} applies to outputs of nodes, and {run} is a run of {of}: leave it out")


def _check_new(out: Path | None) -> None:
    """Raise StoreError for a file that is there, and ConfigError where its directory is not."""
    if out is not None:
        check_absent(out)
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"{out}: its directory does not exist; make it first")


def _of_no_nodes(work: ModelOutputs, task: str | None, consent: Any, out: Path | None) -> NodeRows | WrittenRows:
    """The outputs of a run of whole graphs, or of labels of edges; a file is rank 0's work."""
    _refuse_of_nodes(work.model, task, num_layers=work.num_layers, node_type=work.node_type)
    outputs, kind = (_graphs, GraphConfig) if task == "graph" else (_edges, EdgeConfig)

    def made() -> NodeRows | WrittenRows:
        return outputs(replace(work, ranks=ALONE), partial(consent, kind=kind), out)

    return made() if out is None else work.ranks.decided(made)


def _edges(work: ModelOutputs, consent: Any, out: Path | None) -> NodeRows | WrittenRows:
    """The outputs of a run of labels of edges for all edges of their type."""
    run = Path(str(work.model))
    config: EdgeConfig = consent(run, Path(os.fspath(work.store)))
    _check_new(out)
    with settings_restored(), work._dataset(takes_floats(config)) as dataset, ExitStack() as opened:
        edges = labelled_edges(config.model_copy(update={"store": dataset.path}), dataset)
        task, shapes = LabelTask.of(edges, config), table_shapes(config, dataset)
        model = edge_model(config, dataset, task, edges)
        _load(model, run)
        device = placed(model, work.device)
        tables = _tables_of(run, dataset, shapes) if shapes else {}
        for rows in tables.values():
            opened.enter_context(closing(rows))
        loader = infer_edges.all_edges(config, model, edges, dataset, tables, device)
        outputs = infer_edges.outputs_of(model, loader, edges, work.progress)
        if out is None:
            found = np.full((len(edges.labels if edges.labels is not None else ()), task.channels), np.nan, np.float32)
            for each in outputs:
                found[each.e_id] = each.outputs
            return NodeRows(ArrayRows(found), lambda: None)
        count = infer_edges.write(out, outputs, dataset, edges, task)
        moved, reading = (loader.bytes_read, out.stat().st_size), feature_reading(dataset)
        return WrittenRows(out, count, task.channels, *moved, reading, "sampled neighborhoods of both ends", "edges")


def _graphs(work: ModelOutputs, consent: Any, out: Path | None) -> NodeRows | WrittenRows:
    """The outputs of a run of whole graphs for all graphs of the store."""
    run = Path(str(work.model))
    config: GraphConfig = consent(run, Path(os.fspath(work.store)))
    _check_new(out)
    with settings_restored(), work._dataset(takes_floats(config)) as dataset:
        task = LabelTask.of(infer_graphs.labelled_graphs(dataset, config))
        model = graph_model(config, dataset, task)
        _load(model, run)
        device = placed(model, work.device)
        loader = infer_graphs.all_graphs(model, dataset, config.eval_batch_size or config.batch_size, device)
        outputs = infer_graphs.outputs_of(model, loader, work.progress)
        if out is None:
            return NodeRows(ArrayRows(np.concatenate([found for _, found in outputs])), lambda: None)
        infer_graphs.write(out, outputs, dataset, task, infer_graphs.class_names(dataset, config))
        reading = dataset.reading("x") if dataset.num_features else ""
        method = "batches of whole graphs"
        return WrittenRows(
            out, len(loader.graphs), task.channels, loader.bytes_read, out.stat().st_size, reading, method, "graphs"
        )


def _written(work: ModelOutputs, out: Path, embeds: bool) -> WrittenRows:
    """Write the rows to `out`.

    The pass's folder, beside `out`, goes once `out` is there. An `out` beside the folder of the same pass was finished, but the
    process killed before the folder was gone.
    """
    folder, ranks = out.with_name(f"{out.name}.sweep"), work.ranks
    ranks.decided(partial(_check_place, out, folder))
    with ExitStack() as opened:
        subject = ranks.together(lambda: opened.enter_context(work.opened()))
        made = work.begun(subject, folder)
        try:
            made.lock()  # so that nobody else writes `out` meanwhile, nor removes the folder
            if not ranks.decided(partial(_is_there, out, made.was_begun())):
                rows = made.run(*work.watched)
                ranks.decided(partial(_write, work, subject, out, rows, embeds))
        except BaseException:
            made.close()
            raise
        made.discard()
        moved = ranks.gather((made.stats.bytes_read, made.stats.bytes_written))
        read, written = (sum(each) for each in zip(*moved, strict=True))
        reading = feature_reading(subject.dataset)
        return WrittenRows(out, subject.nodes.num_nodes, made.columns, read, written, reading, made.method)


def _check_place(out: Path, folder: Path) -> None:
    """Raise where `out` is there and no folder of a pass that was finished, or has no directory."""
    if not folder.exists():
        shutil.rmtree(removed_path(folder), ignore_errors=True)
        check_absent(out)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: its directory does not exist; make it first")


def _is_there(out: Path, begun: bool) -> bool:
    """Whether `out` was written already. Raises StoreError where it is not by the pass whose folder is there (`begun`)."""
    if not begun:
        check_absent(out)
    return out.exists()


def _write(work: ModelOutputs, subject: _Subject, out: Path, rows: Rows, embeds: bool) -> None:
    if embeds:
        write_zarr(out, rows)
    else:
        write_table(out, rows, subject.nodes, _kind_of(rows, subject.task), work.class_names(subject))


def _kind_of(rows: Rows, task: LabelTask | None) -> str | None:
    """The kind of labels that the rows are outputs for; None for a module whose outputs have another shape."""
    return task.kind if task is not None and rows.shape[1:] == (task.channels,) else None


def _config(run: Path, wanted: type[ModelConfig] = NodeConfig) -> Any:
    found = saved_config(run)
    if found is None:
        raise ConfigError(f"{run} is not a run of `ooc train`: it holds no config.json; give the directory of a run")
    kind = class_of(found)
    if found.get("task") == "edge" and wanted is not EdgeConfig:
        raise ConfigError(f"{run} was trained on labels of edges, and this verb computes nodes: see `ooc infer`")
    if not issubclass(kind, wanted):
        raise ConfigError(f"{run} was trained with mode {found['mode']}: this verb takes models of nodes")
    return parse(kind, found, where=f"{run}: ")


def _task(dataset: Dataset, config: NodeConfig) -> LabelTask:
    """The task of the store's labels or, where it has none, of those of the store that was trained on."""
    if dataset.task is not None:
        return LabelTask.of(dataset)
    try:
        trained_on = manifest_at(config.store)
    except OocError as error:
        raise ConfigError(f"{dataset.path} has no labels that give the task, nor is there {config.store}: {error}") from None
    if trained_on.task is None:
        raise ConfigError(f"neither {dataset.path} nor {config.store} has labels that give the task")
    return LabelTask.of(trained_on)


def _load(model: torch.nn.Module, run: Path) -> None:
    """The best parameters of a run: those it ended with, else those of its last checkpoint."""
    ended = checkpoint.load(run, MODEL)
    state = checkpoint.load(run) if ended is None else ended
    if state is None:
        raise ConfigError(f"{run} holds no model yet: it has neither {MODEL} nor a checkpoint")
    parameters = state["model"] if ended is not None or state.get("best_model") is None else state["best_model"]
    try:
        model.load_state_dict(parameters)
    except RuntimeError as error:
        detail = " ".join(str(error).split()[:40])
        raise ConfigError(f"the model of {run} does not fit this store's features and classes: {detail}") from None
