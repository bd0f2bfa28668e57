"""The steps of an ingest that write the node arrays: splits, labels, features, births."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.encoding import scale_name
from ooc.stores.arrays.whole import whole
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.feature_map import write_map
from ooc.stores.ingest import labels as label_rows
from ooc.stores.ingest import nodes
from ooc.stores.ingest import splits as split_files
from ooc.stores.ingest.arrange import MakeSink, Training, in_input_order
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.fit_map import Fit, Labels, fit_map, narrowed
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.node_inputs import NodeInputs
from ooc.stores.ingest.random_split import random_bits
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.steps import Steps
from ooc.stores.ingest.times import TimeColumn, time_column

BIRTH = "birth"
"""node array of the nodes' first times, in the edges' time and dtype; its smallest value: from the start"""


class NodeArrays:
    """One ingest's node arrays. Each method is a resumable step or two.

    `make_sink` creates sinks for arrays with one row per input node; `new` ([N], memory-mapped) are their rows in the store,
    None if equal; `node_type` is their type.
    """

    def __init__(
        self,
        spec: IngestSpec,
        steps: Steps,
        duck: Duck,
        progress: Progress,
        inputs: Inputs,
        num_nodes: int,
        make_sink: MakeSink,
        new: NDArray[Any] | None,
        node_type: str = names.NODE,
    ) -> None:
        self.spec, self.steps, self.duck, self.progress = spec, steps, duck, progress
        self.store, self.stage = steps.store, steps.stage
        self.inputs, self.num_nodes, self.make_sink, self.new = inputs, num_nodes, make_sink, new
        self.held, self._path = NodeInputs(spec, inputs, duck), partial(names.node_array, node_type=node_type)
        self.node_type = node_type
        self._of_type = "" if node_type == names.NODE else f" (node type {node_type!r})"
        self._labels: label_rows.Labels | None = None

    def _outputs(self, *arrays: str) -> list[Path]:
        paths = [self._path(array) for array in arrays]
        return [self.store / part for path in paths for part in (path, names.checksum_array(path))]

    def splits(self) -> dict[str, Any]:
        """Step splits: {sizes: {split: nodes}, arrays: [names], notes: [lines]}."""
        if self.spec.split_index is not None and not self.inputs.splits:
            raise ConfigError("`split_index` chooses among the splits of masks, and there are none: leave it out")
        if self.spec.shares is None and self.spec.split is None and not self.inputs.splits:
            return {"sizes": {}, "arrays": [], "notes": []}
        stage = self.stage / "splits.bits"

        def write() -> dict[str, Any]:
            given = self._given_splits()
            return split_files.write_splits(self.store, self._split_bits(), stage, given, self.make_sink, self._path)

        outputs = self._outputs("split", *(f"split_{name}" for name in names.SPLIT_CODES))
        return self.steps.run("splits", write, [*outputs, stage])

    def _given_splits(self) -> list[str]:
        """Splits that the input has, even without nodes."""
        if self.spec.shares is not None:
            return [name for name, share in zip(names.SPLIT_CODES, self.spec.shares, strict=True) if share]
        if self.spec.split is not None:
            assert self.inputs.nodes is not None
            return [name for name in split_files.split_columns(self.inputs.nodes, self.spec.split) if name]
        return list(self.inputs.splits)

    def _split_bits(self) -> Iterator[NDArray[np.uint8]]:
        if self.spec.shares is not None:
            return random_bits(self.spec.seed, self.spec.shares, self._labelled)
        if self.spec.split is not None:
            assert self.inputs.nodes is not None
            return split_files.bits_of_table(self.duck, self.inputs.nodes, self.spec.split)
        shown, index = self.inputs.name, self.spec.split_index
        opened = {
            name: split_files.open_split(path, shown(path), self.num_nodes, index) for name, path in self.inputs.splits.items()
        }
        return split_files.bits_of(opened, self.num_nodes)

    def _labelled(self) -> Iterator[NDArray[np.bool_]]:
        """Which nodes have a label; all of them without labels."""
        rows = self.held.labels()
        if rows is not None:
            task = self._look_at_labels(rows).task
            return (label_rows.known(block, task) for block in rows.blocks())
        step = split_files.READ_ITEMS
        return (np.ones(min(step, self.num_nodes - first), bool) for first in range(0, self.num_nodes, step))

    def labels(self) -> dict[str, Any]:
        """Step labels: {task, num_classes, class_names}, None without labels."""
        rows = self.held.labels()
        if rows is None:
            return {"task": None, "num_classes": None, "class_names": None}

        def write() -> dict[str, Any]:
            found = self._look_at_labels(rows)
            label_rows.write_labels(self.store, rows, found, self.make_sink, self._path)
            return {"task": found.task, "num_classes": found.num_classes, "class_names": found.names}

        return self.steps.run("labels", write, self._outputs("y"))

    def _look_at_labels(self, rows: nodes.Rows) -> label_rows.Labels:
        if self._labels is None:
            self._labels = label_rows.look_at_labels(rows, self.num_nodes, self.held.label_names, self.held.label_kind)
        return self._labels

    def features(self, split: dict[str, Any], training: Training | None = None) -> dict[str, dict[str, Any]]:
        """Steps features NAME: {name: {wild}}. training: which of the store's rows are training rows, if not by `split`."""
        return {
            name: self.steps.run(
                f"features {name}",
                self._feature_step(name, split, training),
                self._outputs(name, scale_name(name)) + self._map_of(name),
            )
            for name in self.held.names
        }

    def _map_of(self, name: str) -> list[Path]:
        folder = names.reduction_array("", name, self.node_type)
        return [self.store / part for part in (folder, names.checksum_array(folder))]

    def _feature_step(self, name: str, split: dict[str, Any], training: Training | None) -> Callable[[], dict[str, Any]]:
        def write() -> dict[str, Any]:
            rows, extra = self.held.features(name), name in self.inputs.extra
            normalize, dtype = ("none", "auto") if extra else (self.spec.normalize, self.spec.dtype)
            scale = nodes.fit_scale(rows, normalize, self._scaling(split, training), self.progress)
            if name == "x" and self.spec.reduction is not None:
                return self._write_narrow(name, nodes.scaled(rows, scale), scale, self._labels_of(split, training))
            storage = nodes.fit_storage(rows, dtype, scale, self.progress)
            settings = storage, scale, self.spec.allow_nan, self.progress
            flat = name != "x" and self.inputs.of_graphs(self.spec)
            return {"wild": nodes.write_features(self.store, name, rows, *settings, self.make_sink, self._path, flat)}

        return write

    def _write_narrow(
        self, name: str, rows: nodes.Rows, scale: nodes.Scale, labels: Callable[[], Labels | None]
    ) -> dict[str, Any]:
        """Fit a map to normalized rows, and write it and what it makes of them."""
        asked = self.spec.reduction
        assert asked is not None
        try:
            own = labels() if asked.method == "mutual" else None
            found = fit_map(rows, Fit(asked, self.spec.seed, self.duck.limit, own), self.progress)
        except (ConfigError, InputError) as error:
            raise type(error)(f"{error}{self._of_type}") from None
        write_map(self.store, name, found, self.node_type)
        narrow, unscaled = narrowed(rows, found), nodes.Scale("none", np.zeros(1))
        storage = nodes.fit_storage(narrow, self.spec.dtype, unscaled, self.progress)
        more = {} if scale.kind == "none" else {"normalize": scale.kind}
        settings = storage, unscaled, self.spec.allow_nan, self.progress
        wild = nodes.write_features(self.store, name, narrow, *settings, self.make_sink, self._path, more=more)
        return {"wild": wild, "reduced": found.reduced.model_dump()}

    def _labels_of(self, split: dict[str, Any], training: Training | None) -> Callable[[], Labels | None]:
        """Labels of the training rows in the input's order, None without any."""

        def found() -> Labels | None:
            task, chosen = self.labels()["task"], self._training(split, training)
            if task is None or chosen is None:
                return None
            if task not in ("multiclass", "binary"):
                raise ConfigError(f"`select` mutual compares columns with classes, and the labels are those of a {task} task")
            stored, new = whole(open_zarr_rows(self.store, self._path("y"), "mmap")), self.new

            def of(first: int, last: int) -> NDArray[np.int64]:
                labels = np.asarray(stored[first:last] if new is None else stored[new[first:last]], np.int64)
                return np.where(chosen(first, last), labels, -1)

            return of

        return found

    def _scaling(self, split: dict[str, Any], training: Training | None) -> Training | None:
        return self._training(split, training) if self.spec.normalize == "standard" else None

    def _training(self, split: dict[str, Any], training: Training | None) -> Training | None:
        """Which rows are training rows, read from the store (the splits may be from an earlier run)."""
        if "train" in split["sizes"]:
            training = split_files.training_rows(self.store, split["arrays"], self._path)
        if training is None:
            return None
        return training if self.new is None else in_input_order(training, self.new)

    def births(self, time: TimeColumn | None) -> list[str]:
        """Steps birth time and birth: ["birth"], or none. Raises InputError if the column is not in the edges' time."""
        if self.spec.birth is None:
            return []
        table, wanted = self.inputs.nodes, self.spec.birth
        assert table is not None
        assert time is not None

        def look() -> dict[str, Any]:
            return asdict(time_column(self.duck, table, wanted, "births", time.unit, optional=True))

        found = TimeColumn(**self.steps.run("birth time", look))
        if (found.kind == "timestamp") != (time.kind == "timestamp"):
            raise InputError(
                f"{table.shown} column {wanted!r} holds {found.kind}s, the edges' times are {time.kind}s: give both alike"
            )

        def write() -> dict[str, Any]:
            done, least = 0, np.iinfo(np.int64).min if time.dtype.kind == "i" else -np.inf
            with self.make_sink(self.store, self._path(BIRTH), (), time.dtype, count=self.num_nodes) as sink:
                for batch in self.duck.stream(f"SELECT {found.sql(table)} AS birth FROM {table.relation()}"):
                    column = batch.column(0)
                    values = column.fill_null(0).to_numpy().astype(time.dtype)
                    values[column.is_null().to_numpy(zero_copy_only=False)] = least
                    sink.append(values)
                    done += len(values)
                    self.progress("births", done, self.num_nodes)
            return {}

        self.steps.run("birth", write, self._outputs(BIRTH))
        return [BIRTH]
