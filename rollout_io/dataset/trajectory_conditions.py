"""Conditions on trajectories, in SQL: `return > 0 AND any(agent = 'checker')`.

A condition sees two kinds of columns. `TRAJECTORY_COLUMNS` belong to the trajectory. All others
belong to its rows, and are read inside the first three of

    any(condition)     true if at least one row matches
    all(condition)     true if every row matches
    last(expression)   the value in the last row
    tool_calls(name)   number of calls of a tool
    tool_errors(name)  number of its calls that failed
    findings(name)     number of findings in a version of findings, of one label with NAME/LABEL

A column of rows outside these is evaluated for each row. If the whole condition then has the same
value in all rows of each trajectory, that is its value. Otherwise it has two readings and is
refused. Null is false.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from rollout_io.dataset.conditions import (
    POLARS_ERRORS,
    check_columns,
    condition_of,
    holds,
    parsed,
    refused,
    types_in,
)
from rollout_io.dataset.storage import PathLike
from rollout_io.dataset.trajectory_facts import (
    CALLED,
    Fold,
    count_calls,
    earned_reward,
    fold_return,
    num_sampled_tokens,
    num_steps,
    task_start,
    tool_calls,
)
from rollout_io.dataset.versions import count_findings
from schemas.columns import TASK
from schemas.errors import ConfigError, count
from schemas.metadata import Outcome
from schemas.types import with_absent

COMPUTED = {
    "return": pl.Float64,
    "num_rows": pl.Int32,
    "num_turns": pl.Int32,
    "prompt_tokens": pl.Int64,
    "response_tokens": pl.Int64,
    "trained_tokens": pl.Int64,
    "longest_row_tokens": pl.Int64,
    "agents": pl.String,
    "num_agents": pl.Int32,
    "task_text": pl.String,
    "num_tool_calls": pl.Int32,
    "num_tool_errors": pl.Int32,
}
"""Columns that `trajectory_columns` computes from the rows of a trajectory (docs/filters.md)."""

TRAJECTORY_COLUMNS = ("instance_id", TASK, "repetition_id", "trajectory_id", "error", *COMPUTED)
"""Columns that belong to the trajectory: `error` is the first error in its rows, and a null task is
`instance_id`."""

task_of = pl.coalesce(TASK, "instance_id")
"""The task of a row."""

_NEEDED = ("error", TASK, *CALLED)
"""Optional columns from which others are computed."""

_FOLDS: dict[str, Fold] = {"any": pl.Expr.any, "all": pl.Expr.all, "last": pl.Expr.last}
_COUNTS = {"tool_calls": False, "tool_errors": True}
TOOL_FUNCTIONS = tuple(f"{name}(" for name in _COUNTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryCondition:
    """A parsed condition.

    Attributes:
        text: The condition, for messages.
        outer: The condition over columns and `parts`.
        parts: Expressions over the columns of one row, by name, and how to combine their values.
    """

    text: str
    outer: pl.Expr
    parts: Mapping[str, tuple[pl.Expr, Fold]]

    @classmethod
    def parse(cls, condition: str | pl.Expr, dataset: PathLike = "") -> TrajectoryCondition:
        """Parse a condition, without evaluating a row.

        Args:
            condition: SQL, or a Polars expression over the columns of a row and
                `TRAJECTORY_COLUMNS`.
            dataset: Path of the dataset whose findings `findings` counts.

        Raises:
            ConfigError: `condition`: the text is not SQL, or is not a condition on a trajectory.
            InputError: `reward_version`: the dataset has no such findings, or has changed since.
        """
        if isinstance(condition, pl.Expr):
            return cls(text=str(condition), outer=condition_of(condition), parts={})
        outer, functions = parsed(condition)
        parts = {
            name: _part(function, condition_of(part, condition), os.fspath(dataset))
            for name, (function, part) in functions.items()
        }
        return cls(text=condition, outer=condition_of(outer, condition), parts=parts)

    @property
    def outer_names(self) -> list[str]:
        """Columns outside `any`, `all` and `last`."""
        names = dict.fromkeys(self.outer.meta.root_names())
        return [name for name in names if name not in self.parts]

    @property
    def names(self) -> list[str]:
        """All columns that the condition reads."""
        inner = (name for row, _ in self.parts.values() for name in row.meta.root_names())
        return list(dict.fromkeys([*self.outer_names, *inner]))


def _part(function: str, part: pl.Expr, dataset: str) -> tuple[pl.Expr, Fold]:
    """Return what `any`, `tool_calls` or another function reads of rows, and its fold."""
    if function == "findings":
        counts = count_findings(dataset, pl.select(part).item())
        number = pl.col("trajectory_id").replace_strict(
            *counts, default=None, return_dtype=pl.Int64
        )
        return number, pl.Expr.first
    if function in _COUNTS:
        name = pl.select(part).item()
        return tool_calls(), lambda calls: count_calls(calls, name, failed=_COUNTS[function])
    return (part if function == "last" else holds(part)), _FOLDS[function]


def trajectory_columns(frame: pl.LazyFrame, outcome: Outcome) -> dict[str, tuple[pl.Expr, Fold]]:
    """Return the expressions over rows that make `COMPUTED`, and how to combine their values.

    Args:
        frame: The rows; optional columns that they lack are null.
        outcome: How returns are computed.
    """
    frame = with_absent(frame, _NEEDED)

    def returned(rows: pl.Expr) -> pl.Expr:
        total = fold_return(rows.struct.field("earned"), outcome)
        return pl.when(rows.struct.field("error").is_null().all()).then(total)

    def names(agents: pl.Expr) -> pl.Expr:
        distinct = agents.drop_nulls().unique(maintain_order=True)
        return pl.when(distinct.len() > 0).then(distinct.str.join(", "))

    earned = pl.struct(earned=earned_reward(frame, outcome), error="error")
    prompt, response = (pl.col(n).list.len() for n in ("prompt_token_ids", "response_ids"))
    task = pl.col("messages").map_batches(_task_starts, return_dtype=pl.String, is_elementwise=True)
    columns: dict[str, tuple[pl.Expr, Fold]] = {
        "return": (earned, returned),
        "num_rows": (pl.col("trajectory_id"), pl.Expr.len),
        "num_turns": (num_steps(frame), pl.Expr.sum),
        "prompt_tokens": (prompt, pl.Expr.sum),
        "response_tokens": (num_sampled_tokens(frame), pl.Expr.sum),
        "trained_tokens": (pl.col("loss_mask").list.sum(), pl.Expr.sum),
        "longest_row_tokens": (prompt + response, pl.Expr.max),
        "agents": (pl.col("agent"), names),
        "num_agents": (pl.col("agent"), pl.Expr.n_unique),
        "task_text": (task, pl.Expr.first),
        "num_tool_calls": (tool_calls(), count_calls),
        "num_tool_errors": (tool_calls(), lambda calls: count_calls(calls, failed=True)),
    }
    # Counts are of 64 bits: a difference of unsigned ones would wrap around.
    return {
        name: (row, fold if kind not in (pl.Int32, pl.Int64) else _signed(fold))
        for (name, (row, fold)), kind in zip(columns.items(), COMPUTED.values(), strict=True)
    }


def _signed(fold: Fold) -> Fold:
    return lambda rows: fold(rows).cast(pl.Int64)


def _task_starts(messages: pl.Series) -> pl.Series:
    return pl.Series(messages.name, [task_start(text) for text in messages], pl.String)


def row_values(
    frame: pl.LazyFrame,
    condition: TrajectoryCondition,
    computed: Mapping[str, tuple[pl.Expr, Fold]],
    where: str = "",
    key: str = "trajectory_id",
) -> pl.LazyFrame:
    """Evaluate a condition on each row of complete trajectories.

    Only the columns that stand outside `any`, `all` and `last` are kept in memory; those inside are
    streamed.

    Args:
        frame: The rows.
        condition: The condition.
        computed: Columns to compute (see `trajectory_columns`).
        where: Location to name in messages; "": the condition.
        key: Column that identifies the trajectory.

    Returns:
        `key` and `holds` (Boolean, never null), in order.

    Raises:
        ConfigError: `known_column`: the condition uses an unknown column; `condition`: a type does
            not match.
    """
    where, names = where or repr(condition.text), condition.names
    for name in sorted({*names} & {*computed} & {*frame.collect_schema()}):
        finding = f"the dataset has its own column {name!r}, which conditions compute"
        raise ConfigError("condition", where, finding, hint="rename the column of the dataset")
    inner = [name for name in names if name not in condition.outer_names]
    for name in sorted({*inner} & {*computed}):
        finding = f"{name} belongs to the trajectory, not to its rows"
        raise ConfigError(
            "condition", where, finding, hint=f"write {name} outside any, all and last"
        )
    schema = frame.collect_schema()
    present = list(with_absent(frame, names).collect_schema())
    frame = with_absent(frame, [*names, *_NEEDED])
    schema = frame.collect_schema()
    check_columns(condition.outer_names, [*present, *computed], where, condition.text)
    check_columns(inner, present, where, condition.text)
    folded = {name: computed[name] for name in condition.outer_names if name in computed}
    stored: dict[str, tuple[pl.Expr, Fold]] = {
        "error": (pl.col("error"), _first_error),
        TASK: (task_of, pl.Expr.last),
    }
    folded |= {name: stored[name] for name in condition.outer_names if name in stored}
    folded |= condition.parts
    empty = pl.DataFrame(schema=schema).lazy()
    try:  # zero rows show type errors without reading data
        _evaluated(empty, condition, folded, key).collect()
    except POLARS_ERRORS as error:
        raise refused(error, where, types_in(names, schema)) from None
    return _evaluated(frame, condition, folded, key)


def _evaluated(
    frame: pl.LazyFrame,
    condition: TrajectoryCondition,
    folded: Mapping[str, tuple[pl.Expr, Fold]],
    key: str,
) -> pl.LazyFrame:
    bare = dict.fromkeys([key, *(n for n in condition.outer_names if n not in folded)])
    rows = frame.select(*bare, **{name: row for name, (row, _) in folded.items()})
    whole = rows.with_columns(
        **{name: fold(pl.col(name)).over(key) for name, (_, fold) in folded.items()}
    )
    return whole.select(key, holds=holds(condition.outer))


def _first_error(errors: pl.Expr) -> pl.Expr:
    return errors.drop_nulls().first()


def evaluate(
    frame: pl.LazyFrame, condition: TrajectoryCondition, outcome: Outcome, where: str = ""
) -> pl.DataFrame:
    """Evaluate a condition on each trajectory.

    Args:
        frame: Rows of complete trajectories.
        condition: The condition.
        outcome: How returns are computed.
        where: Location to name in messages; "": the condition.

    Returns:
        trajectory_id, and whether some and whether every row matches; in order of appearance. They
        are equal unless the condition has two readings: see `decided`.

    Raises:
        ConfigError: see `row_values`.

    Example:
        A solved trajectory of three steps with rewards 0, 0 and 1:

        >>> for text in ("reward < 1", "return < 1", "any(reward < 1)", "last(reward) < 1"):
        ...     print(evaluate(frame, TrajectoryCondition.parse(text), "last").rows())
        [('a_0', True, False)]
        [('a_0', False, False)]
        [('a_0', True, True)]
        [('a_0', False, False)]
    """
    where = where or repr(condition.text)
    rows = row_values(frame, condition, trajectory_columns(frame, outcome), where)
    value = pl.col("holds")
    values = rows.group_by("trajectory_id", maintain_order=True).agg(
        some=value.any(), every=value.all()
    )
    try:
        return values.collect(engine="streaming")
    except POLARS_ERRORS as error:
        types = types_in(condition.names, frame.collect_schema())
        raise refused(error, where, types) from None


def decided(values: pl.DataFrame, condition: TrajectoryCondition, where: str = "") -> pl.Series:
    """Return whether each trajectory matches.

    Args:
        values: Trajectories, with the columns of `evaluate`.
        condition: The condition.
        where: Location to name in messages; "": the condition.

    Raises:
        ConfigError: `condition`: some rows of a trajectory match, and others do not.
    """
    split = values.filter(pl.col("some") & ~pl.col("every"))
    if split.is_empty():
        return values["every"]
    first = f"trajectory {split['trajectory_id'][0]!r}"
    more = f" and {count(len(split) - 1, 'other')}" if len(split) > 1 else ""
    finding = f"{first}{more} match in some rows and not in others"
    raise ConfigError(
        "condition", where or repr(condition.text), finding, hint=_readings(condition)
    )


def _readings(condition: TrajectoryCondition) -> str:
    """Describe how to write what an ambiguous condition may mean."""
    rows = [name for name in condition.outer_names if name not in TRAJECTORY_COLUMNS]
    text = condition.text if not condition.parts else f"... {rows[0]} ..." if rows else "..."
    hint = f"write any({text}) if one row suffices, or all({text}) if every row must match"
    return f"{hint}; for a trajectory's reward write return" if "reward" in rows else hint
