"""The rows and targets of an optimizer step, from the run's token records."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
from starlette.responses import Response

from pipelines.view.responses import arrow_response
from pipelines.view.run_files import KEYS, read_tokens
from pipelines.view.runs import Run
from pipelines.view.sources import Sources
from schemas.errors import RolloutError

_PER_TARGET = ("loss_mask", "advantages", "weights", "logprobs", "importance_weights", "losses")
_FLAGS = ("clipped", "rejected")
MAX_TARGETS = 100_000


def update_rows(sources: Sources, run: Run, update: int) -> Response:
    """Return the rows of an update, sorted by their absolute share of the loss, largest first."""
    return arrow_response(_ranked(sources, run, update).drop("record"))


def update_targets(sources: Sources, run: Run, update: int, limit: int) -> Response:
    """Return up to `limit` trained tokens, evenly spaced over the rows from `update_rows`."""
    order = _ranked(sources, run, update)["record"]
    names = ["loss_mask", "logprobs", "importance_weights", "clipped", "rejected"]
    lists = read_tokens(run.path, update)[order]
    present = [name for name in names if name in lists.columns]
    flat = _flat(lists.select(present).with_row_index("row")).filter("loss_mask")
    limit = min(max(limit, 1), MAX_TARGETS)
    drawn = np.unique(np.linspace(0, max(len(flat) - 1, 0), min(limit, len(flat))).astype(np.int64))
    return arrow_response(
        flat[drawn].select(
            "row",
            "position",
            logprob=_column(flat, "logprobs", pl.Float32),
            importance_weight=_column(flat, "importance_weights", pl.Float32),
            clipped=_column(flat, "clipped", pl.Boolean),
            rejected=_column(flat, "rejected", pl.Boolean),
        ),
        total=len(flat),
    )


def _ranked(sources: Sources, run: Run, update: int) -> pl.DataFrame:
    records = read_tokens(run.path, update).with_row_index("record")
    present = [name for name in (*_PER_TARGET, *_FLAGS) if name in records.columns]
    flat = _flat(records.select("record", *present))
    flat = flat.with_columns(sampler=_sampler_logprobs(sources, run, records))
    flat = flat.filter("loss_mask")
    difference = (
        _column(flat, "logprobs", pl.Float32).cast(pl.Float64) - pl.col("sampler").cast(pl.Float64)
    ).abs()
    weighted = _column(flat, "weights", pl.Float32).cast(pl.Float64) * _column(
        flat, "losses", pl.Float32
    ).cast(pl.Float64)
    sums = flat.group_by("record").agg(
        num_targets=pl.len().cast(pl.Int32),
        loss_share=weighted.sum(),
        max_importance_weight=_column(flat, "importance_weights", pl.Float32).max(),
        max_abs_difference=difference.max(),
        mean_abs_difference=difference.mean(),
        num_clipped=_column(flat, "clipped", pl.Boolean).sum().cast(pl.Int32),
        num_rejected=_column(flat, "rejected", pl.Boolean).sum().cast(pl.Int32),
        advantage=_column(flat, "advantages", pl.Float32).cast(pl.Float64).mean(),
    )
    recorded = records.select("record", *KEYS)
    ids = {path: run.dataset_of(path) for path in recorded["dataset"].unique().to_list()}
    named = recorded.with_columns(
        pl.col("dataset").replace_strict(ids, default=None, return_dtype=pl.String)
    )
    rows = named.join(sums, on="record", how="inner", maintain_order="left")
    return rows.sort(
        pl.col("loss_share").abs(), descending=True, nulls_last=True, maintain_order=True
    )


def _flat(records: pl.DataFrame) -> pl.DataFrame:
    """Return one line per response token, with its position in the response."""
    key = records.columns[0]
    lists = [name for name in records.columns if name != key]
    sizes = records["loss_mask"].list.len()
    # A null list becomes one null per token.
    filled = [
        pl.when(pl.col(name).is_null())
        .then(pl.lit(None, pl.Float32).repeat_by(pl.col("loss_mask").list.len()).cast(kind))
        .otherwise(pl.col(name))
        .alias(name)
        for name, kind in records.select(lists).schema.items()
    ]
    filled_records = records.with_columns(filled).filter(sizes > 0)
    positions = pl.int_ranges(0, pl.col("loss_mask").list.len()).alias("position")
    flat = filled_records.with_columns(positions).explode(*lists, "position")
    return flat.with_columns(pl.col("position").cast(pl.Int32))


def _column(frame: pl.DataFrame, name: str, kind: pl.DataType | type[pl.DataType]) -> pl.Expr:
    return pl.col(name) if name in frame.columns else pl.lit(None, kind)


def _sampler_logprobs(sources: Sources, run: Run, records: pl.DataFrame) -> pl.Series:
    """Read the sampler's log-probability of each response token, in the order of the records."""
    sizes = records["loss_mask"].list.len().to_list()
    values_of: list[pa.Array] = [pa.nulls(size, pa.float32()) for size in sizes]
    for path, part in records.select("record", *KEYS).group_by("dataset"):
        number = run.dataset_of(str(path[0]))
        if number is None:
            continue
        dataset = sources.dataset(number)
        if not dataset.has("rollout_logprobs"):
            continue
        places = []
        for record, trajectory_id, step_index in part.select(
            "record", "trajectory_id", "step_index"
        ).rows():
            try:
                begin, end = dataset.index.bounds(dataset.index.number(trajectory_id))
            except RolloutError:
                continue  # the dataset has changed since the run
            if step_index < end - begin:
                places.append((begin + step_index, record))
        places.sort()
        rows = np.array([row for row, _ in places], np.int64)
        lists = dataset.reader.take(rows, ["rollout_logprobs"]).column(0)
        for (_, record), values in zip(places, lists, strict=True):
            if values.is_valid and len(values.values) == sizes[record]:
                values_of[record] = values.values
    flat = pa.concat_arrays(
        [part for part in values_of if len(part)] or [pa.nulls(0, pa.float32())]
    )
    series = pl.from_arrow(flat)
    assert isinstance(series, pl.Series)
    return series.alias("sampler")
