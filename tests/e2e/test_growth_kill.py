"""kill -9 at random moments of appends, compactions and readers' merging."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

KILLS = os.environ.get("OOC_TEST_KILLS", "2")
"""inside each place; a hundred take some minutes"""
SEED = os.environ.get("OOC_TEST_SEED", str(random.randrange(10**6)))
"""of the moments: another one every time, named where a test fails"""


def test_nothing_acknowledged_is_lost_and_nothing_is_there_by_half(tmp_path: Path) -> None:
    flags = ["--kills", KILLS, "--seed", SEED]
    command = [sys.executable, "-m", "tools.bench.growkills", str(tmp_path / "kills"), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {place: found["kills"] for place, found in json.loads(done.stdout)["places"].items()} == {
        "append": int(KILLS), "compact": int(KILLS), "view": int(KILLS)
    }  # fmt: skip
    assert not (tmp_path / "kills").exists()
