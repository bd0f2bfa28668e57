"""Heterogeneous models against PyG's on the whole graph in RAM, and against plain loops in float64."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import FastRGCNConv, GraphSAGE, HeteroConv, HGTConv, RGCNConv, SAGEConv, to_hetero

from ooc.models.hetero import HeteroEncoder, HeteroLayer, build_hetero_model, full_hetero_blocks, table_width
from ooc.models.hetero_convs import BlockHGTConv, BlockRGCNConv, RSAGEConv
from ooc.models.layers import dropped_ahead
from ooc.models.user_models import forward_batch
from ooc.stores.errors import ConfigError, InputError
from tests.ooc.hetero_batches import NODES, WIDTHS, full_neighborhood, hetero_data, sizes

SEEDS = torch.tensor([4, 29, 0, 17])
SAME = dict.fromkeys(NODES, 6)
Forward = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def rsage(data: HeteroData) -> tuple[nn.Module, Forward]:
    """Ours, and PyG's `HeteroConv` with the same weights."""
    ours = RSAGEConv(WIDTHS, 7, data.metadata())
    convs = {key: SAGEConv((WIDTHS[key[0]], WIDTHS[key[2]]), 7) for key in data.edge_types}
    with torch.no_grad():
        for key, conv in convs.items():
            ours.neighbor[key].weight.copy_(conv.lin_l.weight)
        for name, lin in ours.self_row.items():
            own = [conv for key, conv in convs.items() if key[2] == name]
            lin.weight.copy_(torch.stack([conv.lin_r.weight for conv in own]).sum(0))
            lin.bias.copy_(torch.stack([conv.lin_l.bias for conv in own]).sum(0))
    theirs = HeteroConv(convs, aggr="sum")
    return ours, lambda x: theirs(x, data.edge_index_dict)


def rgcn(data: HeteroData, made: type[RGCNConv], num_bases: int | None) -> tuple[nn.Module, Forward]:
    """Ours, and PyG's on the graph of all node types in one, with the same weights."""
    ours = BlockRGCNConv(6, 7, data.edge_types, num_bases)
    theirs = made(6, 7, len(data.edge_types), num_bases)
    theirs.load_state_dict(ours.state_dict())
    whole = data.to_homogeneous()

    def forward(x: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        out = theirs(torch.cat([x[name] for name in data.node_types]), whole.edge_index, whole.edge_type)
        return dict(zip(data.node_types, out.split([*sizes(data).values()]), strict=True))

    return ours, forward


def hgt(data: HeteroData, widths: Mapping[str, int]) -> tuple[nn.Module, Forward]:
    """Ours and PyG's, with the same weights, which are not what they begin as."""
    ours, theirs = (made(dict(widths), 6, data.metadata(), heads=2) for made in (BlockHGTConv, HGTConv))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-1, 1)
    ours.load_state_dict(theirs.state_dict())
    return ours, lambda x: theirs(x, data.edge_index_dict)


CONVS: dict[str, tuple[Mapping[str, int], Callable[[HeteroData], tuple[nn.Module, Forward]]]] = {
    "rsage": (WIDTHS, rsage),
    "rgcn": (SAME, lambda data: rgcn(data, RGCNConv, None)),
    "rgcn-fast": (SAME, lambda data: rgcn(data, FastRGCNConv, None)),
    "rgcn-bases": (SAME, lambda data: rgcn(data, RGCNConv, 2)),
    "hgt": (WIDTHS, lambda data: hgt(data, WIDTHS)),
    "hgt-same-width": (SAME, lambda data: hgt(data, SAME)),
}


@pytest.mark.parametrize("name", CONVS)
def test_a_convolution_equals_pygs_on_the_whole_graph(name: str) -> None:
    widths, made = CONVS[name]
    data = hetero_data(widths=widths)
    ours, theirs = made(data)
    found, wanted = ours(data.x_dict, full_hetero_blocks(data.edge_index_dict, sizes(data), 1)[0]), theirs(data.x_dict)
    for node_type in data.node_types:
        torch.testing.assert_close(found[node_type], wanted[node_type], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONVS)
def test_a_convolution_on_full_neighborhoods_equals_pygs_on_the_whole_graph(name: str) -> None:
    widths, made = CONVS[name]
    data = hetero_data(1, widths)
    ours, theirs = made(data)
    subgraph, blocks = full_neighborhood(data, "paper", SEEDS, 1)
    x = {node_type: data[node_type].x[torch.from_numpy(node)] for node_type, node in subgraph.node.items()}
    found = ours(x, blocks[0])
    torch.testing.assert_close(found["paper"], theirs(data.x_dict)["paper"][SEEDS], rtol=1e-5, atol=1e-5)
    assert not len(found["author"]), "no other destinations"
    assert not len(found["venue"]), "no other destinations"


@pytest.mark.parametrize("name", CONVS)
def test_gradients_equal_pygs(name: str) -> None:
    """Of the inputs and, added up, of the parameters."""
    widths, made = CONVS[name]
    data = hetero_data(2, widths)
    ours, theirs = made(data)
    blocks = full_hetero_blocks(data.edge_index_dict, sizes(data), 1)
    weight = {node_type: torch.randn(count, 1) for node_type, count in sizes(data).items()}
    gradients = []
    for forward in (lambda x: ours(x, blocks[0]), theirs):
        x = {node_type: rows.clone().requires_grad_() for node_type, rows in data.x_dict.items()}
        sum((rows.square() * weight[node_type]).sum() for node_type, rows in forward(x).items()).backward()
        gradients.append({node_type: rows.grad for node_type, rows in x.items()})
    for node_type, found in gradients[0].items():
        torch.testing.assert_close(found, gradients[1][node_type], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["rgcn-bases", "hgt", "hgt-same-width"])
def test_gradients_of_parameters_equal_pygs(name: str) -> None:
    """R-SAGE has other ones: maps of the own row are added up."""
    widths, made = CONVS[name]
    data = hetero_data(2, widths)
    ours, forward = made(data)
    theirs = next(cell.cell_contents for cell in forward.__closure__ if isinstance(cell.cell_contents, nn.Module))
    for out in (ours(data.x_dict, full_hetero_blocks(data.edge_index_dict, sizes(data), 1)[0]), forward(data.x_dict)):
        sum(rows.square().sum() for rows in out.values()).backward()
    wanted = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[parameter_name].grad, rtol=1e-4, atol=1e-4)


def in_neighbors(data: HeteroData, node_type: str, node: int) -> dict[tuple[str, str, str], list[int]]:
    """Sources of the in-edges of a node, by edge type."""
    keys = [key for key in data.edge_types if key[2] == node_type]
    return {key: data[key].edge_index[0][data[key].edge_index[1] == node].tolist() for key in keys}


def plain_hgt(conv: BlockHGTConv, data: HeteroData, node_type: str, node: int) -> Tensor:
    """HGT's equations for one node (Hu et al., 2020), edge by edge."""
    heads, dim = conv.heads, conv.out_channels // conv.heads
    relations = len(conv.edge_types)
    keys, queries, values = {}, {}, {}
    for name, x in data.x_dict.items():
        keys[name], queries[name], values[name] = conv.kqv_lin.lins[name](x.double()).split(conv.out_channels, 1)
    rows = []
    for head in range(heads):
        part = slice(head * dim, (head + 1) * dim)
        scores, messages = [], []
        for key, sources in in_neighbors(data, node_type, node).items():
            matrix = head * relations + conv.edge_types.index(key)
            for source in sources:
                asked = keys[key[0]][source, part] @ conv.k_rel.weight[matrix] @ queries[node_type][node, part]
                scores.append(asked * conv.p_rel["__".join(key)][0, head] / math.sqrt(dim))
                messages.append(values[key[0]][source, part] @ conv.v_rel.weight[matrix])
        share = torch.stack(scores).softmax(0) if scores else torch.zeros(0)
        rows.append(sum((s * m for s, m in zip(share, messages, strict=True)), torch.zeros(dim).double()))
    out = conv.out_lin.lins[node_type](F.gelu(torch.cat(rows)))
    gate = conv.skip[node_type].sigmoid()
    return gate * out + (1 - gate) * data[node_type].x[node].double()


def plain_mean(data: HeteroData, key: tuple[str, str, str], sources: list[int]) -> Tensor:
    x = data[key[0]].x.double()
    return x[sources].mean(0) if sources else torch.zeros(x.size(1)).double()


def plain_rsage(conv: RSAGEConv, data: HeteroData, node_type: str, node: int) -> Tensor:
    out = conv.self_row[node_type](data[node_type].x[node].double())
    return out + sum(
        conv.neighbor[key].weight @ plain_mean(data, key, sources)
        for key, sources in in_neighbors(data, node_type, node).items()
    )


def plain_rgcn(conv: BlockRGCNConv, data: HeteroData, node_type: str, node: int) -> Tensor:
    out = data[node_type].x[node].double() @ conv.root + conv.bias
    for key, sources in in_neighbors(data, node_type, node).items():
        factors = conv.comp[data.edge_types.index(key)]
        matrix = sum(factor * base for factor, base in zip(factors, conv.weight, strict=True))
        out = out + plain_mean(data, key, sources) @ matrix
    return out


@pytest.mark.parametrize("plain", [plain_rsage, plain_rgcn, plain_hgt])
def test_a_convolution_equals_plain_loops_in_float64(plain: Callable[..., Tensor]) -> None:
    data = hetero_data(3, SAME, {"paper": 6, "author": 5, "venue": 3})
    made = {
        plain_rsage: lambda: RSAGEConv(SAME, 6, data.metadata()),
        plain_rgcn: lambda: BlockRGCNConv(6, 6, data.edge_types, 2),
        plain_hgt: lambda: BlockHGTConv(dict(SAME), 6, data.metadata(), heads=3),
    }
    conv = made[plain]().double()
    x = {node_type: rows.double() for node_type, rows in data.x_dict.items()}
    out = conv(x, full_hetero_blocks(data.edge_index_dict, sizes(data), 1)[0])
    for node_type, count in sizes(data).items():
        for node in range(count):
            torch.testing.assert_close(out[node_type][node], plain(conv, data, node_type, node), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["rsage", "rgcn", "hgt"])
@pytest.mark.parametrize("norm", ["none", "layer"])
def test_a_model_on_full_neighborhoods_equals_itself_on_the_whole_graph(name: str, norm: str) -> None:
    """With types of other widths and one without features, whose rows are looked up."""
    data = hetero_data(4, {**WIDTHS, "author": 0})
    shape = {**WIDTHS, "author": 0}, 8, 3, data.metadata(), "paper"
    options = {"num_nodes": sizes(data), "norm": norm, "residual": True, "heads": 2, "num_bases": 2}
    model = build_hetero_model(name, *shape, num_layers=3, **options)
    whole = {**data.x_dict, "author": torch.arange(NODES["author"])}
    wanted = model(whole, full_hetero_blocks(data.edge_index_dict, sizes(data), 3))
    subgraph, blocks = full_neighborhood(data, "paper", SEEDS, 3)
    x = {node_type: whole[node_type][torch.from_numpy(node)] for node_type, node in subgraph.node.items()}
    torch.testing.assert_close(model(x, blocks), wanted[SEEDS], rtol=1e-5, atol=1e-5)
    given = {**x, "author": model.encoder.tables["author"](x["author"])}
    torch.testing.assert_close(model(given, blocks), model(x, blocks), rtol=0, atol=0, msg="rows in place of numbers")


@pytest.mark.parametrize("name", ["rsage", "rgcn", "hgt"])
def test_recomputed_activations_change_no_gradient(name: str) -> None:
    data = hetero_data(5)
    model = build_hetero_model(name, WIDTHS, 8, 3, data.metadata(), "paper", dropout=0.5, heads=2)
    blocks, gradients = full_hetero_blocks(data.edge_index_dict, sizes(data), 2), []
    for checkpoint in (False, True):
        model.zero_grad()
        torch.manual_seed(0)
        model(data.x_dict, blocks, checkpoint).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["rsage", "rgcn"])
def test_dropout_with_the_relu_before_it_changes_nothing(name: str) -> None:
    data = hetero_data(5)
    model = build_hetero_model(name, WIDTHS, 8, 3, data.metadata(), "paper", dropout=0.5, norm="layer")
    blocks, results = full_hetero_blocks(data.edge_index_dict, sizes(data), 2), []
    assert dropped_ahead(*model.layers) == 0.5
    for between in (None, lambda index, out: out):
        model.zero_grad()
        torch.manual_seed(0)
        out = model(data.x_dict, blocks, between=between)
        out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_type_in_which_no_edge_type_ends() -> None:
    """R-SAGE and R-GCN map its own rows, HGT keeps them; PyG leaves such a type out after the first layer."""
    data = hetero_data()
    keys = [key for key in data.edge_types if key[2] != "author"]
    index = {key: data[key].edge_index for key in keys}
    for name in ("rsage", "rgcn", "hgt"):
        model = build_hetero_model(name, WIDTHS, 8, 3, (data.node_types, keys), "author", heads=2)
        out = model(data.x_dict, full_hetero_blocks(index, sizes(data), 2))
        assert out.shape == (NODES["author"], 3)
        assert out.isfinite().all()


def test_a_type_without_any_node_or_edge_in_a_batch() -> None:
    data = hetero_data()
    empty = {key: torch.empty(2, 0, dtype=torch.long) for key in data.edge_types}
    for name in ("rsage", "rgcn", "hgt"):
        model = build_hetero_model(name, WIDTHS, 8, 3, data.metadata(), "paper", heads=2, norm="batch")
        x = {"paper": data["paper"].x[:2], "author": torch.empty(0, 3), "venue": torch.empty(0, 4)}
        out = model(x, full_hetero_blocks(empty, {"paper": 2, "author": 0, "venue": 0}, 2))
        assert out.shape == (2, 3)
        assert out.isfinite().all()
        out.sum().backward()


def test_widths_of_tables() -> None:
    assert table_width("rsage", {"paper": 128, "author": 0}, 64) == 128, "as the features"
    assert table_width("rgcn", {"paper": 128, "author": 0, "venue": 128}, 64) == 128
    assert table_width("rgcn", {"paper": 128, "author": 0, "venue": 16}, 64) == 64, "mapped to the hidden width"
    assert table_width("rsage", {"paper": 128, "author": 0, "venue": 16}, 64) == 64
    assert table_width("hgt", {"paper": 128, "author": 0}, 64) == 64, "which maps features first"
    assert table_width("rsage", {"paper": 0, "author": 0}, 64) == 64


def test_more_edge_types_than_bases_share_thirty() -> None:
    metadata = ["a"], [("a", f"r{number}", "a") for number in range(40)]
    model = build_hetero_model("rgcn", {"a": 4}, 8, 3, metadata, "a")
    assert model.layers[0].conv.num_bases == 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "gcn"}, "model 'gcn' is not for heterogeneous graphs: use rsage, rgcn, hgt, or package.module:Class"),
        ({"node_type": "movie"}, "node type 'movie' does not exist: there are paper, author, venue"),
        ({"in_channels": {"paper": 5}}, "in_channels lacks node type 'author'"),
        ({"name": "hgt", "heads": 3}, "hidden = 8 is the width of all 3 heads together"),
        ({"num_bases": 0}, "num_bases=0 is invalid"),
        ({"num_layers": 0}, "num_layers=0 is invalid"),
        ({"metadata": (["paper", "author", "venue"], [])}, "metadata has no edge types"),
    ],
)
def test_invalid_models(change: dict[str, object], message: str) -> None:
    settings = {"name": "rsage", "in_channels": WIDTHS, "metadata": hetero_data().metadata(), "node_type": "paper"}
    with pytest.raises(ConfigError, match=message):
        build_hetero_model(**{**settings, "hidden_channels": 8, "out_channels": 3, **change})


def test_input_that_does_not_fit() -> None:
    data = hetero_data()
    model = build_hetero_model("rsage", WIDTHS, 8, 3, data.metadata(), "paper")
    blocks = full_hetero_blocks(data.edge_index_dict, sizes(data), 2)
    with pytest.raises(InputError, match="x has no rows of node type 'author': there are paper"):
        model({"paper": data["paper"].x}, blocks)
    with pytest.raises(InputError, match=r"x\['author'\] has 3 rows but the first block has 20 sources"):
        model({**data.x_dict, "author": data["author"].x[:3]}, blocks)
    with pytest.raises(ConfigError, match="2 layers but the batch has 1 blocks: give one fan-out for each layer, 2 in all"):
        model(data.x_dict, blocks[:1])


def batch_of(data: HeteroData, hops: int) -> HeteroData:
    """The batch of SEEDS with full neighborhoods."""
    subgraph, blocks = full_neighborhood(data, "paper", SEEDS, hops)
    batch = HeteroData()
    for name, node in subgraph.node.items():
        batch[name].n_id = torch.from_numpy(node)
        batch[name].num_nodes = len(node)
        if "x" in data[name]:
            batch[name].x = data[name].x[batch[name].n_id]
    for key, block in blocks[0].blocks.items():
        batch[key].edge_index = block.edge_index
    batch["paper"].batch_size, batch.blocks = len(SEEDS), blocks
    return batch


def test_layers_of_ones_own() -> None:
    """A list of layers without a forward."""
    data = hetero_data(6, {**WIDTHS, "author": 0})
    model = nn.Module()
    model.encoder = HeteroEncoder({}, {"author": (NODES["author"], 3)})
    model.layers = nn.ModuleList([HeteroLayer(RSAGEConv(WIDTHS, 7, data.metadata()), WIDTHS, 7)])
    assert forward_batch(model, batch_of(data, 1)).shape == (len(SEEDS), 7)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_batch_of_hetero_data_through_a_built_in_model(checkpoint: bool) -> None:
    data = hetero_data(7, {**WIDTHS, "author": 0})
    shape = {**WIDTHS, "author": 0}, 8, 3, data.metadata(), "paper"
    model = build_hetero_model("rsage", *shape, num_nodes=sizes(data))
    whole = {**data.x_dict, "author": torch.arange(NODES["author"])}
    wanted = model(whole, full_hetero_blocks(data.edge_index_dict, sizes(data), 2))[SEEDS]
    torch.testing.assert_close(forward_batch(model, batch_of(data, 2), checkpoint), wanted, rtol=1e-5, atol=1e-5)


class Own(nn.Module):
    """PyG's style, with rows of one type or of all as its result."""

    def __init__(self, data: HeteroData, returns: str | None) -> None:
        super().__init__()
        self.convs = nn.ModuleList(HeteroConv({key: SAGEConv((-1, -1), 6) for key in data.edge_types}) for _ in range(2))
        self.returns = returns

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Tensor]
    ) -> Tensor | dict[str, Tensor]:
        for conv in self.convs:
            x_dict = {name: x.relu() for name, x in conv(x_dict, edge_index_dict).items()}
        return x_dict if self.returns is None else {"venue": x_dict["venue"]} if self.returns == "venue" else x_dict["paper"]


@pytest.mark.parametrize("returns", [None, "paper"])
def test_a_forward_of_dictionaries_of_ones_own(returns: str | None) -> None:
    data = hetero_data(8)
    model = Own(data, returns)
    out = model(data.x_dict, data.edge_index_dict)
    wanted = (out if returns else out["paper"])[SEEDS]
    found = forward_batch(model, batch_of(data, 2))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found.sum().backward()


def test_a_forward_that_returns_other_types_only() -> None:
    data = hetero_data(8)
    with pytest.raises(ConfigError, match=r"returns no rows of the seeds' node type 'paper' \(it returns: venue\)"):
        forward_batch(Own(data, "venue"), batch_of(data, 2))


def test_modules_of_to_hetero() -> None:
    data = hetero_data(9)
    model = to_hetero(GraphSAGE((-1, -1), 8, 2, 3), data.metadata())
    wanted = model(data.x_dict, data.edge_index_dict)["paper"][SEEDS]
    found = forward_batch(model, batch_of(data, 2))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name.startswith("convs.0"))
