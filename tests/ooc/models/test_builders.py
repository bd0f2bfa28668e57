"""Models against plain PyG in RAM."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv
from torch_geometric.nn.conv import message_passing

from ooc.graph.blocks import Block, blocks_of
from ooc.models.builders import Model, build_model, full_blocks, last_loop_weight
from ooc.models.convs import GATHER_COST, BlockGCNConv, BlockSAGEConv, narrow_first, weighted_sum
from ooc.stores.errors import ConfigError
from tests.ooc.graphs import hub_graph, sample

NAMES = ("sage", "gcn", "gat", "gin")
LAYERS = 3
X_CHANNELS, HIDDEN, OUT = 20, 16, 5


class Plain(nn.Module):
    """The same network in plain PyG, full graph, sharing the model's parameters through the state dict."""

    def __init__(self, name: str, model: Model) -> None:
        super().__init__()
        self.name, self.model = name, model
        self.convs = nn.ModuleList(self.conv(i) for i in range(len(model.layers)))
        for conv, layer in zip(self.convs, model.layers, strict=True):
            conv.load_state_dict(layer.conv.state_dict())

    def conv(self, i: int) -> nn.Module:
        last = i == len(self.model.layers) - 1
        wide, out = X_CHANNELS if i == 0 else HIDDEN, OUT if last else HIDDEN
        if self.name == "sage":
            return SAGEConv(wide, out)
        if self.name == "gcn":
            return GCNConv(wide, out)
        if self.name == "gin":
            inner = wide if last else out
            return GINConv(nn.Sequential(nn.Linear(wide, inner), nn.ReLU(), nn.Linear(inner, out)))
        if last:
            return GATConv(wide, out, heads=2, concat=False)
        return GATConv(wide, out // 4, heads=4)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
        for i, (conv, layer) in enumerate(zip(self.convs, self.model.layers, strict=True)):
            h = conv(x, edge_index, weight) if self.name == "gcn" else conv(x, edge_index)
            h = layer.norm(h)
            if layer.residual:
                h = h + layer.skip(x)
            x = h if i == len(self.convs) - 1 else (F.elu(h) if self.name == "gat" else h.relu())
        return x


def make(name: str, **settings: object) -> Model:
    torch.manual_seed(1)
    return build_model(name, X_CHANNELS, HIDDEN, OUT, LAYERS, heads=4, output_heads=2, **settings)


@pytest.mark.parametrize("name", [*NAMES, "gcnii"])
def test_pyg_writes_no_module_for_a_layer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    written: list[object] = []
    monkeypatch.setattr(message_passing, "module_from_template", lambda **how: written.append(how["module_name"]))
    make(name)
    assert not written

    class Own(SAGEConv):
        pass

    Own(2, 2)
    assert len(written) == 1


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name.split(".", 1)[1]: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("loops", "weighted"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("whole", [False, True])
def test_full_fan_out_equals_pyg_on_the_whole_graph(name: str, loops: bool, weighted: bool, whole: bool) -> None:
    edge_index = hub_graph(loops=loops)
    x = torch.randn(60, X_CHANNELS)
    weight = torch.rand(edge_index.size(1)) + 0.1 if weighted else None
    seeds = torch.tensor([59, 0, 3, 7, 12, 58, 30])
    model = make(name)
    plain = Plain(name, model)
    if whole:
        out = model(x, full_blocks(edge_index, 60, LAYERS, weight))[seeds]
    else:
        batch = sample(edge_index, x, seeds, [-1] * LAYERS, weight)
        out = model(batch.x, batch.blocks)
    expected = plain(x, edge_index, weight)[seeds]
    scale = expected.detach().abs().max().clamp(min=1)
    torch.testing.assert_close(out / scale, expected / scale, atol=1e-5, rtol=0)

    F.cross_entropy(out / scale, torch.arange(7) % OUT).backward()
    F.cross_entropy(expected / scale, torch.arange(7) % OUT).backward()
    ours = [p.grad for layer in model.layers for p in layer.conv.parameters()]
    theirs = [p.grad for p in plain.convs.parameters()]
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_norm_and_residual_equal_pyg_in_evaluation(name: str, norm: str) -> None:
    edge_index, x, seeds = hub_graph(), torch.randn(60, X_CHANNELS), torch.tensor([0, 59, 4])
    model = make(name, norm=norm, residual=True, dropout=0.5)
    model(x, full_blocks(edge_index, 60, LAYERS))  # batch norm sees something
    model.eval()
    batch = sample(edge_index, x, seeds, [-1] * LAYERS)
    expected = Plain(name, model).eval()(x, edge_index)[seeds]
    torch.testing.assert_close(model(batch.x, batch.blocks), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("name", ["gcn", "gin"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rescaled_sums_are_unbiased(name: str, replace: bool, weighted: bool) -> None:
    """The mean of one linear layer over many samples is the full result; the unscaled one is far from it."""
    torch.manual_seed(0)
    edge_index, x = hub_graph(), torch.rand(60, 4)
    weight = torch.rand(edge_index.size(1)) + 0.1 if weighted else None
    seeds, generator = torch.arange(60).flip(0), torch.Generator().manual_seed(3)
    conv = build_model(name, 4, 4, 4, 1).layers[0].conv
    if name == "gin":
        conv.nn = nn.Linear(4, 4)
    full = conv(x, full_blocks(edge_index, 60, 1, weight)[0])
    draws, plain = [], []
    for _ in range(400):
        batch = sample(edge_index, x, seeds, [4], weight, generator, replace)
        conv.rescale = True
        draws.append(conv(batch.x, batch.blocks[0]).detach()[seeds])
        conv.rescale = False
        plain.append(conv(batch.x, batch.blocks[0]).detach()[seeds])
    found = torch.stack(draws)
    error = found.mean(0) - full
    noise = found.std(0) / len(draws) ** 0.5
    assert (error.abs() < 5 * noise + 1e-4).all()
    assert ((torch.stack(plain).mean(0) - full).abs() > 5 * noise + 1e-4).any()


def test_edges_drawn_by_weight_are_rescaled_by_what_they_stand_for() -> None:
    """k draws with replacement, in proportion to weight: each stands for W / (k w) edges."""
    torch.manual_seed(0)
    x, weight, k = torch.rand(9, 3), torch.arange(1.0, 9.0), 3
    edge_index = torch.stack([torch.arange(1, 9), torch.zeros(8, dtype=torch.long)])
    conv = BlockGCNConv(3, 3)
    whole = full_blocks(edge_index, 9, 1, weight)[0]
    full = conv(x, whole)[:1]
    found = []
    for _ in range(600):
        slot = weight.multinomial(k, replacement=True).sort()[0]
        drawn = whole._replace(
            edge_index=whole.edge_index[:, slot],
            indptr=torch.tensor([0, k]),
            num_dst=1,
            weight=weight[slot],
            stands_for=weight.sum() / (k * weight[slot]),
        )
        found.append(conv(x, drawn).detach())
    rows = torch.stack(found)
    assert ((rows.mean(0) - full).abs() < 5 * rows.std(0) / 600**0.5 + 1e-5).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_without_rescaling_a_sampled_batch_is_pyg_on_the_trimmed_subgraph(name: str, weighted: bool) -> None:
    edge_index, x = hub_graph(), torch.randn(60, X_CHANNELS)
    weight = torch.rand(edge_index.size(1)) + 0.1 if weighted else None
    batch = sample(edge_index, x, torch.tensor([0, 5, 59, 3]), [4, 3, 2], weight, torch.Generator().manual_seed(2))
    model = make(name, rescale=False)
    plain, h = Plain(name, model), batch.x
    for i, (conv, block) in enumerate(zip(plain.convs, batch.blocks, strict=True)):
        h = h[: block.num_src]
        h = conv(h, block.edge_index, block.weight) if name == "gcn" else conv(h, block.edge_index)
        h = h if i == 2 else (F.elu(h) if name == "gat" else h.relu())
    torch.testing.assert_close(model(batch.x, batch.blocks), h[:4], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wide", [2, 400])
def test_sage_projects_before_or_after_with_one_result(wide: int) -> None:
    """Both orders of projection and mean, also at nodes without neighbors, where only the bias remains."""
    edge_index, x = hub_graph(), torch.randn(60, wide)
    block = full_blocks(edge_index, 60, 1)[0]
    assert narrow_first(block, wide, 3) is (wide > 3)
    conv, plain = BlockSAGEConv(wide, 3), SAGEConv(wide, 3)
    plain.load_state_dict(conv.state_dict())
    torch.testing.assert_close(conv(x, block), plain(x, edge_index), atol=1e-5, rtol=1e-5)
    many_sources = block._replace(num_src=60 + GATHER_COST * 10**6)
    assert narrow_first(many_sources, wide, 3) is False


@pytest.mark.parametrize("with_value", [False, True])
def test_weighted_sum_and_its_gradient_equal_a_dense_product(with_value: bool) -> None:
    edge_index = hub_graph()
    block = blocks_of(full_blocks(edge_index, 60, 1)[0], (20, 40), (int(full_blocks(edge_index, 60, 1)[0].indptr[20]),))[0]
    assert (block.num_src, block.num_dst) == (60, 20)
    value = torch.rand(block.edge_index.size(1), dtype=torch.float64) if with_value else None
    x = torch.randn(60, 7, dtype=torch.float64, requires_grad=True)
    dense = torch.zeros(20, 60, dtype=torch.float64)
    ones = torch.ones(block.edge_index.size(1), dtype=torch.float64)
    dense.index_put_((block.edge_index[1], block.edge_index[0]), ones if value is None else value, accumulate=True)
    torch.testing.assert_close(weighted_sum(x, block, value), dense @ x)
    assert torch.autograd.gradcheck(lambda rows: weighted_sum(rows, block, value), x)


def test_attention_sum_and_its_gradients_equal_a_dense_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.models.convs.EDGES_AT_ONCE", 50)
    block = full_blocks(hub_graph(), 60, 1)[0]
    value = torch.rand(block.edge_index.size(1), 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(60, 6, dtype=torch.float64, requires_grad=True)
    expected = []
    for head in range(3):
        dense = torch.zeros(60, 60, dtype=torch.float64)
        dense = dense.index_put((block.edge_index[1], block.edge_index[0]), value[:, head], accumulate=True)
        expected.append(dense @ x[:, 2 * head : 2 * head + 2])
    torch.testing.assert_close(weighted_sum(x, block, value), torch.cat(expected, dim=1))
    assert torch.autograd.gradcheck(lambda rows, share: weighted_sum(rows, block, share), (x, value), fast_mode=True)


def test_a_batch_without_edges() -> None:
    edge_index, x = torch.zeros(2, 0, dtype=torch.long), torch.randn(3, X_CHANNELS)
    for name in NAMES:
        model = make(name)
        out = model(x, full_blocks(edge_index, 3, LAYERS))
        torch.testing.assert_close(out, Plain(name, model)(x, edge_index), atol=1e-5, rtol=1e-5)
        out.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_layers_compute_only_the_rows_needed(name: str) -> None:
    edge_index, x = hub_graph(), torch.randn(60, X_CHANNELS)
    batch = sample(edge_index, x, torch.tensor([5, 9]), [2, 2, 2], generator=torch.Generator().manual_seed(0))
    model, rows = make(name), []
    for layer in model.layers:
        layer.register_forward_hook(lambda _m, _i, out: rows.append(out.size(0)))
    model(batch.x, batch.blocks)
    assert rows == [block.num_dst for block in batch.blocks]
    assert rows[0] > rows[1] > rows[2] == 2


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_are_equal_to_the_bit(name: str) -> None:
    def run() -> list[Tensor]:
        model = make(name, dropout=0.3, norm="batch")
        torch.manual_seed(5)
        model(x, blocks).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    edge_index, x = hub_graph(300), torch.randn(300, X_CHANNELS)
    blocks = full_blocks(edge_index, 300, LAYERS)
    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_the_published_attention_model_can_be_written() -> None:
    model = build_model("gat", 1433, 64, 7, 2, dropout=0.6, heads=8)
    first, second = (layer.conv for layer in model.layers)
    assert (first.heads, first.out_channels, first.concat, first.dropout) == (8, 8, True, 0.6)
    assert (second.heads, second.out_channels, second.concat, second.dropout) == (1, 7, False, 0.6)
    assert [layer.dropout for layer in model.layers] == [0.6, 0.6]
    assert [layer.dropout for layer in build_model("sage", 9, 9, 9, 2, dropout=0.6).layers] == [0.0, 0.6]
    assert build_model("sage", 9, 9, 9, 2, dropout=0.6, input_dropout=0.1).layers[0].dropout == 0.1


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"name": "sagee"}, "sagee"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"norm": "bacth"}, "bacth"),
        ({"name": "gat", "hidden_channels": 12}, "multiple of 8"),
        ({"name": "gat", "heads": 0}, "heads=0"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(settings: dict[str, object], word: str) -> None:
    given = {"name": "sage", "in_channels": 4, "hidden_channels": 16, "out_channels": 2, "num_layers": 2} | settings
    with pytest.raises(ConfigError, match=word):
        build_model(**given)


def test_last_loop_weight_follows_pyg() -> None:
    found = last_loop_weight(
        torch.tensor([1, 1, 1, 3]), torch.tensor([2.0, 5.0, 9.0, 7.0]), torch.tensor([True, True, False, True]), 5
    )
    assert found.tolist() == [1, 5, 1, 7, 1]


def test_block_survives_pyg_data() -> None:
    from torch_geometric.data import Data

    data = Data(blocks=full_blocks(hub_graph(), 60, 2)).to("cpu")
    assert isinstance(data.blocks[0], Block)


def test_gin_ends_in_a_wide_perceptron() -> None:
    last = build_model("gin", 5, 32, 1, 2).layers[-1].conv
    assert [p.shape for p in last.nn.parameters() if p.ndim == 2] == [(32, 32), (1, 32)]
