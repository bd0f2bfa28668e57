"""Features ingested as bfloat16 and int8: against torch and float64; what is refused; checked, described and resumed."""

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr

from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.fingerprints import fingerprint
from ooc.stores.info import describe
from ooc.stores.ingest import IngestSpec, ingest, nodes
from ooc.stores.integrity import verify
from tests.forked import python
from tests.stores.ingest.test_resume import tree

N = 50


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    ring = np.arange(N)
    pq.write_table(pa.table({"src": ring, "dst": (ring + 1) % N}), tmp_path / "e.parquet")
    return {"edges": str(tmp_path / "e.parquet"), "num_nodes": N, "out": tmp_path / "s.ooc"}


def build(given: dict[str, Any], x: Any, **options: Any) -> Path:
    """A store of a ring with features `x`."""
    file = given["out"].with_name("x.npy")
    np.save(file, x)
    return ingest(IngestSpec(**given, features=[f"x={file}"], **options)).path


def numbers(*shape: int) -> Any:
    x = np.random.default_rng(3).standard_normal(shape) * np.logspace(-3, 3, shape[-1])
    x[..., 2] = 0
    return x


def stepped(x: Any) -> tuple[Any, Any]:
    """(step numbers, scale) of float32 values, in float64."""
    scale = (np.abs(x).max(axis=0).astype(np.float64) / 127).astype(np.float32)
    scale[scale == 0] = 1
    return np.clip(np.rint(x.astype(np.float64) / scale.astype(np.float64)), -127, 127).astype(np.int8), scale


@pytest.mark.parametrize("source", ["f4", "f8", ">f4", "f2", "i1", "?"])
@pytest.mark.parametrize("block_bytes", [150, 1 << 20])
def test_both_types_arrive(given: dict[str, Any], source: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BLOCK_BYTES", block_bytes)
    x = numbers(N, 7).clip(-100, 100).astype(source)
    single = x.astype(np.float32)
    group = zarr.open_group(build(given, x, dtype="int8"), mode="r")
    steps, scale = stepped(single)
    np.testing.assert_array_equal(group["node/node/x"], steps)
    np.testing.assert_array_equal(group["node/node/x_scale"], scale)
    np.testing.assert_allclose(group["node/node/x"][:] * group["node/node/x_scale"][:], single, atol=scale.max() * 0.501)
    shutil.rmtree(given["out"])
    group = zarr.open_group(build(given, x, dtype="bfloat16"), mode="r")
    want = torch.from_numpy(single).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(group["node/node/x"], want)
    assert group["node/node/x"].attrs["ooc_dtype"] == "bfloat16"


def test_what_is_normalised_is_scaled_afterwards(given: dict[str, Any]) -> None:
    x = numbers(N, 4)
    np.save(given["out"].with_name("t.npy"), np.arange(0, N, 2))
    store = build(given, x, dtype="int8", normalize="standard", train=given["out"].with_name("t.npy"))
    deviation = x[::2].std(axis=0)
    want = (x - x[::2].mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    with Dataset.open(store) as ds:
        got = np.empty((N, 4), np.float32)
        ds.rows("x").read(np.arange(N), got)
        scale = ds.encoding("x").scale
    assert (np.abs(got - want) <= scale * 0.501 + 1e-6).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("allow_nan", [False, True])
def test_int8_refuses_what_it_cannot_hold(
    given: dict[str, Any], value: float, allow_nan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "BLOCK_BYTES", 300)
    x = numbers(N, 3)
    x[33, 1] = x[40, 0] = value
    with pytest.raises(InputError, match=r"x\.npy row 33 column 1 is NaN, .*cannot hold; correct it, or .*bfloat16") as caught:
        build(given, x, dtype="int8", allow_nan=allow_nan)
    assert "\n" not in str(caught.value)
    assert not list(given["out"].parent.glob("*.ooc*"))


def test_a_tables_column_is_named(given: dict[str, Any]) -> None:
    table = given["out"].with_name("n.csv")
    table.write_text("id,f\n" + "".join(f"{i},{'' if i == 4 else i}\n" for i in range(N)))
    del given["num_nodes"]
    with pytest.raises(InputError, match=r"n\.csv line 6 column f is NaN, infinite .* which int8 cannot hold"):
        ingest(IngestSpec(**given, nodes=str(table), x_cols="f", dtype="int8"))


def test_bfloat16_refuses_or_counts_what_is_not_finite(given: dict[str, Any]) -> None:
    x = numbers(N, 3).astype(np.float32)
    x[7, 2], x[8, 0] = 3.4e38, np.nan
    with pytest.raises(InputError, match=r"row 7 column 2 is NaN, infinite or beyond bfloat16, the first of 2 such"):
        build(given, x, dtype="bfloat16")
    file = given["out"].with_name("x.npy")
    spec = IngestSpec(**given, features=[f"x={file}"], dtype="bfloat16", allow_nan=True)
    assert ingest(spec).non_finite == 2
    with Dataset.open(spec.out) as ds:
        got = np.empty((N, 3), np.float32)
        ds.rows("x").read(np.arange(N), got)
        assert np.isposinf(got[7, 2])
        assert np.isnan(got).sum() == np.isnan(got[8, 0]) == 1


def test_a_feature_with_the_name_of_the_scales_is_refused(given: dict[str, Any]) -> None:
    for features in (["x=a.npy", "x_scale=b.npy"], ["x_scale=b.npy"]):
        more = {} if len(features) == 2 else {"nodes": "n.csv", "x_cols": "f"}
        with pytest.raises(ConfigError, match="with `dtype='int8'` x's scales have that name"):
            IngestSpec(**given, features=features, dtype="int8", **more)
        IngestSpec(**given, features=features, **more)


@pytest.mark.parametrize(("dtype", "shown"), [("bfloat16", "bfloat16"), ("int8", "int8 scaled"), ("float16", "float16")])
def test_info_tells_the_type_and_a_store_is_whole(given: dict[str, Any], dtype: str, shown: str) -> None:
    store = build(given, numbers(N, 3), dtype=dtype)
    size = 1 if dtype == "int8" else 2
    assert describe(store)["arrays"]["node/node/x"] == {"dtype": shown, "shape": [N, 3], "bytes": N * 3 * size}
    assert verify(store) == []
    with Dataset.open(store) as ds:
        assert (ds.names, ds.num_features) == (["x"], 3)


def test_damaged_and_missing_scales_are_named(given: dict[str, Any]) -> None:
    store = build(given, numbers(N, 3), dtype="int8")
    before = fingerprint(store)
    shard = store / "node/node/x_scale/c/0"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(bytes(content))
    (damage,) = verify(store)
    assert str(damage).startswith("node/node/x_scale chunk 0 (rows 0 to 2): the checksum")
    for part in (store / "node/node/x_scale", store / "checksums/node/node/x_scale"):
        shutil.rmtree(part)
    (damage,) = verify(store)
    assert (damage.array, "x_scale, the scales of int8 rows, cannot be read" in damage.message) == ("node/node/x", True)
    assert fingerprint(store) != before


def test_the_fingerprint_covers_type_and_scale(given: dict[str, Any]) -> None:
    found = set()
    for x in (numbers(N, 3), 2 * numbers(N, 3)):  # the same step numbers at other scales
        found.add(fingerprint(build(given, x, dtype="int8")))
        shutil.rmtree(given["out"])
    store = build(given, numbers(N, 3), dtype="bfloat16")
    found.add(fingerprint(store))
    zarr.open_array(store / "node/node/x", mode="r+").attrs.clear()
    found.add(fingerprint(store))
    assert len(found) == 4


KILLED = """
import os, signal, sys
from ooc.stores.ingest import IngestSpec, ingest, nodes

out, edges, x, at, many = sys.argv[1:6]
nodes.BLOCK_BYTES = 300
seen = 0
def die(step, done, total):
    global seen
    seen += step == at
    if seen == int(many):
        os.kill(os.getpid(), signal.SIGKILL)
spec = IngestSpec(out=out, edges=edges, num_nodes=50, features=["x=" + x], dtype="int8")
print(*ingest(spec, die).resumed)
"""


@pytest.mark.slow
def test_a_killed_ingest_of_int8_resumes_to_the_same_bytes(given: dict[str, Any]) -> None:
    folder = given["out"].parent
    np.save(folder / "x.npy", numbers(N, 3))

    def run(out: str, at: str = "", many: int = -1) -> subprocess.CompletedProcess[str]:
        return python("-c", KILLED, folder / out, given["edges"], folder / "x.npy", at, str(many))

    assert run("want.ooc").returncode == 0
    for at, many in (("scales", 2), ("features x", 1), ("features x", 3)):
        assert run("got.ooc", at, many).returncode == -signal.SIGKILL
        assert not (folder / "got.ooc").exists()
        again = run("got.ooc")
        assert again.stdout.split() == ["gather", "scan", "ids", "graph"], again.stderr
        assert tree(folder / "got.ooc") == tree(folder / "want.ooc")
        shutil.rmtree(folder / "got.ooc")
