"""Malformed files: refused in one line that says what, where and what to do, or read where nothing is wrong with them."""

import gzip
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ooc.stores.dataset import Dataset
from ooc.stores.errors import InputError, StoreError
from ooc.stores.ingest import IngestSpec, ingest, text
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.sources import open_array, open_table, unpack_npz

BOM = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def duck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duck]:
    with Duck(10**9, tmp_path_factory.mktemp("spill")) as opened:
        yield opened


def refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"src,dst\n0,1\n", b'"src",dst\n0,1\n', b"# a comment\n\nsrc,dst\n0,1\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path, duck: Duck, content: bytes, packed: bool) -> None:
    path = tmp_path / ("e.csv.gz" if packed else "e.csv")
    path.write_bytes((gzip.compress if packed else bytes)(BOM + content))
    table = open_table(duck, str(path), tmp_path / "stage", None, ("src",))
    assert list(table.columns) == ["src", "dst"]
    assert duck.rows(f"SELECT src, dst FROM {table.relation()}") == [("0", "1")]


def test_a_byte_order_mark_before_data(tmp_path: Path, duck: Duck) -> None:
    (tmp_path / "e.csv").write_bytes(BOM + b"0,1\n2,3\n")
    table = open_table(duck, str(tmp_path / "e.csv"), tmp_path / "stage", None, ("src",))
    assert duck.rows(f"SELECT column0, column1 FROM {table.relation()}") == [("0", "1"), ("2", "3")]


TABLES = {
    "many columns": (
        ",".join(f"c{i}" for i in range(20_000)).encode() + b"\n",
        r"has 20,000 columns, and a text table at most",
    ),
    "a long line": (b"1" * (text.LINE_CHARACTERS + 5), r"line 1 has a million characters"),
    "names that differ in case": (b"src,dst,SRC\n0,1,2\n", r"names a column twice \('src' and 'SRC': upper and lower case"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_would_be_misread(tmp_path: Path, duck: Duck, case: str) -> None:
    content, message = TABLES[case]
    (tmp_path / "e.csv").write_bytes(content)
    refused(message, lambda: open_table(duck, str(tmp_path / "e.csv"), tmp_path / "stage", None, ("src", "dst")))


def _gzip(damage: Callable[[bytes], bytes]) -> bytes:
    rows = b"".join(b"%d,%d\n" % (i, i * 7919 % 5003) for i in range(5000))
    return damage(gzip.compress(b"src,dst\n" + rows))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-8] + struct.pack("<I", 7) + data[-4:], "CRC check failed"),
        (lambda data: data[:-4] + struct.pack("<I", 7), "Incorrect length"),
        (lambda data: data + b"rubbish", "Not a gzipped file"),
        (lambda data: data[:-9], "is truncated"),
        (lambda data: data[:12] + bytes(200) + data[212:], "compressed data cannot be read"),
    ],
)
def test_damaged_gzip(tmp_path: Path, duck: Duck, damage: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "e.csv.gz"
    path.write_bytes(_gzip(damage))
    refused(message, lambda: open_table(duck, str(path), tmp_path / "stage", None, ("src", "dst")))


def test_several_gzip_members_are_one_file(tmp_path: Path, duck: Duck) -> None:
    (tmp_path / "e.csv.gz").write_bytes(_gzip(lambda data: data + gzip.compress(b"7,8\n")))
    assert open_table(duck, str(tmp_path / "e.csv.gz"), tmp_path / "stage", None, ("src",)).rows == 5001


def test_parquet_files_of_one_table_agree_in_their_types(tmp_path: Path, duck: Duck) -> None:
    columns: dict[str, Any] = {"int": [1], "small": np.array([1], np.int8), "float": [1.5], "text": ["a"], "null": pa.nulls(1)}
    for name, held in columns.items():
        pq.write_table(pa.table({"src": held, "dst": [1]}), tmp_path / f"{name}.parquet")
    for one, other in (("int", "float"), ("int", "text"), ("text", "int"), ("float", "text")):
        folder = tmp_path / f"{one}-{other}"
        folder.mkdir()
        for number, name in enumerate((one, other)):
            (folder / f"{number}.parquet").write_bytes((tmp_path / f"{name}.parquet").read_bytes())
        pattern = str(folder / "*.parquet")
        refused(
            r"1\.parquet column 'src' holds .* files of a table must agree", lambda p=pattern: open_table(duck, p, tmp_path)
        )
    for pattern in ("[is][nm]*.parquet", "[fi][ln][ot]*.parquet", "[in][nu]*.parquet"):
        assert open_table(duck, str(tmp_path / pattern), tmp_path).rows == 2


def test_parquet_columns_named_twice(tmp_path: Path, duck: Duck) -> None:
    for names in (["src", "dst", "src"], ["src", "dst", "Dst"]):
        pq.write_table(pa.Table.from_arrays([pa.array([1])] * 3, names=names), tmp_path / "e.parquet")
        refused("names a column twice", lambda: open_table(duck, str(tmp_path / "e.parquet"), tmp_path))


@pytest.mark.parametrize("name", ["a=b.csv", "src=7/e.csv", "dst=x/src=y/e.csv", "e[1].csv", "e*.csv", "it's.csv"])
def test_names_of_files_are_names(tmp_path: Path, duck: Duck, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "e1.csv").write_text("src,dst\n5,5\n")
    (tmp_path / name).write_text("src,dst\n0,1\n")
    stage = tmp_path / "dst=9" / "stage[1]"
    table = open_table(duck, str(tmp_path / name), stage)
    assert duck.rows(f"SELECT src, dst FROM {table.relation()}") == [("0", "1")]
    assert duck.rows(f"SELECT * EXCLUDE (file_row_number) FROM {table.relation()}") == [("0", "1")]


def test_a_store_in_a_hive_layout(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst,t\na,b,1\nb,c,2\n")
    (tmp_path / "src=1").mkdir()
    out = tmp_path / "src=1" / "t=2"
    ingest(IngestSpec(out=out, edges=str(tmp_path / "e.csv"), time="t", parts=1))
    with Dataset.open(out) as ds:
        assert ds.external([0, 1, 2]) == ["a", "b", "c"]
        assert ds.num_edges == 2


def npy(shape: str, descr: str = "<f4") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + bytes(640)


@pytest.mark.parametrize("shape", ["(-4, 4)", "(4, -4)", f"({10**18}, 4)", f"({10**30}, 4)", "(True, True)", "(4", "(" * 3000])
def test_npy_headers(tmp_path: Path, shape: str) -> None:
    (tmp_path / "x.npy").write_bytes(npy(shape))
    refused("x.npy is damaged or truncated", lambda: open_array(tmp_path / "x.npy"))


def _changed(path: Path, offset: int, value: int) -> None:
    """Change a field of each member's header, in the zip file and in its directory, where it stands two bytes later."""
    data = bytearray(path.read_bytes())
    for magic, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        at = data.find(magic)
        while at >= 0:
            data[at + shift + offset] = value
            at = data.find(magic, at + 4)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (6, 1, "encrypted"),
        (8, 99, "cannot be unpacked: That compression method is not supported"),
        (8, 8, "is damaged or no npz file"),
        (8, 14, "is damaged or no npz file"),
        (4, 200, "cannot be unpacked: zip file version"),
    ],
)
def test_npz_that_cannot_be_unpacked(tmp_path: Path, offset: int, value: int, message: str) -> None:
    np.savez(tmp_path / "g.npz", edge_index=np.zeros((2, 50), int))
    _changed(tmp_path / "g.npz", offset, value)
    refused(message, lambda: unpack_npz(tmp_path / "g.npz", tmp_path / "stage"))


EDGES = np.array([[0, 1, 2], [1, 2, 0]])
GRAPHS: dict[str, tuple[dict[str, Any], str]] = {
    "num_nodes is NaN": ({"num_nodes": np.nan}, r"g\.npz\[num_nodes\] holds \[nan\]: it must be one whole number"),
    "num_nodes is infinite": ({"num_nodes": np.inf}, r"holds \[inf\]: it must be one whole number"),
    "num_nodes is empty": ({"num_nodes": np.empty(0, int)}, r"holds \[\]: it must be one whole number"),
    "several num_nodes": ({"num_nodes": [3, 4]}, r"holds \[3, 4\]: it must be one whole number"),
    "num_nodes is a fraction": ({"num_nodes": 3.5}, r"holds \[3\.5\]"),
    "num_nodes is 0": ({"num_nodes": 0}, r"holds \[0\]: it must be one whole number, at least 1"),
    "num_nodes is text": ({"num_nodes": "three"}, "holds <U5"),
    "num_nodes is huge": ({"num_nodes": 10**15}, r"1,000,000,000,000,000 nodes \(.*\) need 8000 TB for the offsets"),
    "weights are complex": ({"edge_weight": np.ones(3, complex)}, "the weights are complex128, not numbers of 64 bits"),
    "weights are long": ({"edge_weight": np.ones(3, np.longdouble)}, "the weights are float128, not numbers of 64 bits"),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_npz_with_odd_arrays(tmp_path: Path, case: str) -> None:
    arrays, message = GRAPHS[case]
    np.savez(tmp_path / "g.npz", edge_index=EDGES, **arrays)
    refused(message, lambda: ingest(IngestSpec(out=tmp_path / "s.ooc", npz=tmp_path / "g.npz")))
    assert [path.name for path in tmp_path.iterdir()] == ["g.npz"]


@pytest.mark.parametrize("number", [10**15, 2**63, 10**20])
def test_more_nodes_than_the_disk_holds(tmp_path: Path, number: int) -> None:
    np.save(tmp_path / "e.npy", EDGES)
    message = r"nodes \(`num_nodes`\) need .* TB for the offsets of their edges alone, and .* of disk: correct the number"
    refused(message, lambda: ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.npy"), num_nodes=number)))
    assert [path.name for path in tmp_path.iterdir()] == ["e.npy"]


def test_a_number_of_nodes_beside_a_table_of_them(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", EDGES)
    (tmp_path / "n.csv").write_text("id\n0\n1\n2\n")
    spec: dict[str, Any] = {"edges": str(tmp_path / "e.npy"), "nodes": str(tmp_path / "n.csv")}
    refused(r"`num_nodes` is 4, but .*n\.csv has 3 rows", lambda: ingest(IngestSpec(out=tmp_path / "s", **spec, num_nodes=4)))
    assert ingest(IngestSpec(out=tmp_path / "t", **spec, num_nodes=3)).num_nodes == 3


def test_an_id_beyond_64_bits(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i + 1}\n" for i in range(40))
    for number in (f"{10**20}", f"{2**63}", "1" * 4500):
        (tmp_path / "e.csv").write_text(f"src,dst\n{rows}{number},1\n")
        message = r"e\.csv line 42: src '\d+' is not a whole number of 64 bits"
        with pytest.raises(InputError, match=message):
            ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv")))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (np.array([0, np.nan]), r"'src' holds double: node ids are whole numbers or text; make it int64 \(in pandas Int64"),
        ([True, False], "'src' holds bool: node ids are whole numbers or text; make it int64 or text$"),
    ],
)
def test_ids_of_another_type_say_what_to_make_of_them(tmp_path: Path, column: Any, words: str) -> None:
    pq.write_table(pa.table({"src": column, "dst": [0, 1]}), tmp_path / "e.parquet")
    with pytest.raises(InputError, match=words):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.parquet")))


@pytest.mark.parametrize("number", ["1.0", "2.", "1e3", "1.5E+2"])
def test_ids_as_floats_are_no_words(tmp_path: Path, number: str) -> None:
    (tmp_path / "e.csv").write_text(f"src,dst\n{number},{number}\n")
    message = rf"e\.csv line 2: src '{re.escape(number)}' is not a whole number of 64 bits; correct it \(if ids are words here"
    with pytest.raises(InputError, match=message):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv")))
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv"), id_type="str"))


def test_ids_below_zero_are_nodes_and_said(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("0,1\n1,-1\n2,0\n")
    (tmp_path / "n.csv").write_text("id\n-1\n0\n1\n2\n")
    given: dict[str, Any] = {"edges": str(tmp_path / "e.csv")}
    (note,) = ingest(IngestSpec(out=tmp_path / "s.ooc", **given)).notes
    assert "e.csv has ids below 0, such as -1 in column1, which are nodes like others" in note
    assert not ingest(IngestSpec(out=tmp_path / "listed.ooc", nodes=str(tmp_path / "n.csv"), **given)).notes
    dropped = ingest(IngestSpec(out=tmp_path / "dropped.ooc", num_nodes=3, drop_missing=True, **given))
    assert (dropped.num_nodes, dropped.dropped, dropped.notes) == (3, {"missing": 1}, ())


def test_features_of_one_dimension_are_one_column(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", EDGES)
    np.save(tmp_path / "x.npy", np.arange(3, dtype=np.float32))
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.npy"), features=[f"x={tmp_path}/x.npy"]))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert ds.rows("x").shape == (3, 1)


def test_a_member_outside_the_folder_stays_inside(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=EDGES)
    with zipfile.ZipFile(tmp_path / "g.npz", "a") as archive:
        archive.writestr("../../outside.npy", npy("(3, 4)"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    ingest(IngestSpec(out=tmp_path / "a" / "b" / "s.ooc", npz=tmp_path / "g.npz"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "g.npz"]


@pytest.mark.parametrize("out", ["", ".", "/"])
def test_a_store_needs_a_name(tmp_path: Path, out: str) -> None:
    np.save(tmp_path / "e.npy", EDGES)
    with pytest.raises(StoreError, match="exists already: choose another name"):
        ingest(IngestSpec(out=Path(out), edges=str(tmp_path / "e.npy")))
