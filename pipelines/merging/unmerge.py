"""Split merged rows into the steps they were merged from."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.merging.routing import split_routing
from pipelines.merging.segments import Steps, is_joined, step_columns, steps_of
from pipelines.tables import (
    PER_TOKEN,
    ROUTING,
    Frame,
    count_from_zero,
    over_valid_tables,
    set_column,
)
from rollout_io.dataset.prefix_layout import trajectory_starts
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.ragged import BoolArray, IntArray, Ragged, gather, offsets_of, zipped
from schemas.types import without_views


def unmerge(frame: Frame) -> pl.LazyFrame:
    """Split merged rows into the steps they were merged from: the inverse of `merge`.

    A row that was not merged is kept unchanged, even if its `segments` list several sampled ranges.
    `step_index` is renumbered.

    Example:
        >>> unmerge(merge(steps)).select("prompt_token_ids", "response_ids").collect().rows()
        [([1, 2], [3]), ([1, 2, 3, 9], [4])]
    """
    return over_valid_tables(frame, unmerge_table)


def unmerge_table(table: pa.Table) -> pa.Table:
    """Apply `unmerge` to an Arrow table of complete trajectories."""
    table = without_views(table)
    joined = is_joined(table)
    if not joined.any():
        return table
    steps = steps_of(table, joined)
    out = _tokens(step_columns(table, steps), table, steps)
    if ROUTING in table.column_names:
        flat = pc.list_flatten(table.column("segments"))
        flat = flat.combine_chunks() if isinstance(flat, pa.ChunkedArray) else flat
        routes = split_routing(table.column(ROUTING), flat, steps.row, steps.segment)
        out = set_column(out, ROUTING, routes)
    return _in_step_order(out, table, joined)


def _tokens(out: pa.Table, table: pa.Table, steps: Steps) -> pa.Table:
    """Set the prompts, responses and per-token columns of S steps."""
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    length = np.where(steps.length < 0, responses.lengths[steps.row], steps.length)
    whole = zipped(prompts, responses)
    prompt_length = prompts.lengths[steps.row] + steps.start
    prompt = gather(whole.values, whole.offsets[steps.row], prompt_length)
    valid = np.ones(len(steps.row), np.bool_)
    column = Ragged(prompt, offsets_of(prompt_length), valid).to_arrow(pa.int32())
    out = set_column(out, "prompt_token_ids", column)
    for name, kind in {"response_ids": pa.int32(), **PER_TOKEN}.items():
        if name in table.column_names:
            values = Ragged.from_arrow(table.column(name))
            known = values.valid[steps.row]
            kept = np.where(known, length, 0)
            part = gather(values.values, values.offsets[steps.row] + steps.start, kept)
            out = set_column(out, name, Ragged(part, offsets_of(kept), known).to_arrow(kind))
    return out


def _in_step_order(out: pa.Table, table: pa.Table, joined: BoolArray) -> pa.Table:
    """Restore the original order of each trajectory's steps, and renumber them.

    Rows are in the order of their last steps. The original order of interleaved steps is known only
    if every row of the trajectory recorded its step indices; otherwise row order is kept.
    """
    starts = trajectory_starts(out)
    num_steps = np.diff(np.append(starts, out.num_rows))
    remembered = np.logical_and.reduceat(joined, trajectory_starts(table))
    position = count_from_zero(out)
    step = to_numpy(out.column("step_index")).astype(np.int64)
    key = np.where(np.repeat(remembered, num_steps), step, position)
    trajectory = np.repeat(np.arange(len(starts)), num_steps)
    order = np.lexsort((key, trajectory))
    is_last = np.zeros(out.num_rows, np.bool_)
    is_last[_ends(out)] = to_numpy(table.column("is_last_step"))[_ends(table)]
    if not np.array_equal(order, np.arange(len(order))):
        out = out.take(to_arrow(order))
    out = set_column(out, "is_last_step", to_arrow(is_last))
    return set_column(out, "step_index", to_arrow(position, pa.int32()))


def _ends(table: pa.Table) -> IntArray:
    """[T] Return the last row of each trajectory."""
    return np.append(trajectory_starts(table)[1:], table.num_rows) - 1
