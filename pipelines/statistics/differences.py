"""Compare two sets of attempts at the same tasks: what changed, for certain or perhaps by chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from pipelines.filtering.filters import RAN_OUT_OF_TOKENS
from pipelines.rewards import is_above, is_rounding
from pipelines.statistics.attempts import with_names
from pipelines.statistics.resampling import (
    discoveries,
    least_changed,
    mean_intervals,
    permutation_test,
)

PASSED = "pass rate"
PASSED_OF_ALL = "pass rate, failed as 0"
DIRECTIONS = {
    **dict.fromkeys(("return", PASSED, PASSED_OF_ALL), 1),
    **dict.fromkeys(("failed", "repeated 4-grams", "tool errors"), -1),
    **{f"stopped: {reason}": -1 for reason in RAN_OUT_OF_TOKENS},
}
"""1 for numbers that should rise, -1 for those that should fall; of others, it is unknown."""

SHARES = (PASSED, "failed", "repeated 4-grams", "tool errors", "stopped: ")
"""How the names of numbers between 0 and 1 begin."""

_IDS = ("instance_id", "trajectory_id", "error", "version", "greedy")
_MOST_TASKS = 5
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """Result of `differences`.

    Attributes:
        numbers: One line per number: name; direction (1: should rise, -1: should fall, null:
            unknown); a, b (means over the tasks that have it in both), change (b - a), low and high
            (95 % interval of the change; null: unbounded), is_certain (see `differences`);
            num_tasks, num_attempts_a, num_attempts_b (that these means rest on), num_unknown_a,
            num_unknown_b (attempts at the tasks in both for which it is unknown).
        tasks: One line per task in both: instance_id, num_a, num_b (attempts with a known return),
            num_unknown_a, num_unknown_b (others), return_a, return_b (means), verdict (win, loss,
            tie, unknown; of B), p (that chance alone makes such a difference), is_certain (after
            control of false discoveries).
        num_only_a, num_only_b: Number of tasks in one of the two only.
        num_copies_a, num_copies_b: Number of attempts that were not counted because they repeat a
            greedy attempt.
        least_changed: Number of tasks that must change completely before one of them can be
            certain, given their numbers of attempts; null: none can be.
        suspicions: Witnesses against a higher return: see `suspicions`.
    """

    numbers: pl.DataFrame
    tasks: pl.DataFrame
    num_only_a: int
    num_only_b: int
    num_copies_a: int
    num_copies_b: int
    least_changed: int | None
    suspicions: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self) | {"numbers": self.numbers.to_dicts(), "tasks": self.tasks.to_dicts()}


def differences(
    a: pl.DataFrame,
    b: pl.DataFrame,
    *,
    rate: float = 0.05,
    directions: Mapping[str, int] = DIRECTIONS,
) -> Differences:
    """Compare the attempts of two datasets, task by task.

    Means are over a task's attempts, then over tasks; intervals are paired (`mean_intervals`), and
    returns that differ by rounding are equal (`are_equal`). Failed attempts count only in `failed`
    and in `pass rate, failed as 0`. Copies of a greedy attempt are one attempt. Numbers are certain
    if their intervals, widened so that all of them hold together in 95 % of comparisons
    (Bonferroni), do not contain 0. Of the tasks that are called certain, at most `rate` are
    expected to differ by chance only.

    Args:
        a: Result of `pipelines.statistics.attempts.attempts`.
        b: The other one.
        rate: False discovery rate.
        directions: Numbers that should rise (1) or fall (-1).

    Example:
        >>> found = differences(attempts(scan("A")), attempts(scan("B")))
        >>> found.tasks.filter(pl.col("is_certain") & (pl.col("verdict") == "loss"))
    """
    named = with_names(a, b)
    has_failed = any(one["error"].count() for one in named)
    left, right = (
        _per_task(one, label, has_failed=has_failed) for one, label in zip(named, "ab", strict=True)
    )
    both = left.join(right, on=["name", "instance_id"], maintain_order="left")
    change = pl.col("b") - pl.col("a")
    size = pl.max_horizontal(pl.col("a", "b").abs())
    is_same: pl.Expr = is_rounding(change.abs(), size)
    change = pl.when(change.is_finite()).then(change)  # a mean of huge returns may overflow
    both = both.with_columns(change=pl.when(is_same).then(0.0).otherwise(change))
    numbers, returns = _numbers(both, directions), both.filter(name="return")
    return Differences(
        numbers=numbers,
        tasks=_tasks(returns, rate),
        num_only_a=a["instance_id"].n_unique() - len(returns),
        num_only_b=b["instance_id"].n_unique() - len(returns),
        num_copies_a=int(returns["num_copies_a"].sum()),
        num_copies_b=int(returns["num_copies_b"].sum()),
        least_changed=least_changed(returns.select("num_a", "num_b").rows(), rate),
        suspicions=suspicions(numbers, both),
    )


def _per_task(lines: pl.DataFrame, label: str, *, has_failed: bool) -> pl.DataFrame:
    """Return the attempts at each task in each number."""
    failed, passed = pl.col("error").is_not_null(), is_above(pl.col("return"), 0.0)
    of_all = pl.when(failed).then(statement=False).otherwise(passed)
    rates = {PASSED: passed} | ({PASSED_OF_ALL: of_all} if has_failed else {}) | {"failed": failed}
    others = [name for name in lines.columns if name not in {*_IDS, "return"}]
    attempts = lines.select(
        "instance_id",
        # A greedy attempt repeats itself: its copies are no further evidence.
        pl.coalesce("^greedy$", "trajectory_id").alias("answer"),
        pl.len().over("instance_id").alias("num_all"),
        *(pl.when(pl.col(n).is_finite()).then(n).alias(n) for n in ("return", *others)),
        *(number.cast(pl.Float64).alias(name) for name, number in rates.items()),
    )
    distinct = attempts.group_by("instance_id", "answer", maintain_order=True).agg(pl.all().mean())
    sizes = [pl.col("num_all").first(), pl.len().alias("num_distinct")]
    numbers = (
        pl.struct(pl.col(name).drop_nulls().implode().alias("values"), *sizes).alias(name)
        for name in ("return", *rates, *others)
    )
    groups = distinct.group_by("instance_id", maintain_order=True).agg(numbers)
    table = groups.unpivot(index="instance_id", variable_name="name").unnest("value")
    num, num_distinct = pl.col("values").list.len(), pl.col("num_distinct")
    return table.select(
        *("name", "instance_id"),
        pl.col("values").list.mean().alias(label),
        pl.col("values").alias(f"values_{label}"),
        num.cast(pl.Int64).alias(f"num_{label}"),
        (num_distinct - num).cast(pl.Int64).alias(f"num_unknown_{label}"),
        (pl.col("num_all") - num_distinct).cast(pl.Int64).alias(f"num_copies_{label}"),
    )


def _numbers(both: pl.DataFrame, directions: Mapping[str, int]) -> pl.DataFrame:
    is_known = pl.col("change").is_not_null()
    table = both.group_by("name", maintain_order=True).agg(
        pl.col("a", "b", "change").filter(is_known).mean(),
        pl.col("change").alias("changes"),
        is_known.sum().cast(pl.Int64).alias("num_tasks"),
        pl.col("num_a", "num_b").filter(is_known).sum().name.replace("num_", "num_attempts_"),
        pl.col("num_unknown_a", "num_unknown_b").sum(),
        is_known=pl.sum_horizontal(pl.col("num_a", "num_b").sum()) > 0,
    )
    table = table.filter("is_known")
    names = table["name"].to_list()
    shape = (len(names), both["instance_id"].n_unique())
    changes = np.array(table["changes"].to_list(), np.float64).reshape(shape).T
    bounds = mean_intervals(changes)
    num_bounded = int(np.isfinite(bounds[:, 0]).sum())
    wider = mean_intervals(changes, 1 - (1 - LEVEL) / max(num_bounded, 1))
    most = np.array([1.0 if name.startswith(SHARES) else np.inf for name in names]).reshape(-1, 1)
    ends = np.where(np.isinf(bounds), np.nan, bounds.clip(-most, most))
    return table.select(
        pl.col("name"),
        pl.Series("direction", [directions.get(name) for name in names], dtype=pl.Int8),
        *("a", "b", "change"),
        pl.Series("low", ends[:, 0]).fill_nan(None),
        pl.Series("high", ends[:, 1]).fill_nan(None),
        pl.Series("is_certain", (wider[:, 0] > 0) | (wider[:, 1] < 0)),
        pl.col("^num_.*$"),
    )


def _tasks(returns: pl.DataFrame, rate: float) -> pl.DataFrame:
    # Tasks with as many attempts share their splits.
    ordered = returns.with_row_index("place").sort("num_a", "num_b").rows(named=True)
    chances = np.empty(len(ordered))
    for task in ordered:
        sides = (np.array(task[name]) for name in ("values_a", "values_b"))
        chances[task["place"]] = permutation_test(*sides)
    verdicts = {1.0: "win", -1.0: "loss", 0.0: "tie"}
    return returns.select(
        *("instance_id", "num_a", "num_b", "num_unknown_a", "num_unknown_b"),
        return_a="a",
        return_b="b",
        verdict=pl.col("change").sign().replace_strict(verdicts, default="unknown"),
        p=pl.Series(chances, dtype=pl.Float64),
        is_certain=pl.Series(discoveries(chances, rate), dtype=pl.Boolean),
    )


def suspicions(numbers: pl.DataFrame, both: pl.DataFrame) -> list[dict[str, Any]]:
    """Find second witnesses that contradict a higher return: signs of a hacked reward.

    If the return rose for certain, each number that moved against its direction for certain is one.
    Both are judged over all tasks: choosing those whose return rose would choose their noise, too.

    Args:
        numbers: `Differences.numbers`.
        both: name, instance_id and change of each number at each task.

    Returns:
        The line of each such number, with `tasks`: the five that contradict most, of those whose
        return rose.
    """
    certain = numbers.filter("is_certain")
    if certain.filter(pl.col("name") == "return", pl.col("change") > 0).is_empty():
        return []
    rose = both.filter(pl.col("name") == "return", pl.col("change") > 0).select("instance_id")
    lines = []
    for line in certain.filter(pl.col("change") * pl.col("direction") < 0).iter_rows(named=True):
        wrong = pl.col("change") * -line["direction"]
        tasks = both.filter(pl.col("name") == line["name"], wrong > 0)
        tasks = tasks.join(rose, on="instance_id", how="semi", maintain_order="left")
        worst = tasks.sort(wrong, descending=True, maintain_order=True).head(_MOST_TASKS)
        lines.append(line | {"tasks": worst["instance_id"].to_list()})
    return lines
