"""Look up rows of an int8 table and make only those float: the lowering of embeddings.

Nothing here depends on hardware: a lookup copies bytes, whatever the CPU.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from versatil_passes.float_layers import FLOAT_LAYERS
from versatil_passes.graph_queries import (
    arguments_of,
    constant_of,
    erase_unread,
    is_written,
    module_path_of,
    value_of,
)
from versatil_passes.lowering_record import NOT_ANNOTATED, LoweredOp

aten, prims = torch.ops.aten, torch.ops.prims

EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
"""Layers that look up rows of a table, by their names in an audit."""
MIN_ROW = 5
"""Elements of a row from which on int8 saves memory.

In a model file an int8 row takes one byte for each element, 4 for its scale and 8 for its zero point; a float row takes
4 for each element, which is the same where there are 4.
"""


@dataclass(frozen=True)
class Int8Table:
    """An int8 table and what its rows are multiplied by.

    Attributes:
        rows: int8 ``[rows, features]``, a constant of the graph.
        scale: float32 ``[rows]``, a constant of the graph, or one number for all rows.
    """

    rows: Node
    scale: Node | float


def float_table_reason(node: Node) -> str | None:
    """Say why the table of an embedding should not be quantized; ``None`` if it should.

    Args:
        node: ``aten.embedding`` or ``aten.embedding_bag`` that reads a float table.
    """
    table = arguments_of(node)["weight"]
    value = constant_of(table)
    if value is None:
        return "its table is no constant of the model"
    if value.dtype is not torch.float32:
        return f"its table is {value.dtype}; int8 stands for float32 only"
    if is_written(table):
        return "an op writes to its table, as max_norm does; int8 rows are constants"
    if value.shape[1] < MIN_ROW:
        return (
            f"rows of {value.shape[1]} elements save nothing: each also has a scale and a zero point; from {MIN_ROW} "
            f"elements on int8 is smaller"
        )
    return None


def int8_table(node: Node) -> Int8Table | str:
    """The int8 table that an embedding reads through a dequantize, or why it can't be looked up as int8.

    Args:
        node: ``aten.embedding`` or ``aten.embedding_bag``.
    """
    dequantize = arguments_of(node)["weight"]
    qd = torch.ops.quantized_decomposed
    known = (qd.dequantize_per_channel.default, qd.dequantize_per_tensor.default)
    if not isinstance(dequantize, Node) or dequantize.target not in known:
        return float_table_reason(node) or f"its table is not quantized: {NOT_ANNOTATED}"
    reason = next(_unusable(dequantize), None)
    if reason is not None:
        return reason
    given = arguments_of(dequantize)
    return Int8Table(given["input"], given["scales"] if "scales" in given else given["scale"])


def _unusable(dequantize: Node) -> Iterator[str]:
    """What keeps a dequantized table from being looked up as int8; the first counts, the others may follow from it."""
    given = arguments_of(dequantize)
    table = constant_of(given["input"])
    if table is None:
        yield "its int8 table is no constant of the graph: freezing is off, or it is quantized at run time"
    elif table.dtype is not torch.int8:
        yield f"its table is {table.dtype}; only int8 is looked up"
    if given["out_dtype"] not in (None, torch.float32):
        yield f"it computes in {given['out_dtype']}; only float32 is supported"
    if is_written(dequantize):
        yield "an op writes to its dequantized table, as max_norm does; int8 rows are constants"
    if "scales" not in given:
        if given["zero_point"] != 0:
            yield f"its table has zero_point {given['zero_point']}; only symmetric ones are looked up"
        return
    scales, zero_points = constant_of(given["scales"]), constant_of(given["zero_points"])
    is_symmetric = given["zero_points"] is None or (
        zero_points is not None and not bool(zero_points.any())
    )
    if given["axis"] != 0 or not is_symmetric or scales is None:
        yield "its table is not symmetric over constant rows (axis 0, zero_point 0)"
    elif scales.dtype is not torch.float32:
        yield f"its table's scales are {scales.dtype}; only float32 is supported"


def lower_embedding(node: Node) -> LoweredOp | str:
    """Look up int8 rows and dequantize those, in the place of a lookup in a dequantized table.

    ::

        before:  dequantize_per_channel(table, scales) -> embedding(indices)
        after:   embedding(table, indices).float() * embedding(scales[:, None], indices)

    The same numbers are multiplied, so the result is equal to the bit, and the float table never exists. A bag reduces
    what was looked up, by the operator that it was.

    Args:
        node: ``aten.embedding`` or ``aten.embedding_bag``; it is replaced if it can be.

    Returns:
        The record, or the reason why the node stays as it is.
    """
    table = int8_table(node)
    if isinstance(table, str):
        return table
    op = FLOAT_LAYERS[node.target]
    is_bag = op == "embedding_bag"
    reason = _bag_reason(node) if is_bag else None
    if reason is not None:
        return reason
    dequantize = arguments_of(node)["weight"]
    results = [user for user in node.users if user.users] if is_bag else []
    for user in [user for user in node.users if is_bag and not user.users]:
        node.graph.erase_node(user)  # it would be another value now: positions instead of indices
    record = LoweredOp(
        node=node.name,
        module_path=module_path_of(node),
        op=op,
        kernel=f"aten.{op}",
        post_ops=(),
        output_dtype=torch.float32,
        input_quant_max=None,
        is_dynamic=False,
        replaces=(node.name, *(result.name for result in results)),
    )
    with node.graph.inserting_before(node):
        new = _bag(node, table) if is_bag else _rows(table, arguments_of(node)["indices"])
    new.meta = dict(node.meta)
    for old, result in [(result, result) for result in results] or [(node, new)]:
        result.meta.update({"replaces": old.name, "lowered_as": str(record)})
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    erase_unread([dequantize])
    return record


def _rows(table: Int8Table, indices: Node) -> Node:
    """Float32 ``[*indices.shape, features]``."""
    graph = table.rows.graph
    rows = graph.call_function(aten.embedding.default, (table.rows, indices))
    rows = graph.call_function(prims.convert_element_type.default, (rows, torch.float32))
    scale: Any = table.scale
    if isinstance(scale, Node):
        column = graph.call_function(aten.unsqueeze.default, (scale, -1))
        scale = graph.call_function(aten.embedding.default, (column, indices))
    return graph.call_function(aten.mul.Tensor, (rows, scale))


def _bag_reason(node: Node) -> str | None:
    """Why a bag can't be written as a bag of rows that were looked up before; ``None`` if it can."""
    if any(
        user.target is not operator.getitem or (user.args[1] != 0 and user.users)
        for user in node.users
    ):
        return "more of its results are read than the reduced rows"
    indices = value_of(arguments_of(node)["indices"])
    if indices is not None and indices.dim() != 1:
        return f"its indices have {indices.dim()} dimensions; with offsets they are one list"
    return None


def _bag(node: Node, table: Int8Table) -> Node:
    """The same bag, of rows that are looked up one after another.

    Position ``i`` of the new table is what index ``i`` of the list found, so the new indices count up. An index that
    the bag leaves out must stay recognizable: row 0 is then one for all of these, and the others come after it.
    """
    graph, given = node.graph, arguments_of(node)
    indices, padding = given["indices"], given.get("padding_idx")
    value, rows = value_of(indices), constant_of(table.rows)
    assert rows is not None
    count = graph.call_function(aten.sym_size.int, (indices, 0))
    # Where the graph tells no dtypes, torch brings indices and offsets to one.
    dtype: dict[str, Any] = {"dtype": torch.int64 if value is None else value.dtype}
    if padding is None:
        positions = graph.call_function(aten.arange.start, (0, count), dtype)
    else:
        padding %= len(rows)  # a negative one counts from the end
        end = graph.call_function(operator.add, (count, 1))
        counted = graph.call_function(aten.arange.start, (1, end), dtype)
        is_padding = graph.call_function(aten.eq.Scalar, (indices, padding))
        positions = graph.call_function(aten.masked_fill.Scalar, (counted, is_padding, 0))
        first = graph.call_function(aten.full.default, ([1], padding), dtype)
        indices = graph.call_function(aten.cat.default, ([first, indices],))
    # What embedding_bag calls where no gradient is needed. It first asks for the number of rows as a plain number,
    # and as there is one for each index here, a dynamic batch would become that of the example.
    arguments = (_rows(table, indices), positions, given["offsets"])
    options = {
        "mode": given["mode"],
        "per_sample_weights": given["per_sample_weights"],
        "include_last_offset": given["include_last_offset"],
        "padding_idx": -1 if padding is None else 0,
    }
    bag = aten._embedding_bag_forward_only.default  # noqa: SLF001 -- its public name
    return graph.call_function(bag, arguments, options)
