"""Rows of text tables that DuckDB would lose or shorten silently are refused with their line; all others are read."""

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.errors import InputError
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.lines import LINE_BYTES, LineCheck
from ooc.stores.ingest.sources import Table, open_table

ROWS = b"".join(b"%d,%d\n" % (i, i + 1) for i in range(200))


def opened(duck: Duck, path: Path, header: bool | None = None) -> Table:
    return open_table(duck, str(path), path.parent / "stage", header, ("src", "dst"))


@pytest.fixture(scope="module")
def duck(tmp_path_factory: pytest.TempPathFactory) -> Duck:
    return Duck(10**9, tmp_path_factory.mktemp("spill"))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["e.csv", "e.csv.gz"])
@pytest.mark.parametrize(
    ("row", "shown", "fields"),
    [
        (b"7,8,\n", "'7,8,'", 3),
        (b"7,8,,\n", "'7,8,,'", 4),
        (b"7,8,\r\n", "'7,8,'", 3),
        (b"7,8,", "'7,8,'", 3),
        (b'"7",8,\n', "'\"7\",8,'", 3),
    ],
)
def test_a_trailing_delimiter_in_a_late_row_is_refused_with_its_line(
    tmp_path: Path, duck: Duck, name: str, row: bytes, shown: str, fields: int
) -> None:
    end = b"\r\n" if row.endswith(b"\r\n") else b"\n"
    content = (b"# a comment,\nsrc,dst\n" + ROWS).replace(b"\n", end) + row + (b"1,2" + end if row.endswith(end) else b"")
    message = rf"e\.csv.* line 203: the row {shown} ends with a delimiter and has {fields} fields for 2 columns"
    with pytest.raises(InputError, match=message) as caught:
        opened(duck, write(tmp_path / name, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("delimiter", [b",", b"\t", b";", b"|"])
def test_rows_whose_last_fields_are_empty_are_read(tmp_path: Path, duck: Duck, delimiter: bytes) -> None:
    content = b"src,dst,w\n0,1,\n,,\n" + b'2,"a,\n",\n' + b'3,"say ""hi"",",\n'
    table = opened(duck, write(tmp_path / "e.csv", content.replace(b",", delimiter)))
    wanted = [(row[0] or None, row[1] or None, row[2] or None) for row in csv.reader(io.StringIO(content.decode()))][1:]
    found = duck.rows(f"SELECT src, dst, w FROM {table.relation()}")
    assert found == [tuple(each and each.replace(",", delimiter.decode()) for each in row) for row in wanted]


def test_spaces_at_the_end_of_rows_are_no_fields(tmp_path: Path, duck: Duck) -> None:
    assert opened(duck, write(tmp_path / "e.txt", b"0 1\n" + b"1 2 \n" * 60)).rows == 61


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("e.csv", True),
        pytest.param("e.csv", False, marks=pytest.mark.slow),
        pytest.param("e.csv.gz", True, marks=pytest.mark.slow),
        pytest.param("e.edgelist", True, marks=pytest.mark.slow),
    ],
)
def test_a_last_line_longer_than_duckdbs_buffer_is_refused(tmp_path: Path, duck: Duck, name: str, ended: bool) -> None:
    field = b"7" * (16 * LINE_BYTES)
    content = ROWS.replace(b",", b" ") + b"0 " + field if name == "e.edgelist" else b"src,dst\n" + ROWS + b"0," + field
    line = 201 if name == "e.edgelist" else 202
    with pytest.raises(InputError, match=rf"{name} line {line} is longer than 2 MB: it is no row of a table"):
        opened(duck, write(tmp_path / name, content + (b"\n" if ended else b"")))


def test_a_long_line_between_others_is_refused_with_its_line(tmp_path: Path, duck: Duck) -> None:
    content = b"src,dst\n" + ROWS + b"0," + b"7" * (3 * LINE_BYTES) + b"\n" + ROWS
    with pytest.raises(InputError, match=r"e\.csv line 202 is longer than 2 MB"):
        opened(duck, write(tmp_path / "e.csv", content))


def test_the_longest_line_is_read(tmp_path: Path, duck: Duck) -> None:
    content = b"src,dst\n" + ROWS + b"0," + b"7" * (LINE_BYTES - 10) + b"\n"
    assert opened(duck, write(tmp_path / "e.csv", content)).rows == 201


FIELDS = st.sampled_from(["", "1", "x y", "a,b", 'say "hi"', "two\nlines"])


@given(st.lists(st.lists(FIELDS, min_size=1, max_size=4), max_size=12), st.integers(1, 40), st.booleans(), st.booleans())
@settings(deadline=None)
def test_the_first_row_with_surplus_delimiters_is_found(rows: list[list[str]], piece: int, ended: bool, returns: bool) -> None:
    """As Python's csv module reads them, in pieces of any size."""
    end = "\r\n" if returns else "\n"
    with io.StringIO(newline="") as file:
        file.write(f"c0,c1{end}")
        csv.writer(file, lineterminator=end).writerows(rows)
        text = file.getvalue() if ended else file.getvalue().removesuffix(end)
    surplus = [row for row in csv.reader(io.StringIO(text, newline="")) if len(row) > 2 and text and row[-1] == ""]
    data = text.encode()
    check = LineCheck(Path("e.csv"), lambda: io.BytesIO(data), ",", 2)

    def run() -> None:
        for start in range(0, len(data), piece):
            check.add(data[start : start + piece])
        check.finish()

    if surplus:
        with pytest.raises(InputError, match=f"has {len(surplus[0])} fields for 2 columns"):
            run()
    else:
        run()
