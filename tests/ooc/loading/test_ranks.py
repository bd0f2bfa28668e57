"""Seeds and shares of loaders that were given none: torch's generator and process group."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import GraphSAGE

import ooc
from ooc.sampling.negatives import RandomNegatives
from ooc.stores.errors import ConfigError
from tests.conftest import MakeStore
from tests.ooc.batches import same
from tests.ooc.process_groups import process_group
from tests.ooc.temporal_stores import Edges

N = 60


def seeds_of(loader: Any) -> list[int]:
    return [int(node) for batch in loader for node in batch.n_id[: batch.batch_size]]


def test_ranks_of_a_process_group_share_an_epoch(make_store: MakeStore) -> None:
    with ooc.open(make_store(num_nodes=N, num_edges=240)) as ds, warnings.catch_warnings():
        warnings.simplefilter("error")
        train = ds.split("train").tolist()
        own, whole, parts, subgraphs = [], [], [], []
        for rank in range(2):
            torch.manual_seed(rank)  # ranks agree on the order all the same
            with process_group(rank):
                common: dict[str, Any] = {"batch_size": 5, "shuffle": True}
                own.append(seeds_of(ooc.NeighborLoader(ds, [2], "train", **common)))
                whole.append(seeds_of(ooc.NeighborLoader(ds, [2], ds.split("train"), rank=0, world_size=1, **common)))
                parts.append(seeds_of(ooc.ClusterLoader(ds, 1, shuffle=True, num_parts=6)))
                saint = ooc.SaintLoader(ds, "node", batch_size=5, num_steps=2, sample_coverage=1)
                subgraphs.append(seeds_of(saint))
                saint.close()
        assert sorted(own[0] + own[1]) == sorted(whole[0]) == sorted(whole[1]) == train
        assert len(own[0]) == len(own[1])
        assert sorted(parts[0] + parts[1]) == list(range(N))
        assert subgraphs[0] != subgraphs[1]


def test_what_a_process_group_leaves_open_is_asked_or_said(make_store: MakeStore, tmp_path: Path) -> None:
    with ooc.open(make_store(num_nodes=N, num_edges=240)) as ds, process_group(1):
        for ids in (ds.split("train"), np.ones(N, bool)):
            with pytest.raises(ConfigError, match=r"rank=1, world_size=2 if .* or rank=0, world_size=1 if"):
                ooc.NeighborLoader(ds, [2], ids, shuffle=True)
        for one in ({"rank": 1}, {"world_size": 2}):
            with pytest.raises(ConfigError, match="together"):
                ooc.NeighborLoader(ds, [2], "train", **one)
        with pytest.warns(UserWarning, match="share of rank 1 of 2"):
            ooc.NeighborLoader(ds, [2], "val")
    with ooc.open(Edges(20, 200).store(tmp_path)) as ds, process_group(0), pytest.warns(UserWarning, match="each has all"):
        ooc.EventLoader(ds, 40)


def test_torchs_generator_seeds_loaders_that_were_given_no_seed(make_store: MakeStore) -> None:
    with ooc.open(make_store(num_nodes=N, num_edges=240)) as ds:
        makes = [
            lambda: ooc.NeighborLoader(ds, [2], "train", batch_size=7, shuffle=True),
            lambda: ooc.ClusterLoader(ds, 2, shuffle=True, num_parts=8),
            lambda: ooc.SaintLoader(ds, "node", 9, num_steps=3, sample_coverage=1),
        ]
        for make in makes:
            found = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                found.append(list(make()))
            assert same(found[0], found[1])
            assert not same(found[0], found[2])
            assert not same(list(make()), list(make()))
            loader = make()
            expected, state = list(loader), loader.state_dict()
            resumed = make()
            resumed.load_state_dict({**state, "epoch": 0})  # its seed is the state's
            assert same(list(resumed), expected)
            assert resumed.state_dict() == state


def test_given_seeds_leave_torchs_generator_alone(make_store: MakeStore) -> None:
    with ooc.open(make_store()) as ds:
        before = torch.get_rng_state()
        loader = ooc.NeighborLoader(ds, [2], seed=np.int64(3))
        assert torch.equal(torch.get_rng_state(), before)
        with pytest.raises(ConfigError, match="seed was 3 and is 4"):
            ooc.NeighborLoader(ds, [2], seed=4).load_state_dict(loader.state_dict())
        with pytest.raises(ConfigError, match=r"seed must be a whole number or None, not 0\.5"):
            ooc.NeighborLoader(ds, [2], seed=0.5)


def test_streams_of_events_are_seeded_likewise(tmp_path: Path) -> None:
    with ooc.open(Edges(20, 200).store(tmp_path)) as ds:

        def make() -> ooc.EventLoader:
            return ooc.EventLoader(ds, 40, num_neighbors=[2], temporal_strategy="uniform", negatives=RandomNegatives(0, 20))

        torch.manual_seed(1)
        one = make()
        torch.manual_seed(1)
        expected = list(one)
        assert same(list(make()), expected)
        other = make()
        assert not same(list(other), expected)
        other.load_state_dict({**one.state_dict(), "epoch": 0})
        assert same(list(other), expected)


def test_inference_has_all_nodes_in_a_process_group_and_leaves_torchs_generator_alone(make_store: MakeStore) -> None:
    model = GraphSAGE(8, 8, 2, 3)
    with ooc.open(make_store(num_nodes=N, num_edges=240)) as ds:
        alone = ooc.infer(model, ds)[:]
        before = torch.get_rng_state()
        with process_group(1), warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_array_equal(ooc.infer(model, ds)[:], alone)
        assert torch.equal(torch.get_rng_state(), before)
