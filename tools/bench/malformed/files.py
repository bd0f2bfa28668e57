"""Malformed input files: every format damaged at random places, and in every way by hand that a user or an attacker may."""

import gzip
import io
import os
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tools.bench.malformed.cases import (
    EDGES,
    INGESTS,
    NODES,
    Case,
    Outcome,
    edge_table,
    edges_csv,
    ends,
    ingest,
    nodes_csv,
    typed_tables,
    well_formed,
)

Damage = Callable[[bytes], bytes]
_HUGE = 10**18
BOM = b"\xef\xbb\xbf"


def file_cases(seed: int) -> Iterator[Case]:
    """All cases of this module."""
    yield from damaged_at_random(seed)
    yield from in_place_of_a_file()
    yield from by_hand(TEXT, "edges.csv")
    yield from by_hand(NODE_TABLES, "nodes.csv")
    for file, tables in TYPED_TABLES.items():
        yield from by_hand(tables, file)
    yield from written("edges.csv.gz", GZIPPED)
    yield from written("edges.parquet", PARQUET)
    yield from npy_headers()
    yield from array_cases()
    yield from written("graph.npz", NPZ)
    yield from odd_paths()


def damaged_at_random(seed: int) -> Iterator[Case]:
    """Each file truncated, with bytes flipped, zeroed, doubled, and with rubbish in it."""
    for file, flags in INGESTS.items():
        for number in range(9):
            chance = random.Random(f"{seed} {file} {number}")
            yield Case(f"{file}: damage {number}", ingest(flags), _damaging(file, _random_damage(number, chance)), "either")


def _random_damage(number: int, chance: random.Random) -> Damage:
    def damage(data: bytes) -> bytes:
        at, length = chance.randrange(len(data)), chance.randint(1, 64)
        flipped = bytearray(data)
        flipped[at] ^= 1 << chance.randrange(8)
        head = bytearray(data)
        head[chance.randrange(min(128, len(data)))] ^= 1 << chance.randrange(8)
        tail = bytearray(data)
        tail[-chance.randint(1, min(128, len(data)))] ^= 1 << chance.randrange(8)
        kinds: list[bytes] = [data[:at], bytes(flipped), data[:at] + bytes(length) + data[at + length :], data[at:]]
        kinds += [data[:at] + chance.randbytes(length) + data[at:], data + chance.randbytes(length), bytes(head), bytes(tail)]
        return [*kinds, data[: len(data) // 2] * 2][number]

    return damage


def _replaced(content: bytes) -> Damage:
    return lambda _: content


def _damaging(file: str, damage: Damage) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        well_formed(folder)
        (folder / file).write_bytes(damage((folder / file).read_bytes()))

    return write


def in_place_of_a_file() -> Iterator[Case]:
    """Nothing, an empty file, a directory, a pipe, a link to nowhere, zeros, or another format in place of a file."""
    for file, flags in INGESTS.items():
        if file.startswith(("ogb/", "mag/", "mol/")):
            continue
        for what, make in OTHERS.items():

            def write(folder: Path, path: str = file, make: Callable[[Path], object] = make) -> None:
                well_formed(folder)
                (folder / path).unlink()
                make(folder / path)

            yield Case(f"{file}: {what}", ingest(flags), write)


OTHERS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": Path.touch,
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "a picture": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20),
    "a pickle": lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR."),
}


def by_hand(cases: dict[str, tuple[bytes, Outcome]], file: str) -> Iterator[Case]:
    """Files with this content."""
    for name, (content, outcome) in cases.items():
        yield Case(f"{file}: {name}", ingest(INGESTS[file]), _damaging(file, _replaced(content)), outcome)


def _row(text: bytes, content: bytes = edges_csv()) -> bytes:
    """The table with another row in the middle."""
    rows = content.split(b"\n")
    return b"\n".join([*rows[:50], text, *rows[50:]])


TEXT: dict[str, tuple[bytes, Outcome]] = {
    "byte order mark": (BOM + edges_csv(), "accepted"),
    "byte order mark and quotes": (BOM + edges_csv().replace(b"src", b'"src"', 1), "accepted"),
    "UTF-16": (edges_csv().decode().encode("utf-16"), "refused"),
    "UTF-32": (edges_csv().decode().encode("utf-32"), "refused"),
    "Latin-1": (_row(b"\xe9,1,1,1"), "refused"),
    "100,000 columns": (b",".join(b"c%d" % i for i in range(100_000)) + b"\n" + edges_csv(), "refused"),
    "100,000 columns, all of them in the rows": (
        b"\n".join([b",".join([b"src,dst", *(b"c%d" % i for i in range(100_000))]), b",".join([b"1"] * 100_002), b""]),
        "refused",
    ),
    "a line of 20 MB": (_row(b"1" * 20_000_000), "refused"),
    "one line of 20 MB": (b"1" * 20_000_000, "refused"),
    "header alone": (b"src,dst,w,t\n", "refused"),
    "commas alone": (b",,,\n" * 50, "refused"),
    "spaces alone": (b"    \n" * 50, "refused"),
    "comments alone": (b"# one\n# two\n", "refused"),
    "quotes alone": (b'""\n""\n', "refused"),
    "trailing delimiter": (edges_csv().replace(b"\n", b",\n"), "refused"),
    "trailing delimiter in the header": (edges_csv().replace(b"\n", b",\n", 1), "refused"),
    "trailing delimiter in the rows": (edges_csv().replace(b"\n", b",\n").replace(b",\n", b"\n", 1), "refused"),
    "column named twice": (edges_csv().replace(b"w", b"src", 1), "refused"),
    "columns named alike but for case": (edges_csv().replace(b"w,t", b"SRC,Dst", 1), "either"),
    "column without a name": (edges_csv().replace(b",w,", b",,", 1), "refused"),
    "no column dst": (edges_csv().replace(b"dst", b"to", 1), "refused"),
    "short row": (_row(b"1"), "refused"),
    "long row": (_row(b"1,2,3,4,5"), "refused"),
    "open quote": (_row(b'"1,2,3,4'), "refused"),
    "quote in a field": (_row(b'1"2,2,3,4'), "refused"),
    "word as id": (_row(b"one,2,1,1"), "refused"),
    "empty id": (_row(b",2,1,1"), "refused"),
    "NULL id": (_row(b"NULL,2,1,1"), "refused"),
    "NaN id": (_row(b"nan,2,1,1"), "refused"),
    "fraction as id": (_row(b"1.5,2,1,1"), "refused"),
    "exponent as id": (_row(b"1e1,2,1,1"), "refused"),
    "hexadecimal id": (_row(b"0x10,2,1,1"), "refused"),
    "id of 21 digits": (_row(b"123456789012345678901,2,1,1"), "refused"),
    "id with a zero byte": (_row(b"1\x002,2,1,1"), "refused"),
    "other digits": (_row("\u0661,2,1,1".encode()), "refused"),
    "huge id": (_row(b"9223372036854775807,2,1,1"), "either"),
    "negative id": (_row(b"-1,2,1,1"), "either"),
    "carriage returns": (edges_csv().replace(b"\n", b"\r"), "either"),
    "both line ends": (edges_csv().replace(b"\n", b"\r\n", 90), "either"),
    "zero bytes at the end": (edges_csv() + bytes(4096), "refused"),
    "control-Z at the end": (edges_csv() + b"\x1a", "either"),
    "a web page": (b"<!DOCTYPE html>\n<html><body>404, not found</body></html>\n", "refused"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "refused"),
    "JSON lines": (b'{"src": 1, "dst": 2}\n' * 50, "refused"),
}


def _one(file: str, old: bytes, new: bytes) -> bytes:
    """One of the typed tables with one cell or row changed."""
    content = typed_tables()[file]
    assert old in content
    return content.replace(old, new, 1)


TYPED_TABLES: dict[str, dict[str, tuple[bytes, Outcome]]] = {
    "papers.csv": {
        "header alone": (b"id,y,f0\n", "refused"),
        "id of another type": (_one("papers.csv", b"\np7,", b"\na3,"), "refused"),
        "id twice": (_one("papers.csv", b"\np7,", b"\np8,"), "refused"),
    },
    "writes.csv": {
        "id of another type": (_one("writes.csv", b"a1,p1,", b"a1,a2,"), "refused"),
        "types exchanged": (_one("writes.csv", b"src,dst", b"dst,src"), "refused"),
        "target that is no number": (_one("writes.csv", b",1.5\n", b",good\n"), "refused"),
        "infinite target": (_one("writes.csv", b",1.5\n", b",inf\n"), "refused"),
        "time that is none": (_one("writes.csv", b"a1,p1,1,", b"a1,p1,today,"), "refused"),
    },
    "atoms.csv": {
        "node of no graph": (_one("atoms.csv", b"7,m1,", b"7,,"), "refused"),
        "node of an unknown graph": (_one("atoms.csv", b"7,m1,", b"7,m99,"), "refused"),
        "node of another graph": (_one("atoms.csv", b"7,m1,", b"7,m2,"), "refused"),
    },
    "mols.csv": {
        "graph without nodes": (_one("mols.csv", b"m3,", b"m99,0,train\nm3,"), "refused"),
        "graph twice": (_one("mols.csv", b"m3,", b"m2,"), "refused"),
        "target that is no number": (_one("mols.csv", b"m3,1.0", b"m3,good"), "refused"),
        "target far beyond float32": (_one("mols.csv", b"m3,1.0", b"m3,1e300"), "refused"),
        "header alone": (b"mol,y,split\n", "refused"),
    },
    "bonds.csv": {
        "edge between graphs": (_one("bonds.csv", b"\n7,4,", b"\n7,0,"), "refused"),
        "header alone": (b"src,dst,length\n", "either"),
    },
}

NODE_TABLES: dict[str, tuple[bytes, Outcome]] = {
    "byte order mark": (BOM + nodes_csv(), "accepted"),
    "unknown split": (nodes_csv().replace(b",val,", b",holdout,", 1), "refused"),
    "every split unknown": (
        nodes_csv().replace(b",val,", b",a,").replace(b",train,", b",b,").replace(b",test,", b",c,"),
        "refused",
    ),
    "id twice": (nodes_csv().replace(b"\n7,", b"\n8,"), "refused"),
    "empty id": (nodes_csv().replace(b"\n7,", b"\n,"), "refused"),
    "node missing": (b"\n".join(nodes_csv().split(b"\n")[:-3]), "refused"),
    "word as label": (_row(b"99,x\ty,train,1,1,1", nodes_csv()), "either"),
    "fraction as label": (_row(b"99,1.5,train,1,1,1", nodes_csv()), "either"),
    "huge label": (_row(b"99,1000000000000,train,1,1,1", nodes_csv()), "refused"),
    "negative label": (_row(b"99,-7,train,1,1,1", nodes_csv()), "refused"),
    "infinite label": (_row(b"99,inf,train,1,1,1", nodes_csv()), "refused"),
    "no label": (nodes_csv().replace(b",0,t", b",,t").replace(b",1,v", b",,v").replace(b",2,t", b",,t"), "refused"),
    "NaN as feature": (_row(b"99,1,train,1,nan,1", nodes_csv()), "refused"),
    "empty feature": (_row(b"99,1,train,1,,1", nodes_csv()), "refused"),
    "word as feature": (_row(b"99,1,train,1,high,1", nodes_csv()), "refused"),
    "feature beyond float32": (_row(b"99,1,train,1,1e300,1", nodes_csv()), "refused"),
    "feature beyond float64": (_row(b"99,1,train,1,1e999,1", nodes_csv()), "refused"),
    "feature with an underscore": (_row(b"99,1,train,1,1_000,1", nodes_csv()), "refused"),
}


def written(file: str, cases: dict[str, tuple[Callable[[Path], object], Outcome]]) -> Iterator[Case]:
    """Files that a function writes."""
    for name, (make, outcome) in cases.items():

        def write(folder: Path, make: Callable[[Path], object] = make) -> None:
            well_formed(folder)
            make(folder / file)

        yield Case(f"{file}: {name}", ingest(INGESTS[file]), write, outcome)


def _gzip(change: Damage) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


GZIPPED: dict[str, tuple[Callable[[Path], object], Outcome]] = {
    "wrong checksum": (_gzip(lambda data: data[:-8] + struct.pack("<I", 7) + data[-4:]), "refused"),
    "wrong length": (_gzip(lambda data: data[:-4] + struct.pack("<I", 7)), "refused"),
    "no trailer": (_gzip(lambda data: data[:-8]), "refused"),
    "rubbish behind it": (_gzip(lambda data: data + b"rubbish"), "refused"),
    "zeros behind it": (_gzip(lambda data: data + bytes(512)), "either"),
    "a second member": (_gzip(lambda data: data + gzip.compress(b"1,2,3,4\n")), "accepted"),
    "a second member that is damaged": (_gzip(lambda data: data + gzip.compress(b"1,2,3,4\n")[:-5] + b"12345"), "refused"),
    "header alone": (_gzip(lambda data: data[:10]), "refused"),
    "magic alone": (_gzip(lambda data: data[:2]), "refused"),
    "another method": (_gzip(lambda data: data[:2] + b"\x07" + data[3:]), "refused"),
    "nothing inside": (_gzip(lambda data: gzip.compress(b"")), "refused"),
    "binary inside": (_gzip(lambda data: gzip.compress(bytes(range(256)) * 50)), "refused"),
    "gzip inside": (_gzip(gzip.compress), "refused"),
    "byte order mark inside": (_gzip(lambda data: gzip.compress(BOM + edges_csv())), "accepted"),
    "a bomb": (_gzip(lambda data: gzip.compress(edges_csv() + b"1" * 200_000_000, 1)), "either"),
}


def _parquet(**columns: object) -> Callable[[Path], object]:
    return lambda path: pq.write_table(edge_table(**columns), path)


def _named_twice(path: Path) -> None:
    table = edge_table()
    names = ["src", "dst", "w", "src"]
    pq.write_table(pa.Table.from_arrays([table[0], table[1], table[2], table[3]], names=names), path)


PARQUET: dict[str, tuple[Callable[[Path], object], Outcome]] = {
    "column named twice": (_named_twice, "refused"),
    "no rows": (lambda path: pq.write_table(edge_table()[:0], path), "refused"),
    "no columns": (lambda path: pq.write_table(pa.table({}), path), "refused"),
    "ids are floats": (_parquet(src=ends()[0].astype(float)), "refused"),
    "ids are NaN": (_parquet(src=np.full(EDGES, np.nan)), "refused"),
    "ids are lists": (_parquet(src=[[1]] * EDGES), "refused"),
    "ids are structs": (_parquet(src=[{"a": 1}] * EDGES), "refused"),
    "ids are dates": (_parquet(src=np.zeros(EDGES, "datetime64[s]")), "refused"),
    "ids are bool": (_parquet(src=np.zeros(EDGES, bool)), "refused"),
    "ids are bytes": (_parquet(src=[b"\xff\xfe"] * EDGES), "refused"),
    "ids are null": (_parquet(src=pa.nulls(EDGES)), "refused"),
    "an id is null": (_parquet(src=pa.array([None, *range(EDGES - 1)])), "refused"),
    "ids beyond int64": (_parquet(src=np.full(EDGES, 2**64 - 1, np.uint64)), "refused"),
    "times are text": (_parquet(t=["soon"] * EDGES), "refused"),
    "times are NaN": (_parquet(t=np.full(EDGES, np.nan)), "refused"),
    "times are infinite": (_parquet(t=np.full(EDGES, np.inf)), "refused"),
    "times are null": (_parquet(t=pa.nulls(EDGES, pa.int64())), "refused"),
    "times are lists": (_parquet(t=[[1]] * EDGES), "refused"),
    "weights are text": (_parquet(w=["heavy"] * EDGES), "refused"),
    "weights are NaN": (_parquet(w=np.full(EDGES, np.nan)), "refused"),
    "weights are lists": (_parquet(w=[[1.0]] * EDGES), "either"),
    "a name with a quote": (_parquet(**{'a"b': np.ones(EDGES)}), "accepted"),
    "a column file_row_number": (_parquet(file_row_number=np.ones(EDGES)), "either"),
    "a column filename": (_parquet(filename=np.ones(EDGES)), "accepted"),
    "a column without a name": (_parquet(**{"": np.ones(EDGES)}), "either"),
}

_HEADERS: dict[str, str] = {
    "negative length": "{'descr': '<f4', 'fortran_order': False, 'shape': (-40, 4), }",
    "negative width": "{'descr': '<f4', 'fortran_order': False, 'shape': (40, -4), }",
    "huge length": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({_HUGE}, 4), }}",
    "length beyond int64": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**30}, 4), }}",
    "huge product": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**62}, {2**62}), }}",
    "no length": "{'descr': '<f4', 'fortran_order': False, 'shape': (), }",
    "no rows": "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4), }",
    "no columns": "{'descr': '<f4', 'fortran_order': False, 'shape': (40, 0), }",
    "three sides": "{'descr': '<f4', 'fortran_order': False, 'shape': (40, 2, 2), }",
    "40 sides": f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 40}, }}",
    "length as text": "{'descr': '<f4', 'fortran_order': False, 'shape': '40, 4', }",
    "length as float": "{'descr': '<f4', 'fortran_order': False, 'shape': (40.0, 4), }",
    "length as bool": "{'descr': '<f4', 'fortran_order': False, 'shape': (True, True), }",
    "unknown dtype": "{'descr': '<q9', 'fortran_order': False, 'shape': (40, 4), }",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (40, 4), }",
    "structured": "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (40, 4), }",
    "complex": "{'descr': '<c8', 'fortran_order': False, 'shape': (20, 4), }",
    "text": "{'descr': '<U1', 'fortran_order': False, 'shape': (40, 4), }",
    "dates": "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (40, 2), }",
    "bytes of no length": "{'descr': '|V0', 'fortran_order': False, 'shape': (40, 4), }",
    "dtype as number": "{'descr': 4, 'fortran_order': False, 'shape': (40, 4), }",
    "dtype as a deep list": "{'descr': " + "[" * 90 + "]" * 90 + ", 'fortran_order': False, 'shape': (40, 4), }",
    "no dictionary": "[1, 2, 3]",
    "a call": "__import__('os').system('touch pwned')",
    "a key missing": "{'descr': '<f4', 'shape': (40, 4), }",
    "a key too many": "{'descr': '<f4', 'fortran_order': False, 'shape': (40, 4), 'more': 1, }",
    "deeply nested": "(" * 3000 + ")" * 3000,
    "long": "{'descr': '<f4', 'fortran_order': False, 'shape': (40, 4), }" + " " * 60_000,
    "order as text": "{'descr': '<f4', 'fortran_order': 'yes', 'shape': (40, 4), }",
    "not text": "\x00\x01\x02",
}


def npy(header: str, data: bytes = bytes(640), version: tuple[int, int] = (2, 0)) -> bytes:
    """An npy file with this header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<I" if version[0] > 1 else "<H", len(text)) + text + data


def npy_headers() -> Iterator[Case]:
    """x.npy with odd headers, some of them also as labels, edges and splits."""
    for name, header in _HEADERS.items():
        yield from by_hand({f"header with {name}": (npy(header), "refused")}, "x.npy")
    for file in ("edges.npy", "y.npy", "train.npy", "msg.npy"):
        for name in ("negative length", "huge length", "length beyond int64", "no length", "complex", "40 sides"):
            yield from by_hand({f"header with {name}": (npy(_HEADERS[name]), "refused")}, file)
    yield from by_hand({"version 9": (npy(_HEADERS["no rows"], version=(9, 0)), "refused")}, "x.npy")


def _saved(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=False)
    return file.getvalue()


def array_cases() -> Iterator[Case]:
    """Arrays that are well formed and do not fit."""
    for file, arrays in ARRAYS.items():
        cases: dict[str, tuple[bytes, Outcome]] = {name: (_saved(array), outcome) for name, (array, outcome) in arrays.items()}
        yield from by_hand(cases, file)


_NAN = np.full((NODES, 4), np.nan, np.float32)
ARRAYS: dict[str, dict[str, tuple[object, Outcome]]] = {
    "x.npy": {
        "one dimension": (np.arange(NODES, dtype=np.float32), "accepted"),
        "big-endian": (np.ones((NODES, 4), ">f4"), "accepted"),
        "complex": (np.ones((NODES, 4), complex), "refused"),
        "too few": (np.ones((NODES - 9, 4)), "refused"),
        "NaN": (_NAN, "refused"),
        "infinity": (np.full((NODES, 4), np.inf), "refused"),
        "beyond float32": (np.full((NODES, 4), 1e300), "refused"),
        "durations": (np.ones((NODES, 4), "timedelta64[s]"), "refused"),
    },
    "y.npy": {
        "floats": (np.full(NODES, 0.5), "either"),
        "NaN": (np.full(NODES, np.nan), "refused"),
        "huge": (np.full(NODES, 2**62), "refused"),
        "beyond int64": (np.full(NODES, 2**64 - 1, np.uint64), "refused"),
        "all unlabelled": (np.full(NODES, -1), "refused"),
        "negative": (np.full(NODES, -5), "refused"),
        "complex": (np.ones(NODES, complex), "refused"),
        "one": (np.ones(1, np.int64), "refused"),
        "no dimension": (np.int64(3), "refused"),
    },
    "train.npy": {
        "floats": (np.ones(NODES), "refused"),
        "ids out of range": (np.array([1, NODES]), "refused"),
        "negative ids": (np.array([-1, 2]), "refused"),
        "ids beyond int64": (np.array([2**64 - 1], np.uint64), "refused"),
        "no ids": (np.empty(0, np.int64), "accepted"),
        "empty mask": (np.zeros(NODES, bool), "accepted"),
        "mask too short": (np.ones(NODES - 1, bool), "refused"),
        "mask too long": (np.ones(NODES + 1, bool), "refused"),
        "three sides": (np.ones((2, NODES, 2), bool), "refused"),
        "no dimension": (np.bool_(True), "refused"),
    },
    "edges.npy": {
        "one dimension": (np.arange(8), "refused"),
        "three columns": (np.ones((9, 3), int), "refused"),
        "floats": (ends().astype(float), "refused"),
        "no edges": (np.empty((2, 0), int), "refused"),
        "beyond int64": (np.full((2, 5), 2**64 - 1, np.uint64), "refused"),
        "complex": (ends().astype(complex), "refused"),
        "three sides": (np.ones((2, 5, 2), int), "refused"),
    },
    "msg.npy": {
        "too few": (np.ones((EDGES - 1, 2)), "refused"),
        "complex": (np.ones((EDGES, 2), complex), "refused"),
        "NaN": (np.full((EDGES, 2), np.nan), "refused"),
    },
}


def _npz(**arrays: object) -> Callable[[Path], object]:
    held = {"x": np.ones((NODES, 4), np.float32), "edge_index": ends()}
    return lambda path: np.savez(path, **{**held, **arrays})  # type: ignore[arg-type]


def _zip_bit(offset: int, value: int) -> Callable[[Path], object]:
    """Change a field of every member's header, in the archive and its directory (where it stands two bytes later)."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        for magic, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
            at = data.find(magic)
            while at >= 0:
                data[at + shift + offset] = value
                at = data.find(magic, at + 4)
        path.write_bytes(bytes(data))

    return change


def _member(name: str, content: bytes) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, content)

    return make


def _garbled(path: Path) -> None:
    np.savez_compressed(path, x=np.random.default_rng(0).random((NODES, 400)), edge_index=ends())
    data = bytearray(path.read_bytes())
    data[200:400] = bytes(200)
    path.write_bytes(bytes(data))


NPZ: dict[str, tuple[Callable[[Path], object], Outcome]] = {
    "encrypted": (_zip_bit(6, 1), "refused"),
    "unknown compression": (_zip_bit(8, 99), "refused"),
    "compressed with LZMA, it says": (_zip_bit(8, 14), "refused"),
    "compressed with bzip2, it says": (_zip_bit(8, 12), "refused"),
    "deflated, it says": (_zip_bit(8, 8), "refused"),
    "garbled data": (_garbled, "refused"),
    "newer zip": (_zip_bit(4, 200), "refused"),
    "NaN num_nodes": (_npz(num_nodes=np.nan), "refused"),
    "infinite num_nodes": (_npz(num_nodes=np.inf), "refused"),
    "empty num_nodes": (_npz(num_nodes=np.empty(0, np.int64)), "refused"),
    "fraction as num_nodes": (_npz(num_nodes=40.5), "refused"),
    "negative num_nodes": (_npz(num_nodes=-3), "refused"),
    "no num_nodes": (_npz(num_nodes=0), "refused"),
    "huge num_nodes": (_npz(num_nodes=10**15), "refused"),
    "num_nodes of 63 bits": (_npz(num_nodes=2**63 - 1), "refused"),
    "num_nodes of 64 bits": (_npz(num_nodes=np.uint64(2**64 - 1)), "refused"),
    "huge num_nodes and no x": (lambda path: np.savez(path, edge_index=ends(), num_nodes=10**15), "refused"),
    "two num_nodes": (_npz(num_nodes=[40, 41]), "refused"),
    "text as num_nodes": (_npz(num_nodes="forty"), "refused"),
    "too few num_nodes": (_npz(num_nodes=7), "refused"),
    "complex weights": (_npz(edge_weight=np.ones(EDGES, complex)), "refused"),
    "text as weights": (_npz(edge_weight=["a"] * EDGES), "refused"),
    "dates as weights": (_npz(edge_weight=np.zeros(EDGES, "datetime64[s]")), "refused"),
    "NaN weights": (_npz(edge_weight=np.full(EDGES, np.nan)), "refused"),
    "too few weights": (_npz(edge_weight=np.ones(3)), "refused"),
    "weights of two columns": (_npz(edge_weight=np.ones((EDGES, 2))), "refused"),
    "weights without dimension": (_npz(edge_weight=np.float64(1)), "refused"),
    "half weights": (_npz(edge_weight=np.ones(EDGES, np.float16)), "either"),
    "long double weights": (_npz(edge_weight=np.ones(EDGES, np.longdouble)), "either"),
    "edges as text": (_npz(edge_index=np.full((2, EDGES), "a")), "refused"),
    "edges as bool": (_npz(edge_index=np.ones((2, EDGES), bool)), "refused"),
    "no edges": (lambda path: np.savez(path, x=np.ones((NODES, 4))), "refused"),
    "nothing": (lambda path: np.savez(path), "refused"),
    "a member outside": (_member("../../outside.npy", npy(_HEADERS["no rows"])), "either"),
    "a member twice": (_member("x.npy", npy(_HEADERS["no rows"])), "either"),
    "a member that is no array": (_member("y2.npy", b"rubbish"), "either"),
    "y is no array": (lambda path: _member("y.npy", b"rubbish")(_bare(path)), "refused"),
    "y has pickled objects": (lambda path: np.savez(path, edge_index=ends(), y=np.array([{}] * NODES, object)), "refused"),
    "a member without content": (_member("x2.npy", b""), "either"),
}


def _bare(path: Path) -> Path:
    np.savez(path, edge_index=ends())
    return path


def odd_paths() -> Iterator[Case]:
    """Names that mean something to a library: they are names."""

    def copied(*to: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            well_formed(folder)
            for name in to:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                suffix = ".csv.gz" if name.endswith(".csv.gz") else Path(name).suffix
                (folder / name).write_bytes((folder / f"edges{suffix}").read_bytes())

        return write

    tables = ["a=b.csv", "src=7/edges.csv", "src=7/edges.parquet", "dst=x/src=y/e.parquet", "it's.csv", 'a"b.parquet']
    tables += ["ä ö.csv", "e[1].csv", "e[1].parquet"]
    for name in tables:
        flags = ["--edges", name, "--weight", "w", "--num-nodes", str(NODES)]
        yield Case(f"edges in {name}", ("ingest", "out.ooc", *flags), copied(name), "accepted")
    two = copied("src=1/e.parquet", "src=2/e.parquet")
    yield Case("a hive layout", ("ingest", "out.ooc", "--edges", "src=*/*.parquet", "--time", "t"), two, "accepted")
    for out in ("a=b", "src=1/dst=2", "it's.ooc", 'a"b', "-x", "with space", "ü", "t=1/out.ooc"):

        def write(folder: Path, out: str = out) -> None:
            well_formed(folder)
            (folder / out).parent.mkdir(parents=True, exist_ok=True)

        flags = [
            "--edges",
            "edges.csv",
            "--time",
            "t",
            "--nodes",
            "nodes.csv",
            "--x-cols",
            "f*",
            "--label",
            "y",
            "--split",
            "split",
        ]
        yield Case(f"OUT named {out}", ("ingest", *flags, "--", out), write, "accepted")
        yield Case(f"OUT named {out}, text ids", ("ingest", *flags, "--id-type", "str", "--", out), write, "accepted")
    for out in ("", ".", "..", "/", "edges.csv", "edges.csv/out", "n" * 300, "/proc/out", "/dev/null"):
        yield Case(f"OUT is {out[:20]!r}", ("ingest", *INGESTS["edges.csv"].split(), "--", out), well_formed)
