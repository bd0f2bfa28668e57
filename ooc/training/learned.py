"""Which labels a run learned: its summary says so and, until it has ended, the store that it trains on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ooc.config.edges import EdgeConfig
from ooc.config.labels import LabelConfig
from ooc.config.nodes import NodeConfig
from ooc.loading.link_type import key_of
from ooc.metrics.tasks import Labelled, LabelTask
from ooc.sampling.hetero_neighbor import edge_name
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, OocError
from ooc.stores.manifest import Manifest
from ooc.stores.remote.mirror import manifest_at
from ooc.training.checkpoint import SUMMARY, load, read_json


class NamedLabels(Labelled, Protocol):
    """Labels, and the names of their classes."""

    @property
    def class_names(self) -> list[str] | None: ...


class LabelsOf(NamedTuple):
    """Labels that a manifest describes. of: the name of their node type or edge type; None in a homogeneous store, and of
    graphs."""

    labels: NamedLabels
    of: str | None = None


Find = Callable[[Manifest], LabelsOf | None]
"""the labels of a store that a run is about, None where it has none or leaves open which"""


@dataclass(frozen=True)
class Learned:
    """The labels that a run learned. of: see `LabelsOf`."""

    task: LabelTask
    class_names: list[str] | None
    of: str | None


def summary_of(task: LabelTask, labels: NamedLabels, of: str | None = None) -> dict[str, Any]:
    """What a run's summary says of the labels that it learned; see `learned_labels`."""
    return {"labels": task.kind, "num_classes": task.num_classes, "class_names": labels.class_names, "labels_of": of}


def learned_labels(run: Path, config: LabelConfig, dataset: Dataset, find: Find) -> Learned:
    """The labels that a run learned.

    Runs that have not ended, and those of earlier versions, do not say all of it. What is missing is that of the store that
    they were trained on: the one that is given, where its fingerprint says so, or else the one at their path. Of any other
    store that is given, labels of the same kind are taken, in a heterogeneous one where the run's settings name the type.

    Args:
        run: The run's directory.
        config: Its settings.
        dataset: Whose outputs are computed.
        find: The labels of a manifest that the run is about.

    Raises:
        ConfigError: Where nothing says what the run learned.
    """
    summary = read_json(run / SUMMARY, "delete it") or {}
    kind = summary.get("labels")
    if kind is not None and "num_classes" in summary:
        return Learned(LabelTask(kind, summary["num_classes"]), summary["class_names"], summary["labels_of"])
    there, gone = None, ""
    if not (own := _trained_on(run, summary, dataset)):
        try:
            there = manifest_at(config.store)
        except OocError as error:
            gone = f" ({error})"
    named = getattr(config, "node_type", None) or getattr(config, "edge_type", None)
    for manifest in (there, dataset.manifest):
        found = None if manifest is None else find(manifest)
        known = found is not None and (found.of is None or named or own or manifest is there)
        if found is not None and known and kind in (None, found.labels.task):
            return Learned(LabelTask.of(found.labels), summary.get("class_names", found.labels.class_names), found.of)
    labels = "labels" if kind is None else f"{kind} labels"
    raise ConfigError(
        f"{run} does not say which {labels} it learned, and neither does {config.store}{gone}: give the store that it was "
        "trained on"
    )


def _trained_on(run: Path, summary: dict[str, Any], dataset: Dataset) -> bool:
    """Whether a run was trained on a data set, or on the same one before it grew."""
    state = summary if "store_fingerprint" in summary else load(run) or {}
    fingerprint = state.get("store_fingerprint")
    return fingerprint is not None and dataset.grown_since(fingerprint) is not None


def labels_of_nodes(config: NodeConfig, manifest: Manifest) -> LabelsOf | None:
    """Those of the run's node type: the one it was given, or the only one with labels."""
    if not manifest.is_hetero:
        return None if manifest.task is None else LabelsOf(manifest)
    asked = config.node_type
    return _only(LabelsOf(each, each.name) for each in manifest.node_types if each.task and asked in (None, each.name))


def labels_of_edges(config: EdgeConfig, manifest: Manifest) -> LabelsOf | None:
    """Those of the run's edge type: the one it was given, or the only one with labels."""
    if config.edge_type is None:
        types = [each for each in manifest.edge_types if each.task is not None and each.reverse_of is None]
    else:
        asked = key_of([each.key for each in manifest.edge_types], config.edge_type)
        types = [each for each in manifest.edge_types if each.key == asked and manifest.owner(each).task is not None]
    return _only(LabelsOf(manifest.owner(each), edge_name(each.key) if manifest.is_hetero else None) for each in types)


def labels_of_graphs(manifest: Manifest) -> LabelsOf | None:
    """Those of whole graphs."""
    graphs = manifest.graphs
    return None if graphs is None or graphs.task is None else LabelsOf(graphs)


def _only(found: Iterable[LabelsOf]) -> LabelsOf | None:
    several = list(found)
    return several[0] if len(several) == 1 else None
