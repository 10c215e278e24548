"""Routed experts of merged rows: joined without loss, taken apart again.

In a merged row each token has the routes of one step: the earliest that has any for it. So the
prompt has those of the first step, a response those of the step that sampled it, its last token
(which no engine routes when it samples it) and the observation those of the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sequences import Sequences
from pipelines.tables import ROUTING
from rollout_io.arrays import routing_array
from schemas.columns import NUM_ROUTED
from schemas.ragged import IntArray, Ragged, list_lengths, offsets_of

Routes = npt.NDArray[np.int16]


def join_routing(
    column: pa.ChunkedArray, sequences: Sequences
) -> tuple[pa.Array, dict[str, pa.Array]]:
    """Routes of the sequences, and what each step's segment has to remember of its own.

    Args:
        column: [N] `rollout_expert_indices` of the steps.
        sequences: Which step went where.

    Returns:
        [M] routes, of a leading part of prompt + response; and [N] fields of the segments:
        num_routed_tokens, and the step's routes where the sequence has others for its tokens.

    Example:
        One layer, top-1. Steps with routes [5, 6] (prompt 1 token, response 2) and [5, 6, 7, 8]:
        the sequence has [5, 6, 7, 8], and the steps remember 2 and 4.
    """
    routes = Routing.of(column)
    joined: list[Routes | None] = [None] * len(sequences.head)
    own: list[Routes | None] = [None] * len(column)
    for sequence, first in enumerate(sequences.first.tolist()):
        steps = sequences.order[first : first + int(sequences.count[sequence])].tolist()
        parts = [routes.row(step) for step in steps]
        if parts[0] is None:
            continue
        joined[sequence] = whole = _joined([part for part in parts if part is not None])
        for step, part in zip(steps, parts, strict=True):
            if part is not None and not np.array_equal(whole[: len(part)], part):
                own[step] = part
    num_routed = pa.array(routes.tokens.lengths, pa.int32(), mask=~routes.tokens.valid)
    fields = {NUM_ROUTED: num_routed, ROUTING: routing_array(own, *routes.shape)}
    return routing_array(joined, *routes.shape), fields


def _joined(parts: list[Routes]) -> Routes:
    pieces, known = [parts[0]], len(parts[0])
    for part in parts[1:]:
        if len(part) > known:
            pieces.append(part[known:])
            known = len(part)
    return np.concatenate(pieces)


def split_routing(
    column: pa.ChunkedArray, segments: pa.StructArray, row: IntArray, segment: IntArray
) -> pa.Array:
    """[S] routes of the steps of merged rows: the inverse of `join_routing`.

    Args:
        column: [N] routes of the rows.
        segments: All segments, flat.
        row: [S] the row that holds each step.
        segment: [S] its flat index in `segments`; -1 for a row that is not split.
    """
    joined = Routing.of(column)
    if segments.type.get_field_index(NUM_ROUTED) < 0:
        return _taken(column, row)
    own = Routing.of(pa.chunked_array([pc.struct_field(segments, ROUTING)]))
    num_routed = pc.fill_null(pc.struct_field(segments, NUM_ROUTED), 0).to_numpy()
    steps: list[Routes | None] = []
    for at, index in zip(row.tolist(), segment.tolist(), strict=True):
        whole = joined.row(at)
        if whole is not None and index >= 0:
            kept = own.row(index)
            whole = whole[: num_routed[index]] if kept is None else kept
        steps.append(whole)
    return routing_array(steps, *joined.shape)


def _taken(column: pa.ChunkedArray, row: IntArray) -> pa.Array:
    return column.take(pa.array(row)).combine_chunks()


class Routing:
    """A routing column as rows of [tokens, layers * topk] int16."""

    def __init__(self, tokens: Ragged, shape: tuple[int, int]) -> None:
        self.tokens, self.shape = tokens, shape

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> Routing:
        """View the column; copies only to join several chunks."""
        per_layer = column.type.value_type
        shape = (per_layer.list_size, per_layer.value_type.list_size)
        flat: Any = pc.list_flatten(pc.list_flatten(pc.list_flatten(column)))
        lengths = list_lengths(column)
        values = np.asarray(flat, np.int16).reshape(-1, shape[0] * shape[1])
        valid = np.asarray(column.is_valid())
        return cls(Ragged(values, offsets_of(lengths), valid), shape)

    def row(self, index: int) -> Routes | None:
        """[tokens, layers * topk] routes of a row; None where they are not known."""
        return self.tokens.row(index) if self.tokens.valid[index] else None
