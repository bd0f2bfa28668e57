"""kill -9 during an append, a compaction or a reader's merge: acknowledged data must be there exactly once.

    python -m tools.bench.kills.growth WORK --kills 100 [--places append compact view] [--seed 7]

A store with times, text ids and features repeatedly gets edges and new nodes, is compacted and opened, each by a process that
is killed a random time after it started its work, until --kills kills fell inside each place. After every kill the store is
verified and must contain what was acknowledged, and all or nothing of the killed append; the killed operation is then repeated.
Finally the store is compacted: it must have the fingerprint of a single ingest, without leftovers. Prints JSON; exits with 1
and keeps WORK if something differs.
"""

import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tools.bench.lib.killed_process import Difference, Places, command, end_of, fork, killed_inside

PLACES = ("append", "compact", "view")
_FEATURES = 16


class Lots:
    """Edges and nodes in lots, written on demand; the store starts with lot 0."""

    def __init__(self, folder: Path, seed: int, nodes: int, edges: int) -> None:
        self.folder, self.seed, self.nodes, self.edges = folder, seed, nodes, edges
        folder.mkdir()

    def write(self, name: str, first: int, last: int) -> dict[str, Any]:
        """Write lots first..last-1 as two tables; returns the settings of an ingest or append of them."""
        made = [self._lot(lot) for lot in range(first, last)]
        settings: dict[str, Any] = {"time": "t", "edge_features": ["msg=m"], "label": "y", "split": "split", "x_cols": "f*"}
        for key, tables in (("edges", [each[0] for each in made]), ("nodes", [each[1] for each in made])):
            settings[key] = str(self.folder / f"{name}-{key}.parquet")
            pq.write_table(pa.concat_tables(tables), settings[key])
        return settings

    def _lot(self, lot: int) -> tuple[pa.Table, pa.Table]:
        rng = np.random.default_rng([self.seed, lot])
        new = max(1, self.nodes // 20) if lot else self.nodes
        count = self.edges // 20 if lot else self.edges
        before = 0 if lot == 0 else self.nodes + (lot - 1) * max(1, self.nodes // 20)
        src, dst = rng.integers(0, before + new, (2, count))
        late = rng.random(count) < 0.1
        columns = {"src": _ids(src), "dst": _ids(dst), "t": np.where(late, 0, lot) * 1000 + rng.integers(0, 1000, count)}
        ids = np.arange(before, before + new)
        described: dict[str, Any] = {"id": _ids(ids), "y": ids % 4, "split": np.array(["train", "val", "test"])[ids % 3]}
        described |= {f"f{j}": rng.standard_normal(new).astype(np.float32) for j in range(_FEATURES)}
        return pa.table({**columns, "m": rng.random(count)}), pa.table(described)


def _ids(rows: Any) -> list[str]:
    return [f"n{row:07d}"[::-1] for row in rows.tolist()]


def grow(what: str, store: Path, lot: dict[str, Any], places: Places) -> int:
    """One process: an append, a compaction, or a reader."""
    from ooc.stores.dataset import Dataset
    from ooc.stores.growth import place
    from ooc.stores.growth.append import append
    from ooc.stores.growth.compact import compact
    from ooc.stores.growth.spec import AppendSpec

    places.watch(place, "_merge_view", "view")
    if what == "view":
        Dataset.open(store).close()
        return 0
    with places.at(what):
        if what == "append":
            append(AppendSpec(out=store, **lot))
        else:
            compact(store)
    return 0


def look(store: Path, wanted: tuple[int, int], found: Path) -> int:
    """Verify a store and write its number of edges, which must be one of `wanted`."""
    from ooc.stores.info import describe
    from ooc.stores.integrity import verify

    damages, told = verify(store), describe(store)
    edges = told["num_edges"] + told["appended"]["edges"]
    found.write_text(json.dumps(edges))
    if damages or edges not in wanted:
        print(*damages, f"{edges} edges, not one of {wanted}", sep="\n")
        return 3
    return 0


def finish(store: Path, whole: Path, lots: dict[str, Any]) -> int:
    """Compare with a store from a single ingest."""
    from ooc.stores.fingerprints import fingerprint
    from ooc.stores.growth.compact import compact
    from ooc.stores.ingest import IngestSpec, ingest

    compact(store)
    ingest(IngestSpec(out=whole, **lots))
    left = {path.name for path in store.iterdir() if not path.is_symlink()} - {"versions", "zarr.json"}
    folders = [path.name for path in (store / "versions").iterdir() if path.name.isdecimal()]
    print("left:", left, "versions:", folders)
    return 0 if fingerprint(store) == fingerprint(whole) and not left and len(folders) == 1 else 3


def begin(store: Path, lot: dict[str, Any]) -> int:
    """Create the store before any append."""
    from ooc.stores.ingest import IngestSpec, ingest

    ingest(IngestSpec(out=store, **lot))
    return 0


def warm(store: Path, lots: Lots) -> None:
    """Do everything once, so that forks need not import and load kernels."""
    from ooc.stores.dataset import Dataset
    from ooc.stores.growth.append import append
    from ooc.stores.growth.compact import compact
    from ooc.stores.growth.spec import AppendSpec
    from ooc.stores.integrity import verify

    begin(store, lots.write("warm", 0, 1))
    append(AppendSpec(out=store, **lots.write("warm", 1, 2)))
    Dataset.open(store).close()
    compact(store)
    verify(store)
    shutil.rmtree(store)


def kill(work: Path, kills: int, chosen: list[str], seed: int, nodes: int) -> dict[str, Any]:
    """Run everything; see the module. nodes: of the first lot, with ten times as many edges."""
    work.mkdir(parents=True)
    edges = 10 * nodes
    places, chance, log = Places(*PLACES), random.Random(seed), work / "log"
    store, lots = work / "grown.ooc", Lots(work / "lots", seed, nodes, edges)
    warm(work / "warm.ooc", lots)

    def life(run: Callable[[], int], what: str) -> None:
        if end_of(fork(run, log)):
            raise Difference(f"{what}; see {log}")

    life(partial(begin, store, lots.write("lot", 0, 1)), "the ingest fails")
    tally = {place: {"kills": 0, "elsewhere": 0} for place in chosen}
    stays = dict.fromkeys(PLACES, 0.3)
    done, count, began = 1, edges, time.perf_counter()
    while any(each["kills"] < kills for each in tally.values()):
        lot = lots.write("lot", done, done + 1)
        for what in ("append", "view", *(["compact"] if chance.random() < 0.5 else [])):
            ended = False
            while not ended:
                wanted = (count, count + edges // 20 if what == "append" else count)
                places.reset()
                child = fork(partial(grow, what, store, lot, places), log)
                if what in chosen and tally[what]["kills"] < kills and chance.random() < 0.9:
                    code = killed_inside(child, places, what, 1, chance.uniform(0, 1.2 * stays[what]))
                    inside = what in places.inside()
                    tally[what]["kills" if inside else "elsewhere"] += code < 0
                else:
                    code = end_of(child)
                if code > 0:
                    raise Difference(f"{what} fails after a kill; see {log}")
                if code == 0 and places.entered(what):
                    stays[what] = places.seconds(what)
                life(partial(look, store, wanted, work / "edges"), f"damaged by a kill in {what}")
                count = json.loads((work / "edges").read_text())
                ended = code == 0 or (what == "append" and count == wanted[1])
        done += 1
    life(partial(finish, store, work / "whole.ooc", lots.write("all", 0, done)), "not what one ingest makes")
    seconds = round(time.perf_counter() - began, 1)
    shutil.rmtree(work)
    return {"seed": seed, "lots": done, "edges": count, "places": tally, "seconds": seconds}


if __name__ == "__main__":
    command(__doc__, PLACES, 2_000, kill)
