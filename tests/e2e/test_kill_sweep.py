"""kill -9 at random moments of a sweep, and the same call again: its rows end byte for byte as if nothing had happened."""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from ooc import layerplan, sweepshape, sweepstages
from ooc.layerwise import LayerSweep
from ooc.models import build_model
from stores.dataset import Dataset
from tests.conftest import MakeStore

KILLS = 3
CHUNK = 64


def small_parts() -> None:
    """Chunks of 64 rows, so that a small graph has many ranges."""
    layerplan.CHUNK_ROWS = sweepstages.CHUNK_ROWS = CHUNK
    sweepshape._LEAST_PIECE_ROWS, sweepshape.PIECE_BYTES = 256, 1
    sweepstages.UNIT_CHUNKS = 2


def model_of(ds: Dataset) -> nn.Module:
    torch.manual_seed(1)
    return build_model("gcnii", ds.num_features, 48, 3, 4)


def sweep(store: Path, folder: Path) -> None:
    small_parts()
    with Dataset.open(store) as ds, closing(LayerSweep(model_of(ds), ds, folder, room=24_000)) as swept:
        assert any(layer.blocks > 1 for layer in swept.plan.layers)
        swept.run()


def at(folder: Path) -> tuple[int, int]:
    """(stage, node) that the sweep has reached."""
    try:
        progress = json.loads((folder / "progress.json").read_bytes())
    except (OSError, ValueError):
        return 0, 0
    return progress["stage"], progress["next"]


@pytest.mark.slow
def test_a_killed_sweep_goes_on_to_the_same_bytes(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(num_nodes=1500, num_edges=12_000)
    for module, name in [(layerplan, "CHUNK_ROWS"), (sweepstages, "CHUNK_ROWS"), (sweepstages, "UNIT_CHUNKS")]:
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    for name in ("_LEAST_PIECE_ROWS", "PIECE_BYTES"):
        monkeypatch.setattr(sweepshape, name, getattr(sweepshape, name))
    sweep(store, tmp_path / "whole")
    last, _ = at(tmp_path / "whole")
    moments, killed = random.Random(2), 0
    command = [sys.executable, "-c", "import sys; from tests.e2e.test_kill_sweep import *; sweep(*map(Path, sys.argv[1:]))"]
    for mark in sorted(moments.randrange(0, last - 1) for _ in range(KILLS)):
        process = subprocess.Popen([*command, str(store), str(tmp_path / "cut")])
        while at(tmp_path / "cut")[0] < mark and process.poll() is None:
            time.sleep(0.0005)
        time.sleep(moments.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed, "every sweep was over before it was killed"
    sweep(store, tmp_path / "cut")
    assert (tmp_path / "cut/out/rows.bin").read_bytes() == (tmp_path / "whole/out/rows.bin").read_bytes()
