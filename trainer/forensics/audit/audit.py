"""Audit a dataset: find the weights and settings that sampled each span.

All rows are forwarded under their labelled weights. The rows that do not fit their label, and the
first few rows, are also forwarded under every other candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from schemas.forensics import NO_FAULT, VERDICT_COLUMNS
from schemas.metadata import LogprobsMode
from trainer.forensics.audit.causes import describe
from trainer.forensics.audit.explanations import Search
from trainer.forensics.audit.hypotheses import Span, labelled
from trainer.forensics.audit.judge import Fit, Judge, best_residuals, likely_mode
from trainer.forensics.audit.noise import FLOOR, Noise, Residuals, fit_noise
from trainer.forensics.audit.prompts import PromptVariants
from trainer.forensics.audit.rows import KEYS, NO_WEIGHTS, OFF, TOO_LONG, AuditRows, Truncation
from trainer.forensics.audit.weights import Candidate, Weights, context_tokens, num_distinct_tokens

SAMPLE_ROWS = 24
"""Maximum number of rows that are forwarded under all candidates, to compare the candidates."""
LEARNT = 500
"""Number of spans, spread over the first chunk, from which the noise is estimated."""
UNKNOWN, MISSING = -1, -2
"""Labels of rows without a version, and of rows whose weights are not among the candidates."""
SCHEMA = pl.Schema({c.name: pl.Series(pa.array([], c.type)).dtype for c in VERDICT_COLUMNS})


@dataclass(kw_only=True)
class AuditResult:
    """Result of an audit."""

    candidates: Sequence[Candidate]
    verdicts: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SCHEMA))
    noise: Noise = field(default_factory=Noise)
    mode: LogprobsMode = "raw"  # kind of the stored log-probabilities
    mode_is_inferred: bool = True
    num_mode_tokens: int = 0  # from which the mode is inferred; 0 if it is only assumed
    num_rows: int = 0  # audited
    num_distinct: int = 0  # tokens which each candidate may have to forward
    num_tokens: int = 0  # forwarded
    seconds: float = 0.0  # of forwarding, not counting the loading of weights
    num_suspicious: int = 0  # rows forwarded under all candidates, as they did not fit their label
    clean: list[Residuals] = field(default_factory=list)  # of the spans without faults
    apart: dict[tuple[int, int], float] = field(default_factory=dict)  # of candidates, nats

    @property
    def faults(self) -> pl.DataFrame:
        """The verdicts of spans with a fault."""
        return self.verdicts.filter(~pl.col("kind").is_in(NO_FAULT))

    @property
    def share(self) -> float:
        """Forwarded tokens, as a fraction of candidates x distinct tokens."""
        return self.num_tokens / max(len(self.candidates) * self.num_distinct, 1)


def run_audit(
    chunks: Sequence[AuditRows],
    weights: Weights,
    *,
    dataset: str,
    variants: PromptVariants | None = None,
    clean: Sequence[Residuals] = (),
    explains: bool = True,
) -> AuditResult:
    """Audit rows under the candidates of `weights`.

    Args:
        chunks: Rows to audit; the scores of one chunk are in memory at once. The noise is estimated
            from the first chunk.
        weights: The candidates.
        dataset: Path of the rows' dataset, for the verdicts.
        variants: Renders prompts in other ways; None: other prompts are not tried.
        clean: Residuals of rows without faults, from which the noise of the same engine is also
            estimated.
        explains: Try other prompts and precisions for spans that no candidate explains.

    Raises:
        InputError: A candidate cannot be loaded.
    """
    result = AuditResult(candidates=weights.candidates)
    for chunk, rows in enumerate(chunks):
        spans = _spans(rows, weights.candidates)
        result.num_rows += len(rows.auditable)
        result.num_distinct += num_distinct_tokens(rows)
        num_compared = 0 if chunk else min(SAMPLE_ROWS, max(len(rows.auditable) // 10, 4))
        _score(weights, rows, spans, set(rows.auditable[:num_compared].tolist()))
        if not chunk:
            _learn(result, rows.mode, list(spans.values()), clean)
        for span in spans.values():
            span.is_raw = result.mode == "raw"
        judge, row_of = Judge(result.noise), rows.spans[:, 0].tolist()
        partial = {
            n: span for n, span in spans.items() if len(span.scores) < len(weights.candidates)
        }
        doubted = {row_of[n] for n, span in partial.items() if judge.is_suspicious(span)}
        result.num_suspicious += len(doubted)
        _score(weights, rows, spans, doubted)
        verdicts = {number: judge(span) for number, span in spans.items()}
        if explains:
            Search(rows, spans, verdicts, judge, weights).run(variants)
        result.clean += [
            labelled(span, span.label).residuals(span)
            for number, span in spans.items()
            if verdicts[number].kind == "as_labelled" and span.label is not None
            if not np.isnan(span.temperature)
        ]
        table = _table(rows, spans, verdicts, weights.candidates)
        result.verdicts = pl.concat([result.verdicts, table.with_columns(dataset=pl.lit(dataset))])
    result.num_tokens, result.seconds = weights.num_tokens, weights.seconds
    return result


def _spans(rows: AuditRows, candidates: Sequence[Candidate]) -> dict[int, Span]:
    """Return the spans that can be audited, by index, without scores."""
    number_of = {one.version: number for number, one in enumerate(candidates)}
    number_of[None] = UNKNOWN  # also if the version of a candidate is unknown
    labels = [number_of.get(version, MISSING) for version in rows.table["policy_version"]]
    if len(candidates) == 1 and candidates[0].version is None:
        labels = [0] * rows.num_rows  # it is assumed to have sampled all rows
    rows.refuse(np.array(labels) == MISSING, NO_WEIGHTS)
    contexts = [tokens for one in candidates if (tokens := context_tokens(one))]
    lengths = rows.prompts.lengths + rows.responses.lengths
    rows.refuse(lengths > min(contexts, default=np.inf), TOO_LONG)
    return {
        number: Span(
            stored=rows.logprobs[start : start + length],
            label=None if labels[row] == UNKNOWN else labels[row],
            inverse=float(rows.settings[row, 0]),
            truncation=Truncation(*rows.settings[row, 1:].tolist()),
            temperature=float(rows.temperature[row]),
            is_assumed=bool(rows.is_assumed[row]),
        )
        for number, (row, start, length) in enumerate(rows.spans.tolist())
        if not rows.reasons[row]
    }


def _score(weights: Weights, rows: AuditRows, spans: dict[int, Span], every: set[int]) -> None:
    """Score spans under their label, or under each candidate: those without one, and rows in `every`."""
    row_of = rows.spans[:, 0].tolist()
    for candidate in range(len(weights.candidates)):
        wanted = {
            row_of[number]
            for number, span in spans.items()
            if candidate not in span.scores
            if row_of[number] in every or span.label in {None, candidate}
        }
        scores = weights.score(candidate, rows, np.array(sorted(wanted), np.int64))
        for number, of_span in scores.items():
            spans[number].scores[candidate] = of_span


def _learn(
    result: AuditResult,
    mode: LogprobsMode | None,
    spans: Sequence[Span],
    clean: Sequence[Residuals],
) -> None:
    """Estimate the noise, the kind of log-probabilities, and the distances of the candidates."""
    some = spans[:: len(spans) // LEARNT + 1]
    result.mode_is_inferred = mode is None
    inferred = likely_mode(some) if mode is None else (mode, 0)
    result.mode, result.num_mode_tokens = inferred
    compared = [span for span in spans if len(span.scores) == len(result.candidates)]
    noise = fit_noise([*clean, *map(best_residuals, some)])
    if not noise.num_tokens:  # rows outside the sample do not fit their labels
        noise = fit_noise([best_residuals(span) for span in compared])
    likes = [dataclasses.replace(span, is_raw=result.mode == "raw") for span in compared]
    relative = [noise.apart]
    for pair in combinations(range(len(result.candidates)), 2) if likes else ():
        first, second = ([labelled(span, number) for span in likes] for number in pair)
        distance = [a.predicted - b.predicted for a, b in zip(first, second, strict=True)]
        result.apart[pair] = float(np.abs(np.concatenate(distance)).mean())
        sensitivity = np.concatenate([one.sensitivity for one in first])
        relative.append(result.apart[pair] / max(float(sensitivity.mean()), FLOOR))
    result.noise = dataclasses.replace(noise, apart=min(relative[1:] or relative))


def _table(
    rows: AuditRows,
    spans: Mapping[int, Span],
    verdicts: Mapping[int, Fit],
    candidates: Sequence[Candidate],
) -> pl.DataFrame:
    """Build the table of verdicts; spans that cannot be audited get the kind `not_checked`."""
    row, start, length = rows.spans.T
    start = start - rows.responses.offsets[row] + rows.table["first_token"].to_numpy()[row]
    unchecked = {"num_tokens": 0, "kind": "not_checked"}
    judged = [
        _values(spans[number], verdicts[number], candidates)
        if number in spans
        else unchecked | {"reason": rows.reasons[at]}
        for number, at in enumerate(row.tolist())
    ]
    labels = rows.table.select(
        *(*KEYS, "num_response_tokens", "row_digest"),
        labelled_version="policy_version",
        labelled_temperature="temperature",
    )[row]
    table = pl.DataFrame(judged, schema=SCHEMA).with_columns(
        *labels, start=start, end=start + length, swap_position=pl.col("swap_position") + start
    )
    # Several rows may be parts of one step.
    table = table.with_columns(span=pl.int_range(pl.len()).over("trajectory_id", "step_index"))
    reasons = map(describe, table.iter_rows(named=True))
    return table.with_columns(reason=pl.Series(reasons, dtype=pl.String)).cast(SCHEMA)


def _values(span: Span, verdict: Fit, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return the columns of a verdict that depend on the span's scores."""
    inverse, place = span.setting
    truncation = OFF if place or span.is_raw else span.truncation
    values: dict[str, Any] = {
        "best_temperature": 1 / (span.inverse if inverse is None else inverse),
        **{f"best_{name}": value for name, value in truncation._asdict().items()},
        "offset": 0,
        **verdict.hypothesis.values,
        **verdict.evidence,
    }
    for name in ("second_version", "next_version"):
        number = values.get(name)
        values[name] = None if number is None else candidates[number].version
    best = candidates[verdict.weights]
    return values | {
        "num_tokens": len(span.stored),
        "kind": verdict.kind,
        "best_version": best.version,
        "best_weights": str(best.path),
        "best_temperature": round(values["best_temperature"], 3),
        "noise_scale": verdict.scale,
        "mean_difference": verdict.mean_difference,
        "reason": verdict.reason or None,
    }
