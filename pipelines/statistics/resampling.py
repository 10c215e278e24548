"""Intervals and tests by resampling: paired bootstrap, permutations, false discovery rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000
MOST_SPLITS = 20_000
"""Splits of a task's attempts that are tested; if there are more, as many random ones."""

_CHUNK = 200
_MOST_KEPT, _BLOCK = 256, 1 << 20
"""Attempts of a task whose splits are kept for the next task; values of a block of others."""
_TIE = 1e-12  # of the largest deviation from the mean: the error of sums


def mean_intervals(values: Floats, level: float = 0.95, seed: int = 0) -> Floats:
    """Return the bootstrap interval of each column's mean over tasks.

    Tasks are drawn with replacement, the same ones for all columns. The interval is the expanded
    percentile interval (Hesterberg 2015, The American Statistician 69(4), section 3.4): the
    quantiles q of the resampled means are moved outwards so that few tasks do not make the
    interval too narrow,

        q = Phi(-sqrt(n / (n - 1)) * t),   t = quantile of Student's t, n - 1 degrees of freedom

    Args:
        values: [T, F] value of each task; NaN where it is unknown.
        level: Share of repetitions in which the interval is to contain the true mean.
        seed: Seed of the draws.

    Returns:
        [F, 2] lower and upper bound; NaN for fewer than two known values.

    Example:
        >>> mean_intervals(np.array([[0.0], [1.0]] * 50))
        array([[0.4, 0.6]])
    """
    known = np.isfinite(values)
    if not len(values):
        return np.full((values.shape[1], 2), np.nan)
    filled = np.where(known, values, 0.0)
    rng = np.random.default_rng(seed)
    num_tasks, num_columns = values.shape
    means = np.empty((NUM_RESAMPLES, num_columns))
    for begin in range(0, NUM_RESAMPLES, _CHUNK):
        drawn = rng.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), _CHUNK)
        weights = drawn.astype(np.float64)
        with np.errstate(invalid="ignore"):
            means[begin : begin + _CHUNK] = (weights @ filled) / (weights @ known)
    bounds = np.full((num_columns, 2), np.nan)
    for column, num in enumerate(known.sum(axis=0).tolist()):
        if num > 1:
            tail = _expanded_tail((1 - level) / 2, num)
            bounds[column] = np.nanquantile(means[:, column], [tail, 1 - tail])
    return bounds


def _expanded_tail(tail: float, num: int) -> float:
    normal = NormalDist()
    z, free = -normal.inv_cdf(tail), num - 1
    # Quantile of Student's t by its expansion in 1 / degrees of freedom (Abramowitz 26.7.5).
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return normal.cdf(-math.sqrt(num / free) * t)


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
    found = np.zeros(len(p), np.bool_)
    if len(below):
        found[order[: below[-1] + 1]] = True
    return found.tolist()
