"""`ooc plan` without a mode plans each one as `ooc plan --mode` does: with its own division of the memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.config.nodes import TrainConfig, in_mode
from ooc.runtime.memory_plan import MemoryPlan
from ooc.training import loop
from ooc.training.batch_mode import BatchMode
from ooc.training.compare_modes import compare
from tests.conftest import MakeStore
from tests.ooc.planning.test_choose_mode import MODES
from tests.ooc.runs import configure

N = 3000
PROCESS, MEMORY = 2 * 10**9, 3 * 10**9


@pytest.fixture
def config(make_store: MakeStore, tmp_path: Path) -> TrainConfig:
    """A run without a mode, whose epoch is a step or a few."""
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, N, (2, 10 * N))
    x = rng.standard_normal((N, 64), dtype=np.float32)
    store = make_store(num_nodes=N, src=src, dst=dst, weight=True, parts=np.arange(65) * N // 64, x=x)
    settings: dict[str, Any] = {"memory": str(MEMORY), "evaluate": "layerwise", "epochs": 1, "batch_size": 512}
    return configure(store, tmp_path / "run", **settings)


@pytest.mark.slow
def test_each_mode_is_compared_with_the_figures_of_its_own_plan(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.stores.process.resident_bytes", lambda: (PROCESS, PROCESS))
    budgets: list[MemoryPlan] = []

    predict = BatchMode.predict

    def noting(self: BatchMode, *args: Any, **options: Any) -> Any:
        made = predict(self, *args, **options)
        budgets.append(made.budget)
        return made

    monkeypatch.setattr(BatchMode, "predict", noting)
    chosen, plan = compare(config)
    compared, budgets[:] = dict(zip([*MODES, "chosen"], budgets, strict=True)), []
    assert [candidate.fix for candidate in chosen.candidates] == [None] * len(MODES)
    for candidate in chosen.candidates:
        own = in_mode(config, candidate.mode, candidate.settings)
        alone = loop.plan(own)
        assert alone.budget == compared[candidate.mode], candidate.mode
        found = alone.prediction
        assert candidate.edges_read == round(found.edge_bytes_read)
        assert candidate.features_read == pytest.approx(found.bytes_read - found.edge_bytes_read, rel=0.01)
        assert candidate.histories_written == round(found.history_bytes_written)
        if candidate.mode == chosen.recommended:
            assert plan.budget == alone.budget
