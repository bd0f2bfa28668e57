"""Windows and what they are to foresee against plain Python; carrying on disk against a dictionary; no look into the future."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ooc
from ooc.history.history import History
from ooc.history.rows import PrefetchedRows
from ooc.loading.collate import Gather
from ooc.runtime.buffers import Buffers
from ooc.sampling.negatives import RandomNegatives, negatives_of
from ooc.sampling.time_windows import windows
from ooc.stores.errors import BudgetError
from ooc.temporal.forecast_loader import ForecastLoader, ForecastWork, Inputs, window_pairs
from ooc.temporal.window_models import window_model
from ooc.temporal.window_task import WindowNet, carried, hand_on
from tests.ooc.temporal_stores import Edges
from tests.waiting import no_threads

CHANNELS = 8


@pytest.fixture(scope="module")
def edges() -> Edges:
    return Edges(span=10**6)


@pytest.fixture(scope="module")
def store(edges: Edges, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edges.store(tmp_path_factory.mktemp("forecasts"), undirected=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch's would wait for one another longer than such small sums take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class InRam:
    """What `History` is to be: every row as it was pushed last, looked up when it is the step's turn."""

    def __init__(self, nodes: int, widths: Any) -> None:
        self.rows = [np.zeros((nodes, width), np.float32) for width in widths]

    def fetch(self, step: int, ids: Any) -> PrefetchedRows:
        return PrefetchedRows(step, 0, ids, (), np.empty(0, np.int64))

    def pull(self, fetched: PrefetchedRows) -> Any:
        return tuple(rows[fetched.ids] for rows in self.rows)

    def push(self, step: int, ids: Any, rows: Any) -> None:
        for own, new in zip(self.rows, rows, strict=True):
            own[ids] = new


def make_loader(ds: Any, window: Any, stride: Any, carrier: Any, *, prefetch: int = 4, **settings: Any) -> ForecastLoader:
    inputs = Inputs(ds.stored("x"), Gather(ds.encoding("x")), {"msg": 3}, identity=4, key=5)
    work = ForecastWork(
        events=ds.events,
        columns=("msg",),
        inputs=inputs,
        label=None,
        y=ds.labels,
        weighted=False,
        both_ways=True,
        state_bytes=64,
        activations=lambda nodes, pairs: nodes,
        max_bytes=10**7,
        num_nodes=ds.num_nodes,
        max_activations=10**7,
        **settings,
    )
    found = windows(ds.events, window, stride, "count" if isinstance(window, int) else "time")
    return ForecastLoader(work, found, carrier, 10**7, torch.device("cpu"), prefetch)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("window", "stride"), [(60, None), (60, 20), (20, 60), (64, None), (64, 16), (16, 64)])
def test_forecasts_are_the_events_behind_each_window(
    store: Path, edges: Edges, tmp_path: Path, window: int, stride: int | None, ties: bool
) -> None:
    if ties:
        edges = Edges(span=150)
        store = edges.store(tmp_path)
    if window not in (16, 64):
        last = int(edges.time[-1])
        window, stride = (each if each is None else f"{each * last // 1000}ms" for each in (window, stride))  # type: ignore[assignment]
    with ooc.open(store) as ds:
        loader = make_loader(ds, window, stride, None)
        every = list(window_pairs(loader.windows, ds.events))
        with closing(loader.run(0, len(every), negatives=RandomNegatives(0, 30, 2), key=3)) as found:
            seen = list(found)
        assert len(seen) == len(every) > 3
        for ahead, each in zip(every, seen, strict=True):
            first, last = ahead.window.first, ahead.window.last
            own = sorted({*edges.src[first:last], *edges.dst[first:last]})
            assert each.node[: each.present].tolist() == own
            assert len(set(each.node.tolist())) == len(each.node)
            pairs = {(int(a), int(b)) for a, b in each.node[each.block.edge_index].T}
            there = {*zip(edges.src[first:last].tolist(), edges.dst[first:last].tolist(), strict=True)}
            assert pairs == there | {(b, a) for a, b in there}
            assert len(each.block.edge_index[0]) == 2 * (last - first)
            assert ahead.first >= last
            assert (edges.time[ahead.first : ahead.last] > edges.time[last - 1]).all()
            np.testing.assert_array_equal(each.node[each.src], edges.src[ahead.first : ahead.last])
            np.testing.assert_array_equal(each.node[each.dst], edges.dst[ahead.first : ahead.last])
            assert each.negative.shape == (ahead.last - ahead.first, 2)
            assert not (each.negative == each.dst[:, None]).any()
            wanted = {*each.src.tolist(), *each.dst.tolist(), *each.negative.flatten().tolist()}
            assert wanted >= set(range(each.present, len(each.node)))
            np.testing.assert_array_equal(each.y, edges.y[each.node[: each.present]])
        if stride is None or window == 64:
            targets = np.concatenate([np.arange(ahead.first, ahead.last) for ahead in every])
            ends = [ahead.window.last for ahead in every] + [edges.count]
            later = [np.arange(a, b)[edges.time[a:b] > edges.time[a - 1]] for a, b in pairwise(ends)]
            np.testing.assert_array_equal(targets, np.concatenate(later))


def test_inputs_are_features_identity_and_what_a_node_did(store: Path, edges: Edges) -> None:
    with ooc.open(store) as ds:
        loader = make_loader(ds, 64, None, None)
        with closing(loader.run(0, 3, negatives=RandomNegatives(0, 30), key=3)) as found:
            seen = list(found)
        identity: dict[int, Any] = {}
        for step, each in enumerate(seen):
            assert each.x.shape == (len(each.node), 5 + 4 + 2 * 4)
            np.testing.assert_array_equal(each.x[:, :5], edges.x[each.node])
            for place, node in enumerate(each.node.tolist()):
                assert torch.equal(each.x[place, 5:9], identity.setdefault(node, each.x[place, 5:9]))
                for begin, end in ((9, edges.src), (13, edges.dst)):
                    own = np.flatnonzero(end[64 * step : 64 * step + 64] == node) + 64 * step
                    mean = np.arcsinh(edges.msg[own]).mean(0) if len(own) else np.zeros(3)
                    np.testing.assert_allclose(each.x[place, begin], np.log1p(len(own)), rtol=1e-6)
                    np.testing.assert_allclose(each.x[place, begin + 1 : begin + 4], mean, atol=1e-6)
        drawn = torch.stack(list(identity.values()))
        assert len(torch.unique(drawn)) == drawn.numel()


def test_identity_has_mean_0_and_variance_1() -> None:
    rows = Inputs(None, None, {}, identity=50, key=1).rows(np.arange(2000), 0, np.empty((2, 0), np.int64), {}, Buffers(1))[0]
    assert abs(float(rows[:, :50].mean())) < 0.02
    assert abs(float(rows[:, :50].var()) - 1) < 0.02


FAMILIES: dict[str, dict[str, Any]] = {
    "recurrent": {"family": "recurrent", "conv": "gcn"},
    "roland": {"family": "roland", "conv": "sage"},
    "average": {"family": "roland", "conv": "gcn", "update": "average"},
    "evolvegcn": {"family": "evolvegcn"},
}


def train(
    ds: Any, family: str, carrier: Any, *, steps: int = 10**6, window: Any = 40, stride: Any = 20, **settings: Any
) -> Any:
    """(outputs and losses of every step, the model's parameters behind the last): two passes."""
    torch.manual_seed(0)
    loader = make_loader(ds, window, stride, carrier, **settings)
    net = WindowNet(window_model(in_channels=17, channels=CHANNELS, num_layers=2, **FAMILIES[family]), CHANNELS)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    negatives = negatives_of(ds, "historical", 1)
    found = []
    with closing(loader.run(0, 10**6, negatives=negatives, key=9)) as forecasts:
        for forecast in forecasts:
            outcome = net.outcome(forecast, carried(carrier, forecast))
            hand_on(carrier, 0, net, forecast, outcome)
            positive, negative = net.links(outcome.rows, forecast)
            loss = F.softplus(-positive).mean() + F.softplus(negative).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            now = [each.detach().clone() for each in outcome.carried]
            found.append((forecast.node[: forecast.present].clone(), positive.detach(), negative.detach(), loss.detach(), now))
    return found, [parameter.detach() for parameter in net.parameters()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(map(same, a, b))


@contextmanager
def on_disk(path: Path, ds: Any, family: str, engine: str, max_bytes: int) -> Iterator[Any]:
    widths = window_model(in_channels=17, channels=CHANNELS, num_layers=2, **FAMILIES[family]).widths
    if not widths:
        yield None
        return
    with closing(History.create(path, ds.num_nodes, widths, "float32", lag=0, max_bytes=max_bytes, engine=engine)) as history:
        yield history


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_carrying_on_disk_is_carrying_in_memory_to_the_bit(store: Path, tmp_path: Path, family: str) -> None:
    with ooc.open(store) as ds:
        widths = window_model(in_channels=17, channels=CHANNELS, num_layers=2, **FAMILIES[family]).widths
        wanted = train(ds, family, InRam(ds.num_nodes, widths))
        for number, (engine, prefetch, max_bytes) in enumerate([("pread", 4, 10**6), ("mmap", 1, 1), ("pread", 8, 3000)]):
            with on_disk(tmp_path / f"{number}", ds, family, engine, max_bytes) as carrier:
                assert same(train(ds, family, carrier, prefetch=prefetch), wanted), (engine, prefetch, max_bytes)
    assert no_threads()


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("window", "stride"), [(40, 20), ("50s", "25s")])
def test_the_future_changes_nothing(edges: Edges, store: Path, tmp_path: Path, family: str, window: Any, stride: Any) -> None:
    """Ends and columns of the events behind a window's end are others: all that came before is the same to the bit."""
    with ooc.open(store) as ds:
        every = list(make_loader(ds, window, stride, None).window_pairs())
        step = len(every) // 2
        known = every[step].last
        other = Edges(span=10**6)
        rng = np.random.default_rng(1)
        order = known + rng.permutation(edges.count - known)
        for name in ("src", "dst", "msg"):
            getattr(other, name)[known:] = getattr(other, name)[order]
        with on_disk(tmp_path / "a", ds, family, "pread", 10**6) as carrier:
            before, _ = train(ds, family, carrier, window=window, stride=stride)
    with ooc.open(other.store(tmp_path, undirected=True)) as ds, on_disk(tmp_path / "b", ds, family, "pread", 10**6) as carrier:
        after, _ = train(ds, family, carrier, window=window, stride=stride)
    assert same(before[: step + 1], after[: step + 1])
    following = before[step + 1], after[step + 1]
    whole = every[step + 1].window.last <= known  # the next window is known whole, what it is to foresee is not
    assert not whole or same(following[0][4], following[1][4])
    assert not same(before, after)


def test_a_window_that_does_not_fit_is_refused(store: Path) -> None:
    with ooc.open(store) as ds:
        loader = make_loader(ds, 64, None, None)
        for field, value in (("max_bytes", 4000), ("max_bytes", 20_000), ("max_activations", 1)):
            work = loader.work.__class__(**{**loader.work.__dict__, field: value})
            other = ForecastLoader(work, loader.windows, None, 10**7, torch.device("cpu"))
            with (
                pytest.raises(BudgetError, match=r"window 0 has 64 events and the next one 64 more, which (may )?need"),
                closing(other.run(0, 3, negatives=RandomNegatives(0, 30))) as found,
            ):
                list(found)
        many = RandomNegatives(0, 30, 10**9)  # refused before they are drawn: they would be 512 GB
        with (
            pytest.raises(
                BudgetError, match=r"window 0 has 64 events .* may need 3\.\d+ TB of .*, fewer negatives or more memory"
            ),
            closing(make_loader(ds, 64, None, None).run(0, 3, negatives=many)) as found,
        ):
            list(found)
    assert no_threads()
