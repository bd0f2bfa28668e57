"""Short types of features: conversions against numpy, torch and float64 to the bit; arrays that are not what they say."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ooc.stores.arrays.encoding import DTYPE, SCALE, DecodedRows, Encoding, encoding_of, scale_of, to_bfloat16, to_int8
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.dataset import Dataset
from ooc.stores.errors import StoreError
from tests.conftest import MakeStore

ALL_BITS = np.arange(2**16, dtype=np.uint16)
NO_SCALE = np.empty(0, np.float32)
BFLOAT16 = Encoding(np.dtype(np.uint16), "bfloat16", NO_SCALE)
FLOAT16 = Encoding.plain(np.dtype(np.float16))
any_float32 = arrays.arrays(np.uint32, st.integers(0, 300)).map(lambda bits: bits.view(np.float32))


def bits(values: Any) -> Any:
    return np.asarray(values).view(np.uint32)


def gathered(encoding: Encoding, rows: Any, at: Any) -> Any:
    out = np.empty((len(at), *rows.shape[1:]), encoding.dtype)
    encoding.gather(rows, at, out)
    return out


def test_every_float16_and_bfloat16_is_its_value_to_the_bit() -> None:
    at = np.arange(2**16)
    half = ALL_BITS.view(np.float16)[:, None]
    np.testing.assert_array_equal(bits(gathered(FLOAT16, half, at)), bits(half.astype(np.float32)))
    wide = torch.from_numpy(ALL_BITS.copy()).view(torch.bfloat16).float().numpy()[:, None]
    np.testing.assert_array_equal(bits(gathered(BFLOAT16, ALL_BITS[:, None], at)), bits(wide))


def test_subnormal_float16_keep_their_value_where_the_processor_flushes_those_of_float32() -> None:
    half = np.arange(1, 1024, dtype=np.uint16).view(np.float16)[:, None]
    want = half.astype(np.float32)
    torch.set_flush_denormal(True)
    try:
        got = gathered(FLOAT16, half, np.arange(len(half)))
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(bits(got), bits(want))


@settings(deadline=None)
@given(any_float32)
def test_bfloat16_rounds_as_torch_does(values: Any) -> None:
    want = torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()
    got = gathered(BFLOAT16, to_bfloat16(values)[:, None], np.arange(len(values)))[:, 0]
    known = ~np.isnan(values)
    np.testing.assert_array_equal(bits(got[known]), bits(want[known]))
    assert np.isnan(got[~known]).all()


finite = arrays.arrays(
    np.float32, st.tuples(st.integers(0, 20), st.integers(1, 9)), elements=st.floats(width=32, allow_nan=False)
)


@settings(deadline=None)
@given(finite.map(lambda x: np.where(np.isfinite(x), x, np.float32(7))))
def test_int8_is_the_nearest_step_in_float64(values: Any) -> None:
    scale = scale_of(np.abs(values).max(axis=0, initial=0))
    stored = to_int8(values, scale)
    step = scale.astype(np.float64)
    np.testing.assert_array_equal(stored, np.clip(np.rint(values.astype(np.float64) / step), -127, 127))
    got = gathered(Encoding(np.dtype(np.int8), "int8", scale), stored, np.arange(len(values)))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(bits(got), bits((stored.astype(np.float64) * step).astype(np.float32)))
    normal = np.abs(values).max(axis=0, initial=0) > 1e-30
    error = np.abs(got.astype(np.float64) - values)
    assert (error <= step * 0.5001)[:, normal].all()
    assert (scale[~values.any(axis=0)] == 1).all()


def test_the_largest_float32_stays_finite() -> None:
    values = np.array([[np.finfo(np.float32).max], [-np.finfo(np.float32).max]])
    scale = scale_of(np.abs(values).max(axis=0))
    got = gathered(Encoding(np.dtype(np.int8), "int8", scale), to_int8(values, scale), np.arange(2))
    np.testing.assert_allclose(got, values, rtol=1e-6)


@settings(deadline=None)
@given(
    name=st.sampled_from(["float32", "float16", "bfloat16", "int8"]),
    shape=st.sampled_from([(), (1,), (5,), (2, 3), (33,)]),
    at=st.lists(st.integers(0, 19), max_size=40),
    kind=st.sampled_from(["int32", "int64"]),
)
def test_gathering_is_indexing_of_the_values(name: str, shape: tuple[int, ...], at: list[int], kind: str) -> None:
    rng = np.random.default_rng(len(at))
    stored, encoding = encoded(name, rng.standard_normal((20, *shape), dtype=np.float32))
    values = gathered(encoding, stored, np.arange(20))
    index = np.array(at, kind)
    np.testing.assert_array_equal(gathered(encoding, stored, index), values[index])
    rows, ids = DecodedRows(ArrayRows(stored), encoding), index.astype(np.int64)
    out = np.full((50, *shape), 9, np.float32)
    places = rng.permutation(50)[: len(at)]
    assert rows.read(ids, out, places) == 0
    np.testing.assert_array_equal(out[places], values[index])
    assert (np.delete(out, places, axis=0) == 9).all()
    part = out[: len(at)]
    assert rows.submit(ids, part).result() == 0
    np.testing.assert_array_equal(part, values[index])
    with pytest.raises(IndexError, match="row 20 is out of range"):
        rows.read(np.array([20]), out[:1])
    rows.close()


def encoded(name: str, x: Any) -> tuple[Any, Encoding]:
    if name == "bfloat16":
        return to_bfloat16(x), BFLOAT16
    if name == "int8":
        flat = x.reshape(len(x), -1)
        scale = scale_of(np.abs(flat).max(axis=0))
        return to_int8(flat, scale).reshape(x.shape), Encoding(np.dtype(np.int8), "int8", scale)
    return x.astype(name), Encoding.plain(np.dtype(name))


def test_decoded_rows_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.stores.arrays.encoding._PIECE_BYTES", 7 * 5 * 6)
    x = np.random.default_rng(0).standard_normal((40, 5), dtype=np.float32)
    write_array(tmp_path, "x", to_bfloat16(x), {DTYPE: "bfloat16"})
    stored = open_zarr_rows(tmp_path, "x")
    rows = DecodedRows(stored, encoding_of(stored, tmp_path))
    ids, out = np.random.default_rng(1).integers(0, 40, 100), np.empty((100, 5), np.float32)
    assert rows.read(ids, out) > 0
    np.testing.assert_array_equal(out, torch.from_numpy(x).bfloat16().float().numpy()[ids])
    rows.close()


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """A Zarr array of int8 rows with its scales beside it."""
    write_array(tmp_path, "x", np.arange(-30, 30, dtype=np.int8).reshape(20, 3), {DTYPE: "int8", SCALE: "x_scale"})
    write_array(tmp_path, "x_scale", np.array([1, 0.5, 2], np.float32))
    return tmp_path


def test_scales_are_found_beside_the_array(scaled: Path) -> None:
    encoding = encoding_of(open_zarr_rows(scaled, "x"), scaled)
    assert (encoding.name, encoding.shown, encoding.scale.tolist()) == ("int8", "int8 scaled", [1, 0.5, 2])


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "x_scale, the scales of int8 rows, cannot be read"),
        (np.ones(4, np.float32), r"holds float32\[4\]: it needs one positive float32 for each of 3 columns"),
        (np.array([1, 0, 1], np.float32), "one positive float32"),
        (np.array([1, np.nan, 1], np.float32), "one positive float32"),
        (np.ones(3), r"holds float64\[3\]"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scaled: Path, scale: Any, message: str) -> None:
    for part in (scaled / "x_scale", scaled / "checksums" / "x_scale"):
        shutil.rmtree(part)
    if scale is not None:
        write_array(scaled, "x_scale", scale)
    with pytest.raises(StoreError, match=message) as caught:
        encoding_of(open_zarr_rows(scaled, "x"), scaled)
    assert "\n" not in str(caught.value)


def test_scaled_rows_that_name_no_scales_are_refused(tmp_path: Path) -> None:
    write_array(tmp_path, "x", np.zeros((3, 2), np.int8), {DTYPE: "int8"})
    with pytest.raises(StoreError, match=r"hold scaled int8, but lacks the attribute ooc_scale") as caught:
        encoding_of(open_zarr_rows(tmp_path, "x"), tmp_path)
    assert "None" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_type_of_another_ooc_is_refused(tmp_path: Path) -> None:
    write_array(tmp_path, "x", np.zeros((3, 2), np.uint8), {DTYPE: "float8"})
    with pytest.raises(StoreError, match="'float8' in uint8, which this version of ooc does not know: upgrade ooc"):
        encoding_of(open_zarr_rows(tmp_path, "x"), tmp_path)


@pytest.mark.parametrize("in_memory", [False, True])
def test_features_someone_else_wrote_bring_their_scales(make_store: MakeStore, scaled: Path, in_memory: bool) -> None:
    store = make_store(num_nodes=20)
    with Dataset.open(store, in_memory=in_memory, features={"x": scaled / "x"}) as ds:
        out = np.empty((20, 3), np.float32)
        ds.rows("x").read(np.arange(20), out)
        np.testing.assert_array_equal(out, np.arange(-30, 30).reshape(20, 3) * [1, 0.5, 2])
        assert (ds.encoding("x").name, ds.stored("x").dtype, ds.num_features) == ("int8", np.int8, 3)
        before = ds.fingerprint
    zarr.open_array(scaled / "x_scale", mode="r+")[:] = np.float32([1, 0.5, 4])
    with Dataset.open(store, features={"x": scaled / "x"}) as ds:
        assert ds.fingerprint != before
