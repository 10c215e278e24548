"""Read the rows to audit: tokens, stored log-probabilities, labels, and the sampled spans."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

import pipelines
from pipelines.frames import ROUTING
from pipelines.merging.merge import VERSIONS, split_versions
from pipelines.sampling_defaults import COLUMNS, NEUTRAL, SamplingDefaults, sampling_extra_of
from rollout_io.dataset.trajectory_facts import with_stored_digest
from schemas.columns import PICTURES
from schemas.metadata import DatasetMetadata, LogprobsMode
from schemas.ragged import BoolArray, IntArray, Ragged, ranges
from schemas.types import with_absent
from trainer.batch import routes_of
from trainer.models.router_replay import Routes

KEYS = ("instance_id", "trajectory_id", "step_index")
LABELS = ("policy_version", "temperature", "top_p", "top_k", "sampling_extra", "rollout_logprobs")
TOKENS = ("prompt_token_ids", "response_ids", "loss_mask")
OPTIONAL = ("segments", "messages", "token_source", "error", ROUTING, PICTURES)
NO_LOGPROBS = "no log-probabilities"
RETOKENIZED = "re-tokenized text"
PICTURED = "pictures, which an audit does not show to the weights"
OTHER_SETTINGS = "sampling settings that change log-probabilities in unknown ways"
NO_WEIGHTS = "the labelled weights are not among the candidates"
TOO_LONG = "longer than the model's context"
CHUNK_TOKENS = 200_000
"""Number of response tokens whose scores are in memory at once."""


class Truncation(NamedTuple):
    """Truncation settings; the defaults are off."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def columns(self) -> dict[str, float]:
        """The settings as columns of a verdict."""
        return {f"best_{name}": value for name, value in self._asdict().items()}


OFF = Truncation()


@dataclass(frozen=True, kw_only=True)
class AuditRows:
    """R rows (steps) of complete groups, with S spans and T response tokens."""

    table: pl.DataFrame  # see `read_steps`
    mode: LogprobsMode | None  # kind of the stored log-probabilities; None if unknown
    defaults: SamplingDefaults  # settings that may have sampled rows that record none
    prompts: Ragged
    responses: Ragged
    logprobs: npt.NDArray[np.float32]  # [T] nats; NaN in rows without log-probabilities
    # [R, 4] labelled 1 / temperature, top_p, top_k and min_p. Engines compute the log-probabilities
    # of greedy rows at temperature 1; unknown temperatures are 1, too.
    settings: npt.NDArray[np.float32]
    temperature: npt.NDArray[np.float64]  # [R] as stored: 0 for greedy rows, NaN if unknown
    is_assumed: BoolArray  # [R] the row records no settings, so `settings` are `defaults`
    reasons: list[str]  # [R] why a row cannot be audited; "" if it can be
    spans: IntArray  # [S, 3] row, flat position of the first token, and number of tokens

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.reasons)

    @cached_property
    def group(self) -> IntArray:
        """[R] index of each row's group; equal for rows with the same `instance_id`."""
        return self.table["instance_id"].rank("dense").to_numpy().astype(np.int64) - 1

    @cached_property
    def routes(self) -> Routes | None:
        """Recorded experts, or None."""
        return routes_of(self.table)

    @property
    def auditable(self) -> IntArray:
        """Rows that can be audited and have a span."""
        has_span = np.bincount(self.spans[:, 0], minlength=self.num_rows) > 0
        has_reason = np.array([bool(reason) for reason in self.reasons], np.bool_)
        return np.flatnonzero(has_span & ~has_reason)

    def targets(self, rows: IntArray) -> BoolArray:
        """[T] true at the sampled tokens of some rows."""
        is_target = np.zeros(len(self.responses.values), np.bool_)
        _, start, length = self.spans[np.isin(self.spans[:, 0], rows)].T
        is_target[ranges(start, length)] = True
        return is_target

    def refuse(self, rows: BoolArray, reason: str) -> None:
        """Set the reason why rows ([R] bool) cannot be audited, unless they have one."""
        for row in np.flatnonzero(rows).tolist():
            self.reasons[row] = self.reasons[row] or reason


def read_audit_rows(
    rollouts: pl.LazyFrame, metadata: DatasetMetadata, defaults: SamplingDefaults = NEUTRAL
) -> list[AuditRows]:
    """Read the rows of a valid rollout table, with merged rows split into steps.

    `defaults` are settings that may have sampled rows that record none. Returns chunks of about
    `CHUNK_TOKENS` response tokens, each of complete groups.
    """
    steps = read_steps(rollouts, metadata)
    tokens = steps["response_ids"].list.len().cum_sum() - 1
    group = steps["instance_id"].rle_id()
    # A group belongs to the chunk in which its last token lies.
    chunk = (tokens // CHUNK_TOKENS).to_frame("chunk").select(pl.col("chunk").max().over(group))
    chunks = steps.with_columns(chunk).partition_by("chunk", include_key=False, maintain_order=True)
    return [to_audit_rows(table, metadata.logprobs_mode, defaults) for table in chunks]


def read_steps(rollouts: pl.LazyFrame, metadata: DatasetMetadata) -> pl.DataFrame:
    """Read the columns that an audit uses; the rows of a group are contiguous.

    A row is a step, or a range of its tokens that one version of the weights sampled: `first_token` is
    the position of its first token in the response of the step, `num_response_tokens` the length of
    that response, and `row_digest` that of the stored row.
    """
    present = rollouts.collect_schema()
    names = (*KEYS, *LABELS, *TOKENS, *OPTIONAL, VERSIONS, "is_last_step")
    steps = with_stored_digest(pipelines.unmerge(rollouts))
    steps = steps.select("row_digest", *(name for name in names if name in present))
    length = pl.col("response_ids").list.len().cast(pl.Int64)
    steps = with_absent(steps, LABELS)
    table = steps.with_columns(num_response_tokens=length, step="step_index").collect()
    if "sampling_extra" not in present:
        extra = sampling_extra_of(metadata.made_by)
        table = table.with_columns(sampling_extra=pl.lit(extra, pl.String))
    if VERSIONS in present:
        table = pl.DataFrame(split_versions(table.to_arrow()))
    first = length.cum_sum().over("trajectory_id", "step") - length
    table = table.with_columns(step_index="step", first_token=first)
    # Adjacent rows then share tokens.
    table = table.sort("instance_id", maintain_order=True)
    return table.drop(VERSIONS, "is_last_step", "step", strict=False)


def to_audit_rows(
    table: pl.DataFrame, mode: LogprobsMode | None, defaults: SamplingDefaults = NEUTRAL
) -> AuditRows:
    """Convert a table of steps, with the columns that `read_steps` selects."""
    for name in {"token_source", PICTURES} - set(table.columns):
        table = table.with_columns(pl.lit(None).alias(name))
    records_none = pl.all_horizontal(pl.col(name).is_null() for name in COLUMNS)
    is_assumed = table.select(records_none & defaults.are_unknown()).to_series()
    labels = table.with_columns(
        *(pl.when(is_assumed).then(getattr(defaults, n)).otherwise(n).alias(n) for n in COLUMNS),
        sampling_extra=pl.when(is_assumed & pl.col("sampling_extra").is_null())
        .then(pl.lit(defaults.extra, pl.String))
        .otherwise("sampling_extra"),
    )
    prompts, responses, stored = (
        Ragged.from_arrow(table[name].to_arrow())
        for name in ("prompt_token_ids", "response_ids", "rollout_logprobs")
    )
    logprobs = np.full(len(responses.values), np.nan, np.float32)
    logprobs[np.repeat(stored.valid, responses.lengths)] = stored.values
    extras = [json.loads(extra or "{}") for extra in labels["sampling_extra"]]
    min_p = np.array([extra.pop("min_p", None) or 0.0 for extra in extras], np.float64)
    temperature, top_p, top_k = (
        labels[name].cast(pl.Float64).fill_null(0.0).replace(0.0, off).to_numpy()
        for name, off in zip(COLUMNS, (1.0, 1.0, 0.0), strict=True)
    )
    settings = np.column_stack([1 / temperature, top_p, top_k, min_p]).astype(np.float32)
    reasons = [
        NO_LOGPROBS * (not has_logprobs)
        or RETOKENIZED * (source == "retokenized")
        or PICTURED * (shown is not None and len(shown) > 0)
        or OTHER_SETTINGS * (bool(extra) and mode != "raw")
        for has_logprobs, source, shown, extra in zip(
            stored.valid, table["token_source"], table[PICTURES], extras, strict=True
        )
    ]
    return AuditRows(
        table=table,
        mode=mode,
        defaults=defaults,
        prompts=prompts,
        responses=responses,
        logprobs=logprobs,
        settings=settings,
        temperature=table["temperature"].cast(pl.Float64).fill_null(float("nan")).to_numpy(),
        is_assumed=is_assumed.to_numpy() & (settings != np.array([1, 1, 0, 0])).any(1),
        reasons=reasons,
        spans=_spans(table, responses, logprobs),
    )


def _spans(table: pl.DataFrame, responses: Ragged, logprobs: npt.NDArray[np.float32]) -> IntArray:
    """Return the row, flat start and length of each sampled span ([S, 3]).

    Without `segments`, trailing tokens that have no log-probability and are not trained on are
    excluded, because a harness may have appended them. If the row has trained tokens, any earlier
    token that is not trained and has no log-probability is part of an observation, and ends a span.
    """
    mask = Ragged.from_arrow(table["loss_mask"].to_arrow()).values.astype(np.bool_)
    counts = mask | (logprobs != 0)
    slots = np.arange(len(counts))
    row_of = responses.row_of(slots)
    last = np.full(len(table), -1, np.int64)
    last[row_of[counts]] = slots[counts]
    trains = np.bincount(row_of[mask], minlength=len(table)) > 0
    mark = np.where((slots <= last[row_of]) & (counts | ~trains[row_of]), row_of, -1)
    if "segments" in table.columns:
        segments = table.with_row_index("row").select("row", "segments").explode("segments")
        start_and_length = pl.col("segments").struct.field("start", "length")
        places = segments.drop_nulls().select("row", start_and_length).to_numpy().astype(np.int64)
        row, start, length = places.T
        mark[np.isin(row_of, row)] = -1
        number = len(table) + np.arange(len(row))
        mark[ranges(responses.offsets[row] + start, length)] = np.repeat(number, length)
    edges = np.flatnonzero(np.diff(mark, prepend=-1, append=-1))
    begin, end = edges[:-1], edges[1:]
    return np.stack([row_of[begin], begin, end - begin], 1)[mark[begin] >= 0]
