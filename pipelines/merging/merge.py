"""Merge consecutive steps into one sequence if each extends the previous one token for token.

Tokens that the next prompt adds are observations: they become part of the response, but are not
trained on. `segments` keeps every per-step value, so `unmerge` restores the steps.
`pipelines.merging.lineage` decides which step continues which, by `lineage` or `consecutive`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.frames import (
    PER_TOKEN,
    ROUTING,
    Frame,
    count_from_zero,
    over_valid_tables,
    rearranged,
    set_column,
)
from pipelines.merging.lineage import PrefixTree, Rule, Sequences, continued_rows, prefix_tree
from pipelines.merging.segments import (
    Steps,
    is_joined,
    join_routing,
    nest,
    routed_alike,
    split_routing,
    step_columns,
    steps_of,
)
from rollout_io.dataset.prefix_layout import decode_prefixes, is_encoded, trajectory_starts
from schemas.columns import JOINED
from schemas.errors import InvariantError
from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.ragged import BoolArray, IntArray, Ragged, gather, offsets_of, zipped
from schemas.types import PREFIX_TYPES, without_views

_ROW = "row that the step was merged into"


def merge(frame: Frame, rule: Rule = "lineage", *, same_routes: bool = False) -> pl.LazyFrame:
    """Merge steps that extend one another; the frame must contain complete trajectories.

    Rows are joined only if they have equal values in `lineage.SAME_IN_A_SEQUENCE`, and agree on
    which columns of `lineage.SAME_NULLNESS` are null. A row that has an empty response or already has `segments` is kept unchanged. Merged rows are split first, so
    merging twice changes nothing, and a different rule can be applied.

    A merged row has the prompt of its first step, and all responses with the observations between
    them. Observations have loss_mask false, log-probability 0.0, reward 0.0 and an empty set. `reward` is the
    sum over the steps, and policy_version the oldest version. Routes of the prompt come from the
    first step, routes of a response from the step that sampled it, and routes of an observation
    from the step that received it. All other columns have the last step's value. Rows are in the
    order of their last steps.

    Args:
        frame: A rollout table.
        rule: `lineage`, or `consecutive` (the rule of SkyRL's merge_stepwise_output).
        same_routes: Join steps only if the merged row can keep all routes that their trained tokens
            depend on (see `routing.routed_alike`).

    Example:
        Steps of one trajectory, prompts [1, 2] and [1, 2, 3, 9], responses [3] and [4]:

        >>> merge(steps).select("prompt_token_ids", "response_ids", "loss_mask").collect().rows()
        [([1, 2], [3, 9, 4], [True, False, True])]
    """
    return over_valid_tables(frame, partial(merge_table, rule=rule, same_routes=same_routes))


def merge_table(table: pa.Table, rule: Rule = "lineage", *, same_routes: bool = False) -> pa.Table:
    """Apply `merge` to an Arrow table of complete trajectories, in either layout.

    The schema's metadata is kept, such as the `rollout_metrics` of a GeneratorOutput; Polars has none.
    """
    table = without_views(table)
    _refuse_scattered(table)
    if _has_joined(table):
        table = unmerge_table(decode_prefixes(table) if is_encoded(table) else table)
    tree = prefix_tree(table)
    continued = continued_rows(table, rule, tree)
    if same_routes and ROUTING in table.column_names:
        continued = np.where(routed_alike(table, tree.prompt, continued), continued, -1)
    return _joined(table, tree, continued)


def part_by_routes(frame: Frame) -> pl.LazyFrame:
    """Split merged rows between steps that were routed differently; other joins are kept.

    Works for either merge rule: after `merge(steps)`, the result equals
    `merge(steps, same_routes=True)`. Rows without routes are kept unchanged.

    Args:
        frame: A rollout table.

    Example:
        A row of three steps; the third was routed differently where it repeats the first:

        >>> part_by_routes(merged).select("prompt_token_ids", "response_ids").collect().rows()
        [([1, 2], [3, 9, 4]), ([1, 2, 3, 9, 4, 9], [5])]
    """
    return over_valid_tables(frame, part_by_routes_table)


def part_by_routes_table(table: pa.Table) -> pa.Table:
    """Apply `part_by_routes` to an Arrow table of complete trajectories."""
    if ROUTING not in table.column_names or not _has_joined(table):
        return table
    table = decode_prefixes(table) if is_encoded(table) else table
    steps = unmerge_table(table.append_column(_ROW, to_arrow(np.arange(table.num_rows))))
    # Each step continues the one before it in the merged row it came from, wherever it stands now.
    row = to_numpy(steps.column(_ROW))
    steps, tree = steps.drop_columns([_ROW]), prefix_tree(steps)
    order = np.argsort(row, kind="stable")
    follows = np.diff(row[order]) == 0
    continued = np.full(len(row), -1)
    continued[order[1:][follows]] = order[:-1][follows]
    continued[~routed_alike(steps, tree.prompt, continued)] = -1
    return _joined(steps, tree, continued)


def _has_joined(table: pa.Table) -> bool:
    return "segments" in table.column_names and bool(is_joined(table).any())


def _joined(table: pa.Table, tree: PrefixTree, continued: IntArray) -> pa.Table:
    """Build the merged rows from steps, given the step that each step continues."""
    sequences = Sequences.of_steps(tree, continued)
    out = _folded(table, sequences)
    tokens = _stored_tokens if is_encoded(table) else _full_tokens
    prompt, response = tokens(table, tree, sequences)
    columns = {"prompt_token_ids": prompt.to_arrow(pa.int32())}
    columns["response_ids"] = response.to_arrow(pa.int32())
    # What the prompt adds to the step before it is observation: its tokens get 0 in every per-token column.
    observed = np.where(continued < 0, 0, tree.prompt - sequences.known)
    for name, kind in PER_TOKEN.items():
        if name in table.column_names:
            join = partial(_join, sequences=sequences, observed=observed)
            columns[name] = rearranged(table.column(name), kind, join)
    extra: dict[str, pa.Array] = {}
    if ROUTING in table.column_names:
        columns[ROUTING], extra = join_routing(table.column(ROUTING), sequences)
    out = _assembled(table, out, columns)
    return nest(out, table, sequences, sequences.interleaved(tree), extra)


def _refuse_scattered(table: pa.Table) -> None:
    starts = trajectory_starts(table)
    names = table.column("trajectory_id").take(to_arrow(starts))
    if len(names.unique()) == len(names):
        return
    counts = names.value_counts()
    name = next(c["values"] for c in counts.to_pylist() if c["counts"] > 1)
    finding, hint = "its rows are not adjacent", "sort by instance_id, repetition_id, step_index"
    raise InvariantError("contiguous_trajectory", f"trajectory {name!r}", finding, hint=hint)


def _assembled(table: pa.Table, out: pa.Table, merged: dict[str, pa.Array]) -> pa.Table:
    """Assemble the logical columns in the table's order; columns not in `merged` come from `out`."""
    fields = [f for f in table.schema if f.name not in PREFIX_TYPES]
    # A merged table has full prompts in either layout; they stand where the prefix columns began.
    prompts = next(n for n in table.column_names if n in ("prompt_token_ids", *PREFIX_TYPES))
    if prompts in PREFIX_TYPES:
        at = table.column_names.index(prompts)
        fields.insert(at, pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False))
    columns = [merged[f.name] if f.name in merged else out.column(f.name) for f in fields]
    typed = [
        pa.field(f.name, c.type, f.nullable, f.metadata)
        for f, c in zip(fields, columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(typed, table.schema.metadata))


def _full_tokens(table: pa.Table, tree: PrefixTree, sequences: Sequences) -> tuple[Ragged, Ragged]:
    """Build prompts and responses of the sequences from full prompts.

    The first step's prompt and the last step's prompt + response contain all tokens of a sequence.
    """
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    head, last = sequences.head, sequences.last
    observed = sequences.start[last]
    # The end of the last step's prompt is all that follows the first step's prompt but the last response.
    before = _part(prompts.values, prompts.offsets[1:][last] - observed, observed)
    sampled = _part(responses.values, responses.offsets[last], tree.response[last])
    prompt = _part(prompts.values, prompts.offsets[head], tree.prompt[head])
    return prompt, zipped(before, sampled)


def _part(values: np.ndarray, starts: IntArray, lengths: IntArray) -> Ragged:
    rows = np.ones(len(starts), np.bool_)
    return Ragged(gather(values, starts, lengths), offsets_of(lengths), rows)


def _stored_tokens(
    table: pa.Table, tree: PrefixTree, sequences: Sequences
) -> tuple[Ragged, Ragged]:
    """Build prompts and responses of the sequences from the prefix columns, each token once.

    Tokens of a step that are stored neither in the step nor in its sequence are left blank, and
    then copied from the sequence of the step's parent.
    """
    suffix = Ragged.from_arrow(table.column("prompt_suffix_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    # A step that continues none, but shares a prefix with a step of another sequence, stores only its suffix:
    # the shared part is known there, not here.
    blank = _zeros(tree.shared - sequences.known, suffix.values.dtype)
    is_head = np.zeros(len(sequences.of), np.bool_)
    is_head[sequences.head] = True
    prompt = [replace(part, valid=is_head) for part in (blank, suffix)]
    observed = [replace(part, valid=~is_head) for part in (blank, suffix)]
    joined = sequences.joined(zipped(*prompt)), sequences.joined(zipped(*observed, responses))
    _fill_blanks(*joined, tree, sequences)
    return joined


def _fill_blanks(prompt: Ragged, response: Ragged, tree: PrefixTree, sequences: Sequences) -> None:
    """Copy, in place, the tokens that steps share with their parents but not with their sequences.

    A token has the same position, counted from the prompt's start, in every step that contains it.
    """
    # Parents are earlier rows, and steps ascend: what a step copies has been filled before.
    steps = np.flatnonzero(tree.shared > sequences.known)
    num_known, shared = sequences.known[steps], tree.shared[steps]
    into, origin = sequences.of[steps], sequences.of[tree.parent[steps]]
    # The tokens may begin in the prompt of `origin` and end in its response: copy two pieces.
    cut = np.clip(prompt.lengths[origin], num_known, shared)
    begin, end = np.column_stack([num_known, cut]).ravel(), np.column_stack([cut, shared]).ravel()
    filled = np.flatnonzero(begin < end)
    begin, count = begin[filled], (end - begin)[filled]
    to = _places(prompt, response, into[filled // 2], begin)
    at = _places(prompt, response, origin[filled // 2], begin)
    # Copying small slices of memoryviews takes half the time of NumPy slices.
    values = prompt.values.data, response.values.data
    for target, to_start, source, start, num in zip(*to, *at, count.tolist(), strict=True):
        values[target][to_start : to_start + num] = values[source][start : start + num]


def _places(
    prompt: Ragged, response: Ragged, sequence: IntArray, position: IntArray
) -> tuple[list[bool], list[int]]:
    """[K] True for positions in the response of their sequence; and the flat index of each token."""
    after = position - prompt.lengths[sequence]
    in_prompt, in_response = prompt.offsets[sequence] + position, response.offsets[sequence] + after
    return (after >= 0).tolist(), np.where(after < 0, in_prompt, in_response).tolist()


def _join(column: Ragged, sequences: Sequences, observed: IntArray) -> Ragged:
    """Join a per-token column in merged rows: observations get 0 (false), and null stays null."""
    zeros = replace(_zeros(observed, column.values.dtype), valid=column.valid)
    return sequences.joined(zipped(zeros, column))


def _zeros(lengths: IntArray, dtype: np.dtype) -> Ragged:
    offsets = offsets_of(lengths)
    return Ragged(np.zeros(int(offsets[-1]), dtype), offsets, np.ones(len(lengths), np.bool_))


def _folded(table: pa.Table, sequences: Sequences) -> pa.Table:
    """Fold the other columns: the last step's values, summed rewards, the oldest policy version."""
    tokens = {"prompt_token_ids", "response_ids", ROUTING, *PER_TOKEN, *PREFIX_TYPES}
    rest = table.drop_columns([n for n in table.column_names if n in tokens])
    out = rest.take(to_arrow(sequences.last))
    if "reward" in table.column_names:
        reward = table.column("reward")
        sums = np.bincount(sequences.of, to_numpy(reward), len(sequences.head))
        unknown = to_numpy(reward.is_null())[sequences.head]
        out = set_column(out, "reward", to_arrow(sums, pa.float64(), mask=unknown))
    if "policy_version" in table.column_names and len(sequences.head):
        # The maximum replaces null, so that known versions win; all null gives null.
        newest = np.iinfo(np.int32).max
        versions = filled(table.column("policy_version"), newest)
        oldest = np.minimum.reduceat(versions[sequences.order], sequences.first)
        column = to_arrow(oldest, pa.int32(), mask=oldest == newest)
        out = set_column(out, "policy_version", column)
    return set_column(out, "step_index", to_arrow(count_from_zero(out), pa.int32()))


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
    """Apply `unmerge` to an Arrow table of complete trajectories; the schema's metadata is kept."""
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
    # A step's prompt is all of its merged row that precedes its response.
    prompt_length = prompts.lengths[steps.row] + steps.start
    prompt = gather(whole.values, whole.offsets[steps.row], prompt_length)
    valid = np.ones(len(steps.row), np.bool_)
    column = Ragged(prompt, offsets_of(prompt_length), valid).to_arrow(pa.int32())
    out = set_column(out, "prompt_token_ids", column)
    for name, kind in {"response_ids": pa.int32(), **PER_TOKEN}.items():
        if name in table.column_names:
            split = partial(_split, steps=steps, length=length)
            out = set_column(out, name, rearranged(table.column(name), kind, split))
    return out


def _split(column: Ragged, steps: Steps, length: IntArray) -> Ragged:
    """[S] Split a per-token column of merged rows into its steps."""
    is_valid = column.valid[steps.row]
    lengths = np.where(is_valid, length, 0)
    part = gather(column.values, column.offsets[steps.row] + steps.start, lengths)
    return Ragged(part, offsets_of(lengths), is_valid)


def _in_step_order(out: pa.Table, table: pa.Table, joined: BoolArray) -> pa.Table:
    """Restore the original order of each trajectory's steps, and renumber them.

    Rows are in the order of their last steps. The original order of interleaved steps is known only
    if every row of the trajectory recorded its step indices; otherwise row order is kept.
    """
    starts = trajectory_starts(out)
    num_steps = np.diff(np.append(starts, out.num_rows))
    # One value for each trajectory: `out` and `table` have the same ones, in the same order.
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


VERSIONS = "policy_versions"


def split_versions(table: pa.Table) -> pa.Table:
    """Split each row into ranges of tokens that one version of the weights sampled.

    A range becomes a row: its prompt is the row's prompt and the tokens before the range, and
    `policy_version` is its version. Rows with `segments`, and rows of one version, are kept.

    Args:
        table: Complete trajectories, one row per step, in the `full` layout.
    """
    if VERSIONS not in table.column_names:
        return table
    column = Ragged.from_arrow(table.column(VERSIONS))
    values = column.values
    row = column.row_of(np.arange(len(values)))
    begins = np.ones(len(values), np.bool_)
    begins[1:] = (np.diff(values) != 0) | (np.diff(row) != 0)
    first = np.flatnonzero(begins)
    of = row[first]
    counts = np.bincount(of, minlength=len(column.lengths))
    if "segments" in table.column_names:
        counts[to_numpy(table.column("segments").is_valid())] = 0
    is_split = counts[of] > 1
    if not is_split.any():
        return table
    length, first, of = (
        np.diff(np.append(first, len(values)))[is_split],
        first[is_split],
        of[is_split],
    )
    counts = np.bincount(of, minlength=len(column.lengths))
    fields = {
        "start": to_arrow(first - column.offsets[of], pa.int32()),
        "length": to_arrow(length, pa.int32()),
        "step_index": table.column("step_index").take(to_arrow(of)).combine_chunks(),
        JOINED: to_arrow(np.ones(len(of), np.bool_)),
        "policy_version": to_arrow(values[first], pa.int32()),
    }
    flat = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    offsets = to_arrow(offsets_of(counts), pa.int32())
    segments = pa.ListArray.from_arrays(offsets, flat, mask=to_arrow(counts == 0))
    return unmerge_table(set_column(table, "segments", segments))
