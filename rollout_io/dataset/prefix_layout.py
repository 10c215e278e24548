"""The `prefix` layout, which stores a prompt as (earlier step, number of shared tokens, rest)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.columns import PREFIX_FIELDS
from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.pictures import identities_of, pictures_of
from schemas.ragged import IntArray, Ragged, gather, offsets_of
from schemas.structure_checks import changes
from schemas.types import PREFIX_TYPES

Tokens = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Token ids, or the ids of `schemas.pictures.identity_ids`."""

_ROOT = (-1, 0)


def encode_prefixes(table: pa.Table) -> pa.Table:
    """Replace `prompt_token_ids` with the prefix columns.

    A row's parent is the earlier row of its trajectory whose prompt + response shares the longest
    prefix with the row's prompt (the latest such row if there are several). A row that shares no
    tokens with an earlier row is a root. Tokens of different pictures are different
    (`schemas.pictures.identity_ids`).

    Args:
        table: Complete trajectories, rows in order.

    Example:
        Steps with prompts [1, 2] and [1, 2, 3, 9] and responses [3] and [4]:

        >>> encode_prefixes(table).select(["parent_step_index", "prefix_length"]).to_pylist()
        [{'parent_step_index': None, 'prefix_length': 0},
         {'parent_step_index': 0, 'prefix_length': 3}]
        >>> encode_prefixes(table)["prompt_suffix_ids"].to_pylist()
        [[1, 2], [9]]
    """
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    ids = identities_of(
        prompts, Ragged.from_arrow(table.column("response_ids")), pictures_of(table)
    )
    parent, shared = find_parents(*ids, trajectory_starts(table))
    lengths = prompts.lengths - shared
    suffix = gather(prompts.values, prompts.offsets[:-1] + shared, lengths)
    columns = [
        to_arrow(parent, pa.int32(), mask=parent < 0),
        to_arrow(shared, pa.int32()),
        Ragged(suffix, offsets_of(lengths), np.ones(len(lengths), np.bool_)).to_arrow(pa.int32()),
    ]
    index = table.column_names.index("prompt_token_ids")
    table = table.remove_column(index)
    # All three go in at one index, so the last comes first.
    for field, column in zip(reversed(PREFIX_FIELDS), reversed(columns), strict=True):
        table = table.add_column(index, field, pa.chunked_array([column]))
    return table


def decode_prefixes(table: pa.Table) -> pa.Table:
    """Replace the prefix columns with `prompt_token_ids`: the inverse of `encode_prefixes`.

    The table must satisfy the invariant `prefix_reference`.
    """
    suffix = Ragged.from_arrow(table.column("prompt_suffix_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    shared = to_numpy(table.column("prefix_length")).astype(np.int64)
    starts = trajectory_starts(table)
    # A parent is numbered within its trajectory. A root refers to its trajectory's first row, but shares
    # no token with it.
    first_row = np.repeat(starts, np.diff(starts, append=table.num_rows))
    parent = filled(table.column("parent_step_index"), 0).astype(np.int64)
    prompts = _decode(suffix, responses, shared, first_row + parent)
    index = table.column_names.index(PREFIX_FIELDS[0].name)
    table = table.drop_columns([field.name for field in PREFIX_FIELDS])
    column = pa.chunked_array([prompts.to_arrow(pa.int32())])
    return table.add_column(index, pa.field("prompt_token_ids", column.type, False), column)


def is_encoded(table: pa.Table) -> bool:
    """True if the table has the prefix columns instead of full prompts."""
    return PREFIX_TYPES.keys() <= set(table.column_names)


def trajectory_starts(table: pa.Table) -> IntArray:
    """Return the index of each trajectory's first row in a valid table, [T]."""
    return np.flatnonzero(changes(table.column("trajectory_id").cast(pa.large_string())))


def find_parents(prompts: Ragged, responses: Ragged, starts: IntArray) -> tuple[IntArray, IntArray]:
    """Find the parent of each row within its trajectory, and the number of shared tokens.

    Args:
        prompts: Prompts of N rows, as ids or as `identity_ids`.
        responses: Responses of N rows, of the same dtype.
        starts: [T] index of the first row of each trajectory.

    Returns:
        parent: [N] index of the parent within the trajectory, -1 for a root.
        shared: [N] number of leading tokens that the prompt shares with the parent's prompt +
            response.
    """
    is_first = np.zeros(len(prompts.lengths), np.bool_)
    is_first[starts] = True
    width = prompts.values.itemsize
    tree = _Tree(width)
    places: list[tuple[int, int]] = []
    rows = zip(is_first.tolist(), _rows(prompts), _rows(responses), strict=True)
    for begins, prompt, response in rows:
        if begins:
            tree = _Tree(width)
        places.append(tree.add(prompt + response, len(prompt)))
    parent, shared = np.array(places, np.int64).reshape(-1, 2).T
    return parent, shared // width


def _rows(column: Ragged) -> Iterator[bytes]:
    """Yield the bytes of each row, which are faster to compare and slice than arrays."""
    bounds = pairwise((column.offsets * column.values.itemsize).tolist())
    values = np.ascontiguousarray(column.values).data.cast("B")
    return (values[begin:end].tobytes() for begin, end in bounds)


class _TokenRange:
    """A range of a step's tokens that no later step shares. Positions and lengths are in bytes.

    Attributes:
        step: Index of the step in its trajectory.
        tokens: Bytes of the tokens from the range's start to the step's end.
        exits: Branches to the ranges of other steps, in ascending order. A branch is a position
            from the step's start, with the ranges that begin there, keyed by their first tokens.
    """

    __slots__ = ("exits", "step", "tokens")

    def __init__(self, step: int, tokens: bytes, exits: list[_Exit]) -> None:
        self.step, self.tokens, self.exits = step, tokens, exits


_Exit: TypeAlias = tuple[int, dict[bytes, _TokenRange]]
_POSITION = itemgetter(0)


class _Tree:
    """The tokens of a trajectory's steps as a tree of ranges (`_TokenRange`).

    Each token belongs to the latest step that contains it. A new step descends from the root along
    its tokens and takes over the ranges that it passes. Where it leaves the tree, it finds a range
    of the latest step with that common prefix; this range keeps only the tokens after that point. A
    step visits O(log steps) ranges on average, for any shape of tree (the ranges are the preferred
    paths of a link-cut tree).
    """

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._latest: _TokenRange | None = None
        self._num_steps = 0

    def add(self, tokens: bytes, num_prompt: int) -> tuple[int, int]:
        """Add the next step.

        Args:
            tokens: Bytes of the step's prompt + response.
            num_prompt: Number of these bytes that belong to the prompt.

        Returns:
            The latest of the steps that share the longest prefix with the prompt, and the number of
            shared bytes; -1 and 0 if no token is shared.
        """
        parent, shared = _ROOT
        exits: list[_Exit] = []
        width = self._token_bytes
        run, at = self._latest, 0
        while run is not None:
            num_held = _num_held(run.tokens, tokens, at, width)
            at += num_held
            # Only the prompt refers to a parent: a response that repeats earlier tokens is stored whole.
            common = at if at < num_prompt else num_prompt
            # A range belongs to the latest step that has it, so of several parents the first one here is the latest.
            if shared < common:
                parent, shared = run.step, common
            # The new step has these tokens too, and is later: the branches that leave before `at` are its own now.
            cut = bisect_left(run.exits, at, key=_POSITION)
            exits += run.exits[:cut]
            branch: dict[bytes, _TokenRange] = {}
            if cut < len(run.exits) and run.exits[cut][0] == at:
                branch = run.exits[cut][1]
                cut += 1
            # One range goes on like the new step, and is passed next; its siblings leave the new step here.
            following = branch.pop(tokens[at : at + width], None)
            # The older step keeps what the new one does not have, as one more branch.
            if num_held < len(run.tokens):
                run.tokens, run.exits = run.tokens[num_held:], run.exits[cut:]
                branch[run.tokens[:width]] = run
            if branch:
                exits.append((at, branch))
            run = following
        self._latest = _TokenRange(self._num_steps, tokens, exits)
        self._num_steps += 1
        return parent, shared


def _num_held(run: bytes, tokens: bytes, at: int, width: int) -> int:
    """Return the length in bytes of the common prefix of a range and `tokens[at:]`."""
    if tokens.startswith(run, at):
        return len(run)
    kind = f"i{width}"
    rest = np.frombuffer(tokens, kind, offset=at)
    return common_prefix(np.frombuffer(run, kind), rest) * width


def common_prefix(a: Ids, b: Ids) -> int:
    """Return the length of the longest common prefix.

    Example:
        >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 9, 9]))
        2
    """
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _decode(suffix: Ragged, responses: Ragged, shared: IntArray, parent_row: IntArray) -> Ragged:
    lengths = shared + suffix.lengths
    offsets = offsets_of(lengths)
    out = np.empty(int(offsets[-1]), np.int32)
    for row, (begin, num_shared, parent) in enumerate(
        zip(offsets[:-1].tolist(), shared.tolist(), parent_row.tolist(), strict=True)
    ):
        source = int(offsets[parent])
        # A parent is an earlier row, so its prompt is already complete in `out`. What is shared may reach into
        # its response, which is stored.
        from_prompt = min(num_shared, int(lengths[parent]))
        out[begin : begin + from_prompt] = out[source : source + from_prompt]
        rest = num_shared - from_prompt
        out[begin + from_prompt : begin + num_shared] = responses.row(parent)[:rest]
        out[begin + num_shared : offsets[row + 1]] = suffix.row(row)
    return Ragged(out, offsets, np.ones(len(lengths), np.bool_))
