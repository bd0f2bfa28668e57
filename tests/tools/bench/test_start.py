"""What a process holds at its first batch, and how long that takes."""

from pathlib import Path

import pytest

from tests.conftest import MakeStore
from tools.bench.sampled.start import PROGRAMS, first_step, read_libraries_anew

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_begins_small_and_soon(program: str, make_store: MakeStore) -> None:
    store: Path = make_store(num_nodes=2000, num_edges=20000)
    read_libraries_anew()
    runs = [first_step(program, store, batch_size=16) for _ in range(3)]
    assert min(each["resident_bytes"] for each in runs) <= 400e6
    assert min(each["first_step_seconds"] for each in runs[1:]) <= 3, "1.5 on a machine that does nothing else"
