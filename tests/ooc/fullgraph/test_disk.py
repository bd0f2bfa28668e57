"""The disk that values of a step take: no more at a time than was planned, where there is no room for all of them."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.fullgraph.executor import Executor
from ooc.fullgraph.placement.op_costs import Speed, StepProfile
from ooc.fullgraph.placement.step_plan import TierRoom, predict
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import LossOf, agree, cut_into, gradients, make, store_of


def most_on_disk(full: FullGraph) -> int:
    """Bytes of the last step, without the edges, which have room between their pieces."""
    edges = [full.store.disk.opened(name) for name in ("tiles", "tiles-back")]
    taken = sum(rows.dtype.itemsize * int(np.prod(rows.shape)) for rows in edges if rows is not None)
    return max(sample.disk for sample in full.traffic.samples) - taken


@pytest.mark.cases(1)
@pytest.mark.parametrize("settings", [{}, {"norm": "batch", "residual": True}], ids=["plain", "added"])
def test_files_go_with_their_values_where_the_disk_has_room_for_no_more(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    cut_into(5, monkeypatch)
    model = make("sage", **settings)
    with Dataset.open(store_of(make_store)) as ds:
        room = TierRoom(10**6, 0, 10**9)
        with closing(FullGraph(model, ds, tmp_path / "all", room=room.memory)) as full:
            placements = {
                v.name: TensorPlacement.RECOMPUTED if v.kind == "saved" else TensorPlacement.DISK for v in full.program.values
            }
            full.placement = Placement(placements)
            unmeasured = StepProfile({}, {TensorPlacement.DISK: Speed(1.0, 1.0)}, 0.0)
            planned = predict(full.program, unmeasured, full.placement, room).peak[2]
            planned -= full.program.value("edges").nbytes
            value, expected = full.step(LossOf(ds)), gradients(model)
            assert most_on_disk(full) > planned, "files that stay for the next step"
        with closing(FullGraph(model, ds, tmp_path / "few", room=room.memory)) as full:
            full.placement, full.disk = Placement(placements), planned
            for _ in range(2):
                model.zero_grad()
                assert full.step(LossOf(ds)) == value
                agree(gradients(model), expected, 0.0)
                assert most_on_disk(full) <= planned


def test_what_waits_for_its_way_down_is_counted_and_taken_off_again(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(5, monkeypatch)
    left, release = list[int](), Executor._release

    def released(stepper: Executor) -> None:
        left.append(stepper.pending_bytes)
        release(stepper)

    monkeypatch.setattr(Executor, "_release", released)
    most = []
    with Dataset.open(store_of(make_store)) as ds:
        for saved in (TensorPlacement.RETAINED, TensorPlacement.RECOMPUTED):
            with closing(FullGraph(make("gin"), ds, tmp_path / saved, room=10**7)) as full:
                values = full.program.values
                full.placement = Placement({v.name: saved if v.kind == "saved" else TensorPlacement.RETAINED for v in values})
                full.step(LossOf(ds))
                most.append(max(sample.memory for sample in full.traffic.samples))
    assert left == [0, 0]
    assert most[0] > most[1]
