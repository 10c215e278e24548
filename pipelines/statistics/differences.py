"""Compare two sets of attempts at the same tasks: what changed, for certain or perhaps by chance.

Few tasks need care: intervals by Student's t with skewness, permutation tests, false discovery rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipelines.filters import RAN_OUT_OF_TOKENS
from pipelines.rewards import is_above, is_rounding
from pipelines.statistics.attempts import with_names

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

Floats = npt.NDArray[np.float64]
MOST_SPLITS = 20_000
"""Splits of a task's attempts that are tested; if there are more, as many random ones."""
_MOST_KEPT, _BLOCK = 256, 1 << 20
"""Attempts of a task whose splits are kept for the next task; values of a block of others."""
_TIE = 1e-12  # of the largest deviation from the mean: the error of sums


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


def mean_intervals(values: Floats, level: float = 0.95) -> Floats:
    """Return an interval of each column's mean over tasks.

    The interval is the smallest that contains Student's t interval and Hall's, which corrects for
    skewness (Hall 1992, Journal of the Royal Statistical Society B 54(1)):

        mean -+ q s / sqrt(n)     and     mean - s / sqrt(n) g(+-q),
        g(y) = (3 / a) ((1 + a (y - a / 6))^(1/3) - 1),     a = skewness / sqrt(n)

    with q, the quantile of Student's t with n - 1 degrees of freedom, and s, the sample standard
    deviation. If all values are equal, their spread is unknown: it is Student's interval after one
    more value of 0.

    Args:
        values: [T, F] value of each task; NaN where it is unknown.
        level: Share of repetitions in which the interval is to contain the true mean.

    Returns:
        [F, 2] lower and upper bound; infinite if a column has fewer than two known values, or only
        zeros: they bound nothing.

    Example:
        >>> mean_intervals(np.array([[0.0], [1.0]] * 50)).round(2)
        array([[0.4, 0.6]])
    """
    bounds = np.tile([-np.inf, np.inf], (values.shape[1], 1))
    for column, one in enumerate(values.T):
        finite = one[np.isfinite(one)]
        scale = np.abs(finite).max(initial=0.0)
        if len(finite) < 2 or not scale:
            continue
        finite = finite / scale  # squares neither overflow nor vanish
        is_equal = is_rounding(np.ptp(finite), 1.0)
        if is_equal:
            finite = np.append(finite, 0.0)
        num, mean = len(finite), finite.mean()
        error, q = finite.std(ddof=1) / math.sqrt(num), _student_quantile(level, num - 1)
        a = np.mean((finite - mean) ** 3) / finite.std() ** 3 / math.sqrt(num)
        ends = np.array([-q, q])
        is_skewed = abs(a) > _TIE and not is_equal
        hall = 3 / a * (np.cbrt(1 + a * (ends - a / 6)) - 1) if is_skewed else ends
        both = mean - error * np.stack([ends, hall])
        bounds[column] = scale * both.min(), scale * both.max()
    return bounds


@lru_cache
def _student_quantile(level: float, free: int) -> float:
    """Return q with P(-q < t < q) = level for Student's t, by bisection."""
    low, high = 0.0, 1.0
    while _student_inside(high, free) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_inside(middle, free) < level else (low, middle)
    return high


def _student_inside(t: float, free: int) -> float:
    """Return P(-t < T < t) for Student's T (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(free))
    is_odd, cos = free % 2, math.cos(angle)
    index = np.arange(1, (free - is_odd) // 2)
    factors = (2 * index - 1 + is_odd) / (2 * index + is_odd) * cos**2
    total = math.sin(angle) * (1 + np.cumprod(factors).sum())
    if not is_odd:
        return float(total)
    return 2 / math.pi * (angle + (cos * float(total) if free > 1 else 0.0))


def permutation_test(first: Floats, second: Floats) -> float:
    """Return the probability of a difference of means at least as large if there is none.

    Two-sided. All ways to split the attempts into two sets of these sizes are equally likely under
    the hypothesis; with up to 20,000 ways, the test is exact (for rewards of 0 and 1, it is then
    Fisher's test), else it uses 20,000 random ones.

    Args:
        first: [N] returns under A.
        second: [M] returns under B.

    Example:
        Four failures against four successes: 2 of the 70 splits are as extreme.

        >>> round(permutation_test(np.zeros(4), np.ones(4)), 4)
        0.0286
    """
    if not len(first) or not len(second):
        return 1.0
    both = np.concatenate([first, second])
    both = both / (np.abs(both).max() or 1.0)  # sums neither overflow nor lose a small difference
    if is_rounding(np.ptp(both), 1.0):
        return 1.0
    both -= both.mean()
    observed = abs(both[: len(first)].mean() - both[len(first) :].mean())
    least, num, num_splits = observed - _TIE * np.abs(both).max(), 0, 0
    for splits in _blocks(len(first), len(second)):
        sums = splits @ both
        change = np.abs(sums / len(first) - (both.sum() - sums) / len(second))
        num += int(np.count_nonzero(change >= least))
        num_splits += len(splits)
    is_exact = math.comb(len(both), len(first)) <= MOST_SPLITS
    return num / num_splits if is_exact else (num + 1) / (num_splits + 1)


def _blocks(num_first: int, num_second: int) -> Iterator[Floats]:
    """Yield [S, N + M] 0 or 1 (in the first set), all splits or 20,000 random ones."""
    total = num_first + num_second
    if total <= _MOST_KEPT or math.comb(total, num_first) <= MOST_SPLITS:
        yield _splits(num_first, num_second)
        return
    rng, size = np.random.default_rng(total), max(_BLOCK // total, 1)
    for begin in range(0, MOST_SPLITS, size):
        ranks = rng.random((min(size, MOST_SPLITS - begin), total)).argsort(axis=1)
        yield (ranks < num_first).astype(np.float64)


@lru_cache(maxsize=1)  # 160 kB for each attempt of a task
def _splits(num_first: int, num_second: int) -> Floats:
    """Return the splits as one block, for tasks with the same numbers of attempts."""
    total = num_first + num_second
    if math.comb(total, num_first) <= MOST_SPLITS:
        chosen = list(combinations(range(total), num_first))
        splits = np.zeros((len(chosen), total))
        np.put_along_axis(splits, np.array(chosen), 1.0, axis=1)
        return splits
    ranks = np.random.default_rng(total).random((MOST_SPLITS, total)).argsort(axis=1)
    return (ranks < num_first).astype(np.float64)


def discoveries(probabilities: Iterable[float], rate: float = 0.05) -> list[bool]:
    """Return which of many tests may be called different, so that few of them are false.

    The expected share of false ones among them is at most `rate` (Benjamini and Hochberg 1995):
    with the m probabilities in ascending order, those up to the largest k with p_k <= rate k / m.

    Example:
        >>> discoveries([0.001, 0.2, 0.03, 0.02], rate=0.05)
        [True, False, True, True]
    """
    p = np.asarray(list(probabilities), np.float64)
    order = np.argsort(p, kind="stable")
    limits = rate * np.arange(1, len(p) + 1) / max(len(p), 1)
    below = np.flatnonzero(p[order] <= limits)
    is_discovery = np.zeros(len(p), np.bool_)
    if len(below):
        is_discovery[order[: below[-1] + 1]] = True
    return is_discovery.tolist()


def least_changed(sizes: Iterable[tuple[int, int]], rate: float = 0.05) -> int | None:
    """Return how many tasks must change completely before `discoveries` can contain one.

    The smallest probability of a task with n and m attempts is that of the split itself, and of the
    opposite one if n = m: 1 / C(n + m, n), or twice as much.

    Args:
        sizes: Numbers of attempts of each task under A and under B.
        rate: False discovery rate.

    Returns:
        The number of tasks; None if even all of them would not be enough.

    Example:
        Four attempts each of 20 tasks have at best p = 2 / 70, which is below 0.05 k / 20 from k = 12:

        >>> least_changed([(4, 4)] * 20), least_changed([(8, 8)] * 20), least_changed([(3, 3)] * 20)
        (12, 1, None)
    """
    best = [
        max((1 + (n == m)) / math.comb(n + m, n), 1 / (MOST_SPLITS + 1)) if n and m else 1.0
        for n, m in sizes
    ]
    limits = (rate * k / len(best) for k in range(1, len(best) + 1))
    enough = (
        k for k, (p, limit) in enumerate(zip(sorted(best), limits, strict=True), 1) if p <= limit
    )
    return next(enough, None)
