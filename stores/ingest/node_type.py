"""One node type of an ingest: how many nodes it has, which ids they have, and its arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.errors import InputError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest import ids
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.graphs import GraphSteps
from ooc.stores.ingest.ids import EdgeColumns, EdgeScan, EndScan
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.node_arrays import NodeArrays
from ooc.stores.ingest.node_inputs import NodeInputs
from ooc.stores.ingest.sources import Table
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.steps import Steps
from ooc.stores.ingest.times import TimeColumn
from ooc.stores.manifest import IdKind, NodeType, Reduced


class Edges(Protocol):
    """What a node type asks of an edge type that ends in it: `ooc.stores.ingest.edge_type.EdgeTypeIngest`."""

    table: Table
    columns: EdgeColumns
    scan: EdgeScan

    def relation(self) -> str: ...


@dataclass(frozen=True)
class End:
    """The sources or destinations of an edge type, which are nodes of a type."""

    edges: Edges
    side: str
    """src or dst"""

    @property
    def column(self) -> str:
        return str(getattr(self.edges.columns, self.side))

    def scanned(self) -> EndScan:
        """What the scan found."""
        return self.edges.scan.src if self.side == "src" else self.edges.scan.dst


class NodeTypeIngest:
    """One node type of an ingest. Call `choose_kind` before the edges are scanned, then `choose_rows`, then the rest."""

    def __init__(self, name: str, spec: IngestSpec, steps: Steps, duck: Duck, progress: Progress, inputs: Inputs) -> None:
        self.name, self.spec, self.steps, self.duck, self.progress = name, spec, steps, duck, progress
        self.inputs, self.arrays = inputs, NodeInputs(spec, inputs, duck)
        self.kind: IdKind = "int"
        self.num_nodes = 0
        self.mapped = False
        """whether ids are not rows: rows come from the node table or by rank"""
        self.made: dict[str, Any] = {}
        """what was written: splits, labels, features, births"""

    @property
    def why(self) -> str:
        """Where the number of nodes comes from."""
        return self.known[1] if self.known else "as the edges say"

    @property
    def of(self) -> str:
        """The type in messages, "" in a homogeneous graph."""
        return "" if self.name == names.NODE else f" of node type {self.name!r}"

    @cached_property
    def known(self) -> tuple[int, str] | None:
        """The number of nodes that the inputs determine, and which of them does; None if the edges do."""
        inputs = self.inputs
        if inputs.nodes is not None:
            return inputs.nodes.rows, inputs.nodes.shown
        if inputs.num_nodes is not None:
            return inputs.num_nodes, "`num_nodes`" if self.spec.num_nodes else "as the data set says"
        for rows in (self.arrays.features(name) for name in self.arrays.names):
            return rows.count, rows.shown
        rows_of_labels = self.arrays.labels()
        return None if rows_of_labels is None else (rows_of_labels.count, rows_of_labels.shown)

    @property
    def has_labels(self) -> bool:
        return self.arrays.labels() is not None

    def choose_kind(self, ends: Sequence[End]) -> IdKind:
        """Determine whether ids are whole numbers or text, from all columns that hold them."""
        table, kinds = self.inputs.nodes, set()
        placed = self.known is not None and table is None
        for edges in dict.fromkeys(end.edges for end in ends if end.edges.table.rows):
            asked = self.spec.id_type
            if placed:
                asked = "int" if edges.table.text else "auto"
            kinds.add(ids.id_kind(self.duck, edges.table, [end.column for end in ends if end.edges is edges], asked))
            if placed and "str" in kinds:
                raise InputError(f"{edges.table.shown} has text ids, which {self.why} cannot place in rows: {_LIST_THEM}")
        if table is not None:
            column = table.column(self.spec.id, "node ids", ("id", 0))
            kinds.add(ids.id_kind(self.duck, table, [column], self.spec.id_type))
        return "str" if "str" in kinds else "int"

    def refuse_text(self) -> None:
        """Raise InputError if ids are to be text, which rows known otherwise cannot have."""
        if self.known and self.inputs.nodes is None and self.spec.id_type == "str":
            raise InputError(f"rows{self.of} come from {self.known[1]}, so text ids cannot be placed: {_LIST_THEM}")

    def choose_rows(self, ends: Sequence[End]) -> None:
        """Step ids: how many nodes there are, and whether their ids are their rows."""
        found = self.steps.run("ids", lambda: self._choose(ends), [self.steps.stage / "ids.parquet"])
        self.num_nodes, self.mapped = int(found["num_nodes"]), bool(found["mapped"])

    def _choose(self, ends: Sequence[End]) -> dict[str, Any]:
        table = self.inputs.nodes
        if table is not None:
            if not table.rows:
                raise InputError(f"{table.shown} has no rows, and a graph needs nodes{self.of}: list them there")
            column = table.column(self.spec.id, "node ids", ("id", 0))
            mapped = not ids.check_node_ids(self.duck, table, column, self.kind)
            return {"num_nodes": table.rows, "mapped": mapped}
        if self.known is not None:
            return {"num_nodes": self.known[0], "mapped": False}
        held = [end.scanned() for end in ends if end.edges.scan.edges]
        if not held:
            raise InputError(f"nothing says which nodes there are{self.of}: give `num_nodes`, or a table as `nodes`")
        low, high = min(end.low for end in held), max(end.high for end in held)
        distinct = max(end.distinct or 0 for end in held)
        if self.kind == "int" and low >= 0 and high < ids.DENSE * max(distinct, 2):
            return {"num_nodes": high + 1, "mapped": False}
        relations = [f"SELECT {end.side} AS id FROM ({end.edges.relation()})" for end in ends if end.edges.scan.edges]
        count = ids.distinct_ids(self.duck, relations, distinct, self.steps.stage, self.progress)
        return {"num_nodes": count, "mapped": True}

    def pairs(self) -> str:
        """SQL of (id, row), of ids that are mapped."""
        table = self.inputs.nodes
        if table is not None:
            return ids.node_rows(table, table.column(self.spec.id, "node ids", ("id", 0)), self.kind)
        return f"SELECT id, file_row_number AS row FROM {sql.parquet([self.steps.stage / 'ids.parquet'], position=True)}"

    def check_arrays(self) -> None:
        """Check that every node array has one row per node."""
        for rows in [*(self.arrays.features(name) for name in self.arrays.names), self.arrays.labels()]:
            if rows is not None:
                rows.expect(self.num_nodes, self.why)

    def write(self, make_sink: MakeSink, new: NDArray[Any] | None, time: TimeColumn | None, graphs: GraphSteps | None) -> None:
        """Steps splits, labels, features and births.

        For `make_sink` and `new` see `NodeArrays`; `time` is that of the edges; splits are of `graphs` if there are many.
        """
        drawn = {} if graphs is None else {"random_split": None, "split_index": None}
        spec = self.spec.model_copy(update=drawn)
        given = (spec, self.steps, self.duck, self.progress, self.inputs, self.num_nodes)
        arrays = NodeArrays(*given, make_sink, new, self.name)
        split, labels = arrays.splits(), arrays.labels()
        features = arrays.features(split, None if graphs is None else graphs.training())
        self.made = {"split": split, "labels": labels, "features": features, "births": arrays.births(time)}

    @property
    def array_names(self) -> list[str]:
        """Names of the node arrays that were written."""
        labels = ["y"] if self.made["labels"]["task"] else []
        return [*self.made["features"], *self.made["births"], *self.made["split"]["arrays"], *labels]

    @property
    def reduced(self) -> dict[str, Reduced]:
        """How features were made narrower."""
        return {name: Reduced(**each["reduced"]) for name, each in self.made["features"].items() if "reduced" in each}

    def described(self) -> NodeType:
        """The manifest's entry of a heterogeneous store."""
        return NodeType(
            name=self.name,
            count=self.num_nodes,
            id_kind=self.kind if self.mapped else None,
            arrays=sorted(self.array_names),
            reduced=self.reduced,
            splits=self.made["split"]["sizes"],
            **self.made["labels"],
        )


_LIST_THEM = "list them in a table, `nodes`"
