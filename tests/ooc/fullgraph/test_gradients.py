"""Exact steps against PyG's own modules on the whole graph in memory, and against our model at once on all nodes."""

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import APPNP, GATConv, GCN2Conv, GCNConv, GINConv, SAGEConv, SGConv

from ooc.fullgraph.program import TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.graph.blocks import Block
from ooc.models.builders import full_blocks
from ooc.models.layers import run_model
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import (
    CLASSES,
    FEATURES,
    NAMES,
    NODES,
    LossOf,
    agree,
    cut_into,
    gradients,
    inputs,
    make,
    stepped,
    store_of,
    whole,
)
from tests.ooc.loading.test_feature_gather import write_features

ROOM = 10**9
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Plain(nn.Module):
    """The network as PyG's examples write it, of PyG's own convolutions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        widths = [FEATURES, 16, 16, CLASSES]
        pairs = list(itertools.pairwise(widths))
        if name == "sage":
            self.convs = nn.ModuleList([SAGEConv(a, b) for a, b in pairs])
        elif name == "gcn":
            self.convs = nn.ModuleList([GCNConv(a, b) for a, b in pairs])
        elif name == "gat":
            hidden = [GATConv(FEATURES, 8, heads=2), GATConv(16, 8, heads=2)]
            self.convs = nn.ModuleList([*hidden, GATConv(16, CLASSES, heads=1, concat=False)])
        elif name == "gin":
            inner = [16, 16, 16]
            maps = [nn.Sequential(nn.Linear(a, i), nn.ReLU(), nn.Linear(i, b)) for (a, b), i in zip(pairs, inner, strict=True)]
            self.convs = nn.ModuleList([GINConv(each) for each in maps])
        elif name == "gcnii":
            self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
            self.convs = nn.ModuleList([GCN2Conv(16, 0.1, 0.5, layer + 1) for layer in range(3)])
        elif name == "appnp":
            self.first, self.last, self.conv = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES), APPNP(3, 0.1)
        else:
            self.conv = SGConv(FEATURES, CLASSES, K=3)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None) -> Tensor:
        if self.name == "sgc":
            return self.conv(x, edge_index, weight)
        if self.name == "appnp":
            return self.conv(self.last(self.first(x).relu()), edge_index, weight)
        if self.name == "gcnii":
            x = initial = self.first(x).relu()
            for conv in self.convs:
                x = conv(x, initial, edge_index, weight).relu()
            return self.last(x)
        extra = (weight,) if self.name == "gcn" else ()
        for conv in self.convs[:-1]:
            x = conv(x, edge_index, *extra)
            x = nn.functional.elu(x) if self.name == "gat" else x.relu()
        return self.convs[-1](x, edge_index, *extra)

    def take(self, model: nn.Module) -> dict[str, str]:
        """Our model's parameters; by our names those here."""
        ours = dict(model.named_parameters())
        if self.name in ("sage", "gcn", "gat", "gin", "gcnii"):
            named = {key: key.replace("layers.", "convs.").replace(".conv.", ".") for key in ours}
            named = {key: name.replace("encoder.lin", "first").replace("decoder.lin", "last") for key, name in named.items()}
        elif self.name == "appnp":
            named = {key: key.replace("encoder.0.lin", "first").replace("encoder.1.lin", "last") for key in ours}
        else:
            named = {key: key.replace("decoder.lin", "conv.lin") for key in ours}
        theirs = dict(self.named_parameters())
        assert set(named.values()) == set(theirs)
        with torch.no_grad():
            for key, name in named.items():
                theirs[name].copy_(ours[key])
        return named


@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_pygs(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, parts: int
) -> None:
    cut_into(parts, monkeypatch)
    with Dataset.open(store_of(make_store, weighted=parts == 3, loops=parts != 1)) as ds:
        model, plain = make(name).to(dtype), Plain(name).to(dtype)
        named = plain.take(model)
        x, edge_index, weight, _ = inputs(ds, dtype)
        loss = LossOf(ds)(0, plain(x, edge_index, None if weight is None else weight.to(dtype)))
        loss.backward()
        theirs = gradients(plain)
        room = {1: ROOM, 3: 1_000_000, 16: 800_000}[parts] if name == "gat" else ROOM  # its parts are by bytes
        where = {1: TensorPlacement.RETAINED, 3: TensorPlacement.DISK, 16: TensorPlacement.RECOMPUTED}[parts]
        value, ours = stepped(model, ds, tmp_path / "full", placements=where, room=room)
        assert value == pytest.approx(float(loss.detach()), rel=RELATIVE[dtype])
        agree(ours, {key: theirs[each] for key, each in named.items()}, RELATIVE[dtype])


HARD: list[dict[str, Any]] = [{"dropout": 0.5}, {"norm": "batch", "residual": True, "dropout": 0.3}]


@pytest.mark.cases(3)
@pytest.mark.parametrize("where", [TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.RECOMPUTED])
@pytest.mark.parametrize("settings", HARD)
@pytest.mark.parametrize("name", NAMES)
def test_every_fate_with_dropout_and_norms(
    make_store: MakeStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, Any],
    where: TensorPlacement,
) -> None:
    """Against the same model at once on all nodes, with the same seed: the same numbers are dropped."""
    if name in ("appnp", "sgc") and "norm" in settings:
        settings = {"dropout": 0.3, "input_dropout": 0.2}
    cut_into(16, monkeypatch)
    dtype = torch.float64
    with Dataset.open(store_of(make_store, weighted=True)) as ds:
        model = make(name, **settings).to(dtype)
        expected, theirs = whole(model, ds, dtype)
        again = make(name, **settings).to(dtype)
        value, ours = stepped(again, ds, tmp_path / "full", placements=where, room=800_000 if name == "gat" else ROOM)
        assert value == pytest.approx(expected, rel=1e-10)
        agree(ours, theirs, 1e-10)
        for (key, found), wanted in zip(again.named_buffers(), dict(model.named_buffers()).values(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=key)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["sage", "gcn", "gin", "gcnii", "appnp"])
def test_a_step_is_the_same_to_the_bit_in_any_memory_and_place(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cut_into(8, monkeypatch)
    with Dataset.open(store_of(make_store, weighted=True)) as ds:
        seen = []
        mixed = {
            "near0": TensorPlacement.RECOMPUTED,
            "rows1": TensorPlacement.RETAINED,
            "near1": TensorPlacement.RETAINED,
            "rows2": TensorPlacement.RECOMPUTED,
        }
        for placements, room in (
            (None, ROOM),
            (TensorPlacement.DISK, 10_000),
            (TensorPlacement.RECOMPUTED, 5_000),
            (mixed, 100_000),
        ):
            seen.append(stepped(make(name, dropout=0.4), ds, tmp_path / "full", placements=placements, room=room))
        for value, found in seen[1:]:
            assert value == seen[0][0]
            for key, gradient in found.items():
                assert torch.equal(gradient, seen[0][1][key]), key


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", [TensorPlacement.RETAINED, TensorPlacement.DISK])
def test_steps_that_follow_begin_anew(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: TensorPlacement
) -> None:
    """Sums of the features are made once, whatever else stands there is overwritten."""
    cut_into(5, monkeypatch)
    with Dataset.open(store_of(make_store)) as ds:
        model = make("sage", dropout=0.4)
        with closing(FullGraph(model, ds, tmp_path / "full", room=ROOM)) as full:
            full.placement = type(full.placement)({v.name: where for v in full.program.values})
            for seed in range(3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.1)
                expected, theirs = whole(model, ds, torch.float32, seed)
                model.zero_grad()
                torch.manual_seed(seed)
                assert full.step(LossOf(ds)) == pytest.approx(expected, rel=1e-5)
                agree(gradients(model), theirs, 1e-5)


class UsersLayer(nn.Module):
    """PyG's own convolution on a block, as a user would write it, and the first rows beside it."""

    needs_initial = True

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv, self.skip = SAGEConv((width, width), out, aggr="max"), nn.Linear(FEATURES, out)

    def forward(self, x: Tensor, block: Block, initial: Tensor) -> Tensor:
        rows = self.conv((x, x[: block.num_dst]), block.edge_index, size=(block.num_src, block.num_dst))
        return (rows + self.skip(initial)).relu()


class Users(nn.Module):
    """A list of layers of several kinds and no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder, self.decoder = nn.Linear(FEATURES, FEATURES), nn.Linear(6, CLASSES)
        self.layers = nn.ModuleList([UsersLayer(FEATURES, 16), *make("gcn").layers[1:2], UsersLayer(16, 6)])


@pytest.mark.parametrize("where", [TensorPlacement.RETAINED, TensorPlacement.RECOMPUTED])
def test_a_users_list_of_layers(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: TensorPlacement
) -> None:
    cut_into(6, monkeypatch)
    model = Users()
    with Dataset.open(store_of(make_store)) as ds:
        x, edge_index, _, _ = inputs(ds, torch.float32)
        loss = LossOf(ds)(0, run_model(model, x, full_blocks(edge_index, NODES, 3)))
        loss.backward()
        theirs = gradients(model)
        value, ours = stepped(model, ds, tmp_path / "full", placements=where, room=900_000)
        assert value == pytest.approx(float(loss.detach()), rel=1e-5)
        agree(ours, theirs, 1e-5)


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "float64"])
@pytest.mark.parametrize("name", ["sage", "gat", "gcnii"])
def test_features_of_any_dtype(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    cut_into(4, monkeypatch)
    x = np.random.default_rng(2).standard_normal((NODES, FEATURES), dtype=np.float32)
    features = {"x": write_features(tmp_path, dtype, x)[0]}
    with Dataset.open(store_of(make_store), features=features) as ds:
        model = make(name)
        expected, theirs = whole(model, ds, torch.float32)
        value, ours = stepped(model, ds, tmp_path / "full", placements=TensorPlacement.DISK, room=ROOM)
        assert value == pytest.approx(expected, rel=1e-5)
        agree(ours, theirs, 1e-5)


def test_edges_of_an_undirected_graph_are_kept_once(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(6, monkeypatch)
    src, dst = np.random.default_rng(1).integers(0, NODES, (2, 900))
    x = np.random.default_rng(2).standard_normal((NODES, FEATURES), dtype=np.float32)
    both = np.concatenate([src, dst[src != dst]]), np.concatenate([dst, src[src != dst]])
    store = make_store(num_nodes=NODES, src=both[0], dst=both[1], x=x, num_classes=CLASSES, undirected=True)
    with Dataset.open(store) as ds:
        assert ds.manifest.undirected
        model = make("gcn")
        expected, theirs = whole(model, ds, torch.float32)
        value, ours = stepped(model, ds, tmp_path / "full", placements=TensorPlacement.DISK, room=ROOM)
        assert value == pytest.approx(expected, rel=1e-5)
        agree(ours, theirs, 1e-5)
        assert not (tmp_path / "full" / "tiles-back").exists()


def test_what_cannot_be_is_said_before_anything_is_computed(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds:
        with pytest.raises(BudgetError, match="give exact training a folder"):
            FullGraph(make("sage"), ds, None, room=1000)
        with pytest.raises(BudgetError, match="in-edges of node 0"):
            FullGraph(make("gat"), ds, tmp_path / "full", room=1000)
        model = make("sage")
        model.encoder = nn.BatchNorm1d(FEATURES)
        with pytest.raises(ConfigError, match="encoder"):
            FullGraph(model, ds, tmp_path / "full", room=ROOM)
