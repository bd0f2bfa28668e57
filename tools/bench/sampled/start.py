"""Seconds and memory until the first batch: of `ooc train`, and of a script with `ooc.NeighborLoader` and PyG's layers.

    python -m tools.bench.sampled.start STORE --memory 2GB --rounds 3

Prints JSON: of each, the seconds of its imports, the seconds from there to the end of the first step, and the resident memory
then; on a small store with small batches that is the process itself. What libraries import late counts as imports: torch with
the first optimizer, numba with the first kernel. Every round is a process of its own. `cold` begins with an empty page cache
(needs root), but for the libraries, whose files are read again before the clock runs; `warm` is a second run.

Before, the libraries leave the page cache: an installer's large writes put them there in pieces of megabytes, and Linux 6.18
maps such a piece whole for each address in use. That is memory which the page cache has anyway, and which no process needs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from ooc.stores.process import release_library_pages_now
from tools.bench.lib.machine import describe, drop_page_cache

Result = dict[str, Any]
BEGIN = """
import json, os, sys, time
began = time.perf_counter()
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
store, memory, batch_size, out = sys.argv[1:]
def report(imported):
    from ooc.stores.process import resident_bytes
    now = time.perf_counter()
    found = {"import_seconds": imported - began, "first_step_seconds": now - imported}
    print(json.dumps(found | {"resident_bytes": resident_bytes()[0]}), flush=True)
    os._exit(0)
"""
LATE = """
import torch._dynamo
from ooc.stores.jit import load_numba
load_numba()
imported = time.perf_counter()
"""
COMMAND = f"""
import ooc.training.verbs
{LATE}
class First(ooc.Callback):
    def step(self, epoch, step, total_steps, loss):
        report(imported)
how = dict(model="sage", fanout=[10, 10], batch_size=int(batch_size), memory=memory)
ooc.train(store=store, out=out, **how, callbacks=[First()])
"""
SCRIPT = f"""
import ooc, torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv
ooc.NeighborLoader
{LATE}
class Net(torch.nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.first, self.second = SAGEConv(width, 256), SAGEConv(256, classes)
    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)
ds = ooc.open(store, memory=memory)
loader = ooc.NeighborLoader(ds, [10, 10], input_nodes="train", batch_size=int(batch_size), shuffle=True)
model = Net(ds.num_features, ds.num_classes)
optimizer = torch.optim.Adam(model.parameters())
for batch in loader:
    loss = F.cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])
    loss.backward()
    optimizer.step()
    report(imported)
"""
PROGRAMS = {"ooc train": COMMAND, "script": SCRIPT}


def read_libraries_anew() -> None:
    """Take the libraries' files out of the page cache, as far as no other process maps them, and import them once."""
    release_library_pages_now()
    for path in Path(sysconfig.get_path("platlib")).rglob("*.so*"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # dirty pages stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    _import_once()


def _import_once() -> None:
    imports = "import time, ooc.training.verbs, torch_geometric.nn"
    subprocess.run([sys.executable, "-c", f"{imports}\n{LATE}"], check=True)


def first_step(program: str, store: Path, memory: str = "2GB", batch_size: int = 1024, cold: bool = False) -> Result:
    """Run one of `PROGRAMS` up to the end of its first step, in a process of its own."""
    if cold:
        drop_page_cache()
        _import_once()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", BEGIN + PROGRAMS[program], str(store), memory, str(batch_size), f"{folder}/run"]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    result: Result = {"machine": describe(), "store": str(a.store), "memory": a.memory}
    read_libraries_anew()
    for program in PROGRAMS:
        first_step(program, a.store, a.memory, a.batch_size)  # compiles what is missing
        for state in ("cold", "warm"):
            runs = [first_step(program, a.store, a.memory, a.batch_size, state == "cold") for _ in range(a.rounds)]
            result[f"{program}, {state}"] = {name: statistics.median(each[name] for each in runs) for name in runs[0]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
