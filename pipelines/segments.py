"""The `segments` column: what a merged row remembers of each of its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import SEGMENT_FIELDS
from schemas.ragged import BoolArray, IntArray, Ragged, offsets_of
from schemas.types import cast_column

FOLDED = frozenset(
    {
        *("instance_id", "repetition_id", "trajectory_id", "step_index", "is_last_step"),
        *("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "rewards"),
        *("segments", "token_source", "temperature", "top_p", "top_k", "error"),
        "rollout_expert_indices",
    }
)
"""Columns a merged row holds in full, or that are equal in all its steps; the others are kept per
step in `segments`."""


_OWN_NAMES = frozenset(field.name for field in SEGMENT_FIELDS)


def segment_name(column: str) -> str:
    """The field of `segments` that keeps a column: its own name, unless that is taken."""
    taken = column in _OWN_NAMES or column.startswith("column.")
    return f"column.{column}" if taken else column


def per_step_names(table: pa.Table) -> list[str]:
    """Columns of which `segments` keeps each step's value."""
    return [name for name in table.column_names if name not in FOLDED]


def nest(out: pa.Table, steps: pa.Table, first: IntArray, start: IntArray) -> pa.Table:
    """Give merged rows their `segments`; rows of one step keep what they have.

    Args:
        out: [M] merged rows.
        steps: [N] the rows they were made of.
        first: [M] first step of each merged row.
        start: [N] where each step's response starts in its merged row.
    """
    count = np.diff(np.append(first, steps.num_rows))
    merged = np.repeat(count > 1, count)
    made = _made_segments(steps, np.flatnonzero(merged), start)
    kept, kept_count = _kept_segments(out)
    flat = _concat_structs(made, kept)

    lengths = np.where(count > 1, count, kept_count)
    order = _interleave(count > 1, count, kept_count, len(made))
    offsets = pa.array(offsets_of(lengths), pa.int32())
    had = out.column("segments").is_valid() if "segments" in out.column_names else None
    valid = (count > 1) | (np.asarray(had) if had is not None else np.zeros(len(count), np.bool_))
    values = flat.take(pa.array(order))
    column = pa.ListArray.from_arrays(
        offsets, values, type=pa.list_(values.type), mask=None if valid.all() else pa.array(~valid)
    )
    field = pa.field("segments", column.type)
    if had is None:
        return out.append_column(field, column)
    return out.set_column(out.column_names.index("segments"), field, column)


def _made_segments(steps: pa.Table, rows: IntArray, start: IntArray) -> pa.StructArray:
    index = pa.array(rows)
    length = pc.list_value_length(steps.column("response_ids"))
    columns = {
        "start": pa.array(start[rows], pa.int32()),
        "length": _flat(length.take(index)).cast(pa.int32()),
        "step_index": _flat(steps.column("step_index").take(index)),
    }
    names = per_step_names(steps)
    columns |= {segment_name(name): _flat(steps.column(name).take(index)) for name in names}
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def _kept_segments(out: pa.Table) -> tuple[pa.StructArray, IntArray]:
    if "segments" not in out.column_names:
        empty = pa.array([], pa.struct(list(SEGMENT_FIELDS)))
        return empty, np.zeros(out.num_rows, np.int64)
    column = out.column("segments")
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
    return _flat(pc.list_flatten(column)), lengths


def _concat_structs(made: pa.StructArray, kept: pa.StructArray) -> pa.StructArray:
    names = list(dict.fromkeys([f.name for f in made.type] + [f.name for f in kept.type]))
    columns = []
    for name in names:
        parts = [
            pc.struct_field(part, name) if part.type.get_field_index(name) >= 0 else None
            for part in (made, kept)
        ]
        kind = next(part.type for part in parts if part is not None)
        sizes = (len(made), len(kept))
        filled = [
            pa.nulls(size, kind) if part is None else cast_column(part, kind)
            for part, size in zip(parts, sizes, strict=True)
        ]
        columns.append(pa.concat_arrays(filled))
    return pa.StructArray.from_arrays(columns, names=names)


def _interleave(
    is_merged: BoolArray, made_count: IntArray, kept_count: IntArray, num_made: int
) -> IntArray:
    """Take-indices that put made and kept segments into row order."""
    lengths = np.where(is_merged, made_count, kept_count)
    from_made = np.repeat(is_merged, lengths)
    order = np.empty(len(from_made), np.int64)
    order[from_made] = np.arange(int(from_made.sum()))
    order[~from_made] = num_made + np.arange(int((~from_made).sum()))
    return order


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps inside the rows of a table.

    Attributes:
        row: [S] the row each step is in.
        start: [S] where its response starts in the row's response.
        length: [S] tokens of its response; -1: the whole response.
        segment: [S] its flat index among all segments; -1 for a row that is not split.
    """

    row: IntArray
    start: IntArray
    length: IntArray
    segment: IntArray


def split_points(table: pa.Table) -> BoolArray:
    """[N] whether a row's segments are several steps, one segment each."""
    column = table.column("segments")
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    index = _field(column, "step_index")
    repeats = np.zeros(len(row), np.bool_)
    repeats[1:] = (row[1:] == row[:-1]) & (index[1:] <= index[:-1])
    clean: BoolArray = np.bincount(row, repeats, minlength=len(lengths)) == 0
    return clean & (lengths > 1)


def steps_of(table: pa.Table, split: BoolArray) -> Steps:
    """Steps of all rows; `split` says which rows hold several."""
    column = table.column("segments")
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
    count = np.where(split, lengths, 1)
    row = np.repeat(np.arange(len(count)), count)
    inside = np.arange(len(row)) - np.repeat(offsets_of(count)[:-1], count)
    segment = np.where(split[row], offsets_of(lengths)[row] + inside, -1)
    start, length = _field(column, "start"), _field(column, "length")
    pick = np.maximum(segment, 0)
    if len(start) == 0:
        return Steps(row, np.zeros_like(row), np.full_like(row, -1), segment)
    return Steps(
        row,
        np.where(segment < 0, 0, start[pick]),
        np.where(segment < 0, -1, length[pick]),
        segment,
    )


def step_columns(table: pa.Table, steps: Steps) -> pa.Table:
    """[S] rows with every per-step value in its column again."""
    flat = _flat(pc.list_flatten(table.column("segments")))
    out = table.take(pa.array(steps.row))
    split = steps.segment >= 0
    for name in ("segments", *per_step_names(table)):
        index = out.column_names.index(name)
        column = _flat(table.column(name))
        if name == "segments":
            values = pa.array(np.where(split, -1, steps.row), pa.int64(), mask=split)
            out = out.set_column(index, out.schema.field(index), column.take(values))
        elif flat.type.get_field_index(segment_name(name)) >= 0:
            stored = cast_column(pc.struct_field(flat, segment_name(name)), column.type)
            order = np.where(split, len(column) + steps.segment, steps.row)
            values = pa.concat_arrays([column, stored]).take(pa.array(order))
            out = out.set_column(index, out.schema.field(index), values)
    return out


def segment_rewards(
    table: pa.Table, responses: Ragged
) -> tuple[IntArray, npt.NDArray[np.float64], IntArray]:
    """Of all segments: flat position of the last token in `responses`, reward (null: 0), row."""
    column = table.column("segments")
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    ends = responses.offsets[row] + _field(column, "start") + _field(column, "length") - 1
    earned = pc.fill_null(pc.struct_field(pc.list_flatten(column), "reward"), 0.0)
    return ends, earned.to_numpy(), row


def _field(column: pa.ChunkedArray, name: str) -> IntArray:
    values = pc.struct_field(pc.list_flatten(column), name)
    return np.asarray(values.to_numpy(), np.int64)


def _flat(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
