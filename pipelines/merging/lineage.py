"""Find which earlier step each step continues, by a prefix tree, and group the chains into sequences.

The prefix tree has the earlier step with which each prompt shares its longest prefix.

A step may continue an earlier step of its trajectory if its prompt starts with that step's prompt +
response, token for token and picture for picture, and both agree in the columns that must not vary
within a row (see `_join_keys`). At most one step continues a given step: the earliest candidate.

    consecutive   a step may continue only the step right before it, as in SkyRL's
                  merge_stepwise_output
    lineage       a step continues the longest earlier step that has no continuation yet, so the
                  main agent can continue after a sub-agent's calls, and an interrupted context can
                  be resumed

If a trajectory has a row that cannot be joined (its response is empty, or its `segments` already
list sampled ranges), both rules act like `consecutive`: such a row cannot record its original step
index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.frames import PER_TOKEN
from rollout_io.dataset.prefix_layout import (
    decode_prefixes,
    find_parents,
    is_encoded,
    trajectory_starts,
)
from schemas.columns import COLUMN_BY_NAME
from schemas.numpy_arrays import filled, to_numpy
from schemas.pictures import identities
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths

Rule: TypeAlias = Literal["lineage", "consecutive"]
SAME_IN_A_SEQUENCE = ("token_source", "temperature", "top_p", "top_k", "sampling_extra", "error")
SAME_NULLNESS = (
    *("reward", "rollout_expert_indices"),
    *(name for name in PER_TOKEN if COLUMN_BY_NAME[name].nullable),
)


def continued_rows(
    table: pa.Table, rule: Rule = "lineage", tree: PrefixTree | None = None
) -> IntArray:
    """[N] Find the row that each row continues; -1 where a sequence starts.

    Args:
        table: Complete trajectories, as for `prefix_tree`.
        rule: `lineage` or `consecutive`.
        tree: Prefix tree of the table; None to compute it.

    Example:
        Prompts [1], [7] and [1, 2, 3], responses [2], [8] and [4]: the third step continues the
        first, after a sub-agent's call.

        >>> continued_rows(table, "lineage").tolist()
        [-1, -1, 0]
        >>> continued_rows(table, "consecutive").tolist()
        [-1, -1, -1]
    """
    tree = tree or prefix_tree(table)
    keys = _join_keys(table, tree)
    # The longest shared prefixes decide most trajectories, in one pass and without reading tokens;
    # only the undecided trajectories are processed in Python.
    length = tree.prompt + tree.response
    whole = (tree.parent >= 0) & (tree.shared == length[tree.parent])
    joins = whole & (keys >= 0) & (keys == keys[tree.parent])
    parent = np.where(joins, tree.parent, -1)
    reach = len(parent) if rule == "lineage" else 1
    steps_back = np.full(len(parent), reach)
    steps_back[tree.start[keys < 0]] = 1
    steps_back = steps_back[tree.start]
    undecided = list(_undecided(tree, parent, steps_back))
    whole = Ancestry(tree).whole if undecided else parent
    for start, end in undecided:
        key, reach = keys[start:end].tolist(), int(steps_back[start])
        adds = (tree.prompt > tree.shared)[start:end] | (length[start:end] == 0)
        if adds.all():
            above = np.where(whole[start:end] < 0, -1, whole[start:end] - start)
            found = _by_ancestors(above.tolist(), key, reach)
        else:
            found = _by_tokens(table.slice(start, end - start), key, reach)
        parent[start:end] = [at if at < 0 else start + at for at in found]
    return parent


def _join_keys(table: pa.Table, tree: PrefixTree) -> IntArray:
    """[N] Compute keys: only rows with equal keys may share a sequence; rows with -1 never do.

    A merged row has a single value in each column of `SAME_IN_A_SEQUENCE`, and a column of
    `SAME_NULLNESS` is null for all of its steps or for none. A row with an empty response, or whose
    `segments` already list its sampled ranges, is never joined.
    """
    keys = np.zeros(table.num_rows, np.int64)
    for name in (*SAME_IN_A_SEQUENCE, *SAME_NULLNESS):
        if name in table.column_names:
            column = table.column(name)
            values = column.is_null() if name in SAME_NULLNESS else column
            keys = _paired(keys, values)
    alone = tree.response == 0
    if "segments" in table.column_names:
        alone |= to_numpy(table.column("segments").is_valid())
    return np.where(alone, -1, keys)


def _paired(keys: IntArray, values: pa.ChunkedArray) -> IntArray:
    """[N] Combine keys with a column: results are equal only if both key and value are equal."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    # Combine the chunks first: old PyArrow cannot combine a dictionary array without chunks.
    codes = pc.dictionary_encode(values.combine_chunks(), null_encoding="encode").indices
    combined = keys * (len(keys) + 1) + to_numpy(codes)
    if len(keys) == 0 or (combined == combined[0]).all():
        return np.zeros_like(keys)
    # Renumber: products of many columns' codes would overflow int64.
    return np.unique(combined, return_inverse=True)[1].astype(np.int64)


def _undecided(
    tree: PrefixTree, parent: IntArray, steps_back: IntArray
) -> Iterator[tuple[int, int]]:
    """Yield the row range of each trajectory for which `parent` may be wrong.

    In all other trajectories, `parent` is the row that each row continues.
    """
    num_rows = len(parent)
    in_reach = parent >= np.arange(num_rows) - steps_back
    sure = (tree.parent < 0) | ((parent >= 0) & in_reach & (tree.prompt > tree.shared))
    _, first, count = np.unique(parent, return_index=True, return_counts=True)
    # If two rows claim the same parent, the rest of the trajectory decides which continues it.
    sure[first[(count > 1) & (parent[first] >= 0)]] = False
    trajectory = np.searchsorted(tree.starts, np.flatnonzero(~sure), side="right") - 1
    bounds = np.append(tree.starts, num_rows).tolist()
    once = trajectory[np.diff(trajectory, prepend=-1) > 0]
    return ((bounds[t], bounds[t + 1]) for t in once.tolist())


def _by_ancestors(above: list[int], keys: list[int], steps_back: int) -> list[int]:
    """Find the step that each step of a trajectory continues, searching its ancestors in the tree.

    Candidates are ancestors in the prefix tree unless two steps have the same tokens, which can
    happen only if a prompt adds nothing to its parent's tokens (see `_by_tokens`).
    """
    nearest = _nearest_of_its_key(above, keys)
    num_open = [1] * len(keys)
    found = []
    for index, key in enumerate(keys):
        at = _first_open(nearest[index], nearest, num_open) if key >= 0 else -1
        if index - at > steps_back:
            at = -1
        if at >= 0:
            num_open[at] = 0
        found.append(at)
    return found


def _first_open(at: int, above: list[int], num_open: list[int]) -> int:
    """Find the first open step (not continued yet) from `at` upwards, compressing the path."""
    passed = []
    while at >= 0 and not num_open[at]:
        passed.append(at)
        at = above[at]
    for place in passed:
        above[place] = at
    return at


def _nearest_of_its_key(above: list[int], keys: list[int]) -> list[int]:
    """For each step, find the nearest ancestor with the same key; -1: none."""
    below: list[list[int]] = [[] for _ in keys]
    for step, at in enumerate(above):
        if at >= 0:
            below[at].append(step)
    nearest = [-1] * len(keys)
    on_the_way: dict[int, int] = {}
    todo = [step for step, at in enumerate(above) if at < 0]
    while todo:
        step = todo.pop()
        if step < 0:  # all steps below ~step are done: restore the earlier state
            on_the_way[keys[~step]] = nearest[~step]
            continue
        nearest[step] = on_the_way.get(keys[step], -1)
        on_the_way[keys[step]] = step
        todo += [~step, *below[step]]
    return nearest


def _by_tokens(part: pa.Table, keys: list[int], steps_back: int) -> list[int]:
    """Compare tokens to find the step that each step of a trajectory continues.

    See `_by_ancestors` for the result.
    """
    part = decode_prefixes(part) if is_encoded(part) else part
    prompts, responses = identities(part)
    prompt = [prompts.row(i).tobytes() for i in range(len(keys))]
    whole = [tokens + responses.row(i).tobytes() for i, tokens in enumerate(prompt)]
    end, first, above = _ends(prompt, whole)
    steps: list[dict[int, list[int]]] = [{} for _ in above]
    num_open = np.bincount(end, np.array(keys) >= 0).astype(int).tolist()  # includes later steps
    found = []
    for index, key in enumerate(keys):
        parent = -1
        at = _first_open(first[index], above, num_open) if key >= 0 else -1
        while at >= 0 and parent < 0:
            fitting = steps[at].get(key)
            if fitting and index - fitting[-1] <= steps_back:
                parent = fitting.pop()
                num_open[at] -= 1
            at = _first_open(above[at], above, num_open)
        steps[end[index]].setdefault(key, []).append(index)
        found.append(parent)
    return found


def _ends(prompts: list[bytes], whole: list[bytes]) -> tuple[list[int], list[int], list[int]]:
    """Locate steps in the trie of their tokens."""
    number: dict[bytes, int] = {}
    ends = [number.setdefault(tokens, len(number)) for tokens in whole]
    above, last = [-1] * len(number), {}
    path: list[tuple[bytes, int]] = []
    # Sorted order visits a prefix before its extensions, so `path` is always the current branch.
    for tokens in sorted({*prompts, *whole}):
        while path and not tokens.startswith(path[-1][0]):
            path.pop()
        before = path[-1][1] if path else -1
        end = number.get(tokens, -1)
        if end >= 0:
            above[end] = before
            path.append((tokens, end))
        last[tokens] = before if end < 0 else end
    return ends, [last[tokens] for tokens in prompts], above


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Parents and lengths (in tokens) of N rows.

    Attributes:
        starts: [T] first row of each trajectory.
        start: [N] first row of the trajectory that each row belongs to.
        parent: [N] the row, earlier in the trajectory, whose prompt + response shares the longest
            prefix with this row's prompt (ties: the latest); -1 for a root.
        shared: [N] number of tokens shared with the parent.
        prompt: [N] number of prompt tokens.
        response: [N] number of response tokens.
    """

    starts: IntArray
    start: IntArray
    parent: IntArray
    shared: IntArray
    prompt: IntArray
    response: IntArray


def prefix_tree(table: pa.Table) -> PrefixTree:
    """Build the prefix tree of complete trajectories; in the `prefix` layout, no tokens are read.

    Args:
        table: Columns `trajectory_id`, `response_ids`, and `prompt_token_ids` or the columns of the
            `prefix` layout; `pictures` if there is one.

    Example:
        Prompts [1, 2], [1, 2, 3, 9] and [1, 7], responses [3], [4] and [5]:

        >>> tree = prefix_tree(table)
        >>> tree.parent.tolist(), tree.shared.tolist()
        ([-1, 0, 1], [0, 3, 1])
    """
    starts = trajectory_starts(table)
    start = np.repeat(starts, np.diff(np.append(starts, table.num_rows)))
    response = list_lengths(table.column("response_ids"))
    if is_encoded(table):
        parent = filled(table.column("parent_step_index"), -1).astype(np.int64)
        shared = to_numpy(table.column("prefix_length")).astype(np.int64)
        prompt = shared + list_lengths(table.column("prompt_suffix_ids"))
    else:
        parent, shared = find_parents(*identities(table), starts)
        prompt = list_lengths(table.column("prompt_token_ids"))
    parent = np.where(parent < 0, -1, start + parent)
    return PrefixTree(starts, start, parent, shared, prompt, response)


class Ancestry:
    """Ancestors of a tree's rows, looked up for many rows at once in O(log rows) steps.

    Attributes:
        holder: [N] the ancestor that adds the last token shared by the row and its parent: the
            nearest ancestor whose `shared` is smaller than the row's. A root is its own holder.
        whole: [N] the longest ancestor whose entire prompt + response is a prefix of the row's
            prompt; -1 if none. Follow `whole` from there to find shorter ones.
    """

    def __init__(self, tree: PrefixTree) -> None:
        rows = np.arange(len(tree.parent))
        self._length = tree.prompt + tree.response
        # Binary lifting: level i jumps 2**i ancestors; `fewest` is the minimum of `shared` over them.
        up, fewest = np.where(tree.parent < 0, rows, tree.parent), tree.shared
        self._levels: list[tuple[IntArray, IntArray]] = []
        while not self._levels or (self._levels[-1][0] != up).any():
            self._levels.append((up, fewest))
            up, fewest = up[up], np.minimum(fewest, fewest[up])
        parent = self._levels[0][0]
        self.holder = self._adding(parent, np.maximum(tree.shared - 1, 0))
        above = self._adding(parent, tree.shared)
        is_whole = (self._length[above] <= tree.shared) | (tree.parent < 0)
        nearest_whole = followed(np.where(is_whole, rows, above))
        self.whole = np.where(tree.parent < 0, -1, above)[nearest_whole]

    def whole_within(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """[K] On each row's path to the root, find the longest step within a given prefix.

        Args:
            rows: [K] rows to start from.
            num_tokens: [K] length of the prefix of the row's prompt + response, in tokens.

        Returns:
            [K] rows; -1 for none.
        """
        found = self._adding(rows, num_tokens)
        return np.where(self._length[found] <= num_tokens, found, self.whole[found])

    def _adding(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """[K] For each row, find the nearest ancestor that shares few tokens with its parent."""
        for up, fewest in reversed(self._levels):
            rows = np.where(fewest[rows] > num_tokens, up[rows], rows)
        return rows


def followed(to: IntArray) -> IntArray:
    """[N] Follow pointers from each row to a row that points to itself: O(log N) passes."""
    while not np.array_equal(further := to[to], to):
        to = further
    return to


@dataclass(frozen=True, slots=True)
class Sequences:
    """N steps grouped into M sequences, in the order of their last steps.

    Attributes:
        order: [N] the steps, sequence by sequence.
        first: [M] position in `order` of each sequence's first step.
        head: [M] first step of each sequence.
        last: [M] last step of each sequence.
        of: [N] sequence of each step.
        start: [N] start of the step's response in the response of its sequence.
        known: [N] number of leading tokens of the step's prompt that earlier steps of its sequence
            contain.
    """

    order: IntArray
    first: IntArray
    head: IntArray
    last: IntArray
    of: IntArray
    start: IntArray
    known: IntArray

    @classmethod
    def of_steps(cls, tree: PrefixTree, continued: IntArray) -> Sequences:
        """Build sequences from the row that each row continues (see `continued_rows`).

        Example:
            >>> Sequences.of_steps(tree, np.array([-1, -1, 0])).order.tolist()
            [1, 0, 2]
        """
        order, first = _ordered(continued)
        count = np.diff(np.append(first, len(order)))
        head, last = order[first], order[first + count - 1]
        of = np.empty(len(order), np.int64)
        of[order] = np.repeat(np.arange(len(first)), count)
        length = tree.prompt + tree.response
        # A step knows all of the step that it continues, which in turn begins with all that it continues.
        num_known = np.where(continued < 0, 0, length[continued])
        # A sequence's prompt is that of its first step; all after it is response, so a step's response starts
        # where its prompt is longer than the first one.
        start = tree.prompt - tree.prompt[head][of]
        return cls(order, first, head, last, of, start, num_known)

    @property
    def count(self) -> IntArray:
        """[M] Number of steps in each sequence."""
        return np.diff(np.append(self.first, len(self.order)))

    def joined(self, steps: Ragged) -> Ragged:
        """[M] Concatenate the rows of each sequence's steps; null if its first step's row is null.

        Args:
            steps: [N] a row for each step.
        """
        if (self.order[1:] < self.order[:-1]).any():
            steps = steps.take(self.order)
        ends = np.append(self.first, len(self.order))
        return Ragged(steps.values, steps.offsets[ends], steps.valid[self.first])

    def interleaved(self, tree: PrefixTree) -> BoolArray:
        """[M] True for every sequence of a trajectory whose sequences are interleaved."""
        # Steps that moved are counted at the first row of their trajectory: one that moved marks them all.
        moved = np.zeros(len(self.order), np.bool_)
        moved[tree.start[self.order != np.arange(len(self.order))]] = True
        return moved[tree.start[self.head]]


def _ordered(continued: IntArray) -> tuple[IntArray, IntArray]:
    rows = np.arange(len(continued))
    # The last row of a chain (rows ascend, so the last one written wins) is where its sequence stands
    # among the sequences; the sort is stable, so its steps stay in order.
    root = followed(np.where(continued < 0, rows, continued))
    last = np.zeros(len(rows), np.int64)
    last[root] = rows
    order = np.argsort(last[root], kind="stable")
    starts = np.append(True, np.diff(last[root][order]) != 0)[: len(rows)]
    return order, np.flatnonzero(starts)
