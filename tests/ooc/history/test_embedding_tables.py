"""Embedding tables on disk against torch.nn.Embedding(sparse=True) with torch.optim.SparseAdam in RAM."""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ooc.history.embedding_table import EmbeddingTable
from ooc.history.embedding_tables import EmbeddingTables
from ooc.stores.errors import StoreError

N, WIDTH, LR = 300, 5, 0.05
LARGE, NOTHING = 2**24, 4096
"""limits under which a table is in RAM, and on disk"""
CPU = torch.device("cpu")


def open_table(path: Path, max_bytes: int = NOTHING, state: Any = None, **more: Any) -> EmbeddingTable:
    options: dict[str, Any] = {"stream": 7, "optimizer": "adam", **more}
    return EmbeddingTable.open(path, (N, WIDTH), state=state, max_bytes=max_bytes, **options)


def batches(count: int, size: int = 40) -> list[np.ndarray]:
    """Nodes of each step, in any order; some come again soon, as through a prefetch."""
    rng = np.random.default_rng(0)
    return [rng.choice(N // 2 if step % 3 else N, size, replace=False) for step in range(count)]


def loss_of(x: Tensor, step: int) -> Tensor:
    weight = torch.randn(*x.shape, generator=torch.Generator().manual_seed(step))
    return (x.sin() * weight).sum()


def train(table: EmbeddingTable, nodes: list[np.ndarray], first: int = 0, ahead: int = 2) -> None:
    """Steps `first` on, rows read `ahead` steps before they are needed."""
    requests = []
    for step in range(first, len(nodes)):
        while len(requests) < ahead + 1 and step + len(requests) < len(nodes):
            requests.append(table.ahead(nodes[step + len(requests)]))
        loss_of(table.pull(requests.pop(0), CPU), step).backward()
        table.gather()
        table.update(LR)


def all_rows(table: EmbeddingTable) -> np.ndarray:
    return np.array(table.rows(np.arange(N)))


def in_ram(initial: np.ndarray, nodes: list[np.ndarray], optimizer: str = "adam") -> np.ndarray:
    """The same steps with torch's own table and optimizer."""
    table = nn.Embedding(N, WIDTH, sparse=True)
    with torch.no_grad():
        table.weight.copy_(torch.from_numpy(initial))
    made = {"adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}[optimizer]([table.weight], lr=LR)
    for step, node in enumerate(nodes):
        made.zero_grad()
        loss_of(table(torch.from_numpy(node)), step).backward()
        made.step()
    return table.weight.detach().numpy().copy()


@pytest.fixture(params=[LARGE, NOTHING])
def table(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddingTable]:
    found = open_table(tmp_path / "table", request.param)
    yield found
    found.close()


@pytest.mark.parametrize("max_bytes", [LARGE, NOTHING])
def test_steps_have_the_bits_of_sparse_adam(tmp_path: Path, max_bytes: int) -> None:
    """On disk and in RAM, with rows that were read before the pushes of the steps before."""
    nodes, table = batches(12), open_table(tmp_path / "table", max_bytes)
    initial = all_rows(table)
    assert np.abs(initial).max() <= np.sqrt(6 / (N + WIDTH))
    assert len(np.unique(initial)) > 0.99 * initial.size
    train(table, nodes)
    assert (table.history._resident is not None) == (max_bytes == LARGE)
    np.testing.assert_array_equal(all_rows(table), in_ram(initial, nodes))
    table.close()


def test_steps_of_sgd(tmp_path: Path) -> None:
    nodes, table = batches(6), open_table(tmp_path / "table", optimizer="sgd")
    initial = all_rows(table)
    train(table, nodes)
    np.testing.assert_allclose(all_rows(table), in_ram(initial, nodes, "sgd"), rtol=1e-6, atol=1e-7)
    table.close()


def test_accumulated_batches_are_one_step(table: EmbeddingTable) -> None:
    """Their gradients are added up, also of nodes that two of them have; one of them may have none."""
    nodes, initial = batches(6), all_rows(table)
    reference = nn.Embedding(N, WIDTH, sparse=True)
    with torch.no_grad():
        reference.weight.copy_(torch.from_numpy(initial))
    adam = torch.optim.SparseAdam([reference.weight], lr=LR)
    for first in range(0, len(nodes), 3):
        for step in range(first, first + 3):
            x, wanted = table.pull(table.ahead(nodes[step]), CPU), reference(torch.from_numpy(nodes[step]))
            if step != 5:
                loss_of(x, step).backward()
                loss_of(wanted, step).backward()
        table.gather()
        table.update(LR)
        adam.step()
        adam.zero_grad()
    assert table.updates == 2
    assert table.history.next_step == 6
    np.testing.assert_allclose(all_rows(table), reference.weight.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_step_without_a_gradient_changes_nothing(table: EmbeddingTable) -> None:
    nodes = batches(3)
    train(table, nodes[:2])
    before = all_rows(table)
    table.pull(table.ahead(nodes[2]), CPU)
    table.gather()
    table.update(LR)
    assert table.updates == 2
    np.testing.assert_array_equal(all_rows(table), before)


def test_nodes_that_come_twice_in_a_batch(table: EmbeddingTable) -> None:
    """As in disjoint samples: both rows are the node's, and their gradients its sum."""
    node, initial = np.array([3, 9, 3]), all_rows(table)
    x = table.pull(table.ahead(node), CPU)
    np.testing.assert_array_equal(x.detach().numpy(), initial[node])
    (x * torch.tensor([[1.0], [1.0], [2.0]])).sum().backward()
    table.gather()
    np.testing.assert_array_equal(table.merged.grad[:, 0].numpy(), [3.0, 1.0])
    table.update(LR)


@pytest.mark.parametrize("max_bytes", [LARGE, NOTHING])
@pytest.mark.parametrize("again", [False, True])
def test_what_was_written_after_a_checkpoint_is_rolled_back(tmp_path: Path, max_bytes: int, again: bool) -> None:
    """As after a kill, before and after a second checkpoint: the run goes on to the bit."""
    nodes, table = batches(12), open_table(tmp_path / "table", max_bytes)
    train(table, nodes[:3])
    for stop in (5, 8) if again else (5,):
        table.end_pass()
        train(table, nodes[:stop], table.history.next_step)
        state = copy.deepcopy(table.state())
        table.history.commit()
    train(table, nodes[: stop + 3], stop, ahead=0)
    table.history._settle()
    table.close()  # without a commit
    resumed = open_table(tmp_path / "table", max_bytes, state)
    train(resumed, nodes, stop)
    whole = open_table(tmp_path / "other", LARGE)
    train(whole, nodes)
    np.testing.assert_array_equal(all_rows(resumed), all_rows(whole))
    assert resumed.updates == whole.updates == len(nodes)
    resumed.close()
    whole.close()


def test_kept_rows_are_read_again(table: EmbeddingTable) -> None:
    nodes = batches(6)
    train(table, nodes[:3])
    best = all_rows(table)
    table.keep("best-0")
    table.end_pass()
    train(table, nodes, 3)
    assert not np.array_equal(all_rows(table), best)
    table.drop_kept("best-0")
    table.use("best-0")
    np.testing.assert_array_equal(all_rows(table), best)
    np.testing.assert_array_equal(table.pull(table.look_up(np.array([7, 2])), CPU).numpy(), best[[7, 2]])
    table.drop_kept("best-1")
    with pytest.raises(StoreError, match="best-0"):
        table.use("best-0")


def test_a_missing_folder_says_what_to_do(tmp_path: Path) -> None:
    table = open_table(tmp_path / "table")
    train(table, batches(1))
    state = table.state()
    table.close()
    with pytest.raises(StoreError, match="other is missing: without its embedding tables the run cannot go on"):
        open_table(tmp_path / "other", state=state)


def test_a_store_that_has_grown_adds_rows(tmp_path: Path) -> None:
    table = open_table(tmp_path / "table")
    train(table, batches(4))
    state, before = table.state(), all_rows(table)
    table.history.commit()
    table.close()
    options: dict[str, Any] = {"stream": 7, "optimizer": "adam", "max_bytes": NOTHING, "grown": True}
    grown = EmbeddingTable.open(tmp_path / "table", (N + 50, WIDTH), state=state, **options)
    written = np.unique(np.concatenate(batches(4)))
    np.testing.assert_array_equal(grown.rows(written), before[written])
    assert grown.rows(np.arange(N, N + 50)).all()
    grown.close()


def test_tables_of_a_run(tmp_path: Path) -> None:
    """By node type, each with initial values of its own, their rows in the batch's place for features."""
    shapes = {"author": (20, 3), "venue": (4, 2)}
    options: dict[str, Any] = {"seed": 0, "optimizer": "adamw", "max_bytes": LARGE}
    tables = EmbeddingTables.open(tmp_path, shapes, **options)
    assert tables
    assert not EmbeddingTables()
    batch: Any = FakeBatch(author=torch.tensor([5, 2]), venue=torch.tensor([1]))
    tables.ahead((1, batch))
    tables.pull(batch)
    assert batch["author"].x.shape == (2, 3)
    assert batch["venue"].x.shape == (1, 2)
    (batch["author"].x.sum() + batch["venue"].x.sum()).backward()
    tables.gather()
    assert [rows.grad.shape for rows in tables.gathered] == [(2, 3), (1, 2)]
    tables.update(LR)
    tables.keep_best(0)
    kept = tables.tables["author"].rows(np.arange(20))
    state = copy.deepcopy(tables.state())
    tables.commit(0)
    tables.end_pass()
    tables.look_up((1, batch))
    tables.pull(batch)
    assert not batch["author"].x.requires_grad
    tables.close()
    again = EmbeddingTables.open(tmp_path, shapes, state=state, **options)
    again.use_best(0)
    np.testing.assert_array_equal(again.tables["author"].rows(np.arange(20)), kept)
    again.close()


class FakeBatch(dict[str, Any]):
    """{node type: what has n_id}, as far as tables know a batch of HeteroData."""

    table_rows: Any

    def __init__(self, **node: Tensor) -> None:
        super().__init__({name: SimpleNamespace(n_id=ids) for name, ids in node.items()})
