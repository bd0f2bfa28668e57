"""What Triton's kernels draw and read, which its interpreter carries out on the CPU, is what torch does."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

SCRIPT = """
import numpy as np, torch
from ooc.sampling import NeighborSampler, device_draws, host_edges, triton_draws, triton_reads
from ooc.sampling.device_neighbor import DeviceNeighborSampler
from tests.ooc.sampling.test_device_neighbor import graph_of, same

cpu = torch.device("cpu")
for fanout in (1, 2, 5, 10, 26):
    for replace in (False, True):
        assert device_draws.agree(triton_draws, fanout, replace, cpu), (fanout, replace)

assert host_edges.agrees(triton_reads.read, cpu)
assert triton_reads.read(torch.ones(3, dtype=torch.int32), torch.empty(0, dtype=torch.int64)).tolist() == []
read, host_edges._read_by_host = [], lambda *given: read.append(given) or triton_reads.read(*given)

few = device_draws.most_draws
device_draws.most_draws = lambda fanout, attempt: fanout + 2 * attempt  # so that nodes are drawn again
draw = device_draws.draw
device_draws.draw = lambda nodes, key, attempt, slot, compiled: draw(nodes, key, attempt, slot, triton_draws)
graph = graph_of(np.random.default_rng(0), 60, 300, 4)
for replace in (False, True):
    host = NeighborSampler(graph, [4, 3], replace)
    for edges_on_host in (False, True):
        same(host, DeviceNeighborSampler(host, graph, cpu, edges_on_host), np.arange(20), 2**64 - 3)
assert read
print("equal")
"""


def test_draws_and_what_is_read_are_those_of_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr
