"""Build forests that forward each distinct token once, from a trie of a mini-batch's rows.

Tokens are distinguished by id and, if rows have recorded routes, by experts: a token that was
routed in two ways has two hidden states and is forwarded twice.

Rows are sorted by their tokens, so a row shares no more tokens with any earlier row than with the
previous one. The tokens that each row adds to the previous one, concatenated, are the trie in
depth-first order. The lengths of the prefixes that neighbouring rows share determine the branches
of the trie, so the tokens are not read again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rollout_io.dataset.prefix_layout import Tokens, common_prefix
from schemas.ragged import BoolArray, IntArray, Ragged, ranges
from trainer.batches.forest import Forest, forest_of, pack
from trainer.models.router_replay import Routes

TOKEN_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Trie:
    """R rows in the depth-first order of their trees.

    Attributes:
        rows: [R] row index in the batch.
        tokens: R arrays of the tokens to forward: int32 ids, or int64 with the id in the lower half
            and the integer of the token's experts (see `Routes.numbered`) in the upper half.
        lengths: [R] number of tokens, at least one.
        shared: [R] number of leading tokens shared with the previous row; 0 starts a new tree.
    """

    rows: IntArray
    tokens: list[Tokens]
    lengths: IntArray
    shared: IntArray

    @property
    def num_tokens(self) -> int:
        """Number of distinct tokens (distinct prefixes) over all trees."""
        return int((self.lengths - self.shared).sum())

    def part(self, index: IntArray) -> Trie:
        """Return the trie of the rows at the given indices (ascending, at least one)."""
        shared = np.zeros(len(index), dtype=np.int64)
        if len(index) > 1:
            upto = self.shared[: index[-1] + 1]
            # Two rows share what all rows between them share with the row before.
            shared[1:] = np.minimum.reduceat(upto, index[:-1] + 1)
        return Trie(
            rows=self.rows[index],
            tokens=[self.tokens[i] for i in index.tolist()],
            lengths=self.lengths[index],
            shared=shared,
        )


def make_trie(
    prompts: Ragged,
    responses: Ragged,
    lengths: IntArray,
    scope: IntArray,
    rows: IntArray,
    routes: Routes | None = None,
) -> Trie:
    """Sort rows into a trie by comparing full token lists, never token by token in Python.

    Args:
        prompts: Prompt tokens of all rows of the batch.
        responses: Response tokens of all rows of the batch.
        lengths: Number of leading tokens of prompt + response to forward; empty rows are left out.
        scope: Two rows may share tokens only if their values are equal.
        rows: Rows to include.
        routes: Routes of all rows of the batch, or None.

    Example:
        Prompts [7, 8, 1, 9] and [7, 8]; no response token is forwarded:

        >>> prompts = Ragged(np.array([7, 8, 1, 9, 7, 8]), np.array([0, 4, 6]), np.ones(2, bool))
        >>> responses = Ragged(np.array([5, 5]), np.array([0, 1, 2]), np.ones(2, bool))
        >>> trie = make_trie(prompts, responses, prompts.lengths, np.zeros(2), np.arange(2))
        >>> trie.rows.tolist(), trie.lengths.tolist(), trie.shared.tolist(), trie.num_tokens
        ([1, 0], [2, 4], [0, 2], 4)
    """
    rows = rows[lengths[rows] > 0]
    keys, kind = _keys(prompts, responses, lengths, rows), "int32"
    if routes is not None:
        keys, kind = _routed(keys, routes.numbered(rows, lengths[rows])), "int64"
    # Any order that puts rows with a common prefix side by side will do. That of the bytes is compared
    # in C; it is not that of the ids.
    order = np.array(sorted(range(len(rows)), key=keys.__getitem__), dtype=np.int64)
    order = order[np.argsort(scope[rows[order]], kind="stable")]
    tokens = [np.frombuffer(keys[i], dtype=kind) for i in order.tolist()]
    rows = rows[order]
    is_related = np.diff(scope[rows]) == 0
    shared = np.zeros(len(rows), dtype=np.int64)
    for i in np.flatnonzero(is_related).tolist():
        shared[i + 1] = common_prefix(tokens[i], tokens[i + 1])
    return Trie(rows=rows, tokens=tokens, lengths=lengths[rows], shared=shared)


def _keys(prompts: Ragged, responses: Ragged, lengths: IntArray, rows: IntArray) -> list[bytes]:
    """Return the ids of each row's tokens to forward as bytes (int32)."""
    prompt, response = (
        part.values.astype(np.int32, copy=False).view(np.uint8).data
        for part in (prompts, responses)
    )
    begin, num_prompt = prompts.offsets[rows], prompts.lengths[rows]
    first, num_response = responses.offsets[rows], lengths[rows] - num_prompt
    bounds = 4 * np.stack([begin, begin + num_prompt, first, first + num_response], axis=1)
    return [b"".join((prompt[a:b], response[c:d])) for a, b, c, d in bounds.tolist()]


def _routed(keys: list[bytes], numbers: list[IntArray]) -> list[bytes]:
    """Combine token ids with `Routes.numbered`, so that tokens with different experts differ."""
    return [
        (np.frombuffer(key, dtype=np.uint32) | number << TOKEN_BITS).tobytes()
        for key, number in zip(keys, numbers, strict=True)
    ]


def trie_forest(
    trie: Trie,
    prompts: Ragged,
    responses: Ragged,
    is_target: BoolArray,
    routes: Routes | None = None,
) -> Forest:
    """Build the forest of a trie: a shared token is forwarded once, but is a target in each row.

    All arguments except `trie` describe the complete batch. The trie must contain the parent of
    every target (`is_target`, [T] bool).
    """
    new = trie.lengths - trie.shared
    begin = np.cumsum(new) - new
    subtree_end, owner_above = _branches(trie, begin)

    slots = responses.lengths[trie.rows]
    slot = ranges(responses.offsets[trie.rows], slots)
    owner = np.repeat(np.arange(len(trie.rows)), slots)[is_target[slot]]
    slot = slot[is_target[slot]]
    row = trie.rows[owner]
    depth = prompts.lengths[row] + slot - responses.offsets[row] - 1
    # A target's parent may be a token that an earlier row added: go up until the row that added it.
    above = np.flatnonzero(trie.shared[owner] > depth)
    while len(above):
        owner[above] = owner_above[owner[above]]
        above = above[trie.shared[owner[above]] > depth[above]]

    added = [tokens[n:] for tokens, n in zip(trie.tokens, trie.shared.tolist(), strict=True)]
    arrays = {
        "token_ids": np.concatenate(added).astype(np.int32),
        "position_ids": ranges(trie.shared, new),
        "subtree_end": subtree_end,
        "target_parent": begin[owner] + depth - trie.shared[owner],
        "target_token": responses.values[slot],
        "target_slot": slot,
    }
    return forest_of(arrays, routes, np.repeat(trie.rows, new))


def _branches(trie: Trie, begin: IntArray) -> tuple[IntArray, IntArray]:
    """Compute each token's `subtree_end` ([N]), and the earlier row that each row extends ([R]).

    A stack holds the path from the root to the end of the current row. Each entry is a run of
    tokens on that path: the row that added them, and their depth range. The next row ends the runs,
    and parts of runs, that it does not share.
    """
    num_tokens = trie.num_tokens
    shared, lengths, begins = trie.shared.tolist(), trie.lengths.tolist(), begin.tolist()
    stack: list[tuple[int, int, int]] = []
    run_starts: list[int] = []
    run_ends: list[int] = []
    above = np.full(len(shared), -1, dtype=np.int64)
    for row, (level, at) in enumerate(zip([*shared, 0], [*begins, num_tokens], strict=True)):
        while stack and stack[-1][2] > level:
            # Tokens of this run below `level` end here; those above go on, in a run of their own.
            owner, first, _ = stack.pop()
            run_starts.append(begins[owner] + max(level, first) - first)
            run_ends.append(at)
            if first < level:
                stack.append((owner, first, level))
        if row < len(shared):
            above[row] = stack[-1][0] if stack else -1
            if lengths[row] > level:
                stack.append((row, level, lengths[row]))
    starts = np.array(run_starts, dtype=np.int64)
    order = np.argsort(starts)
    ends = np.array(run_ends, dtype=np.int64)[order]
    return np.repeat(ends, np.diff(starts[order], append=num_tokens)), above


def tree_forests(
    trie: Trie,
    prompts: Ragged,
    responses: Ragged,
    is_target: BoolArray,
    budget: int,
    routes: Routes | None = None,
) -> list[Forest]:
    """Build micro-batches of at most `budget` tokens that together contain each target once.

    A tree that exceeds the budget is split between rows such that the fewest tokens are repeated.
    """
    if not len(trie.rows):
        return []
    pieces = cut(trie, budget)
    first = np.array([piece[0] for piece in pieces], dtype=np.int64)
    sizes = trie.shared[first] + np.add.reduceat(trie.lengths - trie.shared, first)
    bins = [np.concatenate([pieces[i] for i in picked]) for picked in pack(sizes, budget)]
    return [
        trie_forest(trie.part(index), prompts, responses, is_target, routes)
        for index in sorted((np.sort(rows) for rows in bins), key=lambda rows: int(rows[0]))
    ]


def cut(trie: Trie, budget: int) -> list[IntArray]:
    """Cut every tree into runs of rows with at most `budget` distinct tokens each.

    A cut before a row repeats the tokens that the row shares with the previous one. The chosen
    cuts repeat the fewest tokens in total; ties go to the fewest cuts. A row of more than
    `budget` tokens becomes a separate run. Returns the indices of the rows in each run, in order.

    Example:
        Rows of 4, 6, 5 and 5 tokens; the last three share 3, 1 and 4 with the row before:

        >>> rows, lengths, shared = np.arange(4), np.array([4, 6, 5, 5]), np.array([0, 3, 1, 4])
        >>> trie = Trie(rows=rows, tokens=[], lengths=lengths, shared=shared)
        >>> [run.tolist() for run in cut(trie, 8)]
        [[0, 1], [2, 3]]
    """
    roots = np.flatnonzero(trie.shared == 0).tolist()
    runs = []
    for root, end in pairwise([*roots, len(trie.rows)]):
        lengths, shared = trie.lengths[root:end].tolist(), trie.shared[root:end].tolist()
        bounds = [root + bound for bound in _cheapest_cuts(lengths, shared, budget)]
        runs += [np.arange(first, last) for first, last in pairwise(bounds)]
    return runs


def _cheapest_cuts(lengths: list[int], shared: list[int], budget: int) -> list[int]:
    """Find where to cut a tree into runs of rows, by dynamic programming over the rows."""
    upto = np.cumsum(np.array(lengths) - np.array(shared)).tolist()
    if upto[-1] <= budget:
        return [0, len(lengths)]
    costs: list[tuple[int, int]] = [(0, 0)]  # repeated tokens and number of runs, up to each row
    before: list[int] = []  # first row of the last run
    candidates: deque[tuple[tuple[int, int], int]] = deque()
    for row in range(len(lengths)):
        tokens, num_runs = costs[row]
        cost = tokens + shared[row], num_runs + 1
        # Costs of candidates ascend: an earlier start that costs more can never be the best again,
        # because it makes every run longer, too.
        while candidates and candidates[-1][0] > cost:
            candidates.pop()
        candidates.append((cost, row))
        # A run that starts later is never larger, so the window only moves forward.
        while candidates[0][1] < row and _size(lengths, upto, candidates[0][1], row) > budget:
            candidates.popleft()
        first = candidates[0][1]
        costs.append(candidates[0][0])
        before.append(first)
    bounds = [len(lengths)]
    while bounds[-1]:
        bounds.append(before[bounds[-1] - 1])
    return bounds[::-1]


def _size(lengths: list[int], upto: list[int], first: int, last: int) -> int:
    return lengths[first] + upto[last] - upto[first]
