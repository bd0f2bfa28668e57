"""TGB's evaluation beside the scores with one negative per event: fixed draws in any run, and all else is as without it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ooc
from ooc.config.events import EventsConfig
from ooc.report.page import write_report
from ooc.sampling.negatives import TgbNegatives
from ooc.sampling.time_windows import chronological
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.training.event_mode import EventMode, EventScores
from ooc.training.loop import train
from ooc.training.summary import score_lines
from tests.ooc.runs import KillAt, Killed
from tests.ooc.temporal_stores import Edges
from tests.ooc.training.test_event_runs import SMALL, same

RATIO = 6
MODELS: dict[str, dict[str, Any]] = {
    "tgn": {},
    "tgat": {"num_neighbors": [3, 2]},
    "graphmixer": {},
    "tests.ooc.training.test_tgb_scores:Recent": {},
}
NAMES = {"mrr", "hits@1", "hits@3", "hits@10"}


class Recent(nn.Module):
    """Rows from how many past events a query has, and its node."""

    def __init__(self, hidden_channels: int, time_dim: int) -> None:
        super().__init__()
        self.lin = nn.Linear(2, hidden_channels)

    def forward(self, batch: Any) -> torch.Tensor:
        count = torch.bincount(batch.edge_index[1], minlength=len(batch.entry))[batch.query].float()
        node = batch.n_id[batch.entry[batch.query]].float().sin()
        rows: torch.Tensor = self.lin(torch.stack([count, node], dim=1))
        return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Edges(span=150).store(tmp_path_factory.mktemp("tgb"), undirected=True)


def configure(store: Path, out: Path, **settings: Any) -> EventsConfig:
    model = settings.get("model", "tgn")
    sizes = {} if model == "tgn" else {"memory_dim": 100}
    return EventsConfig(store=store, out=out, **{**SMALL, "epochs": 1, **sizes, **MODELS[model], **settings})


def ranks_of(positive: np.ndarray[Any, Any], negative: list[np.ndarray[Any, Any]]) -> dict[str, float]:
    """The metrics of TGB's Evaluator: the mean of the optimistic and the pessimistic rank."""
    rank = np.array([0.5 * ((own > p).sum() + (own >= p).sum()) + 1 for p, own in zip(positive, negative, strict=True)])
    return {"tgb_mrr": (1 / rank).mean()} | {f"tgb_hits@{k}": (rank <= k).mean() for k in (1, 3, 10)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", MODELS)
def test_all_else_stays_and_the_ranks_are_those_of_the_same_lists(store: Path, tmp_path: Path, model: str) -> None:
    """Read from a file, the lists go through another path: as the only negatives, of whole batches."""
    with ooc.open(store) as ds:
        splits = chronological(ds.events, 0.15, 0.15)
        events = ds.events.read(splits["val"][0], len(ds.events), [])
        lists = TgbNegatives(ds, RATIO).draw(events, np.zeros(len(events), np.int64), 0)
    assert (lists != events.dst[:, None]).all(), "none is short"
    np.save(tmp_path / "lists.npy", lists)
    plain = train(configure(store, tmp_path / "plain", model=model))
    given = train(configure(store, tmp_path / "given", model=model, eval_negatives=str(tmp_path / "lists.npy")))
    found = train(configure(store, tmp_path / "tgb", model=model, eval_negatives="tgb", eval_ratio=RATIO))
    assert found["monitor"] == "ap"
    for split in ("val", "test"):
        one, other, many = (each["metrics"][split] for each in (plain, found, given))
        assert {name: other[name] for name in one} == one
        assert other.keys() - one.keys() == {f"tgb_{name}" for name in NAMES}
        assert {name: other[f"tgb_{name}"] for name in NAMES} == pytest.approx(many, abs=2e-3)
        bank, banks = (each["baselines"]["EdgeBank"][split] for each in (found, given))
        assert {name: bank[f"tgb_{name}"] for name in NAMES} == banks


def test_edgebank_is_ranked_as_tgb_defines_it(store: Path, tmp_path: Path) -> None:
    """With lists that are short of negatives."""
    with ooc.open(store) as ds:
        mode = EventMode(configure(store, tmp_path / "run", eval_negatives="tgb", eval_ratio=40, batch_size=1), ds)
        mode.open(SimpleNamespace(watchers=SimpleNamespace(note=print)), None, None)  # type: ignore[arg-type]
        scores = mode.baselines["EdgeBank"]
        mode.close()
        src, dst, time = (np.asarray(ds.events.map(name)) for name in ("src", "dst", "time"))
        splits = chronological(ds.events, 0.15, 0.15)
        for split in ("val", "test"):
            first, last = splits[split]
            lists = TgbNegatives(ds, 40)
            block = ds.events.read(first, last, [])
            drawn = lists.draw(block, np.zeros(len(block), np.int64), 0)
            positive, negative = [], []
            for event, own in zip(range(first, last), drawn, strict=True):
                known = set(zip(src[time < time[event]], dst[time < time[event]], strict=True))
                positive.append(float((src[event], dst[event]) in known))
                negative.append(np.array([float((src[event], each) in known) for each in own if each != dst[event]]))
            assert min(map(len, negative)) < 40
            found = {name: value for name, value in scores[split].items() if name.startswith("tgb_")}
            assert found == pytest.approx(ranks_of(np.array(positive), negative))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tgn", "tgat"])
def test_kills_reads_and_memory_change_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    settings = {"model": model, "eval_negatives": "tgb", "eval_ratio": 30, "epochs": 2, "monitor": "tgb_mrr"}
    summary = train(configure(store, tmp_path / "a", **settings))
    assert summary["monitor"] == "tgb_mrr"
    monkeypatch.setattr("ooc.loading.event_loader.PREFETCH", 1)
    monkeypatch.setattr("ooc.history.rows.ResidentRows.nbytes", lambda rows, steps: 1 << 60)  # so rows are read and written
    with pytest.raises(Killed):
        train(configure(store, tmp_path / "b", engine="pread", checkpoint_every=2, **settings), watcher=KillAt(19))
    train(configure(store, tmp_path / "b", engine="pread", checkpoint_every=2, **settings), resume=True)
    same(tmp_path / "a", tmp_path / "b")


def test_the_draws_depend_on_neither_seed_nor_batches(store: Path, tmp_path: Path) -> None:
    found = []
    for seed, batch_size in ((1, 20), (2, 33)):
        config = configure(store, tmp_path / "run", model="graphmixer", eval_negatives="tgb", seed=seed, batch_size=batch_size)
        assert config.eval_ratio == 100
        with ooc.open(store) as ds:
            mode = EventMode(config, ds)
            parts = [batch.neg_dst for batch in mode.loaders["test"] if "part_of" in batch]
            found.append(torch.cat(parts))
            mode.close()
    assert torch.equal(*found)


def test_the_tables_memory_is_part_of_the_plan(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Dataset.open(store, memory="2GB") as ds:
        plans = []
        for settings in ({}, {"eval_negatives": "tgb"}):
            mode = EventMode(configure(store, tmp_path / "run", **settings), ds)
            plans.append(mode.budget.model)
            mode.close()
        assert mode.ranking is not None
        assert plans[1] - plans[0] == mode.ranking.nbytes > 0
        monkeypatch.setattr("ooc.graph.relabel.RelabelTable.nbytes", 10**12)
        with pytest.raises(BudgetError, match="the pairs of 283 training events"):
            EventMode(configure(store, tmp_path / "run", eval_negatives="tgb"), ds)


def test_it_is_reported(store: Path, tmp_path: Path) -> None:
    summary = train(configure(store, tmp_path / "run", eval_negatives="tgb", eval_ratio=30))
    lines, page = score_lines(summary), write_report(tmp_path / "run").read_text()
    assert [line.split(":")[0] for line in lines] == ["val", "val of EdgeBank", "test", "test of EdgeBank", "negatives"]
    assert all("tgb_mrr" in line for line in lines)
    said = "for tgb_mrr: up to 30, half of them training destinations of the source, the others any of 30 destinations"
    assert said in lines[4]
    assert said in page
    assert "<th>tgb mrr</th>" in page
    assert '"tgb_hits@10"' in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eval_negatives": "random", "monitor": "tgb_mrr"}, "monitor = tgb_mrr is a score of eval_negatives = tgb"),
        ({"eval_negatives": "tgb", "destinations": [3, 9]}, "leave it out, or eval_negatives = tgb"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EventsConfig(store="s", out="o", **settings)


def test_an_own_destination_that_fills_a_row_is_no_negative(tmp_path: Path) -> None:
    scores = EventScores(tmp_path)
    batch = {"part_of": 0, "dst": torch.tensor([5, 7]), "neg_dst": torch.tensor([[1, 5, 5], [1, 2, 7]])}
    positive, negative = torch.tensor([1.0, 1.0]), torch.tensor([[2.0, 1.0, 1.0], [1.0, 0.0, 3.0]])
    scores.update(SimpleBatch(batch), positive, negative)
    assert scores.compute() == ranks_of(np.array([1.0, 1.0]), [np.array([2.0]), np.array([1.0, 0.0])])


class SimpleBatch(dict[str, Any]):
    """Fields by name and as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]
