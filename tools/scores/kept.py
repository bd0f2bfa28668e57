"""Results of runs, a file each: a killed command goes on, and a complete one prints at once."""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ooc.stores.io.atomic import write_file

Settings = dict[str, Any]


def kept(file: Path, asked: Settings, run: Callable[[], Settings]) -> Settings:
    """Return the result of `run`, from `file` where it was run before with the same data and settings `asked`.

    >>> kept(out / "kept" / "gcn-0.json", {"model": "gcn", "seed": 0}, lambda: trained("gcn", 0))
    """
    asked = json.loads(json.dumps(asked))
    if file.exists():
        before: Settings = json.loads(file.read_text())
        if before["asked"] == asked:
            return dict(before["result"])
    result = run()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, json.dumps({"asked": asked, "result": result}).encode())
    print(file.stem, result, file=sys.stderr, flush=True)
    return result


def file_named(path: Path) -> list[Any]:
    """Return what tells a data file from another: its name and size."""
    return [path.name, path.stat().st_size]


def spread(scores: Sequence[float]) -> Settings:
    """Return mean, deviation and the scores, in points."""
    return {
        "mean": round(statistics.mean(scores), 2),
        "deviation": round(statistics.stdev(scores), 2) if len(scores) > 1 else None,
        "scores": [round(score, 2) for score in scores],
    }
