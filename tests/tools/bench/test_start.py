"""What a process holds at its first batch. How long that takes is measured, by `tools.bench.sampled.start`, not tested."""

from pathlib import Path

import pytest

from tests.conftest import MakeStore
from tools.bench.sampled.start import PROGRAMS, first_step, read_libraries_anew

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_begins_small(program: str, make_store: MakeStore) -> None:
    store: Path = make_store(num_nodes=2000, num_edges=20000)
    read_libraries_anew()
    runs = [first_step(program, store, batch_size=16) for _ in range(3)]
    assert min(each["resident_bytes"] for each in runs) <= 400e6
    assert min(each["first_step_seconds"] for each in runs) > 0
