"""Folders of DGL GraphBolt's OnDiskDataset: metadata.yaml, of one type of nodes and edges, with labels of nodes."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ooc.stores.errors import InputError
from ooc.stores.ingest.sources import open_array

SPLITS = {"train_set": "train", "validation_set": "val", "test_set": "test"}
_IDS = ("seeds", "seed_nodes")


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read metadata.yaml. Raises InputError if it is missing, damaged, or of several types of nodes or edges."""
    path = folder / "metadata.yaml"
    try:
        found = yaml.safe_load(path.read_text())
        graph = found["graph"]
        types = len(graph["nodes"]), len(graph["edges"])
        _ = [int(each["num"]) for each in graph["nodes"]], [(entry["name"], entry["path"]) for entry in _named(found)]
        _ = [str(each["path"]) for each in graph["edges"]] if types[1] == 1 else []
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give the folder of an OnDiskDataset") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise InputError(f"{path} does not describe an OnDiskDataset: {detail or type(error).__name__}") from None
    if types != (1, 1):
        raise InputError(f"{path} has {types[0]} types of nodes and {types[1]} of edges: one of each can be ingested")
    return dict(found)


def _named(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of the features, and of the first task's sets."""
    sets = [part for task in (found.get("tasks") or [])[:1] for name in SPLITS for part in task.get(name) or []]
    return [*(found.get("feature_data") or []), *(each for part in sets for each in part["data"])]


def files_of(folder: Path, found: dict[str, Any]) -> list[Path]:
    """The files that metadata.yaml names, which exist."""
    paths = [folder / str(entry["path"]) for entry in (*found["graph"]["edges"], *_named(found))]
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}, which {folder / 'metadata.yaml'} names, is missing: restore it")
    return [folder / "metadata.yaml", *paths]


def arrays_of(folder: Path, found: dict[str, Any], stage: Path) -> tuple[dict[str, str], list[str]]:
    """The npy files of features, labels and splits by the names of an npz, and a line for what is left out.

    The labels of the splits' nodes become one array y, NaN for other nodes.
    """
    count = int(found["graph"]["nodes"][0]["num"])
    paths: dict[str, str] = {}
    for entry in found.get("feature_data") or []:
        if entry.get("format") != "numpy":
            raise InputError(f"{folder / entry['path']} has the format {entry.get('format')}: numpy is read; save it as .npy")
        paths[_name_of(entry)] = str(folder / entry["path"])
    tasks = found.get("tasks") or []
    notes = [f"{folder}: left out, as one task is taken: {task.get('name', 'a task')}" for task in tasks[1:]]
    labels = None
    for name, split in SPLITS.items() if tasks else ():
        for part in tasks[0].get(name) or []:
            data = {str(entry["name"]): folder / entry["path"] for entry in part["data"]}
            key = next((each for each in _IDS if each in data), None)
            if key is None or open_array(data[key]).ndim != 1:
                raise InputError(
                    f"{folder}: the task {tasks[0].get('name')} is not of nodes: its sets need seeds [n] and labels"
                )
            paths[f"{split}_idx"] = str(data[key])
            if "labels" in data:
                labels = np.full(count, np.nan) if labels is None else labels
                ids, values = _checked(open_array(data[key]), count, data[key]), _labels(data["labels"])
                if len(ids) != len(values):
                    raise InputError(f"{data['labels']} has {len(values)} labels for {len(ids)} nodes: one a node")
                labels[ids] = values
    if labels is not None:
        stage.mkdir(parents=True, exist_ok=True)
        np.save(stage / "y.npy", labels)
        paths["y"] = str(stage / "y.npy")
    return paths, notes


def _labels(path: Path) -> Any:
    """Labels, [k]. Raises InputError unless they are numbers."""
    values = open_array(path).reshape(-1)
    if values.dtype.kind not in "biuf":
        raise InputError(f"{path} has labels of {values.dtype}: classes are whole numbers from 0 on, targets any numbers")
    return values


def _name_of(entry: dict[str, Any]) -> str:
    """feat is x of nodes, and edge_attr of edges."""
    name = str(entry["name"])
    if entry.get("domain") == "edge":
        return "edge_attr" if name == "feat" else f"edge_{name}".replace("edge_edge_", "edge_")
    return "x" if name == "feat" else name


def _checked(ids: Any, count: int, path: Path) -> Any:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise InputError(f"{path} has nodes from {ids.min()} to {ids.max()}, out of range 0..{count - 1}; correct it")
    return np.asarray(ids, np.int64)
