"""A model's outputs for all nodes, as predictions, embeddings or rows, by one exact pass over the graph.

An interrupted pass continues where it stopped: while a file is written, a folder beside it holds what is finished, and the file
appears whole.
"""

import os
import shutil
import tempfile
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np

from ooc.config.edges import EdgeConfig
from ooc.config.graphs import GraphConfig
from ooc.layerwise.exact_pass import ExactPass
from ooc.layerwise.layerwise_pass import Progress
from ooc.metrics.tasks import LabelTask
from ooc.runtime.ranks import ALONE
from ooc.runtime.restoring import settings_restored
from ooc.stores.arrays.rows import ArrayRows, Rows
from ooc.stores.errors import ConfigError
from ooc.stores.io.atomic import check_absent, removed_path
from ooc.training import infer_edges, infer_graphs
from ooc.training.build import (
    placed,
    table_shapes,
    takes_floats,
)
from ooc.training.edge_mode import edge_model
from ooc.training.graph_mode import graph_model
from ooc.training.learned import labels_of_edges, labels_of_graphs, learned_labels
from ooc.training.model_outputs import (
    Model,
    ModelOutputs,
    Store,
    Subject,
    consent_of,
    load_best,
    ranks_of_pass,
    settings_of_run,
    tables_of,
)
from ooc.training.node_mode import feature_reading
from ooc.training.node_rows import NodeRows, WrittenRows
from ooc.training.predictions import check_group, check_table, write_table, write_zarr
from ooc.training.table_outputs import all_rows, has_table, write_answers, write_embeddings


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
def infer(
    model: Model, store: Store, out: None = None, *, top: int | None = None, **options: Unpack[PassOptions]
) -> NodeRows: ...
@overload
def infer(
    model: Model, store: Store, out: Path | str, *, top: int | None = None, **options: Unpack[PassOptions]
) -> WrittenRows: ...
def infer(
    model: Model,
    store: Store,
    out: Path | str | None = None,
    *,
    top: int | None = None,
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
    the edge itself; the table has its position in the input as `id`, and `source` and `target`. Edges of that type must have
    labels in the store. Without `out` the rows are by that position, NaN for an edge of the input that the store has not.

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
        top: Of a run of mode table or lightgcn, whose outputs are lists: how many answers to keep for each query. Queries are
            all nodes that may be heads or, where links have relations, each (head, relation) that the store has. The table has
            `source`, `relation`, `target` (the user's own ids and names), `rank` (int32, from 1) and `score` (float32); links
            that the store has are left out, and so is a node as its own answer. `embed` gives the rows of such a run.
        memory: Limit for the process, such as "2GB". Of a data set it is given to `ooc.open`, and left out here.
        engine: How rows are read: auto, uring, pread or mmap. Of a data set it is given to `ooc.open`, and left out here.
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
        cache_dir, cache: Of a store at a URL, as of `ooc.open`, to which they are given for a data set.
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
    consent = consent_of(model, model_class, allow_code)
    work = ModelOutputs(model, store, None, num_layers, engine, memory, consent, progress, verify_reads, node_type, device)
    with ranks_of_pass(all_ranks, device) as ranks:
        work = replace(work, ranks=ranks, cache_dir=cache_dir, cache=cache)
        if out is not None:
            ranks.decided(lambda: check_table(Path(out)))
        if ranks.decided(lambda: has_table(model)):
            return ranks.decided(lambda: _answers(work, None if out is None else Path(out), top))
        task = ranks.decided(lambda: _task_of(model))
        if top is not None:
            raise ConfigError(
                "top applies to runs of mode table and lightgcn; `ooc.rank` lists the best of others: leave it out"
            )
        if task in ("graph", "edge"):
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
    consent = consent_of(model, model_class, allow_code)
    which: Any = "hidden" if layer is None else layer
    work = ModelOutputs(model, store, which, num_layers, engine, memory, consent, progress, verify_reads, node_type, device)
    with ranks_of_pass(all_ranks, device) as ranks:
        work = replace(work, ranks=ranks, cache_dir=cache_dir, cache=cache)
        if out is not None:
            ranks.decided(lambda: check_group(Path(out)))
        if ranks.decided(lambda: has_table(model)):
            return ranks.decided(lambda: _table_rows(work, None if out is None else Path(out)))
        return _kept(work, folder) if out is None else _written(work, Path(out), embeds=True)


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
    """The task of a run; None of a module. Raises ConfigError for a path that is no run's."""
    return settings_of_run(Path(model)).get("task") if isinstance(model, str | os.PathLike) else None


def _refuse_of_nodes(run: Model, task: str | None, **given: Any) -> None:
    """Raise ConfigError for an argument that means nothing to a run of whole graphs, or of labels of edges."""
    of = {"graph": "whole graphs", "table": "a table"}.get(task or "", "labels of edges")
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
    with settings_restored(), work.dataset(takes_floats(config)) as dataset, ExitStack() as opened:
        learned = learned_labels(run, config, dataset, partial(labels_of_edges, config))
        edges, task = infer_edges.edges_of(dataset, run, learned.of), learned.task
        shapes = table_shapes(config, dataset)
        model = edge_model(config, dataset, task, edges)
        load_best(model, run)
        device = placed(model, work.device)
        tables = tables_of(run, dataset, shapes) if shapes else {}
        for rows in tables.values():
            opened.enter_context(closing(rows))
        loader = infer_edges.all_edges(config, model, edges, dataset, tables, device)
        outputs = infer_edges.outputs_of(model, loader, edges, work.progress)
        if out is None:
            assert edges.labels is not None, "edges without labels are refused"
            found = np.full((len(edges.labels), task.channels), np.nan, np.float32)
            for each in outputs:
                found[each.e_id] = each.outputs
            return NodeRows(ArrayRows(found), lambda: None)
        count = infer_edges.write(out, outputs, dataset, edges, task, learned.class_names)
        moved, reading = (loader.bytes_read, out.stat().st_size), feature_reading(dataset)
        return WrittenRows(out, count, task.channels, *moved, reading, "sampled neighborhoods of both ends", "edges")


def _answers(work: ModelOutputs, out: Path | None, top: int | None) -> WrittenRows:
    """The best answers of the queries of a run with a table."""
    if out is None or top is None:
        needs = {"`out`, the file to write": out, "`top`, the number of answers of each": top}
        lacking = " and ".join(name for name, value in needs.items() if value is None)
        raise ConfigError(f"{work.model} answers queries: give {lacking}")
    _refuse_of_nodes(work.model, "table", num_layers=work.num_layers, node_type=work.node_type)
    _check_new(out)
    with work.dataset(False) as dataset:
        queries = write_answers(str(work.model), dataset, out, top)
    return WrittenRows(out, queries, top, 0, out.stat().st_size, "", "all candidates in blocks", "queries")


def _table_rows(work: ModelOutputs, out: Path | None) -> NodeRows | WrittenRows:
    """The rows of a run with a table."""
    given = {"`layer`": work.layer != "hidden", "`num_layers`": work.num_layers is not None}
    if any(given.values()):
        names = " and ".join(name for name, there in given.items() if there)
        raise ConfigError(f"{work.model} has rows and no layers: leave {names} out")
    _check_new(out)
    with work.dataset(False) as dataset:
        if out is None:
            return NodeRows(ArrayRows(all_rows(str(work.model), dataset, work.node_type)), lambda: None)
        count, columns = write_embeddings(str(work.model), dataset, out, work.node_type)
    return WrittenRows(out, count, columns, count * columns * 4, count * columns * 4, "")


def _graphs(work: ModelOutputs, consent: Any, out: Path | None) -> NodeRows | WrittenRows:
    """The outputs of a run of whole graphs for all graphs of the store."""
    run = Path(str(work.model))
    config: GraphConfig = consent(run, Path(os.fspath(work.store)))
    _check_new(out)
    with settings_restored(), work.dataset(takes_floats(config)) as dataset:
        infer_graphs.check_graphs(dataset, config)
        learned = learned_labels(run, config, dataset, labels_of_graphs)
        model = graph_model(config, dataset, learned.task)
        load_best(model, run)
        device = placed(model, work.device)
        loader = infer_graphs.all_graphs(model, dataset, config.eval_batch_size or config.batch_size, device)
        outputs = infer_graphs.outputs_of(model, loader, work.progress)
        if out is None:
            return NodeRows(ArrayRows(np.concatenate([found for _, found in outputs])), lambda: None)
        infer_graphs.write(out, outputs, dataset, learned.task, learned.class_names)
        reading = dataset.reading("x") if dataset.num_features else ""
        method = "batches of whole graphs"
        return WrittenRows(
            out, len(loader.graphs), learned.task.channels, loader.bytes_read, out.stat().st_size, reading, method, "graphs"
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
                ranks.decided(partial(_write, subject, out, rows, embeds))
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


def _write(subject: Subject, out: Path, rows: Rows, embeds: bool) -> None:
    if embeds:
        write_zarr(out, rows)
    else:
        write_table(out, rows, subject.nodes, _kind_of(rows, subject.task), subject.class_names)


def _kind_of(rows: Rows, task: LabelTask | None) -> str | None:
    """The kind of labels that the rows are outputs for; None for a module whose outputs have another shape."""
    return task.kind if task is not None and rows.shape[1:] == (task.channels,) else None
