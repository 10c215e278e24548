"""Prefix-aware merging: steps that continue each other token for token become one sequence.

What the next prompt adds is an observation: it joins the response, untrained. Every per-step value
is kept in `segments`, so `unmerge` gives the steps back. Which step continues which, by the rules
`lineage` and `consecutive`: see `pipelines.lineage`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.lineage import Rule, continued_rows
from pipelines.routing import join_routing
from pipelines.segments import is_joined, nest
from pipelines.sequences import Sequences
from pipelines.tables import PER_TOKEN, ROUTING, Frame, count_from_zero, over_tables, set_column
from pipelines.tree import PrefixTree, prefix_tree
from pipelines.unmerging import unmerge_table
from rollout_io.prefix import decode_prefixes, is_encoded, trajectory_starts
from schemas.errors import RolloutError
from schemas.ragged import IntArray, Ragged, gather, offsets_of, ranges
from schemas.types import PREFIX_TYPES, without_views


def merge(frame: Frame, rule: Rule = "lineage") -> pl.LazyFrame:
    """Merge steps that continue each other; whole trajectories in, whole trajectories out.

    Rows are joined only if they agree on token_source, temperature, top_p, top_k and error, and on
    whether rollout_logprobs, reward, rewards and rollout_expert_indices are known. A row with an
    empty response, or with `segments` of its own, stays as it is. Rows that were merged before are
    taken apart first: merging twice changes nothing, and the rule can be changed.

    A merged row has the prompt of its first step; responses with the observations between them;
    loss_mask false, log-probability 0.0 and reward 0.0 at observations; the sum of the rewards; the
    oldest policy_version; routes of its prompt from the first step, of each response from the step
    that sampled it, of an observation from the step that was given it; and of every other column
    the last step's value. Rows are in the order of their last steps.

    Args:
        frame: A rollout table.
        rule: `lineage`, or `consecutive` (that of SkyRL's merge_stepwise_output).

    Example:
        Steps of one trajectory, prompts [1, 2] and [1, 2, 3, 9], responses [3] and [4]:

        >>> merge(steps).select("prompt_token_ids", "response_ids", "loss_mask").collect().rows()
        [([1, 2], [3, 9, 4], [True, False, True])]
    """
    return over_tables(frame, partial(merge_table, rule=rule))


def merge_table(table: pa.Table, rule: Rule = "lineage") -> pa.Table:
    """`merge` for an Arrow table of whole trajectories, with full prompts or prefix columns."""
    table = without_views(table)
    _refuse_scattered(table)
    if "segments" in table.column_names and is_joined(table).any():
        table = unmerge_table(decode_prefixes(table) if is_encoded(table) else table)
    tree = prefix_tree(table)
    sequences = Sequences.of_steps(tree, continued_rows(table, rule, tree))

    out = _folded(table, sequences)
    tokens = _stored_tokens if is_encoded(table) else _full_tokens
    prompt, response = tokens(table, tree, sequences)
    made = {"prompt_token_ids": prompt.to_arrow(pa.int32())}
    made["response_ids"] = response.to_arrow(pa.int32())
    for name, kind in PER_TOKEN.items():
        if name in table.column_names:
            column = Ragged.from_arrow(table.column(name))
            made[name] = _join(column, sequences).to_arrow(kind)
    extra: dict[str, pa.Array] = {}
    if ROUTING in table.column_names:
        made[ROUTING], extra = join_routing(table.column(ROUTING), sequences)
    out = _assembled(table, out, made)
    return nest(out, table, sequences, sequences.interleaved(tree), extra)


def _refuse_scattered(table: pa.Table) -> None:
    starts = trajectory_starts(table)
    names = table.column("trajectory_id").take(pa.array(starts))
    if len(names.unique()) == len(names):
        return
    counts = names.value_counts()
    name = next(c["values"] for c in counts.to_pylist() if c["counts"] > 1)
    got, hint = "its rows in several places", "sort by instance_id, repetition_id, step_index"
    where, expected = f"trajectory {name!r}", "side by side"
    raise RolloutError("contiguous_trajectory", where, got, expected, hint)


def _assembled(table: pa.Table, out: pa.Table, made: dict[str, pa.Array]) -> pa.Table:
    """The logical columns in the table's order: those that were made, the others of `out`."""
    fields = [f for f in table.schema if f.name not in PREFIX_TYPES]
    prompts = next(n for n in table.column_names if n in ("prompt_token_ids", *PREFIX_TYPES))
    if prompts in PREFIX_TYPES:
        at = table.column_names.index(prompts)
        fields.insert(at, pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False))
    columns = [made[f.name] if f.name in made else out.column(f.name) for f in fields]
    typed = [
        pa.field(f.name, c.type, f.nullable, f.metadata)
        for f, c in zip(fields, columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(typed, table.schema.metadata))


def _full_tokens(table: pa.Table, tree: PrefixTree, sequences: Sequences) -> tuple[Ragged, Ragged]:
    """Prompts and responses of the sequences: all of it stands in their first and last steps."""
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    head, last = sequences.head, sequences.last
    prompt = _part(prompts.values, prompts.offsets[head], tree.prompt[head])
    observed = sequences.start[last]
    values = np.empty(int(sequences.offsets[-1]), np.int32)
    before = gather(prompts.values, prompts.offsets[1:][last] - observed, observed)
    values[ranges(sequences.offsets[:-1], observed)] = before
    sampled = gather(responses.values, responses.offsets[last], tree.response[last])
    values[ranges(sequences.offsets[:-1] + observed, tree.response[last])] = sampled
    return prompt, Ragged(values, sequences.offsets, np.ones(len(head), np.bool_))


def _stored_tokens(
    table: pa.Table, tree: PrefixTree, sequences: Sequences
) -> tuple[Ragged, Ragged]:
    """Prompts and responses of the sequences from the prefix columns: each token is written once.

    A token has the same position in every step that holds it, counted from the prompt's start. So
    the tokens of a step that neither it nor its sequence brings along are copied, position by
    position, from the sequence of its parent.
    """
    length = tree.prompt[sequences.last] + tree.response[sequences.last]
    offsets = offsets_of(length)
    base = offsets[sequences.of]
    values = np.empty(int(offsets[-1]), np.int32)
    suffix = Ragged.from_arrow(table.column("prompt_suffix_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    values[ranges(base + tree.shared, suffix.lengths)] = suffix.values
    values[ranges(base + tree.prompt, responses.lengths)] = responses.values
    missing = np.flatnonzero(tree.shared > sequences.known)
    known, end = sequences.known[missing].tolist(), tree.shared[missing].tolist()
    into, source = base[missing].tolist(), base[tree.parent[missing]].tolist()
    for a, b, to, origin in zip(known, end, into, source, strict=True):
        values[to + a : to + b] = values[origin + a : origin + b]
    split = tree.prompt[sequences.head]
    return (
        _part(values, offsets[:-1], split),
        _part(values, offsets[:-1] + split, length - split),
    )


def _part(values: np.ndarray, starts: IntArray, lengths: IntArray) -> Ragged:
    rows = np.ones(len(starts), np.bool_)
    return Ragged(gather(values, starts, lengths), offsets_of(lengths), rows)


def _join(column: Ragged, sequences: Sequences) -> Ragged:
    """A per-token column of merged rows; zero (false) at observations, null where it was null."""
    valid = column.valid[sequences.head]
    lengths = np.where(valid, np.diff(sequences.offsets), 0)
    values = np.zeros(int(sequences.offsets[-1]), column.values.dtype)
    start = sequences.offsets[sequences.of] + sequences.start
    values[ranges(start, column.lengths)] = column.values
    kept = values if valid.all() else gather(values, sequences.offsets[:-1], lengths)
    return Ragged(kept, offsets_of(lengths), valid)


def _folded(table: pa.Table, sequences: Sequences) -> pa.Table:
    """The columns that are not lists of tokens: the last step's, rewards summed."""
    tokens = {"prompt_token_ids", "response_ids", ROUTING, *PER_TOKEN, *PREFIX_TYPES}
    rest = table.drop_columns([n for n in table.column_names if n in tokens])
    out = rest.take(pa.array(sequences.last))
    if "reward" in table.column_names:
        reward = table.column("reward")
        sums = np.bincount(sequences.of, reward.to_numpy(), len(sequences.head))
        unknown = np.asarray(reward.is_null())[sequences.head]
        out = set_column(out, "reward", pa.array(sums, pa.float64(), mask=unknown))
    if "policy_version" in table.column_names and len(sequences.head):
        newest = np.iinfo(np.int32).max
        versions = np.asarray(pc.fill_null(table.column("policy_version"), newest))
        oldest = np.minimum.reduceat(versions[sequences.order], sequences.first)
        column = pa.array(oldest, pa.int32(), mask=oldest == newest)
        out = set_column(out, "policy_version", column)
    return set_column(out, "step_index", pa.array(count_from_zero(out), pa.int32()))
