"""Checks on how rows form trajectories: ids, order, boundaries and prefix references."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.ragged import BoolArray, IntArray
from schemas.view import View

STRUCTURE_COLUMNS = ("instance_id", "repetition_id", "trajectory_id", "step_index", "is_last_step")


@dataclass(frozen=True, slots=True)
class Runs:
    """Maximal runs of adjacent rows of the same trajectory.

    A run starts where the id changes, or where the same id restarts at step 0 after a row that is
    marked last.

    Attributes:
        start: [R] index of the first row of each run.
        end: [R] index of the last row of each run.
        run: [N] index of the run that each row belongs to.
    """

    start: IntArray
    end: IntArray
    run: IntArray

    @classmethod
    def of(cls, view: View) -> Runs:
        """Find the runs of a table."""
        is_start = changes(view.strings("trajectory_id"))
        is_start[1:] |= (view.array("step_index")[1:] == 0) & view.array("is_last_step")[:-1]
        start = np.flatnonzero(is_start)
        return cls(start, np.append(start[1:], len(is_start)) - 1, np.cumsum(is_start) - 1)


def changes(column: pa.ChunkedArray) -> BoolArray:
    """Return a mask, [N] bool: true in the first row, and wherever the value changes."""
    changed = np.ones(len(column), np.bool_)
    if len(column) > 1:
        changed[1:] = to_numpy(pc.not_equal(column.slice(1), column.slice(0, len(column) - 1)))
    return changed


def check_structure(view: View, runs: Runs, seen: set[str]) -> None:
    """Check ids, contiguity, step order and inner boundaries of a table of complete trajectories.

    Args:
        view: The table.
        runs: The runs of the table.
        seen: Trajectory ids of earlier tables; updated with the ids of this one.
    """
    instance, actual = (pl.Series(view.strings(n)) for n in ("instance_id", "trajectory_id"))
    wanted = instance + "_" + pl.Series(view.column("repetition_id")).cast(pl.String)
    bad, name = (actual != wanted).to_numpy(), "trajectory_id"
    view.report("unique_trajectory.name", name, bad, name=actual.item, wanted=wanted.item)

    returning = _returning(view, runs, seen)
    steps, last = view.array("step_index"), view.array("is_last_step")
    split = returning & (steps[runs.start] != 0)
    view.report("unique_trajectory", name, returning & ~split, runs.start)
    view.report("contiguous_trajectory", name, split, runs.start)
    index = np.arange(len(steps)) - runs.start[runs.run]
    bad = (steps != index) & ~split[runs.run]
    view.report("step_index_sequence", "step_index", bad, step=steps, index=index)

    is_end = np.zeros(len(last), np.bool_)
    is_end[runs.end] = True
    is_end[-1] = last[-1]  # the next table, or final_row_is_last, decides this

    def finding(row: int) -> str:
        return "boundary_alignment.early" if last[row] else "boundary_alignment"

    view.report(finding, "is_last_step", last != is_end)


def _returning(view: View, runs: Runs, seen: set[str]) -> BoolArray:
    """[R] True for runs of a trajectory that has earlier rows."""
    ids = view.strings("trajectory_id").take(to_arrow(runs.start)).to_pylist()
    returning = np.zeros(len(ids), np.bool_)
    for i, trajectory_id in enumerate(ids):
        returning[i] = trajectory_id in seen
        seen.add(trajectory_id)
    return returning


def check_outcome(view: View, runs: Runs) -> None:
    """Check outcome_on_last_step in trajectories whose `error` is null."""
    reward, has_reward = view.array("reward"), ~view.is_null("reward")
    carries = has_reward & np.isfinite(reward) & (reward != 0)
    carries[runs.end] = False
    inner = np.bincount(runs.run, carries, minlength=len(runs.start)) > 0
    without = ~has_reward[runs.end] | (reward[runs.end] == 0)
    without &= view.is_null("segments")[runs.end]  # a merged row's reward is a sum
    bad = inner & without & view.is_null("error")[runs.end]
    view.report("outcome_on_last_step", "reward", bad, runs.end)


def check_prefix(view: View) -> None:
    """Check prefix_reference: each row refers to existing tokens of an earlier row."""
    parent = filled(view.column("parent_step_index"), -1).astype(np.int64)
    prefix, rooted = view.array("prefix_length").astype(np.int64), view.is_null("parent_step_index")
    suffix, response = (view.lengths(n) for n in ("prompt_suffix_ids", "response_ids"))
    first = first_rows(view)
    earlier = rooted | ((parent >= 0) & (parent < np.arange(len(prefix)) - first))
    total, refers = prefix + suffix + response, earlier & ~rooted
    limit = np.zeros_like(total)
    limit[refers] = total[(first + parent)[refers]]

    bad = ~earlier | (prefix < 0) | (prefix > limit)

    def step(row: int) -> str:
        return "no step" if rooted[row] else f"step {parent[row]}"

    view.report("prefix_reference", "prefix_length", bad, num=prefix, parent=step, limit=limit)


def check_whole(view: View) -> None:
    """Check prefix_reference: each trajectory has all its rows, in order.

    `parent_step_index` counts rows from the first row of the trajectory, so a missing row would
    shift the references.
    """
    steps = view.array("step_index")
    index = np.arange(len(steps)) - first_rows(view)
    bad = steps != index
    view.report("prefix_reference.whole", "step_index", bad, step=steps, index=index)


def first_rows(view: View) -> IntArray:
    """For each row, return the index of its trajectory's first row (a run of equal ids), [N]."""
    changed = changes(view.strings("trajectory_id"))
    first: IntArray = np.flatnonzero(changed)[np.cumsum(changed) - 1]
    return first
