"""NeighborLoader over several types: PyG's fields against the arrays of the store, whatever the memory and the rows' place."""

import dataclasses
import gc
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.sampler import NumNeighbors, SamplerOutput

from ooc.graph.hetero import EdgeKey
from ooc.loading import sampling, superbatch
from ooc.loading.event_loader import EventLoader
from ooc.loading.neighbor_loader import HGTLoader, NeighborLoader
from ooc.loading.snapshot_loader import SnapshotLoader
from ooc.loading.subgraph_loaders import ClusterLoader, SaintLoader
from ooc.loading.superbatch import Superbatches
from ooc.loading.superbatch_plan import SuperbatchPlanner
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import SHARES, divide
from ooc.sampling import HeteroNeighborSampler, hgt
from ooc.sampling.induced import induced
from ooc.stores.build import write_hetero_store, write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.graph import Graph
from tests.ooc.batches import same
from tests.waiting import no_threads

COUNTS = {"author": 120, "paper": 300, "topic": 9, "venue": 4}
CITES: EdgeKey = ("paper", "cites", "paper")
WRITES: EdgeKey = ("author", "writes", "paper")
BACK: EdgeKey = ("paper", "rev_writes", "author")
ABOUT: EdgeKey = ("topic", "of", "paper")
NUM_EDGES = {CITES: 900, WRITES: 700, BACK: 700, ABOUT: 150}


def edges_of() -> dict[EdgeKey, tuple[np.ndarray, np.ndarray]]:
    """(sources, targets) of each type in the order of input; venues have no edges."""
    rng = np.random.default_rng(0)
    edges = {
        key: (rng.integers(0, COUNTS[key[0]], count), rng.integers(0, COUNTS[key[2]] // 2, count))
        for key, count in NUM_EDGES.items()
    }
    edges[BACK] = edges[WRITES][::-1]
    return edges


def features_of() -> dict[str, np.ndarray]:
    """Rows of other widths and types; topics have none."""
    rng = np.random.default_rng(1)
    return {
        "author": rng.integers(0, 100, (COUNTS["author"], 3), np.int16),
        "paper": rng.standard_normal((COUNTS["paper"], 6), np.float32),
        "venue": rng.standard_normal((COUNTS["venue"], 2, 2)),
    }


def graphs_of() -> dict[EdgeKey, Graph]:
    weight = np.random.default_rng(2).random(NUM_EDGES[WRITES], np.float32)
    graphs = {}
    for key, (source, target) in edges_of().items():
        sources = None if key[0] == key[2] else COUNTS[key[0]]
        columns = {"weight": weight} if key in (WRITES, BACK) else {}
        graphs[key] = Graph.from_edges(source, target, COUNTS[key[2]], num_sources=sources, **columns)
    return graphs


def labels_of() -> np.ndarray:
    return np.random.default_rng(3).integers(-1, 4, COUNTS["paper"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = features_of()
    nodes: dict[str, dict[str, Any]] = {name: {"num_nodes": count} for name, count in COUNTS.items()}
    for name, rows in x.items():
        nodes[name]["x"] = rows
    splits = {"train": np.arange(0, 300, 3), "test": np.arange(1, 300, 3)}
    nodes["paper"] |= {"y": labels_of(), "task": "multiclass", "num_classes": 4, "splits": splits}
    return write_hetero_store(tmp_path_factory.mktemp("h") / "s", nodes, graphs_of(), reverse_of={BACK: WRITES})


@pytest.fixture(scope="module")
def ds(path: Path) -> Iterator[Dataset]:
    with Dataset.open(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def resident(path: Path) -> Iterator[Dataset]:
    with Dataset.open(path, in_memory=True) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    assert no_threads()


def budget(max_batch: int) -> Any:
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=2 * max_batch)


def check(batch: HeteroData, seeds: np.ndarray) -> None:
    """Every field of a batch of papers against the arrays of the store."""
    check_fields(batch, seeds)
    assert all(len(batch[key].e_id) == sum(batch[key].num_sampled_edges) for key in NUM_EDGES)


def check_fields(batch: HeteroData, seeds: np.ndarray) -> None:
    """`check`, but for the numbers of sampled edges."""
    x, edges, weight = features_of(), edges_of(), np.random.default_rng(2).random(NUM_EDGES[WRITES], np.float32)
    assert set(batch.node_types) == set(COUNTS)
    assert set(batch.edge_types) == set(NUM_EDGES)
    for name in COUNTS:
        own, n_id = batch[name], batch[name].n_id.numpy()
        assert own.num_nodes == len(n_id) == sum(own.num_sampled_nodes)
        assert len(np.unique(n_id)) == len(n_id)
        assert ("x" in own) == (name in x)
        if name in x:
            assert np.array_equal(own.x.numpy(), x[name][n_id])
            assert own.x.shape[1:] == x[name].shape[1:]
        for split, remainder in (("train_mask", 0), ("test_mask", 1)):
            assert (split in own) == (name == "paper")
            assert name != "paper" or np.array_equal(own[split].numpy(), n_id % 3 == remainder)
    paper = batch["paper"]
    assert paper.batch_size == len(seeds) == paper.num_sampled_nodes[0]
    assert np.array_equal(paper.n_id[: len(seeds)].numpy(), seeds)
    assert np.array_equal(paper.y.numpy(), labels_of()[paper.n_id.numpy()])
    for key, (source, target) in edges.items():
        own, (row, column) = batch[key], batch[key].edge_index.numpy()
        assert own.edge_index.dtype == torch.int64
        e_id = own.e_id.numpy()
        assert len(e_id) == len(row)
        assert np.array_equal(batch[key[0]].n_id.numpy()[row], source[e_id])
        assert np.array_equal(batch[key[2]].n_id.numpy()[column], target[e_id])
        assert ("edge_weight" in own) == (key in (WRITES, BACK))
        if key in (WRITES, BACK):
            assert np.array_equal(own.edge_weight.numpy(), weight[e_id])


@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_have_pygs_fields_by_type(ds: Dataset, resident: Dataset, in_memory: bool) -> None:
    loader = NeighborLoader(
        resident if in_memory else ds,
        {CITES: [3, 2], WRITES: [2, 2], BACK: [-1, 1], ABOUT: [0, 1]},
        ("paper", "train"),
        16,
        seed=0,
    )
    assert len(loader) == 7
    train = np.arange(0, 300, 3)
    batches = list(loader)
    for k, batch in enumerate(batches):
        seeds = train[16 * k : 16 * (k + 1)]
        check(batch, seeds)
        assert batch["paper"].input_id.tolist() == list(range(16 * k, 16 * k + len(seeds)))
        assert batch["venue"].num_nodes == 0, "a type that is not reached"
        assert batch["venue"].x.shape == (0, 2, 2)
        assert [len(block.blocks) for block in batch.blocks] == [4, 4]
        assert batch.blocks[-1].num_dst["paper"] == len(seeds)
    assert not any(batch[ABOUT].num_sampled_edges[0] for batch in batches)
    assert any(batch["topic"].num_nodes for batch in batches)


def test_types_of_the_seeds_and_hops(ds: Dataset) -> None:
    for name in COUNTS:
        batch = next(iter(NeighborLoader(ds, [2, 2], name, 4)))
        assert batch[name].n_id[:4].tolist() == [0, 1, 2, 3]
        assert batch[name].batch_size == 4
        assert [other for other in COUNTS if "batch_size" in batch[other]] == [name]
    ids = NeighborLoader(ds, [1], ("author", torch.tensor([7, 3])), 2)
    assert next(iter(ids))["author"].n_id[:2].tolist() == [7, 3]
    mask = np.zeros(COUNTS["author"], bool)
    mask[[5, 9]] = True
    batch = next(iter(NeighborLoader(ds, [1], ("author", mask), 2)))
    assert batch["author"].input_id.tolist() == [5, 9]


def test_draws_are_those_of_the_sampler(ds: Dataset) -> None:
    loader = NeighborLoader(ds, [3, -1], ("author", None), 10, weight_attr="edge_weight", replace=True, seed=4)
    names = {name: ds.nodes(name).num_nodes for name in ds.node_types}
    graphs = {key: ds.edges(key).graph for key in ds.edge_types}
    order = loader.strategy.stages.sample.order
    sampler = HeteroNeighborSampler(graphs, names, [3, -1], True, "weight")
    for step, batch in enumerate(loader):
        found = sampler.sample({"author": np.arange(10 * step, 10 * step + 10)}, order.key(Cursor(0, step)))
        for name, node in found.node.items():
            assert np.array_equal(batch[name].n_id, node)
        block = batch.blocks[0].blocks[WRITES]
        assert np.array_equal(block.stands_for, found.edges[WRITES].stands_for)
        assert np.array_equal(block.weight_sum, graphs[WRITES].weight_sum[batch["paper"].n_id[: block.num_dst]])


@pytest.mark.cases(1)
@pytest.mark.parametrize(("batch_size", "max_batch"), [(7, 130_000), (16, 200_000), (40, 10**7)])
def test_batches_do_not_depend_on_the_memory_or_where_rows_are(
    path: Path, resident: Dataset, batch_size: int, max_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"input_nodes": "paper", "batch_size": batch_size, "shuffle": True, "seed": 5}
    expected = NeighborLoader(resident, [3, 2], **settings)
    wanted = [list(expected) for _ in range(2)]
    with Dataset.open(path) as fresh:
        monkeypatch.setattr(superbatch, "SuperbatchPlanner", partial(SuperbatchPlanner, first_bytes=max_batch // 50))
        loader = NeighborLoader(fresh, [3, 2], **settings, budget=budget(max_batch), sample_threads=2)
        assert isinstance(loader.strategy, Superbatches)
        assert not isinstance(expected.strategy, Superbatches)
        for batches in wanted:  # what the first epoch leaves in memory serves the second
            assert same(list(loader), batches)
        if max_batch == 10**7:
            with_features = sum(len(rows) for rows in features_of().values())
            assert loader.rows_read <= with_features, "each row is read once"
        assert loader.rows_asked == sum(
            batch[name].num_nodes for batches in wanted for batch in batches for name in features_of()
        )


def test_a_batch_over_the_memory_is_refused_or_split(ds: Dataset) -> None:
    with pytest.raises(BudgetError, match=r"edges of .*so the batch may need"):
        list(NeighborLoader(ds, [-1, -1], "paper", 300, budget=budget(40_000)))
    loader = NeighborLoader(ds, [-1, -1], "paper", 300, budget=budget(150_000), split_seeds=True)
    parts = list(loader)
    assert len(parts) > 1
    for begin, batch in zip(np.cumsum([0, *(batch["paper"].batch_size for batch in parts)]), parts, strict=False):
        check(batch, np.arange(begin, begin + batch["paper"].batch_size))


def test_what_a_node_takes_beside_its_fields_counts_for_the_memory(ds: Dataset) -> None:
    """As rows of an embedding table do, which topics have in place of features."""
    given: dict[str, Any] = {"num_neighbors": [-1, -1], "input_nodes": "paper", "batch_size": 300}
    whole = list(NeighborLoader(ds, **given, budget=budget(500_000), split_seeds=True))
    assert len(whole) == 1
    many = {"topic": SHARES * 500_000 // whole[0]["topic"].num_nodes}  # one of the batches alive has it
    with pytest.raises(BudgetError, match="so the batch may need"):
        list(NeighborLoader(ds, **given, budget=budget(500_000), beside=many))
    assert len(list(NeighborLoader(ds, **given, budget=budget(500_000), beside={"topic": 100}))) == 1
    with pytest.raises(ConfigError, match=r"beside names node type .movie., and .* has author, paper, topic, venue"):
        NeighborLoader(ds, **given, beside={"movie": 8})


def test_full_fan_out_is_pygs_forward_in_memory(ds: Dataset) -> None:
    data = HeteroData()
    for name, count in COUNTS.items():
        x = features_of().get(name, np.arange(count))
        data[name].x = torch.from_numpy(x.reshape(count, -1).astype(np.float32))
    for key, edge in edges_of().items():
        data[key].edge_index = torch.from_numpy(np.stack(edge))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 4)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x, edge_index).relu(), edge_index)

    types = ["author", "paper"], [CITES, WRITES, BACK]  # PyG's own condition: every type of nodes has in-edges
    model = to_hetero(Net(), types)
    with torch.no_grad():
        expected = model({name: data[name].x for name in types[0]}, {key: data[key].edge_index for key in types[1]})
        for batch in NeighborLoader(ds, [-1, -1], ("paper", "test"), 32):
            x = {name: data[name].x[batch[name].n_id] for name in types[0]}
            found = model(x, {key: batch[key].edge_index for key in types[1]})["paper"][: batch["paper"].batch_size]
            torch.testing.assert_close(found, expected["paper"][batch["paper"].n_id[: len(found)]], atol=1e-5, rtol=0)


def test_one_named_type_has_the_bits_of_a_homogeneous_store(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 80, (2, 600))
    graph, x = Graph.from_edges(source, target, 80), rng.random((80, 4), np.float32)
    plain_path = write_store(tmp_path / "plain", graph, x=x)
    typed_path = write_hetero_store(tmp_path / "typed", {"v": {"x": x}}, {("v", "to", "v"): graph})
    with Dataset.open(plain_path) as plain, Dataset.open(typed_path) as typed:
        batches = [list(NeighborLoader(each, [4, 3], batch_size=9, shuffle=True, seed=1)) for each in (plain, typed)]
        for one, other in zip(*batches, strict=True):
            assert torch.equal(one.n_id, other["v"].n_id)
            assert torch.equal(one.x, other["v"].x)
            for field in ("edge_index", "e_id"):
                assert torch.equal(one[field], other["v", "to", "v"][field])
            assert one.num_sampled_nodes == other["v"].num_sampled_nodes
            assert torch.equal(one.input_id, other["v"].input_id)
            for block, typed_block in zip(one.blocks, other.blocks, strict=True):
                own = typed_block.blocks["v", "to", "v"]
                assert (own.num_src, own.num_dst) == (block.num_src, block.num_dst)
                assert torch.equal(own.indptr, block.indptr)
                assert torch.equal(own.degree, block.degree[: block.num_dst])


def test_a_loader_resumes_where_it_stands(ds: Dataset) -> None:
    def make(**more: Any) -> NeighborLoader:
        return NeighborLoader(ds, [2, 2], ("paper", "train"), 20, shuffle=True, **{"seed": 3, **more})

    loader, whole = make(), list(make())
    epoch = iter(loader)
    assert same([next(epoch), next(epoch)], whole[:2])
    state = loader.state_dict()
    epoch.close()
    assert state["fanout"]["author:writes:paper"] == [2, 2]
    other = make()
    other.load_state_dict(state)
    assert same(list(other), whole[2:])
    with pytest.raises(ConfigError, match="fanout was"):
        NeighborLoader(ds, [2, 3], ("paper", "train"), 20, shuffle=True, seed=3).load_state_dict(state)
    with pytest.raises(ConfigError, match="input_nodes was 'paper:train' and is 'author:all' now"):
        NeighborLoader(ds, [2, 2], "author", 20, shuffle=True, seed=3).load_state_dict(state | {"num_seeds": 120})
    again = pickle.loads(pickle.dumps(loader))
    assert same(list(again), whole[2:])
    again.data.close()


def test_single_batches_and_transforms(ds: Dataset) -> None:
    def doubled(batch: HeteroData) -> HeteroData:
        batch["paper"].twice = 2 * batch["paper"].x
        return batch

    loader = NeighborLoader(ds, [2], ("paper", "train"), 20, transform=doubled, split_masks=False, edge_ids=False)
    batch = loader(torch.tensor([4, 0]))
    assert batch["paper"].n_id[:2].tolist() == [12, 0]
    assert torch.equal(batch["paper"].twice, 2 * batch["paper"].x)
    assert "train_mask" not in batch["paper"]
    assert "e_id" not in batch[CITES]
    bare = next(iter(NeighborLoader(ds, [2], ("paper", "train"), 20, features=False)))
    assert bare["paper"].num_nodes == len(bare["paper"].n_id)
    assert not bare.x_dict if "x_dict" in bare else all("x" not in bare[name] for name in COUNTS)


def test_fan_outs_by_name(ds: Dataset) -> None:
    lists = {CITES: [1], WRITES: [2], BACK: [3], ABOUT: [4]}
    for given in (
        lists,
        {":".join(key): own for key, own in lists.items()},
        {"__".join(key): own for key, own in lists.items()},
        NumNeighbors({WRITES: [2], BACK: [3], ABOUT: [4]}, default=[1]),
    ):
        loader: Any = NeighborLoader(ds, given, "paper")
        assert loader.num_neighbors == lists
    assert repr(loader).startswith("NeighborLoader(fanout={('paper', 'cites', 'paper'): [1]")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([{}], "paper"), "num_neighbors must be whole numbers"),
        (({CITES: [1]}, "paper"), "no fan-out is given for the edge type author:writes:paper"),
        (({("a", "b", "c"): [1]}, "paper"), "for the edge type a:b:c, which the graph has not: it has paper:cites:paper, "),
        (({"nonsense": [1]}, "paper"), "for the edge type nonsense, which the graph has not"),
        (
            ([1], None),
            r"input_nodes must name their type, one of author, paper, topic, venue, as in input_nodes=('author', mask)",
        ),
        (([1], torch.arange(3)), "input_nodes must name their type"),
        (([1], "train"), "; a split goes with its type, as in input_nodes=('paper', 'train')"),
        (([1], "venues"), "input_nodes are of the node type 'venues', which"),
        (([1], ("author", "train")), "has no split 'train' of node type 'author'"),
        (([1], ("author", [120])), "input node 120 at position 0 is out of range"),
        (([1], ("author", np.ones(3, bool))), "the mask of input nodes has 3 entries"),
    ],
)
def test_bad_input_is_one_line(ds: Dataset, arguments: tuple[Any, Any], words: str) -> None:
    with pytest.raises((ConfigError, InputError), match=r"num_neighbors|fan-out|input|mask|split") as error:
        NeighborLoader(ds, *arguments)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_input_nodes_of_another_type_of_a_homogeneous_store_are_refused(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", Graph.from_edges([0, 1], [1, 0], 2))
    with Dataset.open(path) as ds, pytest.raises(InputError, match=r"of the node type 'paper', which .* has not: it has node"):
        NeighborLoader(ds, [1], ("paper", None))


def test_loaders_of_homogeneous_graphs_say_which_take_heterogeneous_ones(ds: Dataset) -> None:
    for loader in (ClusterLoader, SaintLoader, SnapshotLoader, EventLoader):
        words = f"{loader.__name__} is for homogeneous graphs, and .* is heterogeneous: use NeighborLoader, HGTLoader or"
        with pytest.raises(ConfigError, match=words):
            loader(ds, window=10) if loader is SnapshotLoader else loader(ds, batch_size=4)


def check_induced(batch: HeteroData) -> None:
    """A batch has all edges of the store between its nodes."""
    for key, (source, target) in edges_of().items():
        inside = np.isin(source, batch[key[0]].n_id) & np.isin(target, batch[key[2]].n_id)
        assert np.array_equal(np.sort(batch[key].e_id), np.flatnonzero(inside))


def test_induced_batches_have_all_edges_between_their_nodes(ds: Dataset) -> None:
    settings: Any = {"input_nodes": ("paper", "train"), "batch_size": 16, "seed": 1}
    sampled = list(NeighborLoader(ds, [3, 2], **settings))
    batches = list(NeighborLoader(ds, [3, 2], **settings, subgraph_type="induced"))
    train = np.arange(0, 300, 3)
    for k, (batch, other) in enumerate(zip(batches, sampled, strict=True)):
        check_fields(batch, train[16 * k : 16 * (k + 1)])
        check_induced(batch)
        assert all(torch.equal(batch[name].n_id, other[name].n_id) for name in COUNTS)
        assert len(batch.blocks) == 2
        for block in batch.blocks:
            assert block.num_dst == {name: batch[name].num_nodes for name in COUNTS}
            assert all(torch.equal(block.blocks[key].edge_index, batch[key].edge_index) for key in NUM_EDGES)


def test_hgts_batches_have_their_numbers_of_nodes_and_all_edges_between_them(ds: Dataset, resident: Dataset) -> None:
    numbers = {"author": [8, 4], "paper": [10, 5], "topic": [2, 1], "venue": [3, 3]}
    loader = HGTLoader(ds, numbers, ("paper", "train"), 16, seed=2)
    batches = list(loader)
    assert (len(loader), loader.num_samples) == (7, numbers)
    train = np.arange(0, 300, 3)
    for k, batch in enumerate(batches):
        seeds = train[16 * k : 16 * (k + 1)]
        check_fields(batch, seeds)
        check_induced(batch)
        for name in ("author", "paper") if seeds[-1] < 150 else ():  # the other half of the papers has no in-edges
            assert batch[name].num_sampled_nodes[1:] == numbers[name]
        assert (batch["venue"].num_nodes, batch["venue"].x.shape) == (0, (0, 2, 2))
        assert len(batch.blocks) == 2
    assert same(batches, list(HGTLoader(resident, numbers, ("paper", "train"), 16, seed=2)))
    assert not same(batches, list(HGTLoader(resident, numbers, ("paper", "train"), 16, seed=3)))
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="num_samples was"):
        HGTLoader(ds, [8, 4], ("paper", "train"), 16, seed=2).load_state_dict(state)


def test_edges_of_hgts_batches_are_looked_for_once(ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    for module in (hgt, sampling):
        monkeypatch.setattr(module, "induced", lambda *given: calls.append(given) or induced(*given))
    next(iter(HGTLoader(ds, [8, 4], ("paper", "train"), 10**6, seed=2)))
    assert len(calls) == 1


def test_hgts_arguments_that_do_not_fit_are_refused(ds: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no num_samples are given for the node type 'author'"):
        HGTLoader(ds, {"paper": [1]}, "paper")
    with pytest.raises(ConfigError, match="HGTLoader has no argument 'num_neighbors'"):
        HGTLoader(ds, [1], "paper", num_neighbors=[1])
    path = write_store(tmp_path / "s", Graph.from_edges([0, 1], [1, 0], 2))
    with Dataset.open(path) as plain, pytest.raises(ConfigError, match=r"HGTLoader samples by node type, but .* has one: use"):
        HGTLoader(plain, [1], None)


def test_induced_batches_of_a_homogeneous_store(tmp_path: Path) -> None:
    source, target = np.random.default_rng(0).integers(0, 60, (2, 400))
    path = write_store(
        tmp_path / "s", Graph.from_edges(source, target, 60), x=np.random.default_rng(1).random((60, 3), np.float32)
    )
    with Dataset.open(path) as plain:
        for batch in NeighborLoader(plain, [3, 2], None, 9, subgraph_type="induced"):
            inside = np.isin(source, batch.n_id) & np.isin(target, batch.n_id)
            assert np.array_equal(np.sort(batch.e_id), np.flatnonzero(inside))
            assert torch.equal(batch.n_id[batch.edge_index], torch.from_numpy(np.stack([source, target]))[:, batch.e_id])
            assert [(block.num_src, block.num_dst) for block in batch.blocks] == [(batch.num_nodes, batch.num_nodes)] * 2
            assert batch.blocks[0].degree.tolist() == torch.bincount(batch.edge_index[1], minlength=batch.num_nodes).tolist()
        with pytest.raises(ConfigError, match="subgraph_type='induced' cannot be combined with disjoint"):
            NeighborLoader(plain, [1], subgraph_type="induced", disjoint=True)
        with pytest.raises(ConfigError, match="subgraph_type 'both' is unknown: use directional"):
            NeighborLoader(plain, [1], subgraph_type="both")


@pytest.mark.parametrize("disjoint", [True, False])
def test_bidirectional_batches_of_a_homogeneous_store_are_pygs(tmp_path: Path, disjoint: bool) -> None:
    source, target = np.random.default_rng(0).integers(0, 60, (2, 400))
    path = write_store(
        tmp_path / "s", Graph.from_edges(source, target, 60), x=np.random.default_rng(1).random((60, 3), np.float32)
    )
    with Dataset.open(path) as plain:
        settings: Any = {"batch_size": 9, "seed": 1, "disjoint": disjoint}
        sampled = list(NeighborLoader(plain, [3, 2], **settings))
        batches = list(NeighborLoader(plain, [3, 2], **settings, subgraph_type="bidirectional"))
        for batch, one_way in zip(batches, sampled, strict=True):
            row, col = one_way.edge_index
            theirs = SamplerOutput(one_way.n_id, row, col, one_way.e_id).to_bidirectional()
            assert torch.equal(batch.edge_index, torch.stack([theirs.row, theirs.col]))
            assert set(batch.e_id.tolist()) <= set(one_way.e_id.tolist())
            ends = np.sort(batch.n_id[batch.edge_index].numpy(), axis=0)
            assert np.array_equal(ends, np.sort(np.stack([source, target])[:, batch.e_id], axis=0))
            assert [(block.num_src, block.num_dst) for block in batch.blocks] == [(batch.num_nodes, batch.num_nodes)] * 2
            assert batch.blocks[0].degree.tolist() == torch.bincount(batch.edge_index[1], minlength=batch.num_nodes).tolist()


def test_bidirectional_batches_have_the_edges_of_the_reverse_type(ds: Dataset) -> None:
    settings: Any = {"input_nodes": ("paper", "train"), "batch_size": 16, "seed": 1}
    sampled = list(NeighborLoader(ds, [3, 2], **settings))
    batches = list(NeighborLoader(ds, [3, 2], **settings, subgraph_type="bidirectional"))
    for batch, one_way in zip(batches, sampled, strict=True):
        for key in (WRITES, BACK, ABOUT):
            source, target = batch[key].edge_index
            ends = np.stack([batch[key[0]].n_id[source], batch[key[2]].n_id[target]])
            assert np.array_equal(ends, np.stack(edges_of()[key])[:, batch[key].e_id])
        there = {key: set(zip(*batch[key].edge_index.tolist(), strict=True)) for key in (WRITES, BACK)}
        assert there[WRITES] == {(u, v) for v, u in there[BACK]}
        assert len(there[WRITES]) == batch[WRITES].num_edges
        assert torch.equal(batch[ABOUT].edge_index, one_way[ABOUT].edge_index)


@pytest.mark.cases(1)
@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_have_edge_attr_by_type(tmp_path: Path, in_memory: bool) -> None:
    rng = np.random.default_rng(4)
    attr = {key: rng.random((NUM_EDGES[key], 2), np.float32) for key in (CITES, WRITES)}
    nodes: dict[str, dict[str, Any]] = {name: {"num_nodes": count} for name, count in COUNTS.items()}
    nodes["paper"]["x"] = features_of()["paper"]
    edge_arrays = {key: {"edge_attr": values, "kind": np.arange(len(values))} for key, values in attr.items()}
    path = write_hetero_store(tmp_path / "s", nodes, graphs_of(), edge_arrays=edge_arrays, reverse_of={BACK: WRITES})
    with Dataset.open(path, in_memory=in_memory) as ds:
        for loader in (
            NeighborLoader(ds, [3, 2], "paper", 60, edge_features=["edge_attr", "kind"]),
            NeighborLoader(ds, [3, 2], "paper", 60, edge_features=["edge_attr", "kind"], edge_ids=False, seed=0),
            HGTLoader(ds, [20, 10], "paper", 60),
        ):
            for batch in loader:
                assert "edge_attr" not in batch[ABOUT]
                for key, own in ((CITES, CITES), (WRITES, WRITES), (BACK, WRITES)):
                    e_id = batch[key].kind if "kind" in batch[key] else batch[key].e_id
                    assert np.array_equal(batch[key].edge_attr, attr[own][e_id])
                    assert "e_id" not in batch[key] or torch.equal(batch[key].e_id, e_id)
                    for block in batch.blocks:
                        used = block.blocks[key]
                        assert torch.equal(used.edge_attr, batch[key].edge_attr[: used.edge_index.shape[1]])
        with pytest.raises(InputError, match="has no edge feature 'color' of any type: there are edge_attr, kind"):
            NeighborLoader(ds, [1], "paper", edge_features="color")
