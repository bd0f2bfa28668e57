"""LinkNeighborLoader over several types, with trees of their own and times: against the edges of the store, one by one."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from ooc.graph.hetero import EdgeKey
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.sampling.edge_split import EdgeSplit
from ooc.stores.build import write_hetero_store, write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph

COUNTS = {"user": 30, "item": 20}
LIKES: EdgeKey = ("user", "likes", "item")
LIKED: EdgeKey = ("item", "liked_by", "user")
VIEWS: EdgeKey = ("user", "views", "item")
BACK: EdgeKey = ("item", "rev_views", "user")
NEAR: EdgeKey = ("item", "near", "item")
ONLY: EdgeKey = ("node", "edge", "node")
Edges = dict[EdgeKey, np.ndarray]


def edges_of() -> Edges:
    """Ends of each type in the order of input; many pairs come more than once, and in both directions."""
    rng = np.random.default_rng(0)
    likes, views = (np.stack([rng.integers(0, 30, count), rng.integers(0, 20, count)]) for count in (150, 60))
    near = rng.integers(0, 20, (2, 50))
    return {LIKES: likes, LIKED: likes[::-1], VIEWS: views, BACK: views[::-1], NEAR: np.concatenate([near, near[::-1, :20]], 1)}


MOMENT = np.random.default_rng(1).integers(0, 40, 150)
JOINED = {name: np.random.default_rng(count).integers(0, 40, count) for name, count in COUNTS.items()}


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    graphs = {}
    for key, ends in edges_of().items():
        sources = None if key[0] == key[2] else COUNTS[key[0]]
        columns = {"time": MOMENT} if key in (LIKES, LIKED) else {}
        graphs[key] = Graph.from_edges(*ends, COUNTS[key[2]], num_sources=sources, **columns)
    rng = np.random.default_rng(2)
    nodes = {
        name: {"x": rng.random((count, 3), np.float32), "arrays": {"joined": JOINED[name]}} for name, count in COUNTS.items()
    }
    path = tmp_path_factory.mktemp("links") / "typed"
    with Dataset.open(write_hetero_store(path, nodes, graphs, reverse_of={LIKED: LIKES})) as ds:
        yield ds


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    path = tmp_path_factory.mktemp("links") / "plain"
    graph = Graph.from_edges(*edges_of()[NEAR], 20, time=MOMENT[:70])
    write_store(path, graph, x=np.zeros((20, 2), np.float32), arrays={"joined": JOINED["item"]})
    with Dataset.open(path) as ds:
        yield ds


def reached(edges: Edges, seeds: dict[str, set[int]], hops: int, allowed: Any) -> set[tuple[EdgeKey, int]]:
    """The edges of the full neighborhood, one by one; allowed(key, edge id)."""
    found: set[tuple[EdgeKey, int]] = set()
    for _ in range(hops):
        new = {
            (key, e)
            for key, ends in edges.items()
            for e, target in enumerate(ends[1].tolist())
            if target in seeds.get(key[2], ()) and allowed(key, e)
        }
        found |= new
        seeds = {name: seeds.get(name, set()) | {int(edges[k][0, e]) for k, e in new if k[0] == name} for name in COUNTS}
    return found


def links_in(batch: HeteroData, key: EdgeKey) -> np.ndarray:
    """The ends of a batch's links and negatives, as rows."""
    ends = [batch[name].n_id[at] for name, at in zip(key[::2], batch[key].edge_label_index, strict=True)]
    return torch.stack(ends).numpy()


def shares_ends(edges: Edges, links: set[tuple[int, int]], key: EdgeKey, e: int, of: EdgeKey) -> bool:
    """Whether an edge of a type that is left out for links of type `of` is between the ends of a link."""
    left = {LIKES: (LIKES, LIKED), LIKED: (LIKES, LIKED), VIEWS: (VIEWS, BACK), NEAR: (NEAR,)}[of]
    if key not in left:
        return False
    a, b = edges[key][:, e].tolist()
    ways = [(a, b), (b, a)] if of[0] == of[2] else [(a, b) if key[0] == of[0] else (b, a)]
    return any(way in links for way in ways)


def check_edges(batch: HeteroData, edges: Edges) -> None:
    """Edges of a batch are those of the store that their ids say."""
    for key, ends in edges.items():
        own = batch[key]
        found = [batch[name].n_id[at] for name, at in zip(key[::2], own.edge_index, strict=True)]
        assert np.array_equal(torch.stack(found).numpy(), ends[:, own.e_id])


@pytest.mark.parametrize("of", [LIKES, LIKED, VIEWS, NEAR])
def test_links_and_their_reverses_are_left_out(typed: Dataset, of: EdgeKey) -> None:
    edges, left = edges_of(), 0
    for batch in LinkNeighborLoader(typed, [-1, -1], (of, None), neg_sampling="binary", batch_size=12, shuffle=True, seed=1):
        check_edges(batch, edges)
        ends, count = links_in(batch, of), len(batch[of].input_id)
        assert np.array_equal(ends[:, :count], edges[of][:, batch[of].input_id])
        assert batch[of].edge_label.tolist() == [1.0] * count + [0.0] * count
        links = set(map(tuple, ends[:, :count].T.tolist()))
        seeds = {name: set(batch[name].n_id[: batch[name].num_sampled_nodes[0]].tolist()) for name in COUNTS}
        for name, at in zip(of[::2], ends, strict=True):
            assert set(at.tolist()) <= seeds[name]
            assert batch[name].batch_size == len(seeds[name]) == batch[name].num_sampled_nodes[0]
        assert sum(map(len, seeds.values())) == len({(name, v) for name, at in zip(of[::2], ends, strict=True) for v in at})

        def others(key: EdgeKey, e: int, links: set[Any] = links) -> bool:
            return not shares_ends(edges, links, key, e, of)

        expected = reached(edges, seeds, 2, others)
        found = {(key, e) for key in edges for e in batch[key].e_id.tolist()}
        assert found == expected
        left += len(reached(edges, seeds, 2, lambda key, e: True) - found)
    assert left > 20


@pytest.mark.parametrize("options", [{}, {"keep_supervision_edges": True}, {"disjoint": True}])
def test_each_node_has_its_fan_out_of_the_other_edges(typed: Dataset, options: dict[str, Any]) -> None:
    edges, keep = edges_of(), "keep_supervision_edges" in options
    split = EdgeSplit(0.2, 0.2, seed=3)
    parts = split.parts(*edges[LIKES])
    for batch in LinkNeighborLoader(typed, [3, 2], (LIKES, "train"), edge_split=split, batch_size=10, seed=2, **options):
        check_edges(batch, edges)
        assert (parts[batch[LIKES].input_id] == 0).all()
        links = links_in(batch, LIKES)
        for key in edges:
            own, target = batch[key], batch[key[2]]
            assert key not in (LIKES, LIKED) or (parts[own.e_id] == 0).all()
            ends = own.edge_index[1].tolist()
            for v in range(sum(target.num_sampled_nodes[:2])):
                mine = links.T if "batch" not in target else links.T[int(target.batch[v]) :][:1]
                others = set() if keep else set(map(tuple, mine.tolist()))
                at_seed = v < target.num_sampled_nodes[0]
                allowed = [
                    e
                    for e in np.flatnonzero(edges[key][1] == int(target.n_id[v])).tolist()
                    if key not in (LIKES, LIKED) or parts[e] == 0
                    if not (at_seed and shares_ends(edges, others, key, e, LIKES))
                ]
                drawn = [e for e, end in zip(own.e_id.tolist(), ends, strict=True) if end == v]
                assert set(drawn) <= set(allowed)
                assert len(set(drawn)) == len(drawn) == min(len(allowed), 3 if at_seed else 2)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("mode", "time_attr"), [("binary", None), ("binary", "edge_time"), ("triplet", None), ("triplet", "joined")]
)
def test_the_ends_of_a_link_share_a_tree_and_its_time(typed: Dataset, time_attr: str | None, mode: str) -> None:
    edges = edges_of()
    time = np.random.default_rng(5).integers(10, 40, 150)
    how: dict[str, Any] = {"neg_sampling": {"mode": mode, "amount": 2}, "batch_size": 8, "seed": 3}
    if time_attr is not None:
        how |= {"time_attr": time_attr, "edge_label_time": torch.from_numpy(time)}
    for batch in LinkNeighborLoader(typed, [-1, -1], (LIKES, None), disjoint=True, **how):
        check_edges(batch, edges)
        user, item, like = batch["user"], batch["item"], batch[LIKES]
        b, until = len(like.input_id), time[like.input_id]
        if mode == "binary":
            rows, columns = like.edge_label_index
            given = like.edge_label_time if time_attr else None
        else:
            rows, columns = user.src_index, torch.cat([item.dst_pos_index, *item.dst_neg_index.t()])
            given = user.seed_time if time_attr else None
            assert time_attr is None or torch.equal(user.seed_time, item.seed_time)
        assert given is None or given.tolist() == np.resize(until, len(given)).tolist()
        assert rows.tolist() == list(range(len(rows))) == user.n_id[: len(rows)].argsort().argsort().sort().values.tolist()
        assert columns.tolist() == list(range(3 * b))
        assert user.batch[rows].tolist() == [i % b for i in range(len(rows))]
        assert item.batch[columns].tolist() == [i % b for i in range(3 * b)]
        assert np.array_equal(np.stack([user.n_id[rows[:b]], item.n_id[columns[:b]]]), edges[LIKES][:, like.input_id])
        for k in range(b):
            link = {(int(user.n_id[rows[k]]), int(item.n_id[columns[k]]))}
            seeds = {"user": set(user.n_id[rows[k::b]].tolist()), "item": set(item.n_id[columns[k::b]].tolist())}

            def allowed(key: EdgeKey, e: int, link: set[Any] = link, limit: int = int(until[k])) -> bool:
                late = time_attr == "joined" and JOINED[key[0]][edges[key][0, e]] > limit
                late = late or (time_attr == "edge_time" and key in (LIKES, LIKED) and MOMENT[e] > limit)
                return not late and not shares_ends(edges, link, key, e, LIKES)

            expected = reached(edges, seeds, 2, allowed)
            found = {
                (key, e)
                for key in edges
                for e, end in zip(batch[key].e_id.tolist(), batch[key].edge_index[1].tolist(), strict=True)
                if batch[key[2]].batch[end] == k
            }
            assert found == expected
            if time_attr == "joined":
                negative = item.n_id[columns[b + k :: b]].numpy()
                assert (JOINED["item"][negative] <= until[k]).all()


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_trees_of_links_in_one_type(plain: Dataset, strategy: str) -> None:
    """Links without times given are as late as their edges."""
    ends, time = edges_of()[NEAR], MOMENT[:70]
    loader = LinkNeighborLoader(plain, [3], time_attr="time", temporal_strategy=strategy, neg_sampling="binary", batch_size=9)
    for batch in loader:
        b = len(batch.input_id)
        assert batch.edge_label_index.tolist() == [list(range(2 * b)), list(range(2 * b, 4 * b))]
        assert batch.edge_label_time.tolist() == [*time[batch.input_id]] * 2
        assert batch.batch_size == 4 * b
        for v in range(4 * b):
            k = int(batch.batch[v])
            assert k == v % b
            pair = set(ends[:, batch.input_id[k]].tolist())
            allowed = [
                e
                for e in np.flatnonzero(ends[1] == int(batch.n_id[v])).tolist()
                if time[e] <= time[batch.input_id[k]] and set(ends[:, e].tolist()) != pair
            ]
            drawn = batch.e_id[batch.edge_index[1] == v].tolist()
            assert set(drawn) <= set(allowed)
            assert len(set(drawn)) == min(3, len(allowed))
            if strategy == "last":
                assert sorted(time[drawn]) == sorted(time[allowed])[-3:]


@pytest.mark.parametrize("disjoint", [False, True])
def test_batches_of_nodes_without_the_edges_of_validation_and_test(typed: Dataset, plain: Dataset, disjoint: bool) -> None:
    split, edges = EdgeSplit(val=0.3, test=0.2, seed=5), edges_of()
    options: dict[str, Any] = {"edge_split": (LIKES, split), "batch_size": 100, "disjoint": disjoint}
    (batch,) = NeighborLoader(typed, [-1], input_nodes="item", **options)
    for key, ends in edges.items():
        inside = split.parts(*ends) == 0 if key == LIKES else np.full(ends.shape[1], key[2] == "item")
        assert np.array_equal(np.sort(batch[key].e_id.numpy()), np.flatnonzero(inside)), key
    loader = NeighborLoader(plain, [-1], edge_split=split, batch_size=100, disjoint=disjoint)
    (batch,) = loader
    assert np.array_equal(np.sort(batch.e_id.numpy()), np.flatnonzero(split.parts(*edges[NEAR]) == 0))
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="cannot resume"):
        NeighborLoader(plain, [-1], batch_size=100, disjoint=disjoint).load_state_dict(state)
    for data, given, words in (
        (typed, {"edge_split": split}, "edge_split must name one of the edge types user:likes:item"),
        (typed, {"edge_split": ("clicks", split)}, "edge_split must name one of the edge types"),
        (plain, {"edge_split": 0.1}, r"must be an ooc\.EdgeSplit or ooc\.StoredEdgeSplit, not float"),
        (plain, {"edge_split": split, "subgraph_type": "induced"}, "edge_split is of sampled edges"),
    ):
        with pytest.raises(ConfigError, match=words):
            NeighborLoader(data, [2], input_nodes="item" if data is typed else None, **given)


def test_exact_negatives_between_types(typed: Dataset) -> None:
    known = set(map(tuple, edges_of()[LIKES].T.tolist()))
    weight = torch.arange(20) % 4  # every fourth item is never drawn
    how: dict[str, Any] = {"neg_sampling": {"mode": "triplet", "amount": 4, "dst_weight": weight}, "exact_negatives": True}
    for batch in LinkNeighborLoader(typed, [2], (LIKES, None), batch_size=50, **how):
        source = batch["user"].n_id[batch["user"].src_index]
        for negative in batch["item"].n_id[batch["item"].dst_neg_index].t():
            assert not known & set(zip(source.tolist(), negative.tolist(), strict=True))
            assert (weight[negative] > 0).all()


def test_links_given_by_type(typed: Dataset) -> None:
    pairs, label = torch.tensor([[29, 3], [0, 19]]), torch.tensor([5, 7])
    batch = next(iter(LinkNeighborLoader(typed, [2], (LIKES, pairs), edge_label=label, batch_size=2)))
    assert links_in(batch, LIKES).tolist() == pairs.tolist()
    assert batch[LIKES].edge_label.tolist() == [5, 7]
    assert batch[LIKES].input_id.tolist() == [0, 1]
    for of in (("item", "item"), (("item", "item"), None), ("near", pairs % 20)):  # PyG's short forms
        assert next(iter(LinkNeighborLoader(typed, [2], of)))[NEAR].edge_label_index.shape == (2, 1)
    assert next(iter(LinkNeighborLoader(typed, [2], LIKES)))[LIKES].edge_label_index.shape == (2, 1)
    empty = next(iter(LinkNeighborLoader(typed, {key: [0] for key in typed.edge_types}, (NEAR, pairs % 20), batch_size=2)))
    assert empty["user"].num_nodes == 0


def test_what_does_not_fit_is_refused(typed: Dataset, plain: Dataset) -> None:
    pairs = torch.tensor([[19], [29]])
    time = torch.zeros(3)
    for ds, given, options, error, words in (
        (typed, None, {}, ConfigError, "must name the edge type of its links, one of user:likes:item"),
        (typed, (("user", "buys", "item"), None), {}, InputError, "the edge type user:buys:item, which .* has not"),
        (typed, (LIKES, pairs), {}, InputError, "'user' nodes 0..29 and 'item' nodes 0..19"),
        (typed, (VIEWS, None), {"time_attr": "edge_time"}, ConfigError, "edge_label_time must be given"),
        (plain, None, {"time_attr": "joined"}, ConfigError, "edge_label_time must be given"),
        (plain, None, {"time_attr": "joined", "edge_label_time": time}, ConfigError, "one number for each of 70 links"),
    ):
        with pytest.raises(error, match=words):
            LinkNeighborLoader(ds, [2], given, **options)
