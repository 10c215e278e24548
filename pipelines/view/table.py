"""The table of trajectories: pages, histograms, searches, and the comparison of two datasets."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from starlette.responses import Response

from pipelines.view.dataset import Dataset
from pipelines.view.responses import arrow_response, json_response
from pipelines.view.trajectories import parted
from pipelines.view.trajectory_index import TrajectoryIndex
from rollout_io.dataset.finding import FOUND_COLUMNS, Match, find, find_in_texts
from schemas.columns import TASK
from schemas.errors import InputError
from schemas.ragged import BoolArray

NUM_VALUES = 30
"""Maximum number of values that a histogram of a text column lists."""
MAX_BINS = 1000
MAX_LIMIT = 10_000

MAX_HITS = 10_000
MAX_NAMES = 20
"""Maximum number of tasks, and of trajectories, with matching ids that a search lists."""
MAX_SECONDS = 10.0
"""Seconds after which a search stops, even if it is incomplete."""


def window(
    index: TrajectoryIndex,
    *,
    where: str | None,
    sort: str | None,
    descending: bool,
    offset: int,
    limit: int,
) -> Response:
    """Return a window of the filtered and sorted table.

    Columns that are null in all rows, and tasks that are all equal to `instance_id`, are left out.

    `total` is the number of trajectories that match, and `all` the number in the dataset. `failed`
    counts the matching trajectories with an error. `mean_return` is the mean of their known
    returns, NaN if there are none.
    """
    mask = index.matching(where)
    if sort is None:
        chosen = np.arange(len(index)) if mask is None else np.flatnonzero(mask)
    else:
        order = index.order(sort, descending=descending)
        chosen = order if mask is None else order[mask[order]]
    shown = chosen[offset : offset + min(limit, MAX_LIMIT)]
    whole = index.trajectories
    empty = [one.name for one in whole if one.null_count() == len(one) > 0]
    if whole[TASK].equals(whole["instance_id"]):
        empty.append(TASK)
    lines = whole.drop(empty)[shown.astype(np.int64)]
    facts = index.trajectories if mask is None else index.trajectories.filter(pl.Series(mask))
    mean = facts["return"].fill_nan(None).mean()
    return arrow_response(
        lines,
        total=len(chosen),
        all=len(index),
        failed=len(facts) - facts["error"].null_count(),
        mean_return=mean if isinstance(mean, float) else math.nan,
    )


def histogram(index: TrajectoryIndex, column: str, where: str | None, bins: int) -> Response:
    """Count the values of a column, for the selected trajectories and for all.

    Nulls, and numbers that are not finite, are counted separately. Edges have the precision of the
    column, so that a filter on the range of a bin finds as many trajectories as the bin counts.
    """
    index.refuse_unknown(column)
    mask, values = index.matching(where), index.trajectories[column]
    if values.dtype.is_numeric():
        return json_response(_of_numbers(values, mask, max(1, min(bins, MAX_BINS))))
    return json_response(_of_values(values, mask))


def _of_numbers(values: pl.Series, mask: BoolArray | None, bins: int) -> dict[str, Any]:
    """Count the numbers in each bin; a bin excludes its upper edge, except for the last bin.

    Numbers are compared with the edges without rounding, so the filter `x >= edge AND x < next`
    selects exactly the numbers of a bin, even integers that float64 cannot represent.
    """
    is_known = is_finite = values.is_not_null().to_numpy()
    if values.dtype.is_float():
        is_finite = is_finite & values.is_finite().fill_null(value=False).to_numpy()
    is_chosen = np.True_ if mask is None else mask
    left_out = {
        "nulls": int((~is_known & is_chosen).sum()),
        "not_finite": int((is_known & ~is_finite & is_chosen).sum()),
    }
    if not is_finite.any():
        return {"edges": [], "counts": [], "counts_all": [], **left_out}
    numbers = values.filter(pl.Series(is_finite))
    edges = _edges(numbers, bins)
    between = pl.Series(edges[1:-1], dtype=pl.Float64)
    if values.dtype.is_float():
        between = between.cast(values.dtype)
    else:
        between = between.ceil().cast(values.dtype)
    place = between.search_sorted(numbers.to_numpy(), side="right").to_numpy()
    num = max(len(edges) - 1, 1)
    inside = is_finite if mask is None else is_finite & mask
    return {
        "edges": edges,
        "counts": np.bincount(place[inside[is_finite]], minlength=num).tolist(),
        "counts_all": np.bincount(place, minlength=num).tolist(),
        **left_out,
    }


def _edges(numbers: pl.Series, bins: int) -> list[float]:
    """Return the edges of equal bins from the smallest to the largest number."""
    least, most = numbers.min(), numbers.max()
    assert isinstance(least, int | float)
    assert isinstance(most, int | float)
    low, high = float(least), float(most)
    low = math.nextafter(low, -math.inf) if low > least else low
    high = math.nextafter(high, math.inf) if high < most else high
    if low == high:
        return [low, high]
    # Divided by 4, because the difference of two large numbers would overflow.
    edges = 4 * np.linspace(low / 4, high / 4, bins + 1)
    edges[0], edges[-1] = low, high
    if numbers.dtype == pl.Float32:
        edges = edges.astype(np.float32).astype(np.float64)
    distinct: list[float] = np.unique(edges).tolist()
    return distinct


def _of_values(values: pl.Series, mask: BoolArray | None) -> dict[str, Any]:
    name = pl.col("value")
    frame = pl.DataFrame({"value": values}).with_columns(
        kept=pl.lit(value=True) if mask is None else pl.Series(mask)
    )
    num_nulls = frame.filter(name.is_null() & pl.col("kept")).height
    counted = (
        frame.filter(name.is_not_null())
        .group_by("value")
        .agg(counts=pl.col("kept").sum(), counts_all=pl.len())
        .sort("counts_all", "value", descending=[True, False])
    )
    shown, rest = counted.head(NUM_VALUES), counted.slice(NUM_VALUES)
    return {
        "values": shown["value"].to_list(),
        "counts": shown["counts"].to_list(),
        "counts_all": shown["counts_all"].to_list(),
        "nulls": num_nulls,
        "others": int(rest["counts"].sum()),
    }


def diff(a: Dataset, b: Dataset, where: str | None) -> Response:
    """Return one line per task (`task_instance_id`) that both datasets contain; `where` filters their trajectories."""
    tasks_a, right = _tasks(a, where), _tasks(b, where)
    both = tasks_a.join(right, on=TASK, how="inner", suffix="_b", maintain_order="left")
    names = ("num", "return", "solved", "response_tokens")
    ordered = both.select(
        TASK,
        *(e for n in names for e in (pl.col(n).alias(f"{n}_a"), pl.col(f"{n}_b"))),
    )
    return arrow_response(ordered, only_a=len(tasks_a) - len(both), only_b=len(right) - len(both))


def pairs(a: Dataset, b: Dataset, task: str) -> dict[str, Any]:
    """Pair the attempts at a task by visit and repetition_id; those without a counterpart are left out."""
    attempts_a, right = _attempts(a, task), _attempts(b, task)
    paired = []
    for repetition, (number, name, value) in attempts_a.items():
        if repetition not in right:
            continue
        other, other_name, other_value = right[repetition]
        parts_at = parted(a, number)(b, other)
        paired.append(
            {
                "trajectory_a": name,
                "trajectory_b": other_name,
                "return_a": value,
                "return_b": other_value,
                "parts_at": parts_at,
            }
        )
    return {"pairs": paired}


def _tasks(dataset: Dataset, where: str | None) -> pl.DataFrame:
    index = dataset.index
    mask, lines = index.matching(where), index.trajectories
    chosen = lines if mask is None else lines.filter(pl.Series(mask))
    value = pl.col("return").fill_nan(None)
    return chosen.group_by(TASK, maintain_order=True).agg(
        pl.len().cast(pl.Int32).alias("num"),
        value.mean(),
        (value > 0).sum().cast(pl.Int32).alias("solved"),
        pl.col("response_tokens").mean(),
    )


def _attempts(dataset: Dataset, task: str) -> dict[tuple[int, int], tuple[int, str, float | None]]:
    numbers = dataset.index.group(task, [TASK]).tolist()
    lines = dataset.index.trajectories[numbers].select(
        pl.struct(pl.col("instance_id").rank("dense"), "repetition_id"), "trajectory_id", "return"
    )
    return {
        tuple(attempt.values()): (number, name, value)
        for number, (attempt, name, value) in zip(numbers, lines.rows(), strict=True)
    }


def search(
    dataset: Dataset, *, text: str | None, ids: list[int] | None, where: str | None, limit: int
) -> dict[str, Any]:
    """Find the rows that contain a text or a sequence of token ids, in row order.

    A match within tokens that a row repeats from an earlier row is reported only for the earlier
    row. Text is searched for in the decoded tokens, or, without a tokenizer, in the logged messages
    and responses; `position` is then null. Ids of tasks and trajectories that contain the text are
    listed separately, whether or not they satisfy `where`. `searched` is the number of trajectories
    that satisfy it.

    Raises:
        InputError: `view_query`: both or neither of `text` and `ids` are passed.
    """
    if bool(text) == bool(ids):
        raise InputError("view_query", "search", "pass either text or ids")
    limit, ends = min(max(limit, 1), MAX_HITS), time.monotonic() + MAX_SECONDS
    mask = dataset.index.matching(where)
    searched = len(dataset.index) if mask is None else int(mask.sum())
    facts = {"searched": searched, **_named(dataset.index, text)}
    hits: list[dict[str, Any]] = []
    for begin, end in _pieces(dataset, where, text):
        for match in _found(dataset, begin, end, text, ids):
            number = dataset.index.number(match.trajectory_id)
            text_of = dataset.index.trajectories["task_text"][number]
            hits.append({**dataclasses.asdict(match), "task_text": text_of})
            if len(hits) >= limit:
                return {"hits": hits, "complete": False, **facts}
        if time.monotonic() > ends:
            return {"hits": hits, "complete": False, **facts}
    return {"hits": hits, "complete": True, **facts}


def _named(index: TrajectoryIndex, text: str | None) -> dict[str, Any]:
    """Find the ids of tasks and trajectories that contain a text, ignoring case."""
    if text is None:
        return {"tasks": [], "num_tasks": 0, "trajectories": [], "num_trajectories": 0}
    lines = index.trajectories.select("instance_id", "trajectory_id", "task_text")

    def holds(name: str) -> pl.Expr:
        return pl.col(name).str.to_lowercase().str.contains(text.lower().strip(), literal=True)

    size = pl.col("instance_id").str.len_chars()
    same = lines.filter(holds("instance_id")).group_by("instance_id", maintain_order=True)
    tasks = same.agg(pl.len(), pl.col("task_text").first())
    others = lines.filter(holds("trajectory_id") & ~holds("instance_id"))["trajectory_id"]
    shown = tasks.sort(size, maintain_order=True).head(MAX_NAMES)
    return {
        "tasks": shown.rename({"len": "attempts"}).to_dicts(),
        "num_tasks": len(tasks),
        "trajectories": others.head(MAX_NAMES).to_list(),
        "num_trajectories": len(others),
    }


def _pieces(dataset: Dataset, where: str | None, text: str | None) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that contain exactly the trajectories that satisfy `where`.

    Trajectories that are known not to contain the text are left out.
    """
    mask = dataset.index.matching(where)
    starts = dataset.index.starts
    chosen = np.arange(len(dataset.index)) if mask is None else np.flatnonzero(mask)
    begin = end = 0
    for number in chosen.tolist():
        if text is not None and not dataset.may_hold(number, text):
            continue
        first, after = int(starts[number]), int(starts[number + 1])
        if first != end or after - begin > dataset.rows_at_once:
            if end > begin:
                yield begin, end
            begin = first
        end = after
    if end > begin:
        yield begin, end


def _found(
    dataset: Dataset, begin: int, end: int, text: str | None, ids: list[int] | None
) -> Iterator[Match]:
    if text is not None and (dataset.is_log or dataset.token_bytes is None):
        names = ["trajectory_id", "step_index", *dataset.present("messages", "response_text")]
        yield from find_in_texts(dataset.reader.rows(begin, end, names), text)
        return
    table = dataset.reader.rows(begin, end, FOUND_COLUMNS)
    sought = np.array(ids, np.int32) if text is None else text
    yield from find(table, sought, dataset.token_bytes)
