"""Batches of events against the edges in plain Python; negatives; EdgeBank; no look into the future."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import TemporalData

import ooc
from ooc.metrics.links import EdgeBank
from ooc.sampling.negatives import GivenNegatives, HistoricalNegatives, RandomNegatives, negatives_of
from ooc.sampling.temporal_neighbor import TemporalIndex
from ooc.sampling.time_windows import chronological
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.events import EventBlock
from ooc.stores.graph import Graph
from tests.ooc.temporal_stores import Edges
from tests.waiting import no_threads

SPAN = 150  # so that many events share a time


@pytest.fixture(scope="module")
def edges() -> Edges:
    return Edges(span=SPAN)


@pytest.fixture(scope="module")
def store(edges: Edges, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edges.store(tmp_path_factory.mktemp("events"), undirected=True)


def test_batches_are_the_events_in_order_and_times_stay_whole(store: Path, edges: Edges) -> None:
    with ooc.open(store) as ds:
        loader = ooc.EventLoader(ds, 32, num_neighbors=[])
        found = list(loader)
        assert len(found) == len(loader)
        for name, want in (("src", edges.src), ("dst", edges.dst), ("t", edges.time), ("msg", edges.msg)):
            np.testing.assert_array_equal(np.concatenate([getattr(batch, name) for batch in found]), want)
        assert all(isinstance(batch, TemporalData) for batch in found)
        for before, after in pairwise(found):
            assert before.t[-1] < after.t[0]
            assert len(before.src) >= 32
        sizes = [len(batch.src) for batch in ooc.EventLoader(ds, 32, num_neighbors=[], whole_times=False)]
        assert sizes == [32] * 12 + [16]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["t", "id", "src_"])
def test_a_column_does_not_take_a_fields_place(edges: Edges, tmp_path: Path, name: str) -> None:
    """ "t" is the events' time, "id" of past events would be edge_id; "src_" is only like one."""
    with ooc.open(edges.store(tmp_path, edge_features=[f"{name}=m0", "msg=m*"])) as ds:
        if name == "src_":
            batch = next(iter(ooc.EventLoader(ds, 32, num_neighbors=[2])))
            np.testing.assert_array_equal(batch.src, edges.src[: len(batch.src)])
            return
        with pytest.raises(ConfigError, match=f"column '{name}' would take the place of another field"):
            ooc.EventLoader(ds, 32)
        assert len(list(ooc.EventLoader(ds, 32, num_neighbors=[2], columns=["msg"])))


def test_wide_events_are_read_in_fewer_at_a_time(store: Path, edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    with ooc.open(store) as ds:
        read = ds.events.read

        def counted(first: int, last: int, *rest: Any) -> EventBlock:
            reads.append(last - first)
            return read(first, last, *rest)

        monkeypatch.setattr(ds.events, "read", counted)
        monkeypatch.setattr("ooc.loading.event_loader.BLOCK_BYTES", 100 * ds.events.row_bytes())
        found = list(ooc.EventLoader(ds, 7, num_neighbors=[]))
        np.testing.assert_array_equal(np.concatenate([batch.src for batch in found]), edges.src)
    assert max(reads) == 100


def test_events_of_one_time_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    with ooc.open(Edges(span=1).store(tmp_path)) as ds:
        loader = ooc.EventLoader(ds, 32, num_neighbors=[])
        loader._max_bytes = 1000
        with pytest.raises(BudgetError, match=r"a batch of 400 events \(those of one time stay together\) may need"):
            next(iter(loader))
        assert loader.moved.events == 0


def test_more_negatives_than_fit_are_refused_before_they_are_drawn(store: Path) -> None:
    with ooc.open(store) as ds:
        loader = ooc.EventLoader(ds, 32, negatives=RandomNegatives(0, ds.num_nodes, 10**9))
        with pytest.raises(BudgetError, match=r"a batch of 32 events may need 41\.7 TB of .*, fewer negatives or more memory"):
            next(iter(loader))


def test_loaders_in_time_share_a_shell(store: Path) -> None:
    with ooc.open(store) as ds:
        loaders = ooc.EventLoader(ds, 100, num_neighbors=[]), ooc.SnapshotLoader(ds, 100, by="count")
        for loader in loaders:
            count = len(list(loader))
            assert count in (4, 5)
            assert all(len(spans) == count for name, spans in loader.spans().items() if name == "collate")
            assert loader.times()["collate"]["items"] == count
        for make in (lambda: ooc.EventLoader(ds, prefetch=0), lambda: ooc.SnapshotLoader(ds, 100, by="count", prefetch=0)):
            with pytest.raises(ConfigError, match="prefetch is how many are made in advance, 1 or more, not 0"):
                make()


def test_the_past_is_the_reference(store: Path, edges: Edges) -> None:
    """Both directions count; strictly before; the latest three, of these the latest two each."""
    with ooc.open(store) as ds:
        seen = 0
        for batch in ooc.EventLoader(ds, 50, num_neighbors=[3, 2], negatives=RandomNegatives(0, 30)):
            count = len(batch.src)
            queries = torch.cat([batch.src, batch.dst, batch.neg_dst])
            hops = batch.num_sampled_nodes
            node = batch.n_id[batch.entry].numpy()
            np.testing.assert_array_equal(node[: hops[0]], queries)
            np.testing.assert_array_equal(batch.entry_t[: hops[0]], torch.cat([batch.t] * 3))
            np.testing.assert_array_equal(batch.entry_query[: hops[0]], np.tile(np.arange(count), 3))
            assert len(set(batch.n_id.tolist())) == len(batch.n_id)
            np.testing.assert_array_equal(batch.x, edges.x[batch.n_id])
            source, target = batch.edge_index.numpy()
            edge_id = batch.edge_id.numpy()
            np.testing.assert_array_equal(batch.edge_msg, edges.msg[edge_id])
            np.testing.assert_array_equal(batch.entry_t[source], edges.time[edge_id])
            assert (batch.entry_query[source] == batch.entry_query[target]).all()
            for entry in range(hops[0] + hops[1]):
                mine = edge_id[target == entry].tolist()
                v, t = node[entry], int(batch.entry_t[entry])
                past = [k for k in range(400) if edges.time[k] < t and v in (edges.src[k], edges.dst[k])]
                assert mine == past[-(3 if entry < hops[0] else 2) :]
                seen += len(mine)
        assert seen > 1000


def test_splits_are_those_of_pyg(store: Path, edges: Edges) -> None:
    held = TemporalData(src=torch.from_numpy(edges.src), dst=torch.from_numpy(edges.dst), t=torch.from_numpy(edges.time))
    with ooc.open(store) as ds:
        for val, test in ((0.15, 0.15), (0.1, 0.3), (0.0, 0.5)):
            sizes = [len(part.src) for part in held.train_val_test_split(val, test)]
            assert [last - first for first, last in chronological(ds.events, val, test).values()] == sizes
        batches = list(ooc.EventLoader(ds, 20, events="val"))
        first, last = chronological(ds.events)["val"]
        np.testing.assert_array_equal(torch.cat([batch.e_id for batch in batches]), np.arange(first, last))
        with pytest.raises(ConfigError, match="split 'dev' is unknown"):
            ooc.EventLoader(ds, 20, events="dev")
        with pytest.raises(ConfigError, match="shares of the events"):
            chronological(ds.events, 0.5, 0.5)


def test_negatives_and_draws_do_not_depend_on_batches(store: Path) -> None:
    with ooc.open(store) as ds:

        def drawn(batch_size: int, **options: Any) -> Any:
            options = {"num_neighbors": [], "negatives": RandomNegatives(0, 30, 2), "seed": 0, **options}
            loader = ooc.EventLoader(ds, batch_size, **options)
            return [np.concatenate([batch.neg_dst for batch in loader]) for _ in range(2)]

        first, second = drawn(16)
        assert (first != second).any(), "another epoch draws others"
        for other in (drawn(50), drawn(16, prefetch=1)):
            np.testing.assert_array_equal(first, other[0])
            np.testing.assert_array_equal(second, other[1])
        assert (first != drawn(16, seed=1)[0]).any()


def test_goes_on_where_it_stood(store: Path) -> None:
    with ooc.open(store) as ds:

        def make() -> Any:
            options: dict[str, Any] = {"num_neighbors": [2], "negatives": RandomNegatives(0, 30), "seed": 0}
            return ooc.EventLoader(ds, 25, temporal_strategy="uniform", **options)

        whole, loader = make(), make()
        wanted = [*whole, *whole]
        taken = list(loader)
        for batch in loader:
            taken.append(batch)
            if len(taken) == len(loader) + 4:
                break
        other = make()
        other.load_state_dict(loader.state_dict())
        taken += list(other)
        assert len(taken) == len(wanted)
        for a, b in zip(taken, wanted, strict=True):
            for name in ("e_id", "neg_dst", "n_id", "entry", "edge_id", "x"):
                assert torch.equal(getattr(a, name), getattr(b, name)), name
        with pytest.raises(ConfigError, match="batch_size was 25 and is 26 now"):
            ooc.EventLoader(ds, 26, temporal_strategy="uniform", num_neighbors=[2]).load_state_dict(loader.state_dict())
        wrong: tuple[dict[str, Any], ...] = {"batch_size": 2.5}, {"batch_size": "a"}, {"num_neighbors": 3}
        for given in wrong:
            with pytest.raises(ConfigError, match=f"{next(iter(given))} (is a whole number|must be a list)"):
                ooc.EventLoader(ds, **given)
        one = iter(make())
        next(one)
        one.close()
    assert no_threads()


def test_the_future_changes_no_batch(tmp_path: Path, edges: Edges) -> None:
    """Events from some time on are replaced by others: all batches before are the same, to the bit."""
    now, found, drawn = 90, [], 0
    for k in range(2):
        other = Edges(span=SPAN)
        late = other.time >= now
        if k:
            rng = np.random.default_rng(5)
            order = rng.permutation(np.flatnonzero(late))
            for name in ("src", "dst", "msg"):
                getattr(other, name)[late] = getattr(other, name)[order]
        (tmp_path / str(k)).mkdir()
        with ooc.open(other.store(tmp_path / str(k), undirected=True)) as ds:
            negatives = negatives_of(ds, "historical", 1)
            options: dict[str, Any] = {
                "events": (0, int(np.flatnonzero(late)[0])),
                "strategy": "uniform",
                "num_neighbors": [3, 2],
                "seed": 0,
            }
            found.append(list(ooc.EventLoader(ds, 20, negatives=negatives, **options)))
            assert isinstance(negatives, HistoricalNegatives)
            drawn = negatives.drawn - negatives.random
    assert len(found[0]) > 5
    assert drawn > 100
    for a, b in zip(*found, strict=True):
        for name in ("src", "neg_dst", "n_id", "entry", "entry_t", "edge_index", "edge_id", "edge_msg", "x"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_how_features_are_stored_tells_nothing_of_later_events(tmp_path: Path, dtype: str) -> None:
    """Later events with values a thousand times as large: those before are stored as they were, to the bit."""
    found = []
    for k in range(2):
        edges = Edges(span=SPAN)
        late = edges.time >= 90
        edges.msg[late] *= 1000**k
        (tmp_path / str(k)).mkdir()
        with ooc.open(edges.store(tmp_path / str(k), dtype=dtype)) as ds:
            found.append(ds.events.read(0, int(np.flatnonzero(late)[0])).columns["msg"])
    assert np.array_equal(*found)
    assert np.allclose(found[0], edges.msg[~late], rtol=0.01)


def block_of(first: int, dst: Any, time: Any) -> EventBlock:
    dst = np.asarray(dst)
    return EventBlock(first, dst, dst, np.asarray(time), {}, 0)


def test_random_negatives_are_born_and_not_the_positive() -> None:
    birth = np.arange(10) * 10
    dst, time = np.arange(200) % 10, np.arange(200) % 100
    found = RandomNegatives(2, 10, 3, birth).draw(block_of(0, dst, time), np.zeros(200, np.int64), 7)
    assert found.shape == (200, 3)
    assert found.min() >= 2
    late = time >= 70  # there is more than one to choose from: no run of bad luck
    assert (birth[found[late]] <= time[late, None]).mean() > 0.99
    assert (found[late] != dst[late, None]).mean() > 0.99
    many = RandomNegatives(0, 5).draw(block_of(0, np.full(5000, 9), np.zeros(5000)), np.zeros(5000, np.int64), 1)
    np.testing.assert_allclose(np.bincount(many[:, 0], minlength=5), 1000, atol=150)
    with pytest.raises(ConfigError, match="at least two nodes"):
        RandomNegatives(3, 4)


def historical(src: Any, dst: Any, otherwise: RandomNegatives) -> HistoricalNegatives:
    """Of a graph in memory: both directions of every event, which are its number."""
    ends = np.stack([src, dst], axis=1)
    number = np.repeat(np.arange(len(src)), 2)
    graph = Graph.from_edges(ends.ravel(), ends[:, ::-1].ravel(), 40, edge_id=number)
    return HistoricalNegatives(TemporalIndex(graph), ArrayRows(np.asarray(src)), otherwise)


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60),
    ratio=st.integers(1, 3),
    key=st.integers(0, 2**63),
    data=st.data(),
)
def test_historical_negatives_are_pairs_of_the_sources_past(events: Any, ratio: int, key: int, data: st.DataObject) -> None:
    src, dst = np.array(events).T
    past = np.array([data.draw(st.integers(0, number)) for number in range(len(src))])
    block = EventBlock(0, src, dst, np.arange(len(src)), {}, 0)
    otherwise = RandomNegatives(10, 40, ratio)
    drawing = historical(src, dst, otherwise)
    found, random, fallen = drawing.draw(block, past, key), otherwise.draw(block, past, key), 0
    for k in range(len(src)):
        before = {int(dst[e]) for e in range(past[k]) if src[e] == src[k]} - {int(dst[k])}
        fallen += 0 if before else ratio
        assert set(found[k].tolist()) <= before if before else found[k].tolist() == random[k].tolist()
    assert (drawing.drawn, drawing.random) == (found.size, fallen)
    cut = len(src) // 2
    parts = [
        historical(src, dst, otherwise).draw(block.part(*ends), past[slice(*ends)], key) for ends in ((0, cut), (cut, len(src)))
    ]
    np.testing.assert_array_equal(np.concatenate(parts), found)
    last = np.arange(len(src)) >= past.max(initial=0)  # what no event of the block knows has other ends
    later = historical(np.where(last, src[::-1], src), np.where(last, dst[::-1], dst), otherwise)
    np.testing.assert_array_equal(later.draw(block, past, key), found)


def test_historical_negatives_are_of_each_past_event_alike_and_a_rare_one_is_found() -> None:
    src, dst = np.zeros(1000, np.int64), np.repeat([1, 2, 3, 4], [100, 200, 300, 400])
    drawing = historical(src, dst, RandomNegatives(10, 40))
    counts = np.bincount(drawing.draw(at_once(4), np.full(10_000, 600), 3)[:, 0])
    np.testing.assert_allclose(counts[1:], np.array([1, 2, 3]) * 10_000 / 6, rtol=0.1)
    assert drawing.random == 0
    for place, missed in ((990, 0), (10, 9500)):  # among the latest events, which are looked through; and where that is too far
        dst = np.ones(1000, np.int64)
        dst[place] = 2
        drawing = historical(src, dst, RandomNegatives(10, 40))
        found = drawing.draw(at_once(1), np.full(10_000, 1000), 3)[:, 0]
        assert drawing.random == np.count_nonzero(found != 2) >= missed
        assert found.max() == (39 if missed else 2)


def at_once(dst: int) -> EventBlock:
    """Many events from node 0 to the same other one."""
    return EventBlock(1000, np.zeros(10_000, np.int64), np.full(10_000, dst), np.arange(10_000), {}, 0)


def test_historical_negatives_want_both_directions(edges: Edges, tmp_path: Path) -> None:
    with ooc.open(edges.store(tmp_path)) as ds, pytest.raises(ConfigError, match="ingest it with `undirected=True`, or use"):
        negatives_of(ds, "historical", 1)


def test_negatives_of_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "n.npy", np.arange(12).reshape(6, 2))
    given = GivenNegatives(tmp_path / "n.npy", 100, 12)
    np.testing.assert_array_equal(given.draw(block_of(102, [0, 0], [0, 0]), np.zeros(2, np.int64), 0), [[4, 5], [6, 7]])
    with pytest.raises(InputError, match=r"negatives for events 100\.\.105, not for 105\.\.106"):
        given.draw(block_of(105, [0, 0], [0, 0]), np.zeros(2, np.int64), 0)
    with pytest.raises(InputError, match=r"row 5: 11 is not a node \(0\.\.10\)"):
        GivenNegatives(tmp_path / "n.npy", 0, 11).draw(block_of(4, [0, 0], [0, 0]), np.zeros(2, np.int64), 0)
    np.save(tmp_path / "f.npy", np.zeros(3))
    with pytest.raises(InputError, match="node ids"):
        GivenNegatives(tmp_path / "f.npy", 0, 11)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(InputError, match="not a readable npy file"):
        GivenNegatives(tmp_path / "text.npy", 0, 11)


def test_edgebank_is_a_set_of_pairs(edges: Edges) -> None:
    bank, known = EdgeBank(30), set[tuple[int, int]]()
    rng = np.random.default_rng(1)
    for first in range(0, 400, 37):
        src, dst = edges.src[first : first + 37], edges.dst[first : first + 37]
        others = rng.integers(0, 30, (len(src), 3))
        want = [[float((s, d) in known) for d in row] for s, row in zip(src.tolist(), others.tolist(), strict=True)]
        np.testing.assert_array_equal(bank.score(src[:, None], others), want)
        want = [float(pair in known) for pair in zip(src.tolist(), dst.tolist(), strict=True)]
        np.testing.assert_array_equal(bank.score(src, dst), want)
        bank.update(src, dst)
        known |= set(zip(src.tolist(), dst.tolist(), strict=True))
    assert len(known) > 200
