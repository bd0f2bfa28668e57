"""What a trained model says of all nodes, by a layer-wise pass: predictions as a table, embeddings as a Zarr array.

Both are exact and resumable: while they are made a folder beside the output holds what is finished; the output appears whole.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from ooc.config.base import parse, saved_config
from ooc.config.modes import class_of
from ooc.config.nodes import NodeConfig
from ooc.layerwise.layerwise_pass import LayerwisePass, Progress
from ooc.metrics.nodes import out_channels
from ooc.stores.arrays.rows import Rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, OocError
from ooc.stores.io.atomic import check_absent, disk_errors, partial_path, publish, removed_path, sync_dir
from ooc.stores.manifest import read_manifest
from ooc.stores.sizes import format_bytes, parse_bytes
from ooc.training import checkpoint
from ooc.training.build import make_model, takes_floats
from ooc.training.run import MODEL

ROWS_AT_ONCE, BYTES_AT_ONCE = 2**16, 2**24
"""of a model's output in memory: the fewer of the two, but a thousand rows"""
EMBEDDINGS = "x"
"""name of the array in the group that `embed` writes"""


@dataclass(frozen=True)
class WrittenRows:
    """What was written, and the bytes read and written for it; reading: how features were read, by which engine and why."""

    path: Path
    rows: int
    columns: int
    bytes_read: int
    bytes_written: int
    reading: str

    @property
    def moved(self) -> str:
        """What was read and written, for people."""
        moved = f"{format_bytes(self.bytes_read)} read, {format_bytes(self.bytes_written)} written"
        return f"{moved}; features by {self.reading}"


def infer(
    store: Path, run: Path, out: Path, memory: str | None = None, engine: str = "auto", progress: Progress | None = None
) -> WrittenRows:
    """Write the model's predictions for every node of `store` into `out`, a Parquet or CSV file by its ending.

    run: directory of a run of `ooc train`, finished or not. Columns: `id` (the user's own); multiclass: `class` (int32, the
    likeliest), `probabilities` (float32, one a class); binary: `class` (0 or 1), `probability` (of 1); multilabel: `classes`
    (those at one half or more), `probabilities`. In CSV, probabilities are columns `probability_0`, `probability_1`, ..., and
    several classes are separated by spaces. Raises ConfigError where model and store do not fit or the ending is another,
    StoreError where the disk is full.

    >>> infer(Path("papers.ooc"), Path("run"), Path("predictions.parquet"), memory="2GB").rows
    111059956
    """
    check_table(out)
    return _written(store, run, out, None, memory, engine, progress)


def embed(
    store: Path,
    run: Path,
    out: Path,
    layer: int | None = None,
    memory: str | None = None,
    engine: str = "auto",
    progress: Progress | None = None,
) -> WrittenRows:
    """Write the output of layer `layer` (from 1 on; by default the last but one) for every node: array `x` of the Zarr group
    `out`, float32[N, columns], which `--features x=OUT/x` takes for the features of another run. Raises as `infer` does.

    >>> embed(Path("papers.ooc"), Path("run"), Path("embeddings.zarr"), layer=2).columns
    256
    """
    layers = _config(run).layers
    layer = max(1, layers - 1) if layer is None else layer
    if not 1 <= layer <= layers:
        raise ConfigError(f"layer {layer}: the model of {run} has layers 1 to {layers}")
    return _written(store, run, out, layer, memory, engine, progress)


def _config(run: Path) -> NodeConfig:
    found = saved_config(run)
    if found is None:
        raise ConfigError(f"{run} is not a run of `ooc train`: it holds no config.json; give the directory that --out named")
    kind = class_of(found)
    if not issubclass(kind, NodeConfig):
        raise ConfigError(f"{run} was trained with mode {found['mode']}: this verb takes models of nodes, not of times")
    return parse(kind, found, where=f"{run}: ")


def _written(
    store: Path, run: Path, out: Path, upto: int | None, memory: str | None, engine: str, progress: Progress | None
) -> WrittenRows:
    """Run the model of `run` layer by layer over `store`, and write the rows of layer `upto`, or predictions without it.

    The pass's folder, beside `out`, goes once `out` is there. An `out` beside the folder of the same pass was finished, but the
    process killed before the folder was gone.
    """
    config, folder = _config(run), out.with_name(f"{out.name}.sweep")
    if not folder.exists():
        shutil.rmtree(removed_path(folder), ignore_errors=True)
        check_absent(out)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: its directory does not exist; make it first")
    with Dataset.open(store, memory=memory, engine=engine, float_features=takes_floats(config)) as dataset:
        task, classes = _task(dataset, config)
        model = make_model(config, dataset.num_features, out_channels(task, classes))
        _load(model, run)
        limit, by = None if memory is None else parse_bytes(memory), "auto" if engine == "gds" else engine
        layers_pass = LayerwisePass(model, dataset, folder, upto=upto, engine=by, memory=limit)
        try:
            layers_pass.files.lock()  # so that nobody else writes `out` meanwhile, nor removes the folder
            if not layers_pass.was_begun():
                check_absent(out)
            if not out.exists():
                rows = layers_pass.run(*([] if progress is None else [progress]))
                if upto is None:
                    _write_table(out, rows, dataset, task)
                else:
                    _write_zarr(out, rows)
        except BaseException:
            layers_pass.close()
            raise
        layers_pass.discard()
        shape, stats = layers_pass.shape, layers_pass.stats
        return WrittenRows(out, shape.num_nodes, shape.out, stats.bytes_read, stats.bytes_written, dataset.reading("x"))


def _task(dataset: Dataset, config: NodeConfig) -> tuple[str, int]:
    """Task and classes: of the store, or, where it has no labels, of the one that was trained on."""
    if dataset.task is not None:
        return dataset.task, dataset.num_classes or 2
    try:
        trained_on = read_manifest(config.store)
    except OocError as error:
        raise ConfigError(f"{dataset.path} has no labels that give the task, nor is there {config.store}: {error}") from None
    if trained_on.task is None:
        raise ConfigError(f"neither {dataset.path} nor {config.store} has labels that give the task")
    return trained_on.task, trained_on.num_classes or 2


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


def _parts(rows: Rows) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """(nodes, their rows), front to back; one part at least."""
    step = max(1024, min(ROWS_AT_ONCE, BYTES_AT_ONCE // max(1, rows.row_bytes)))
    for first in range(0, max(1, rows.shape[0]), step):
        node = np.arange(first, min(first + step, rows.shape[0]))
        values = np.empty((len(node), *rows.shape[1:]), rows.dtype)
        rows.read(node, values)
        yield node, values


def _write_zarr(out: Path, rows: Rows) -> None:
    partial = partial_path(out)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_errors(out), Appender(partial, EMBEDDINGS, rows.shape[1:], rows.dtype, count=rows.shape[0]) as array:
            for _, values in _parts(rows):
                array.append(values)
        publish(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its room back
        raise


def check_table(out: Path) -> None:
    """Raise ConfigError if the ending of `out` names no format of predictions."""
    if out.suffix not in TABLES:
        raise ConfigError(f"{out}: predictions are written as Parquet or CSV: end the name in {' or '.join(TABLES)}")


def _write_table(out: Path, rows: Rows, dataset: Dataset, task: str) -> None:
    partial = partial_path(out)
    kind, shaped = TABLES[out.suffix]
    writer: Any = None
    with disk_errors(out):
        try:
            for node, logits in _parts(rows):
                table = shaped(predictions(dataset.external(node), torch.from_numpy(logits), task))
                writer = writer or kind(partial, table.schema)
                writer.write_table(table)
            assert writer is not None, "there is a part"
            writer.close()
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, out)
            sync_dir(out.absolute().parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def predictions(ids: Any, logits: torch.Tensor, task: str) -> pa.Table:
    """A table of what logits [n, C] say: see `infer`. ids: int64[n] or a list of str.

    >>> predictions(np.array([7]), torch.tensor([[0.0, 2.0]]), "multiclass")["class"].to_pylist()
    [1]
    """
    columns: dict[str, Any] = {"id": pa.array(ids)}
    if task == "binary":
        probability = logits.view(-1).sigmoid()
        columns["class"] = pa.array((probability >= 0.5).int().numpy())
        columns["probability"] = pa.array(probability.numpy())
        return pa.table(columns)
    probability = logits.softmax(1) if task == "multiclass" else logits.sigmoid()
    if task == "multiclass":
        columns["class"] = pa.array(probability.argmax(1).int().numpy())
    else:
        chosen = probability >= 0.5
        offsets = np.concatenate([[0], np.cumsum(chosen.sum(1).numpy())]).astype(np.int32)
        columns["classes"] = pa.ListArray.from_arrays(offsets, pa.array(chosen.nonzero()[:, 1].int().numpy()))
    flat = pa.array(probability.reshape(-1).numpy())
    columns["probabilities"] = pa.FixedSizeListArray.from_arrays(flat, probability.shape[1])
    return pa.table(columns)


def flat(table: pa.Table) -> pa.Table:
    """A table without lists, as CSV needs it: probabilities in a column each, classes separated by spaces.

    >>> flat(pa.table({"probabilities": pa.array([[0.25, 0.75]], pa.list_(pa.float32(), 2))})).column_names
    ['probability_0', 'probability_1']
    """
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_fixed_size_list(column.type):
            width = column.type.list_size
            values = column.flatten().to_numpy().reshape(-1, width)
            columns |= {f"probability_{number}": pa.array(np.ascontiguousarray(values[:, number])) for number in range(width)}
        elif pa.types.is_list(column.type):
            columns[name] = pa.array([" ".join(map(str, each)) for each in column.to_pylist()], pa.string())
        else:
            columns[name] = column
    return pa.table(columns)


TABLES: dict[str, tuple[Any, Callable[[pa.Table], pa.Table]]] = {
    ".parquet": (pq.ParquetWriter, lambda table: table),
    ".csv": (pyarrow.csv.CSVWriter, flat),
}
"""ending of a file of predictions -> (what writes it, how its tables are shaped)"""
