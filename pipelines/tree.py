"""The prefix tree of a table: for each step, the earlier step whose tokens its prompt repeats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.prefix import find_parents, is_encoded, trajectory_starts
from schemas.ragged import IntArray, Ragged, list_lengths


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Parents and lengths of N rows, in tokens.

    Attributes:
        starts: [T] first row of each trajectory.
        start: [N] first row of the row's own trajectory.
        parent: [N] the earlier row of the trajectory whose prompt + response shares the longest
            prefix with this prompt (ties: the latest); -1 for a root.
        shared: [N] how many tokens they share.
        prompt: [N] tokens of the prompt.
        response: [N] tokens of the response.
    """

    starts: IntArray
    start: IntArray
    parent: IntArray
    shared: IntArray
    prompt: IntArray
    response: IntArray


def prefix_tree(table: pa.Table) -> PrefixTree:
    """The tree of a table of whole trajectories; with the prefix columns no token is read.

    Args:
        table: trajectory_id, response_ids, and `prompt_token_ids` or the columns of the `prefix`
            layout.

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
        parent = np.asarray(pc.fill_null(table.column("parent_step_index"), -1), np.int64)
        shared = np.asarray(table.column("prefix_length"), np.int64)
        prompt = shared + list_lengths(table.column("prompt_suffix_ids"))
    else:
        prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
        responses = Ragged.from_arrow(table.column("response_ids"))
        parent, shared = find_parents(prompts, responses, starts)
        prompt = prompts.lengths
    parent = np.where(parent < 0, -1, start + parent)
    return PrefixTree(starts, start, parent, shared, prompt, response)
