"""--compile: the same losses, checkpoints that fit either way, no batch compiled anew, and what is said without a compiler."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ooc.graph.blocks import sorted_by_source
from ooc.models.builders import build_model
from ooc.models.compile import compile_model, missing_tools
from ooc.stores.errors import ConfigError
from ooc.training import checkpoint
from ooc.training.loop import train
from tests.ooc.graphs import hub_graph, sample
from tests.ooc.runs import configure

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(missing_tools(CPU) is not None, reason=str(missing_tools(CPU)))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_losses_and_checkpoints_are_those_of_a_run_that_is_not_compiled(
    make_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    whole = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: whole(self, backend=backend, **settings))
    torch._dynamo.reset()
    store = make_store(num_nodes=200, num_edges=1500)
    plain, other = tmp_path / "plain", tmp_path / "compiled"
    train(configure(store, plain))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    limits = torch._dynamo.config.get_config_copy()
    train(configure(store, other, compile=True))
    assert torch._dynamo.config.get_config_copy() == limits, "torch's limits are the user's"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    for wanted, found in zip(checkpoint.read_metrics(plain)[0], checkpoint.read_metrics(other)[0], strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3, abs=1e-5)
    saved = [checkpoint.load(run, "model.pt")["model"] for run in (plain, other)]
    assert list(saved[0]) == list(saved[1])
    build_model("sage", 8, 8, 3, num_layers=2).load_state_dict(saved[1])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_batches_of_other_sizes_run_the_same_code(name: str) -> None:
    edge_index = hub_graph(400)
    x = torch.randn(400, 12)
    torch.manual_seed(0)
    model = build_model(name, 12, 16, 3, num_layers=2, heads=2).eval()
    twin = build_model(name, 12, 16, 3, num_layers=2, heads=2).eval()
    twin.load_state_dict(model.state_dict())
    compile_model(model, CPU)
    graphs = []
    for count in (20, 31, 43, 37, 52, 29):
        batch = sample(edge_index, x, torch.randperm(400)[:count], [3, 4], generator=torch.Generator().manual_seed(count))
        out, wanted = model(batch.x, batch.blocks), twin(batch.x, batch.blocks)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        ours = torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True)
        theirs = torch.autograd.grad(wanted.sum(), list(twin.parameters()), allow_unused=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[2], graphs


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch, make_store: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"`compile=True`: torch.compile needs a C\+\+ compiler .*; or leave `compile` out"):
        train(configure(make_store(), tmp_path / "run", compile=True))
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX=no-such-compiler" in str(missing_tools(CPU))


def test_a_module_of_its_own_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return x

    compiled: list[tuple[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **settings: compiled.append((type(self).__name__, settings)))
    monkeypatch.setattr("ooc.models.compile.missing_tools", lambda device: None)
    compile_model(Net(), CPU)
    compile_model(build_model("sage", 4, 4, 2, num_layers=3), CPU)
    assert compiled == [("Net", {"dynamic": True})] + [("Layer", {"dynamic": True})] * 3


@pytest.mark.parametrize("compiling", [False, True])
@given(st.lists(st.integers(0, 6), max_size=40))
def test_edges_are_sorted_by_source_and_keep_their_order(compiling: bool, sources: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        order, indptr = sorted_by_source(torch.tensor(sources, dtype=torch.int64), 7)
    assert order.tolist() == np.argsort(np.array(sources, np.int64), kind="stable").tolist()
    assert indptr.tolist() == [0, *np.cumsum(np.bincount(np.array(sources, np.int64), minlength=7)).tolist()]
