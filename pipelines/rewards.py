"""Place rewards on steps and tokens, also those of a reward version, and compute trajectory returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.frames import Frame, as_lazy, set_column
from pipelines.merging.segments import is_joined, segment_rewards
from rollout_io.dataset.trajectory_facts import Fold, earned_reward, fold_return, has_segment
from rollout_io.dataset.versions import REWARDS, read_current
from schemas.errors import InputError, InvariantError
from schemas.metadata import Outcome as Outcome
from schemas.numpy_arrays import to_numpy
from schemas.ragged import BoolArray, IntArray, Ragged, gather, list_lengths, offsets_of
from schemas.types import as_table, with_absent, without_views

FloatArray = npt.NDArray[np.float64]

# Relative and absolute tolerance for equal returns (see `are_equal`): far above the rounding error
# of a sum of float64 rewards, far below any intended difference between rewards.
_RELATIVE_SPREAD, _LEAST_SPREAD = 1e-6, 1e-12


def place_outcomes(frame: Frame, outcomes: Frame) -> pl.LazyFrame:
    """Set the reward of each trajectory's last step to its outcome, and earlier rewards to 0.0.

    Drops an existing `rewards` column, which would no longer match; call `place_rewards` to
    recreate it. In a merged row, the row's reward goes to its last step.

    Args:
        frame: Rows of steps, merged or not.
        outcomes: Columns `trajectory_id` (unique) and `reward`; collected immediately. A trajectory
            that is missing here or failed gets null, because an unknown outcome is not 0.

    Raises:
        InputError: `unique_outcome`: a trajectory_id occurs twice.
        InvariantError: `columns_and_types`: a column is missing, or a reward is not a number.

    Example:
        Outcome 1.0 for a trajectory of three steps:

        >>> place_outcomes(steps, outcomes).select("reward").collect().to_series().to_list()
        [0.0, 0.0, 1.0]
    """
    frame = as_lazy(frame)
    _check_columns(frame, "table", ("trajectory_id", "is_last_step"))
    given = as_lazy(outcomes)
    _check_columns(given, "outcomes", ("trajectory_id", "reward"))
    try:
        outcome = given.select("trajectory_id", pl.col("reward").cast(pl.Float64)).collect()
    except pl.exceptions.PolarsError as error:
        finding = " ".join(str(error).split("\n")[0].split())
        expected = "numbers in the column 'reward'"
        raise InvariantError("columns_and_types", "outcomes", finding, expected) from error
    repeated = outcome.filter(pl.col("trajectory_id").is_duplicated())
    if len(repeated):
        name = repeated["trajectory_id"][0]
        finding = f"{name!r} more than once ({len(repeated)} rows have repeated ids)"
        raise InputError("unique_outcome", "outcomes", finding, "unique trajectory_ids")
    failed = pl.col("error").is_not_null() if _has(frame, "error") else pl.lit(value=False)
    # reward * 0.0, not 0.0: earlier steps of a trajectory without an outcome remain null.
    value = pl.when("is_last_step").then("reward").otherwise(pl.col("reward") * 0.0)
    joined = frame.drop("reward", "rewards", strict=False).join(
        outcome.lazy(), on="trajectory_id", how="left", maintain_order="left"
    )
    placed = joined.with_columns(pl.when(failed).then(None).otherwise(value).alias("reward"))
    if not has_segment(frame, "reward"):
        return placed
    return placed.with_columns(_over_rows(placed, ("segments", "reward"), _end_rewards, "segments"))


def _check_columns(frame: pl.LazyFrame, where: str, names: Sequence[str]) -> None:
    columns = frame.collect_schema().names()
    for name in names:
        if name not in columns:
            finding, expected = f"the columns {', '.join(columns)}", f"a column {name!r}"
            raise InvariantError("columns_and_types", where, finding, expected)


def place_rewards(frame: Frame) -> pl.LazyFrame:
    """Convert each scalar `reward` to per-token `rewards`, all on the step's last token.

    In a merged row, each step's reward is placed at the end of that step's segment. A null reward
    gives null `rewards`.

    Example:
        A merged row with response [3, 9, 4], whose two steps earned 0.5 and 1.0:

        >>> place_rewards(row).select("rewards").collect().item().to_list()
        [0.5, 0.0, 1.0]
    """
    frame = as_lazy(frame)
    if not _has(frame, "reward"):
        hint = "add it with place_outcomes(frame, outcomes)"
        raise InvariantError("columns_and_types", "table", "there is no column 'reward'", hint=hint)

    names = ("response_ids", "reward", "segments")
    return frame.with_columns(_over_rows(frame, names, placed_rewards, "rewards"))


def place_rewards_table(table: pa.Table) -> pa.Table:
    """Apply `place_rewards` to an Arrow table that has a `reward` column."""
    return set_column(table, "rewards", placed_rewards(table))


def placed_rewards(table: pa.Table) -> pa.Array:
    """[N] Return the per-token rewards of a table's rows: float64, null where `reward` is."""
    responses = Ragged.from_arrow(table.column("response_ids"))
    reward = table.column("reward")
    known = to_numpy(reward.is_valid()) & (responses.lengths > 0)
    split = is_joined(table) if "segments" in table.column_names else np.zeros_like(known)

    values = np.zeros(len(responses.values), np.float64)
    single = known & ~split
    values[responses.offsets[1:][single] - 1] = to_numpy(reward)[single]
    if split.any():
        ends, earned, row = segment_rewards(table, responses)
        inside = (known & split)[row]
        values[ends[inside]] = earned[inside]
    lengths = np.where(known, responses.lengths, 0)
    kept = gather(values, responses.offsets[:-1], lengths)
    return Ragged(kept, offsets_of(lengths), known).to_arrow(pa.float64())


def place_token_rewards(frame: Frame, column: str = "rewards") -> pl.LazyFrame:
    """Set `rewards` from a column of per-token rewards, and `reward` to their sum.

    In a merged row, each step earns the rewards of the tokens after the previous step, up to its
    own end. The last step also earns the rewards of all later tokens. A null list makes both
    columns null.

    Args:
        frame: Rows of steps, merged or not.
        column: Column with a list of numbers, one per response token.

    Example:
        >>> rows = place_token_rewards(row.with_columns(rewards=pl.lit([0.5, 0.0, 1.0])))
        >>> rows.select("reward").collect().item()
        1.5
    """
    frame = as_lazy(frame)
    if not _has(frame, column):
        raise InvariantError("columns_and_types", "table", f"there is no column {column!r}")
    given = pl.col(column).cast(pl.List(pl.Float64))
    total = pl.when(given.is_not_null()).then(given.list.sum())
    placed = frame.with_columns(given.alias("rewards"), total.alias("reward"))
    if not has_segment(frame, "reward"):
        return placed
    names = ("segments", "rewards")
    return placed.with_columns(_over_rows(placed, names, _summed_rewards, "segments"))


def trajectory_returns(frame: Frame, outcome: Outcome = "last") -> pl.LazyFrame:
    """Compute the return of each trajectory, in order of appearance.

    Returns are defined on steps, so merging does not change them: `last` is the last step's
    reward, even if that step ends a merged row; `sum` is the sum over all steps.

    Returns:
        Columns instance_id, trajectory_id, return (null if unknown or failed), error.

    Example:
        A merged row whose steps earned 0.5 and 1.0 (its `reward` is 1.5):

        >>> trajectory_returns(row, "last").collect()["return"].to_list()
        [1.0]
        >>> trajectory_returns(row, "sum").collect()["return"].to_list()
        [1.5]
    """
    return fold_trajectories(frame, outcome, {})


def fold_trajectories(
    frame: Frame, outcome: Outcome, features: Mapping[str, tuple[pl.Expr, Fold]]
) -> pl.LazyFrame:
    """Compute `trajectory_returns` and further columns in one pass over the rows.

    Args:
        frame: Rows of complete trajectories.
        outcome: How the return is computed.
        features: Additional columns by name: an expression for the value of a row, and an
            aggregation over a trajectory's rows.
    """
    frame = as_lazy(frame)
    error = pl.col("error") if _has(frame, "error") else pl.lit(None, pl.String)
    final, value = earned_reward(frame, outcome), fold_return(pl.col("return"), outcome)
    rows = {name: row for name, (row, _) in features.items()}
    folded = {name: fold(pl.col(name)) for name, (_, fold) in features.items()}
    return (
        frame.select("instance_id", "trajectory_id", **{"return": final, "error": error}, **rows)
        .group_by("instance_id", "trajectory_id", maintain_order=True)
        .agg(value, pl.col("error").drop_nulls().first(), **folded)
        .with_columns(pl.when(pl.col("error").is_null()).then("return").alias("return"))
    )


def is_best(num: int = 1) -> pl.Expr:
    """True for the `num` highest returns of each `instance_id` (ties: the first); false if unknown.

    Example:
        Returns [0, 1, 1, null] of one group: [False, True, False, False].
    """
    known = pl.when(pl.col("return").is_finite()).then("return")
    rank = known.rank("ordinal", descending=True).over("instance_id")
    return (rank <= num).fill_null(value=False)


def are_equal(returns: pl.Expr) -> pl.Expr:
    """True if two or more values are known, and they differ at most by rounding errors.

    Sums of rewards have rounding errors: values are treated as equal if they differ by at most one
    part in a million, or by at most 1e-12. Null and NaN are unknown.

    Example:
        >>> pl.select(are_equal(pl.lit(pl.Series([0.3, 0.1 + 0.2, None])))).item()
        True
    """
    known = returns.fill_nan(None)
    equal: pl.Expr = is_rounding(known.max() - known.min(), known.abs().max())
    return (known.count() > 1) & equal


def is_rounding(spread: Any, size: Any) -> Any:
    """True if a difference between values of this size is a rounding error, as in `are_equal`.

    Example:
        >>> is_rounding(0.1 + 0.2 - 0.3, 0.3)
        True
    """
    # < and not <=: an infinite difference is none of rounding.
    return (spread < _RELATIVE_SPREAD * size) | (spread <= _LEAST_SPREAD)


def is_above(value: pl.Expr, bar: pl.Expr | float) -> pl.Expr:
    """True if a value is higher than a bar by more than a rounding error; null if it is unknown.

    Example:
        >>> pl.select(is_above(pl.lit(0.1 + 0.2), 0.3)).item()
        False
    """
    least = pl.lit(bar, pl.Float64) if isinstance(bar, float) else bar
    is_equal: pl.Expr = is_rounding(value - least, pl.max_horizontal(value.abs(), least.abs()))
    return (value > least) & ~is_equal


def mean_of(values: pl.Series) -> float | None:
    """Compute the mean of numbers, even if their sum overflows; None if there are none.

    Example:
        >>> mean_of(pl.Series([1e308, 1e308]))
        1e+308
    """
    size: Any = values.abs().max()
    # A power of two: scaling rounds nothing.
    scale = 2.0**64 if size is not None and size > 1e300 else 1.0
    mean: Any = (values / scale).mean()
    return None if mean is None else mean * scale


def _over_rows(
    frame: pl.LazyFrame,
    names: tuple[str, ...],
    transform: Callable[[pa.Table], pa.Array | pa.ChunkedArray],
    out: str,
) -> pl.Expr:
    """Compute a column from other columns with a row-wise function on Arrow tables.

    Works in the streaming engine.
    """

    def apply(rows: pl.Series) -> pl.Series:
        column = pl.Series(out, transform(as_table(rows.struct.unnest())))
        return column if column.dtype == kind else column.cast(kind)

    schema = frame.collect_schema()
    kind = schema[out] if out == "segments" else pl.List(pl.Float64())
    used = pl.struct(name for name in names if name in schema)
    return used.map_batches(apply, return_dtype=kind, is_elementwise=True).alias(out)


def _end_rewards(table: pa.Table) -> pa.ListArray:
    """Build `segments` in which a merged row's reward is on its last step, and 0 on all others."""
    segments = _flat_segments(table)
    reward = pc.fill_null(table.column("reward"), 0.0).to_numpy()
    values = np.where(segments.ends_row, reward[segments.row], 0.0)
    return _with_rewards(table, segments, values, known=table.column("reward").is_valid())


def _summed_rewards(table: pa.Table) -> pa.ListArray:
    """Build `segments` in which each step has the sum of the `rewards` since the previous step."""
    segments = _flat_segments(table)
    rewards = Ragged.from_arrow(table.column("rewards"))
    end = np.where(segments.ends_row, rewards.lengths[segments.row], segments.end)
    end = rewards.offsets[segments.row] + np.minimum(end, rewards.lengths[segments.row])
    token = np.arange(len(rewards.values))
    # Drop the tokens of rows without segments: searchsorted would assign them to other rows.
    row_has_some = np.bincount(segments.row, minlength=table.num_rows) > 0
    token = token[row_has_some[rewards.row_of(token)]]
    owner = np.searchsorted(end, token, side="right")
    values = np.bincount(owner, rewards.values[token], minlength=len(end)).astype(np.float64)
    return _with_rewards(table, segments, values, known=pa.array(rewards.valid))


@dataclass(frozen=True, slots=True)
class _Segments:
    """All S segments of a table, flattened.

    Attributes:
        row: [S] row of each segment.
        end: [S] end of each segment in its row's response.
        ends_row: [S] true for the last segment of a row.
    """

    row: IntArray
    end: IntArray
    ends_row: BoolArray


def _flat_segments(table: pa.Table) -> _Segments:
    column = table.column("segments")
    lengths = list_lengths(column)
    row = np.repeat(np.arange(len(lengths)), lengths)
    flat = pc.list_flatten(column)
    start, length = (pc.struct_field(flat, name).to_numpy() for name in ("start", "length"))
    return _Segments(row, (start + length).astype(np.int64), np.append(row[1:] != row[:-1], True))


def _with_rewards(
    table: pa.Table, segments: _Segments, values: FloatArray, *, known: pa.Array
) -> pa.ListArray:
    """Build `segments` with new rewards in merged rows; null where the row's reward is unknown."""
    column = without_views(table.select(["segments"])).column(0).combine_chunks()
    flat = pc.list_flatten(column)
    merged = pa.array(is_joined(table)[segments.row])
    unknown = ~np.asarray(known)[segments.row]
    made = pa.array(values, pa.float64(), mask=unknown)
    fields = {field.name: pc.struct_field(flat, [field.name]) for field in flat.type}
    fields["reward"] = pc.if_else(merged, made, fields["reward"].cast(pa.float64()))
    structs = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    offsets = offsets_of(np.bincount(segments.row, minlength=table.num_rows)).astype(np.int32)
    mask = None if column.null_count == 0 else column.is_null()
    return pa.ListArray.from_arrays(offsets, structs, mask=mask)


def _has(frame: pl.LazyFrame, name: str) -> bool:
    return name in frame.collect_schema()


UNSCORED = "reward {}: "
"""How the error of a trajectory begins that has no reward in the version of that name."""


def with_version(frame: pl.LazyFrame, dataset: str, name: str) -> pl.LazyFrame:
    """Replace the rewards of a dataset's rows by those of a version.

    A trajectory that has no reward in the version becomes a failed one, with the version's error.

    Args:
        frame: Rows of the dataset.
        dataset: Its path.
        name: Name of the version.

    Raises:
        InputError: `reward_version`: there is no such version, or the dataset has trajectories that
            it does not have.

    Example:
        >>> rows = with_version(scan("runs/shop"), "runs/shop", "strict")
    """
    scores = read_current(dataset, name, REWARDS, frame)
    errors = scores.filter(pl.col("reward").is_null()).select(
        "trajectory_id", unscored=pl.lit(UNSCORED.format(name)) + pl.col("error")
    )
    rows = with_absent(frame, ["error"]).join(
        errors.lazy(), on="trajectory_id", how="left", maintain_order="left"
    )
    rows = rows.with_columns(error=pl.coalesce("error", "unscored")).drop("unscored")
    return place_outcomes(rows, scores.select("trajectory_id", "reward"))
