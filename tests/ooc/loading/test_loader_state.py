"""NeighborLoader's cursor: what batches depend on, epochs, ranks, resume to the bit, and epochs left half-consumed."""

import gc
import json

import pytest
import torch

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.subgraph_loaders import ClusterLoader
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from tests.ooc.batches import same
from tests.waiting import eventually, no_threads

N, E = 60, 240


@pytest.fixture
def ds(make_store):
    with Dataset.open(make_store(num_nodes=N, num_edges=E)) as opened:
        yield opened


def test_what_batches_depend_on(ds):
    def batches(dataset=ds, epochs=2, **changes):
        arguments = {"batch_size": 7, "shuffle": True, "replace": False, "seed": 5, **changes}
        loader = NeighborLoader(dataset, [3, 2], "train", **arguments)
        return [batch for _ in range(epochs) for batch in loader]

    base = batches()
    assert len(base) == 2 * 6
    assert same(base, batches(sample_threads=3, read_threads=4))
    for options in ({"engine": "mmap"}, {"in_memory": True}, {"memory": "64GB"}):
        with Dataset.open(ds.path, **options) as other:
            assert same(base, batches(other))
            if "in_memory" in options:
                assert same(base, batches(other, prefetch_factor=1))
    for changes in ({"seed": 6}, {"shuffle": False}, {"replace": True}):
        assert not same(base, batches(**changes))
    assert not same(base[:6], base[6:])


def test_resume_at_every_step_continues_to_the_bit(ds):
    def make():
        return NeighborLoader(ds, [3, 3], "train", batch_size=8, shuffle=True, drop_last=True, seed=0)

    loader = make()
    expected, states = [], [loader.state_dict()]
    for _ in range(3):
        for batch in loader:
            expected.append(batch)
            states.append(loader.state_dict())
    assert len(expected) == 3 * len(loader) == 12
    for taken, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(state)
        resumed.set_epoch(state["epoch"])  # as a training loop does first thing in an epoch: the step stays
        got = list(resumed)
        while len(got) < len(expected) - taken:
            got += list(resumed)
        assert same(got, expected[taken:])


def test_the_cursor_counts_what_the_consumer_took_not_what_was_read_ahead(ds):
    loader = NeighborLoader(ds, [2], "train", batch_size=4)
    epoch = iter(loader)
    for step in range(3):
        next(epoch)
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (0, step + 1)
    assert eventually(lambda: loader.times()["collate"]["items"] > 3)
    epoch.close()
    assert list(epoch) == []
    assert loader.state_dict()["step"] == 3
    rest = NeighborLoader(ds, [2], "train", batch_size=4)
    rest.load_state_dict({"epoch": 0, "step": 3})
    assert len(list(rest)) == len(loader) - 3
    assert (rest.state_dict()["epoch"], rest.state_dict()["step"]) == (1, 0)


def test_a_state_is_one_of_a_store_and_of_input_nodes(ds, make_store):
    """Of what they hold, wherever they lie and however they are given."""
    ids = ds.split("train")
    state = NeighborLoader(ds, [2], ids, batch_size=4, seed=1).state_dict()
    NeighborLoader(ds, [2], torch.from_numpy(ids).int(), batch_size=4, seed=1).load_state_dict(state)
    for other in (ids[::-1].copy(), "train", None):
        with pytest.raises(ConfigError, match=r"(input_nodes|num_seeds) was"):
            NeighborLoader(ds, [2], other, batch_size=4, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="input_nodes was"):
        NeighborLoader(ds, [2], ids, batch_size=4, input_id=ids, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="mode was 'neighbor' and is 'cluster'"):
        ClusterLoader(ds, 4, num_parts=len(ids), seed=1).load_state_dict({"epoch": 0, "step": 0, "mode": "neighbor"})
    for name, seed in (("same.ooc", 0), ("other.ooc", 1)):
        with Dataset.open(make_store(name, num_nodes=N, num_edges=E, seed=seed)) as moved:
            loader = NeighborLoader(moved, [2], ids, batch_size=4, seed=1)
            if seed:
                with pytest.raises(ConfigError, match="another store"):
                    loader.load_state_dict(state)
            else:
                loader.load_state_dict(state)


def test_a_state_of_another_loader_is_refused(ds):
    with pytest.raises(ConfigError, match="'epoch' and 'step', not"):
        NeighborLoader(ds, [2], "train").load_state_dict({"next": 3})
    state = NeighborLoader(ds, [2], "train", batch_size=4).state_dict()
    with pytest.raises(ConfigError, match="batch_size was 4 and is 5"):
        NeighborLoader(ds, [2], "train", batch_size=5).load_state_dict(state)
    with pytest.raises(ConfigError, match="step 99"):
        NeighborLoader(ds, [2], "train", batch_size=4).load_state_dict({"epoch": 0, "step": 99})


def test_a_state_leads_the_same_loader_back_and_is_json(ds):
    loader = NeighborLoader(ds, [2], "train", batch_size=5, shuffle=True)
    epoch = iter(loader)
    before = loader.state_dict()
    taken = [next(epoch) for _ in range(3)]
    middle = json.loads(json.dumps(loader.state_dict()))
    assert middle == loader.state_dict()
    rest = list(epoch)
    loader.load_state_dict(middle)
    assert same(list(loader), rest)
    loader.load_state_dict(before)
    assert same(list(loader), taken + rest)
    with pytest.raises(ConfigError, match="step -1"):
        loader.load_state_dict({**before, "step": -1})


def test_epochs_follow_one_another_and_can_be_set(ds):
    loader = NeighborLoader(ds, [2], "train", batch_size=9, shuffle=True)
    zero, one = list(loader), list(loader)
    loader.set_epoch(0)
    assert same(list(loader), zero)
    assert same(list(loader), one)
    ids = torch.cat([batch.n_id[: batch.batch_size] for batch in one])
    assert ids.sort().values.tolist() == ds.split("train").tolist()
    assert [batch.batch_size for batch in one] == [9, 9, 9, 9]


def test_ranks_share_an_epoch(ds):
    parts = [list(NeighborLoader(ds, [1], batch_size=8, shuffle=True, rank=rank, world_size=3)) for rank in range(3)]
    assert [len(part) for part in parts] == [3, 3, 3]
    taken = torch.cat([batch.n_id[: batch.batch_size] for part in parts for batch in part])
    assert taken.sort().values.tolist() == list(range(N))
    assert not same(parts[0], parts[1])


def test_a_half_consumed_epoch_leaves_no_thread(ds):
    loader = NeighborLoader(ds, [2], batch_size=2)
    epoch = iter(loader)
    next(epoch)
    del epoch
    gc.collect()
    assert no_threads()
    for _ in loader:
        break
    gc.collect()
    assert no_threads()
