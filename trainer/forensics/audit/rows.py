"""Read the rows to audit: tokens, stored log-probabilities, labels, and the sampled spans."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import torch

import pipelines
from pipelines.merging.versions import VERSIONS, split_versions
from pipelines.sampling_defaults import COLUMNS, NEUTRAL, SamplingDefaults
from pipelines.tables import ROUTING
from rollout_io.dataset.row_digests import with_stored_digest
from rollout_io.formats.parsing.sampling import sampling_extra_of
from schemas.columns import arrow_schema
from schemas.metadata import DatasetMetadata, LogprobsMode
from schemas.ragged import BoolArray, IntArray, Ragged, ranges
from trainer.batches.recorded_routes import Routes
from trainer.forensics.audit.token_scores import Labels, Truncation

KEYS = ("instance_id", "trajectory_id", "step_index")
LABELS = ("policy_version", "temperature", "top_p", "top_k", "sampling_extra")
READ = (*KEYS, *LABELS, "prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs")
OPTIONAL = ("segments", "messages", "token_source", "error", ROUTING)
PLACE = ("first_token", "num_response_tokens", "row_digest")
"""Position of a row's first token in the response of its step; length of that response; digest."""
NO_LOGPROBS = "no log-probabilities"
RETOKENIZED = "re-tokenized text"
OTHER_SETTINGS = "sampling settings that change log-probabilities in unknown ways"
NO_WEIGHTS = "the labelled weights are not among the candidates"
TOO_LONG = "longer than the model's context"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRows:
    """R rows (steps) with S spans and T response tokens.

    Attributes:
        keys: [R] table with `instance_id`, `trajectory_id`, `step_index`, `PLACE` and, if present,
            `messages`.
        prompts: Prompt tokens.
        responses: Response tokens.
        logprobs: [T] float32 nats, as stored; NaN in rows without log-probabilities.
        version: [R] labelled version of the weights; -1 if unknown.
        temperature: [R] float64 labelled temperature; 1 if unknown, and 1 for greedy rows, whose
            log-probabilities engines compute at temperature 1.
        stored_temperature: [R] float64 `temperature` as stored: 0 for greedy rows, NaN if unknown.
        truncations: [R] labelled truncation.
        is_assumed: [R] true where the row records no sampling settings, so that those of the model's
            `generation_config.json` are in their place.
        reasons: [R] why a row cannot be audited; "" if it can be.
        span_row: [S] row of each span.
        span_start: [S] flat position of each span's first token.
        span_length: [S] number of tokens of each span.
        mode: Kind of the stored log-probabilities; None if unknown.
        routes: Recorded experts, or None.
    """

    keys: pl.DataFrame
    prompts: Ragged
    responses: Ragged
    logprobs: npt.NDArray[np.float32]
    version: IntArray
    temperature: npt.NDArray[np.float64]
    stored_temperature: npt.NDArray[np.float64]
    truncations: tuple[Truncation, ...]
    is_assumed: BoolArray
    reasons: list[str]
    span_row: IntArray
    span_start: IntArray
    span_length: IntArray
    mode: LogprobsMode | None
    routes: Routes | None = None

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.version)

    @property
    def group(self) -> IntArray:
        """[R] index of each row's group; equal for rows with the same `instance_id`."""
        return self.keys["instance_id"].rank("dense").to_numpy().astype(np.int64) - 1

    @property
    def auditable(self) -> BoolArray:
        """[R] true where a row can be audited and has a span."""
        found = np.array([not reason for reason in self.reasons], np.bool_)
        return found & (np.bincount(self.span_row, minlength=self.num_rows) > 0)

    def targets(self, rows: IntArray, among: BoolArray | None = None) -> BoolArray:
        """[T] true at the sampled tokens of the given rows.

        Args:
            rows: Row indices.
            among: [T] true at the tokens to consider; None: all.
        """
        is_target = np.zeros(len(self.responses.values), np.bool_)
        wanted = np.isin(self.span_row, rows)
        is_target[ranges(self.span_start[wanted], self.span_length[wanted])] = True
        if among is not None:
            is_target &= among
        return is_target

    def refuse(self, rows: BoolArray, reason: str) -> None:
        """Set the reason why the given rows ([R] bool) cannot be audited; keep existing reasons."""
        for row in np.flatnonzero(rows).tolist():
            self.reasons[row] = self.reasons[row] or reason

    def part(self, first: int, last: int) -> AuditRows:
        """Select a range of rows."""
        offsets = self.responses.offsets
        spans = slice(*np.searchsorted(self.span_row, [first, last]).tolist())
        return AuditRows(
            keys=self.keys[first:last],
            prompts=_part(self.prompts, first, last),
            responses=_part(self.responses, first, last),
            logprobs=self.logprobs[offsets[first] : offsets[last]],
            version=self.version[first:last],
            temperature=self.temperature[first:last],
            stored_temperature=self.stored_temperature[first:last],
            truncations=self.truncations[first:last],
            is_assumed=self.is_assumed[first:last],
            reasons=self.reasons[first:last],
            span_row=self.span_row[spans] - first,
            span_start=self.span_start[spans] - offsets[first],
            span_length=self.span_length[spans],
            mode=self.mode,
            routes=None
            if self.routes is None
            else dataclasses.replace(self.routes, tokens=_part(self.routes.tokens, first, last)),
        )

    def labels(self, slots: IntArray) -> Labels:
        """Return the labelled settings of the response tokens at the flat positions `slots`."""
        row = self.responses.row_of(slots)
        cut = [self.truncations[r] for r in row.tolist()]
        return Labels(
            inverse_temperature=torch.from_numpy((1 / self.temperature[row]).astype(np.float32)),
            top_p=torch.tensor([one.top_p for one in cut], dtype=torch.float32),
            top_k=torch.tensor([one.top_k for one in cut], dtype=torch.int64),
            min_p=torch.tensor([one.min_p for one in cut], dtype=torch.float32),
        )

    def name(self, row: int) -> str:
        """Return a row's name, for messages."""
        _, trajectory, step = self.keys.select(KEYS).row(row)
        return f"trajectory '{trajectory}', row {step}"


def read_audit_rows(
    rollouts: pl.LazyFrame,
    metadata: DatasetMetadata,
    mode: LogprobsMode | None = None,
    defaults: SamplingDefaults = NEUTRAL,
) -> AuditRows:
    """Read the rows of a dataset, with merged rows split into steps.

    Args:
        rollouts: A valid rollout table.
        metadata: Metadata of its dataset.
        mode: Kind of the stored log-probabilities; None: as in the metadata.
        defaults: Settings that may have sampled rows that record none.
    """
    return to_audit_rows(read_steps(rollouts, metadata), mode or metadata.logprobs_mode, defaults)


def read_steps(rollouts: pl.LazyFrame, metadata: DatasetMetadata) -> pl.DataFrame:
    """Read the columns that an audit uses; the rows of a group are contiguous.

    A row is a step, or a range of its tokens that one version of the weights sampled.
    """
    present = rollouts.collect_schema()
    names = (*READ, *OPTIONAL, VERSIONS, "is_last_step")
    steps = with_stored_digest(pipelines.unmerge(rollouts))
    steps = steps.select("row_digest", *(name for name in names if name in present))
    table = _by_version(_with_all_columns(steps).collect())
    if "sampling_extra" not in present:
        extra = sampling_extra_of(metadata.made_by)
        table = table.with_columns(sampling_extra=pl.lit(extra, pl.String))
    order = table["instance_id"].rank("dense").to_numpy()  # adjacent rows then share tokens
    return table[np.argsort(order, kind="stable")]


def _by_version(steps: pl.DataFrame) -> pl.DataFrame:
    """Split steps where the weights changed, and add the columns `PLACE`."""
    tokens = pl.col("response_ids")
    steps = steps.with_columns(
        num_response_tokens=tokens.list.len().cast(pl.Int64),
        step=pl.col("step_index"),
    )
    if VERSIONS in steps.columns:
        steps = pl.DataFrame(split_versions(steps.to_arrow()))
    length = tokens.list.len().cast(pl.Int64)
    first = length.cum_sum().over("trajectory_id", "step") - length
    unused = {VERSIONS, "is_last_step", "step"} & set(steps.columns)
    return steps.with_columns(step_index="step", first_token=first).drop(unused)


def _with_all_columns(rows: pl.LazyFrame) -> pl.LazyFrame:
    present = rows.collect_schema()
    kinds: pl.DataFrame = pl.DataFrame(arrow_schema((*LABELS, "rollout_logprobs")).empty_table())
    absent = [name for name in (*LABELS, "rollout_logprobs") if name not in present]
    return rows.with_columns(pl.lit(None, kinds.schema[name]).alias(name) for name in absent)


def to_audit_rows(
    table: pl.DataFrame, mode: LogprobsMode | None, defaults: SamplingDefaults = NEUTRAL
) -> AuditRows:
    """Convert a table of steps, with the columns `READ` and any of `OPTIONAL`."""
    stored_temperature = table["temperature"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    table, is_assumed = _with_defaults(table, defaults)
    prompts, responses = _ragged(table["prompt_token_ids"]), _ragged(table["response_ids"])
    stored = _ragged(table["rollout_logprobs"])
    logprobs = np.full(len(responses.values), np.nan, np.float32)
    logprobs[np.repeat(stored.valid, responses.lengths)] = stored.values
    truncations, others = _truncations(table)
    temperature = table["temperature"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    is_assumed &= (temperature != 1) | np.array([not one.is_off for one in truncations], np.bool_)
    span_row, span_start, span_length = _spans(table, responses, logprobs)
    keys = [name for name in (*KEYS, "messages", *PLACE) if name in table.columns]
    return AuditRows(
        keys=table.select(keys),
        prompts=prompts,
        responses=responses,
        logprobs=logprobs,
        version=table["policy_version"].fill_null(-1).to_numpy().astype(np.int64),
        temperature=np.where(temperature > 0, temperature, 1.0),
        stored_temperature=stored_temperature,
        truncations=tuple(truncations),
        is_assumed=is_assumed,
        reasons=_reasons(table, stored.valid, others if mode != "raw" else [False] * len(table)),
        span_row=span_row,
        span_start=span_start,
        span_length=span_length,
        mode=mode,
        routes=_routes(table),
    )


def _with_defaults(
    table: pl.DataFrame, defaults: SamplingDefaults
) -> tuple[pl.DataFrame, BoolArray]:
    """Fill in the settings of rows that record none; also return which rows these are ([R] bool)."""
    known = table.lazy()
    if "token_source" not in table.columns:
        known = known.with_columns(token_source=pl.lit("engine"))
    records_none = pl.all_horizontal(pl.col(name).is_null() for name in COLUMNS)
    assumed = known.select(records_none & defaults.are_unknown()).collect().to_series()
    filled = defaults.fill(known).collect()
    names = (*COLUMNS, "sampling_extra")
    columns = [pl.when(assumed).then(filled[name]).otherwise(name).alias(name) for name in names]
    return table.with_columns(columns), assumed.to_numpy().copy()


def _truncations(table: pl.DataFrame) -> tuple[list[Truncation], list[bool]]:
    """Return each row's truncation, and whether the row has settings that an audit cannot apply."""
    found, others = [], []
    known: dict[str | None, tuple[float, bool]] = {None: (0.0, False)}
    for top_p, top_k, extra in table.select("top_p", "top_k", "sampling_extra").iter_rows():
        if extra not in known:
            settings = json.loads(extra)
            min_p = settings.pop("min_p", None) or 0.0
            known[extra] = float(min_p), bool(settings)
        min_p, has_others = known[extra]
        found.append(Truncation(top_p=top_p or 1.0, top_k=top_k or 0, min_p=min_p))
        others.append(has_others)
    return found, others


def _reasons(table: pl.DataFrame, has_logprobs: BoolArray, others: list[bool]) -> list[str]:
    sources = table["token_source"] if "token_source" in table.columns else ["engine"] * len(table)
    return [
        NO_LOGPROBS * (not has) or RETOKENIZED * (source == "retokenized") or OTHER_SETTINGS * other
        for has, source, other in zip(has_logprobs.tolist(), sources, others, strict=True)
    ]


def _spans(
    table: pl.DataFrame, responses: Ragged, logprobs: npt.NDArray[np.float32]
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the row, flat start and length of each sampled span.

    Without `segments`, trailing tokens that have no log-probability and are not trained on are
    excluded, because a harness may have appended them. If the row has trained tokens, any earlier
    token that is not trained and has no log-probability is part of an observation, and ends a span.
    """
    mask = _ragged(table["loss_mask"]).values.astype(np.bool_)
    counts = mask | (logprobs != 0)
    row_of = responses.row_of(np.arange(len(counts)))
    last = np.full(len(table), -1, np.int64)
    at = np.flatnonzero(counts)
    last[row_of[at]] = at - responses.offsets[row_of[at]]
    has_segments = np.zeros(len(table), np.bool_)
    rows, starts, lengths = [], [], []
    if "segments" in table.columns:
        has_segments = (table["segments"].list.len().fill_null(0) > 0).to_numpy()
        flat = (
            table.with_row_index("row").select("row", "segments").explode("segments").drop_nulls()
        )
        fields = flat.select("row", pl.col("segments").struct.field("start", "length")).to_dict()
        first, length = (fields[name].to_numpy().astype(np.int64) for name in ("start", "length"))
        row = fields["row"].to_numpy().astype(np.int64)
        rows, starts, lengths = [row], [responses.offsets[row] + first], [length]
    trains = np.zeros(len(table), np.bool_)
    trains[row_of[mask]] = True
    at = np.arange(len(counts)) - responses.offsets[row_of]
    inside = (at <= last[row_of]) & (counts | ~trains[row_of]) & ~has_segments[row_of]
    before = np.append([False], inside[:-1]) & (at > 0)
    after = np.append(inside[1:], [False]) & np.append(at[1:] > 0, [False])
    begin, end = np.flatnonzero(inside & ~before), np.flatnonzero(inside & ~after)
    rows.append(row_of[begin])
    starts.append(begin)
    lengths.append(end - begin + 1)
    row, start, length = (np.concatenate(parts) for parts in (rows, starts, lengths))
    keep = length > 0
    order = np.lexsort((start[keep], row[keep]))
    return row[keep][order], start[keep][order], length[keep][order]


def _part(column: Ragged, first: int, last: int) -> Ragged:
    offsets = column.offsets[first : last + 1]
    values = column.values[offsets[0] : offsets[-1]]
    return Ragged(values, offsets - offsets[0], column.valid[first:last])


def _ragged(column: pl.Series) -> Ragged:
    return Ragged.from_arrow(column.to_arrow())


def _routes(table: pl.DataFrame) -> Routes | None:
    if ROUTING not in table.columns or table[ROUTING].is_null().all():
        return None
    column: pa.ChunkedArray = table.select(ROUTING).to_arrow().column(ROUTING)
    return Routes.from_arrow(column)
