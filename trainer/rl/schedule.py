"""Decide when a group may start, and which iteration trains on it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


def num_allowed(*, iteration: int, max_staleness: int, num_iterations: int, size: int) -> int:
    """Compute how many groups, finished or not, may have been started by a given iteration.

        min(max_staleness + iteration + 1, num_iterations) * size

    `iteration` counts from 0; `size` is the number of groups per iteration.

    Example:
        >>> num_allowed(iteration=0, max_staleness=0, num_iterations=9, size=4)
        4
        >>> num_allowed(iteration=3, max_staleness=2, num_iterations=9, size=4)
        24
    """
    return min(max_staleness + iteration + 1, num_iterations) * size


def place(room: Sequence[int], deadlines: Sequence[int]) -> int:
    """Choose the iteration that trains on a finished group.

    This is the first iteration with a free slot that no running group needs: every running group
    still gets a slot in its last allowed iteration or earlier. The trainer thus waits for a slow
    group instead of training on it too late. `num_allowed` guarantees that there is an
    iteration with such a slot, and that it is not too late for the finished group itself.

    Args:
        room: Number of free slots of each iteration.
        deadlines: Last allowed iteration of each running group.

    Example:
        >>> place([1, 2], [])
        0
        >>> place([1, 2], [0])
        1
    """
    latest = sorted(deadlines)
    spare = [
        free - bisect_right(latest, number) for number, free in enumerate(accumulate(room))
    ]  # spare[j]: free slots up to j, minus the running groups that need one of them
    needed = len(room)
    while needed and spare[needed - 1] > 0:
        needed -= 1
    found = [number for number, free in enumerate(room) if free and number >= needed]
    assert found, "more groups than slots"
    return found[0]
