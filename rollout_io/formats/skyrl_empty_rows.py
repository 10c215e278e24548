"""Leave out the rows of a `GeneratorOutput` whose response is empty: they have nothing to train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from schemas.errors import count
from schemas.ragged import BoolArray

NO_RESPONSE = "failed: the response is empty"
_NO_REWARD = "failed: the reward of a step with an empty response cannot be moved to another step"


def without_empty_rows(arrays: dict[str, Any]) -> tuple[BoolArray, list[str]]:
    """Find the rows to leave out, and adapt the columns of the remaining rows in place.

    The row's reward, and the metrics of a last row, move to the row before it, so that the return of the trajectory is the same
    whether it is the last reward or the sum. If no move achieves that, or if no row remains, the
    trajectory fails; other trajectories are unaffected.

    Args:
        arrays: Columns by name, with one entry per row; rows of a trajectory are in order.

    Returns:
        Mask of the rows to keep, and warnings for the user.
    """
    num_rows = len(arrays["is_last_step"])
    errors: list[str | None] = arrays.get("error") or [None] * num_rows
    lengths = [len(ids) for ids in arrays["response_ids"]]
    is_empty = [n == 0 and error is None for n, error in zip(lengths, errors, strict=True)]
    keep = np.ones(num_rows, np.bool_)
    if not any(is_empty):
        return keep, []
    num_failed = 0
    for rows in _trajectories(arrays["is_last_step"]):
        if not any(is_empty[row] for row in rows):
            continue
        kept = [row for row in rows if not is_empty[row]]
        error = NO_RESPONSE
        if kept:
            error = "" if _move_rewards(arrays, rows, is_empty) else _NO_REWARD
        if error:
            num_failed += 1
            for row in rows:
                errors[row] = error
        kept = kept or rows[-1:]
        keep[rows] = False
        keep[kept] = True
        for index, row in enumerate(kept):
            arrays["step_index"][row] = index
            arrays["is_last_step"][row] = row == kept[-1]
    if num_failed:
        arrays["error"] = errors
        for name in ("reward", "rewards"):
            if name in arrays:
                found = zip(arrays[name], errors, strict=True)
                arrays[name] = [None if error else value for value, error in found]
    first = arrays["trajectory_id"][is_empty.index(True)]
    text = f"{count(sum(is_empty), 'row')} with an empty response left out"
    text += f", first in trajectory {first!r}"
    text += f"; {count(num_failed, 'trajectory')} failed for it" if num_failed else ""
    return keep, [text]


def _trajectories(last: list[bool]) -> Iterator[list[int]]:
    rows: list[int] = []
    for row, is_last in enumerate(last):
        rows.append(row)
        if is_last:
            yield rows
            rows = []
    if rows:
        yield rows


def _move_rewards(arrays: dict[str, Any], rows: list[int], is_empty: list[bool]) -> bool:
    """Move the rewards of empty rows; false if that would change a return."""
    rewards = arrays["reward"]
    target: int | None = None
    for row in rows:
        if not is_empty[row]:
            target = row
            continue
        own = rewards[row]
        if target is None:
            if own:
                return False
        elif row == rows[-1] or own:
            if rewards[target]:
                return False
            rewards[target] = own
    metrics = arrays.get("metrics")
    if metrics is not None and target is not None and not metrics[target]:
        metrics[target] = metrics[rows[-1]]
    return True
