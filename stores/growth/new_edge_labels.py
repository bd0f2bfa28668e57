"""Labels and splits of edges that are appended, in the form that the store's edges have them."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.arrays.encoding import arrays_in
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.growth.parts import EdgePart
from ooc.stores.growth.sorting import Column, ColumnWriter
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.growth.staged_values import label_block, split_columns_of, target_blocks
from ooc.stores.ingest import labels
from ooc.stores.ingest import splits as split_files
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.ids import EdgeColumns


class NewEdgeLabels:
    """What an append says of labels and splits of its edges, all of which the store's edges must have.

    >>> NewEdgeLabels(spec, root, part, duck, stage, columns).columns()["y"].count
    1000
    """

    def __init__(self, spec: AppendSpec, root: Path, part: EdgePart, duck: Duck, stage: Path, columns: EdgeColumns) -> None:
        self.spec, self.root, self.duck, self.stage, self.edges = spec, root, duck, stage, columns
        self.part, self.type = part, part.type

    def columns(self) -> Mapping[str, Column]:
        """Array of the store -> its values for the new edges, in files, one row for each edge of the input.

        Raises:
            ConfigError: A column that the store's edges have is not named, or one that they have not.
            InputError: A label or a split is none of the store's.
        """
        spec, found = self.spec, {}
        shown = f"the edges of {spec.out}{self.part.of}"
        for name, argument, has in (("labels", "edge_label", self.type.task), ("a split", "edge_split", self.type.splits)):
            given = getattr(spec, argument)
            if has and given is None:
                raise ConfigError(f"{shown} have {name}: name the column of the new edges' as `{argument}`")
            if given is not None and not has:
                raise ConfigError(f"{shown} have not {name}: leave `{argument}` out")
        if self.type.task is not None:
            found["y"] = self._labels()
        if self.type.splits:
            found |= self._splits()
        return found

    def _labels(self) -> Column:
        task, classes, known = self.type.task, self.type.num_classes or 2, self.type.class_names
        assert task is not None
        assert self.spec.edge_label is not None
        table = self.edges.table
        wanted = labels.label_columns(table, self.spec.edge_label, self.edges.taken, known, argument="edge_label")
        words = known if task in ("multiclass", "binary") else None
        rows = labels.label_rows(self.duck, table, wanted, "regression" if task == "regression" else "classification", words)
        rows = rows.expect(table.rows, table.shown, "edge")
        with closing(open_zarr_rows(self.root, self.part.array("y"), "mmap")) as held:
            shape, dtype = held.shape[1:], held.dtype
        if (rows.width or 1) != int(np.prod(shape, dtype=np.int64)):
            raise InputError(
                f"{rows.shown} has {rows.width or 1} labels an edge; the store's have {list(shape)}: give them alike"
            )
        blocks = target_blocks(rows) if task == "regression" else (label_block(b, task, classes, rows) for b in rows.blocks())
        return self._stage("y", dtype, shape, (block.reshape(len(block), *shape) for block in blocks))

    def _splits(self) -> Mapping[str, Column]:
        assert self.spec.edge_split is not None
        table, there = self.edges.table, arrays_in(self.root / self.part.array(""))
        bits = self._stage("bits", np.uint8, (), split_files.bits_of_table(self.duck, table, self.spec.edge_split))
        found = split_columns_of(bits, there, self._stage)
        if found is None:
            raise InputError(f"{table.shown} has splits that {self.spec.out} has not: it has {', '.join(self.type.splits)}")
        return dict(found)

    def _stage(self, name: str, dtype: Any, shape: tuple[int, ...], blocks: Iterable[AnyArray]) -> Column:
        with ColumnWriter(self.stage / f"edge-{name}", dtype, shape) as sink:
            for block in blocks:
                sink.append(block)
        return sink.column
