"""`append`: new edges, new nodes and new rows of existing ones, checked like an ingest, in one transaction."""

import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from ooc.stores.array_names import VERSIONS, show_edge_type
from ooc.stores.errors import ConfigError
from ooc.stores.growth.delta import Appended, Appending, appending, total_of
from ooc.stores.growth.newedges import NewEdges
from ooc.stores.growth.newnodes import NewNodes
from ooc.stores.growth.parts import EdgePart, NodePart, edge_parts, node_parts, stage_of
from ooc.stores.growth.spec import AppendSpec, TypedAppend
from ooc.stores.growth.versions import alone
from ooc.stores.ingest.datasets import gather
from ooc.stores.ingest.duck import Duck, Progress, silent
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import arrays_of, read_manifest, version_of


@dataclass(frozen=True)
class AppendResult:
    """Result of an append."""

    path: Path
    appended: Appended
    seconds: float
    notes: list[str]
    """possible mistakes, one line each"""


def append(spec: AppendSpec | TypedAppend, progress: Progress = silent) -> AppendResult:
    """Append to the store `spec.out`; durable when it returns, without effect if it raises or is killed.

    Time and disk space are proportional to what is added; memory stays within `spec.memory`. The next reader sees it, and
    `compact` merges it into the arrays.

    Raises:
        InputError: If the input is wrong; names file, row and value.
        ConfigError: If columns that the store's edges or nodes have are missing.
        StoreError: If there is no store, the disk is full, or another append is in progress.
        BudgetError: If there is less memory than an ingest needs.

    >>> append(AppendSpec(out="papers.ooc", edges="new.parquet")).appended.edges
    1000000
    """
    begin, path = time.perf_counter(), spec.out
    read_manifest(path)  # a folder that is no store gets no locks
    with alone(path, "growth", wait=False):
        version = version_of(path)
        root, stage = arrays_of(path, version), path.absolute() / VERSIONS / "append.partial"
        manifest = read_manifest(root)
        refuse(path, manifest)
        if manifest.is_hetero != isinstance(spec, TypedAppend):
            how = "by type, as in user:visits:item=FILES" if manifest.is_hetero else "without types"
            raise ConfigError(f"{path} is {'' if manifest.is_hetero else 'not '}heterogeneous: give `edges` and `nodes` {how}")
        shutil.rmtree(stage, ignore_errors=True)
        try:
            stage.mkdir()
            with Duck(spec.memory_bytes, stage / "spill") as duck, appending(path, version) as delta:
                done = _Append(spec, root, manifest, duck, delta, stage, progress).run()
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    notes = []
    if done.edges and done.edges_digest in {each.edges_digest for each in delta.appends}:
        notes.append("an append that waits already has the very same edges; they are there twice now")
    return AppendResult(path, done, time.perf_counter() - begin, notes)


def refuse(path: Path, manifest: Manifest) -> None:
    """Raise ConfigError for a store that cannot grow and keep its properties."""
    why = None
    if manifest.graphs is not None:
        why = f"it holds {manifest.graphs.count:,} graphs, and an append adds to one"
    elif manifest.partition is not None:
        why = f"it numbers its nodes by {manifest.partition.parts} parts of the graph, which new edges change"
    elif manifest.order != "input":
        why = f"it numbers its nodes by {manifest.order}, which new edges change"
    for part in edge_parts(manifest).values():
        if why is None and (found := _why_not(part, manifest)):
            why = f"{f'its edge type {part.prefix}' if part.prefix else 'it'} {found}"
    if why:
        raise ConfigError(f"nothing can be appended to {path}: {why}; ingest everything anew")


def _why_not(part: EdgePart, manifest: Manifest) -> str | None:
    """Why edges of a type cannot grow; None where they can."""
    columns = set(part.type.columns if part.prefix else manifest.columns)
    if part.input is not None and part.input.drop_duplicates:
        return "holds each edge once, and whether a new one is there already only an ingest finds out"
    if columns <= {"weight"}:
        return "has no ids of edges, which were left out when it was ingested (`edge_ids`)"
    if part.prefix and "time" in columns:
        return "has times"
    if "edge_id" not in columns or columns - {"edge_id", "weight", "time"}:
        return f"has the edge columns {', '.join(sorted(columns)) or 'none'}, not those of an ingest"
    if part.time is None and part.type.arrays:
        return f"has edge features ({', '.join(part.type.arrays)}) and no times"
    if any(own.arrays or own.task or own.splits for own in map(manifest.edge_type, part.reverses)):
        return "is in the store in the other direction too, with values of its own"
    return None


class _Append:
    """One append."""

    def __init__(
        self,
        spec: AppendSpec | TypedAppend,
        root: Path,
        manifest: Manifest,
        duck: Duck,
        delta: Appending,
        stage: Path,
        progress: Progress,
    ) -> None:
        self.spec, self.root, self.manifest, self.duck, self.delta = spec, root, manifest, duck, delta
        self.stage, self.progress = stage, progress
        self._gathered: list[tuple[AppendSpec, Inputs]] = []

    def run(self) -> Appended:
        parts, done = node_parts(self.manifest), {}
        with ExitStack() as opened:
            new = {name: opened.enter_context(closing(self._nodes(parts[name]))) for name in self._node_types()}
            edges = [self._edges(part, new) for key, part in edge_parts(self.manifest).items() if key in self.spec.of_edges]
            ends = [end for each in edges for end in each.ends()]
            for nodes in new.values():
                nodes.settle([end for of, end in ends if of is nodes])
            for each in edges:
                done[each.part.prefix] = each.write()
            time = next((each.columns.time for each in edges), None)
            for nodes in new.values():
                counts = done.get(nodes.part.prefix, Appended())  # of a homogeneous store: nodes and edges together
                done[nodes.part.prefix] = replace(counts, nodes=nodes.count, rows=nodes.write(time))
        return self.delta.finish(total_of(done))

    def _node_types(self) -> list[str]:
        """Those of the append, in the store's order. Raises ConfigError for an unknown type."""
        nodes, edges = node_parts(self.manifest), edge_parts(self.manifest)
        for key in self.spec.of_edges:
            if key not in edges:
                there = ", ".join(show_edge_type(each) for each in edges)
                raise ConfigError(f"nothing can be appended to edge type {show_edge_type(key)}: {self.spec.out} has {there}")
        for name in self.spec.of_nodes:
            if name not in nodes:
                raise ConfigError(f"`nodes`: {self.spec.out} has no node type {name!r}; there are {', '.join(nodes)}")
        return [name for name in nodes if name in self.spec.of_nodes]

    def _nodes(self, part: NodePart) -> NewNodes:
        spec, stage = self.spec.of_nodes[part.type.name], stage_of(self.stage, part)
        return NewNodes(spec, self.root, part, self.duck, self.delta, stage, self._inputs(spec, stage))

    def _edges(self, part: EdgePart, new: Mapping[str, NewNodes]) -> NewEdges:
        spec, stage = self.spec.of_edges[part.key], stage_of(self.stage, part)
        ends = new[part.type.source], new[part.type.target]
        inputs = self._inputs(spec, stage)
        return NewEdges(spec, self.root, part, self.duck, self.delta, stage, inputs, *ends, self.progress)

    def _inputs(self, spec: AppendSpec, stage: Path) -> Inputs:
        """What a specification names: gathered once where it is of nodes and of edges."""
        for known, inputs in self._gathered:
            if known is spec:
                return inputs
        self._gathered.append((spec, gather(spec, self.duck, stage, None, self.progress)))
        return self._gathered[-1][1]
