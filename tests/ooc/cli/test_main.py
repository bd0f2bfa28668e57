"""The command line: every verb on real files; what a user can act on is one line on stderr and exit code 2."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ooc.cli.flags import INGEST, flags_of
from ooc.cli.main import main
from ooc.cli.store_verbs import _left_out
from ooc.config.nodes import TrainConfig
from ooc.stores.ingest import IngestSpec
from ooc.stores.ingest.spec import BY_EDGE_TYPE, BY_NODE_TYPE
from ooc.training.watchers import LineWatcher
from tests.conftest import MakeStore
from tests.forked import Python

SMALL = ["--fanout", "3,3", "--hidden", "8", "--batch-size", "16", "--epochs", "2"]
UNPLANNED = [*SMALL, "--no-plan"]


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that these arguments are refused with."""
    assert main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ooc: error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """edges.npy, x.npy, y.npy, train.npy, val.npy, test.npy of 40 nodes."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "edges.npy", rng.integers(0, 40, (2, 200)))
    np.save(tmp_path / "x.npy", rng.standard_normal((40, 6)).astype(np.float32))
    np.save(tmp_path / "y.npy", rng.integers(0, 3, 40))
    for name, part in (("train", slice(0, 24)), ("val", slice(24, 32)), ("test", slice(32, 40))):
        np.save(tmp_path / f"{name}.npy", np.arange(40)[part])
    return tmp_path


def test_from_files_to_a_report(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, run = arrays / "a.ooc", arrays / "run"
    splits = [word for name in ("train", "val", "test") for word in (f"--{name}", f"{arrays}/{name}.npy")]
    nodes = ["--num-nodes", "40", "--features", f"x={arrays}/x.npy", "--labels", f"{arrays}/y.npy"]
    assert main(["ingest", str(store), "--edges", f"{arrays}/edges.npy", *nodes, *splits]) == 0
    assert "40 nodes, 200 edges" in capsys.readouterr().out
    assert main(["info", str(store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"] == {"train": 24, "val": 8, "test": 8}
    assert main(["info", str(store)]) == 0
    assert "train 24, val 8, test 8" in capsys.readouterr().out
    assert main(["info", str(store), "--id", "7"]) == 0
    assert capsys.readouterr().out == "7\n"
    assert main(["verify", str(store)]) == 0
    assert main(["train", str(store), "--out", str(run), *SMALL, "--memory", "4GB"]) == 0
    out, err = capsys.readouterr()
    assert "test: loss" in out
    assert "batches, superbatches, activations" in err, "the division of the memory is printed"
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").exists()


def test_a_config_holds_every_option_and_flags_override_it(make_store: MakeStore, tmp_path: Path) -> None:
    run, config = tmp_path / "run", tmp_path / "run.toml"
    config.write_text(f'store = "{make_store()}"\nout = "{run}"\nfanout = [-1, -1]\nepochs = 9\nhidden = 4\nmodel = "gcn"\n')
    assert main(["train", "--config", str(config), "--epochs", "1", "--fanout", "-1,2", "--no-rescale", "--no-plan"]) == 0
    saved = json.loads((run / "config.json").read_text())
    assert (saved["epochs"], saved["hidden"], saved["fanout"], saved["rescale"]) == (1, 4, [-1, 2], False)
    again = tmp_path / "again"
    assert main(["train", "--config", str(run / "config.json"), "--out", str(again)]) == 0
    assert (again / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_a_plan_takes_the_flags_of_training_and_writes_nothing(
    make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store()
    before = sorted(tmp_path.iterdir())
    assert main(["plan", str(store), *SMALL, "--mode", "sampled", "--memory", "4GB"]) == 0
    shown = capsys.readouterr().out
    told = (
        "process",
        "predicted peak",
        "seconds per epoch",
        "rows served from memory",
        "bottleneck",
        "features are read: engine ",
    )
    for text in told:
        assert text in shown
    assert main(["plan", str(store), *SMALL, "--mode", "sampled", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"]["seconds_per_epoch"] > 0
    assert found["steps"] == 4
    assert sorted(tmp_path.iterdir()) == before
    assert "give at least" in fails(capsys, "plan", store, *SMALL, "--memory", "1MB")
    assert "--lrr" in fails(capsys, "plan", store, "--lrr", 1)


def test_resume_needs_no_flags_again(make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, run, whole = make_store(), tmp_path / "run", tmp_path / "whole"
    assert main(["train", str(store), "--out", str(whole), *UNPLANNED, "--max-steps", "3"]) == 0
    assert main(["train", str(store), "--out", str(run), *UNPLANNED, "--max-steps", "1"]) == 0
    assert main(["train", "--out", str(run), "--resume", "--max-steps", "3"]) == 0
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert "another store" in fails(capsys, "train", make_store("b.ooc", seed=9), "--out", run, "--resume")
    assert "gin" in fails(capsys, "train", store, "--out", run, "--resume", "--model", "gin")


def test_a_run_that_is_not_there_is_not_resumed(
    make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, run = make_store(), tmp_path / "run"
    assert f"there is no run in {run}" in fails(capsys, "train", store, "--out", run, *UNPLANNED, "--resume")
    assert "give its directory as --out" in fails(capsys, "train", store, *UNPLANNED, "--resume")
    assert not run.exists()
    run.mkdir()  # a run that was killed before it began
    assert main(["train", str(store), "--out", str(run), *UNPLANNED, "--resume"]) == 0
    assert f"{run} holds no checkpoint: the run starts from the beginning" in capsys.readouterr().err


def test_a_run_without_out_is_numbered(
    make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = make_store()
    for number in (1, 2):
        assert main(["train", str(store), *UNPLANNED, "--max-steps", "1"]) == 0
        out, err = capsys.readouterr()
        name = f"runs/{store.stem}-{number}"
        assert f"{name}: 1 step;" in out
        assert f"writing to {name}" in err
        assert json.loads(Path(name, "config.json").read_text())["out"] == name
    assert main(["train", "--out", f"runs/{store.stem}-2", "--resume", "--max-steps", "2"]) == 0


def test_a_run_that_is_refused_names_no_directory(
    make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no store" in fails(capsys, "train", "nothing.ooc")
    assert "leaves nothing for batches" in fails(capsys, "train", make_store(), *UNPLANNED, "--memory", "1MB")
    assert not (tmp_path / "runs").exists()


def test_training_nodes_are_scored_on_request(
    make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(make_store()), *UNPLANNED]
    assert main([*command, "--out", f"{tmp_path}/a"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]] == ["val", "test"]
    assert main([*command, "--out", f"{tmp_path}/b", "--eval-splits", "train,val,test"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]] == ["train", "val", "test"]
    assert main([*command, "--out", f"{tmp_path}/c", "--eval-splits", ""]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_bad_settings_are_one_line(make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, run, config = make_store(), tmp_path / "run", tmp_path / "run.toml"
    config.write_text("epohcs = 3\n")
    assert "did you mean 'epochs'" in fails(capsys, "train", store, "--out", run, "--config", config)
    assert "2 layers" in fails(capsys, "train", store, "--out", run, "--layers", 2, "--fanout", "5,5,5")
    assert "--lrr" in fails(capsys, "train", store, "--out", run, "--lrr", 1)
    much = "ooc: error: --memory: 'much' is not a size in bytes: write it like 2GB, 512MB or 1.5GiB\n"
    assert fails(capsys, "train", store, "--out", run, "--memory", "much") == much
    assert fails(capsys, "ingest", run, "--edges", store, "--memory", "much") == much
    assert "valid number" in fails(capsys, "train", store, "--out", run, "--lr", "fast")
    assert "window is not set: give it as --window" in fails(capsys, "train", store, "--mode", "snapshots", "--out", run)
    assert "store is not set: give it as the argument STORE" in fails(capsys, "train", "--out", run)
    assert "store is not set" in fails(capsys, "train")
    assert "--mode" in fails(capsys, "train", "--mode")
    assert "RUN" in fails(capsys, "report")
    assert "no store" in fails(capsys, "train", tmp_path / "absent", "--out", run)
    assert "absent.toml" in fails(capsys, "train", store, "--out", run, "--config", tmp_path / "absent.toml")
    assert "leaves nothing" in fails(capsys, "train", store, "--out", run, "--memory", "1MB")
    assert not run.exists()
    run.mkdir()
    assert "exists already" in fails(capsys, "train", store, "--out", run)
    assert "not a run" in fails(capsys, "report", run)
    assert "there is no run in" in fails(capsys, "report", tmp_path / "absent")
    assert "No such command" in fails(capsys, "trian")
    assert "not a store" in fails(capsys, "info", tmp_path)
    assert "row 999" in fails(capsys, "info", store, "--id", 999)


@pytest.mark.parametrize(
    ("verb", "given", "says"),
    [
        ("train", "--epohcs", "No such option: --epohcs; did you mean --epochs?"),
        ("train", "--optoin", "No such option: --optoin"),
        ("ingest", "--colour", "No such option: --colour"),
        ("ingest", "--no-undirectd", "No such option: --no-undirectd; did you mean --no-undirected?"),
    ],
)
def test_an_unknown_option_names_what_may_be_meant(
    capsys: pytest.CaptureFixture[str], verb: str, given: str, says: str
) -> None:
    assert fails(capsys, verb, "a.ooc", given, 3).partition(" (see ")[0] == f"ooc: error: {says}"


def test_a_run_that_cannot_be_is_refused_before_torch_is_imported(make_store: MakeStore, tmp_path: Path) -> None:
    store, there, file = make_store(), tmp_path / "there", tmp_path / "file"
    there.mkdir()
    file.touch()
    without = tmp_path / "without.ooc"
    np.save(tmp_path / "e.npy", np.zeros((2, 3), int))
    np.save(tmp_path / "y.npy", np.array([0, 1]))
    assert (
        main(["ingest", str(without), "--edges", f"{tmp_path}/e.npy", "--num-nodes", "2", "--labels", f"{tmp_path}/y.npy"]) == 0
    )
    remedy = "draw splits by `ooc split` with --random-split 0.6,0.2,0.2, or ingest with --split"
    commands: list[tuple[list[object], str]] = [
        (["train", tmp_path / "absent", "--out", tmp_path / "r"], f"there is no store at {tmp_path}/absent"),
        (["plan", tmp_path], f"{tmp_path} is not a store"),
        (["train", store, "--out", there], f"{there} exists already and is no run: choose another --out"),
        (["train", store, "--out", file], f"{file} exists already and is no run: choose another --out"),
        (["train", without, "--out", tmp_path / "r"], f"has no split 'train' to train on (it has: none): {remedy}"),
        (
            ["train", store, "--out", tmp_path / "r", "--train-split", "x"],
            "(it has: train, val, test): name another one as --train-split",
        ),
        (["infer", store, "--checkpoint", there, "--out", file], f"{there} is not a run of `ooc train`"),
        (["infer", store, "--checkpoint", tmp_path / "r", "--out", file], f"there is no run in {tmp_path}/r"),
        (["report", there], f"{there} is not a run of `ooc train`"),
    ]
    listed = [[str(word) for word in command] for command, _ in commands]
    code = f"import sys; from ooc.cli.main import main; print(*map(main, {listed!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"] * len(commands) + ["False"]
    for line, (_, words) in zip(done.stderr.splitlines(), commands, strict=True):
        assert words in line


def test_bad_ingest_settings_are_one_line(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = ("--edges", arrays / "edges.npy")
    assert "exactly one" in fails(capsys, "ingest", arrays / "a.ooc")
    assert "num_nodes" in fails(capsys, "ingest", arrays / "a.ooc", *edges, "--num-nodes", "many")
    assert "dtype" in fails(capsys, "ingest", arrays / "a.ooc", *edges, "--dtype", "int4")
    (arrays / "there").mkdir()
    assert "exists" in fails(capsys, "ingest", arrays / "there", *edges)
    assert not (arrays / "a.ooc").exists()


def test_a_damaged_store_is_named_and_exits_with_2(make_store: MakeStore, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store()
    shard = next(path for path in sorted((store / "node/node/x").rglob("*")) if path.is_file() and path.name != "zarr.json")
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(bytes(content))
    assert "node/node/x chunk 0" in fails(capsys, "verify", store)


def test_ingest_flags_are_the_fields_of_the_specification() -> None:
    fields = {name: field for name, field in IngestSpec.model_fields.items() if name != "out"}
    assert {flag.name for flag in INGEST} == set(fields)
    switches = {name for name, field in fields.items() if field.annotation in (bool, bool | None)}
    assert {flag.name for flag in INGEST if flag.metavar is None} == switches
    repeated = {name for name, field in fields.items() if field.annotation == list[str]}
    assert {flag.name for flag in INGEST if flag.repeat} == repeated | {*BY_NODE_TYPE, *BY_EDGE_TYPE}


def test_every_key_has_a_flag_with_help() -> None:
    flags = flags_of(TrainConfig)
    assert [flag.name for flag in flags] == list(TrainConfig.model_fields)
    assert all(flag.help for flag in flags)


def test_help_imports_nothing_heavy() -> None:
    wide = {**os.environ, "COLUMNS": "200"}
    code = "import sys; from ooc.cli.main import main; main(['train', '--help-all']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=wide)
    assert "--activation-checkpointing" in done.stdout
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"torch", "numba", "zarr", "duckdb", "pyarrow", "numpy"} & set(loaded)


def test_interrupts_and_full_disks_are_one_line(
    make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ooc.training.loop

    def raising(error: BaseException) -> None:
        def train(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(ooc.training.loop, "train", train)

    command = ("train", make_store(), "--out", tmp_path / "run")
    raising(OSError(28, "No space left on device", "/x"))
    assert "/x: No space left on device" in fails(capsys, *command)
    raising(MemoryError())
    assert "out of memory" in fails(capsys, *command)
    raising(torch.OutOfMemoryError("CUDA out of memory. Tried"))
    assert "CUDA" in fails(capsys, *command)
    raising(
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. ")
    )
    said = fails(capsys, *command)
    assert "2.15 GB were asked for, and 1.07 GB of 8.59 GB are free" in said
    assert "--gpu-memory" not in said  # not every verb has it
    raising(KeyboardInterrupt())
    assert main([str(word) for word in command]) == 130
    assert capsys.readouterr().err.count("\n") == 1
    raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):  # a fault of the program keeps its traceback
        main([str(word) for word in command])


INTERRUPTING = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from ooc.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
"""`ooc` with Ctrl-C when the module named first is about to be imported"""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("module", "verb"),
    [
        ("typer", ["--help"]),
        ("ooc.config.nodes", ["report", "run"]),
        ("duckdb", ["ingest", "t.ooc", "--edges", "e.npy"]),
        ("zarr", ["info", "STORE"]),
        ("zarr", ["verify", "STORE"]),
        ("torch", ["train", "STORE", "--out", "run"]),
        ("numpy._core.multiarray", ["train", "STORE", "--out", "run"]),
        ("torch_geometric", ["train", "STORE", "--out", "run"]),
        ("torch.nn", ["plan", "STORE"]),
        ("matplotlib", ["report", "RUN"]),
        ("numpy", ["machine", "."]),
    ],
)
def test_ctrl_c_during_imports_is_one_line(make_store: MakeStore, tmp_path: Path, module: str, verb: list[str]) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.json").write_text("{}")
    places = {"STORE": str(make_store()), "RUN": str(begun)}
    words = [places.get(word, word) for word in verb]
    command = [sys.executable, "-c", INTERRUPTING, module, *words]
    path = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 130
    assert done.stderr.startswith("ooc: error: interrupted")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


LATE = """
import atexit, builtins, os, signal, sys

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def say(*values, file=None, **how):
    printed(*values, file=file, **how)
    if file is None:
        interrupt()

printed, builtins.print = print, say
atexit.register(interrupt)
from ooc.cli.main import main
sys.exit(main())
"""
"""`ooc` with Ctrl-C when the result is printed, and once more when the process ends"""


def test_ctrl_c_behind_the_result_changes_nothing(make_store: MakeStore, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LATE, "train", str(make_store()), "--out", str(tmp_path / "run"), *SMALL]
    path = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert (done.returncode, "interrupted" in done.stderr) == (0, False), done.stderr
    assert "`ooc report" in done.stdout


def test_a_run_resumed_with_fewer_epochs_counts_those_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = LineWatcher()
    watcher.start(epoch=27, step=5, epochs=2, steps_per_epoch=10)
    watcher._spoke -= 2
    watcher.epoch({"epoch": 27, "train_loss": 0.5})
    assert capsys.readouterr().err == "epoch 28/28: loss 0.5000\n"


def interrupted(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The last line of a command that Ctrl-C ends."""
    assert main([str(a) for a in arguments]) == 130
    return capsys.readouterr().err.splitlines()[-1]


def test_ctrl_c_says_how_to_continue(
    make_store: MakeStore, arrays: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_arguments: object, **_settings: object) -> None:
        raise KeyboardInterrupt

    store, run = make_store(), arrays / "run"
    assert main(["train", str(store), "--out", str(run), *UNPLANNED]) == 0
    monkeypatch.setattr("ooc.training.loop.fit", interrupt)
    assert interrupted(capsys, "train", store, "--out", run, "--resume").endswith(f"`ooc train --out {run} --resume` continues")
    monkeypatch.setattr("ooc.training.open_run.open_dataset", interrupt)
    assert interrupted(capsys, "train", store, "--out", arrays / "new").endswith("interrupted: nothing was trained yet")
    monkeypatch.setattr("ooc.training.infer._written", interrupt)
    predictions = arrays / "p.csv"
    assert "run the same command again" in interrupted(capsys, "infer", store, "--checkpoint", run, "--out", predictions)
    monkeypatch.setattr("ooc.stores.ingest.ingest", interrupt)
    edges = ["--edges", arrays / "edges.npy"]
    assert "run the same command again" in interrupted(capsys, "ingest", arrays / "new.ooc", *edges)
    monkeypatch.setattr("ooc.stores.growth.append.append", interrupt)
    assert "whole or not at all" in interrupted(capsys, "append", store, *edges)


def test_the_handler_of_ctrl_c_is_gone_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["--help"]) == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.cases(1)
@pytest.mark.parametrize("flags", [[], ["--json"], ["--help"]])
def test_a_reader_that_has_gone_is_no_fault(make_store: MakeStore, flags: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ooc.cli", "info", str(make_store()), *flags]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_training_goes_on_when_nobody_reads_its_progress(make_store: MakeStore, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = ["train", str(make_store()), "--out", str(tmp_path / "run"), *UNPLANNED]
    try:
        Python("-m", "ooc.cli", *words, into=writing).wait()
    finally:
        os.close(writing)
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("reason", "count", "words"),
    [
        ("self_loops", 2, "2 self-loops"),
        ("self_loops", 1, "1 self-loop"),
        ("duplicates", 1200, "1,200 duplicate edges"),
        ("missing", 1, "1 edge with an empty or unknown endpoint"),
    ],
)
def test_edges_left_out_are_told_in_words(reason: str, count: int, words: str) -> None:
    assert _left_out(reason, count) == words


def test_a_warning_is_one_line(make_store: MakeStore, tmp_path: Path) -> None:
    words = ["train", make_store(), "--out", tmp_path / "run", *SMALL, "--pack", "1MB", "--max-steps", "1"]
    done = Python("-m", "ooc.cli", *words).wait()
    warned = [line for line in done.stderr.splitlines() if "pack" in line or "warn_user" in line]
    assert warned == ["ooc: warning: pack changes nothing: all feature rows stay in memory"]


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any("Usage" in line for line in lines)
    assert any(line.split()[:1] == ["ingest"] or " ingest " in line for line in lines)
    assert len(lines) > 10
    assert not any(line.startswith("ooc: error") for line in lines)


def test_a_closed_stderr_is_no_fault(make_store: MakeStore, tmp_path: Path) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m ooc.cli train {make_store()} --out {tmp_path / 'run'} --epochs 1 2>&-"
    assert subprocess.run(["bash", "-c", command], stdout=subprocess.DEVNULL, timeout=120).returncode == 0
    assert (tmp_path / "run" / "summary.json").exists()
