"""Rows of the halo that ranks compute themselves: the step of one process, whichever they are."""

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ooc.fullgraph.halo import exchange
from ooc.fullgraph.halo.part import HaloSettings
from ooc.fullgraph.halo.reach import Choose, HaloCandidates, Mask, recompute_all, recompute_first, recompute_none
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import NAMES, LossOf, agree, cut_into, gradients, make, store_of
from tests.ooc.fullgraph.over_ranks import run_over
from tests.scale import few

ROOM = 10**9
EPOCHS = 2
SETTINGS: list[dict[str, Any]] = [{}, {"dropout": 0.5}, {"norm": "batch", "residual": True, "dropout": 0.3}]
WHERE = [TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.RECOMPUTED]


class Case(NamedTuple):
    store: Path
    name: str
    settings: dict[str, Any]
    where: TensorPlacement
    choose: Choose
    halo: HaloSettings = HaloSettings()


class AnyRows:
    """Rows are recomputed with probability `share`, each rank's of its own."""

    def __init__(self, share: float, seed: int) -> None:
        self._share, self._seed = share, seed

    def __call__(self, rows: HaloCandidates) -> Mask:
        key = [self._seed, rows.level, len(rows.node), int(rows.node.sum())]
        found: Mask = np.random.default_rng(key).random(len(rows.node)) < self._share
        return found

    def __repr__(self) -> str:
        return f"AnyRows({self._share}, {self._seed})"


class Found(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    sent: int
    recomputed: tuple[int, ...]


def trained(ranks: Ranks, case: Case, folder: Path) -> Found:
    """Two epochs in float64."""
    with Dataset.open(case.store) as ds:
        model = make(case.name, **case.settings).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, grads, more = [], [], {} if ranks.alone else {"halo": case.halo}
        made = {"room": ROOM, "ranks": ranks, "recompute": case.choose, **more}
        with closing(FullGraph(model, ds, folder / f"rank{ranks.rank}", **made)) as full:
            where = {v.name: case.where if case.where in v.placements else TensorPlacement.DISK for v in full.program.values}
            full.placement = Placement(where)
            for epoch in range(EPOCHS):
                torch.manual_seed(epoch)
                losses.append(full.step(LossOf(ds)))
                grads.append(gradients(model))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            sent, recomputed = full.bytes_exchanged, full.shape.recomputed
        return Found(losses, grads, {name: value.clone() for name, value in model.state_dict().items()}, sent, recomputed)


def all_trained(ranks: Ranks, cases: list[Case], folder: Path, parts: int = few(5, 8)) -> list[Found]:
    """Of each case, in chunks of a few rows and exchanges of a few rows at a time."""
    with pytest.MonkeyPatch.context() as patch:
        cut_into(parts, patch)
        patch.setattr(exchange, "PIECE_BYTES", 2048)
        return [trained(ranks, case, folder / f"case{number}") for number, case in enumerate(cases)]


def equal_one_process(cases: list[Case], world_size: int, folder: Path) -> list[list[Found]]:
    """Losses within 1e-6, gradients within 1e-5: in float64 much less. What each rank found, by case."""
    expected = all_trained(ALONE, cases, folder / "alone")
    ranks = run_over(world_size, all_trained, cases, folder / "several", folder=folder)
    by_case = [list(each) for each in zip(*ranks, strict=True)]
    for case, one, found in zip(cases, expected, by_case, strict=True):
        for rank in found:
            np.testing.assert_allclose(rank.losses, one.losses, rtol=1e-9, err_msg=str(case))
            for ours, theirs in zip(rank.gradients, one.gradients, strict=True):
                agree(ours, theirs, 1e-8)
            assert rank.losses == found[0].losses, "the same on every rank"
            for name, value in one.state.items():
                torch.testing.assert_close(rank.state[name], value, rtol=1e-7, atol=1e-9, msg=f"{name} of {case}")
    return by_case


def test_recomputed_rows_change_nothing_and_are_not_sent(make_store: MakeStore, tmp_path: Path) -> None:
    store = store_of(make_store, weighted=True)
    settings = {"dropout": 0.5, "norm": "batch"}
    chosen = [recompute_none, recompute_first, AnyRows(0.5, 1), recompute_all]
    cases = [Case(store, "gcn", settings, TensorPlacement.DISK, each) for each in chosen]
    none, first, some, every = equal_one_process(cases, 2, tmp_path)
    for rank in range(2):
        sent = [found[rank].sent for found in (none, first, some, every)]
        assert sent[0] > sent[1] > sent[3] == 0
        assert sent[0] > sent[2] > 0
        assert none[rank].recomputed == (0, 0, 0)
        assert first[rank].recomputed[0] > 0 == first[rank].recomputed[1]
        assert some[rank].recomputed[0] > some[rank].recomputed[1] > some[rank].recomputed[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_rows_may_be_recomputed(make_store: MakeStore, tmp_path: Path, world_size: int) -> None:
    """All built-in models, with dropout, batch norm and residuals, wherever values are, any rows of any layer."""
    plain, weighted = (store_of(make_store, weighted=each, name=f"{each}.ooc") for each in (False, True))
    cases: list[Case] = []
    for name in NAMES:
        for number, settings in enumerate(SETTINGS[: 2 if name in ("appnp", "sgc") else None]):
            choose = recompute_all if number == 0 and world_size == 2 else AnyRows(0.5, len(cases))
            store, where = weighted if number == 1 else plain, WHERE[len(cases) % len(WHERE)]
            cases.append(Case(store, name, settings, where, choose))
    equal_one_process(cases if world_size == 2 else cases[::4], world_size, tmp_path)
