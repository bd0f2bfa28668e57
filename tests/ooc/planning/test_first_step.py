"""A first step that does not fit the memory is refused before it is computed, and says whether recomputing would do."""

import re
from typing import Any

import pytest
import torch

from ooc.models.builders import build_model, full_blocks
from ooc.planning import first_step
from ooc.planning.first_step import check_first_step, most_activations
from ooc.planning.recomputation import RecomputationPlanner
from ooc.planning.run_plan import CLOSE
from ooc.stores.errors import BudgetError

NODES, LAYERS = 10_000, 9


class Batch:
    """Rows of 64 columns, and the same block for every layer."""

    def __init__(self) -> None:
        edges = torch.randint(NODES, (2, 4 * NODES), generator=torch.Generator().manual_seed(0))
        self.x, self.blocks = torch.ones(NODES, 64), full_blocks(edges, NODES, LAYERS)


OTHERS = 10**7
"""bytes of the process but for activations"""


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


@pytest.fixture(autouse=True)
def resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "resident_bytes", lambda: (OTHERS, OTHERS))


def checked(batch: Any, given: Any, share: float, room: float = 0.1) -> bool:
    """Check a step in memory for `share` of its activations beside all else. room: for activations, where `auto` plans."""
    model = build_model("sage", 64, 64, 8, LAYERS)
    planner = RecomputationPlanner(room=2**40)
    kept = planner.predict(planner(model, batch)).peak
    return check_first_step(
        RecomputationPlanner(room=int(room * kept)), model, batch, given, int((OTHERS + share * kept) / CLOSE)
    )


def test_a_step_that_does_not_fit_is_refused_and_names_what_would_do(batch: Batch) -> None:
    with pytest.raises(BudgetError, match=r"a step would take about .* give `activation_checkpointing='auto'`") as refused:
        checked(batch, False, share=0.95)
    need = re.findall(r"about (\S+ \S+) of", str(refused.value))[0]
    assert str(refused.value).endswith(f"or `memory` at least {need}")


@pytest.mark.parametrize("given", [None, False, True], ids=str)
def test_recomputing_is_not_named_where_it_would_not_do(batch: Batch, given: Any) -> None:
    with pytest.raises(BudgetError, match="for activations: give smaller batches, narrower layers, or `memory`"):
        checked(batch, given, share=0.1)


def test_what_fits_says_whether_freed_blocks_have_room(batch: Batch) -> None:
    assert checked(batch, False, share=1.01)
    assert checked(batch, "sqrt", share=0.9)
    assert not checked(batch, False, share=40)


@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "gin"])
def test_sizes_alone_say_more_than_layers_take_and_spare_the_measurement(batch: Batch, model: str) -> None:
    built, planner = build_model(model, 64, 64, 8, LAYERS), RecomputationPlanner(room=2**40)
    most, taken = most_activations(built, batch), planner.predict(planner(built, batch)).peak
    assert taken <= most <= 40 * taken
    fresh = RecomputationPlanner(room=2**40)
    assert not check_first_step(fresh, built, batch, False, OTHERS + 3 * most)
    assert fresh.measurements == 0
