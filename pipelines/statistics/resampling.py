"""Intervals and tests for few tasks: Student's t with skewness, permutations, false discovery rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from pipelines.rewards import is_rounding

Floats = npt.NDArray[np.float64]

MOST_SPLITS = 20_000
"""Splits of a task's attempts that are tested; if there are more, as many random ones."""

_MOST_KEPT, _BLOCK = 256, 1 << 20
"""Attempts of a task whose splits are kept for the next task; values of a block of others."""
_TIE = 1e-12  # of the largest deviation from the mean: the error of sums


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
