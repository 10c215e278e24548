"""Audit of a part of a dataset: two passes of scores, the noise, and a verdict for each span."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import InputError, count
from schemas.metadata import LogprobsMode
from schemas.ragged import BoolArray, IntArray
from trainer.forensics.audit.causes import describe
from trainer.forensics.audit.explanations import Search
from trainer.forensics.audit.first_tokens import (
    choose_sample,
    choose_tokens,
    first_portion,
    num_repeated,
    with_labels_of_group,
)
from trainer.forensics.audit.hypotheses import Span
from trainer.forensics.audit.noise import (
    FLOOR,
    MIN_TOKENS,
    NEAR,
    Noise,
    Residuals,
    dependence_of,
    fit_noise,
    typical_noise,
    typical_scale,
)
from trainer.forensics.audit.prompts import PromptVariants
from trainer.forensics.audit.rescoring import Cost, Scored, Weights, num_distinct_tokens, score_rows
from trainer.forensics.audit.result import SCHEMA, AuditResult, AuditSettings, Plan
from trainer.forensics.audit.rows import AuditRows
from trainer.forensics.audit.token_scores import NO_TRUNCATION
from trainer.forensics.audit.verdicts import FAULTS, Verdict, is_suspicious, judge
from trainer.models.policy import Policy

UNKNOWN, MISSING = -1, -2
"""Labels of rows without a version, and of rows whose weights are not among the candidates."""

MIXED, AGAIN = 0.03, 0.05
"""Limits on the number of tokens forwarded twice, as a fraction of candidates x distinct tokens.
`MIXED` applies if rows of a group have different labels, `AGAIN` if the first pass scored only a
part of a row."""
SMALLEST_PORTION = 8
"""The first pass scores whole rows once less than 1 / `SMALLEST_PORTION` of the limit `AGAIN` is
left."""


class Chunk:
    """The audit of a part of the dataset that consists of complete groups.

    Args:
        rows: R rows.
        label: [R] labelled candidates.
        weights: The candidates.
        settings: Settings of the audit.

    Attributes:
        num_first_scored: Tokens that the first pass scored under labelled weights.
        num_sampled: Sampled tokens of the rows that can be audited.
    """

    def __init__(
        self, rows: AuditRows, label: IntArray, weights: Weights, settings: AuditSettings
    ) -> None:
        self._rows, self._label, self._weights = rows, label, weights
        self._settings = settings
        self._usable = np.flatnonzero(rows.auditable)
        self._sample = np.zeros(0, np.int64)
        self._first = np.zeros((len(weights.candidates), rows.num_rows), np.bool_)
        self._among: BoolArray | None = None
        self._again = 0
        self._suspicious: set[int] = set()
        self.num_first_scored = 0
        self.num_sampled = int(rows.targets(self._usable).sum())
        self.end()

    def plan(self, *, with_sample: bool) -> Plan:
        """Choose the sample, and the rows that the first pass scores under each candidate."""
        rows, usable, number = self._rows, self._usable, len(self._weights.candidates)
        num_distinct = num_distinct_tokens(rows, usable)
        if self._settings.thorough:
            self._sample = usable
        elif with_sample and number > 0:
            self._sample = choose_sample(rows, usable)
        repeated = number * num_repeated(rows, self._sample, usable)
        rest = np.setdiff1d(usable, self._sample)
        known = rest[self._label[rest] >= 0]
        self._first[self._label[known], known] = True
        mixed = sum(num_repeated(rows, np.flatnonzero(own), rest) for own in self._first)
        if mixed > MIXED * number * num_distinct:
            whole = with_labels_of_group(rows, rest, self._label)
            self._first[: len(whole)] = whole
            mixed = 0
        share = self._settings.first_pass
        if share is not None and share < 1:
            self._among = choose_tokens(rows, rest, share)
            self._again = int(AGAIN * number * num_distinct)
        first = self._num_first(rest, self._among)
        return Plan(
            num_candidates=number,
            num_distinct=num_distinct,
            num_first=number * num_distinct_tokens(rows, self._sample) + first,
            num_most=number * num_distinct + repeated + mixed + self._again,
        )

    def begin(self, cost: Cost) -> None:
        """Score the sample under all candidates."""
        self._cost = cost
        for number in range(len(self._weights.candidates)):
            self._score(number, self._sample)

    def end(self) -> None:
        """Drop all scores."""
        self._scored: dict[int, Scored] = {}
        self._complete = np.zeros(self._first.shape, np.bool_)

    def learn(self, found: AuditResult, known: Sequence[Residuals]) -> None:
        """Estimate the noise and the kind of log-probabilities from all scores so far."""
        found.mode, found.num_mode_tokens = self._rows.mode or "raw", 0
        if self._rows.mode is None:
            found.mode, found.num_mode_tokens = self.likely_mode()
        noise = fit_noise([*known, *self.best_residuals()])
        if not noise.num_tokens:  # rows outside the sample do not fit their labels
            noise = fit_noise(self.best_residuals(of_sample=True))
        found.apart, relative = self.apart(found.mode)
        noise = dataclasses.replace(noise, apart=relative or noise.apart)
        dependence = dependence_of(noise, self._agreements(noise, found.mode))
        found.noise = dataclasses.replace(noise, dependence=dependence)

    def first_pass(self, noise: Noise, mode: LogprobsMode) -> None:
        """Score rows under their labelled weights: all tokens, or a selection of tokens.

        If only a selection of a row's tokens was scored and the row is suspicious, it is forwarded
        again later. Once the tokens forwarded again could exceed `AGAIN`, all tokens of the
        remaining rows are scored.
        """
        rest = np.setdiff1d(self._usable, self._sample)
        if self._among is None:
            self._score_first(rest, None)
            return
        left, most_labels = self._again, int(self._first[:, rest].sum(0).max(initial=1))
        while len(rest):
            part = first_portion(self._rows, rest, left // most_labels)
            if left < self._again // SMALLEST_PORTION or self._num_first(part) > left:
                self._score_first(rest, None)
                return
            rest = rest[len(part) :]
            self._score_first(part, self._among)
            found = self._suspicious_among(part, noise, mode)
            self._suspicious |= found
            left -= self._num_first(np.array(sorted(found), np.int64))

    def _num_first(self, part: IntArray, among: BoolArray | None = None) -> int:
        """Count the tokens that the first pass forwards for the given rows, over all candidates."""
        each = (part[own[part]] for own in self._first)
        return sum(num_distinct_tokens(self._rows, wanted, among) for wanted in each)

    def _score_first(self, part: IntArray, among: BoolArray | None) -> None:
        self.num_first_scored += int(self._rows.targets(part, among).sum())
        for number in range(len(self._first)):
            self._score(number, part[self._first[number, part]], among)

    def second_pass(self, noise: Noise, mode: LogprobsMode) -> int:
        """Score suspicious rows under all candidates; return their number."""
        rest = np.setdiff1d(self._usable, self._sample)
        if self._among is not None:  # the first pass judged all other rows
            rest = rest[self._complete[:, rest].any(0) | (self._label[rest] == UNKNOWN)]
        self._suspicious |= self._suspicious_among(rest, noise, mode)
        wanted = np.array(sorted(self._suspicious), np.int64)
        for number in range(len(self._weights.candidates)):
            self._score(number, wanted[~self._complete[number, wanted]])
        return len(wanted)

    def _suspicious_among(self, rows: IntArray, noise: Noise, mode: LogprobsMode) -> set[int]:
        """Return the rows without a label, and the rows that their labelled weights do not explain."""
        found = {int(row) for row in rows.tolist() if self._label[row] == UNKNOWN}
        for number in np.flatnonzero(np.isin(self._rows.span_row, rows)).tolist():
            row = int(self._rows.span_row[number])
            if row not in found:
                span = self._span(number)
                if span is not None and is_suspicious(span, noise, mode):
                    found.add(row)
        return found

    def _score(self, number: int, wanted: IntArray, among: BoolArray | None = None) -> None:
        if not len(wanted):
            return
        length = len(self._rows.responses.values)
        found = self._scored.setdefault(number, Scored(place=np.full(length, -1, np.int64)))
        budget = self._settings.tokens_per_micro_batch
        policy = self._weights.policy(number)
        self._check_vocabulary(number, policy, wanted)
        trees, cost = self._settings.trees, self._cost
        score_rows(policy, self._rows, wanted, found, cost, budget=budget, trees=trees, among=among)
        if among is None:
            self._complete[number, wanted] = True

    def _check_vocabulary(self, number: int, policy: Policy, wanted: IntArray) -> None:
        """Check that a candidate has an embedding for every token of the given rows."""
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
        slots = np.arange(start, start + int(rows.span_length[number]))
        label = int(self._label[row])
        numbers = np.flatnonzero(self._complete[:, row]).tolist()
        if not numbers and label in self._scored:
            numbers, slots = [label], self._scored[label].scored_in(start, len(slots))
        if not numbers or not len(slots):
            return None
        scores = {one: self._scored[one].of(slots) for one in numbers}
        found = Span(
            stored=rows.logprobs[slots],
            scores=scores,
            labelled=label if label in scores else None,
            inverse_temperature=float(np.float32(1 / rows.temperature[row])),
            truncation=rows.truncations[row],
            stored_temperature=float(rows.stored_temperature[row]),
            is_whole=len(slots) == rows.span_length[number],
        )
        if not rows.is_assumed[row]:
            return found
        plain = {one: values.untruncated() for one, values in scores.items()}
        neutral = dataclasses.replace(
            found, scores=plain, inverse_temperature=1.0, truncation=NO_TRUNCATION
        )
        return dataclasses.replace(found, neutral=neutral)

    def _spans(self) -> Iterator[Span]:
        for number in range(len(self._rows.span_row)):
            span = self._span(number)
            if span is not None:
                yield span

    def clean_residuals(self, verdicts: pl.DataFrame, mode: LogprobsMode) -> list[Residuals]:
        """Return the residuals, under the labelled weights, of all spans without a fault."""
        found = []
        for number, kind in enumerate(verdicts["kind"]):
            span = self._span(number) if kind == "as_labelled" else None
            if span is None or span.labelled is None or np.isnan(span.stored_temperature):
                continue
            predicted = span.predicted(span.labelled, mode)
            found.append(Residuals(span.stored - predicted, predicted, span.inverse(mode)))
        return found

    def likely_mode(self) -> tuple[LogprobsMode, int]:
        """Infer the mode of stored log-probabilities from the spans that clearly fit only one mode.

        The mode that fits more tokens wins. Also returns the number of tokens in these spans. If
        the temperature is unknown, processed log-probabilities may be at any temperature.
        """
        balance, num_tokens = 0.0, 0
        for span in self._spans():
            unknown = bool(np.isnan(span.stored_temperature))
            if not span.modes_differ and not unknown:
                continue
            raw, processed = (
                min(typical_scale(r) for r in span.residuals(mode, temperatures=unknown))
                for mode in MODES
            )
            if min(raw, processed) < CLEARLY * max(raw, processed):
                balance += float(np.sign(raw - processed)) * len(span.stored)
                num_tokens += len(span.stored)
        return "processed" if balance > 0 else "raw", num_tokens

    def best_residuals(self, *, of_sample: bool = False) -> list[Residuals]:
        """Return the residuals of the best simple fit of each span, or only of the sample."""
        return [
            min(
                (r for mode in MODES for r in span.residuals(mode, offsets=True)),
                key=typical_scale,
            )
            for span in self._spans()
            if not of_sample or len(span.scores) == len(self._weights.candidates)
        ]

    def _agreements(self, noise: Noise, mode: LogprobsMode) -> list[list[float]]:
        """Return the `Noise.agreement` of each span of the sample with all candidates but the best.

        The residuals are computed under the best candidate, which may differ from the label. Spans
        that fit no candidate are left out.
        """
        found = []
        for number in np.flatnonzero(np.isin(self._rows.span_row, self._sample)).tolist():
            span = self._span(number)
            if span is None or len(span.scores) < 2 or len(span.stored) < MIN_TOKENS:
                continue
            inverse = span.inverse(mode)
            predicted = [span.predicted(one, mode) for one in span.scores]
            residuals = [Residuals(span.stored - own, own, inverse) for own in predicted]
            best = max(residuals, key=lambda one: _likelihood(one, noise))
            if typical_scale(best) <= NEAR * typical_noise(noise):
                changes = (own - best.predicted for own in predicted if own is not best.predicted)
                found.append([noise.agreement(best, change) for change in changes])
        return found

    def apart(self, mode: LogprobsMode) -> tuple[dict[tuple[int, int], float], float | None]:
        """Compute the mean absolute difference of each pair of candidates on the sample.

        Returns:
            The difference of each pair in nats; and the smallest difference relative to the mean
            sensitivity, None if there is no pair.
        """
        found: dict[tuple[int, int], list[float]] = {}
        sensitivity: dict[tuple[int, int], float] = {}
        for number in np.flatnonzero(np.isin(self._rows.span_row, self._sample)).tolist():
            span = self._span(number)
            if span is None:
                continue
            predicted = {c: span.predicted(c, mode) for c in span.scores}
            for a in predicted:
                own = Residuals(predicted[a], predicted[a], span.inverse(mode)).sensitivity
                for b in predicted:
                    if a < b:
                        distance = np.abs(predicted[a] - predicted[b])
                        found.setdefault((a, b), []).extend(distance.tolist())
                        sensitivity[a, b] = sensitivity.get((a, b), 0.0) + float(own.sum())
        relative = [sum(found[pair]) / max(sensitivity[pair], FLOOR) for pair in found]
        nats = {pair: float(np.mean(values)) for pair, values in found.items()}
        return nats, min(relative, default=None)

    def verdicts(
        self,
        noise: Noise,
        mode: LogprobsMode,
        variants: PromptVariants | None,
        allowance: int,
    ) -> pl.DataFrame:
        """Judge every span; spans that cannot be audited get the kind `not_checked`."""
        rows = self._rows
        spans = [
            None if rows.reasons[row] else self._span(number)
            for number, row in enumerate(rows.span_row.tolist())
        ]
        found = [None if span is None else judge(span, noise, mode) for span in spans]
        if self._settings.explains:
            self._explain(spans, found, noise, mode, variants, allowance)
        out, counted = [], Counter[str]()  # several rows may be parts of one step
        for number, (span, verdict) in enumerate(zip(spans, found, strict=True)):
            row = int(rows.span_row[number])
            index = counted[rows.name(row)]
            counted[rows.name(row)] += 1
            start = int(rows.span_start[number] - rows.responses.offsets[row])
            start += int(rows.keys["first_token"][row])
            line = self._line(row) | {"span": index, "start": start}
            if span is None or verdict is None:
                line |= {"end": start + int(rows.span_length[number]), "num_tokens": 0}
                out.append(line | {"kind": "not_checked", "reason": rows.reasons[row]})
                continue
            end = start + int(rows.span_length[number])
            line |= {"end": end, "num_tokens": len(span.stored)}
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
        """Replace verdicts without a known cause where another prompt or precision fits."""
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
        del keys["first_token"]
        return keys | {
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
            "next_version": None if found.rival is None else candidates[found.rival].version,
            "num_decisive": found.num_decisive,
            "noise_scale": found.scale,
            "mean_difference": found.mean_difference,
            "reason": found.reason or None,
        }


def _likelihood(residuals: Residuals, noise: Noise) -> float:
    sigma = noise.sigma(residuals.predicted, residuals.inverse_temperature)
    return float(noise.log_density(residuals.difference, sigma).sum())


MODES: tuple[LogprobsMode, ...] = ("raw", "processed")
CLEARLY = 0.5
"""A span clearly fits one mode if its typical residual under that mode is less than this fraction
of its typical residual under the other mode."""
