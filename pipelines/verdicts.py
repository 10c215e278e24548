"""Verdicts on trajectories: which are dropped, or masked, by which rule, in one pass over the rows.

`judge` reads ids, rewards and what the filters ask for, and keeps one line per trajectory; nothing
else of the dataset is held. `apply_filters` drops what was judged, `pipelines.masks.apply_masks`
takes it out of the loss. The filters themselves are in `pipelines.filters`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from pipelines.rewards import Fold, Outcome, fold_trajectories, joined_steps
from pipelines.tables import Frame, as_lazy
from schemas.errors import RolloutError
from schemas.types import with_absent

STEPS = "joined steps"
"""A column that filters' rows may use beside the table's own: see `joined_steps`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """A rule that drops trajectories.

    Attributes:
        name: What a report calls it; unique among the filters of one pass.
        drops: True where a trajectory goes (null: it stays). Sees position (its place in the
            table), instance_id, trajectory_id, return (null: failed or unknown), error and value of
            the trajectories that no filter before has dropped.
        row: What `value` is made of: an expression over the columns of one row, merged or not, and
            `pl.col(STEPS)`.
        fold: How the rows' values become the trajectory's.
        absent_is_null: Whether optional columns that the table lacks are null in `row`; else they
            are refused.
    """

    name: str
    drops: pl.Expr
    row: pl.Expr | None = None
    fold: Fold = pl.Expr.max
    absent_is_null: bool = False


def judge(frame: Frame, filters: Sequence[Filter], outcome: Outcome = "last") -> pl.DataFrame:
    """Apply filters one after the other; each sees what those before it have left.

    Args:
        frame: Rows of whole trajectories, merged or not: the verdicts are the same.
        filters: The rules, in order.
        outcome: Which return of a trajectory (see `trajectory_returns`).

    Returns:
        One line per trajectory, in order of appearance: instance_id, trajectory_id, return, error,
        reason (the name of the filter that drops it; null: it stays).

    Raises:
        RolloutError: `known_column`, `condition`: a filter asks for a column that is not there, or
            cannot be computed; `unique_filter`: two have one name.

    Example:
        >>> judge(frame, [reward_range(minimum=0.5)]).select("trajectory_id", "reason").rows()
        [('a_0', None), ('a_1', 'reward >= 0.5')]
    """
    names = [f.name for f in filters]
    if len(set(names)) < len(names):
        raise RolloutError("unique_filter", "filters", ", ".join(names), "each name once")
    frame = as_lazy(frame)
    frame = frame.with_columns(joined_steps(frame).alias(STEPS))
    features = {}
    for number, rule in enumerate(filters):
        if rule.row is not None:
            if rule.absent_is_null:
                frame = with_absent(frame, rule.row.meta.root_names())
            check_expression(frame, rule.row, rule.name)
            features[f"value_{number}"] = (rule.row, rule.fold)
    left = collect(fold_trajectories(frame, outcome, features), ", ".join(names))
    left = left.with_row_index("position")
    parts = []
    for number, rule in enumerate(filters):
        value = pl.col(f"value_{number}") if rule.row is not None else pl.lit(None)
        goes = left.with_columns(value=value).select(rule.drops.fill_null(value=False)).to_series()
        parts.append(left.filter(goes).with_columns(reason=pl.lit(rule.name)))
        left = left.filter(~goes)
    parts.append(left.with_columns(reason=pl.lit(None, pl.String)))
    columns = ("instance_id", "trajectory_id", "return", "error", "reason")
    return pl.concat(parts).sort("position").select(columns)


def keep(frame: Frame, verdicts: pl.DataFrame) -> pl.LazyFrame:
    """The rows of the trajectories that stay, in order. Streams."""
    frame = as_lazy(frame)
    dropped = verdicts.filter(pl.col("reason").is_not_null())
    if dropped.is_empty():
        return frame
    kept = verdicts.filter(pl.col("reason").is_null())
    return frame.filter(pl.col("trajectory_id").is_in(kept["trajectory_id"].implode()))


def report(verdicts: pl.DataFrame, filters: Sequence[Filter]) -> pl.DataFrame:
    """What each filter found, and what it left: columns of `REPORT_COLUMNS`, a line per filter.

    A group is gone when its last trajectory is.
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
    frame: Frame, filters: Sequence[Filter], outcome: Outcome = "last"
) -> tuple[pl.LazyFrame, pl.DataFrame]:
    """Drop trajectories. The decision is taken now, the rows stream when the result is used.

    A filter that is applied again changes nothing. A list of them may: `zero_variance` finds more
    after a later one has thinned the groups, so put it last.

    Returns:
        The rows that stay, in order; and the report.

    Raises:
        RolloutError: `nothing_left`: there were trajectories, and the filters drop all of them.

    Example:
        >>> rows, counts = apply_filters(scan("rollouts/"), [zero_variance()])
    """
    if not filters:
        return as_lazy(frame), pl.DataFrame(schema=REPORT_COLUMNS)
    verdicts = judge(frame, filters, outcome)
    counts = report(verdicts, filters)
    refuse_nothing(verdicts, counts, "filters")
    return keep(frame, verdicts), counts


def refuse_nothing(verdicts: pl.DataFrame, counts: pl.DataFrame, where: str) -> None:
    """Raise `nothing_left` where every one of some trajectories was dropped."""
    if verdicts.is_empty() or verdicts["reason"].null_count():
        return
    lines = counts.filter(pl.col("num_trajectories_dropped") > 0)
    found = lines.select("filter", "num_trajectories_dropped").rows()
    why = "; ".join(f"{name}: {number} dropped" for name, number in found)
    got = f"0 of {len(verdicts)} trajectories ({why})"
    hint = "loosen the filter that dropped most, or look at the data: rollouts stats DS"
    raise RolloutError("nothing_left", where, got, "at least one", hint)


def check_expression(frame: pl.LazyFrame, expression: pl.Expr, name: str) -> None:
    """Refuse what cannot be computed from the frame's columns, before any row is read.

    Raises:
        RolloutError: `known_column` or `condition`.
    """
    schema = frame.collect_schema()
    for column in expression.meta.root_names():
        if column not in schema:
            names = ", ".join(name for name in schema if name != STEPS)
            hint = f"columns: {names} (a text is written in quotes: '{column}')"
            got = f"column {column!r}"
            raise RolloutError("known_column", name, got, "a column of the dataset", hint)
    collect(pl.DataFrame(schema=schema).lazy().select(expression), name)


def collect(query: pl.LazyFrame, name: str) -> pl.DataFrame:
    """Run a query in the streaming engine; what does not apply to the data is a user's error."""
    try:
        return query.collect(engine="streaming")
    except pl.exceptions.PolarsError as error:
        got = str(error).strip().split("\n")[0]
        expected = "what applies to the columns' types"
        raise RolloutError("condition", name, got, expected, "rollouts inspect DS") from None


def holds(condition: str | pl.Expr) -> pl.Expr:
    """A condition on a row as a Boolean expression: null counts as false.

    Args:
        condition: A Polars expression, or SQL such as `reward > 0 AND agent = 'main'`. An aggregate
            says over what: `max(step_index) OVER (PARTITION BY trajectory_id)`.

    Raises:
        RolloutError: `condition`: it is not SQL, or aggregates over the whole dataset.
    """
    text = condition if isinstance(condition, str) else str(condition)
    if isinstance(condition, str):
        try:
            condition = pl.sql_expr(condition)
        except pl.exceptions.PolarsError as error:
            got = str(error).strip().split("\n")[0]
            raise RolloutError("condition", repr(condition), got, "a condition in SQL") from None
    if _aggregates(_as_json(condition)):
        got, expected = "an aggregate over the whole dataset", "a condition on each row"
        hint = "say over what: max(step_index) OVER (PARTITION BY trajectory_id)"
        raise RolloutError("condition", repr(text), got, expected, hint)
    return pl.when(condition).then(statement=True).otherwise(statement=False)


def _as_json(expression: pl.Expr) -> Any:
    try:
        return json.loads(expression.meta.serialize(format="json"))
    except pl.exceptions.PolarsError:
        return None  # a Python function inside


def _aggregates(node: Any) -> bool:
    """Whether an expression's tree aggregates outside of a window and of lists."""
    if isinstance(node, dict):
        inner = (v for key, v in node.items() if key not in {"Over", "Window", "Eval"})
        return "Agg" in node or any(map(_aggregates, inner))
    return node == "Len" or (isinstance(node, list) and any(map(_aggregates, node)))
