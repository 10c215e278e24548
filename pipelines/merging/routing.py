"""Join the routed experts of merged rows without loss, and split them again.

In a merged row, each token has the routes of the earliest step that recorded routes for it: the
prompt has the first step's routes, and a response has the routes of the step that sampled it. The
response's last token, which the engine has not routed when sampling ends, and the observation after
it have the next step's routes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.frames import ROUTING
from pipelines.merging.lineage import Sequences
from schemas.columns import NUM_ROUTED
from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths, offsets_of, routing_array

Routes = npt.NDArray[np.int16]


def join_routing(
    column: pa.ChunkedArray, sequences: Sequences
) -> tuple[pa.Array, dict[str, pa.Array]]:
    """Join the routes of each sequence's steps; a step with different routes keeps its own.

    Args:
        column: [N] `rollout_expert_indices` of the steps.
        sequences: Assignment of steps to sequences.

    Returns:
        [M] routes of a leading part of prompt + response; and [N] fields for the segments:
        num_routed_tokens, and the step's routes if they differ from the sequence's.

    Example:
        One layer, top-1. Steps with routes [5, 6] (prompt 1 token, response 2) and [5, 6, 7, 8]:
        the sequence has [5, 6, 7, 8], and the steps' num_routed_tokens are 2 and 4.
    """
    routes = Routing.of(column)
    joined: list[Routes | None] = [None] * len(sequences.head)
    routes_of_step: list[Routes | None] = [None] * len(column)
    for sequence, first in enumerate(sequences.first.tolist()):
        steps = sequences.order[first : first + int(sequences.count[sequence])].tolist()
        parts = [routes.row(step) for step in steps]
        if parts[0] is None:
            continue
        joined[sequence] = whole = _joined([part for part in parts if part is not None])
        for step, part in zip(steps, parts, strict=True):
            if part is not None and not np.array_equal(whole[: len(part)], part):
                routes_of_step[step] = part
    num_routed = to_arrow(routes.tokens.lengths, pa.int32(), mask=~routes.tokens.valid)
    fields = {NUM_ROUTED: num_routed, ROUTING: routing_array(routes_of_step, *routes.shape)}
    return routing_array(joined, *routes.shape), fields


def _joined(parts: list[Routes]) -> Routes:
    pieces, num_joined = [parts[0]], len(parts[0])
    for part in parts[1:]:
        if len(part) > num_joined:
            pieces.append(part[num_joined:])
            num_joined = len(part)
    return np.concatenate(pieces)


def routed_alike(table: pa.Table, num_prompt: IntArray, continued: IntArray) -> BoolArray:
    """[N] True if a step was routed like the step it continues, at every token that affects training.

    If true, the routes that `join_routing` gives the merged row equal the routes of both steps at
    every token on which a trained token of either step depends. A step's last token is excluded,
    because no other token of the step depends on it. A token without routes is treated as different
    from a token with routes.

    Args:
        table: Steps with routes, `response_ids` and `loss_mask`.
        num_prompt: [N] number of tokens in each prompt.
        continued: [N] the step that each step continues; -1 for none (the result is then false).
    """
    routes = Routing.of(table.column(ROUTING))
    num_routed = routes.tokens.lengths
    mask = Ragged.from_arrow(table.column("loss_mask"))
    slot = np.flatnonzero(mask.values)
    row = mask.row_of(slot)
    num_used = np.zeros(len(continued), np.int64)  # tokens before the last trained token
    num_used[row] = num_prompt[row] + slot - mask.offsets[row]
    alike = np.zeros(len(continued), np.bool_)
    for step in np.flatnonzero(continued >= 0).tolist():
        before = int(continued[step])
        covered = num_routed[before] >= num_used[before] or num_routed[before] == num_routed[step]
        earlier = routes.tokens.row(before)
        alike[step] = covered and np.array_equal(routes.tokens.row(step)[: len(earlier)], earlier)
    return alike


def split_routing(
    column: pa.ChunkedArray, segments: pa.StructArray, row: IntArray, segment: IntArray
) -> pa.Array:
    """[S] Split the routes of merged rows into routes of their steps: undo `join_routing`.

    Args:
        column: [N] routes of the merged rows.
        segments: All segments, flattened.
        row: [S] the row that contains each step.
        segment: [S] flat index of each step in `segments`; -1 if its row is not split.
    """
    joined = Routing.of(column)
    if segments.type.get_field_index(NUM_ROUTED) < 0:
        return column.take(to_arrow(row)).combine_chunks()
    of_segments = Routing.of(pa.chunked_array([pc.struct_field(segments, ROUTING)]))
    num_routed = filled(pc.struct_field(segments, NUM_ROUTED), 0)
    steps: list[Routes | None] = []
    for at, index in zip(row.tolist(), segment.tolist(), strict=True):
        whole = joined.row(at)
        if whole is not None and index >= 0:
            routed = of_segments.row(index)
            whole = whole[: num_routed[index]] if routed is None else routed
        steps.append(whole)
    return routing_array(steps, *joined.shape)


class Routing:
    """A routing column as rows of [tokens, layers * topk], int16."""

    def __init__(self, tokens: Ragged, shape: tuple[int, int]) -> None:
        self.tokens, self.shape = tokens, shape

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> Routing:
        """Wrap a column; copies only if it has several chunks."""
        per_layer = column.type.value_type
        shape = (per_layer.list_size, per_layer.value_type.list_size)
        flat: Any = pc.list_flatten(pc.list_flatten(pc.list_flatten(column)))
        lengths = list_lengths(column)
        values = to_numpy(flat).reshape(-1, shape[0] * shape[1])
        valid = to_numpy(column.is_valid())
        return cls(Ragged(values, offsets_of(lengths), valid), shape)

    def row(self, index: int) -> Routes | None:
        """[tokens, layers * topk] Return the routes of a row; None if they are unknown."""
        return self.tokens.row(index) if self.tokens.valid[index] else None
