"""Prefix tree of a table: the earlier step with which each prompt shares its longest prefix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rollout_io.dataset.prefix_layout import find_parents, is_encoded, trajectory_starts
from schemas.numpy_arrays import filled, to_numpy
from schemas.pictures import identities
from schemas.ragged import IntArray, list_lengths


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
