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
from ooc.stores.errors import ConfigError, OocError
from ooc.stores.manifest import Manifest
from ooc.stores.remote.mirror import manifest_at
from ooc.training.checkpoint import SUMMARY, read_json


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


def learned_labels(run: Path, config: LabelConfig, given: Manifest, place: Path | str, find: Find) -> Learned:
    """The labels that a run learned.

    Runs that have not ended, and those of earlier versions, do not say all of it. What is missing is that of the store that
    they were trained on or, where that is gone, of the store that is given, if its labels are of the same kind and of the type
    that the settings name.

    Args:
        run: The run's directory.
        config: Its settings.
        given: The manifest of the store whose outputs are computed.
        place: Where that is, for messages.
        find: The labels of a manifest that the run is about.

    Raises:
        ConfigError: Where nothing says what the run learned.
    """
    summary = read_json(run / SUMMARY, "delete it") or {}
    kind = summary.get("labels")
    if kind is not None and "num_classes" in summary:
        return Learned(LabelTask(kind, summary["num_classes"]), summary["class_names"], summary["labels_of"])
    trained_on, none = config.store, f"{place} has no {'' if kind is None else f'{kind} '}labels that give the task"
    try:
        there, why = manifest_at(trained_on), f"{none}, and neither has {trained_on}"
    except OocError as error:
        there, why = None, f"{none}, nor is there {trained_on}: {error}"
    named = getattr(config, "node_type", None) or getattr(config, "edge_type", None)
    for manifest in (there, given):
        found = None if manifest is None else find(manifest)
        known = found is not None and (found.of is None or named or manifest is there)
        if found is not None and known and kind in (None, found.labels.task):
            names = summary["class_names"] if "class_names" in summary and kind is not None else found.labels.class_names
            return Learned(LabelTask.of(found.labels), names, found.of)
    raise ConfigError(why)


def labels_of_nodes(config: NodeConfig, manifest: Manifest) -> LabelsOf | None:
    """Those of the run's node type: the one it was given, or the only one with labels."""
    if not manifest.is_hetero:
        return None if manifest.task is None else LabelsOf(manifest)
    asked = config.node_type
    return _only(LabelsOf(each, each.name) for each in manifest.node_types if each.task and asked in (None, each.name))


def labels_of_edges(config: EdgeConfig, manifest: Manifest) -> LabelsOf | None:
    """Those of the run's edge type: the one it was given, or the only one with labels."""
    types = [each for each in manifest.edge_types if each.task is not None and each.reverse_of is None]
    if config.edge_type is not None:
        asked = key_of([each.key for each in manifest.edge_types], config.edge_type)
        types = [each for each in types if each.key == asked]
    return _only(LabelsOf(each, edge_name(each.key) if manifest.is_hetero else None) for each in types)


def labels_of_graphs(manifest: Manifest) -> LabelsOf | None:
    """Those of whole graphs."""
    graphs = manifest.graphs
    return None if graphs is None or graphs.task is None else LabelsOf(graphs)


def _only(found: Iterable[LabelsOf]) -> LabelsOf | None:
    several = list(found)
    return several[0] if len(several) == 1 else None
