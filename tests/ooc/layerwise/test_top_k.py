"""The best items of every source against a sort of all scores."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import ooc
from ooc.layerwise import top_k as module
from ooc.models.edge_decoders import DistMultDecoder, DotDecoder, MLPDecoder
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import BudgetError, ConfigError, InputError, OocError
from tests.conftest import MakeStore

N, WIDTH = 90, 4


@pytest.fixture
def rows() -> np.ndarray:
    """Small whole numbers: scores are exact, and many are equal."""
    return np.random.default_rng(0).integers(-2, 3, (N, WIDTH)).astype(np.float32)


def expected(scores: np.ndarray, sources: Any, items: Any, known: set[tuple[int, int]], k: int) -> list[list[int]]:
    """By descending score, then by id."""
    best = []
    for u in sources:
        allowed = [v for v in items if v != u and (u, v) not in known]
        best.append(sorted(allowed, key=lambda v, u=u: (-scores[u, v], v))[:k])
    return best


def lists(found: Any) -> list[list[int]]:
    return [[v for v in row if v >= 0] for row in found.item.tolist()]


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCES", 7)
    monkeypatch.setattr(module, "ITEMS", 11)
    monkeypatch.setattr(module, "_EDGES_AT_ONCE", 50)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("undirected", [False, True])
def test_the_lists_are_those_of_a_sort(rows: np.ndarray, make_store: MakeStore, undirected: bool) -> None:
    src, dst = np.random.default_rng(1).integers(0, N, (2, 500))
    if undirected:
        src, dst = np.concatenate([src, dst]), np.concatenate([dst, src])
    scores, links = rows @ rows.T, set(zip(src.tolist(), dst.tolist(), strict=True))
    sources, items = np.array([5, 80, 5, 2, *range(30, 50)]), np.arange(20, 85)
    with ooc.open(make_store(num_nodes=N, src=src, dst=dst, undirected=undirected)) as ds:
        assert ds.manifest.undirected == undirected
        for known in (ds, np.stack([src, dst]), torch.from_numpy(np.stack([src, dst]))):
            found = ooc.top_k(rows, 9, sources=sources, items=items, known=known)
            assert lists(found) == expected(scores, sources, items, links, 9)
            assert np.array_equal(found.source, sources)
            assert np.array_equal(found.score, np.take_along_axis(scores[sources], found.item, 1))
    every = ooc.top_k(torch.from_numpy(rows).bfloat16(), N + 5)
    assert lists(every) == expected(scores, range(N), range(N), set(), N + 5)
    assert (every.item[:, -6:] == -1).all()
    assert (every.score[:, -6:] == -np.inf).all()


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("decoder", [MLPDecoder(WIDTH), DistMultDecoder(WIDTH)])
def test_decoders_and_rows_on_disk(rows: np.ndarray, tmp_path: Path, decoder: torch.nn.Module) -> None:
    zarr.create_array(tmp_path / "rows.zarr", data=rows)
    x = torch.from_numpy(rows)
    with torch.no_grad():
        scores = decoder(x[:, None], x[None]).numpy()
    found = ooc.top_k(tmp_path / "rows.zarr", 3, decoder=decoder)
    best = -np.sort(-np.where(np.eye(N, dtype=bool), -np.inf, scores))[:, :3]
    np.testing.assert_allclose(found.score, best, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.score, np.take_along_axis(scores, found.item, 1), rtol=1e-5, atol=1e-6)


def test_the_lists_do_not_depend_on_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOURCES", 32)
    rows = np.random.default_rng(3).standard_normal((N, 16), dtype=np.float32)
    whole = ooc.top_k(rows, 5)
    monkeypatch.setattr(module, "_room", lambda *_: 32 * (12 * 5 + 8 * 16))
    parts = ooc.top_k(rows, 5)
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("undirected", [None, False, True])
def test_known_links_count_for_the_memory(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, undirected: bool | None
) -> None:
    """Sources 0 to 3 have 5 known links each, the others none."""
    monkeypatch.setattr(module, "SOURCES", 2)
    src, dst = np.repeat(np.arange(4), 5), np.tile(np.arange(4, 9), 4)
    known, plain, links = module.KnownLinks(np.stack([src, dst])), 2 * (12 * 3 + 8 * WIDTH), 10 * module._LINK_BYTES
    rows = ArrayRows(np.zeros((10, WIDTH), np.float32))
    with ExitStack() as opened:
        if undirected is not None:
            more = (np.concatenate([src, dst]), np.concatenate([dst, src])) if undirected else (src, dst)
            store = make_store(num_nodes=10, src=more[0], dst=more[1], undirected=undirected)
            known = module.KnownLinks(None, opened.enter_context(ooc.open(store)).edges())
        sources = np.array([0, 1, 2, 3, 9, 9, 9])
        ranking = module.Ranking(rows, rows, DotDecoder(), np.arange(10), known, same=True)
        assert known.counts(sources).tolist() == [5, 5, 5, 5, 0, 0, 0]
        monkeypatch.setattr(module, "_room", lambda *_: 2 * plain + links)
        assert list(ranking.groups(sources, 3, None)) == [slice(0, 2), slice(2, 6), slice(6, 7)]
        monkeypatch.setattr(module, "_room", lambda *_: plain + links - 1)
        with pytest.raises(BudgetError, match="2 sources at a time, which have up to 10 known links, takes"):
            ranking.groups(sources, 3, None)


def test_what_does_not_fit_is_refused(rows: np.ndarray, make_store: MakeStore, tmp_path: Path) -> None:
    with ooc.open(make_store(num_nodes=9, num_edges=20)) as other:
        for given, error, words in (
            ({"rows": rows.astype(int)}, ConfigError, "must be embeddings"),
            ({"k": 0}, ConfigError, "k must be a whole number"),
            ({"k": "ten"}, ConfigError, "k must be a whole number"),
            ({"sources": [0, N]}, InputError, rf"sources\[1\] is {N}, which is no node"),
            ({"items": [0.5]}, ConfigError, "items must be node ids"),
            ({"decoder": "mlp"}, ConfigError, "has parameters: give the trained module"),
            ({"decoder": "cosine"}, ConfigError, "decoder 'cosine' is unknown"),
            ({"known": other}, ConfigError, f"known has 9 nodes and rows are of {N}"),
            ({"known": np.zeros((3, 2), int)}, ConfigError, r"pairs \[2, e\]"),
            ({"known": [[0], [N]]}, InputError, rf"known\[1\]\[0\] is {N}, which is no node"),
            ({"decoder": 3}, ConfigError, "decoder must be 'dot' or a module, not 3"),
            ({"rows": tmp_path / "none.zarr"}, InputError, "is no Zarr array"),
            ({"memory": "1MB"}, BudgetError, "sources at a time, .* takes .* of memory, more than 1 MB"),
            ({"rows": np.full((N, 2), np.nan, np.float32)}, OocError, "scored a pair with NaN"),
        ):
            with pytest.raises(error, match=words):
                ooc.top_k(**{"rows": rows, "k": 2, **given})
