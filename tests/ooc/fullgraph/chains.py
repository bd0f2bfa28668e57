"""Programs and profiles of made-up models: what planning is tested on. All seconds are sums of powers of two, so exact."""

from collections.abc import Mapping
from itertools import product
from math import inf
from typing import Any

import pytest

from ooc.fullgraph.placement.op_costs import OpCost, PackCost, Speed, StepProfile
from ooc.fullgraph.placement.search import search
from ooc.fullgraph.placement.step_plan import TierRoom, predict
from ooc.fullgraph.program import GONE, Placement, Program, TensorPlacement, Value
from ooc.layerwise.pass_plan import Op
from ooc.stores.errors import BudgetError

ALL = (TensorPlacement.RETAINED, TensorPlacement.DEVICE, TensorPlacement.DISK, TensorPlacement.RECOMPUTED)
KEPT = ALL[:3]
SAVED = (*ALL, TensorPlacement.COMPRESSED)
CELLS = 8


def chain(
    widths: list[int],
    *,
    saved: int = 0,
    placements: Mapping[str, tuple[TensorPlacement, ...]] | None = None,
    constant: bool = False,
    initial: bool = False,
    nodes: int = 1 << 13,
    edges: int = 1 << 15,
) -> Program:
    """A program of layers that sum: widths[l] columns into layer l, the last one's out. saved: columns that autograd keeps.

    initial: every layer also reads rows that a map made of the features. constant: the first layer's sums are.
    """
    cell, layers, own = nodes // CELLS, len(widths) - 1, dict(placements or {})
    values: list[Value] = []

    def add(name: str, kind: Any, columns: int, made: str, last: str, down: tuple[str, ...], **more: Any) -> None:
        allowed = KEPT if kind in ("features", "gradient") else SAVED if kind == "saved" else ALL
        nbytes = 4 * columns * nodes
        values.append(Value(name, kind, columns, nbytes, made, last, down, own.get(name, allowed), **more))

    first, lowest = ("initial",) if initial else (), ("down0",) if layers > 1 else ()
    add("x", "features", widths[0], "", "map" if initial else "up0", () if initial else lowest)
    source = "rows0" if initial else "x"
    forward = [Op("map", "map", 0, reads=("x",), writes=("initial", "rows0"))] if initial else []
    if initial:
        downs = tuple(f"down{at}" for at in range(layers - 2, -1, -1))
        add("initial", "rows", widths[0], "map", f"up{layers - 1}", downs, constant=constant)
        add("rows0", "rows", widths[0], "map", "up0", lowest, constant=constant)
    backward = []
    for at in range(layers):
        last, rows = at == layers - 1, source if at == 0 else f"rows{at}"
        grads = tuple(name for name in (f"gnear{at}", f"groot{at}") if at)
        down = () if last else (f"down{at}",)
        made = [f"near{at}"] + ([] if last else [f"saved{at}"] * bool(saved) + [f"rows{at + 1}"])
        writes = (*made, *(grads if last else ()))
        forward.append(Op(f"up{at}", "sum", at, summed=rows, reads=(rows, *first), writes=writes, computes_loss=last))
        add(f"near{at}", "sums", widths[at], f"up{at}", f"up{at}", down, constant=constant and at == 0)
        if not last:
            if saved:
                add(f"saved{at}", "saved", saved, f"up{at}", "", down)
            after = (f"down{at + 1}",) if at + 2 < layers else ()
            add(f"rows{at + 1}", "rows", widths[at + 1], f"up{at}", f"up{at + 1}", after)
            above = (f"groot{at + 1}",)
            reads = tuple([*above, f"near{at}", rows, *first] + [f"saved{at}"] * bool(saved))
            backward.insert(
                0,
                Op(
                    f"down{at}",
                    "sum",
                    at,
                    True,
                    summed=f"gnear{at + 1}",
                    reads=reads,
                    writes=grads,
                    repeats=f"up{at}",
                ),
            )
        for name in grads:
            add(name, "gradient", widths[at], f"up{at}" if last else f"down{at}", "", (f"down{at - 1}",))
    downs = tuple(op.name for op in backward)
    values.append(Value("edges", "edges", 0, 16 * edges, "", forward[-1].name, downs, own.get("edges", KEPT), True))
    return Program(nodes, edges, 4, cell, tuple(values), tuple(forward), tuple(backward))


def profile(program: Program, seconds: list[int], hidden: float = 0.5, gpu: bool = False, speed: int = 16) -> StepProfile:
    """seconds: of ops in turn; speed: log2 of the disk's bytes a second."""
    found = {}
    for number, op in enumerate(program.ops):
        rows, sums = seconds[2 * number % len(seconds)], seconds[(2 * number + 1) % len(seconds)]
        passes = seconds[(2 * number + 2) % len(seconds)]
        found[op.name] = OpCost(rows / 4, sums / 4, passes / 16) if op.summed else OpCost(rows / 4)
    tiers = {TensorPlacement.DISK: Speed(2.0**speed, 2.0 ** (speed - 1))}
    if gpu:
        tiers[TensorPlacement.RETAINED] = Speed(2.0 ** (speed + 3), 2.0 ** (speed + 2))
    packed = {
        value.name: PackCost(1 / 4, seconds[at % len(seconds)] / 16, seconds[(at + 1) % len(seconds)] / 32)
        for at, value in enumerate(program.values)
        if value.kind == "saved"
    }
    return StepProfile(found, tiers, hidden, packed=packed)


def seconds_of(program: Program, known: StepProfile, placement: Placement, room: TierRoom) -> float:
    """Of a step under a placement, infinite where it does not fit, or cannot be."""
    if not program.allows(placement):
        return inf
    try:
        return predict(program, known, placement, room).seconds
    except BudgetError:
        return inf


def ways(value: Value) -> list[tuple[TensorPlacement, TensorPlacement]]:
    """(where, where it stands while it is used) of a value."""
    passing = (TensorPlacement.RETAINED, TensorPlacement.DISK) if value.kind == "rows" else (TensorPlacement.DISK,)
    return [(where, tier) for where in value.placements for tier in (passing if where in GONE else (where,))]


def best_of_all(program: Program, known: StepProfile, room: TierRoom) -> float:
    """The least seconds of any placement there is."""
    names = [value.name for value in program.values]
    least = inf
    for picked in product(*map(ways, program.values)):
        placements = {name: where for name, (where, _) in zip(names, picked, strict=True)}
        passing = {name: tier for name, (where, tier) in zip(names, picked, strict=True) if where in GONE}
        least = min(least, seconds_of(program, known, Placement(placements, passing), room))
    return least


def assert_found_is_the_best(program: Program, known: StepProfile, room: TierRoom, precision: float = 0.0) -> None:
    """precision: how far seconds may be apart, relative; costs of `profile` alone are exact."""
    least = best_of_all(program, known, room)
    found = search(program, known, room.bytes)
    if least == inf:
        assert found is None
    else:
        assert found is not None
        assert found.exact
        assert seconds_of(program, known, found.placement, room) == pytest.approx(least, rel=precision, abs=0)
