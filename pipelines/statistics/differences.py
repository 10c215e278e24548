"""Compare two sets of attempts at the same tasks: what changed, for certain or perhaps by chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from pipelines.filtering.filters import RAN_OUT_OF_TOKENS
from pipelines.rewards import is_above, is_rounding
from pipelines.statistics.attempts import with_names
from pipelines.statistics.resampling import (
    Floats,
    discoveries,
    least_changed,
    mean_intervals,
    permutation_test,
)
from schemas.metadata import DatasetMetadata

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
    both = (
        a.select("instance_id")
        .unique(maintain_order=True)
        .join(b, on="instance_id", how="semi", maintain_order="left")
    )
    names, sides = _per_task(both, *with_names(a, b))
    before, after = (side.means for side in sides)
    size = np.fmax(np.abs(before), np.abs(after))
    change = np.where(is_rounding(np.abs(after - before), size), 0.0, after - before)
    numbers = _numbers(names, sides, change, directions)
    tasks = _tasks(both, sides, change[:, names.index("return")], rate)
    only_a, only_b = (one["instance_id"].n_unique() - len(both) for one in (a, b))
    return Differences(
        numbers=numbers,
        tasks=tasks,
        num_only_a=only_a,
        num_only_b=only_b,
        num_copies_a=sides[0].num_copies,
        num_copies_b=sides[1].num_copies,
        least_changed=least_changed(tasks.select("num_a", "num_b").rows(), rate),
        suspicions=suspicions(
            numbers, both["instance_id"], dict(zip(names, change.T, strict=True))
        ),
    )


def first_visits(lines: pl.DataFrame, names: set[str], metadata: DatasetMetadata) -> pl.DataFrame:
    """Drop the `@2` that `rollouts rl` adds to a task's id in its second pass, and so on.

    In a dataset with another history, `@2` is a part of the task's id.

    Args:
        lines: Attempts of a dataset.
        names: Ids of tasks: only what becomes one of them is shortened.
        metadata: Of the dataset.
    """
    if not any(made.get("verb") == "rl" for made in metadata.made_by):
        return lines
    base = pl.col("instance_id").str.replace(r"@\d+$", "")
    first = pl.when(base.is_in(list(names))).then(base).otherwise("instance_id")
    return lines.with_columns(first.alias("instance_id"))


class _Side(NamedTuple):
    """Attempts of one dataset at T tasks, in F numbers.

    Attributes:
        means: [T, F] mean over a task's attempts; NaN where it is unknown.
        counts: [T, F] number of attempts for which it is known.
        totals: [T] number of attempts.
        returns: [T] known returns of a task's attempts.
        num_copies: Number of attempts that were left out.
    """

    means: Floats
    counts: Floats
    totals: Floats
    returns: pl.Series
    num_copies: int


def _per_task(both: pl.DataFrame, *named: pl.DataFrame) -> tuple[list[str], list[_Side]]:
    """Return the names of the numbers, and each side's attempts at the tasks in both."""
    failed, passed = pl.col("error").is_not_null(), is_above(pl.col("return"), 0.0)
    # A greedy attempt repeats itself: its copies are no further evidence.
    answer = pl.when(~failed).then(pl.col("greedy").cast(pl.String))
    of_all = pl.when(failed).then(statement=False).otherwise(passed)
    has_failed = any(lines["error"].count() for lines in named)
    rates = {PASSED: passed} | ({PASSED_OF_ALL: of_all} if has_failed else {}) | {"failed": failed}
    others = [name for name in named[0].columns if name not in {*_IDS, "return"}]
    names = ["return", *rates, *others]
    sides = []
    for lines in named:
        attempts = both.join(lines, on="instance_id", maintain_order="left").select(
            "instance_id",
            pl.coalesce(answer, "trajectory_id").alias("answer"),
            *(number.cast(pl.Float64).alias(name) for name, number in rates.items()),
            *(pl.when(pl.col(n).is_finite()).then(n).alias(n) for n in ("return", *others)),
        )
        distinct = attempts.group_by("instance_id", "answer", maintain_order=True)
        groups = distinct.agg(pl.all().mean()).group_by("instance_id", maintain_order=True)
        means, counts = groups.agg(pl.col(names).mean()), groups.agg(pl.col(names).count())
        totals = groups.len()["len"]
        sides.append(
            _Side(
                means.select(names).cast(pl.Float64).to_numpy(),
                counts.select(names).to_numpy(),
                totals.to_numpy(),
                groups.agg(pl.col("return").drop_nulls())["return"],
                len(attempts) - int(totals.sum()),
            )
        )
    return names, sides


def _numbers(
    names: list[str], sides: list[_Side], change: Floats, directions: Mapping[str, int]
) -> pl.DataFrame:
    bounds = mean_intervals(change)
    num_bounded = int(np.isfinite(bounds[:, 0]).sum())
    wider = mean_intervals(change, 1 - (1 - LEVEL) / max(num_bounded, 1))
    lines = []
    for place, name in enumerate(names):
        known = np.isfinite(change[:, place])
        counts = [side.counts[:, place] for side in sides]
        if not sum(one.sum() for one in counts):
            continue
        most = 1.0 if name.startswith(SHARES) else np.inf
        low, high = bounds[place].clip(-most, most).tolist()
        values = [*(side.means[:, place] for side in sides), change[:, place]]
        lines.append(
            (
                *(name, directions.get(name)),
                *(float(one[known].mean()) if known.any() else None for one in values),
                *((low, high) if np.isfinite(bounds[place, 0]) else (None, None)),
                bool(wider[place, 0] > 0 or wider[place, 1] < 0),
                int(known.sum()),
                *(int(one[known].sum()) for one in counts),
                *(int(s.totals.sum() - n.sum()) for s, n in zip(sides, counts, strict=True)),
            )
        )
    floats = dict.fromkeys(("a", "b", "change", "low", "high"), pl.Float64)
    schema = {"name": pl.String, "direction": pl.Int8, **floats, "is_certain": pl.Boolean}
    sizes = ("num_tasks", "num_attempts_a", "num_attempts_b", "num_unknown_a", "num_unknown_b")
    return pl.DataFrame(lines, schema | dict.fromkeys(sizes, pl.Int64), orient="row")


def _tasks(both: pl.DataFrame, sides: list[_Side], change: Floats, rate: float) -> pl.DataFrame:
    pairs = list(zip(*(side.returns for side in sides), strict=True))
    chances = np.empty(len(pairs))
    for i in sorted(range(len(pairs)), key=lambda i: (len(pairs[i][0]), len(pairs[i][1]))):
        # Tasks with as many attempts share their splits.
        chances[i] = permutation_test(*(one.to_numpy() for one in pairs[i]))
    columns: dict[str, Any] = {}
    for side, label in zip(sides, "ab", strict=True):
        known = side.returns.list.len()
        columns[f"num_{label}"] = known
        columns[f"num_unknown_{label}"] = pl.Series(side.totals) - known
        columns[f"return_{label}"] = pl.Series(side.means[:, 0]).fill_nan(None)
    sign = pl.Series(change, dtype=pl.Float64).fill_nan(None).sign()
    verdict = sign.replace_strict({1.0: "win", -1.0: "loss", 0.0: "tie"}, return_dtype=pl.String)
    return both.with_columns(
        **columns,
        verdict=verdict.fill_null("unknown"),
        p=pl.Series(chances, dtype=pl.Float64),
        is_certain=pl.Series(discoveries(chances, rate), dtype=pl.Boolean),
    )


def suspicions(
    numbers: pl.DataFrame, tasks: pl.Series, changes: Mapping[str, Floats]
) -> list[dict[str, Any]]:
    """Find second witnesses that contradict a higher return: signs of a hacked reward.

    If the return rose for certain, each number that moved against its direction for certain is one.
    Both are judged over all tasks: choosing those whose return rose would choose their noise, too.

    Args:
        numbers: `Differences.numbers`.
        tasks: [T] ids of the tasks.
        changes: [T] change of each number, by name; NaN where it is unknown.

    Returns:
        The line of each such number, with the five tasks that contradict most, among those whose
        return rose.
    """
    risen = numbers.filter(pl.col("is_certain") & (pl.col("change") > 0))["name"]
    if "return" not in risen:
        return []
    against = numbers.filter(pl.col("is_certain") & (pl.col("change") * pl.col("direction") < 0))
    rose, lines = changes["return"] > 0, []
    for line in against.iter_rows(named=True):
        wrong = np.where(rose, -line["direction"] * np.nan_to_num(changes[line["name"]]), 0.0)
        worst = np.argsort(-wrong, kind="stable")[:_MOST_TASKS]
        lines.append(line | {"tasks": [tasks[i] for i in worst.tolist() if wrong[i] > 0]})
    return lines
