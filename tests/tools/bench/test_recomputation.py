"""The benchmark of recomputed layers, on a small graph."""

import torch

from ooc.models.builders import build_model, full_blocks
from tools.bench.sampled.recomputation import SHARES, compared, made_graph


def test_ways_take_what_they_say() -> None:
    edge_index, x = made_graph(1000, 10_000)
    torch.manual_seed(0)
    model = build_model("sage", x.size(1), 64, 8, 6, norm="layer")
    rows = compared(model, x, full_blocks(edge_index, len(x), 6), rounds=1)
    found = {row.way: row.peak for row in rows if row.budget is None}
    assert found["layers"] < found["none"]
    assert found["sqrt"] < found["none"]
    assert len(rows) == 5 + len(SHARES)
    for row in rows:
        assert row.peak < 1.1 * row.planned_peak
        if row.way == "auto":
            assert row.budget is not None
            assert row.peak < 1.1 * row.budget
    for way in rows[1:3]:
        same = next(row for row in rows if row.budget == way.planned_peak)
        assert same.planned_seconds <= way.planned_seconds
    assert any(row.way == "auto" and row.recomputation for row in rows)
