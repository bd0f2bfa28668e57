"""Checkpoints and metrics.jsonl: the old state survives whatever happens to the new."""

import json
from pathlib import Path

import pytest
import torch

from ooc.stores.errors import ConfigError, StoreError
from ooc.training import checkpoint
from ooc.training.checkpoint import MetricsLog, RunDir, read_metrics


def test_a_state_comes_back_equal(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    state = {"model": {"w": torch.randn(3)}, "cursor": (2, 5), "best": None, "name": "x"}
    checkpoint.save(tmp_path, state)
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert torch.equal(found["model"]["w"], state["model"]["w"])  # type: ignore[index]
    assert (found["cursor"], found["best"], found["name"]) == ((2, 5), None, "x")


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"step": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        checkpoint.save(tmp_path, {"step": 2})
    monkeypatch.undo()
    assert checkpoint.load(tmp_path) == {"format": 1, "step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_damaged_or_newer_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, {"step": 1})
    content = path.read_bytes()
    torch.save([1], path)
    for damaged in (content[: len(content) // 2], b"hello\n", b"", path.read_bytes()):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"checkpoint\.pt: not a readable") as caught:
            checkpoint.load(tmp_path)
        words = f"its {len(damaged):,} bytes are damaged, cut short, or of another program; restore it from a copy, or start"
        assert words in str(caught.value)
    torch.save({"format": 99}, path)
    with pytest.raises(StoreError, match="format 99"):
        checkpoint.load(tmp_path)


def test_the_log_is_rolled_back_to_an_offset(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write({"epoch": 0, "step": 0, "loss": 0.1 + 0.2})
    offset = log.sync()
    log.write({"epoch": 0, "step": 1, "loss": 9.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"epoch": 0, "st')  # a line that a kill cut short
    assert [line["step"] for line in read_metrics(tmp_path)[0]] == [0, 1]
    log = MetricsLog(tmp_path, offset)
    log.write({"epoch": 0, "step": 1, "loss": 2.0})
    log.write({"epoch": 0, "train_loss": 1.0})
    log.close()
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("loss") for line in lines] == [0.1 + 0.2, 2.0, None]
    steps, epochs = read_metrics(tmp_path)
    assert (len(steps), len(epochs)) == (2, 1)


def test_a_log_that_was_cut_or_is_in_use_is_refused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write({"step": 0})
    with pytest.raises(ConfigError, match="another process"):
        MetricsLog(tmp_path)
    log.close()
    with pytest.raises(ConfigError, match="changed"):
        MetricsLog(tmp_path, offset=1000)
    assert read_metrics(tmp_path)[0] == [{"step": 0}]


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a run"):
        read_metrics(tmp_path)


def test_only_the_run_that_made_and_locked_a_directory_removes_it(tmp_path: Path) -> None:
    first, second, third = (RunDir(tmp_path / "run", resume) for resume in (False, False, True))
    first.claim(0)
    with pytest.raises(ConfigError, match="exists already"):
        second.claim(0)
    with pytest.raises(ConfigError, match="another process"):
        third.claim(0)
    for refused in (second, third):
        refused.discard_unsaved()
        refused.close()
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    first.discard_unsaved()
    first.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ['{"epoch": 0, ', "\x00\x00", "3", "{}"])
def test_a_damaged_line_of_the_log_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n' + damage + "\n")
    with pytest.raises(StoreError, match=r"metrics\.jsonl: line 2") as caught:
        read_metrics(tmp_path)
    assert "\n" not in str(caught.value)
