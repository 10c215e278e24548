"""Audit a dataset: find the weights and settings that sampled each span.

All rows are forwarded under their labelled weights. A sample of the rows, and all rows that do not
fit their label, are also forwarded under every other candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import InputError, count
from schemas.ragged import IntArray
from trainer.forensics.audit.candidates import context_tokens
from trainer.forensics.audit.causes import describe
from trainer.forensics.audit.explanations import Search
from trainer.forensics.audit.hypotheses import Fit, Judge, Span
from trainer.forensics.audit.learn import best_residuals, distances, likely_mode
from trainer.forensics.audit.noise import Residuals, fit_noise
from trainer.forensics.audit.prompts import PromptVariants
from trainer.forensics.audit.result import FAULTS, SCHEMA, AuditResult, AuditSettings, Plan
from trainer.forensics.audit.rows import (
    KEYS,
    NO_WEIGHTS,
    TOO_LONG,
    AuditRows,
    Truncation,
)
from trainer.forensics.audit.scores import (
    Cost,
    Scored,
    Weights,
    num_distinct_tokens,
    score_rows,
)
from trainer.models.policy import Policy

UNKNOWN, MISSING = -1, -2
"""Labels of rows without a version, and of rows whose weights are not among the candidates."""
SAMPLE_TOKENS, SAMPLE_ROWS = 4_000, 24
"""Limits on the sample from which the noise is estimated; the smaller one applies."""
GOLDEN = 0.6180339887
"""Multiples of this number, modulo 1, are spread evenly, even if there are only a few."""
REPEATED, MIXED = 0.01, 0.03
"""Limits on tokens forwarded twice, as fractions of candidates x distinct tokens: because the sample
splits a group, and because its rows have different labels."""
EXTRA, EXTRA_TOKENS = 1.1, 10_000
"""To explain differences, an audit may forward `EXTRA` x candidates x distinct tokens in all, and at
least `EXTRA_TOKENS`, so that a few rows of a small dataset can be explained."""


def run_audit(
    chunks: Sequence[AuditRows],
    weights: Weights,
    settings: AuditSettings,
    *,
    dataset: str,
    variants: PromptVariants | None = None,
    clean: Sequence[Residuals] = (),
    announce: Callable[[Plan, Cost, int], None] = lambda *_: None,
) -> AuditResult:
    """Audit rows under the candidates of `weights`.

    Args:
        chunks: Rows to audit; the scores of one chunk are in memory at once.
        weights: The candidates.
        settings: Settings of the audit.
        dataset: Path of the rows' dataset, for the verdicts.
        variants: Renders prompts in other ways; None: other prompts are not tried.
        clean: Residuals of rows without faults, from which the noise of the same engine is
            estimated. If empty, a sample of the rows is scored under all candidates instead.
        announce: Called after each micro-batch with the number of its tokens. The first micro-batch
            shows how long the audit will take.

    Raises:
        InputError: A candidate cannot be loaded.
    """
    plan, cost = Plan(num_candidates=len(weights.candidates)), Cost()
    cost.on_micro_batch = lambda num_tokens: announce(plan, cost, num_tokens)
    result = AuditResult(candidates=weights.candidates, plan=plan, cost=cost)
    audits = [ChunkAudit(rows, weights, settings, result) for rows in chunks]
    for number, audit in enumerate(audits):
        audit.plan(with_sample=number == 0 and not clean)
    for number, audit in enumerate(audits):
        audit.score(clean if number == 0 else None)
        table = audit.verdicts(variants).with_columns(dataset=pl.lit(dataset))
        result.verdicts = pl.concat([result.verdicts, table])
        audit.drop_scores()
    return result


class ChunkAudit:
    """Audit of a chunk of rows, which adds its counts to `result`.

    Call `plan`, `score` and `verdicts`, in this order. `label` are the labelled candidates ([R]), and
    `complete` is true where a row is scored under a candidate ([N, R]).
    """

    def __init__(
        self, rows: AuditRows, weights: Weights, settings: AuditSettings, result: AuditResult
    ) -> None:
        self.rows, self.weights, self.settings, self.result = rows, weights, settings, result
        candidates = weights.candidates
        number_of = {one.version: number for number, one in enumerate(candidates)}
        number_of[None] = UNKNOWN  # also if the version of a candidate is unknown
        labels = [number_of.get(v, MISSING) for v in rows.table["policy_version"]]
        self.label = np.array(labels, np.int64)
        if len(candidates) == 1 and candidates[0].version is None:
            self.label[:] = 0  # it is assumed to have sampled all rows
        rows.refuse(self.label == MISSING, NO_WEIGHTS)
        lengths = rows.prompts.lengths + rows.responses.lengths
        contexts = [tokens for one in candidates if (tokens := context_tokens(one))]
        rows.refuse(lengths > min(contexts, default=np.inf), TOO_LONG)
        self.usable = self.sample = rows.auditable
        result.num_rows += len(self.usable)
        result.mode_is_inferred = rows.mode is None
        result.mode = rows.mode or result.mode
        self.drop_scores()

    def drop_scores(self) -> None:
        """Forget all scores."""
        self.scored: dict[int, Scored] = {}
        self.complete = np.zeros((len(self.weights.candidates), self.rows.num_rows), np.bool_)

    def plan(self, *, with_sample: bool) -> None:
        """Choose the sample, and the other rows that are scored under each candidate at first."""
        rows, usable, plan, number = self.rows, self.usable, self.result.plan, len(self.complete)
        num_distinct = num_distinct_tokens(rows, usable)
        if not self.settings.thorough:
            self.sample = self._sample() if with_sample else usable[:0]
        repeated = number * self._num_repeated(self.sample, usable)
        self.rest = np.setdiff1d(usable, self.sample)
        self.first = np.zeros_like(self.complete)
        labelled = self.rest[self.label[self.rest] >= 0]
        self.first[self.label[labelled], labelled] = True
        parts = (self.rest[is_first] for is_first in self.first[:, self.rest])
        mixed = sum(self._num_repeated(part, self.rest) for part in parts)
        if mixed > MIXED * number * num_distinct:  # score groups under all labels of their rows
            of_group = np.zeros((number, int(rows.group.max()) + 1), np.bool_)
            of_group[self.label[labelled], rows.group[labelled]] = True
            self.first[:, self.rest] = of_group[:, rows.group[self.rest]]
            mixed = 0
        plan.num_distinct += num_distinct
        plan.num_first += number * num_distinct_tokens(rows, self.sample)
        parts = (self.rest[is_first] for is_first in self.first[:, self.rest])
        plan.num_first += sum(num_distinct_tokens(rows, part) for part in parts)
        plan.num_most += number * num_distinct + repeated + mixed

    def _sample(self) -> IntArray:
        """Choose rows, spread over the chunk, from which to estimate the noise.

        The sample consists of complete groups, because a later pass would have to forward the
        prompt of an incomplete group again. A large group whose rows share few tokens may be split.
        """
        rows, usable = self.rows, self.usable
        wanted = min(len(usable), SAMPLE_ROWS, max(len(usable) // 10, 4))
        lengths = np.bincount(rows.spans[:, 0], rows.spans[:, 2], minlength=rows.num_rows)
        groups = np.unique(rows.group[usable])
        limit, sample = REPEATED * num_distinct_tokens(rows, usable), list[int]()
        for group in groups[np.argsort(np.arange(len(groups)) * GOLDEN % 1)].tolist():
            members = usable[rows.group[usable] == group]
            part = members[: wanted - len(sample)]
            if len(members) > SAMPLE_ROWS and self._num_repeated(part, members) <= limit:
                members = part
            sample += members.tolist()
            if len(sample) >= wanted or lengths[sample].sum() >= SAMPLE_TOKENS:
                break
        return np.array(sorted(sample), np.int64)

    def _num_repeated(self, part: IntArray, members: IntArray) -> int:
        """Count the tokens that are forwarded twice if a part of some rows is forwarded separately."""
        parts = (part, np.setdiff1d(members, part))
        total = num_distinct_tokens(self.rows, members)
        return sum(num_distinct_tokens(self.rows, one) for one in parts) - total

    def score(self, clean: Sequence[Residuals] | None) -> None:
        """Score the sample under all candidates, all rows under their labels, the suspicious under all.

        The noise is estimated first, unless `clean` is None: see `_learn`.
        """
        for number in range(len(self.complete)):
            self._score(number, self.sample)
        if clean is not None:
            self._learn(clean)
        for number in range(len(self.complete)):
            self._score(number, self.rest[self.first[number, self.rest]])
        if clean is not None:  # now from more rows
            self._learn(clean)
        suspicious = self._suspicious(self.rest)
        wanted = np.array(sorted(suspicious), np.int64)
        for number in range(len(self.complete)):
            self._score(number, wanted[~self.complete[number, wanted]])
        self.result.num_suspicious += len(wanted)

    def _learn(self, clean: Sequence[Residuals]) -> None:
        """Estimate the noise and the kind of log-probabilities from all scores so far."""
        result, spans = self.result, [span for span in self._spans() if span]
        if self.rows.mode is None:
            result.mode, result.num_mode_tokens = likely_mode(spans)
        in_sample = [span for span in spans if len(span.scores) == len(self.complete)]
        noise = fit_noise([*clean, *map(best_residuals, spans)])
        if not noise.num_tokens:  # rows outside the sample do not fit their labels
            noise = fit_noise([best_residuals(span) for span in in_sample])
        result.apart, apart = distances(in_sample, result.mode)
        result.noise = dataclasses.replace(noise, apart=apart or noise.apart)

    def _suspicious(self, rows: IntArray) -> set[int]:
        """Return the rows without a label, and the rows that their labelled weights do not explain."""
        suspicious = {row for row in rows.tolist() if self.label[row] == UNKNOWN}
        for number in np.flatnonzero(np.isin(self.rows.spans[:, 0], rows)).tolist():
            row, span = int(self.rows.spans[number, 0]), self._span(number)
            if row not in suspicious and span is not None and self._judge.is_suspicious(span):
                suspicious.add(row)
        return suspicious

    @property
    def _judge(self) -> Judge:
        return Judge(self.result.noise, self.result.mode)

    def _score(self, number: int, wanted: IntArray) -> None:
        """Score rows under a candidate.

        Raises:
            InputError: `audit_rows`: the candidate has no embedding for a token.
        """
        if not len(wanted):
            return
        policy = self.weights.policy(number)
        size = policy.model.get_input_embeddings().weight.shape[0]
        for row in wanted.tolist():
            tokens = (self.rows.prompts.row(row), self.rows.responses.row(row))
            largest = max(int(part.max(initial=0)) for part in tokens)
            if largest >= size:
                one = self.weights.candidates[number]
                finding = f"token {largest}, but {one.name} ({one.path}) has {count(size, 'token')}"
                hint = "leave out candidates that have another tokenizer than the dataset"
                raise InputError("audit_rows", self.rows.name(row), finding, hint=hint)
        scored = self.scored.setdefault(number, _unscored(self.rows))
        self._forward(policy, self.rows, wanted, scored)
        self.complete[number, wanted] = True

    def _forward(self, policy: Policy, rows: AuditRows, wanted: IntArray, scored: Scored) -> None:
        budget, trees = self.settings.tokens_per_micro_batch, self.weights.trees
        score_rows(policy, rows, wanted, scored, self.result.cost, budget=budget, trees=trees)

    def _spans(self) -> list[Span | None]:
        return [self._span(number) for number in range(len(self.rows.spans))]

    def _span(self, number: int) -> Span | None:
        """Collect the scores of a span; None if no candidate has scored it."""
        rows = self.rows
        row, start, length = rows.spans[number].tolist()
        label, slots = int(self.label[row]), np.arange(start, start + length)
        candidates = np.flatnonzero(self.complete[:, row]).tolist()
        if rows.reasons[row] or not candidates:
            return None
        inverse, top_p, top_k, min_p = rows.settings[row].tolist()
        return Span(
            stored=rows.logprobs[slots],
            scores={candidate: self.scored[candidate].of(slots) for candidate in candidates},
            label=label if label in candidates else None,
            inverse=inverse,
            truncation=Truncation(top_p, int(top_k), min_p),
            temperature=float(rows.temperature[row]),
            is_assumed=bool(rows.is_assumed[row]),
        )

    def verdicts(self, variants: PromptVariants | None) -> pl.DataFrame:
        """Judge every span; spans that cannot be audited get the kind `not_checked`."""
        rows, judge, cost, plan = self.rows, self._judge, self.result.cost, self.result.plan
        spans = self._spans()
        verdicts = [None if span is None else judge(span) for span in spans]
        limit = round(EXTRA * plan.num_candidates * plan.num_distinct)
        limit = max(limit, cost.num_tokens + EXTRA_TOKENS)

        def score(policy: Policy, copies: AuditRows) -> Scored | None:
            every, scored = np.arange(copies.num_rows), _unscored(copies)
            if not len(every) or cost.num_tokens + num_distinct_tokens(copies, every) > limit:
                return None
            self._forward(policy, copies, every, scored)
            return scored

        if self.settings.explains:
            policy = self.weights.policy
            search = Search(
                rows=rows, spans=spans, verdicts=verdicts, policy=policy, judge=judge, score=score
            )
            search.run(self.label, variants)
        for span, verdict in zip(spans, verdicts, strict=True):
            if span is None or verdict is None or span.label is None:
                continue
            if verdict.kind == "as_labelled" and not np.isnan(span.temperature):
                self.result.clean.append(span.residuals(span.label, self.result.mode))
        row, start, length = rows.spans.T
        start = start - rows.responses.offsets[row] + rows.table["first_token"].to_numpy()[row]
        labels = rows.table.select(
            *(*KEYS, "num_response_tokens", "row_digest"),
            labelled_version="policy_version",
            labelled_temperature="temperature",
        )[row]
        judged = [
            {"num_tokens": 0, "kind": "not_checked", "reason": rows.reasons[number]}
            if span is None or verdict is None
            else {"num_tokens": len(span.stored)} | self._values(verdict)
            for number, span, verdict in zip(row.tolist(), spans, verdicts, strict=True)
        ]
        table = pl.DataFrame(judged, schema=SCHEMA).with_columns(
            *labels,
            start=start,
            end=start + length,
            swap_position=pl.col("swap_position") + start,
        )
        # Several rows may be parts of one step.
        table = table.with_columns(span=pl.int_range(pl.len()).over("trajectory_id", "step_index"))
        described = [
            describe(line) if line["kind"] in FAULTS else line["reason"]
            for line in table.iter_rows(named=True)
        ]
        return table.with_columns(reason=pl.Series(described, dtype=pl.String)).cast(SCHEMA)

    def _values(self, verdict: Fit) -> dict[str, Any]:
        candidates = self.weights.candidates
        best, numbers = candidates[verdict.candidate], (verdict.second, verdict.rival)
        second, rival = (None if one is None else candidates[one].version for one in numbers)
        return {
            "kind": verdict.kind,
            "best_version": best.version,
            "best_weights": str(best.path),
            "second_version": second,
            "swap_position": verdict.position,  # in the span
            "best_temperature": round(1 / verdict.inverse, 3),
            **{f"best_{name}": value for name, value in verdict.truncation._asdict().items()},
            "offset": verdict.offset,
            "log_likelihood_ratio": verdict.ratio,
            "margin": verdict.margin,
            "next_version": rival,
            "num_decisive": verdict.num_decisive,
            "noise_scale": verdict.scale,
            "mean_difference": verdict.mean_difference,
            "reason": verdict.reason or None,
        }


def _unscored(rows: AuditRows) -> Scored:
    return Scored(place=np.full(len(rows.responses.values), -1, np.int64))
