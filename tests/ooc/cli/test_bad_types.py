"""Bad tables of several types, of many graphs and of targets, by the command line: one line, exit code 2, nothing left."""

from pathlib import Path

import pytest

from ooc.cli.main import main

FILES = {
    "papers.csv": "id,y,age\np0,0,3.5\np1,1,old\np2,1,\n",
    "authors.csv": "id\nann\nbob\n",
    "writes.csv": "src,dst,stars\nann,p0,4.5\nbob,p2,good\n",
    "swapped.csv": "src,dst\np0,ann\n",
    "nobody.csv": "id\n",
    "atoms.csv": "id,mol\n0,m0\n1,m0\n2,m1\n",
    "bonds.csv": "src,dst\n0,1\n",
    "mols.csv": "mol,y\nm0,1\nm1,x\nm2,0\n",
}
TYPES = "--nodes paper=papers.csv --nodes author=authors.csv --edges author:writes:paper=writes.csv"
WRITES = "author:writes:paper"
GRAPHS = "--nodes atoms.csv --edges bonds.csv --graph-id mol"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{TYPES} --edges paper:in:venue=writes.csv", "edge type paper:in:venue: there is no node type 'venue', only paper"),
        (TYPES.replace("writes.csv", "swapped.csv"), "swapped.csv line 2: src 'p0' is not in authors.csv"),
        (
            f"{TYPES} --label paper=age --task paper=regression",
            "papers.csv line 3: age is 'old', not a number",
        ),
        (
            f"{TYPES} --edge-label author:writes:paper=stars --task author:writes:paper=regression",
            "writes.csv line 3: stars is 'good'",
        ),
        (
            f"{TYPES} --edges author:likes:paper=writes.csv",
            "writes.csv is listed twice as --edges, of author:writes",
        ),
        (f"{TYPES} --edges author:writes:paper=writes.csv", "--edges author:writes:paper is given twice"),
        (f"{TYPES} --id venue=id", "--id: there is no node type 'venue'; there are 'paper', 'author'"),
        ("--nodes paper=papers.csv --nodes author --id author=name --edges author:writes:paper=writes.csv", "give --nodes too"),
        ("--edges bonds.csv --edges bonds.csv", "--edges is given twice"),
        (
            f"{TYPES.rpartition(' --')[0]} --edges writes.csv",
            "; of several types give --edges by type, as in author:writes:paper=FILES",
        ),
        ("--nodes nobody.csv --edges bonds.csv", "nobody.csv has no rows, and a graph needs nodes: list them there"),
        (f"{GRAPHS} --graphs mols.csv", "mols.csv line 4: graph 'm2' has no nodes; leave it out"),
        ("--nodes nobody.csv --edges bonds.csv --graph-id id", "nobody.csv has no rows"),
        (TYPES.replace("papers.csv", "nobody.csv"), "nobody.csv has no rows, and a graph needs nodes of node type 'paper'"),
        ("--edges bonds.csv --num-nodes 0", "num_nodes = '0' is invalid"),
    ],
)
def test_one_line_and_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["ingest", "s.ooc", *flags.split()]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each]
    assert line.startswith("ooc: error: ")
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
