"""The prefix tree of a trajectory as columns: each prompt as (earlier step, shared tokens, rest)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import PREFIX_FIELDS
from schemas.ragged import IntArray, Ragged, gather, offsets_of
from schemas.structure_checks import changes
from schemas.types import PREFIX_TYPES

Tokens = npt.NDArray[np.int32]

_TOKEN_BYTES = 4
_ROOT = (-1, 0)


def encode_prefixes(table: pa.Table) -> pa.Table:
    """Replace `prompt_token_ids` by the prefix columns.

    A row's parent is the earlier row of its trajectory whose prompt + response shares the longest
    prefix with this prompt; of several, the latest. A row that shares no token is a root.

    Args:
        table: Whole trajectories, rows in order.

    Example:
        Steps with prompts [1, 2] and [1, 2, 3, 9] and responses [3] and [4]:

        >>> encode_prefixes(table).select(["parent_step_index", "prefix_length"]).to_pylist()
        [{'parent_step_index': None, 'prefix_length': 0},
         {'parent_step_index': 0, 'prefix_length': 3}]
        >>> encode_prefixes(table)["prompt_suffix_ids"].to_pylist()
        [[1, 2], [9]]
    """
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    parent, shared = find_parents(prompts, responses, trajectory_starts(table))
    lengths = prompts.lengths - shared
    suffix = gather(prompts.values, prompts.offsets[:-1] + shared, lengths)
    columns = [
        pa.array(parent, pa.int32(), mask=parent < 0),
        pa.array(shared, pa.int32()),
        Ragged(suffix, offsets_of(lengths), np.ones(len(lengths), np.bool_)).to_arrow(pa.int32()),
    ]
    index = table.column_names.index("prompt_token_ids")
    table = table.remove_column(index)
    for field, column in zip(reversed(PREFIX_FIELDS), reversed(columns), strict=True):
        table = table.add_column(index, field, pa.chunked_array([column]))
    return table


def decode_prefixes(table: pa.Table) -> pa.Table:
    """Replace the prefix columns by `prompt_token_ids`: the inverse of `encode_prefixes`.

    The table must have passed `prefix_reference`.
    """
    suffix = Ragged.from_arrow(table.column("prompt_suffix_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    shared = table.column("prefix_length").to_numpy().astype(np.int64)
    prompts = _decode(suffix, responses, shared, _parent_rows(table))
    index = table.column_names.index(PREFIX_FIELDS[0].name)
    table = table.drop_columns([field.name for field in PREFIX_FIELDS])
    column = pa.chunked_array([prompts.to_arrow(pa.int32())])
    return table.add_column(index, pa.field("prompt_token_ids", column.type, False), column)


def is_encoded(table: pa.Table) -> bool:
    """Whether the table holds the prefix columns instead of full prompts."""
    return PREFIX_TYPES.keys() <= set(table.column_names)


def trajectory_starts(table: pa.Table) -> IntArray:
    """[T] first row of each trajectory of a valid table."""
    return np.flatnonzero(changes(table.column("trajectory_id").cast(pa.large_string())))


def find_parents(prompts: Ragged, responses: Ragged, starts: IntArray) -> tuple[IntArray, IntArray]:
    """The parent of each row within its trajectory, and how many tokens they share.

    Args:
        prompts: N rows.
        responses: N rows.
        starts: [T] first row of each trajectory.

    Returns:
        parent: [N] index of the parent within the trajectory, -1 for a root.
        shared: [N] tokens of the parent's prompt + response that this prompt repeats.
    """
    is_first = np.zeros(len(prompts.lengths), np.bool_)
    is_first[starts] = True
    steps: list[bytes] = []
    last, longest = b"", 0
    parents: list[int] = []
    shared: list[int] = []
    rows = zip(is_first.tolist(), _rows(prompts), _rows(responses), strict=True)
    for begins, prompt, response in rows:
        if begins:
            steps, longest, found = [], 0, _ROOT
        elif 0 < longest == len(last) and prompt.startswith(last):
            found = len(steps) - 1, longest
        else:
            found = _longest(steps, prompt, longest)
        parents.append(found[0])
        shared.append(found[1])
        last = prompt + response
        steps.append(last)
        longest = max(longest, len(last))
    return np.array(parents, np.int64), np.array(shared, np.int64) // _TOKEN_BYTES


def _rows(column: Ragged) -> Iterator[bytes]:
    """The bytes of each row."""
    bounds = pairwise((column.offsets * _TOKEN_BYTES).tolist())
    values = np.ascontiguousarray(column.values).data.cast("B")
    return (values[begin:end].tobytes() for begin, end in bounds)


def _longest(steps: list[bytes], prompt: bytes, longest: int) -> tuple[int, int]:
    """The earlier step that shares most with a prompt, and how many bytes.

    Args:
        steps: Bytes of each one's tokens, prompt + response.
        prompt: Bytes of its tokens.
        longest: Size of the longest step, beyond which nothing can be shared.
    """
    best, parent = 0, -1
    for candidate in range(len(steps) - 1, -1, -1):
        if best in (len(prompt), longest):
            break
        step = steps[candidate]
        if len(step) <= best or not prompt.startswith(step[best : best + _TOKEN_BYTES], best):
            continue
        shared = len(step)
        if not prompt.startswith(step):
            common = common_prefix(np.frombuffer(step, np.int32), np.frombuffer(prompt, np.int32))
            shared = common * _TOKEN_BYTES
        if shared > best:
            best, parent = shared, candidate
    return parent, best


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix.

    Example:
        >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 9, 9]))
        2
    """
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _parent_rows(table: pa.Table) -> IntArray:
    starts = trajectory_starts(table)
    own_start = np.repeat(starts, np.diff(np.append(starts, table.num_rows)))
    parent = np.asarray(pc.fill_null(table.column("parent_step_index"), 0), np.int64)
    return own_start + parent


def _decode(suffix: Ragged, responses: Ragged, shared: IntArray, parent_row: IntArray) -> Ragged:
    lengths = shared + suffix.lengths
    offsets = offsets_of(lengths)
    out = np.empty(int(offsets[-1]), np.int32)
    for row, (begin, kept, parent) in enumerate(
        zip(offsets[:-1].tolist(), shared.tolist(), parent_row.tolist(), strict=True)
    ):
        source = int(offsets[parent])
        from_prompt = min(kept, int(lengths[parent]))
        out[begin : begin + from_prompt] = out[source : source + from_prompt]
        rest = kept - from_prompt
        out[begin + from_prompt : begin + kept] = responses.row(parent)[:rest]
        out[begin + kept : offsets[row + 1]] = suffix.row(row)
    return Ragged(out, offsets, np.ones(len(lengths), np.bool_))
