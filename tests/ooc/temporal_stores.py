"""A temporal graph in memory, in the order of its events, and the store of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ooc.stores.ingest import IngestSpec, ingest


class Edges:
    """src, dst, time, state [count], msg float32[count, 3], x float32[nodes, 5], y [nodes]; several events share a time."""

    def __init__(self, nodes: int = 30, count: int = 400, span: int = 10**6, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.nodes, self.count = nodes, count
        self.src, self.dst = rng.integers(0, nodes, (2, count))
        self.time = np.sort(rng.integers(0, span, count))
        self.msg = rng.normal(size=(count, 3)).astype(np.float32)
        self.x = rng.normal(size=(nodes, 5)).astype(np.float32)
        self.y = rng.integers(0, 4, nodes)
        self.state = np.where(rng.random(count) < 0.3, np.nan, rng.integers(0, 3, count)).astype(np.float32)
        """of each event's source, NaN where it is not known"""

    def store(self, folder: Path, **options: Any) -> Path:
        """Ingested into `folder`/s.ooc."""
        msg = {f"m{j}": self.msg[:, j] for j in range(3)}
        pq.write_table(
            pa.table({"src": self.src, "dst": self.dst, "t": self.time, "s": self.state, **msg}), folder / "e.parquet"
        )
        np.save(folder / "x.npy", self.x)
        np.save(folder / "y.npy", self.y)
        spec: dict[str, Any] = {"features": [f"x={folder}/x.npy"], "labels": folder / "y.npy", "time": "t", "time_unit": "ms"}
        spec |= {"edge_features": ["msg=m*"], **options}
        ingest(IngestSpec(out=folder / "s.ooc", edges=str(folder / "e.parquet"), **spec))
        return folder / "s.ooc"
