"""Negatives among the training's destinations, against numpy."""

from pathlib import Path

import numpy as np
import pytest

from ooc.config.events import EventsConfig
from ooc.config.snapshots import SnapshotsConfig
from ooc.sampling.negatives import RandomNegatives, destinations_of, negatives_of
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.events import EventBlock
from ooc.training.event_mode import EventMode
from tests.ooc.temporal_stores import Edges


def block_of(first: int, count: int) -> EventBlock:
    rng = np.random.default_rng(first)
    src, dst = rng.integers(0, 5, count), rng.choice([10, 12, 17], count)
    return EventBlock(first, src, dst, np.arange(count), {}, 0)


def test_negatives_are_destinations_and_not_the_events_own() -> None:
    among = np.array([10, 12, 17])
    negatives = RandomNegatives(0, 20, 8, among=among)
    whole = negatives.draw(block_of(0, 400), np.zeros(400, np.int64), 7)
    assert set(np.unique(whole)) == {10, 12, 17}
    assert (whole == block_of(0, 400).dst[:, None]).mean() < 1e-3
    counts = np.unique(whole, return_counts=True)[1]
    assert counts.min() > 0.8 * counts.mean()
    part = negatives.draw(block_of(0, 400).part(100, 150), np.zeros(50, np.int64), 7)
    np.testing.assert_array_equal(part, whole[100:150])
    with pytest.raises(ConfigError, match="1 node as destination"):
        RandomNegatives(0, 20, among=among[:1])


def test_nothing_after_training_is_known(tmp_path_factory: pytest.TempPathFactory) -> None:
    edges = Edges()
    with Dataset.open(edges.store(tmp_path_factory.mktemp("destinations"))) as ds:
        dst = np.asarray(ds.events.map("dst"))
        for last in (5, 40, len(dst)):
            np.testing.assert_array_equal(destinations_of(ds, 0, last), np.unique(dst[:last]))
        drawn = negatives_of(ds, "destinations", 3, among=lambda: destinations_of(ds, 0, 40))
        block = ds.events.read(0, len(dst), [])
        assert set(np.unique(drawn.draw(block, np.arange(len(dst)), 1))) == set(np.unique(dst[:40]))


def test_a_range_is_of_random_negatives() -> None:
    """The default, and what a run of an earlier version has in its configuration."""
    common = {"store": "s", "out": "o"}
    assert EventsConfig(**common).negatives == EventsConfig(**common).eval_negatives == "destinations"
    ranged = EventsConfig(**common, destinations=[3, 9])
    assert (ranged.negatives, ranged.eval_negatives) == ("random", "random")
    assert EventsConfig(**ranged.model_dump()) == ranged
    assert SnapshotsConfig(**common, window="2", destinations=[3, 9], negatives="historical").negatives == "historical"
    with pytest.raises(ValueError, match="destinations are a range for random negatives"):
        EventsConfig(**common, destinations=[3, 9], negatives="destinations")


def test_a_source_without_a_past_has_negatives_among_destinations_too(tmp_path: Path) -> None:
    edges = Edges(span=3000)
    edges.src %= 15
    edges.dst = 15 + edges.dst % 15
    with Dataset.open(edges.store(tmp_path, undirected=True)) as ds:
        block = ds.events.read(0, len(ds.events), [])
        for given, lowest in (({}, 15), ({"destinations": [3, 29]}, 3)):
            config = EventsConfig(store=ds.path, out=tmp_path / "run", negatives="historical", **given)
            mode = EventMode(config, ds)
            found = mode.negatives["train"].draw(block, ds.events.before(block.time), 1)
            assert lowest <= found.min() < lowest + 4
            assert mode.counts()["historical_negatives_random"] > 10
            mode.close()
