"""A graph shaped as ogbn-mag as a store, in bounded memory.

    python -m tools.graphs.mag mag.ooc

Papers and authors have 128 float32 features, institutions and fields of study none; papers have one of 349 classes. The ends of
edges are skewed as those of publications are: few authors write many of the papers, few papers have most of the citations.
Every edge type has its reverse. `--scale 0.01` makes a graph of a hundredth of the nodes and edges.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.stores.array_names import EdgeKey, node_array
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.build import write_hetero_store
from ooc.stores.graph import Graph
from tools.graphs.make_graph import feature_blocks

NODES = {"author": 1_134_649, "field_of_study": 59_965, "institution": 8_740, "paper": 736_389}
CLASSES = 349
WIDTH = 128
WITH_FEATURES = ("author", "paper")
SEEDS = "paper"
EVALUATED = 2048
"""papers for validation, few, as the benchmark is one of training"""


class Ends(NamedTuple):
    """The edges of a type. source, target: exponents of the skew of their ends, 1 for none."""

    edges: int
    source: float
    target: float


EDGES: dict[EdgeKey, Ends] = {
    ("author", "affiliated_with", "institution"): Ends(1_043_998, 1.2, 3.0),
    ("author", "writes", "paper"): Ends(7_145_660, 2.0, 1.3),
    ("paper", "cites", "paper"): Ends(5_416_271, 1.5, 2.5),
    ("paper", "has_topic", "field_of_study"): Ends(7_505_078, 1.0, 3.0),
}


def skewed(rng: np.random.Generator, nodes: int, count: int, exponent: float) -> NDArray[np.int64]:
    """`count` nodes, in which node number i of a random order has a density of i^(1 / exponent - 1)."""
    order = rng.permutation(nodes)
    found: NDArray[np.int64] = order[np.minimum((nodes * rng.random(count) ** exponent).astype(np.int64), nodes - 1)]
    return found


def graphs_of(nodes: dict[str, int], scale: float, seed: int) -> dict[EdgeKey, Graph]:
    """The topology of every edge type, those of the data set before their reverses."""
    graphs: dict[EdgeKey, Graph] = {}
    for number, (key, ends) in enumerate(EDGES.items()):
        rng, count = np.random.default_rng([seed, number]), int(ends.edges * scale)
        source, target = skewed(rng, nodes[key[0]], count, ends.source), skewed(rng, nodes[key[2]], count, ends.target)
        for each, one, other in ((key, source, target), (reverse_of(key), target, source)):
            same = each[0] == each[2]
            graphs[each] = Graph.from_edges(one, other, nodes[each[2]], num_sources=None if same else nodes[each[0]])
    return graphs


def reverse_of(key: EdgeKey) -> EdgeKey:
    """The edge type of the same edges in the other direction."""
    source, name, target = key
    return target, f"rev_{name}", source


def make_mag(store: Path, scale: float = 1.0, seed: int = 0) -> None:
    """Write the graph, unless it exists: topology and labels from memory, features as they are generated."""
    if store.exists():
        return
    unfinished = store.with_name(store.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    nodes = {name: max(10, int(count * scale)) for name, count in NODES.items()}
    labels = {name: np.random.default_rng([seed, 10, len(name)]).integers(0, CLASSES, nodes[name]) for name in WITH_FEATURES}
    given: dict[str, dict[str, Any]] = {name: {"num_nodes": count} for name, count in nodes.items()}
    papers = np.random.default_rng([seed, 11]).permutation(nodes[SEEDS])
    held_out = min(EVALUATED, len(papers) // 10)
    splits = {"val": papers[:held_out], "train": papers[held_out : held_out + int(0.855 * len(papers))]}
    given[SEEDS] |= {"y": labels[SEEDS], "task": "multiclass", "num_classes": CLASSES, "splits": splits}
    graphs = graphs_of(nodes, scale, seed)
    write_hetero_store(unfinished, given, graphs, reverse_of={reverse_of(key): key for key in EDGES})
    for name, own in labels.items():
        with Appender(unfinished, node_array("x", name), (WIDTH,), "float32", count=nodes[name]) as x:
            for block in feature_blocks(own, WIDTH, classes=CLASSES, seed=seed):
                x.append(block)
    unfinished.rename(store)


def main() -> None:
    """Parse the command line, write the store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    make_mag(a.store, a.scale, a.seed)


if __name__ == "__main__":
    main()
