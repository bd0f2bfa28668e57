"""Gradients at rows that several threads add to: the same bits every time, in models of ours and of the user's."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ooc.temporal.event_models import TGAT, Sizes
from ooc.temporal.window_task import PairScores
from ooc.training.build import pick_device

ROWS, WIDTH, READS = 40, 128, 20_000


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """As many threads as make sums in another order likely, and torch's settings as they were."""
    before = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
    torch.use_deterministic_algorithms(False)


def gradients(compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Of rows [ROWS, WIDTH], computed several times."""
    found = []
    for _ in range(6):
        rows = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
        out = compute(rows)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).sin())
        assert rows.grad is not None
        found.append(rows.grad)
    return found


def at_rows() -> Tensor:
    return torch.randint(0, ROWS, (READS,), generator=torch.Generator().manual_seed(0))


def test_scores_of_pairs_have_one_gradient() -> None:
    torch.manual_seed(0)
    scores, index = PairScores(WIDTH), at_rows()
    first, *others = gradients(lambda rows: scores(rows, index, index.flip(0)))
    assert all(torch.equal(first, each) for each in others)


def test_queries_of_events_have_one_gradient() -> None:
    torch.manual_seed(0)
    model, index = TGAT(Sizes(features=WIDTH, memory=0, msg=0, time=4, hidden=WIDTH), (), layers=0), at_rows()
    edges = torch.empty((2, 0), dtype=torch.int64)

    def compute(rows: Tensor) -> Tensor:
        batch = SimpleNamespace(edge_index=edges, entry_t=torch.zeros(READS), x=rows, entry=index, query=index.flip(0))
        out: Tensor = model(batch)[0]
        return out

    first, *others = gradients(compute)
    assert all(torch.equal(first, each) for each in others)


def test_indexing_in_a_users_model_has_one_gradient() -> None:
    """torch adds them in any order on the CPU, unless told otherwise."""
    pick_device("cpu")
    index = at_rows()
    first, *others = gradients(lambda rows: rows[index])
    assert all(torch.equal(first, each) for each in others)
