"""Malformed settings: every flag of every verb with values that it cannot have, settings that contradict each other, and files
and folders that are not what a verb wants."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from ooc.cli.flags import APPEND, INGEST, Flag, flags_of_modes
from ooc.config.modes import classes
from tools.bench.malformed.cases import Case, edges_csv, ingest, nothing, well_formed

NUMBERS = ("", "x", "nan", "inf", "-inf", "-1", "0", "0.5", "1e400", f"{10**20 - 1}", "1,2,x", "9" * 5000, "0x10", "1 2")
WORDS = ("", "no such", "a" * 5000, "../x", "x=", "=", "a=b=c", "*", "[", "🙂", "-1", "99999999999999999999", "os:system", ":")
SHORT = ["--epochs", "1", "--max-steps", "1", "--hidden", "8"]
"""a run that ends at once, where a value is valid after all"""
OF_MODES = {
    "sampled": ["--no-plan"],
    "cluster": ["--mode", "cluster", "--parts", "4", "--no-plan"],
    "saint": ["--mode", "saint", "--roots", "10", "--no-plan"],
    "history": ["--mode", "history", "--parts", "4", "--no-plan"],
    "full": ["--mode", "full", "--no-plan"],
    "events": ["--mode", "events"],
    "snapshots": ["--mode", "snapshots", "--window", "20"],
}


def setting_cases(seed: int) -> Iterator[Case]:
    """All cases of this module."""
    yield from of_ingest(seed)
    yield from of_training(seed)
    yield from of_other_verbs()
    yield from huge_numbers()
    yield from contradictions()
    yield from config_files()


def values_of(flag: Flag, chance: random.Random, count: int) -> list[str]:
    """Values that a flag may not have."""
    numbers = flag.metavar is not None and any(word in flag.metavar for word in ("INT", "NUMBER", "LIST", "SIZE"))
    return chance.sample(NUMBERS if numbers else WORDS, count)


def of_ingest(seed: int) -> Iterator[Case]:
    """Flags of `ingest` and `append`, several odd values each."""
    for verb, flags in (("ingest", INGEST), ("append", APPEND)):
        for flag in flags:
            chance = random.Random(f"{seed} {verb} {flag.name}")
            for value in values_of(flag, chance, 3) if flag.metavar is not None else []:
                rest = ["--edges", "edges.csv"] if flag.name not in ("edges", "npz", "ogb", "pyg") else []
                command = (
                    verb,
                    "out.ooc" if verb == "ingest" else "copy.ooc",
                    *rest,
                    f"--{flag.name.replace('_', '-')}={value}",
                )
                write = well_formed if verb == "ingest" else _with_copy
                yield Case(f"{verb} --{flag.name} {value[:30]!r}", command, write, "either")
    for number in ("99999999999999999999", "9223372036854775807", "1000000000000000"):
        yield Case(f"ingest --num-nodes {number}", ingest(f"--edges edges.csv --num-nodes {number}"), well_formed)


def _with_copy(folder: Path) -> None:
    well_formed(folder)
    shutil.copytree(folder.parent / "graph.ooc", folder / "copy.ooc")


def of_training(seed: int) -> Iterator[Case]:
    """Flags of `ooc train`, an odd value or two in each mode that has them."""
    for mode, own in OF_MODES.items():
        flags = flags_of_modes({mode: classes()[mode]}, without=("store", "out", "mode", "plan"))
        store = "{work}/events.ooc" if mode in ("events", "snapshots") else "{work}/graph.ooc"
        for flag in flags:
            chance = random.Random(f"{seed} {mode} {flag.name}")
            for value in values_of(flag, chance, 2) if flag.metavar is not None else []:
                command = ("train", store, "--out", "run", *own, *SHORT, f"--{flag.name.replace('_', '-')}={value}")
                yield Case(f"train, {mode}, --{flag.name} {value[:30]!r}", command, nothing, "either")


HUGE = {
    "sampled": "hidden layers fanout batch-size eval-fanout eval-batch-size accumulate patience threads epochs",
    "cluster": "parts parts-per-batch",
    "saint": "walk-length saint-coverage",
    "history": "history-lag parts refresh",
    "full": "layers hidden disk",
    "events": "ratio eval-ratio hidden memory-dim time-dim num-neighbors batch-size heads",
    "snapshots": "ratio eval-ratio window stride hidden layers identity updates",
}
"""flags that are given 10^6 (where that is no mistake) and 10^12"""


def huge_numbers() -> Iterator[Case]:
    """Numbers that no machine can serve."""
    for mode, names in HUGE.items():
        store = "{work}/events.ooc" if mode in ("events", "snapshots") else "{work}/graph.ooc"
        for name in names.split():
            for value in ("1000000", "1000000000000"):
                command = ("train", store, "--out", "run", *OF_MODES[mode], *SHORT, f"--{name}", value)
                yield Case(f"train, {mode}, --{name} {value}", command, nothing, "either")


def of_other_verbs() -> Iterator[Case]:
    """Verbs on what is no store and no run, and their own flags."""
    for what, make in FOLDERS.items():
        for verb, rest in VERBS.items():
            yield Case(f"{verb} of {what}", (verb, "thing", *rest.split()), _making(make))
    for verb, rest, flags in OWN:
        command = (verb, *rest.split(), *flags.split())
        yield Case(f"{verb} {rest} {flags}", command, nothing)


def _making(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: make(folder / "thing")


def _store_with(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """A copy of a store with another file in it."""

    def make(path: Path) -> None:
        shutil.copytree(path.parent.parent / "graph.ooc", path)
        (path / name).write_bytes(change((path / name).read_bytes()))

    return make


def _metadata(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    def made(data: bytes) -> bytes:
        held = json.loads(data)
        change(held)
        return json.dumps(held).encode()

    return made


FOLDERS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "an empty folder": Path.mkdir,
    "a file": lambda path: path.write_bytes(edges_csv()),
    "a link to itself": lambda path: path.symlink_to("thing"),
    "a store with empty metadata": _store_with("zarr.json", lambda _: b""),
    "a store with deep metadata": _store_with("zarr.json", lambda _: b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a store with a list for metadata": _store_with("zarr.json", lambda _: b"[]"),
    "a store without attributes": _store_with("zarr.json", _metadata(lambda held: held.pop("attributes"))),
}
VERBS = {
    "info": "",
    "verify": "",
    "compact": "",
    "report": "",
    "append": "--edges {work}/files/edges.csv",
    "train": "--out run --no-plan",
    "plan": "--mode sampled",
    "infer": "--checkpoint {work}/run --out p.parquet",
    "embed": "--checkpoint {work}/run --out e.zarr",
}
"""verb -> what follows the store"""
_INFER = "{work}/graph.ooc --checkpoint {work}/run --out"
OWN = (
    ("infer", "{work}/graph.ooc --out p.parquet", "--checkpoint nowhere"),
    ("infer", "{work}/graph.ooc --out p.parquet", "--checkpoint {work}/graph.ooc"),
    ("infer", _INFER, "no/such/p.parquet"),
    ("infer", _INFER, "{work}/files/edges.csv"),
    ("infer", f"{_INFER} p.parquet", "--memory 1KB"),
    ("infer", f"{_INFER} p.parquet", "--memory 0"),
    ("infer", f"{_INFER} p.parquet", "--engine none"),
    ("embed", f"{_INFER} e.zarr", "--layer 0"),
    ("embed", f"{_INFER} e.zarr", "--layer -2"),
    ("embed", f"{_INFER} e.zarr", "--layer 99999999999999999999"),
    ("embed", f"{_INFER} e.zarr", "--layer x"),
    ("embed", _INFER, "{work}/graph.ooc"),
    ("machine", ".", "--engine none"),
    ("machine", "no/such/place", ""),
    ("info", "{work}/graph.ooc", "--id no-such-node"),
    ("info", "{work}/graph.ooc", "--id -1"),
    ("info", "{work}/graph.ooc", "--id 99999999999999999999"),
    ("info", "{work}/types.ooc", "--id p1"),
    ("info", "{work}/types.ooc", "--id venue:p1"),
    ("info", "{work}/types.ooc", "--id author:p1"),
    ("append", "{work}/types.ooc", "--edges {work}/files/edges.csv"),
    ("append", "{work}/graphs.ooc", "--edges {work}/files/edges.csv"),
    ("split", "{work}/types.ooc", "--random-split 1,0,0"),
    ("split", "{work}/types.ooc", "--random-split 1,0,0 --node-type venue"),
    ("split", "{work}/graph.ooc", "--random-split 1,0,0 --replace --node-type paper"),
    ("reduce", "{work}/graph.ooc", "pca:999999"),
    ("reduce", "{work}/graph.ooc", "pca:-1"),
    ("reduce", "{work}/graph.ooc", "tsne:2"),
    ("reduce", "{work}/graph.ooc", "mutual:1 --memory 1KB"),
    ("reduce", "{work}/types.ooc", "pca:1"),
    ("reduce", "{work}/types.ooc", "pca:1 --node-type venue"),
    ("info", "{work}/graph.ooc", "--no-such-flag"),
    ("no-such-verb", "{work}/graph.ooc", ""),
    ("train", "{work}/graph.ooc --out {work}/run", ""),
    ("train", "{work}/graph.ooc --out {work}/graph.ooc", ""),
    ("train", "{work}/graph.ooc --out no/such/run", "--memory 1KB"),
    ("train", "{work}/graph.ooc --out run", "--memory 1GB --memory x"),
    ("train", "{work}/graph.ooc --out run", "--config nowhere.toml"),
    ("train", "{work}/graph.ooc --out run", "--config ."),
    ("train", "{work}/graph.ooc --out run", "--mode nothing"),
    ("train", "{work}/graph.ooc --out run", "--mode events"),
    ("train", "{work}/graph.ooc --out run", "--mode snapshots --window 7d"),
    ("train", "{work}/events.ooc --out run", "--mode snapshots"),
    ("train", "--out run", ""),
    ("plan", "{work}/graph.ooc", "--mode sampled --memory 1KB"),
    ("plan", "{work}/graph.ooc", "--mode sampled --layers 99999999999999999999"),
)
"""(verb, arguments, odd flags)"""


def contradictions() -> Iterator[Case]:
    """Settings that do not go together."""
    for flags in INGESTS_THAT_CONTRADICT:
        yield Case(f"ingest {flags}", ingest(flags), well_formed)
    for mode, flags in RUNS_THAT_CONTRADICT:
        store = "{work}/events.ooc" if mode in ("events", "snapshots") else "{work}/graph.ooc"
        command = ("train", store, "--out", "run", *OF_MODES[mode], *SHORT, *flags.split())
        yield Case(f"train, {mode}, {flags}", command, nothing)


INGESTS_THAT_CONTRADICT = (
    "",
    "--edges edges.csv --npz graph.npz",
    "--npz graph.npz --labels y.npy",
    "--npz graph.npz --num-nodes 40",
    "--ogb ogb --edges edges.csv",
    "--ogb edges.csv",
    "--edges edges.csv --src src --dst no",
    "--edges edges.csv --weight src --time no",
    "--edges edges.csv --label y",
    "--edges edges.csv --birth born",
    "--edges edges.csv --time-unit ms",
    "--edges edges.csv --time t --drop-duplicates",
    "--edges edges.csv --time t --edge-features msg=no*",
    "--edges edges.csv --time t --edge-features msg=w --edge-features msg=t",
    "--edges edges.csv --nodes nodes.csv --label y --labels y.npy",
    "--edges edges.csv --nodes nodes.csv --split split --train train.npy",
    "--edges edges.csv --nodes nodes.csv --x-cols f* --features x=x.npy",
    "--edges edges.csv --nodes nodes.csv --x-cols split",
    "--edges edges.csv --nodes nodes.csv --x-cols ,",
    "--edges edges.csv --nodes nodes.csv --num-nodes 7",
    "--edges edges.csv --num-nodes 3",
    "--edges edges.csv --id-type str --num-nodes 40",
    "--edges edges.csv --features y=x.npy",
    "--edges edges.csv --features split=x.npy",
    "--edges edges.csv --features x=x.npy --features x=y.npy",
    "--edges edges.csv --normalize row",
    "--edges edges.csv --features x=x.npy --normalize standard",
    "--edges edges.csv --split-index 0",
    "--edges edges.csv --partitioner metis",
    "--edges edges.csv --parts 0",
    "--edges edges.csv --parts 99999999999999999999",
    "--edges edges.csv --memory 1MB",
    "--edges edges.csv --arg a=b",
    "--edges edges.*",
    "--edges *.npy",
    "--edges edges.csv --features x=*.npy",
    "--nodes paper=papers.csv --edges author:writes:paper=writes.csv",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --edges author:likes:paper=writes.csv",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --edges author:writes:paper=writes.csv",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --label author=y",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --label venue=y",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --id author=name",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --task paper=regression",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --undirected",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --parts 3",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --graph-id mol",
    "--nodes paper=papers.csv --nodes author --edges author:writes=writes.csv",
    "--nodes paper=papers.csv --nodes author --edges author:writes:paper=",
    "--nodes paper=papers.csv --nodes author --edges author:wr__ites:paper=writes.csv",
    "--nodes atoms.csv --edges bonds.csv --graph-id no",
    "--nodes atoms.csv --edges bonds.csv --graph-label mol",
    "--nodes atoms.csv --edges bonds.csv --graph-id mol --parts 2",
    "--nodes atoms.csv --edges bonds.csv --graph-id mol --time length",
    "--ogb mag --parts 3",
    "--ogb mag --undirected",
    "--ogb ogb --reverse",
    "--ogb mol --order degree",
    "--pyg edges.csv.pt",
    "--pyg NoSuchDataset",
    "--pyg os:system --arg command=true",
)
RUNS_THAT_CONTRADICT = (
    ("sampled", "--parts 4"),
    ("sampled", "--fanout 5 --layers 2"),
    ("sampled", "--fanout 0,5"),
    ("sampled", "--fanout -2,5"),
    ("sampled", "--roots 5"),
    ("sampled", "--model gat --hidden 7"),
    ("sampled", "--model none"),
    ("sampled", "--model os:system"),
    ("sampled", "--model no.such:Thing"),
    ("sampled", "--model json:JSONDecoder"),
    ("sampled", "--heads 3 --model sage"),
    ("sampled", "--train-split none"),
    ("sampled", "--monitor none"),
    ("sampled", "--class-weights 1,2"),
    ("sampled", "--class-weights -1,1,1"),
    ("sampled", "--features x=nowhere"),
    ("sampled", "--features x=."),
    ("sampled", "--weight-attr none"),
    ("sampled", "--evaluate layerwise --eval-fanout 3,3"),
    ("sampled", "--dropout 1"),
    ("sampled", "--lr 0"),
    ("sampled", "--seed 9223372036854775808"),
    ("sampled", "--memory 50MB"),
    ("sampled", "--device cuda"),
    ("sampled", "--engine gds"),
    ("sampled", "--grown"),
    ("cluster", "--fanout 5,5"),
    ("cluster", "--parts-per-batch 5"),
    ("cluster", "--parts 1000"),
    ("saint", "--saint edge --walk-length 3"),
    ("history", "--refresh soon"),
    ("history", "--drift-tolerance 0.1"),
    ("history", "--history zero --refresh 2"),
    ("full", "--batch-size 5"),
    ("events", "--val 0.9 --test 0.9"),
    ("events", "--destinations 5"),
    ("events", "--destinations 30,20"),
    ("events", "--destinations 0,4000"),
    ("events", "--destinations -1,5"),
    ("events", "--columns none"),
    ("events", "--eval-negatives nowhere.npy"),
    ("events", "--num-neighbors 5,5"),
    ("events", "--hidden 7"),
    ("snapshots", "--window -1"),
    ("snapshots", "--window 1e9"),
    ("snapshots", "--window 99999999999999999999"),
    ("snapshots", "--stride 0"),
    ("snapshots", "--stride 0.000000001"),
    ("snapshots", "--window 1ns"),
    ("snapshots", "--by count --window 7d"),
    ("snapshots", "--labels none --task nodes"),
)


def config_files() -> Iterator[Case]:
    """Configurations of `ooc train` that are not."""
    for name, content in CONFIGS.items():
        for suffix in ("json", "toml"):

            def write(folder: Path, content: bytes = content, suffix: str = suffix) -> None:
                (folder / f"c.{suffix}").write_bytes(content)

            command = ("train", "{work}/graph.ooc", "--out", "run", "--config", f"c.{suffix}")
            yield Case(f"config {name} ({suffix})", command, write)


CONFIGS: dict[str, bytes] = {
    "empty list": b"[]",
    "nothing but rubbish": b"\x00\xff\xfe",
    "a number": b"7",
    "deeply nested": b'{"model_args": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deeply nested list": b"a = " + b"[" * 100_000 + b"]" * 100_000,
    "unknown key": json.dumps({"learning_rate": 1}).encode(),
    "wrong type": json.dumps({"hidden": {"a": 1}}).encode(),
    "number of 5,000 digits": b'{"hidden": ' + b"9" * 5000 + b"}",
    "NaN": b'{"lr": NaN}',
    "null": b'{"hidden": null, "lr": null}',
    "open": b'{"hidden": 3',
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.",
}
