"""Scripts to copy and a small graph to try them on; `ooc example` prints and writes them."""

from importlib.resources import files

SCRIPTS = {
    "train_nodes": "classify nodes with your own PyTorch loop: NeighborLoader, validation, predictions of all nodes",
    "train_events": "train on a stream of events, ranking each event's destination against negatives",
    "train_snapshots": "train on windows of a temporal graph, each predicting the next one",
    "train_ray": "your own PyTorch loop in several processes, under Ray Train",
    "train_slurm": "a job of SLURM that trains on several machines: sbatch train_slurm.sh STORE RUN",
    "sort_edges_dask": "sort edges with Dask, for `ooc ingest --sorted`",
    "sort_edges_spark": "sort edges with Spark, for `ooc ingest --sorted`",
}
"""name -> what the script does"""


GRAPH = "write a graph of 20,000 nodes and 200,000 edges as Parquet files"
"""what `ooc example graph` does"""
NEXT = """\
ooc ingest {folder}.ooc --edges {folder}/edges.parquet --undirected \\
    --nodes {folder}/nodes.parquet --label label --split split --x-cols 'f*'
ooc train {folder}.ooc --epochs 10
ooc infer {folder}.ooc --checkpoint runs/{name}-1 --out predictions.csv
"""
"""what to do with the graph"""


def source(name: str) -> str:
    """Return the text of a script of `SCRIPTS`.

    >>> print(source("train_nodes"))
    """
    folder = files(__name__)
    return next(path for path in (folder / f"{name}.py", folder / f"{name}.sh") if path.is_file()).read_text()
