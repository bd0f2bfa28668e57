"""Arguments of PyG's loader, brought into our own form."""

from typing import Any

import numpy as np
import pytest
import torch

import ooc
from ooc.loading.arguments import dataset_of, fanout_of
from ooc.models import summing_of
from ooc.stores.errors import ConfigError
from tests.conftest import MakeStore


def test_an_open_data_set_is_not_opened_again(make_store: MakeStore) -> None:
    store = make_store()
    with ooc.open(store, memory="4GB") as ds:
        assert dataset_of(ds) is ds
        with dataset_of(store) as other:
            assert other.memory is None


@pytest.mark.parametrize("given", [[10, -1], (10, -1), np.array([10, -1]), torch.tensor([10, -1])])
def test_a_fanout_may_be_any_sequence_of_whole_numbers(given: Any) -> None:
    assert fanout_of(given) == [10, -1]


@pytest.mark.parametrize("given", [[2, 0.5], ["2"], [None], np.array([2.5]), torch.tensor([1.5])])
def test_other_than_whole_numbers_are_refused_as_a_fanout(given: Any) -> None:
    with pytest.raises(ConfigError, match="whole numbers"):
        fanout_of(given)


def test_old_names_of_arguments_warn_and_work(make_store: MakeStore) -> None:
    with ooc.open(make_store()) as ds:
        with pytest.warns(DeprecationWarning, match="world is now world_size"):
            old = ooc.NeighborLoader(ds, [2], batch_size=8, world=2, rank=1)
        assert old.state_dict() == ooc.NeighborLoader(ds, [2], batch_size=8, world_size=2, rank=1).state_dict()
        with pytest.warns(DeprecationWarning, match="summing is now pre_aggregation"):
            ooc.NeighborLoader(ds, [2], summing=None)
        with pytest.raises(ConfigError, match="world_size is given twice"):
            ooc.ClusterLoader(ds, 1, num_parts=2, world=1, world_size=1)
    with pytest.warns(DeprecationWarning, match="pre_aggregation_of"):
        assert summing_of(torch.nn.Linear(2, 2)) is None


def test_warnings_name_the_line_of_the_call(make_store: MakeStore) -> None:
    with ooc.open(make_store()) as ds:
        for make in (
            lambda **given: ooc.NeighborLoader(ds, [2], **given),
            lambda **given: ooc.ClusterLoader(ds, 1, num_parts=2, **given),
            lambda **given: ooc.SaintLoader(ds, "node", batch_size=5, **given),
        ):
            with pytest.warns(UserWarning, match="num_workers changes nothing") as caught:
                make(num_workers=2)
            assert caught[0].filename == __file__
