"""What a sweep keeps."""

from contextlib import closing
from pathlib import Path

from ooc.layerwise.row_files import Files, Kept
from ooc.stores.arrays.mutable_rows import DiskRows
from tests.waiting import in_threads


def test_rows_that_several_threads_ask_for_at_once_are_opened_once(tmp_path: Path) -> None:
    """Opened twice, one of them would never be closed: its descriptors and the engines' threads would stay."""
    for name in map(str, range(8)):
        DiskRows.create(tmp_path / name, (64, 4), "float32", "auto").close()
    with closing(Files(tmp_path, "auto")) as files:
        for name in map(str, range(8)):
            found: dict[int, Kept] = {}

            def ask(number: int, name: str = name, found: dict[int, Kept] = found) -> None:
                found[number] = files.rows(name, (64, 4))

            in_threads(8, ask)
            assert len({id(rows) for rows in found.values()}) == 1
