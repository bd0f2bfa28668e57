"""The campaign of flipped bits works on a small store."""

from pathlib import Path

import pytest

from tools.bench.kills.flips import campaign


@pytest.mark.slow
def test_flipped_bits_of_a_grown_store_are_found_or_harmless(tmp_path: Path) -> None:
    result = campaign(tmp_path / "work", flips=3, kinds=["grown"], seed=1, seconds=60)
    assert result["findings"] == []
    assert sum(result["outcomes"].values()) == 3
