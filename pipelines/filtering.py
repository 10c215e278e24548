"""Decide in one pass which trajectories are dropped or masked, and by which filter; drop single rows.

`judge` lists the verdicts, and changes no row: it reads only ids, rewards and the columns that filters
use, and keeps one line per trajectory in memory. `apply_filters` then drops trajectories; `apply_masks`
excludes them from the loss, but keeps them in the table and in baselines. `keep_rows` drops rows, and
keeps the table valid. The filters are in `pipelines.filters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from pipelines.frames import Frame, as_lazy
from pipelines.rewards import Outcome, fold_trajectories, place_outcomes, trajectory_returns
from rollout_io.dataset.conditions import POLARS_ERRORS, check_columns, holds, types_in
from rollout_io.dataset.trajectory_conditions import (
    TOOL_FUNCTIONS,
    TrajectoryCondition,
    decided,
    evaluate,
)
from rollout_io.dataset.trajectory_facts import Fold, joined_steps
from schemas.columns import PICTURES
from schemas.errors import ConfigError, InputError, InvariantError, count, first_of
from schemas.types import with_absent

_IS_MASKED = "is masked"
STEPS = "joined steps"
"""Extra column that a filter's `row` expression may use: see `joined_steps`."""

_ROW = ("trajectory_id", "step_index")
_NEW_INDEX, _NEW_LAST = "__step_index_anew__", "__is_last_step_anew__"


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """A rule that drops trajectories.

    Attributes:
        name: Name in reports; unique among the filters of one pass.
        drops: Expression that is true where a trajectory is dropped (null: kept). May use position
            (in the table), instance_id, trajectory_id, return (null: failed or unknown), error and
            value. Sees only trajectories that no earlier filter dropped.
        row: Expression over the columns of one row (merged or not) and `pl.col(STEPS)`, from which
            `value` is computed.
        fold: Aggregates the values of a trajectory's rows into its `value`.
        condition: In place of `row`: `value` is whether the trajectory matches.
    """

    name: str
    drops: pl.Expr
    row: pl.Expr | None = None
    fold: Fold = pl.Expr.max
    condition: TrajectoryCondition | None = None


Filters = Filter | Sequence[Filter]
"""One filter, or several in order."""


def listed(filters: Filters) -> list[Filter]:
    """Return filters as a list."""
    return [filters] if isinstance(filters, Filter) else [*filters]


def judge(frame: Frame, filters: Filters, outcome: Outcome = "last") -> pl.DataFrame:
    """List for each trajectory which filter would drop it, without dropping any (see `apply_filters`).

    Filters decide in order; each sees only the trajectories that earlier filters kept. No model judges


    Args:
        frame: Rows of complete trajectories. Merging does not change the verdicts.
        filters: One filter, or several in order.
        outcome: How returns are computed (see `trajectory_returns`).

    Returns:
        One line per trajectory, in order of appearance: instance_id, trajectory_id, return, error,
        reason (name of the filter that drops it; null: kept).

    Raises:
        ConfigError: `known_column`: a filter uses an unknown column; `condition`: a filter cannot
            be computed; `unique_filter`: two filters have the same name.

    Example:
        >>> judge(frame, reward_range(minimum=0.5)).select("trajectory_id", "reason").rows()
        [('a_0', None), ('a_1', 'reward >= 0.5')]
    """
    filters = listed(filters)
    names = [f.name for f in filters]
    if len(set(names)) < len(names):
        raise ConfigError("unique_filter", "filters", ", ".join(names), "unique names")
    frame = with_absent(as_lazy(frame), [PICTURES])
    frame = frame.with_columns(joined_steps(frame).alias(STEPS))
    features, matches = {}, {}
    for number, rule in enumerate(filters):
        if rule.row is not None:
            _check_expression(frame, rule.row, rule.name)
            features[f"value_{number}"] = (rule.row, rule.fold)
        if rule.condition is not None:
            matches[number] = evaluate(frame, rule.condition, outcome)
    left = collect(fold_trajectories(frame, outcome, features), ", ".join(names))
    left = left.with_row_index("position")
    parts = []
    for number, rule in enumerate(filters):
        value = pl.col(f"value_{number}") if rule.row is not None else pl.lit(None)
        if rule.condition is not None:
            rows = left.join(matches[number], on="trajectory_id", maintain_order="left")
            value = pl.lit(decided(rows, rule.condition))
        goes = left.with_columns(value=value).select(rule.drops.fill_null(value=False)).to_series()
        parts.append(left.filter(goes).with_columns(reason=pl.lit(rule.name)))
        left = left.filter(~goes)
    parts.append(left.with_columns(reason=pl.lit(None, pl.String)))
    columns = ("instance_id", "trajectory_id", "return", "error", "reason")
    return pl.concat(parts).sort("position").select(columns)


def keep(frame: Frame, verdicts: pl.DataFrame) -> pl.LazyFrame:
    """Keep the rows of trajectories that have no reason in `verdicts`, in order.

    Runs in the streaming engine.
    """
    frame = as_lazy(frame)
    dropped = verdicts.filter(pl.col("reason").is_not_null())
    if dropped.is_empty():
        return frame
    # A join hashes the ids once; `is_in` does it for every batch of rows.
    kept = verdicts.lazy().filter(pl.col("reason").is_null()).select("trajectory_id")
    return frame.join(kept, on="trajectory_id", how="semi", maintain_order="left")


def report(verdicts: pl.DataFrame, filters: Sequence[Filter]) -> pl.DataFrame:
    """Count the trajectories and groups that each filter saw and dropped, one line per filter.

    A group is counted as dropped when its last trajectory is dropped.
    """
    lines = []
    left = verdicts.select("instance_id", "reason")
    for rule in filters:
        after = left.filter(pl.col("reason").ne_missing(rule.name))
        groups = (left["instance_id"].n_unique(), after["instance_id"].n_unique())
        counts = (len(left), len(left) - len(after), groups[0], groups[0] - groups[1])
        lines.append((rule.name, *counts))
        left = after
    return pl.DataFrame(lines, schema=REPORT_COLUMNS, orient="row")


REPORT_COLUMNS = {
    "filter": pl.String,
    "num_trajectories_before": pl.Int64,
    "num_trajectories_dropped": pl.Int64,
    "num_groups_before": pl.Int64,
    "num_groups_dropped": pl.Int64,
}


def apply_filters(
    frame: Frame, filters: Filters, outcome: Outcome = "last"
) -> tuple[pl.LazyFrame, pl.DataFrame]:
    """Drop trajectories. Verdicts are computed immediately; rows stream when the result is used.

    A single filter is idempotent, but a list may not be: a filter that follows `zero_variance` can
    leave groups without variance, so put `zero_variance` last.

    Returns:
        The kept rows, in order; and the report.

    Raises:
        InputError: `nothing_left`: the filters drop every trajectory of a non-empty frame;
            `unknown_return`: a filter compares returns, and no trajectory has one.

    Example:
        >>> rows, counts = apply_filters("rollouts/", zero_variance())
    """
    filters = listed(filters)
    if not filters:
        return as_lazy(frame), pl.DataFrame(schema=REPORT_COLUMNS)
    verdicts = judge(frame, filters, outcome)
    compares = [f.name for f in filters if "return" in f.drops.meta.root_names()]
    if compares and len(verdicts) and verdicts["return"].is_null().all():
        finding = "no trajectory has a known return"
        hint = "add rewards: rollouts convert --rewards, or rollouts rescore and --reward NAME"
        raise InputError("unknown_return", compares[0], finding, hint=hint)
    counts = report(verdicts, filters)
    refuse_nothing(verdicts, counts, "filters")
    return keep(frame, verdicts), counts


def refuse_nothing(verdicts: pl.DataFrame, counts: pl.DataFrame, where: str) -> None:
    """Raise `nothing_left` if filters dropped every trajectory of a non-empty table."""
    if verdicts.is_empty() or verdicts["reason"].null_count():
        return
    lines = counts.filter(pl.col("num_trajectories_dropped") > 0)
    found = lines.select("filter", "num_trajectories_dropped").rows()
    why = "; ".join(f"{name}: {number} dropped" for name, number in found)
    finding = f"no trajectory is left: kept 0 of {count(len(verdicts), 'trajectory')} ({why})"
    hint = "loosen the filter that dropped the most, or inspect the data: rollouts stats DS"
    if any(function in name for name, _ in found for function in TOOL_FUNCTIONS):
        hint += " lists the tools (case counts)"
    raise InputError("nothing_left", where, finding, hint=hint)


def _check_expression(frame: pl.LazyFrame, expression: pl.Expr, name: str) -> None:
    """Raise if an expression cannot be computed from the frame's columns, before reading any row."""
    schema = frame.collect_schema()
    known = [column for column in schema if column != STEPS]
    used = [column for column in expression.meta.root_names() if column != STEPS]
    check_columns(used, known, name, name.partition(": ")[2] or name)
    # Evaluating the expression on zero rows finds type errors without reading data.
    types = types_in(expression.meta.root_names(), schema)
    collect(pl.DataFrame(schema=schema).lazy().select(expression), name, types)


def collect(
    query: pl.LazyFrame,
    name: str,
    types: str = "",
    engine: Literal["streaming", "in-memory"] = "streaming",
) -> pl.DataFrame:
    """Run a query; report a failing expression as invalid input.

    Args:
        query: Query to run.
        name: The expression, for the message.
        types: Columns of the expression with their types, for the message.
        engine: Engine of Polars; "in-memory" is faster for rows that are in memory.
    """
    try:
        return query.collect(engine=engine)
    except POLARS_ERRORS as error:
        finding = f"cannot evaluate the condition: {str(error).strip().splitlines()[0]}"
        finding += f" ({types})" if types else ""
        hint = "check the columns' types: rollouts inspect DS"
        raise ConfigError("condition", name, finding, hint=hint) from None


def apply_masks(
    frame: Frame, filters: Filters, outcome: Outcome = "last"
) -> tuple[pl.LazyFrame, pl.DataFrame]:
    """Set `loss_mask` to false in all rows of the trajectories that the filters would drop.

    Their rewards are kept and still count in the baselines of their groups; failed trajectories
    have no reward. Each filter sees only trajectories that no earlier filter masked. Masking is
    idempotent. Masking every row is allowed here, but validation rejects a table that is entirely
    masked (`mask_trains_something`).

    Args:
        frame: Rows of complete trajectories, merged or not.
        filters: Usually `overlong()` and `failed("group")`.
        outcome: How returns are computed, for filters that need them.

    Returns:
        All rows, in order; and a report as from `apply_filters`, but with columns named `masked`
        instead of `dropped`.

    Example:
        A trajectory of two steps; the last one stopped with `length`:

        >>> rows, counts = apply_masks(steps, overlong())
        >>> rows.select("loss_mask").collect().to_series().to_list()
        [[False], [False]]
    """
    filters = listed(filters)
    if not filters:
        return as_lazy(frame), _renamed(pl.DataFrame(schema=REPORT_COLUMNS))
    verdicts = judge(frame, filters, outcome)
    return mask(frame, verdicts), _renamed(report(verdicts, filters))


def _renamed(counts: pl.DataFrame) -> pl.DataFrame:
    return counts.rename(lambda name: name.replace("dropped", "masked"))


def mask(frame: Frame, verdicts: pl.DataFrame) -> pl.LazyFrame:
    """Mask the trajectories that have a reason in `verdicts`. Runs in the streaming engine."""
    frame = as_lazy(frame)
    masked = verdicts.filter(pl.col("reason").is_not_null())
    if masked.is_empty():
        return frame
    flags = masked.lazy().select("trajectory_id", pl.lit(value=True).alias(_IS_MASKED))
    rows = frame.join(flags, on="trajectory_id", how="left", maintain_order="left")
    nothing = pl.col("loss_mask").list.eval(pl.element() & False)
    kept = pl.when(pl.col(_IS_MASKED)).then(nothing).otherwise("loss_mask")
    return rows.with_columns(loss_mask=kept).drop(_IS_MASKED)


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
    _check_expression(frame, test, str(condition))
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
