"""When a group may begin, and to which iteration a finished one goes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


def num_allowed(*, iteration: int, max_staleness: int, num_iterations: int, size: int) -> int:
    """Groups, finished and under way, that there may be while an iteration is worked on.

        min(max_staleness + iteration + 1, num_iterations) * size

    Args:
        iteration: From 0: as many have been trained.
        max_staleness: Iterations that a group's weights may be behind those it trains.
        num_iterations: Of the whole run.
        size: Groups of an iteration.

    Example:
        >>> num_allowed(iteration=0, max_staleness=0, num_iterations=9, size=4)
        4
        >>> num_allowed(iteration=3, max_staleness=2, num_iterations=9, size=4)
        24
    """
    return min(max_staleness + iteration + 1, num_iterations) * size


def place(room: Sequence[int], deadlines: Sequence[int]) -> int:
    """The iteration that a finished group goes to.

    It is the first with a free place that no group under way needs: each of these still finds one in
    its last iteration or before. So a group that is slow is waited for, not trained too late.
    `num_allowed` sees to it that there is such an iteration, and that it is not too late for the
    finished group itself.

    Args:
        room: Free places of each iteration.
        deadlines: Of each group under way, the last iteration that it may train.

    Example:
        >>> place([1, 2], [])
        0
        >>> place([1, 2], [0])
        1
    """
    latest = sorted(deadlines)
    spare = [
        free - bisect_right(latest, number) for number, free in enumerate(accumulate(room))
    ]  # spare[j]: free places up to j that no group which has to end there needs
    needed = len(room)
    while needed and spare[needed - 1] > 0:
        needed -= 1
    found = [number for number, free in enumerate(room) if free and number >= needed]
    assert found, "more groups than places"
    return found[0]
