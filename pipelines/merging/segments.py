"""The `segments` column: per-step values of merged rows, and their routed experts, without loss.

In a merged row, each token has the routes of the earliest step that recorded routes for it: the
prompt has the first step's routes, and a response has the routes of the step that sampled it. The
response's last token, which the engine has not routed when sampling ends, and the observation after
it have the next step's routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.frames import PER_TOKEN, ROUTING, set_column, set_columns
from pipelines.merging.lineage import SAME_IN_A_SEQUENCE, Sequences
from schemas.columns import JOINED, NUM_ROUTED, SEGMENT_FIELDS
from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths, offsets_of, routing_array
from schemas.types import PREFIX_TYPES, cast_column

FOLDED = frozenset(
    {
        *("instance_id", "repetition_id", "trajectory_id", "step_index", "is_last_step"),
        *("prompt_token_ids", "response_ids", "segments", *PER_TOKEN),
        *SAME_IN_A_SEQUENCE,
        "rollout_expert_indices",
        *PREFIX_TYPES,
    }
)
"""Columns that a merged row stores in full, or that are equal in all its steps.

`segments` stores the per-step values of all other columns.
"""

_OWN_NAMES = frozenset({JOINED, NUM_ROUTED, *(field.name for field in SEGMENT_FIELDS)})

Routes = npt.NDArray[np.int16]


def _segment_name(column: str) -> str:
    """Return the name of the `segments` field for a column; prefixed if the name is taken."""
    taken = column in _OWN_NAMES or column.startswith("column.")
    return f"column.{column}" if taken else column


def _per_step_names(table: pa.Table) -> list[str]:
    """List the columns whose per-step values `segments` stores."""
    return [name for name in table.column_names if name not in FOLDED]


def nest(
    out: pa.Table,
    steps: pa.Table,
    sequences: Sequences,
    interleaved: BoolArray,
    extra: dict[str, pa.Array],
) -> pa.Table:
    """Set the `segments` of merged rows; rows of one step keep their segments.

    If the steps of a trajectory are interleaved over several rows, its one-step rows get a segment
    too, which records their step index.

    Args:
        out: [M] merged rows.
        steps: [N] the steps that the rows were merged from.
        sequences: Assignment of steps to sequences.
        interleaved: [M] from `Sequences.interleaved`.
        extra: Additional fields by name, [N] values each.
    """
    is_made = (sequences.count > 1) | interleaved
    rows = sequences.order[is_made[sequences.of[sequences.order]]]
    new = _made_segments(steps, rows, sequences.start, extra)
    earlier, kept_count = _kept_segments(out)
    flat = _concat_structs(new, earlier)

    # A row either gets new segments or keeps its own: a merged row is never merged again as it stands.
    lengths = np.where(is_made, sequences.count, kept_count)
    order = _interleave(is_made, lengths, len(new))
    valid = is_made
    if "segments" in out.column_names:
        valid = is_made | to_numpy(out.column("segments").is_valid())
    values = flat.take(to_arrow(order))
    mask = None if valid.all() else to_arrow(~valid)
    offsets = to_arrow(offsets_of(lengths), pa.int32())
    kind = pa.list_(values.type)
    return set_column(out, "segments", pa.ListArray.from_arrays(offsets, values, kind, mask=mask))


def _made_segments(
    steps: pa.Table, rows: IntArray, start: IntArray, extra: dict[str, pa.Array]
) -> pa.StructArray:
    index = to_arrow(rows)
    length = pc.list_value_length(steps.column("response_ids"))
    columns = {
        "start": to_arrow(start[rows], pa.int32()),
        "length": _flat(length.take(index)).cast(pa.int32()),
        "step_index": _flat(steps.column("step_index").take(index)),
        JOINED: to_arrow(np.ones(len(rows), np.bool_)),
    }
    columns |= {name: column.take(index) for name, column in extra.items()}
    names = _per_step_names(steps)
    columns |= {_segment_name(name): _flat(steps.column(name).take(index)) for name in names}
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def _kept_segments(out: pa.Table) -> tuple[pa.StructArray, IntArray]:
    if "segments" not in out.column_names:
        empty = pa.nulls(0, pa.struct(list(SEGMENT_FIELDS)))
        return empty, np.zeros(out.num_rows, np.int64)
    column = out.column("segments")
    lengths = list_lengths(column)
    return _flat(pc.list_flatten(column)), lengths


def _concat_structs(new: pa.StructArray, earlier: pa.StructArray) -> pa.StructArray:
    fields = [
        dict(zip((field.name for field in part.type), part.flatten(), strict=True))
        for part in (new, earlier)
    ]
    # Only new segments have what this merge adds (routes, columns that appeared since): null in the others.
    names = list(fields[0] | fields[1])
    columns = []
    for name in names:
        parts = [part.get(name) for part in fields]
        kind = next(part.type for part in parts if part is not None)
        casts = [
            pa.nulls(len(whole), kind) if part is None else cast_column(part, kind)
            for part, whole in zip(parts, (new, earlier), strict=True)
        ]
        columns.append(pa.concat_arrays(casts))
    return pa.StructArray.from_arrays(columns, names=names)


def _interleave(is_made: BoolArray, lengths: IntArray, num_made: int) -> IntArray:
    """Compute the take-indices that put new and kept segments into row order."""
    from_made = np.repeat(is_made, lengths)
    order = np.empty(len(from_made), np.int64)
    order[from_made] = np.arange(int(from_made.sum()))
    order[~from_made] = num_made + np.arange(int((~from_made).sum()))
    return order


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that the rows of a table contain.

    Attributes:
        row: [S] row of each step.
        start: [S] start of the step's response in the row's response.
        length: [S] number of tokens in the step's response; -1 for the row's entire response.
        segment: [S] flat index of the step's segment; -1 if its row is not split.
    """

    row: IntArray
    start: IntArray
    length: IntArray
    segment: IntArray


def is_joined(table: pa.Table) -> BoolArray:
    """[N] True if a row was merged from several steps."""
    joined = np.zeros(table.num_rows, np.bool_)
    if "segments" not in table.column_names:
        return joined
    column = table.column("segments")
    flat = _flat(pc.list_flatten(column))
    if flat.type.get_field_index(JOINED) < 0:
        return joined
    lengths = list_lengths(column)
    first = offsets_of(lengths)[:-1][lengths > 0]
    # A row's segments come from one merge, so that the first one speaks for all.
    flags = filled(pc.struct_field(flat, JOINED), value=False)
    joined[lengths > 0] = flags[first]
    return joined


def steps_of(table: pa.Table, split: BoolArray) -> Steps:
    """List the steps of all rows; a row where `split` is false is one step."""
    column = table.column("segments")
    lengths = list_lengths(column)
    count = np.where(split, lengths, 1)
    row = np.repeat(np.arange(len(count)), count)
    inside = np.arange(len(row)) - np.repeat(offsets_of(count)[:-1], count)
    segment = np.where(split[row], offsets_of(lengths)[row] + inside, -1)
    start, length = _field(column, "start"), _field(column, "length")
    pick = np.maximum(segment, 0)  # any valid index for rows without segments, which do not use it
    if len(start) == 0:
        return Steps(row, np.zeros_like(row), np.full_like(row, -1), segment)
    begin = np.where(segment < 0, 0, start[pick])
    return Steps(row, begin, np.where(segment < 0, -1, length[pick]), segment)


def sampled_lengths(table: pa.Table) -> IntArray:
    """[N] Count the sampled response tokens of each row: those in `segments`, if it has segments.

    What is between sampled ranges, such as tool results, is not counted, so merging does not change
    the sum over the rows of a trajectory.

    Example:
        Two steps of one trajectory with responses of 1 and 3 tokens, merged into one row:

        >>> sampled_lengths(pipelines.merge(steps).collect().to_arrow()).tolist()
        [4]
    """
    whole = list_lengths(table.column("response_ids"))
    if "segments" not in table.column_names:
        return whole
    column = table.column("segments")
    # Sums over a row are differences of sums over all segments before its ends.
    ends = offsets_of(_field(column, "length"))[offsets_of(list_lengths(column))]
    return np.where(to_numpy(column.is_valid()), np.diff(ends), whole)


def step_columns(table: pa.Table, steps: Steps) -> pa.Table:
    """[S] Build one row per step, with every per-step value restored from `segments`."""
    flat = _flat(pc.list_flatten(table.column("segments")))
    out = table.take(to_arrow(steps.row))
    # A row that was not merged is one step, and keeps the segments that it came with.
    split = steps.segment >= 0
    unsplit = to_arrow(steps.row, mask=split)
    fields = dict(zip((field.name for field in flat.type), flat.flatten(), strict=True))
    restored = {"step_index": "step_index"}
    restored |= {name: _segment_name(name) for name in _per_step_names(table)}
    chosen = {
        name: _chosen(table.column(name), fields[field], steps)
        for name, field in restored.items()
        if field in fields
    }
    return set_columns(out, {"segments": _flat(table.column("segments").take(unsplit)), **chosen})


def _chosen(column: pa.ChunkedArray, values: pa.Array, steps: Steps) -> pa.Array:
    """[S] Take a column's values from the step's segment if it has one, else from its row."""
    column = _flat(column)
    stored = cast_column(values, column.type)
    # Both sources are one array, rows first: a segment's value stands behind all rows.
    order = np.where(steps.segment >= 0, len(column) + steps.segment, steps.row)
    return pa.concat_arrays([column, stored]).take(to_arrow(order))


def segment_rewards(
    table: pa.Table, responses: Ragged
) -> tuple[IntArray, npt.NDArray[np.float64], IntArray]:
    """Return each segment's last token (flat index in `responses`), reward (null: 0) and row."""
    column = table.column("segments")
    lengths = list_lengths(column)
    row = np.repeat(np.arange(len(lengths)), lengths)
    ends = responses.offsets[row] + _field(column, "start") + _field(column, "length") - 1
    earned = filled(pc.struct_field(pc.list_flatten(column), "reward"), 0.0)
    return ends, earned, row


def _field(column: pa.ChunkedArray, name: str) -> IntArray:
    values = pc.struct_field(pc.list_flatten(column), name)
    return to_numpy(values).astype(np.int64, copy=False)


def _flat(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


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
            # An engine may route a prefix again, otherwise: the row has one value a token, so the step keeps its own.
            if part is not None and not np.array_equal(whole[: len(part)], part):
                routes_of_step[step] = part
    num_routed = to_arrow(routes.tokens.lengths, pa.int32(), mask=~routes.tokens.valid)
    fields = {NUM_ROUTED: num_routed, ROUTING: routing_array(routes_of_step, *routes.shape)}
    return routing_array(joined, *routes.shape), fields


def _joined(parts: list[Routes]) -> Routes:
    pieces, num_joined = [parts[0]], len(parts[0])
    for part in parts[1:]:
        # The earliest step that routed a token sampled it with these routes; later ones only read it again.
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
    # Slots ascend, and of equal rows the last assignment stays: the tokens before the last trained one.
    num_used = np.zeros(len(continued), np.int64)
    num_used[row] = num_prompt[row] + slot - mask.offsets[row]
    alike = np.zeros(len(continued), np.bool_)
    for step in np.flatnonzero(continued >= 0).tolist():
        before = int(continued[step])
        # Tokens that the step before has no routes for get this step's: that must not reach what it trained.
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
    if segments.type.get_field_index(NUM_ROUTED) < 0:  # no merge of routes made these segments
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
