"""What a run of tables has learned, opened to be used: the best answers of queries, embeddings, and neighbors of nodes."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ooc.config.base import parse, saved_config
from ooc.config.modes import choice_of, class_of
from ooc.layerwise.best_answers import Similarity, nearest
from ooc.layerwise.filtered_ranks import CANDIDATES, QUERIES
from ooc.layerwise.top_k import TopK, check_k
from ooc.loading.arguments import input_nodes_of, refuse_of_open
from ooc.runtime.memory_plan import plan_memory
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.atomic import remove_tree
from ooc.stores.sizes import format_bytes
from ooc.training import checkpoint
from ooc.training.predictions import ROWS_AT_ONCE, write_tables, write_zarr
from ooc.training.registry import MODES, mode_of
from ooc.training.run import MODEL
from ooc.training.table_lists import AnswerLists
from ooc.training.trained_table import TrainedTable


def answer_tables(trained: TrainedTable, lists: AnswerLists) -> Iterator[pa.Table]:
    """Tables of source, relation (where there are some), target, rank (int32, from 1) and score (float32); one at least."""
    nothing, at_once = np.empty(0, np.int64), max(1, ROWS_AT_ONCE // lists.k)
    yield _table(trained, nothing, nothing, TopK.empty(nothing, lists.k))
    for head, relation, best in lists:
        for start in range(0, len(head), at_once):
            some = slice(start, start + at_once)
            yield _table(trained, head[some], relation[some], TopK(best.source[some], best.item[some], best.score[some]))


def _table(trained: TrainedTable, head: Ids, relation: Ids, best: TopK) -> pa.Table:
    at, place = np.nonzero(best.item >= 0)
    columns = {"source": trained.external(head[at], tails=False)}
    if trained.scorer.num_relations:
        number, names = pa.array(relation[at]), trained.relation_names
        columns["relation"] = number if names is None else pa.array(names, pa.string()).take(number)
    columns |= {"target": trained.external(best.item[at, place], tails=True)}
    columns |= {"rank": pa.array((place + 1).astype(np.int32)), "score": pa.array(best.score[at, place])}
    return pa.table(columns)


@contextmanager
def trained_table(run: Path | str, dataset: Dataset) -> Iterator[TrainedTable]:
    """The table of a run, open over a data set.

    Raises:
        ConfigError: The run has no table, has not ended, or is of another store.
    """
    values = saved_config(Path(run))
    if values is None or not has_table(run):
        names = " and ".join(mode for (_, mode), kind in MODES.items() if kind.has_table)
        raise ConfigError(f"{run} is no run that has a table: modes {names} of task link have one")
    config = parse(class_of(values), values, where=f"{run}: ")
    ended, state = checkpoint.load(Path(run), MODEL), checkpoint.load(Path(run))
    if ended is None or state is None:
        raise ConfigError(f"{run} has not ended: resume it (`resume=True`)")
    touched = dataset.grown_since(state["store_fingerprint"])  # none, where what was appended is merged since
    if touched is None or len(touched):
        raise ConfigError(
            f"{run} was trained on another store, or on {dataset.path} before it grew: "
            "give that store, or go on with the run (`resume=True` and `grown=True` of `ooc train`)"
        )
    with mode_of(config).trained_table(Path(run), config, dataset, ended) as found:
        yield found


def has_table(run: Any) -> bool:
    """Whether `run` is the directory of a run whose outputs are a table's."""
    found = saved_config(Path(run)) if isinstance(run, str | os.PathLike) and os.path.isdir(run) else None
    return found is not None and MODES[choice_of(found)].has_table


def neighbors(
    run: Path | str,
    store: Dataset | Path | str,
    nodes: Any,
    k: int = 10,
    *,
    by: Similarity = "cosine",
    node_type: str | None = None,
    memory: str | int | None = None,
) -> TopK:
    """The nodes whose trained rows are most similar to those of some nodes, by a run with a table, in blocks of it.

    Args:
        run: The directory of a run of mode table or lightgcn, which has ended.
        store: A data set, or the path of a store.
        nodes: Whose neighbors: rows, a mask, a split's name, or ids that are words.
        k: Neighbors of each, 1 or more; of the same node type.
        by: "cosine", "dot" or "l2" (the Euclidean distance, taken negative).
        node_type: Of `nodes`, on a store of several types.
        memory: Limit for the process, such as "2GB"; with a data set, that of `ooc.open` applies instead.

    Returns:
        `source`, `item` and `score`: rows of the store and their similarity, from the best on.

    Raises:
        BudgetError: The memory does not hold the rows and neighbors of so many nodes.
        ConfigError: The run has no table, or an argument does not fit.
        InputError: A node is none.

    >>> ooc.neighbors("runs/wn18rr", "wn18rr.ooc", ["07846"], k=5).item
    """
    with ExitStack() as opened:
        if isinstance(store, Dataset):
            refuse_of_open(memory=memory)
            dataset = store
        else:
            dataset = opened.enter_context(Dataset.open(store, memory=memory))
        trained = opened.enter_context(trained_table(run, dataset))
        name, first = trained.first_of(node_type)
        chosen = input_nodes_of(dataset, (name if dataset.is_hetero else None, nodes))
        ids = first + chosen.ids(np.arange(len(chosen)))
        stop = first + dataset.nodes(name).num_nodes
        _check_room(dataset, len(ids), trained.scorer.width, k)
        best = nearest(trained.table, ids, k, by, lambda node: (node >= first) & (node < stop))
        return TopK(best.source - first, np.where(best.item < 0, -1, best.item - first), best.score)


def _check_room(dataset: Dataset, nodes: int, width: int, k: Any) -> None:
    """Raise BudgetError where memory does not hold the rows of so many nodes and k neighbors of each."""
    check_k(k)
    room = plan_memory(dataset).batches - 4 * CANDIDATES * QUERIES
    need = nodes * (8 * width + 24 * int(k) + 64)
    if need > room:
        raise BudgetError(
            f"{nodes:,} nodes and {k} neighbors of each take {format_bytes(need)} of memory, and {format_bytes(max(0, room))} "
            "are left: give fewer nodes at a time, or more memory"
        )


def write_answers(run: Path | str, dataset: Dataset, out: Path, top: int) -> int:
    """Write the best answers of all queries of a run with a table, see `answer_tables`; returns the number of queries."""
    check_k(top, "top")
    with trained_table(run, dataset) as trained:
        room = plan_memory(dataset).batches // 2 - 4 * CANDIDATES * QUERIES
        lists = AnswerLists(trained, min(int(top), max(1, len(trained.links.tails))), max(1, room))
        write_tables(out, answer_tables(trained, lists))
        return lists.queries


def write_embeddings(run: Path | str, dataset: Dataset, out: Path, node_type: str | None) -> tuple[int, int]:
    """Write the rows of a type as the array x of a Zarr group, those of relations as `relation`; returns (nodes, columns)."""
    path = out.with_name(f"{out.name}.rows")  # by node, as the blocks of a table are in another order
    remove_tree(path)
    try:
        with trained_table(run, dataset) as trained:
            name, first = trained.first_of(node_type)
            shape = dataset.nodes(name).num_nodes, trained.scorer.width
            with closing(DiskRows.create(path, shape, "float32")) as rows:
                for ids, values in _blocks_of(trained, first, shape[0]):
                    rows.write(ids, values)
                write_zarr(out, rows, _relation_rows(trained))
        return shape
    finally:
        remove_tree(path)


def _relation_rows(trained: TrainedTable) -> dict[str, tuple[AnyArray, dict[str, Any]]]:
    """The array `relation`, a row of each relation in the order of `names`; nothing without relations.

    With reciprocal relations as many rows follow, by which heads are asked for.
    """
    scorer, names = trained.scorer, trained.relation_names
    if scorer.relation is None:
        return {}
    attributes = {"reciprocal": scorer.reciprocal, **({} if names is None else {"names": names})}
    return {"relation": (scorer.relation.detach().numpy(), attributes)}


def all_rows(run: Path | str, dataset: Dataset, node_type: str | None) -> AnyArray:
    """The rows of a type in memory, float32[n, width]."""
    with trained_table(run, dataset) as trained:
        name, first = trained.first_of(node_type)
        found = np.empty((dataset.nodes(name).num_nodes, trained.scorer.width), np.float32)
        for ids, values in _blocks_of(trained, first, len(found)):
            found[ids] = values
        return found


def _blocks_of(trained: TrainedTable, first: int, count: int) -> Iterator[tuple[Ids, AnyArray]]:
    """The rows of nodes first..first+count-1, by place among these."""
    for ids, rows in trained.table.blocks():
        some = (ids >= first) & (ids < first + count)
        if some.any():
            yield ids[some] - first, np.ascontiguousarray(rows[some])
