"""TGN's memory on disk against PyG's in memory, fed with the same batches; no look into the future."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import TransformerConv
from torch_geometric.nn.models.tgn import IdentityMessage, LastNeighborLoader, TGNMemory

import ooc
from ooc.sampling.negatives import RandomNegatives
from ooc.temporal.event_models import Sizes, build_event_model
from ooc.temporal.node_memory import MemoryLoader, NodeMemory, pack_time, unpack_time
from tests.ooc.temporal_stores import Edges

NODES, WIDTH, TIME, HIDDEN = 30, 6, 4, 8
LATEST = 15
"""as many as no node has in a batch, where PyG's loader forgets some of them"""
CPU = torch.device("cpu")


class LastMessage(nn.Module):
    """PyG's LastAggregator as it is with torch_scatter: without, a node that has no message is given one of another's."""

    def forward(self, msg: torch.Tensor, index: torch.Tensor, t: torch.Tensor, dim_size: int) -> torch.Tensor:
        out = msg.new_zeros(dim_size, msg.size(1))
        for i in t.argsort(stable=True).tolist():
            out = out.index_put((index[i],), msg[i])
        return out


class Reference:
    """PyG's example of TGN: memory, the last neighbors, attention, link predictor."""

    def __init__(self, edges: Edges, latest: int) -> None:
        self.memory = TGNMemory(NODES, 3, WIDTH, TIME, IdentityMessage(3, WIDTH, TIME), LastMessage()).double()
        self.memory.reset_state()  # in float64
        self.conv = TransformerConv(WIDTH, HIDDEN // 2, heads=2, edge_dim=3 + TIME).double()
        self.time, self.msg = torch.from_numpy(edges.time), torch.from_numpy(edges.msg).double()
        self.neighbors = LastNeighborLoader(NODES, latest)

    def state(self) -> dict[str, torch.Tensor]:
        """Of `ooc.temporal.event_models.TGN`."""
        mine = {f"memory.{name}": value for name, value in self.memory.state_dict().items() if name[:3] in ("tim", "gru")}
        return mine | {f"conv.{name}": value for name, value in self.conv.state_dict().items()}

    def rows(self, batch: Any) -> torch.Tensor:
        asked = torch.cat([batch.src, batch.dst, batch.neg_dst])
        n_id, edge_index, e_id = self.neighbors(asked.unique())
        place = torch.empty(NODES, dtype=torch.long)
        place[n_id] = torch.arange(len(n_id))
        memory, updated = self.memory(n_id)
        encoded = self.memory.time_enc((updated[edge_index[0]] - self.time[e_id]).double())
        return self.conv(memory, edge_index, torch.cat([encoded, self.msg[e_id]], 1))[place[asked]]

    def end(self, batch: Any) -> None:
        self.memory.update_state(batch.src, batch.dst, batch.t, batch.msg.double())
        self.neighbors.insert(batch.src, batch.dst)


def make(edges: Edges, store: Path, tmp_path: Path, **options: Any) -> Any:
    """(dataset, loader, memory) of float64."""
    ds = ooc.open(store)
    options |= {"num_neighbors": [LATEST], "negatives": RandomNegatives(0, NODES), "shared": True}
    loader = MemoryLoader(ds, 24, width=WIDTH, **options)
    loader.memory = NodeMemory.create(
        tmp_path / "memory", ds, WIDTH, columns=("msg",), max_bytes=10**6, dtype="float64", origin=0, engine="pread"
    )
    return ds, loader, loader.memory


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


def test_a_batch_counts_all_that_its_nodes_bring(tmp_path: Path) -> None:
    """Columns of last events that are wider than the memory are in the bytes of a batch."""
    ds = ooc.open(Edges().store(tmp_path, undirected=True, edge_features=["msg=m*", "more=m*"]))
    loader = MemoryLoader(ds, 24, width=WIDTH, num_neighbors=[LATEST])
    memory = loader.memory = NodeMemory.create(tmp_path / "memory", ds, WIDTH, columns=("msg", "more"), max_bytes=10**6)
    for batch in loader:
        wanted = batch.memory_request
        pulled = memory.pull(batch, CPU)
        arrays = [wanted.own, wanted.other, wanted.time, wanted.known, *wanted.columns.values(), wanted.write, wanted.at]
        taken = sum(each.nbytes for each in [*arrays, pulled.memory, pulled.updated, pulled.other, pulled.time, pulled.msg])
        assert taken <= loader._beside * len(batch.n_id)
        memory.push(batch, pulled.memory)
    memory.history.close()
    ds.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tgn_is_pygs(tmp_path: Path, seed: int) -> None:
    """Losses, gradients and memory rows after every batch, over two epochs, the model changing all the while."""
    edges = Edges(nodes=NODES, count=300, seed=seed)
    edges.dst = (edges.src + 1 + edges.dst % (NODES - 1)) % NODES  # an event at one node alone would be two neighbors of PyG's
    edges.time = np.cumsum(np.random.default_rng(seed).integers(1, 5, 300))  # of two events at once PyG takes either
    torch.manual_seed(seed)
    reference = Reference(edges, LATEST)
    model = build_event_model("tgn", Sizes(0, 3, HIDDEN, TIME, WIDTH), ("msg",), dropout=0.0, ages=False, raw=True).double()
    model.model.load_state_dict(reference.state())
    ds, loader, memory = make(edges, edges.store(tmp_path, undirected=True, features=[], labels=None), tmp_path)
    theirs = nn.ModuleList([reference.memory, reference.conv])
    mine = torch.optim.SGD(model.model.parameters(), 0.01)
    other = torch.optim.SGD(theirs.parameters(), 0.01)
    for epoch in range(2):
        memory.reset()
        reference.memory.reset_state()
        reference.neighbors.reset_state()
        for batch in loader:
            pulled = memory.pull(batch, CPU)
            found, updated = model.model(batch, pulled)
            wanted = reference.rows(batch)
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)
            for rows, module, optimizer in ((found, model.model, mine), (wanted, theirs, other)):
                optimizer.zero_grad()
                (rows * torch.linspace(-1, 1, rows.numel()).view_as(rows)).sum().backward()
                if module is theirs:
                    reference.end(batch)
            ours = gradients(model.model)
            for name, parameter in [*reference.memory.named_parameters(), *reference.conv.named_parameters()]:
                key = next(each for each in ours if each.endswith(name))
                torch.testing.assert_close(ours[key], parameter.grad, rtol=1e-7, atol=1e-7)
            memory.push(batch, updated)
            for module in (model.model, theirs):  # frequencies that jump would make rounding errors large
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            mine.step()
            other.step()
            reference.memory.detach()
        memory.end_pass()
        pulled = memory.history.pull(memory.history.fetch(memory.history.next_step, np.arange(NODES)))[0]
        rows, at = unpack_time(pulled, np.dtype(np.int64))
        torch.testing.assert_close(torch.from_numpy(rows), reference.memory.memory, rtol=1e-7, atol=1e-7)
        np.testing.assert_array_equal(at, reference.memory.last_update)
        assert epoch or at.any()
        memory.end_pass()
    memory.history.close()
    ds.close()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("time", [np.array([0, -1, 2**62, -(2**63)]), np.array([0.5, -1e300, np.inf, 1e-310])])
def test_times_go_along_with_rows_bit_by_bit(dtype: str, time: np.ndarray) -> None:
    rows = np.arange(4 * 7).reshape(4, 7).astype(dtype)
    pulled = pack_time(rows, time)
    assert pulled.dtype == rows.dtype
    again, times = unpack_time(pulled, time.dtype)
    np.testing.assert_array_equal(again, rows)
    assert times.dtype == time.dtype
    assert times.tobytes() == time.tobytes()
