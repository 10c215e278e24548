"""Drop single rows of trajectories, and keep the table valid."""

from __future__ import annotations

import polars as pl

from pipelines.filtering.verdicts import check_expression, collect
from pipelines.rewards import Outcome, place_outcomes, trajectory_returns
from pipelines.tables import Frame, as_lazy
from rollout_io.dataset.conditions import holds
from schemas.errors import InputError, InvariantError, count, first_of
from schemas.types import with_absent

_ROW = ("trajectory_id", "step_index")
_NEW_INDEX, _NEW_LAST = "__step_index_anew__", "__is_last_step_anew__"


def keep_rows(
    frame: Frame, condition: str | pl.Expr, *, outcome: Outcome = "last", move_outcome: bool = False
) -> tuple[pl.LazyFrame, dict[str, int]]:
    """Keep the rows that match a condition, and renumber the steps of each trajectory.

    `step_index` counts the kept rows from 0, and the last kept row is marked as the last step. A
    trajectory without a kept row is dropped. No reward is lost silently: if dropping rows would
    change a trajectory's return (for example, by dropping its last step), an error is raised,
    unless `move_outcome` places the original return on the last kept row and 0.0 on the rows before
    it. Null remains null, and failed trajectories remain failed. `segments` keep the original step
    indices.

    Args:
        frame: Rows of complete trajectories; a merged row is kept or dropped as a whole.
        condition: A Polars expression over any columns, or SQL; null is treated as false.
        outcome: How returns are computed (see `trajectory_returns`); they must not change.
        move_outcome: Move the return of every trajectory to its last kept row.

    Returns:
        The kept rows, in order; and counts {num_rows,num_trajectories,num_groups}_{before,dropped}.

    Raises:
        InputError: `return_unchanged`: a trajectory's return would change; `nothing_left`: no row
            matches.
        InvariantError: `step_index_sequence`: a step occurs twice.

    Example:
        Steps of one trajectory, by agents main, checker and main, the last with reward 1.0:

        >>> rows, counts = keep_rows(steps, "agent = 'main'")
        >>> rows.select("step_index", "is_last_step", "reward").collect().rows()
        [(0, False, 0.0), (1, True, 1.0)]
    """
    frame = as_lazy(frame)
    index = index_rows(frame, condition)
    counts = count_rows(index)
    if counts["num_rows_before"] and counts["num_rows_before"] == counts["num_rows_dropped"]:
        finding = f"no row is left: kept 0 of {count(counts['num_rows_before'], 'row')}"
        hint = "loosen the condition, or inspect the data: rollouts inspect DS"
        raise InputError("nothing_left", str(condition), finding, hint=hint)
    rows = renumber(frame, index)
    returns = trajectory_returns(frame, outcome).collect(engine="streaming")
    if move_outcome:
        return place_outcomes(rows, returns.rename({"return": "reward"})), counts
    _refuse_changed(returns, trajectory_returns(rows, outcome).collect(engine="streaming"))
    return rows, counts


def index_rows(frame: pl.LazyFrame, condition: str | pl.Expr) -> pl.DataFrame:
    """Evaluate the condition on every row, and compute the new step numbers.

    Returns:
        One entry per row of the frame: instance_id, trajectory_id, step_index, kept, and the new
        step_index (int32) and is_last_step (bool), which are meaningless where `kept` is false.
    """
    test, kept = holds(condition), pl.col("kept")
    frame = with_absent(frame, test.meta.root_names())
    check_expression(frame, test, str(condition))
    rows = collect(frame.select("instance_id", *_ROW, kept=test), str(condition))
    _refuse_repeated(rows)
    count = kept.cast(pl.Int32).cum_sum()
    return rows.with_columns(
        (count - 1).over("trajectory_id").alias(_NEW_INDEX),
        (count == kept.sum()).over("trajectory_id").alias(_NEW_LAST),
    )


def _refuse_repeated(rows: pl.DataFrame) -> None:
    repeated = rows.filter(pl.struct(_ROW).is_duplicated())
    if len(repeated):
        first = repeated.row(0, named=True)
        where = f"trajectory {first['trajectory_id']!r}"
        finding, hint = f"step {first['step_index']} occurs twice", "run rollouts validate DS"
        raise InvariantError("step_index_sequence", where, finding, hint=hint)


def renumber(frame: Frame, index: pl.DataFrame) -> pl.LazyFrame:
    """Select the rows that `index_rows` keeps, with their new numbers.

    Runs in the streaming engine.
    """
    frame = as_lazy(frame)
    names = frame.collect_schema().names()
    numbers = index.filter("kept").select(*_ROW, _NEW_INDEX, _NEW_LAST).lazy()
    joined = frame.join(numbers, on=_ROW, how="inner", maintain_order="left")
    number = pl.col(_NEW_INDEX).cast(pl.Int32)
    return joined.with_columns(step_index=number, is_last_step=_NEW_LAST).select(names)


def count_rows(index: pl.DataFrame) -> dict[str, int]:
    """Count all rows, trajectories and groups, and how many of each are dropped."""
    counts, remaining = {}, index.filter("kept")
    for name, column in {"trajectories": "trajectory_id", "groups": "instance_id"}.items():
        before = index[column].n_unique()
        counts[f"num_{name}_before"] = before
        counts[f"num_{name}_dropped"] = before - remaining[column].n_unique()
    rows = {"num_rows_before": len(index), "num_rows_dropped": len(index) - len(remaining)}
    return rows | counts


def _refuse_changed(before: pl.DataFrame, after: pl.DataFrame) -> None:
    joined = after.join(before, on="trajectory_id", suffix="_before", maintain_order="left")
    changed = joined.filter(pl.col("return").ne_missing(pl.col("return_before")))
    if changed.is_empty():
        return
    first = changed.row(0, named=True)
    where = first_of(f"trajectory {first['trajectory_id']!r}", len(changed))
    was, now = first["return_before"], first["return"]
    finding = f"dropping rows would change its return from {was} to {now}"
    hint = "move the return to the last kept row: --move-outcome (move_outcome=True)"
    raise InputError("return_unchanged", where, finding, hint=hint)
