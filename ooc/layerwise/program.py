"""PURE: a model's shape and a plan -> the ops of a forward pass over all nodes."""

from collections.abc import Sequence
from dataclasses import replace

from ooc.layerwise.ir import FEATURES, Op, ValueRef, names_of
from ooc.layerwise.pass_plan import LayerwisePlan, ModelShape, columns_of


def layer_op(shape: ModelShape, index: int, writes: Sequence[str] = ()) -> Op:
    """The op of a layer: it reads what the layer reads."""
    layer = shape.layers[index]
    own = [] if layer.kind is None else [shape.self_rows(index)]
    reads = [*own, shape.initial] if layer.needs_initial else own
    kind = "gather" if layer.kind is None else "sum"
    summed = shape.rows(index).name
    return Op(f"layer{index}", kind, index, summed=summed, reads=names_of(reads), writes=tuple(writes))  # type: ignore[arg-type]


def forward_ops(shape: ModelShape, plan: LayerwisePlan) -> tuple[Op, ...]:
    """The ops of a pass, in order. A layer whose rows are kept in blocks of columns has its sums made before it, block by
    block.

    >>> [op.name for op in forward_ops(shape, plan)]
    ['map', 'layer0', 'layer1']
    """
    ops = []
    if shape.mapped:
        ops.append(Op("map", "map", 0, reads=names_of([FEATURES]), writes=names_of(shape.made(0))))
    for index, layer in enumerate(plan.layers):
        for block in range(layer.blocks if layer.blocks > 1 else 0):
            rows, sums = (files_of(shape, plan, ref)[block][0] for ref in (shape.rows(index), ValueRef("sums", index)))
            ops.append(Op(f"sums{index}.{block}", "add", index, summed=rows, writes=(sums,)))
        op = layer_op(shape, index, names_of(shape.made(index + 1)))
        if layer.blocks > 1:  # the sums are read
            op = replace(op, summed="", reads=(*names_of([ValueRef("sums", index)]), *op.reads))
        ops.append(op)
    return tuple(ops)


def files_of(shape: ModelShape, plan: LayerwisePlan, ref: ValueRef) -> list[tuple[str, int]]:
    """(name, columns) of the files that a value is kept in, one a block of columns. The names stay as they are."""
    columns = shape.columns(ref)
    if ref.role not in ("rows", "sums"):
        return [(ref.name, columns)]
    blocks = columns_of(columns, plan.layers[ref.layer].blocks)
    name = "near" if ref.role == "rows" else "sum"
    return [(f"{name}{ref.layer}.{number}", own.stop - own.start) for number, own in enumerate(blocks)]
