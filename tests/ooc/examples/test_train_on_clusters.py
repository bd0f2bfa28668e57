"""The scripts for Ray Train and SLURM, run with processes of this machine."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ooc.examples import source
from tests.conftest import MakeStore


def run(words: list[str], folder: Path, **more: str) -> str:
    """What a command prints; it must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_ray_train_with_two_workers(make_store: MakeStore, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no ray")
    (tmp_path / "train_ray.py").write_text(source("train_ray"))
    words = [sys.executable, "train_ray.py", make_store().name, "--workers", "2", "--epochs", "2", "--batch-size", "8"]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path), "RAY_TMPDIR": "/tmp"}
    out = run(words, tmp_path, **quiet, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    assert re.search(r"epoch 1: loss \d\.\d{4}", out)


def test_the_job_of_slurm_is_bash(tmp_path: Path) -> None:
    (tmp_path / "train_slurm.sh").write_text(source("train_slurm"))
    run(["bash", "-n", "train_slurm.sh"], tmp_path)


def command(folder: Path, name: str, text: str) -> None:
    """A program of that name."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.slow
def test_the_job_of_slurm_trains_and_goes_on(make_store: MakeStore, tmp_path: Path) -> None:
    """With one node, two processes, and what SLURM would have on it."""
    programs, python = tmp_path / "bin", shlex.quote(sys.executable)
    command(programs, "srun", '#!/bin/bash\nexec "$@"\n')
    command(programs, "scontrol", "#!/bin/bash\necho localhost\n")
    command(programs, "torchrun", f'#!/bin/bash\nexec {python} -m torch.distributed.run "$@"\n')
    command(programs, "ooc", f"#!{sys.executable}\nimport sys\nfrom ooc.cli.main import main\nsys.exit(main())\n")
    (tmp_path / "train_slurm.sh").write_text(source("train_slurm"))
    words = ["bash", "train_slurm.sh", str(make_store()), "run", "--batch-size", "8", "--hidden", "8", "--fanout", "3,3"]
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "PER_NODE": "2", "PORT": "29531"}
    job |= {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for epochs in (1, 2):
        run([*words, "--epochs", str(epochs)], tmp_path, **job)
        assert json.loads((tmp_path / "run/summary.json").read_text())["epochs"] == epochs
