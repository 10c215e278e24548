"""Which step continues which: the chains of steps that a merge joins into one sequence.

A step may continue an earlier one of its trajectory when that one's prompt + response is how its
own prompt begins, token for token, and the two agree in what one row can say only once (see
`join_keys`). A step is continued by one step at most, the earliest that may.

    consecutive   a step continues the step right before it, or none: the rule of SkyRL's
                  merge_stepwise_output
    lineage       a step continues the longest earlier one that is still open: the main agent goes
                  on after a sub-agent's calls, and a context that was put aside is resumed

A trajectory with a row that stays alone (it sampled nothing, or tells sampled ranges of its own in
`segments`) is joined by `consecutive` under either rule: such a row could not say which step it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.tree import PrefixTree, prefix_tree
from rollout_io.prefix import decode_prefixes, is_encoded
from schemas.ragged import IntArray, Ragged

Rule: TypeAlias = Literal["lineage", "consecutive"]

SAME_IN_A_SEQUENCE = ("token_source", "temperature", "top_p", "top_k", "error")
SAME_NULLNESS = ("rollout_logprobs", "reward", "rewards", "rollout_expert_indices")


def continued_rows(
    table: pa.Table, rule: Rule = "lineage", tree: PrefixTree | None = None
) -> IntArray:
    """[N] the row that each row continues, -1 where it begins a sequence.

    Args:
        table: Whole trajectories, as for `prefix_tree`.
        rule: `lineage` or `consecutive`.
        tree: The table's tree, where it is known.

    Example:
        Prompts [1], [7] and [1, 2, 3], responses [2], [8] and [4]: the third step goes on after a
        sub-agent's call.

        >>> continued_rows(table, "lineage").tolist()
        [-1, -1, 0]
        >>> continued_rows(table, "consecutive").tolist()
        [-1, -1, -1]
    """
    tree = tree or prefix_tree(table)
    keys = join_keys(table, tree)
    length = tree.prompt + tree.response
    whole = (tree.parent >= 0) & (tree.shared == length[tree.parent])
    joins = whole & (keys >= 0) & (keys == keys[tree.parent])
    parent = np.where(joins, tree.parent, -1)
    reach = len(parent) if rule == "lineage" else 1
    steps_back = np.where(np.isin(tree.start, tree.start[keys < 0]), 1, reach)
    for start, end in _undecided(tree, parent, steps_back):
        candidates = _candidates(table, tree, start, end)
        key = keys[start:end].tolist()
        parent[start:end] = _greedy(start, key, candidates, int(steps_back[start]))
    return parent


def join_keys(table: pa.Table, tree: PrefixTree) -> IntArray:
    """[N] rows with equal keys may share a row; -1 for a row that stays alone.

    One row can say only once how its tokens were made (token_source, temperature, top_p, top_k,
    error), and a column is null for all of a row or for none of it. A row that sampled nothing, and
    one that already tells its sampled ranges in `segments`, stays alone.
    """
    keys = np.zeros(table.num_rows, np.int64)
    for name in (*SAME_IN_A_SEQUENCE, *SAME_NULLNESS):
        if name in table.column_names:
            column = table.column(name)
            values = column.is_null() if name in SAME_NULLNESS else column
            keys = _paired(keys, values)
    alone = tree.response == 0
    if "segments" in table.column_names:
        alone |= np.asarray(table.column("segments").is_valid())
    return np.where(alone, -1, keys)


def _paired(keys: IntArray, values: pa.ChunkedArray) -> IntArray:
    """Keys that tell apart what `keys` or `values` tell apart."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    codes = pc.dictionary_encode(values, null_encoding="encode").combine_chunks().indices
    combined = keys * (len(keys) + 1) + np.asarray(codes, np.int64)
    if len(keys) == 0 or (combined == combined[0]).all():
        return np.zeros_like(keys)
    return np.unique(combined, return_inverse=True)[1].astype(np.int64)


def _undecided(
    tree: PrefixTree, parent: IntArray, steps_back: IntArray
) -> Iterator[tuple[int, int]]:
    """Trajectories where the longest shared prefix alone does not tell who continues whom."""
    num_rows = len(parent)
    is_root = (tree.parent < 0) & (tree.prompt > 0)
    in_reach = parent >= np.arange(num_rows) - steps_back
    sure = is_root | ((parent >= 0) & in_reach & (tree.prompt > tree.shared))
    _, first, count = np.unique(parent, return_index=True, return_counts=True)
    sure[first[(count > 1) & (parent[first] >= 0)]] = False
    trajectory = np.searchsorted(tree.starts, np.flatnonzero(~sure), side="right") - 1
    bounds = np.append(tree.starts, num_rows).tolist()
    return ((bounds[t], bounds[t + 1]) for t in np.unique(trajectory).tolist())


Candidates: TypeAlias = Callable[[int], Iterator[int]]


def _greedy(start: int, keys: list[int], candidates: Candidates, steps_back: int) -> list[int]:
    """What each row of a trajectory continues, in its turn; at most `steps_back` rows before it."""
    is_open = [True] * len(keys)
    parents = []
    for index, key in enumerate(keys):
        parent = -1
        for at in candidates(start + index) if key >= 0 else ():
            earlier = at - start
            if is_open[earlier] and keys[earlier] == key and index - earlier <= steps_back:
                parent, is_open[earlier] = at, False
                break
        parents.append(parent)
    return parents


def _candidates(table: pa.Table, tree: PrefixTree, start: int, end: int) -> Candidates:
    """For a row, the earlier ones whose whole tokens its prompt begins with, longest first.

    They are among its ancestors in the tree, unless a response took the same tokens as another
    row's: that can only be where a prompt adds nothing to its parent's tokens.
    """
    rows = slice(start, end)
    adds = tree.prompt[rows] > tree.shared[rows]
    if not (adds | (tree.prompt[rows] == 0)).all():
        return _by_tokens(table, start, end)
    parent, shared = tree.parent[rows].tolist(), tree.shared[rows].tolist()
    length = (tree.prompt[rows] + tree.response[rows]).tolist()

    def ancestors(row: int) -> Iterator[int]:
        at, known = row, tree.prompt[row]
        while (at_parent := parent[at - start]) >= 0:
            known = min(known, shared[at - start])
            at = at_parent
            if length[at - start] <= known:
                yield at

    return ancestors


def _by_tokens(table: pa.Table, start: int, end: int) -> Candidates:
    part = table.slice(start, end - start)
    part = decode_prefixes(part) if is_encoded(part) else part
    prompts = Ragged.from_arrow(part.column("prompt_token_ids"))
    responses = Ragged.from_arrow(part.column("response_ids"))
    prompt = [prompts.row(i).tobytes() for i in range(end - start)]
    tokens = [p + responses.row(i).tobytes() for i, p in enumerate(prompt)]

    def search(row: int) -> Iterator[int]:
        own = prompt[row - start]
        found = [i for i in range(row - start) if tokens[i] and own.startswith(tokens[i])]
        found.sort(key=lambda i: (len(tokens[i]), i), reverse=True)
        return (start + i for i in found)

    return search
