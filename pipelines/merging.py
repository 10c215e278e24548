"""Prefix-aware merging: steps that continue each other token for token become one sequence.

The rule (`consecutive`, that of SkyRL's merge_stepwise_output): step i continues step i-1 of its
trajectory when the prompt + response of step i-1 is a prefix of the prompt of step i. What the
prompt adds is an observation: it joins the response, untrained. Every per-step value is kept in
`segments`, so `unmerge` gives the steps back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.segments import nest, split_points, step_columns, steps_of
from pipelines.tables import Frame, over_tables, set_column
from rollout_io.prefix import trajectory_starts
from schemas.ragged import BoolArray, IntArray, Ragged, gather, offsets_of, ranges
from schemas.types import without_views

PER_TOKEN = {
    "loss_mask": pa.bool_(),
    "rollout_logprobs": pa.float32(),
    "rewards": pa.float64(),
}
SAME_IN_A_SEQUENCE = ("token_source", "temperature", "top_p", "top_k", "error")
SAME_NULLNESS = ("rollout_logprobs", "reward", "rewards")
NEVER_JOINED = ("segments", "rollout_expert_indices")


def merge(frame: Frame) -> pl.LazyFrame:
    """Merge steps that continue each other; whole trajectories in, whole trajectories out.

    Rows are joined only if they agree on token_source, temperature, top_p, top_k and error, and on
    whether rollout_logprobs, reward and rewards are known. A row that has `segments` already,
    routed experts or an empty response stays as it is: merging twice changes nothing.

    A merged row has the prompt of its first step; responses with the observations between them;
    loss_mask false, log-probability 0.0 and reward 0.0 at observations; the sum of the rewards; the
    oldest policy_version; and of every other column the last step's value.

    Example:
        Steps of one trajectory, prompts [1, 2] and [1, 2, 3, 9], responses [3] and [4]:

        >>> merge(steps).select("prompt_token_ids", "response_ids", "loss_mask").collect().rows()
        [([1, 2], [3, 9, 4], [True, False, True])]
    """
    return over_tables(frame, merge_table)


def unmerge(frame: Frame) -> pl.LazyFrame:
    """Split merged rows into the steps they were made of: the inverse of `merge`.

    A row without segments, or whose segments are all of one step, stays as it is. `step_index`
    counts the steps of a trajectory anew.

    Example:
        >>> unmerge(merge(steps)).select("prompt_token_ids", "response_ids").collect().rows()
        [([1, 2], [3]), ([1, 2, 3, 9], [4])]
    """
    return over_tables(frame, unmerge_table)


def merge_table(table: pa.Table) -> pa.Table:
    """`merge` for an Arrow table of whole trajectories."""
    table = without_views(table)
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    starts = trajectory_starts(table)
    continues = _continues(table, prompts, responses, starts)
    first = np.flatnonzero(~continues)
    last = np.append(first[1:], table.num_rows)[: len(first)] - 1

    before = np.where(continues, np.roll(prompts.lengths + responses.lengths, 1), 0)
    gaps = np.where(continues, prompts.lengths - before, 0)
    position = _positions(gaps, responses.lengths, first)
    out = table.take(pa.array(last))
    prompt = Ragged(
        gather(prompts.values, prompts.offsets[first], prompts.lengths[first]),
        offsets_of(prompts.lengths[first]),
        prompts.valid[first],
    )
    out = set_column(out, "prompt_token_ids", prompt.to_arrow(pa.int32()))
    out = set_column(out, "response_ids", _join_responses(prompts, responses, gaps, position))
    for name, kind in PER_TOKEN.items():
        if name in table.column_names:
            column = Ragged.from_arrow(table.column(name))
            out = set_column(out, name, _join(column, position, first).to_arrow(kind))
    out = _fold_scalars(out, table, first)
    out = set_column(out, "step_index", pa.array(_count_from(out), pa.int32()))
    return nest(out, table, first, position.start - position.row_start)


@dataclass(frozen=True, slots=True)
class _Positions:
    """Where the N steps' responses go in the flat array of the M merged ones.

    Attributes:
        gap_start: [N] where the observation before the response starts.
        start: [N] where the response starts.
        row_start: [N] where the merged row that holds the step starts.
        offsets: [M + 1] where the merged rows start.
    """

    gap_start: IntArray
    start: IntArray
    row_start: IntArray
    offsets: IntArray


def _positions(gaps: IntArray, lengths: IntArray, first: IntArray) -> _Positions:
    ends = np.cumsum(gaps + lengths)
    start = ends - lengths
    offsets = np.append(start[first] - gaps[first], ends[-1] if len(ends) else 0)
    row = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(lengths))))
    return _Positions(start - gaps, start, offsets[row] if len(row) else start, offsets)


def _continues(table: pa.Table, prompts: Ragged, responses: Ragged, starts: IntArray) -> BoolArray:
    """[N] whether a row continues the row before it."""
    joinable = np.ones(table.num_rows, np.bool_)
    joinable[starts] = False
    sampled = responses.lengths > 0
    joinable &= sampled & np.roll(sampled, 1)
    for name in SAME_IN_A_SEQUENCE:
        if name in table.column_names:
            joinable &= _equals_previous(table.column(name))
    for name in SAME_NULLNESS:
        if name in table.column_names:
            joinable &= _equals_previous(table.column(name).is_null())
    for name in NEVER_JOINED:
        if name in table.column_names:
            null = np.asarray(table.column(name).is_null())
            joinable &= null & np.roll(null, 1)
    fits = prompts.lengths >= np.roll(prompts.lengths + responses.lengths, 1)
    for row in np.flatnonzero(joinable & fits).tolist():
        joinable[row] = _extends(prompts.row(row), prompts.row(row - 1), responses.row(row - 1))
    return joinable & fits


def _extends(prompt: np.ndarray, before: np.ndarray, response: np.ndarray) -> bool:
    split = len(before)
    middle = prompt[split : split + len(response)]
    return np.array_equal(middle, response) and np.array_equal(prompt[:split], before)


def _equals_previous(column: pa.ChunkedArray) -> BoolArray:
    """[N] whether a value equals the one before it, null like null."""
    equal = np.ones(len(column), np.bool_)
    if len(column) > 1:
        here, before = column.slice(1), column.slice(0, len(column) - 1)
        same = pc.fill_null(pc.equal(here, before), False)
        both_null = pc.and_(here.is_null(), before.is_null())
        equal[1:] = np.asarray(pc.or_(same, both_null))
    return equal


def _join_responses(
    prompts: Ragged, responses: Ragged, gaps: IntArray, position: _Positions
) -> pa.Array:
    values = np.zeros(int(position.offsets[-1]), np.int32)
    values[ranges(position.start, responses.lengths)] = responses.values
    observed = gather(prompts.values, prompts.offsets[1:] - gaps, gaps)
    values[ranges(position.gap_start, gaps)] = observed
    valid = np.ones(len(position.offsets) - 1, np.bool_)
    return Ragged(values, position.offsets, valid).to_arrow(pa.int32())


def _join(column: Ragged, position: _Positions, first: IntArray) -> Ragged:
    """A per-token column of merged rows; zero (false) at observations, null where it was null."""
    valid = column.valid[first]
    lengths = np.where(valid, np.diff(position.offsets), 0)
    values = np.zeros(int(position.offsets[-1]), column.values.dtype)
    values[ranges(position.start, column.lengths)] = column.values
    kept = values if valid.all() else gather(values, position.offsets[:-1], lengths)
    return Ragged(kept, offsets_of(lengths), valid)


def _fold_scalars(out: pa.Table, table: pa.Table, first: IntArray) -> pa.Table:
    if "reward" in table.column_names and len(first):
        reward = table.column("reward").to_numpy()
        sums = np.add.reduceat(reward, first)
        unknown = np.asarray(table.column("reward").is_null())[first]
        out = set_column(out, "reward", pa.array(sums, pa.float64(), mask=unknown))
    if "policy_version" in table.column_names and len(first):
        newest = np.iinfo(np.int32).max
        versions = np.asarray(pc.fill_null(table.column("policy_version"), newest))
        oldest = np.minimum.reduceat(versions, first)
        column = pa.array(oldest, pa.int32(), mask=oldest == newest)
        out = set_column(out, "policy_version", column)
    return out


def unmerge_table(table: pa.Table) -> pa.Table:
    """`unmerge` for an Arrow table of whole trajectories."""
    if "segments" not in table.column_names:
        return table
    table = without_views(table)
    split = split_points(table)
    steps = steps_of(table, split)
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    whole = steps.length < 0
    length = np.where(whole, responses.lengths[steps.row], steps.length)

    out = step_columns(table, steps)
    tokens = _prompt_and_response(prompts, responses)
    prompt_length = prompts.lengths[steps.row] + steps.start
    prompt = gather(tokens.values, tokens.offsets[steps.row], prompt_length)
    valid = np.ones(len(steps.row), np.bool_)
    prompt_column = Ragged(prompt, offsets_of(prompt_length), valid).to_arrow(pa.int32())
    out = set_column(out, "prompt_token_ids", prompt_column)
    for name, kind in {"response_ids": pa.int32(), **PER_TOKEN}.items():
        if name in table.column_names:
            column = Ragged.from_arrow(table.column(name))
            kept = np.where(column.valid[steps.row], length, 0)
            values = gather(column.values, column.offsets[steps.row] + steps.start, kept)
            part = Ragged(values, offsets_of(kept), column.valid[steps.row])
            out = set_column(out, name, part.to_arrow(kind))
    is_end = np.append(steps.row[1:] != steps.row[:-1], True)[: len(steps.row)]
    last = table.column("is_last_step").to_numpy()[steps.row] & is_end
    out = set_column(out, "is_last_step", pa.array(last, pa.bool_()))
    return set_column(out, "step_index", pa.array(_count_from(out), pa.int32()))


def _prompt_and_response(prompts: Ragged, responses: Ragged) -> Ragged:
    lengths = prompts.lengths + responses.lengths
    offsets = offsets_of(lengths)
    values = np.empty(int(offsets[-1]), np.int32)
    values[ranges(offsets[:-1], prompts.lengths)] = prompts.values
    values[ranges(offsets[:-1] + prompts.lengths, responses.lengths)] = responses.values
    return Ragged(values, offsets, prompts.valid)


def _count_from(table: pa.Table) -> IntArray:
    """[N] 0..n-1 over the rows of each trajectory."""
    starts = trajectory_starts(table)
    lengths = np.diff(np.append(starts, table.num_rows))
    return ranges(np.zeros(len(starts), np.int64), lengths)
