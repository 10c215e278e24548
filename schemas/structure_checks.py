"""Checks on how rows form trajectories: ids, order, boundaries and prefix references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import PREFIX_FIELDS
from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.ragged import BoolArray, IntArray
from schemas.view import View, joined

UNMARKED_END = "is_last_step is false on the last row of the trajectory"
_EARLY_END = "is_last_step is true but the trajectory has more rows"

STRUCTURE_COLUMNS = ("instance_id", "repetition_id", "trajectory_id", "step_index", "is_last_step")


@dataclass(frozen=True, slots=True)
class Runs:
    """Maximal runs of adjacent rows of the same trajectory.

    A run starts where the id changes, or where the same id restarts at step 0 after a row that is
    marked last.

    Attributes:
        start: [R] index of the first row of each run.
        run: [N] index of the run that each row belongs to.
        restarted: [R] true for a run that has the id of the run before it, but restarts at step 0.
    """

    start: IntArray
    run: IntArray
    restarted: BoolArray

    @classmethod
    def of(cls, trajectory_id: pa.ChunkedArray, step_index: IntArray, last: BoolArray) -> Runs:
        """Find the runs of a table."""
        num_rows = len(step_index)
        changed = changes(trajectory_id)
        restarted = ~changed
        restarted[1:] &= (step_index[1:] == 0) & last[:-1]
        restarted[:1] = False
        start = np.flatnonzero(changed | restarted)
        run = np.repeat(np.arange(len(start)), np.diff(np.append(start, num_rows)))
        return cls(start, run, restarted[start])

    @property
    def end(self) -> IntArray:
        """[R] index of the last row of each run."""
        return np.append(self.start[1:], len(self.run)) - 1


def changes(column: pa.ChunkedArray) -> BoolArray:
    """Return a mask, [N] bool: true in the first row, and wherever the value changes."""
    changed = np.ones(len(column), np.bool_)
    if len(column) > 1:
        changed[1:] = to_numpy(pc.not_equal(column.slice(1), column.slice(0, len(column) - 1)))
    return changed


def check_structure(view: View, runs: Runs, seen: set[str]) -> Iterator[pl.DataFrame]:
    """Check ids, contiguity, step order and inner boundaries of a table of complete trajectories.

    Args:
        view: The table.
        runs: The runs of the table.
        seen: Trajectory ids of earlier tables; updated with the ids of this one.
    """
    returning = _returning(view, runs, seen)
    steps = view.array("step_index")
    at_zero = steps[runs.start] == 0
    split = returning & ~at_zero
    yield _misnamed(view)

    rows = runs.start[returning & at_zero]
    name, sentence = "trajectory_id", "the trajectory id was already used by earlier rows"
    expected = "each trajectory once"
    yield view.breaches("unique_trajectory", rows, name, "step 0 again", expected, sentence)

    rows = runs.start[split]
    finding = "a trajectory that continues after rows of a different trajectory"
    expected = "all rows of a trajectory next to each other"
    sentence = "the trajectory continues after rows of a different trajectory"
    yield view.breaches("contiguous_trajectory", rows, name, finding, expected, sentence)

    wanted = np.arange(len(steps)) - runs.start[runs.run]
    bad = (steps != wanted) & ~split[runs.run]
    indices, expected_indices = (list(values[bad].astype(str)) for values in (steps, wanted))
    yield view.breaches("step_index_sequence", bad, "step_index", indices, expected_indices)
    yield _boundaries(view, runs)


def _returning(view: View, runs: Runs, seen: set[str]) -> BoolArray:
    ids = view.strings("trajectory_id").take(to_arrow(runs.start)).to_pylist()
    returning = np.zeros(len(ids), np.bool_)
    for i, trajectory_id in enumerate(ids):
        returning[i] = trajectory_id in seen
        seen.add(trajectory_id)
    return returning


def _misnamed(view: View) -> pl.DataFrame:
    instance, actual = (pl.Series(view.strings(n)) for n in ("instance_id", "trajectory_id"))
    repetition = pl.Series(view.table.column("repetition_id"))
    wanted = instance + "_" + repetition.cast(pl.String)
    differs = actual != wanted
    rows = differs.arg_true().to_numpy()
    finding, expected = actual.filter(differs).to_list(), wanted.filter(differs).to_list()
    sentence = "trajectory_id is {got} but instance_id and repetition_id give {expected}"
    return view.breaches("unique_trajectory", rows, "trajectory_id", finding, expected, sentence)


def _boundaries(view: View, runs: Runs) -> pl.DataFrame:
    last = view.array("is_last_step")
    is_end = np.zeros(len(last), np.bool_)
    is_end[runs.end] = True
    differs = last != is_end
    differs[-1:] = False  # the next table, or final_row_is_last, decides this
    rule, column = "boundary_alignment", "is_last_step"
    early = view.breaches(rule, differs & last, column, "true", "false", _EARLY_END)
    late = view.breaches(rule, differs & ~last, column, "false", "true", UNMARKED_END)
    return joined([early, late]).sort("row")


def check_outcome(view: View, runs: Runs) -> Iterator[pl.DataFrame]:
    """Check outcome_on_last_step in trajectories whose `error` is null."""
    if not view.has("reward"):
        return
    reward = to_numpy(view.table.column("reward"))
    has_reward = ~view.is_null("reward")
    carries = has_reward & np.isfinite(reward) & (reward != 0)
    carries[runs.end] = False
    inner = np.bincount(runs.run, carries, minlength=len(runs.start)) > 0
    without = ~has_reward[runs.end] | (reward[runs.end] == 0)
    without &= view.is_null("segments")[runs.end]  # a merged row's reward is a sum
    rows = runs.end[inner & without & view.is_null("error")[runs.end]]
    finding, expected = "reward on earlier rows only", "reward on the last row"
    sentence = "earlier rows of the trajectory have a reward but its last row has none"
    yield view.breaches("outcome_on_last_step", rows, "reward", finding, expected, sentence)


def check_prefix(view: View) -> Iterator[pl.DataFrame]:
    """Check prefix_reference: each row refers to existing tokens of an earlier row."""
    if not view.has(*(field.name for field in PREFIX_FIELDS), "response_ids", "trajectory_id"):
        return
    rooted = view.is_null("parent_step_index")
    parent = filled(view.table.column("parent_step_index"), -1).astype(np.int64)
    prefix = view.array("prefix_length").astype(np.int64)
    first = first_rows(view)
    index = np.arange(len(prefix)) - first
    earlier = rooted | ((parent >= 0) & (parent < index))
    parent_row = np.where(rooted | ~earlier, 0, first + parent)

    prompt = prefix + view.ragged("prompt_suffix_ids").lengths
    total = prompt + view.ragged("response_ids").lengths
    limit = np.where(rooted | ~earlier, 0, total[parent_row] if len(total) else 0)
    bad = ~earlier | (prefix < 0) | (prefix > limit)
    rows = np.flatnonzero(bad)
    finding = [
        f"{prefix[r]} tokens of {'no step' if rooted[r] else f'step {parent[r]}'}" for r in rows
    ]
    expected = [f"0..{limit[r]} tokens of an earlier step" for r in rows]
    sentence = "the prompt begins with {got}; expected {expected}"
    yield view.breaches("prefix_reference", rows, "prefix_length", finding, expected, sentence)


def check_whole(view: View) -> pl.DataFrame:
    """Check prefix_reference: each trajectory has all its rows, in order.

    `parent_step_index` counts rows from the first row of the trajectory, so a missing row would
    shift the references.
    """
    steps = view.array("step_index")
    index = np.arange(len(steps)) - first_rows(view)
    rows = np.flatnonzero(steps != index)
    finding = [f"step {steps[r]} as row {index[r]} of its trajectory" for r in rows]
    expected = "all rows of a trajectory in one row group, in order"
    sentence = "found {got}; expected {expected}"
    return view.breaches("prefix_reference", rows, "step_index", finding, expected, sentence)


def first_rows(view: View) -> IntArray:
    """For each row, return the index of its trajectory's first row (a run of equal ids), [N]."""
    changed = changes(view.strings("trajectory_id"))
    first: IntArray = np.flatnonzero(changed)[np.cumsum(changed) - 1]
    return first
