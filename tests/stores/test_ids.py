"""External ids against a dictionary."""

import resource

import lmdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores import ids as module
from ooc.stores.errors import InputError, StoreError
from ooc.stores.ids import MAX_ID_BYTES, IdMap, identity, write_ids
from tests.stores.arrays.test_lmdb_rows import resident

INTS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def fill(path, kind, external, chunk=3):
    """Write `external` (row r is external[r]) in chunks of both orders."""
    keys = external if kind == "int" else [each.encode() for each in external]
    order = sorted(range(len(external)), key=keys.__getitem__)

    def chunks(rows):
        for first in range(0, len(rows), chunk):
            part = np.array(rows[first : first + chunk], np.int64)
            taken = [external[row] for row in part]
            yield (np.array(taken, np.int64) if kind == "int" else pa.array(taken, pa.string())), part

    return write_ids(path, kind, chunks(order), chunks(range(len(external))))


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["int", "str"]))
def test_ids_map_both_ways_like_a_dictionary(tmp_path_factory, data, kind) -> None:
    external = data.draw(st.lists(INTS if kind == "int" else TEXTS, min_size=1, max_size=30, unique=True))
    path = tmp_path_factory.mktemp("ids") / "ids.lmdb"
    assert fill(path, kind, external) == len(external)
    wanted = data.draw(st.lists(st.integers(0, len(external) - 1), max_size=40))
    ids = IdMap(path, kind)
    try:
        assert list(ids.external(np.array(wanted, np.int64))) == [external[row] for row in wanted]
        assert ids.rows([external[row] for row in wanted]).tolist() == wanted
        assert [ids.row(each) for each in external] == list(range(len(external)))
        assert len(ids) == len(external)
    finally:
        ids.close()


def test_what_was_looked_up_does_not_stay_in_the_process(tmp_path) -> None:
    path = tmp_path / "ids.lmdb"
    fill(path, "int", [7 * row for row in range(20_000)], chunk=20_000)
    ids = IdMap(path, "int")
    assert ids.external(np.arange(20_000)).tolist() == [7 * row for row in range(20_000)]
    assert resident(path / "data.mdb") == 0
    assert ids.rows(range(0, 70_000, 7)).tolist() == list(range(10_000))
    assert resident(path / "data.mdb") == 0
    ids.close()


def test_keys_stand_in_the_order_of_the_ids(tmp_path) -> None:
    fill(tmp_path / "i", "int", [3, -1, 2**62, -(2**63), 0])
    with lmdb.open(str(tmp_path / "i"), max_dbs=2, readonly=True, lock=False) as env, env.begin() as txn:
        rows = [int.from_bytes(value) for _, value in txn.cursor(env.open_db(b"node/row", txn=txn))]
    assert rows == [3, 1, 4, 0, 2]


def test_the_file_does_not_depend_on_the_chunks(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_PUTS", 7)
    external = [f"node {i * 7919 % 1000}" for i in range(1000)]
    fill(tmp_path / "a", "str", external, chunk=1)
    fill(tmp_path / "b", "str", external, chunk=64)
    assert (tmp_path / "a" / "data.mdb").read_bytes() == (tmp_path / "b" / "data.mdb").read_bytes()
    assert sorted(each.name for each in (tmp_path / "a").iterdir()) == ["data.mdb"]


def test_what_is_not_there_is_named(tmp_path) -> None:
    fill(tmp_path / "s", "str", ["a", "b"])
    fill(tmp_path / "i", "int", [10, 20])
    texts, ints = IdMap(tmp_path / "s", "str"), IdMap(tmp_path / "i", "int")
    with pytest.raises(InputError, match="id 'c'"):
        texts.rows(["a", "c"])
    with pytest.raises(InputError, match="row 2"):
        texts.external(np.array([0, 2]))
    with pytest.raises(InputError, match="row -1"):
        texts.external(np.array([-1]))
    with pytest.raises(InputError, match="id 30"):
        ints.row(30)
    for bad in ("ten", 1.5, None):
        with pytest.raises(InputError, match="whole numbers"):
            ints.row(bad)
    assert ints.row("20") == 1  # as it comes from a command line
    with pytest.raises(InputError, match="id ''"):
        texts.row("")
    with pytest.raises(InputError, match="no node has the id"):
        texts.row("x" * 600)
    with pytest.raises(InputError, match="no node has the id"):
        ints.row(2**64)
    texts.close()
    ints.close()


def test_ids_that_cannot_be_keys_are_refused(tmp_path) -> None:
    longest = "ü" * (MAX_ID_BYTES // 2)
    fill(tmp_path / "ok", "str", [longest])
    for bad, words in (
        (["a", "x" * 512], "'xxx.*512 bytes: at most 511"),
        (["", "b"], "empty"),
    ):
        with pytest.raises(InputError, match=words):
            fill(tmp_path / words[:3], "str", bad)
    rows = np.array([0, 1])
    for kind, column in (("str", pa.array(["a", None])), ("int", pa.array([1, None]))):
        with pytest.raises(InputError, match="1 node ids are missing"):
            write_ids(tmp_path / f"null {kind}", kind, [(column, rows)], [])


@pytest.mark.parametrize(
    ("kind", "external", "words"), [("int", [1, 5, 5, 9], "5 is a duplicate"), ("str", ["a", "c", "b"], "'b' is a duplicate")]
)
@pytest.mark.parametrize("puts", [2, 100])
def test_an_id_twice_or_out_of_order_is_named(tmp_path, monkeypatch, kind, external, words, puts) -> None:
    monkeypatch.setattr(module, "_PUTS", puts)
    column = np.array(external) if kind == "int" else external
    with pytest.raises(InputError, match=words):
        write_ids(tmp_path / "ids", kind, [(column, np.arange(len(external)))], [])


def test_the_two_orders_must_hold_the_same_number(tmp_path) -> None:
    with pytest.raises(InputError, match="1 ids in id order, but 2 in row order"):
        write_ids(tmp_path / "ids", "str", [(["a"], np.array([0]))], [(["a", "b"], np.array([0, 1]))])


def test_a_disk_that_takes_no_more_is_a_store_error(tmp_path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, limit[1]))  # files end there: the nearest thing to a full disk
    try:
        with pytest.raises(StoreError, match=r"cannot write .*ids.*free some space"):
            fill(tmp_path / "ids", "int", list(range(20_000)), chunk=20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_absent_ids_are_a_store_error(tmp_path) -> None:
    with pytest.raises(StoreError):
        IdMap(tmp_path / "nothing", "int")
    fill(tmp_path / "ids", "int", [1])
    with pytest.raises(StoreError, match="no ids of node type 'paper'"):
        IdMap(tmp_path / "ids", "int", "paper")


def test_without_ids_a_row_is_its_own_id() -> None:
    assert identity([2, 0], 3).tolist() == [2, 0]
    with pytest.raises(InputError, match="row 3"):
        identity(np.array([0, 3]), 3)
