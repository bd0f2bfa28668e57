"""Sort edges by destination with Dask, for `ooc ingest --sorted`: a script to copy and change.

    ooc example sort_edges_dask > sort_edges_dask.py
    python sort_edges_dask.py 'edges/*.parquet' sorted --workers 8             # processes on this machine
    python sort_edges_dask.py 's3://bucket/edges/*.parquet' s3://bucket/sorted --scheduler tcp://head:8786
    ooc ingest papers.ooc --edges 'sorted/edges/*.parquet' --num-nodes 111059956 --sorted

Node ids must be rows, 0 to N - 1. With --number they may be anything: they are numbered in their order, and sorted/ids/ has the
row of each. It needs `pip install 'dask[dataframe,distributed]'`.
"""

import argparse
from itertools import accumulate
from typing import Any

import dask.dataframe as dd
import pandas as pd
from dask.distributed import Client, wait


def file_name(number: int) -> str:
    """The name of a part; `ooc` reads files in the order of their names, where part.10 would stand before part.2."""
    return f"part-{number:06d}.parquet"


def numbered(ids: pd.DataFrame, first: list[int], partition_info: Any = None) -> pd.DataFrame:
    """A partition of ids with a column `row`, whose numbers begin at that of the partition in `first`."""
    start = first[partition_info["number"]] if partition_info else 0
    return ids.assign(row=range(start, start + len(ids)))


def finished(frame: dd.DataFrame) -> dd.DataFrame:
    """The frame, computed by the workers: one shuffle is done before the next begins."""
    frame = frame.persist()
    wait(frame)
    return frame


def with_rows(edges: dd.DataFrame, out: str) -> dd.DataFrame:
    """Write the row of each id to `out`, and return the edges with rows for ids."""
    ends = dd.concat([edges[[end]].rename(columns={end: "id"}) for end in ("src", "dst")])
    ids = finished(ends.drop_duplicates().sort_values("id"))
    first = [0, *accumulate(ids.map_partitions(len).compute().tolist())]
    rows = ids.map_partitions(numbered, first, meta={"id": ids.dtypes["id"], "row": "int64"})
    rows.to_parquet(out, name_function=file_name, write_index=False)
    rows = dd.read_parquet(f"{out}/*.parquet")
    others = [name for name in edges.columns if name not in ("src", "dst")]
    for end in ("src", "dst"):
        edges = edges.merge(rows.rename(columns={"id": end, "row": f"{end}_row"}), on=end)
    return finished(edges[["src_row", "dst_row", *others]].rename(columns={"src_row": "src", "dst_row": "dst"}))


def main() -> None:
    """Read the edges, number their ends if asked, sort and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("edges", help="Parquet files with columns src and dst; further columns are kept")
    parser.add_argument("out", help="the folder for edges/ and ids/")
    parser.add_argument("--number", action="store_true", help="ids are not rows: number them")
    parser.add_argument("--scheduler", help="address of a cluster; without it, processes on this machine")
    parser.add_argument("--workers", type=int, default=2, help="how many of these")
    a = parser.parse_args()
    local = {} if a.scheduler else {"n_workers": a.workers, "threads_per_worker": 1}
    with Client(a.scheduler, **local):
        edges = dd.read_parquet(a.edges)
        if a.number:
            edges = with_rows(edges, f"{a.out}/ids")
        # the source decides among edges with one destination, so the result does not depend on the cluster
        edges.sort_values(["dst", "src"]).to_parquet(f"{a.out}/edges", name_function=file_name, write_index=False)


if __name__ == "__main__":
    main()
