"""Reading files as people have them, and DuckDB's errors as ours."""

import gzip
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ooc.stores.errors import InputError, StoreError
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.sources import find, kind_of, open_table
from ooc.stores.ingest.text import sniff


@pytest.fixture
def duck(tmp_path: Path):  # type: ignore[no-untyped-def]
    with Duck(10**9, tmp_path / "spill") as opened:
        yield opened


def test_ctrl_c_in_a_query_is_an_interruption(duck: Duck) -> None:
    ended = threading.Event()

    def press() -> None:
        while not ended.wait(0.1):
            duck._con.interrupt()

    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            duck.one("SELECT sum(a.range * b.range % 7) FROM range(1000000) a, range(1000000) b")
    finally:
        ended.set()
        presser.join()


def test_an_interruption_said_as_runtime_error(duck: Duck) -> None:
    with pytest.raises(KeyboardInterrupt), duck._errors():
        raise RuntimeError("Query interrupted")
    with pytest.raises(RuntimeError, match="else"), duck._errors():
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("src,dst\n1,2\n", ("src",), (",", ["src", "dst"], True)),
        ("1\t2\n3\t4\n", ("src",), ("\t", ["column0", "column1"], False)),
        ("1 2 1083000000\n3 4 1083000001\n", (), (" ", ["column0", "column1", "column2"], False)),
        ("name;long text, with commas\na;b\n", (), (";", ["name", "long text, with commas"], True)),
        ("\n7|8\n9|1\n", (), ("|", ["column0", "column1"], False)),
        ("id\na\nb\n", ("id",), (",", ["id"], True)),
        ("2020,src\n1,2\n", ("src",), (",", ["2020", "src"], True)),
    ],
)
def test_sniffing(tmp_path: Path, text: str, names: tuple[str, ...], expected: object) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert sniff(tmp_path / "t.csv", None, names) == expected


def test_the_header_flag_wins(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\nc,d\n")
    assert sniff(tmp_path / "t.csv", False)[1:] == (["column0", "column1"], False)
    (tmp_path / "u.csv").write_text("1,2\n3,4\n")
    assert sniff(tmp_path / "u.csv", True)[1:] == (["1", "2"], True)


def test_positions_run_over_files_in_order(tmp_path: Path, duck: Duck) -> None:
    sizes, at = [5, 0, 1, 300_000, 2], 0
    for i, size in enumerate(sizes):
        pq.write_table(pa.table({"v": np.arange(at, at + size)}), tmp_path / f"p{i}.parquet", row_group_size=1000)
        at += size
    table = open_table(duck, f"{tmp_path}/p*.parquet", tmp_path)
    wrong = f"SELECT count_if(v <> {table.position()}), count(*) FROM {table.relation()}"
    assert duck.one(wrong) == (0, sum(sizes))
    assert table.where(5) == f"{tmp_path}/p2.parquet row 0"
    assert table.where(300_006) == f"{tmp_path}/p4.parquet row 0"


def test_text_lines_keep_their_order_and_numbers(tmp_path: Path, duck: Duck) -> None:
    (tmp_path / "t.csv").write_text("v\n" + "\n".join(map(str, range(400_000))) + "\n")
    table = open_table(duck, str(tmp_path / "t.csv"), tmp_path / "stage")
    assert duck.one(f"SELECT count_if(v::BIGINT <> {table.position()}), count(*) FROM {table.relation()}") == (0, 400_000)
    assert table.where(10) == f"{tmp_path}/t.csv line 12"


@pytest.mark.parametrize("name", ["a.parquet", "a.npy", "a.npz", "a.csv.gz", "a.csv"])
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x00\x01rubbish")
    with pytest.raises(InputError, match="is not what its name says"):
        kind_of(tmp_path / name)


def test_unusable_tables(tmp_path: Path, duck: Duck) -> None:
    pq.write_table(pa.table({"src": [1], "dst": [1]}), tmp_path / "a1.parquet")
    pq.write_table(pa.table({"src": [1]}), tmp_path / "a2.parquet")
    (tmp_path / "b1.parquet").write_bytes((tmp_path / "a1.parquet").read_bytes()[:-9])
    (tmp_path / "c.csv").write_text("")
    (tmp_path / "d.csv").write_text("a,a\n1,2\n")
    (tmp_path / "a3.csv").write_text("src,dst\n1,2\n")
    cases = {
        "a[12].parquet": r"a2\.parquet has no column 'dst', which .*a1\.parquet has",
        "a[13].*": "both Parquet and text",
        "b1.parquet": "damaged or no Parquet file",
        "c.csv": "is empty",
        "d.csv": "names a column twice",
        "nothing*": "no file matches",
    }
    for pattern, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            open_table(duck, str(tmp_path / pattern), tmp_path / "stage")
        assert "\n" not in str(caught.value)


def test_natural_and_plain_order(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / f"part_{number}.npy").touch()
    assert [path.stem for path in find(f"{tmp_path}/*", natural=True)] == ["part_1", "part_2", "part_10"]
    assert [path.stem for path in find(f"{tmp_path}/*")] == ["part_1", "part_10", "part_2"]


def test_a_full_disk_is_a_store_error(tmp_path: Path) -> None:
    with Duck(856_000_000, tmp_path / "spill") as duck:
        duck.rows("SET max_temp_directory_size = '1MB'")
        with pytest.raises(StoreError, match=r"cannot write .*spill: No space left on device; free some space") as caught:
            duck.copy(
                "SELECT range AS r, hash(range) AS h FROM range(30_000_000) ORDER BY h", tmp_path / "o.parquet", ordered=True
            )
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("before", ["", "\n\n", "# Directed graph\n# Nodes: 3 Edges: 2\n# FromNodeId\tToNodeId\n", "#\n\n"])
@pytest.mark.parametrize("header", ["", "src\tdst\n"])
def test_comments_and_blank_lines_before_the_rows(tmp_path: Path, duck: Duck, before: str, header: str) -> None:
    (tmp_path / "t.txt").write_text(f"{before}{header}0\t1\n1\t2\n")
    table = open_table(duck, str(tmp_path / "t.txt"), tmp_path / "stage", None, ("src",))
    assert duck.rows(f"SELECT {', '.join(table.columns)} FROM {table.relation()}") == [("0", "1"), ("1", "2")]
    assert table.where(1) == f"{tmp_path}/t.txt line {(before + header).count(chr(10)) + 2}"


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory: name its files by a glob"):
        find(str(tmp_path))


def test_a_gzip_truncated_late_is_said_to_be(tmp_path_factory: pytest.TempPathFactory, duck: Duck) -> None:
    folder = tmp_path_factory.mktemp("input")
    rows = "".join(f"{i},{i * 7919 % 50021}\n" for i in range(50_000))
    (folder / "t.csv.gz").write_bytes(gzip.compress(b"src,dst\n" + rows.encode())[:-20_000])
    with pytest.raises(InputError, match="is truncated"):
        open_table(duck, str(folder / "t.csv.gz"), folder / "stage")


def test_a_truncated_gzip_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"src,dst\n0,1\n")[:-6])
    with pytest.raises(InputError, match="is truncated"):
        sniff(tmp_path / "t.csv.gz")


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_data_taken_for_a_header_is_told_of(tmp_path: Path, duck: Duck, suffix: str) -> None:
    sign, advice = {"csv": ",", "tsv": "\t"}[suffix], r", or pass `header=False` if its first line is data$"
    for name, rows in {"a1": [("n036", "n048"), ("n1", "n2")], "a2": [("n5", "n6")], "b": [("n7", "n7")]}.items():
        (tmp_path / f"{name}.{suffix}").write_text("".join(f"{sign.join(row)}\n" for row in rows))
    table = open_table(duck, f"{tmp_path}/a1.{suffix}", tmp_path / "stage", None, ("src", "dst"))
    with pytest.raises(InputError, match=r"has no column 'src' for sources: it has n036, n048; name one of them" + advice):
        table.column("src", "sources", ("src", 0))
    with pytest.raises(InputError, match="a table must agree" + advice):
        open_table(duck, f"{tmp_path}/a*.{suffix}", tmp_path / "stage")
    with pytest.raises(InputError, match="names a column twice: n7, n7; rename one" + advice):
        open_table(duck, f"{tmp_path}/b.{suffix}", tmp_path / "stage")


def test_no_header_is_not_advised_where_there_is_none(tmp_path: Path, duck: Duck) -> None:
    (tmp_path / "a.csv").write_text("x,y\n")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    for table in (open_table(duck, f"{tmp_path}/a.csv", tmp_path, False), open_table(duck, f"{tmp_path}/a.parquet", tmp_path)):
        with pytest.raises(InputError, match=r"name one of them$"):
            table.column("w", "weights")
