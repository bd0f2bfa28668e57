"""`verify` finds every flipped byte and names the chunk; the fingerprint follows the data."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

from ooc.stores.dataset import Dataset
from ooc.stores.errors import StoreError
from ooc.stores.fingerprints import array_names, file_crc32c, fingerprint
from ooc.stores.info import describe
from ooc.stores.integrity import verify
from ooc.stores.metadata import read_manifest


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(make_store) -> Path:
    return make_store(
        num_nodes=1000, weight=True, external=list(range(5, 1005)), x=np.arange(1000 * 512, dtype=np.float32).reshape(1000, 512)
    )


def test_a_sound_store_has_no_damage_and_progress_reaches_the_end(store) -> None:
    seen: list[tuple[int, int]] = []
    assert verify(store, lambda done, total: seen.append((done, total))) == []
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


def test_a_flipped_byte_names_array_chunk_and_rows(store) -> None:
    chunk_rows = zarr.open_array(store / "node/node/x").chunks[0]
    assert chunk_rows < 1000  # two chunks, the last one padded
    flip(store / "node/node/x/c/0/0", chunk_rows * 512 * 4 + 9)
    (damage,) = verify(store)
    assert (damage.array, damage.chunk, damage.rows) == ("node/node/x", 1, (chunk_rows, 1000))
    assert str(damage).startswith(f"node/node/x chunk 1 (rows {chunk_rows} to 999): ")


def test_every_array_and_the_ids_are_covered(store) -> None:
    names = array_names(store)
    assert {"graph/indptr", "graph/weight_sum", "node/node/split", "node/node/y"} <= set(names)
    for name in names:
        shard = next(path for path in (store / name / "c").rglob("*") if path.is_file())
        flip(shard, 0)
        assert [each.array for each in verify(store)] == [name]
        flip(shard, 0)
    flip(store / "ids.lmdb/data.mdb", 5000)
    assert [each.array for each in verify(store)] == ["ids.lmdb"]
    (store / "ids.lmdb/data.mdb").unlink()
    assert "missing" in str(*verify(store))


@pytest.mark.parametrize("harm", ["footer", "short", "gone", "metadata", "metadata torn", "checksums"])
def test_harm_around_the_chunks_is_found(store, harm) -> None:
    shard = store / "node/node/y/c/0"
    if harm == "footer":
        flip(shard, shard.stat().st_size - 6)
    elif harm == "short":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif harm == "gone":
        shard.unlink()
    elif harm == "metadata":
        (store / "node/node/y/zarr.json").unlink()
    elif harm == "metadata torn":
        (store / "node/node/y/zarr.json").write_text('{"node_type"')
    else:
        flip(store / "checksums/node/node/y/c/0", 0)
    assert [each.array for each in verify(store)] == ["node/node/y"]


def test_an_array_of_another_length_is_found(store, make_store) -> None:
    other = make_store("other.ooc", num_nodes=999)
    for part in ("node/node/y", "checksums/node/node/y"):
        (store / part).rename(store / part.replace("/y", "/kept"))
        (other / part).rename(store / part)
    assert [each.message for each in verify(store) if each.array == "node/node/y"] == [
        "it has 999 rows, but the manifest says 1000"
    ]


def test_a_damaged_chunk_of_a_compressed_array_is_found(store) -> None:
    group = zarr.open_group(store, mode="r+")
    data = np.random.default_rng(0).random((1000, 4))
    group.create_array("node/node/z", data=data, chunks=(300, 4))
    assert verify(store) == []
    chunk = store / "node/node/z/c/2/0"
    chunk.write_bytes(chunk.read_bytes()[:50])
    (damage,) = verify(store)
    assert (damage.array, damage.chunk, damage.rows) == ("node/node/z", 2, (600, 900))


def test_what_is_no_store_cannot_be_verified(tmp_path) -> None:
    with pytest.raises(StoreError, match="no store"):
        verify(tmp_path / "absent")


def test_equal_input_gives_an_equal_store_byte_for_byte(make_store) -> None:
    one, other = (make_store(name, weight=True, external=["b", *map(str, range(49))]) for name in ("a.ooc", "b.ooc"))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    assert fingerprint(one) == fingerprint(other)


def test_the_fingerprint_follows_data_and_manifest(make_store) -> None:
    x = np.zeros((50, 8), np.float32)
    changed = x.copy()
    changed[49, 7] = 1e-30
    prints = [
        fingerprint(make_store(f"{i}.ooc", **given))
        for i, given in enumerate([{"x": x}, {"x": changed}, {"x": x, "undirected": True}])
    ]
    assert len(set(prints)) == 3


def test_describe_tells_what_is_there(store) -> None:
    told = describe(store)
    assert (told["num_nodes"], told["num_edges"], told["task"], told["num_classes"]) == (1000, 300, "multiclass", 3)
    assert told["splits"] == {"train": 600, "val": 200, "test": 200}
    assert told["has_ids"] is True
    assert told["arrays"]["node/node/x"] == {"dtype": "float32", "shape": [1000, 512], "bytes": 1000 * 512 * 4}
    assert told["fingerprint"] == fingerprint(store)
    assert told["bytes"] > 1000 * 512 * 4


def test_describing_a_truncated_store_says_where(store) -> None:
    (store / "node/node/x/c/0/0").write_bytes(b"short")
    with pytest.raises(StoreError, match="node/node/x"):
        describe(store)


def test_the_crc_of_a_file_is_crc32c(tmp_path) -> None:
    (tmp_path / "f").write_bytes(b"123456789")
    assert file_crc32c(tmp_path / "f") == "e3069283"  # the check value of the CRC catalogue


def test_the_manifest_records_the_ids_checksum(store) -> None:
    assert read_manifest(store).fingerprints["ids.lmdb"] == file_crc32c(store / "ids.lmdb/data.mdb")


def digits(file: Path) -> list[int]:
    """Positions of the digits in a file."""
    return [at for at, byte in enumerate(file.read_bytes()) if chr(byte).isdigit()]


def test_a_changed_digit_of_the_manifest_is_found(store) -> None:
    file = store / "zarr.json"
    sound = file.read_bytes()
    begin, end = sound.index(b'"ooc"'), sound.index(b'"ooc_checksums"')
    for at in [at for at in digits(file) if begin < at < end]:
        file.write_bytes(sound[:at] + str((int(chr(sound[at])) + 1) % 10).encode() + sound[at + 1 :])
        for use in (verify, Dataset.open):
            with pytest.raises(StoreError, match=r"zarr\.json is damaged: the manifest|format version"):
                use(store)
    file.write_bytes(sound)
    assert verify(store) == []


def test_a_changed_digit_of_an_arrays_metadata_is_found(store) -> None:
    for name in ("node/node/x", "graph/indices"):
        for file in (store / name / "zarr.json", store / "checksums" / name / "zarr.json"):
            sound = file.read_bytes()
            end = sound.index(b'"attributes"')  # which are words for people
            for at in [at for at in digits(file) if at < end]:
                file.write_bytes(sound[:at] + str((int(chr(sound[at])) + 1) % 10).encode() + sound[at + 1 :])
                assert name in [each.array for each in verify(store)], (file, at)
                with pytest.raises(StoreError):
                    Dataset.open(store)
            file.write_bytes(sound)
    assert verify(store) == []


def test_other_tools_may_add_attributes_and_replace_arrays(store) -> None:
    group = zarr.open_group(store, mode="r+")
    group.attrs["title"] = "papers"
    group["node/node/x"].attrs["units"] = "m"
    values = group["node/node/y"][:]
    shutil.rmtree(store / "checksums/node/node/y")
    group.create_array("node/node/y", data=values, chunks=(100,), overwrite=True)
    assert verify(store) == []
    with Dataset.open(store) as ds:
        assert (ds.labels == values).all()


def test_stores_without_checksums_of_metadata_open(store) -> None:
    metadata = json.loads((store / "zarr.json").read_bytes())
    del metadata["attributes"]["ooc_checksums"]
    (store / "zarr.json").write_text(json.dumps(metadata))
    assert verify(store) == []
    Dataset.open(store).close()
