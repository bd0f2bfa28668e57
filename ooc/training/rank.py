"""The best items of every source, by a run of links: embeddings of both by exact passes, then lists in blocks.

A crash during a pass loses nothing: the command run again goes on there. The file of lists appears whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ooc.graph.hetero import EdgeKey
from ooc.layerwise.exact_pass import ExactPass
from ooc.layerwise.layerwise_pass import Progress
from ooc.layerwise.top_k import KnownLinks, Ranking, TopK, check_k
from ooc.loading.arguments import input_nodes_of
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.io.atomic import check_absent, remove_tree
from ooc.stores.io.remote.url import store_path
from ooc.stores.node_set import NodeSet
from ooc.training.build import takes_floats
from ooc.training.link_mode import link_type
from ooc.training.model_outputs import ModelOutputs, Store, consent_of, ranks_of_pass
from ooc.training.node_mode import feature_reading
from ooc.training.node_rows import WrittenRows
from ooc.training.predictions import ROWS_AT_ONCE, check_table, external_ids, write_tables
from ooc.training.table_outputs import has_table


def rank(
    run: Path | str,
    store: Store,
    out: Path | str,
    *,
    k: int = 10,
    sources: Any = None,
    memory: str | int | None = None,
    engine: str = "auto",
    model_class: str | None = None,
    allow_code: bool = False,
    progress: Progress | None = None,
    verify_reads: bool = False,
    device: str = "auto",
    cache_dir: Path | str | None = None,
    cache: str | int | None = None,
    all_ranks: bool = False,
) -> WrittenRows:
    """Rank all possible destinations for every source of a run of links, and write the best of each to a table.

    Embeddings are those of `infer`, with all edges of the store; the run's decoder scores every pair, in blocks that fit the
    memory. Links that the store has are left out, and so is a source itself where destinations are of its type. Of equal scores
    the destination with the smaller row comes first.

    Args:
        run: The directory of a run with `task="link"`, finished or not (its best parameters are used).
        store: A data set, or the path of a store.
        out: A file to write, Parquet or CSV by its ending: `source` and `target` (the user's own ids), `rank` (int32, from 1)
            and `score` (float32), one row for each pair, by source and rank. A source has fewer than k rows where there are
            fewer other destinations.
        k: Destinations to keep for each source, 1 or more.
        sources: Which to rank for, as `input_nodes` of `NeighborLoader`: a split's name, a mask, rows, or ids that are words;
            None: all.
        memory, engine, model_class, allow_code, progress, verify_reads, device, cache_dir, cache, all_ranks: As of `infer`;
            lists are made on the CPU, by rank 0.

    Returns:
        About the file; `rows` are sources, and `columns` is k.

    Raises:
        ConfigError: The run is not one of links, does not fit the store, or names a class and there is no consent to import it.
        BudgetError: If the memory is too small.
        StoreError: If the disk fails or is full.

    >>> ooc.rank("runs/links", "shop.ooc", "best.parquet", k=20, memory="2GB").rows
    52643
    """
    out = Path(out)
    consent = consent_of(run, model_class, allow_code)
    given: dict[str, Any] = {"engine": engine, "memory": memory, "verify_reads": verify_reads}
    given |= {"cache_dir": cache_dir, "cache": cache}
    with ranks_of_pass(all_ranks, device) as ranks, ExitStack() as opened:
        ranks.decided(partial(_check, out, k))
        config = ranks.together(lambda: _config_of(consent, Path(run), store))
        ds, given = ranks.together(lambda: _opened(store, config, given, opened))
        key = link_type(config.edge_type, ds)
        source = ranks.together(lambda: _chosen(ds, key[0], sources))
        given |= {"consent": consent, "node_type": key[0] if ds.is_hetero else None, "device": device, "ranks": ranks}
        work = ModelOutputs(run, ds, progress=progress, **given)
        subject = ranks.together(lambda: opened.enter_context(work.opened()))
        passes: dict[str, ExactPass] = {}
        for name in dict.fromkeys((key[0], key[2])):
            passes[name] = work.begun(replace(subject, nodes=ds.nodes(name)), _folder(out) / name)
            opened.callback(passes[name].close)
            passes[name].lock()  # so that nobody else computes there
        rows = {name: each.run(*work.watched) for name, each in passes.items()}
        items, known = np.arange(ds.nodes(key[2]).num_nodes), KnownLinks(None, ds.edges(key))
        decoder: Any = subject.model.link_decoder.cpu()
        ranking = Ranking(rows[key[0]], rows[key[2]], decoder, items, known, same=key[0] == key[2])
        lists = _tables(ranking, ds, key, source, min(int(k), max(1, len(items))), progress)
        ranks.decided(lambda: write_tables(out, chain(lists, _removed(out, passes))))
        stats = [each.stats for each in passes.values()]
        of_ranks = ranks.gather([sum(each.bytes_read for each in stats), sum(each.bytes_written for each in stats)])
        read, written = (sum(each) for each in zip(*of_ranks, strict=True))
        method = "; ".join(dict.fromkeys(each.method for each in passes.values() if each.method))
        return WrittenRows(out, len(source), k, read, written, feature_reading(ds), method, "sources")


def _config_of(consent: Any, run: Path, store: Store) -> Any:
    """The configuration of a run of links."""
    if has_table(run):
        raise ConfigError(f"{run} has a table, and `ooc infer` lists its best answers: give it `top`")
    config = consent(run, store.path if isinstance(store, Dataset) else store_path(store))
    if config.link_decoder is None:
        raise ConfigError(f"{run} was trained with task = {config.task!r}: only runs of links (task = 'link') rank")
    return config


def _opened(store: Store, config: Any, given: dict[str, Any], opened: ExitStack) -> tuple[Dataset, dict[str, Any]]:
    """(the data set, which goes with `opened` where it was opened here, those settings that are not its own)."""
    if isinstance(store, Dataset):
        return store, given
    ds = opened.enter_context(Dataset.open(store, **given, float_features=takes_floats(config)))
    return ds, {}


def _chosen(ds: Dataset, node_type: str, sources: Any) -> Ids:
    """The nodes to rank for, int64[n]."""
    chosen = input_nodes_of(ds, (node_type, sources))
    return chosen.ids(np.arange(len(chosen)))


def _check(out: Path, k: Any) -> None:
    """Raise ConfigError for a k or a file that cannot be, and StoreError for a file that is there."""
    check_table(out)
    check_k(k)
    check_absent(out)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: its directory does not exist; make it first")


def _folder(out: Path) -> Path:
    """Where the passes keep their rows; beside the file."""
    return out.with_name(f"{out.name}.rank")


def _removed(out: Path, passes: Mapping[str, ExactPass]) -> Iterator[pa.Table]:
    """No more tables: the passes' rows go before the file appears, so that it never stands beside them."""
    for each in passes.values():
        each.discard()
    remove_tree(_folder(out))
    yield from ()


def _tables(ranking: Ranking, ds: Dataset, key: EdgeKey, ids: Ids, k: int, progress: Progress | None) -> Iterator[pa.Table]:
    """The lists of sources, some at a time; one table at least."""
    source, target, at_once = ds.nodes(key[0]), ds.nodes(key[2]), max(1, ROWS_AT_ONCE // k)
    yield _table(TopK.empty(np.arange(0), k), source, target)  # where there are no sources too
    done = 0
    for best in ranking.lists(ids, k, ds.process_memory.limit):
        done += len(best.source)
        for start in range(0, len(best.source), at_once):
            some = slice(start, start + at_once)
            yield _table(TopK(best.source[some], best.item[some], best.score[some]), source, target)
        if progress is not None:
            progress("ranking", done, len(ids))


def _table(best: TopK, source: NodeSet, target: NodeSet) -> pa.Table:
    at, place = np.nonzero(best.item >= 0)
    return pa.table(
        {
            "source": external_ids(source, best.source[at]),
            "target": external_ids(target, best.item[at, place]),
            "rank": pa.array((place + 1).astype(np.int32)),
            "score": pa.array(best.score[at, place]),
        }
    )
