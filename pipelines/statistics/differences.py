"""Compare two sets of attempts at the same tasks: what changed, for certain or perhaps by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from pipelines.statistics.attempts import with_names
from pipelines.statistics.resampling import discoveries, mean_intervals, permutation_test

IDS = ("instance_id", "trajectory_id", "return", "error", "version")
PASSED = "pass rate"
LEAST_TASKS = 5
"""Least number of tasks with a higher return for a suspicion about them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """Result of `differences`.

    Attributes:
        numbers: One line per number: name, a, b (means over the tasks in both), change (b - a),
            low and high (95 % interval of the change), num_tasks. All tasks weigh the same.
        tasks: One line per task in both: instance_id, num_a, num_b (attempts with a known return),
            return_a, return_b (means), verdict (win, loss, tie, unknown; of B), p (that chance
            alone makes such a difference), is_certain (after control of false discoveries).
        num_only_a, num_only_b: Number of tasks in one of the two only.
        suspicions: Witnesses against a higher return: see `suspicions`.
    """

    numbers: pl.DataFrame
    tasks: pl.DataFrame
    num_only_a: int
    num_only_b: int
    suspicions: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "numbers": self.numbers.to_dicts(),
            "tasks": self.tasks.to_dicts(),
            "num_only_a": self.num_only_a,
            "num_only_b": self.num_only_b,
            "suspicions": self.suspicions,
        }


def differences(
    a: pl.DataFrame, b: pl.DataFrame, *, rate: float = 0.05, seed: int = 0
) -> Differences:
    """Compare the attempts of two datasets, task by task.

    Means are over a task's attempts, then over tasks; intervals are paired: tasks are drawn with
    both their sides (`mean_intervals`). Failed attempts count only in `failed`; attempts without a
    known return do not count in returns. Of the tasks that are called certain, at most `rate` are
    expected to differ by chance only.

    Args:
        a: Result of `pipelines.statistics.attempts.attempts`.
        b: The other one.
        rate: False discovery rate.
        seed: Seed of the bootstrap.

    Example:
        >>> found = differences(attempts(scan("A")), attempts(scan("B")))
        >>> found.tasks.filter(pl.col("is_certain") & (pl.col("verdict") == "loss"))
    """
    known = {*a["instance_id"], *b["instance_id"]}
    left, right = (_per_task(one.with_columns(_first_names(known))) for one in with_names(a, b))
    both = left.join(right, on="instance_id", how="inner", suffix=" of B", maintain_order="left")
    names = [name for name in left.columns if name not in {"instance_id", "returns"}]
    before, after = (
        both.select(
            pl.col(f"{name}{side}").cast(pl.Float64).fill_null(float("nan")) for name in names
        )
        .to_numpy()
        .reshape(len(both), len(names))
        for side in ("", " of B")
    )
    change = after - before
    tasks = _tasks(both, rate)
    return Differences(
        numbers=_numbers(names, before, after, change, seed),
        tasks=tasks,
        num_only_a=len(left) - len(both),
        num_only_b=len(right) - len(both),
        suspicions=suspicions(both["instance_id"], names, change, seed),
    )


def _first_names(known: set[str]) -> pl.Expr:
    """Drop the `@2` that a later pass of `rollouts rl` adds to a task's id."""
    base = pl.col("instance_id").str.replace(r"@\d+$", "")
    return pl.when(base.is_in(list(known))).then(base).otherwise("instance_id").alias("instance_id")


def _per_task(lines: pl.DataFrame) -> pl.DataFrame:
    numbers = [name for name in lines.columns if name not in IDS]
    return lines.group_by("instance_id", maintain_order=True).agg(
        pl.col("return").mean(),
        pl.col("return").drop_nulls().alias("returns"),
        (pl.col("return") > 0).mean().alias(PASSED),
        pl.col("error").is_not_null().mean().alias("failed"),
        *(pl.col(name).mean() for name in numbers),
    )


def _numbers(names: list[str], before: Any, after: Any, change: Any, seed: int) -> pl.DataFrame:
    bounds = mean_intervals(change, seed=seed)
    known = np.isfinite(change)
    lines = []
    for place, name in enumerate(names):
        inside = known[:, place]
        if inside.any():
            means = [float(one[inside, place].mean()) for one in (before, after, change)]
            lines.append((name, *means, *bounds[place].tolist(), int(inside.sum())))
    schema = {"name": pl.String, **dict.fromkeys(("a", "b", "change", "low", "high"), pl.Float64)}
    table = pl.DataFrame(lines, schema={**schema, "num_tasks": pl.Int64}, orient="row")
    return table.with_columns(pl.col("low", "high").fill_nan(None))


def _tasks(both: pl.DataFrame, rate: float) -> pl.DataFrame:
    pairs = list(zip(both["returns"], both["returns of B"], strict=True))
    chances = np.empty(len(pairs))
    for i in sorted(range(len(pairs)), key=lambda i: (len(pairs[i][0]), len(pairs[i][1]))):
        # Tasks with as many attempts share their splits.
        chances[i] = permutation_test(*(one.to_numpy() for one in pairs[i]))
    change = pl.col("return of B") - pl.col("return")
    verdict = pl.when(change > 0).then(pl.lit("win")).when(change < 0).then(pl.lit("loss"))
    return both.select(
        "instance_id",
        num_a=pl.col("returns").list.len(),
        num_b=pl.col("returns of B").list.len(),
        return_a="return",
        return_b="return of B",
        verdict=verdict.when(change == 0).then(pl.lit("tie")).otherwise(pl.lit("unknown")),
        p=pl.Series(chances, dtype=pl.Float64),
        is_certain=pl.Series(discoveries(chances, rate), dtype=pl.Boolean),
    )


def is_worse(name: str) -> int:
    """Return the direction in which a number speaks against a higher return: 1, -1, or 0 for none.

    An environment's own metric should not fall; repetition, errors of tools and cut-off answers
    should not rise.
    """
    if name.startswith("environment/"):
        return -1
    return int(name in {"repeated 4-grams", "tool errors", "failed", "stopped: length"})


def suspicions(
    tasks: pl.Series, names: list[str], change: Any, seed: int = 0
) -> list[dict[str, Any]]:
    """Find second witnesses that contradict a higher return: signs of a hacked reward.

    Among the tasks whose mean return rose, a witness contradicts if its mean change has the wrong
    sign (`is_worse`) and its 95 % interval does not contain 0.

    Args:
        tasks: [T] ids of the tasks.
        names: Names of the F numbers, `return` among them.
        change: [T, F] change of each number, NaN where unknown.
        seed: Seed of the bootstrap.

    Returns:
        For each such witness: witness, change, low, high, num_tasks (whose return rose),
        num_contradicted (of these, how many change in the wrong direction) and the five tasks that
        contradict most.
    """
    rose = change[:, names.index("return")] > 0
    if rose.sum() < LEAST_TASKS:
        return []
    bounds = mean_intervals(change[rose], seed=seed)
    found = []
    for place, name in enumerate(names):
        wrong, values = is_worse(name), change[rose, place]
        low, high = bounds[place].tolist()
        if wrong and (low > 0 if wrong > 0 else high < 0):
            against = wrong * np.nan_to_num(values)
            order = np.argsort(-against, kind="stable")[:5]
            ids = tasks.filter(pl.Series(rose))
            found.append(
                {
                    "witness": name,
                    "change": float(np.nanmean(values)),
                    "low": low,
                    "high": high,
                    "num_tasks": int(rose.sum()),
                    "num_contradicted": int((against > 0).sum()),
                    "tasks": [ids[i] for i in order.tolist() if against[i] > 0],
                }
            )
    return found
