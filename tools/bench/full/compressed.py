"""Exact steps whose plan may compress what autograd keeps, beside the placements that treat all values alike.

    python -m tools.bench.full.compressed STORE                     # GIN of four layers of 256 in 110 MB, int4
    python -m tools.bench.full.compressed STORE --compress int8 --room 200MB

Prints the seconds predicted, what the plan chose for each value that autograd keeps, and the seconds of steps, in turns.
"""

import argparse
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.fullgraph.placement.step_plan import static_placements
from ooc.fullgraph.placement.step_profile import plan_full, profile
from ooc.fullgraph.step import FullGraph
from ooc.models.builders import build_model
from ooc.stores.dataset import Dataset
from ooc.stores.sizes import parse_bytes

WIDTH, LAYERS, DISK, ROUNDS = 256, 4, 10**9, 3


def main() -> None:
    """Parse the command line, plan, and time steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--compress", default="int4", choices=["int8", "int4", "int2"])
    parser.add_argument("--room", default="110MB", help="for values and aggregates")
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, Dataset.open(a.store) as ds:
        compare(ds, Path(name), a.compress, parse_bytes(a.room))


def compare(ds: Dataset, folder: Path, compress: str, room: int) -> None:
    """Plan in so many bytes, and time steps by the plan and by the others that fit."""
    y = torch.from_numpy(np.array(ds.labels).astype(np.int64)).view(-1)

    def loss(first: int, out: Tensor) -> Tensor:
        return F.cross_entropy(out, y[first : first + len(out)], reduction="sum") / len(y)

    torch.manual_seed(0)
    model = build_model("gin", ds.num_features, WIDTH, int(y.max()) + 1, LAYERS, dropout=0.2, norm="batch")
    with closing(FullGraph(model, ds, folder / "full", room=room, compress=compress)) as full:  # type: ignore[arg-type]
        plan = plan_full(full, folder, DISK)
        kept = [str(plan.placement.of(value.name)) for value in full.program.values if value.kind == "saved"]
        print(f"planned {plan.seconds:.3g} s, kept by autograd: {', '.join(kept)}; others {plan.static}")
        fitting = static_placements(full.program, profile(full, folder, loss, DISK)).items()
        placements = {"planned": plan.placement} | {name: each for name, each in fitting if plan.static.get(name)}
        for number in range(1 + ROUNDS):  # the first one makes what is constant
            for name, full.placement in placements.items():
                began = time.perf_counter()
                full.step(loss)
                print(f"round {number}, {name}: {time.perf_counter() - began:.3f} s", flush=True)


if __name__ == "__main__":
    main()
