"""Sort edges by destination with Spark, for `ooc ingest --sorted`: a script to copy and change.

    ooc example sort_edges_spark > sort_edges_spark.py
    spark-submit --master 'local[8]' sort_edges_spark.py 'edges/*.parquet' sorted          # threads of this machine
    spark-submit --master spark://head:7077 sort_edges_spark.py s3a://bucket/edges s3a://bucket/sorted
    ooc ingest papers.ooc --edges 'sorted/edges/*.parquet' --num-nodes 111059956 --sorted

Node ids must be rows, 0 to N - 1. With --number they may be anything: they are numbered in their order, and sorted/ids/ has the
row of each. It needs `pip install pyspark` and Java.
"""

import argparse

from pyspark.sql import DataFrame, SparkSession


def with_rows(edges: DataFrame, out: str) -> DataFrame:
    """Write the row of each id to `out`, and return the edges with rows for ids."""
    ids = edges.selectExpr("src AS id").union(edges.selectExpr("dst AS id")).distinct().orderBy("id")
    numbered = ids.rdd.zipWithIndex().map(lambda pair: (pair[0][0], pair[1]))
    numbered.toDF(["id", "row"]).write.mode("overwrite").parquet(out)
    rows = edges.sparkSession.read.parquet(out)
    for end in ("src", "dst"):
        edges = edges.join(rows.withColumnRenamed("id", end), end).drop(end).withColumnRenamed("row", end)
    return edges


def main() -> None:
    """Read the edges, number their ends if asked, sort and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("edges", help="Parquet files with columns src and dst; further columns are kept")
    parser.add_argument("out", help="the folder for edges/ and ids/")
    parser.add_argument("--number", action="store_true", help="ids are not rows: number them")
    a = parser.parse_args()
    spark = SparkSession.builder.appName("sort edges").getOrCreate()
    edges = spark.read.parquet(a.edges)
    if a.number:
        edges = with_rows(edges, f"{a.out}/ids")
    # the source decides among edges with one destination; orderBy writes part-00000, part-00001, ... in order
    edges.orderBy("dst", "src").write.mode("overwrite").parquet(f"{a.out}/edges")
    spark.stop()


if __name__ == "__main__":
    main()
