"""Sweeps over all nodes against the same model run at once on the whole graph in memory."""

from contextlib import closing
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from ooc.graph.blocks import Block
from ooc.layerwise import edge_tiles
from ooc.layerwise import executor as layerwise_executor
from ooc.layerwise import pass_plan as layerplan
from ooc.layerwise.edge_tiles import Tiles
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.layerwise.row_files import Files
from ooc.layerwise.shape import ALLOWED, besides_bytes, gathered_bytes, shape_of
from ooc.models.builders import build_model, full_blocks
from ooc.models.layers import run_model
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.stores.process import resident_bytes
from tests.conftest import MakeStore
from tests.ooc.graphs import hub_graph
from tests.ooc.loading.test_feature_gather import write_features
from tests.ooc.runtime.test_memory_plan import advised_in
from tests.scale import few
from tests.waiting import eventually

N, F = 203, 12
NAMES = ("sage", "gcn", "gat", "gin", "gcnii", "appnp", "sgc")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 rows and pieces of 32, so that a small graph has many."""
    monkeypatch.setattr(layerplan, "CHUNK_ROWS", 16)
    monkeypatch.setattr(layerwise_executor, "CHUNK_ROWS", 16)
    monkeypatch.setattr(edge_tiles, "_LEAST_PIECE_ROWS", 32)
    monkeypatch.setattr(edge_tiles, "PIECE_BYTES", 1)
    monkeypatch.setattr(layerwise_executor, "UNIT_CELLS", 3)


def store_of(make_store: MakeStore, weighted: bool = False, loops: bool = True, **arrays: Any) -> Path:
    src, dst = hub_graph(N, loops=loops).numpy()
    x = np.random.default_rng(2).standard_normal((N, F), dtype=np.float32)
    return make_store(num_nodes=N, src=src, dst=dst, weight=True if weighted else None, **{"x": x, **arrays})


def whole(model: nn.Module, ds: Dataset, upto: int | None = None) -> Tensor:
    """The model on the whole graph, in memory."""
    graph = ds.graph
    target = np.repeat(np.arange(N), np.diff(graph.indptr))
    edge_index = torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), target]))
    weight = torch.from_numpy(np.array(graph.columns["weight"])) if "weight" in graph.columns else None
    x = np.empty((N, F), ds.rows("x").dtype)
    ds.rows("x").read(np.arange(N), x)
    layers = list(model.layers) if upto is None else list(model.layers)[:upto]
    cut = nn.Module()
    cut.layers, cut.encoder = nn.ModuleList(layers), getattr(model, "encoder", None)
    cut.decoder = getattr(model, "decoder", None) if upto is None else None
    was, _ = model.training, model.eval()
    with torch.inference_mode():
        out = run_model(cut, torch.from_numpy(x).float(), full_blocks(edge_index, N, len(layers), weight))
    model.train(was)
    return out


def swept(model: nn.Module, ds: Dataset, folder: Path | None, room: int, **settings: Any) -> tuple[np.ndarray, LayerwisePass]:
    with closing(LayerwisePass(model, ds, folder, room=room, **settings)) as sweep:
        rows = sweep.run()
        out = np.empty(rows.shape, rows.dtype)
        rows.read(np.arange(N), out)
        return out, sweep


def make(name: str, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    model = build_model(name, F, 16, 5, 3, heads=2, **settings)
    return model


def close(out: np.ndarray, expected: Tensor) -> None:
    scale = float(expected.abs().max().clamp(min=1))
    np.testing.assert_allclose(out / scale, expected.numpy() / scale, atol=1e-5, rtol=0)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("weighted", "loops"), [(False, True), (True, False), (True, True)])
@pytest.mark.usefixtures("small_parts")
def test_a_sweep_equals_the_whole_graph(make_store: MakeStore, tmp_path: Path, name: str, weighted: bool, loops: bool) -> None:
    model = make(name, dropout=0.5)
    with Dataset.open(store_of(make_store, weighted, loops)) as ds:
        expected = whole(model, ds)
        for room, folder in ((10**9, None), (12_000, tmp_path / "a"), (3_000, tmp_path / "b")):
            room = min(room * 70, 208_000) if name == "gat" and folder else room
            out, sweep = swept(model, ds, folder, room)
            assert sweep.plan.in_ram == (folder is None)
            close(out, expected)
        if name != "gat":
            assert sweep.plan.layers[0].rows < N


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "float64"])
@pytest.mark.parametrize("name", ["sage", "gat", "gcnii"])
@pytest.mark.usefixtures("small_parts")
def test_features_of_any_dtype(make_store: MakeStore, tmp_path: Path, name: str, dtype: str) -> None:
    store, model = store_of(make_store), make(name)
    x = np.random.default_rng(2).standard_normal((N, F), dtype=np.float32)
    features = {"x": write_features(tmp_path, dtype, x)[0]}
    with Dataset.open(store, features=features) as ds:
        out, _ = swept(model, ds, tmp_path / "sweep", 208_000 if name == "gat" else 4_000)
        close(out, whole(model, ds))


class UsersLayer(nn.Module):
    """PyG's own convolution on a block, as a user would write it, and the first rows beside it."""

    needs_initial = True

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv, self.skip = SAGEConv((width, width), out, aggr="max"), nn.Linear(F, out)

    def forward(self, x: Tensor, block: Block, initial: Tensor) -> Tensor:
        rows = self.conv((x, x[: block.num_dst]), block.edge_index, size=(block.num_src, block.num_dst))
        return (rows + self.skip(initial)).relu()


class Users(nn.Module):
    """A list of layers of several kinds and no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder, self.decoder = nn.Linear(F, F), nn.Linear(6, 4)
        self.layers = nn.ModuleList([UsersLayer(F, 16), *make("gcn").layers[1:2], UsersLayer(16, 6)])


@pytest.mark.usefixtures("small_parts")
def test_a_users_list_of_layers(make_store: MakeStore, tmp_path: Path) -> None:
    model = Users()
    with Dataset.open(store_of(make_store)) as ds:
        for room, folder in ((10**9, None), (400_000, tmp_path / "sweep")):
            out, _ = swept(model, ds, folder, room)
            close(out, whole(model, ds))


@pytest.mark.parametrize("settings", [{"norm": "batch"}, {"norm": "layer", "residual": True}, {"rescale": False}])
@pytest.mark.parametrize("name", ["sage", "gcn", "gin"])
@pytest.mark.usefixtures("small_parts")
def test_norms_residuals_and_narrow_layers(make_store: MakeStore, tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Features of 12 columns onto 3: rows are narrowed before they are summed, in the first layer too."""
    torch.manual_seed(1)
    model = build_model(name, F, 3, 2, 3, **settings)
    with Dataset.open(store_of(make_store, weighted=True)) as ds:
        whole(model.train(), ds)
        out, sweep = swept(model, ds, tmp_path / "sweep", 3_000)
        close(out, whole(model, ds))
        narrow = name != "gin" and not settings.get("residual", False)
        assert sweep.plan.layers[0].narrow == narrow == sweep.plan.mapped


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_results_do_not_depend_on_the_memory(make_store: MakeStore, tmp_path: Path) -> None:
    store = store_of(make_store, weighted=True)
    for name in few(("gcnii",), ("sage", "gcn", "gcnii")):
        torch.manual_seed(3)
        model = build_model(name, F, 48, 5, 3)
        with Dataset.open(store) as ds:
            first, _ = swept(model, ds, None, 10**9)
            plans = set()
            for room in (1_100, 3_000, 5_000, 9_000):
                out, sweep = swept(model, ds, tmp_path / f"{name}{room}", room)
                plans.add(tuple((layer.blocks, layer.rows) for layer in sweep.plan.layers))
                np.testing.assert_array_equal(out, first)
        assert len(plans) > 2
    assert any(blocks > 1 for plan in plans for blocks, _ in plan)


@pytest.mark.usefixtures("small_parts")
def test_a_layer_in_the_middle(make_store: MakeStore, tmp_path: Path) -> None:
    model = make("gcnii")
    with Dataset.open(store_of(make_store)) as ds:
        for upto in (1, 3):
            out, _ = swept(model, ds, tmp_path / str(upto), 3_000, upto=upto)
            close(out, whole(model, ds, upto))


class Stop(Exception):
    pass


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["sage", "gat", "gcnii"])
@pytest.mark.usefixtures("small_parts")
def test_a_sweep_goes_on_where_it_stopped(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    """Interrupted after every range in turn, each time in a new object; nothing that was finished is done again."""
    model, room = make(name), 208_000 if name == "gat" else 3_000
    with Dataset.open(store_of(make_store)) as ds:
        expected, _ = swept(model, ds, tmp_path / "once", room)
        seen: list[tuple[str, int]] = []
        for _ in range(1000):

            def once(what: str, done: int, total: int) -> None:
                if what != "edges":
                    seen.append((what, done))
                    raise Stop

            with closing(LayerwisePass(model, ds, tmp_path / "sweep", room=room)) as sweep:
                try:
                    sweep.run(once)
                except Stop:
                    continue
            break
        assert len(seen) == len(set(seen)) > 5
        out, _ = swept(model, ds, tmp_path / "sweep", room)
        np.testing.assert_array_equal(out, expected)
        with torch.no_grad():
            next(model.parameters()).add_(1)
        out, _ = swept(model, ds, tmp_path / "sweep", room)  # another model begins anew
        close(out, whole(model, ds))


@pytest.mark.cases(1)
@pytest.mark.parametrize("other", ["another model", "less memory"])
@pytest.mark.parametrize("stops", [2, 7])
@pytest.mark.usefixtures("small_parts")
def test_two_sweeps_in_one_folder_in_turn(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, stops: int
) -> None:
    """The second one is killed before it notes anything: the first does not go on with what it has changed."""
    model, count = make("gcnii"), 0
    second = (make("gcnii", norm="batch"), 5_000) if other == "another model" else (model, 1_100)

    def stop(what: str, done: int, total: int) -> None:
        nonlocal count
        count += what != "edges"
        if count == stops:
            raise Stop

    def crash(self: Files, progress: Any, written: Any) -> None:
        raise Stop

    with Dataset.open(store_of(make_store)) as ds:
        expected, _ = swept(model, ds, tmp_path / "once", 5_000)
        with closing(LayerwisePass(model, ds, tmp_path / "sweep", room=5_000)) as sweep, pytest.raises(Stop):
            sweep.run(stop)
        with monkeypatch.context() as patch:
            patch.setattr(Files, "note", crash)
            with pytest.raises(Stop):
                swept(second[0], ds, tmp_path / "sweep", second[1])
        out, _ = swept(model, ds, tmp_path / "sweep", 5_000)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.usefixtures("small_parts")
def test_two_sweeps_in_one_folder_at_once(make_store: MakeStore, tmp_path: Path) -> None:
    """The second is refused, and the first goes on as if nothing were; then the folder is free."""
    model, refused = make("sage"), []
    with Dataset.open(store_of(make_store)) as ds:
        expected, _ = swept(model, ds, tmp_path / "once", 3_000)

        def other(what: str, done: int, total: int) -> None:
            with pytest.raises(StoreError, match="another process computes there; wait for it"):
                swept(make("gcn"), ds, tmp_path / "sweep", 3_000)
            refused.append(what)

        with closing(LayerwisePass(model, ds, tmp_path / "sweep", room=3_000)) as sweep:
            rows, out = sweep.run(other), np.empty(expected.shape, np.float32)
            rows.read(np.arange(N), out)
        np.testing.assert_array_equal(out, expected)
        assert len(refused) > 2
        out, _ = swept(make("gcn"), ds, tmp_path / "sweep", 3_000)
        close(out, whole(make("gcn"), ds))


@pytest.mark.usefixtures("small_parts")
def test_edges_half_in_another_order_are_not_taken_for_whole(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = make("sage"), tmp_path / "sweep"

    def crash(self: Any, *more: Any) -> int:
        raise Stop

    with Dataset.open(store_of(make_store)) as ds:
        expected, _ = swept(model, ds, folder, 3_000)
        with monkeypatch.context() as patch:
            patch.setattr(edge_tiles, "_LEAST_PIECE_ROWS", 64)
            patch.setattr(Tiles, "fill", crash)
            with pytest.raises(Stop):
                swept(make("gcn"), ds, folder, 3_000)
        assert not (folder / "progress.json").exists()
        with (folder / "tiles/rows.bin").open("r+b") as file:
            file.write(bytes(1000))  # what the second one wrote
        out, _ = swept(model, ds, folder, 3_000)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_a_sweep_killed_while_it_is_removed(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was gone already: the same sweep again gives the same rows, and nothing stays behind."""
    model, folder = make("sage"), tmp_path / "sweep"
    with Dataset.open(store_of(make_store)) as ds:
        expected, _ = swept(model, ds, tmp_path / "once", 3_000)
        for victim in ("tiles", "tiles.npy", "out", "progress.json"):

            def killed(path: Path, ignore_errors: bool = False, victim: str = victim) -> None:
                if (path / victim).is_dir():
                    rmtree(path / victim)
                    raise Stop
                if (path / victim).exists():
                    (path / victim).unlink()
                    raise Stop

            with monkeypatch.context() as patch, closing(LayerwisePass(model, ds, folder, room=3_000)) as sweep:
                sweep.run()
                patch.setattr("shutil.rmtree", killed)
                with pytest.raises(Stop):
                    sweep.discard()
            with closing(LayerwisePass(model, ds, folder, room=3_000)) as sweep:
                rows = sweep.run()
                out = np.empty(rows.shape, rows.dtype)
                rows.read(np.arange(N), out)
                np.testing.assert_array_equal(out, expected)
                sweep.discard()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("sweep")] == []


@pytest.mark.parametrize("room", [1_000, 100_000])
@pytest.mark.usefixtures("small_parts")
def test_a_hub_that_does_not_fit_is_refused_before_the_sweep_begins(make_store: MakeStore, tmp_path: Path, room: int) -> None:
    """And with what the refusal asks for there is a result."""
    model = make("gat")
    with Dataset.open(store_of(make_store)) as ds:
        with pytest.raises(BudgetError, match=r"in-edges of node 0 take .* give [\d.]+ kB more$") as refused:
            LayerwisePass(model, ds, tmp_path / "sweep", room=room)
        more = float(str(refused.value).split()[-3]) * 1000
        out, _ = swept(model, ds, tmp_path / "sweep", int((room + more) * 1.01))
        close(out, whole(model, ds))


def test_a_model_with_a_forward_of_its_own_is_refused(make_store: MakeStore) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return x

    with Dataset.open(store_of(make_store)) as ds, pytest.raises(ConfigError, match="ModuleList"):
        LayerwisePass(Own(), ds, None)


@pytest.mark.usefixtures("small_parts")
def test_too_little_memory_is_named(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds:
        with pytest.raises(BudgetError, match="give at least"):
            LayerwisePass(make("sage"), ds, tmp_path / "sweep", room=700)
        with pytest.raises(BudgetError, match="folder"):
            LayerwisePass(make("sage"), ds, None, room=50_000)


@pytest.mark.parametrize("name", ["gat", "sage"])
def test_a_small_graph_of_wide_rows_needs_little_and_no_more_than_is_advised(
    make_store: MakeStore, tmp_path: Path, name: str
) -> None:
    model = build_model(name, 1500, 16, 3, num_layers=2, heads=2 if name == "gat" else 1)
    with Dataset.open(make_store(x=np.ones((50, 1500), np.float32))) as ds:
        shape = shape_of(model, ds)
        assert shape.chunk_rows == 50
        assert besides_bytes(shape, ds.graph) < 1.1 * ALLOWED, "the rows themselves are 300 kB"
        with pytest.raises(BudgetError, match="give at least") as refused:
            LayerwisePass(model, ds, tmp_path / "sweep", memory=resident_bytes()[0])
        advised = resident_bytes()[0] + advised_in(str(refused.value).removesuffix(" more"))
        LayerwisePass(model, ds, tmp_path / "sweep", memory=advised).close()
        with pytest.raises(BudgetError, match="give at least"):
            LayerwisePass(model, ds, tmp_path / "sweep", memory=advised - 2**25)


@pytest.mark.parametrize("name", ["gat", "sage"])
def test_what_a_double_precision_model_computes_with_counts_twice(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    model = build_model(name, F, 16, 3, num_layers=2, heads=2 if name == "gat" else 1)
    with Dataset.open(store_of(make_store)) as ds:
        single = shape_of(model, ds)
        double = shape_of(model.double(), ds)
        at_once = [besides_bytes(shape, ds.graph) for shape in (single, double)]
        assert at_once[1] - at_once[0] == 7 * ds.num_nodes * 4 * single.chunk_columns
        for one, two in zip(single.layers, double.layers, strict=True):
            assert two.source_bytes == 2 * one.source_bytes
            own = [gathered_bytes(ds.graph, layer, 0, 1) for layer in (one, two)]
            edges = int(ds.graph.indptr[1])
            constant = 48 * edges if one.kind is None else 0  # ids and pointers of edges
            assert own[1] - constant == 2 * (own[0] - constant)


def test_the_next_range_is_read_while_one_is_computed(make_store: MakeStore, tmp_path: Path, small_parts: None) -> None:
    begun: list[int] = []
    with Dataset.open(store_of(make_store)) as ds:
        model = build_model("gat", F, 16, 3, num_layers=2, heads=2)
        with closing(LayerwisePass(model, ds, tmp_path / "sweep", room=10**6)) as scan:
            scans = layerwise_executor.NodeScans
            store = _GatheredRows(begun)
            reader = scans(ds, scan.shape, store, (), scan.stats, torch.device("cpu"))  # type: ignore[arg-type]
            ranges = [(0, 50), (50, 100), (100, 150), (150, 203)]
            for number, chunk in enumerate(reader.gathered("rows", [], ranges, lambda first: None, 203)):
                assert chunk.place.first == ranges[number][0]
                assert eventually(lambda most=min(number + 2, len(ranges)): len(begun) == most)
            reader.close()


class _GatheredRows:
    """Rows of a pass; notes the ranges that were asked for."""

    def __init__(self, begun: list[int]) -> None:
        self.begun = begun

    def gather(self, source: str, node: np.ndarray) -> np.ndarray:
        self.begun.append(len(node))
        return np.zeros((len(node), F), np.float32)
