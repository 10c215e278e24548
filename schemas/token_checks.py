"""Checks of log-probabilities and versions, one per response token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from schemas.columns import LOGPROB_SENTINEL
from schemas.numpy_arrays import filled
from schemas.ragged import BoolArray, Ragged
from schemas.view import View


def check_logprobs(view: View) -> Iterator[pl.DataFrame]:
    """Check logprobs_finite and logprobs_nonpositive."""
    for name in ("rollout_logprobs", "trainer_logprobs"):
        if not view.has(name):
            continue
        values = view.ragged(name).values
        # Fast path without temporary arrays for valid values; NaN makes the comparison false.
        if len(values) == 0 or LOGPROB_SENTINEL < values.min() <= values.max() <= 0.0:
            continue
        with np.errstate(invalid="ignore"):
            bad = ~np.isfinite(values) | (values <= LOGPROB_SENTINEL)
            positive = (values > 0) & ~bad
        yield first_elements(view, "logprobs_finite", name, bad, "finite values above -9999")
        yield first_elements(view, "logprobs_nonpositive", name, positive, "values <= 0")


def check_versions(view: View) -> Iterator[pl.DataFrame]:
    """Check versions_of_tokens: versions are >= 0, and the oldest is the row's `policy_version`."""
    rule, name = "versions_of_tokens", "policy_versions"
    if not view.has(name):
        return
    column = view.ragged(name)
    values, lengths = column.values, column.lengths
    yield first_elements(view, rule, name, values < 0, "versions >= 0")
    if not view.has("policy_version"):
        return
    oldest = filled(view.table.column("policy_version"), -1).astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    # A version of 0 may also mean that the token was not sampled.
    older = (values > 0) & (values < oldest[row])
    has_oldest = np.bincount(row, values == oldest[row], len(lengths)) > 0
    is_known = ~view.is_null("policy_version") & (np.bincount(row, values > 0, len(lengths)) > 0)
    differs = is_known & (~has_oldest | (np.bincount(row, older, len(lengths)) > 0))
    rows = np.flatnonzero(differs)
    finding = [str(np.unique(column.row(int(r))).tolist()) for r in rows]
    sentence = "{column} are {got}, but policy_version, the oldest, is {expected}"
    yield view.breaches(rule, rows, name, finding, list(oldest[rows].astype(str)), sentence)


def first_elements(view: View, rule: str, name: str, bad: BoolArray, expected: str) -> pl.DataFrame:
    """Report one breach per row: the first invalid element, and the number of further ones."""
    column: Ragged = view.ragged(name)
    positions = np.flatnonzero(bad)
    rows, first, counts = np.unique(column.row_of(positions), return_index=True, return_counts=True)
    finding = [
        _element(column, int(positions[i]), int(row), int(count))
        for row, i, count in zip(rows, first, counts, strict=True)
    ]
    sentence = "{column} contains {got}; expected {expected}"
    return view.breaches(rule, rows, name, finding, expected, sentence)


def _element(column: Ragged, position: int, row: int, count: int) -> str:
    value: Any = column.values[position]
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{value} at index {position - column.offsets[row]}{more}"
