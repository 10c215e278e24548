"""Put rows together into micro-batches of a limited number of tokens."""

from __future__ import annotations

import numpy as np

from schemas.ragged import BoolArray, IntArray, Ragged
from trainer.batches.forest import Forest, chain_forest, chain_lengths
from trainer.batches.recorded_routes import Routes


def pack(lengths: IntArray, budget: int) -> list[IntArray]:
    """Pack rows into few bins of at most `budget` tokens, by first-fit decreasing.

    Args:
        lengths: [R] tokens per row; empty rows are left out; a row above the budget gets a
            separate bin.
        budget: Maximum number of tokens per bin.

    Returns:
        Rows of each bin, ascending; bins are ordered by their first row.

    Example:
        >>> [rows.tolist() for rows in pack(np.array([3, 5, 0, 2]), 5)]
        [[0, 3], [1]]
    """
    above = np.flatnonzero(lengths > budget)
    lengths = np.where(lengths > budget, 0, lengths)
    num_leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    free = [budget] * (2 * num_leaves)  # segment tree of the largest room below each node
    bins: dict[int, list[int]] = {}
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        if not length:
            break
        node = 1
        while node < num_leaves:  # down to the leftmost bin with enough room
            node *= 2
            node += free[node] < length
        bins.setdefault(node, []).append(row)
        free[node] -= length
        while node := node // 2:
            free[node] = max(free[2 * node], free[2 * node + 1])
    packed = [*bins.values(), *([row] for row in above.tolist())]
    return sorted((np.array(sorted(rows)) for rows in packed), key=lambda rows: int(rows[0]))


def chain_forests(
    prompts: Ragged,
    responses: Ragged,
    is_target: BoolArray,
    rows: IntArray,
    budget: int,
    routes: Routes | None = None,
) -> list[Forest]:
    """Build micro-batches of at most `budget` tokens that together contain each target once.

    A row above the budget forms a separate micro-batch.
    """
    lengths = chain_lengths(prompts, responses, is_target)[rows]
    return [
        chain_forest(prompts, responses, is_target, rows[picked], routes)
        for picked in pack(lengths, budget)
    ]
