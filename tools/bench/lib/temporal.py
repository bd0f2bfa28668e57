"""Shared code of the temporal benchmarks: stores, flags, and passes in separate processes."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe
from tools.bench.lib.stores import make_events
from tools.bench.sampled.cost import run_cold

Result = dict[str, Any]


def flags_of(text: str | None, events: int = 200_000_000) -> argparse.ArgumentParser:
    """Flags common to all of them; text: the module's docstring; events: default number."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=20_000_000)
    parser.add_argument("--events", type=int, default=events)
    parser.add_argument("--width", type=int, default=16, help="features of an event")
    parser.add_argument("--kind", default="uniform", help="of graph, see tools.graphs.make_graph")
    parser.add_argument("--limit", default="2GB", help="page cache counted; '' for none")
    parser.add_argument("--memory", default="", help="memory budget of ooc; default: the limit")
    parser.add_argument("--rate-seconds", type=float, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def stores_of(a: argparse.Namespace, shares: Sequence[int], undirected: bool = False) -> dict[int, Path]:
    """Events -> store for every share, made if missing, all with the same number of nodes."""
    a.work.mkdir(parents=True, exist_ok=True)
    kind = "undirected" if undirected else "events"
    found = {a.events // share: a.work / f"{kind}{a.events // share}.ooc" for share in shares}
    for events, store in found.items():
        if not store.exists():
            shape = {"nodes": a.nodes, "events": events, "width": a.width, "kind": a.kind}
            made = make_events(store, **shape, limit=a.limit, undirected=undirected)
            print(json.dumps({"ingest": made}), file=sys.stderr)
    return found


def cold_pass(module: str, a: argparse.Namespace, store: Path, names: Sequence[str], *more: str) -> Result:
    """Output of `python -m tools.bench.MODULE --child STORE` with a cold cache; names: settings passed on."""
    words = [f"--{name.replace('_', '-')}={getattr(a, name)}" for name in ("limit", "memory", *names)]
    found = run_cold([sys.executable, "-m", f"tools.bench.{module}", str(a.work), "--child", str(store), *words, *more])
    if "failed" in found:
        raise SystemExit(f"{store}: {found['error']}")
    return found


def answer(
    a: argparse.Namespace,
    names: Sequence[str],
    child: Callable[[argparse.Namespace], Result],
    compare: Callable[[argparse.Namespace], Result],
    plot: Callable[[Path, Result], None],
) -> None:
    """Print the JSON of a child's pass, or of all passes with the settings `names`; plot if requested."""
    if a.child is not None:
        print(json.dumps(child(a)))
        return
    result = compare(a)
    if a.plot:
        plot(a.plot, result)
    settings = {name: getattr(a, name) for name in ("nodes", "events", "width", "kind", "limit", "memory", *names)}
    print(json.dumps({"machine": describe(), **settings, **result}))
