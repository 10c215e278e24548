"""Summary of a dataset: rows, trajectories, groups, tokens, rewards, and their distributions."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.frames import Frame, as_lazy
from pipelines.merging.segments import sampled_lengths
from pipelines.rewards import Outcome, are_equal, mean_of, trajectory_returns
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.prefix_layout import is_encoded
from rollout_io.dataset.reader import footers, iter_tables, pieces, scan
from rollout_io.dataset.storage import PathLike, Paths
from rollout_io.dataset.trajectory_facts import dataset_outcome
from rollout_io.formats.base import UNREAD, added
from schemas.columns import PICTURES, PICTURES_TYPE
from schemas.messages import RETOKENIZED
from schemas.metadata import CONVERSION
from schemas.numpy_arrays import filled, to_arrow, to_frame, to_numpy
from schemas.pictures import pictures_of
from schemas.ragged import IntArray, Ragged, list_lengths, offsets_of, rows_of
from schemas.types import as_table, cast_column

_LENGTHS: dict[str, pl.DataType] = {
    "trajectory_id": pl.String(),
    "prompt": pl.Int64(),
    "response": pl.Int64(),
    "sampled": pl.Int64(),
    "trained": pl.Int64(),
    "without_logprobs": pl.Boolean(),
    "retokenized": pl.Boolean(),
    "pictures": pl.Int64(),
    "picture_tokens": pl.Int64(),
}

_MOST_DISTINCT = 6
NUM_BINS = 12


def dataset_statistics(
    data: Frame | PathLike, outcome: Outcome | None = None, workers: Workers | None = None
) -> dict[str, Any]:
    """Summarise a rollout table with counts and means, separately per row and per trajectory.

    Rewards are returns of trajectories (see `trajectory_returns`). Failed trajectories and unknown
    outcomes are counted but excluded from means. A group has reward variance if two of its known
    returns differ.

    Args:
        data: A table or a dataset path. In the `prefix` layout, only lengths of prompts are read.
        outcome: How returns are computed; None: as in the dataset's metadata, `last` for a table.
        workers: Processes that read shards in parallel; None: read in this process.

    Returns:
        num_rows, num_trajectories, num_groups, num_failed, num_unknown_reward, num_tokens (prompt +
        response), num_prompt_tokens, num_response_tokens (sampled), num_environment_tokens (in
        responses, but not sampled: tool results), num_trained_tokens, num_pictures and
        num_picture_tokens (of all rows, as often as rows repeat them; tokens are null if those of a
        picture are unknown), num_rows_without_logprobs,
        num_rows_retokenized, rows_per_trajectory_{mean,max},
        {prompt,response}_tokens_per_row_{mean,max}, reward_{mean,min,max},
        num_groups_with_variance, num_groups_with_failed, stop_reasons (number of rows by reason).
    """
    return dataset_summary(data, outcome, workers).numbers


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and means of a dataset, with the values that they summarise.

    Attributes:
        numbers: The result of `dataset_statistics`.
        lengths: One line per row of the dataset: trajectory_id; prompt, response, sampled (of
            the response) and trained (numbers of tokens); without_logprobs; retokenized; pictures and
            picture_tokens (null: unknown).
        returns: One line per trajectory: instance_id, trajectory_id, return, error.
    """

    numbers: dict[str, Any]
    lengths: pl.DataFrame
    returns: pl.DataFrame


def dataset_summary(
    data: Frame | PathLike, outcome: Outcome | None = None, workers: Workers | None = None
) -> Summary:
    """Read the lengths and returns of a dataset, and summarise them (see `dataset_statistics`)."""
    if not isinstance(data, str | os.PathLike):
        frame = as_lazy(data)
        parts = [_Part(_lengths_of(frame), *_returns_and_reasons(frame, outcome or "last"))]
    elif workers is None or workers == Workers():
        parts = [_read_part(dataset_outcome(data, outcome), data)]
    else:
        read = partial(_read_part, dataset_outcome(data, outcome))
        parts = list(workers.map_in_order(read, pieces(data)))
    lengths, returns, reasons = (pl.concat(frames) for frames in zip(*parts, strict=True))
    numbers = _rows(lengths) | _returns(returns) | _stop_reasons(reasons)
    failed = returns.filter(pl.col("error").is_not_null())
    trained = lengths.join(failed, on="trajectory_id", how="anti")["trained"]
    numbers["num_trained_tokens"] = int(trained.sum())  # failed trajectories are not trained on
    return Summary(numbers, lengths, returns)


class _Part(NamedTuple):
    """Intermediate results for a part of a dataset."""

    lengths: pl.DataFrame
    returns: pl.DataFrame
    reasons: pl.DataFrame


def _read_part(outcome: Outcome, path: PathLike) -> _Part:
    frame = scan(path)
    return _Part(_lengths_on_disk(path, frame), *_returns_and_reasons(frame, outcome))


def _returns_and_reasons(
    frame: pl.LazyFrame, outcome: Outcome
) -> tuple[pl.DataFrame, pl.DataFrame]:
    returns = trajectory_returns(frame, outcome).collect(engine="streaming")
    if "stop_reason" not in frame.collect_schema():
        return returns, pl.DataFrame(schema={"stop_reason": pl.String, "len": pl.UInt32})
    return returns, frame.group_by("stop_reason").len().collect(engine="streaming")


def _used(frame: pl.LazyFrame) -> list[str]:
    optional = [
        n for n in ("rollout_logprobs", "segments", PICTURES) if n in frame.collect_schema()
    ]
    return [
        "trajectory_id",
        "prompt_token_ids",
        "response_ids",
        "loss_mask",
        "token_source",
        *optional,
    ]


def _lengths_on_disk(path: PathLike, frame: pl.LazyFrame) -> pl.DataFrame:
    tables = iter_tables(path, _used(frame), decode=False)
    return pl.concat(row_lengths(table) for table in tables)


def _lengths_of(frame: pl.LazyFrame) -> pl.DataFrame:
    rows = frame.select(_used(frame)).map_batches(
        lambda batch: row_lengths(as_table(batch)), schema=_LENGTHS, streamable=True
    )
    return rows.collect(engine="streaming")


def _picture_lengths(table: pa.Table) -> tuple[IntArray, pa.Array]:
    """[N] number of pictures of each row, and [N] of their tokens, null where one is unknown."""
    pictures = pictures_of(table)
    if pictures is None:
        none = np.zeros(table.num_rows, np.int64)
        return none, to_arrow(none)
    counts, entries = list_lengths(pictures), pc.list_flatten(cast_column(pictures, PICTURES_TYPE))
    row, lengths = rows_of(counts), pc.struct_field(entries, "length")
    sums = np.bincount(row, filled(lengths, 0), len(counts)).astype(np.int64)
    unknown = np.bincount(row, to_numpy(lengths.is_null()), len(counts)) > 0
    return counts, to_arrow(sums, mask=unknown)


def row_lengths(table: pa.Table) -> pl.DataFrame:
    """Compute the lengths, trained tokens, missing log-probabilities and pictures of each row."""
    response = list_lengths(table.column("response_ids"))
    if is_encoded(table):
        shared = to_numpy(table.column("prefix_length")).astype(np.int64)
        prompt = shared + list_lengths(table.column("prompt_suffix_ids"))
    else:
        prompt = list_lengths(table.column("prompt_token_ids"))
    masks = Ragged.from_arrow(table.column("loss_mask"))
    without = response > 0
    if "rollout_logprobs" in table.column_names:
        without &= to_numpy(table.column("rollout_logprobs").is_null())
    has_source = "token_source" in table.column_names  # parts of logs lack it
    source = table.column("token_source") if has_source else pa.nulls(table.num_rows, pa.string())
    num_pictures, picture_tokens = _picture_lengths(table)
    columns = {
        "trajectory_id": table.column("trajectory_id"),
        "prompt": to_arrow(prompt),
        "response": to_arrow(response),
        "sampled": to_arrow(sampled_lengths(table)),
        "trained": to_arrow(np.diff(offsets_of(masks.values)[masks.offsets])),
        "without_logprobs": to_arrow(without),
        "retokenized": source,
        "pictures": to_arrow(num_pictures),
        "picture_tokens": picture_tokens,
    }
    frame = to_frame(columns).with_columns(pl.col("retokenized").eq_missing(RETOKENIZED))
    return frame.cast(pl.Schema(_LENGTHS))


def _rows(rows: pl.DataFrame) -> dict[str, Any]:
    steps = rows.group_by("trajectory_id").len()["len"]
    num_prompt, num_response = int(rows["prompt"].sum()), int(rows["response"].sum())
    num_sampled = int(rows["sampled"].sum())
    return {
        "num_rows": len(rows),
        "num_tokens": num_prompt + num_response,
        "num_prompt_tokens": num_prompt,
        "num_response_tokens": num_sampled,
        "num_environment_tokens": num_response - num_sampled,
        "num_pictures": int(rows["pictures"].sum()),
        "num_picture_tokens": None
        if rows["picture_tokens"].null_count()
        else int(rows["picture_tokens"].sum()),
        "num_rows_without_logprobs": int(rows["without_logprobs"].sum()),
        "num_rows_retokenized": int(rows["retokenized"].sum()),
        "rows_per_trajectory_mean": steps.mean(),
        "rows_per_trajectory_max": steps.max(),
        "prompt_tokens_per_row_mean": rows["prompt"].mean(),
        "prompt_tokens_per_row_max": rows["prompt"].max(),
        "response_tokens_per_row_mean": rows["response"].mean(),
        "response_tokens_per_row_max": rows["response"].max(),
    }


def _returns(returns: pl.DataFrame) -> dict[str, Any]:
    failed = returns["error"].is_not_null()
    value = returns["return"]
    returned = pl.col("return").fill_nan(None)
    groups = returns.group_by("instance_id").agg(
        varied=(returned.count() > 1) & ~are_equal(pl.col("return")),
        has_failed=pl.col("error").is_not_null().any(),
    )
    return {
        "num_trajectories": len(returns),
        "num_groups": len(groups),
        "num_groups_with_variance": int(groups["varied"].sum()),
        "num_groups_with_failed": int(groups["has_failed"].sum()),
        "num_failed": int(failed.sum()),
        "num_unknown_reward": int((value.is_null() & ~failed).sum()),
        "reward_mean": mean_of(value),
        "reward_min": value.min(),
        "reward_max": value.max(),
    }


def _stop_reasons(reasons: pl.DataFrame) -> dict[str, Any]:
    counted = reasons.group_by("stop_reason").agg(pl.col("len").sum())
    counts = counted.sort("len", "stop_reason", descending=True)
    named = Counter[str]()
    for reason, number in counts.rows():
        named["unknown" if reason is None else str(reason)] += number
    return {"stop_reasons": dict(named)}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of some values, and a histogram with `NUM_BINS` equal bins from min to max.

    Attributes:
        mean: Mean; None, like all other statistics, if there are no values.
        median: Median; the lower middle value if the number of values is even.
        p95: Smallest value that at least 95% of the values do not exceed.
        min: Smallest value.
        max: Largest value.
        counts: Number of values per bin; empty if there are no values.

    Example:
        >>> Distribution.of(pl.Series([1, 2, 3, 10])).p95
        10
    """

    mean: float | None
    median: int | None
    p95: int | None
    min: int | None
    max: int | None
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: pl.Series) -> Distribution:
        """Compute the distribution of a series of integers."""
        if values.is_empty():
            return cls(None, None, None, None, None, ())
        ordered = values.sort().to_list()
        counts, _ = np.histogram(ordered, bins=NUM_BINS)
        return cls(
            mean=sum(ordered) / len(ordered),
            median=ordered[(len(ordered) - 1) // 2],
            p95=ordered[-(-95 * len(ordered) // 100) - 1],
            min=ordered[0],
            max=ordered[-1],
            counts=tuple(counts.tolist()),
        )


def length_distributions(summary: Summary) -> dict[str, Distribution]:
    """Return the distributions of lengths in tokens, and of rows per trajectory, by label."""
    rows = summary.lengths
    of_trajectory = rows.group_by("trajectory_id").agg(
        pl.len(),
        response=pl.col("sampled").sum(),
        longest=(pl.col("prompt") + pl.col("response")).max(),
    )
    return {
        "prompt of a row": Distribution.of(rows["prompt"]),
        "response of a row": Distribution.of(rows["response"]),
        "responses of a trajectory": Distribution.of(of_trajectory["response"]),
        "longest row of a trajectory": Distribution.of(of_trajectory["longest"]),
        "rows of a trajectory": Distribution.of(of_trajectory["len"]),
    }


@dataclass(frozen=True, slots=True)
class Rewards:
    """Returns of the trajectories that did not fail.

    Attributes:
        num_known: Trajectories with a known return.
        mean: Mean of the known returns; None if there are none.
        solved: Fraction of known returns that are 1; None unless all are 0 or 1.
        bars: Pairs of a label (a value or a range) and the number of trajectories.
        num_varied: Groups with different returns.
        num_equal: Groups of two or more known returns that are all equal.
        num_single: Groups with fewer than two known returns.
    """

    num_known: int
    mean: float | None
    solved: float | None
    bars: tuple[tuple[str, int], ...]
    num_varied: int
    num_equal: int
    num_single: int


def reward_distribution(summary: Summary) -> Rewards:
    """Return the distribution of a dataset's returns."""
    returns = pl.col("return").fill_nan(None)
    groups = summary.returns.group_by("instance_id").agg(
        equal=are_equal(pl.col("return")), single=returns.count() < 2
    )
    values = summary.returns.select(returns).to_series().drop_nulls().to_list()
    is_binary = bool(values) and set(values) <= {0.0, 1.0}
    num_equal, num_single = int(groups["equal"].sum()), int(groups["single"].sum())
    return Rewards(
        num_known=len(values),
        mean=mean_of(pl.Series(values, dtype=pl.Float64)),
        solved=sum(values) / len(values) if is_binary else None,
        bars=_bars(values),
        num_varied=len(groups) - num_equal - num_single,
        num_equal=num_equal,
        num_single=num_single,
    )


def _bars(values: Sequence[float]) -> tuple[tuple[str, int], ...]:
    """Count each distinct value if there are few, otherwise the values in equal ranges.

    Example:
        >>> _bars([0.0, 1.0, 1.0])
        (('0', 1), ('1', 2))
    """
    shown = Counter(f"{value + 0.0:g}" for value in sorted(values))  # + 0.0: -0 is 0
    if len(shown) <= _MOST_DISTINCT or not np.isfinite(values).all():
        return tuple(shown.items())[:_MOST_DISTINCT]
    scale = np.abs(values).max()  # the range of large values would overflow
    counts, edges = np.histogram(np.divide(values, scale), bins=_MOST_DISTINCT)
    edges *= scale
    ranges = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    labels = [f"{low:.3g} to {high:.3g}" for low, high in ranges]
    return tuple(zip(labels, counts.tolist(), strict=True))


def conversion_notes(path: Paths) -> dict[str, int]:
    """Return what a conversion noted about the logs of a dataset, with counts: what they lack.

    Empty if the dataset was not converted, or derived from another one.

    Raises:
        InvariantError: `shards_complete`: a shard is missing.
    """
    notes: dict[str, int] = {}
    for pairs in footers(path):
        # Another program may have written the record.
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            counts = json.loads(pairs[CONVERSION])["counts"]
            notes = added(notes, {str(text): int(num) for text, num in counts["notes"].items()})
    return {text: num for text, num in sorted(notes.items()) if not text.startswith(UNREAD)}
