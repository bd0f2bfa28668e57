"""Arguments of Python as settings of an ingest, an append or new splits: arrays and data frames become files."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.errors import ConfigError, InputError, OocError
from ooc.stores.ingest.arrays import save_arrays
from ooc.stores.ingest.spec import BY_EDGE_TYPE, BY_NODE_TYPE
from ooc.stores.ingest.typed_spec import has_types, is_typed
from ooc.stores.io.working import scratch_folder

_TYPED = (*BY_NODE_TYPE, *BY_EDGE_TYPE)
FileOrArray = str | Path | np.ndarray[Any, Any]


@dataclass(frozen=True)
class ArgumentFiles:
    """Where arguments become files, and which argument each file is of."""

    folder: Callable[[], Path]
    """makes a temporary folder, the first time it is called"""
    shown: dict[str, str]
    """path -> the argument, for messages"""
    within: str = ""
    """folder in that folder"""
    key: str = ""
    """of which type or of what the argument is, for messages"""

    def of(self, key: Any, within: str) -> "ArgumentFiles":
        """Those of a value in a mapping."""
        return replace(self, within=f"{self.within}/{within}".lstrip("/"), key=f"{self.key}[{key!r}]")

    def place(self) -> Path:
        """The folder, which is there."""
        path = self.folder() / self.within
        path.mkdir(parents=True, exist_ok=True)
        return path

    def written(self, name: str, value: Any, path: str) -> str:
        """The path, from now on shown as the argument: `nodes (DataFrame)`."""
        self.shown[path] = f"{name}{self.key} ({type(value).__name__})"
        return path


@contextmanager
def staged(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Fields of IngestSpec for arguments of `ooc.ingest`, without those that are None.

    Arrays, tensors and data frames are in files until the block ends; errors raised there name the arguments, not the files.
    Without any, no folder is made.
    """
    with ExitStack() as stack:
        made: list[Path] = []

        def folder() -> Path:
            if not made:
                made.append(stack.enter_context(scratch_folder(None, "ooc-arrays")))
            return made[0]

        files = ArgumentFiles(folder, {})
        typed = is_typed(arguments.get("edges")) or (arguments.get("edges") is None and has_types(arguments.get("nodes")))
        settings = {
            name: _by_type(name, value, files) if typed and name in _TYPED else _as_setting(name, value, files)
            for name, value in arguments.items()
        }
        try:
            yield {name: value for name, value in settings.items() if value is not None}
        except OocError as error:
            error.args = (_with_arguments(str(error), files.shown),)
            raise


def _with_arguments(message: str, shown: Mapping[str, str]) -> str:
    """A message with the names of arguments in place of the temporary files that they are in."""
    for path in sorted(shown, key=len, reverse=True):
        message = message.replace(path, shown[path])
    return message


def _by_type(name: str, value: Any, files: ArgumentFiles) -> Any:
    """The setting of an argument given by type; texts say their types themselves, others raise ConfigError without one."""
    if not isinstance(value, Mapping):
        if hasattr(value, "shape"):
            raise ConfigError(f"`{name}` is a {type(value).__name__}: say of which type, in a mapping by type as `edges` is")
        return value
    return {key: _as_setting(name, each, files.of(key, f"{name}-{number}")) for number, (key, each) in enumerate(value.items())}


def joined(value: str | Iterable[Any]) -> str:
    """A list as text: (0.6, 0.2, 0.2) is "0.6,0.2,0.2"; another value as it is written."""
    return str(value) if isinstance(value, str) or not isinstance(value, Iterable) else ",".join(map(str, value))


def _as_setting(name: str, value: Any, files: ArgumentFiles) -> Any:
    if value is None:
        return None
    if name in ("features", "edge_features", "arg"):
        return _as_pairs(name, value, files)
    if isinstance(value, Mapping):
        return value  # by type, beside edges without types: the specification refuses it
    if name in ("label", "edge_label", "graph_label", "x_cols", "one_hot", "codes", "random_split"):
        return joined(value)
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if texts and name in _TYPED and (len(value) == 1 or name in ("edges", "nodes")):
        return value  # options of the command line, which may be repeated
    if name in ("edges", "nodes", "graphs", "labels", "train", "val", "test"):
        return str(_as_file(name, value, files))
    return value


def _as_pairs(name: str, value: Any, files: ArgumentFiles) -> list[str]:
    """NAME=VALUE texts of a mapping; others are such texts already."""
    if not isinstance(value, Mapping):
        return [value] if isinstance(value, str) else list(value)
    if name == "arg":
        return [f"{key}={each if isinstance(each, str) else json.dumps(each)}" for key, each in value.items()]
    return [f"{key}={_as_file(name, each, files.of(key, f'{name}-{key}'))}" for key, each in value.items()]


def _as_file(name: str, value: Any, files: ArgumentFiles) -> Any:
    """The file of an argument: the user's own, or an npy or Parquet file of an array or a data frame."""
    if isinstance(value, str | Path):
        return value
    if name in ("edges", "nodes", "graphs") and hasattr(value, "__arrow_c_stream__"):
        return files.written(name, value, _as_table(value, files.place() / f"{name}.parquet"))
    given = value
    if isinstance(value, list | tuple):
        value = np.asarray(value)
    elif hasattr(value, "to_numpy"):  # a column, or several, of pandas, Polars or PyArrow
        value = value.to_numpy()
    array: Any = value if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" else None
    if not isinstance(value, np.ndarray):
        from ooc.pyg.data_arrays import as_array  # imports torch

        array = as_array(value)
    if array is None:
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise InputError(
            f"{name}{files.key} is {kind}: give an array of numbers, a data frame or a path (words are columns of `nodes`)"
        )
    return files.written(name, given, save_arrays({name: array}, files.place())[name])


def _as_table(frame: Any, path: Path) -> str:
    """Write a data frame as Parquet, without pandas' index."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(frame)
    index = [column for column in table.column_names if column.startswith("__index_level_")]
    pq.write_table(table.drop_columns(index), path)
    return str(path)
