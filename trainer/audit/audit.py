"""Audit a dataset: find the weights and settings that sampled each span.

All rows are forwarded under their labelled weights. A sample of rows, and those that do not fit
their label, are also forwarded under all other candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from schemas.errors import InputError, count
from schemas.metadata import LogprobsMode
from schemas.ragged import IntArray
from schemas.verdicts import VERDICT_COLUMNS
from trainer.audit.candidates import Candidate
from trainer.audit.causes import describe
from trainer.audit.explanations import Search
from trainer.audit.noise import Noise, Residuals, fit_noise, typical_scale
from trainer.audit.prompts import PromptVariants
from trainer.audit.rescoring import Cost, Scored, Weights, num_distinct_tokens, score_rows
from trainer.audit.rows import NO_WEIGHTS, AuditRows
from trainer.audit.token_scores import INVERSE_TEMPERATURES
from trainer.audit.verdicts import (
    FAULTS,
    OFFSETS,
    Span,
    Verdict,
    is_suspicious,
    judge,
)
from trainer.models.policy import Policy

CHUNK_TOKENS = 200_000
"""Number of sampled tokens whose scores are in memory at once."""
SAMPLE_TOKENS, SAMPLE_ROWS = 4_000, 24
"""Size of the sample from which the noise is estimated: the smaller limit applies."""
GOLDEN = 0.6180339887
"""Multiples of it, modulo 1, are spread evenly: an order in which any first few are far apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """Settings of an audit.

    Attributes:
        thorough: Forward all rows under all candidates.
        first_pass: Share of the tokens of a thorough audit that the first pass may forward; None:
            it forwards all rows under their labelled weights.
        explains: Try other prompts and precisions for spans that no candidate explains.
        trees: Forward shared prefixes once; if false, rows are forwarded separately.
        tokens_per_micro_batch: Maximum number of tokens per forward pass, except for longer rows.
    """

    thorough: bool = False
    first_pass: float | None = None
    explains: bool = True
    trees: bool = True
    tokens_per_micro_batch: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Cost of an audit, known before it starts.

    Attributes:
        num_candidates: Number of candidates.
        num_distinct: Distinct tokens of the rows, which each candidate may have to forward.
        num_first: Tokens that the first pass forwards.
        num_most: Tokens to forward if every row needs all candidates.
    """

    num_candidates: int
    num_distinct: int
    num_first: int
    num_most: int


@dataclass(kw_only=True)
class AuditResult:
    """Result of an audit.

    Attributes:
        verdicts: One row per span; see `schemas.VERDICT_COLUMNS`.
        candidates: The candidates.
        noise: Noise of the dataset's engine.
        mode: Kind of the stored log-probabilities.
        mode_is_inferred: True if the dataset's metadata does not contain it.
        plan: Planned cost.
        cost: Actual cost.
        num_rows: Rows audited.
        num_suspicious: Rows forwarded under all candidates because they did not fit their label.
        clean: Residuals of the spans without faults.
        apart: Mean absolute difference in nats between two candidates, by their numbers.
    """

    verdicts: pl.DataFrame
    candidates: Sequence[Candidate]
    noise: Noise
    mode: LogprobsMode
    mode_is_inferred: bool
    plan: Plan
    cost: Cost
    num_rows: int
    num_suspicious: int
    clean: list[Residuals] = field(default_factory=list)
    apart: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def faults(self) -> pl.DataFrame:
        """Spans with a fault."""
        return self.verdicts.filter(pl.col("kind").is_in(FAULTS))


SCHEMA = pl.Schema(
    {column.name: pl.Series(pa.array([], column.type)).dtype for column in VERDICT_COLUMNS}
)
"""Types of the verdicts' columns, `schemas.VERDICT_COLUMNS`."""


UNKNOWN, MISSING = -1, -2
"""Labelled candidate of a row without a version, and of one whose weights are not given."""


def labelled_candidates(rows: AuditRows, candidates: Sequence[Candidate]) -> IntArray:
    """Return the number of each row's labelled candidate; `UNKNOWN` or `MISSING` if there is none.

    A single candidate without a version is taken as the weights of all rows.
    """
    numbers = {one.version: i for i, one in enumerate(candidates) if one.version is not None}
    if len(candidates) == 1 and not numbers:
        return np.zeros(rows.num_rows, np.int64)
    found = [numbers.get(v, MISSING) if v >= 0 else UNKNOWN for v in rows.version.tolist()]
    return np.array(found, np.int64)


def run_audit(
    rows: AuditRows,
    weights: Weights,
    settings: AuditSettings,
    *,
    dataset: str,
    variants: PromptVariants | None = None,
    known: Sequence[Residuals] = (),
    announce: Callable[[Plan, Cost, int], None] = lambda *_: None,
) -> AuditResult:
    """Audit rows under the candidates of `weights`.

    Args:
        rows: Rows to audit.
        weights: The candidates.
        settings: Settings of the audit.
        dataset: Path of the rows' dataset, for the verdicts.
        variants: Renders prompts in other ways; None: other prompts are not tried.
        known: Residuals of rows without faults from the same engine, for the estimate of its noise;
            without any, a sample of the rows is scored under all candidates.
        announce: Called after each micro-batch with its number of tokens; the first one shows how
            long the audit will take.

    Raises:
        InputError: A candidate cannot be loaded.
    """
    label = labelled_candidates(rows, weights.candidates)
    rows.refuse(label == MISSING, NO_WEIGHTS)
    plan, limit = _plan(rows, weights, settings)
    cost = Cost()
    cost.on_micro_batch = lambda num_tokens: announce(plan, cost, num_tokens)
    found = AuditResult(
        verdicts=pl.DataFrame(schema=SCHEMA),
        candidates=weights.candidates,
        noise=Noise(),
        mode=rows.mode or "raw",
        mode_is_inferred=rows.mode is None,
        plan=plan,
        cost=cost,
        num_rows=int(rows.auditable.sum()),
        num_suspicious=0,
    )
    tables = []
    for number, (first, last) in enumerate(_chunks(rows)):
        chunk = _Chunk(rows.part(first, last), label[first:last], weights, settings, cost, limit)
        chunk.first_pass(with_sample=number == 0 and not known)
        if number == 0:
            found.mode = rows.mode or chunk.likely_mode()
            found.noise = fit_noise([*known, *chunk.best_residuals()])
            if not found.noise.num_tokens:  # rows that no label fits, outside of the sample
                found.noise = fit_noise(chunk.best_residuals(of_sample=True))
            found.apart = chunk.apart(found.mode)
        found.num_suspicious += chunk.second_pass(found.noise, found.mode)
        allowance = round(EXTRA * plan.num_candidates * plan.num_distinct)
        allowance = max(allowance, cost.num_tokens + EXTRA_TOKENS)
        tables.append(chunk.verdicts(found.noise, found.mode, variants, allowance))
        found.clean += chunk.clean_residuals(tables[-1], found.mode)
    named = [table.with_columns(dataset=pl.lit(dataset)) for table in tables]
    found.verdicts = pl.concat([found.verdicts, *named])
    return found


def _chunks(rows: AuditRows) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that contain whole groups and about `CHUNK_TOKENS` targets."""
    lengths = np.bincount(rows.span_row, rows.span_length, minlength=rows.num_rows)
    upto, group = np.cumsum(lengths), rows.group
    ends = np.flatnonzero(np.append(np.diff(group) != 0, [True])) + 1
    first, before = 0, 0.0
    for end in ends.tolist() if rows.num_rows else []:
        if upto[end - 1] - before >= CHUNK_TOKENS or end == rows.num_rows:
            yield first, end
            first, before = end, float(upto[end - 1])


def _plan(rows: AuditRows, weights: Weights, settings: AuditSettings) -> tuple[Plan, int | None]:
    """Count the tokens to forward, and choose how many response tokens the first pass scores."""
    num_candidates = len(weights.candidates)
    parts = [rows.part(first, last) for first, last in _chunks(rows)]

    def tokens(limit: int | None = None) -> int:
        each = [np.flatnonzero(part.auditable) for part in parts]
        limits = [None if limit is None else np.full(len(own), limit) for own in each]
        return sum(map(num_distinct_tokens, parts, each, limits))

    num_distinct = tokens()
    num_most, num_first, limit = num_candidates * num_distinct, num_distinct, None
    if settings.thorough:
        num_first = num_most
    elif settings.first_pass is not None:
        budget = settings.first_pass * num_most
        low, high = SMALLEST_LIMIT, int(rows.responses.lengths.max(initial=1))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if tokens(middle) <= budget else (low, middle - 1)
        limit, num_first = low, tokens(low)
    plan = Plan(
        num_candidates=num_candidates,
        num_distinct=num_distinct,
        num_first=num_first,
        num_most=num_most if limit is None else num_most + num_first,
    )
    return plan, limit


EXTRA = 1.1
"""Maximum number of tokens to forward, relative to candidates x distinct tokens."""
EXTRA_TOKENS = 10_000
"""Tokens that may be forwarded in any case to explain differences: a few rows of a small dataset."""
SMALLEST_LIMIT = 4
"""Minimum number of response tokens that a limited first pass scores."""


class _Chunk:
    """The audit of some complete groups.

    Args:
        rows: R rows.
        label: [R] labelled candidates.
        weights: The candidates.
        settings: Settings of the audit.
        cost: Counts the forwarded tokens.
        limit: Number of response tokens that the first pass scores; None: all.
    """

    def __init__(
        self,
        rows: AuditRows,
        label: IntArray,
        weights: Weights,
        settings: AuditSettings,
        cost: Cost,
        limit: int | None,
    ) -> None:
        self._rows, self._label, self._weights = rows, label, weights
        self._settings, self._cost, self._limit = settings, cost, limit
        self._usable = np.flatnonzero(rows.auditable)
        self._scored: dict[int, Scored] = {}
        self._complete = np.zeros((len(weights.candidates), rows.num_rows), np.bool_)
        self._sample = np.zeros(0, np.int64)

    def first_pass(self, *, with_sample: bool) -> None:
        """Score rows under their labelled weights, and a sample of rows under all candidates."""
        every = range(len(self._weights.candidates))
        if self._settings.thorough:
            self._sample = self._usable
        elif with_sample:
            self._sample = self._sampled()
        limited = np.setdiff1d(self._usable, self._sample)
        for number in every:
            own = limited[self._label[limited] == number]
            self._score(number, np.union1d(self._sample, own) if self._limit is None else own)
            if self._limit is not None:
                self._score(number, self._sample, limited=False)

    def second_pass(self, noise: Noise, mode: LogprobsMode) -> int:
        """Score suspicious rows under all candidates; return their number."""
        rest = np.setdiff1d(self._usable, self._sample)
        spans = np.flatnonzero(np.isin(self._rows.span_row, rest))
        suspicious = {int(r) for r in rest.tolist() if self._label[r] == UNKNOWN}
        for number in spans.tolist():
            row = int(self._rows.span_row[number])
            if row not in suspicious:
                span = self._span(number)
                if span is not None and is_suspicious(span, noise, mode):
                    suspicious.add(row)
        wanted = np.array(sorted(suspicious), np.int64)
        for number in range(len(self._weights.candidates)):
            self._score(number, wanted[~self._complete[number, wanted]], limited=False)
        return len(wanted)

    def _sampled(self) -> IntArray:
        """Choose groups, spread over the chunk, for the estimate of the noise.

        Complete groups, because a later pass would forward their prompts again.
        """
        usable = self._usable
        wanted = min(len(usable), SAMPLE_ROWS, max(len(usable) // 10, 4))
        lengths = np.bincount(
            self._rows.span_row, self._rows.span_length, minlength=self._rows.num_rows
        )
        group = self._rows.group[usable]
        names = np.unique(group)
        order = names[np.argsort(np.arange(len(names)) * GOLDEN % 1)]
        found: list[int] = []
        for name in order.tolist():
            found += usable[group == name].tolist()[: wanted - len(found)]
            if len(found) >= wanted or lengths[found].sum() >= SAMPLE_TOKENS:
                break
        return np.array(sorted(found), np.int64)

    def _score(self, number: int, wanted: IntArray, *, limited: bool = True) -> None:
        if not len(wanted):
            return
        length = len(self._rows.responses.values)
        found = self._scored.setdefault(number, Scored(place=np.full(length, -1, np.int64)))
        is_limited = limited and self._limit is not None
        limit = np.full(len(wanted), self._limit) if is_limited else None
        budget = self._settings.tokens_per_micro_batch
        policy = self._weights.policy(number)
        self._check_vocabulary(number, policy, wanted)
        trees, cost = self._settings.trees, self._cost
        score_rows(policy, self._rows, wanted, found, cost, budget=budget, trees=trees, limit=limit)
        self._complete[number, wanted] = not is_limited

    def _check_vocabulary(self, number: int, policy: Policy, wanted: IntArray) -> None:
        """Check that a candidate has an embedding for each token of some rows.

        Raises:
            InputError: `audit_rows`: it lacks one.
        """
        size = policy.model.get_input_embeddings().weight.shape[0]
        for row in wanted.tolist():
            tokens = (self._rows.prompts.row(row), self._rows.responses.row(row))
            largest = max(int(part.max(initial=0)) for part in tokens)
            if largest >= size:
                one = self._weights.candidates[number]
                got = f"token {largest}, but {one.name} ({one.path}) has {count(size, 'token')}"
                hint = "leave out candidates that have another tokenizer than the dataset"
                raise InputError("audit_rows", self._rows.name(row), got, hint=hint)

    def _span(self, number: int) -> Span | None:
        """Collect the scores of a span; None if no candidate has scored it."""
        rows = self._rows
        row, start = int(rows.span_row[number]), int(rows.span_start[number])
        length = int(rows.span_length[number])
        label = int(self._label[row])
        complete = np.flatnonzero(self._complete[:, row]).tolist()
        if not complete:
            if self._limit is None or label < 0:
                return None
            within = self._limit - (start - int(rows.responses.offsets[row]))
            length, complete = min(length, within), [label]
            if length <= 0:
                return None
        found = {c: self._scored[c].at(start, length) for c in complete}
        scores = {c: one for c, one in found.items() if one is not None}
        return Span(
            stored=rows.logprobs[start : start + length],
            scores=scores,
            labelled=label if label in scores else None,
            inverse_temperature=float(np.float32(1 / rows.temperature[row])),
            truncation=rows.truncations[row],
            stored_temperature=float(rows.stored_temperature[row]),
        )

    def _spans(self) -> Iterator[Span]:
        for number in range(len(self._rows.span_row)):
            span = self._span(number)
            if span is not None:
                yield span

    def clean_residuals(self, verdicts: pl.DataFrame, mode: LogprobsMode) -> list[Residuals]:
        """Return the residuals of the spans without faults under their labelled weights."""
        found = []
        for number, kind in enumerate(verdicts["kind"]):
            span = self._span(number) if kind == "as_labelled" else None
            if span is None or span.labelled is None or np.isnan(span.stored_temperature):
                continue
            predicted = span.predicted(span.labelled, mode)
            found.append(Residuals(span.stored - predicted, predicted, span.inverse(mode)))
        return found

    def likely_mode(self) -> LogprobsMode:
        """Return the kind of log-probabilities that fits most rows of the first pass."""
        balance = 0.0
        for span in self._spans():
            if span.modes_differ:
                raw, processed = (
                    min(typical_scale(r) for r in _residuals(span, mode, plain=True))
                    for mode in ("raw", "processed")
                )
                balance += np.sign(raw - processed) * len(span.stored)
        return "processed" if balance > 0 else "raw"

    def best_residuals(self, *, of_sample: bool = False) -> list[Residuals]:
        """Return the residuals of the best simple fit of each span, or of each of the sample."""
        every: list[LogprobsMode] = ["raw", "processed"]
        return [
            min((r for mode in every for r in _residuals(span, mode)), key=typical_scale)
            for span in self._spans()
            if not of_sample or len(span.scores) == len(self._weights.candidates)
        ]

    def apart(self, mode: LogprobsMode) -> dict[tuple[int, int], float]:
        """Compute the mean absolute difference between candidates on the sample."""
        found: dict[tuple[int, int], list[float]] = {}
        for number in np.flatnonzero(np.isin(self._rows.span_row, self._sample)).tolist():
            span = self._span(number)
            if span is None:
                continue
            predicted = {c: span.predicted(c, mode) for c in span.scores}
            for a in predicted:
                for b in predicted:
                    if a < b:
                        distance = np.abs(predicted[a] - predicted[b])
                        found.setdefault((a, b), []).extend(distance.tolist())
        return {pair: float(np.mean(values)) for pair, values in found.items()}

    def verdicts(
        self,
        noise: Noise,
        mode: LogprobsMode,
        variants: PromptVariants | None,
        allowance: int,
    ) -> pl.DataFrame:
        """Judge every span, and list the rows that cannot be audited."""
        rows = self._rows
        spans = [
            None if rows.reasons[row] else self._span(number)
            for number, row in enumerate(rows.span_row.tolist())
        ]
        found = [None if span is None else judge(span, noise, mode) for span in spans]
        if self._settings.explains:
            self._explain(spans, found, noise, mode, variants, allowance)
        out, counted = [], dict[int, int]()
        for number, (span, verdict) in enumerate(zip(spans, found, strict=True)):
            row = int(rows.span_row[number])
            index = counted.setdefault(row, 0)
            counted[row] += 1
            start = int(rows.span_start[number] - rows.responses.offsets[row])
            line = self._line(row) | {"span": index, "start": start}
            if span is None or verdict is None:
                length, reason = int(rows.span_length[number]), rows.reasons[row] or NOT_REACHED
                line |= {"end": start + length, "num_tokens": 0}
                out.append(line | {"kind": "not_checked", "reason": reason})
                continue
            line |= {"end": start + len(span.stored), "num_tokens": len(span.stored)}
            line |= self._values(verdict, start)
            in_words = describe(line) if verdict.kind in FAULTS else None
            out.append(line | {"reason": in_words})
        return pl.DataFrame(out, schema=SCHEMA)

    def _explain(
        self,
        spans: Sequence[Span | None],
        found: list[Verdict | None],
        noise: Noise,
        mode: LogprobsMode,
        variants: PromptVariants | None,
        allowance: int,
    ) -> None:
        """Replace verdicts without a known cause if another prompt or precision fits."""
        rows = self._rows
        search = Search(
            rows=rows,
            spans=spans,
            found=found,
            policy=self._weights.policy,
            noise=noise,
            mode=mode,
            cost=self._cost,
            allowance=allowance,
            budget=self._settings.tokens_per_micro_batch,
            trees=self._settings.trees,
        )
        search.run(self._label, variants)

    def _line(self, row: int) -> dict[str, Any]:
        keys = self._rows.keys.row(row, named=True)
        keys.pop("messages", None)
        version = int(self._rows.version[row])
        temperature = float(self._rows.stored_temperature[row])
        response = self._rows.responses.row(row)
        return keys | {
            "num_response_tokens": len(response),
            "token_sum": int(response.sum(dtype=np.int64)),
            "labelled_version": None if version < 0 else version,
            "labelled_temperature": None if np.isnan(temperature) else temperature,
        }

    def _values(self, found: Verdict, start: int) -> dict[str, Any]:
        one, candidates = found.hypothesis, self._weights.candidates
        best = candidates[one.candidate]
        second = None if one.second is None else candidates[one.second]
        return {
            "kind": found.kind,
            "best_version": best.version,
            "best_weights": str(best.path),
            "second_version": second.version if second else None,
            "swap_position": None if one.position is None else start + one.position,
            "best_temperature": round(1 / one.sampled_inverse, 3),
            "best_top_p": one.truncation.top_p,
            "best_top_k": one.truncation.top_k,
            "best_min_p": one.truncation.min_p,
            "offset": one.offset,
            "log_likelihood_ratio": found.log_likelihood_ratio,
            "margin": found.margin,
            "num_decisive": found.num_decisive,
            "noise_scale": found.scale,
            "mean_difference": found.mean_difference,
            "reason": found.reason or None,
        }


NOT_REACHED = "after the tokens that the first pass scores"


def _residuals(span: Span, mode: LogprobsMode, *, plain: bool = False) -> Iterator[Residuals]:
    """Yield the residuals of each simple hypothesis."""
    inverse = span.inverse(mode)
    for number, scores in span.scores.items():
        predicted = span.predicted(number, mode)
        yield Residuals(span.stored - predicted, predicted, inverse)
        if plain:
            continue
        for offset in OFFSETS:
            n = len(predicted) - abs(offset)
            if n > 0:
                shifted = predicted[max(offset, 0) :][:n]
                yield Residuals(span.stored[max(-offset, 0) :][:n] - shifted, shifted, inverse)
        if mode == "processed":
            for b in INVERSE_TEMPERATURES:
                predicted = scores.at(b)
                yield Residuals(span.stored - predicted, predicted, b)
