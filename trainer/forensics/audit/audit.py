"""Audit a dataset: find the weights and settings that sampled each span.

All rows are forwarded under their labelled weights. The rows that do not fit their label, and the
first few rows, are also forwarded under every other candidate. `rollouts rl` audits a few rows of
each iteration (`IterationAudit`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import torch

import rollout_io
from rollout_io.dataset.filesystems import whole
from schemas.errors import InputError, RolloutError, count
from schemas.metadata import LogprobsMode
from schemas.records import AUDIT, NO_FAULT, VERDICT_COLUMNS
from trainer.distributed.accelerator import is_sharded
from trainer.forensics.audit.explanations import PromptVariants, Search
from trainer.forensics.audit.hypotheses import (
    FLOOR,
    Hypothesis,
    Noise,
    Residuals,
    Span,
    best_residuals,
    fit_noise,
    likely_mode,
)
from trainer.forensics.audit.report import describe, likely_causes
from trainer.forensics.audit.rows import (
    KEYS,
    NO_WEIGHTS,
    OFF,
    TOO_LONG,
    AuditRows,
    Truncation,
    read_steps,
    to_audit_rows,
)
from trainer.forensics.audit.weights import Candidate, Weights, context_tokens, num_distinct_tokens
from trainer.models.lora import CONFIG
from trainer.models.policy import Policy
from trainer.rl.config import RlConfig
from trainer.run.messages import warn

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

    weights: Weights  # the candidates
    verdicts: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SCHEMA))
    noise: Noise = field(default_factory=Noise)
    mode: LogprobsMode = "raw"  # kind of the stored log-probabilities
    mode_is_inferred: bool = True
    num_mode_tokens: int = 0  # from which the mode is inferred; 0 if it is only assumed
    num_rows: int = 0  # audited
    num_distinct: int = 0  # tokens which each candidate may have to forward
    num_suspicious: int = 0  # rows forwarded under all candidates, as they did not fit their label
    clean: list[Residuals] = field(default_factory=list)  # of the spans without faults
    apart: dict[tuple[int, int], float] = field(default_factory=dict)  # of candidates, nats

    @property
    def faults(self) -> pl.DataFrame:
        """The verdicts of spans with a fault."""
        return self.verdicts.filter(~pl.col("kind").is_in(NO_FAULT))

    def worst(self, limit: int) -> pl.DataFrame:
        """Return the `limit` spans whose fault is most certain."""
        return self.faults.sort("log_likelihood_ratio", descending=True).head(limit)

    @property
    def share(self) -> float:
        """Forwarded tokens, as a fraction of candidates x distinct tokens."""
        weights = self.weights
        return weights.num_tokens / max(len(weights.candidates) * self.num_distinct, 1)


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
    result = AuditResult(weights=weights)
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
        noise, row_of = result.noise, rows.spans[:, 0].tolist()
        doubted = {
            row_of[number]
            for number, span in spans.items()
            if len(span.scores) < len(weights.candidates) and noise.is_suspicious(span)
        }
        result.num_suspicious += len(doubted)
        _score(weights, rows, spans, doubted)
        verdicts = {number: noise.judge(span) for number, span in spans.items()}
        if explains:
            Search(rows, spans, verdicts, noise, weights).run(variants)
        result.clean += [
            span.under(span.label).residuals
            for number, span in spans.items()
            if verdicts[number].kind == "as_labelled" and span.label is not None
            if not np.isnan(span.temperature)
        ]
        table = _table(rows, spans, verdicts, weights.candidates)
        result.verdicts = pl.concat([result.verdicts, table.with_columns(dataset=pl.lit(dataset))])
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
    some, num_candidates = spans[:: len(spans) // LEARNT + 1], len(result.weights.candidates)
    result.mode_is_inferred = mode is None
    result.mode, result.num_mode_tokens = (mode, 0) if mode else likely_mode(some)
    compared = [
        dataclasses.replace(span, is_raw=result.mode == "raw")
        for span in spans
        if len(span.scores) == num_candidates
    ]
    noise = fit_noise([*clean, *map(best_residuals, some)])
    if not noise.num_tokens:  # rows outside the sample do not fit their labels
        noise = fit_noise([*map(best_residuals, compared)])
    relative = []
    for a, b in combinations(range(num_candidates), 2) if compared else ():
        pairs = [(span.under(a), span.under(b)) for span in compared]
        distance = np.abs(np.concatenate([x.predicted - y.predicted for x, y in pairs])).mean()
        sensitivity = np.concatenate([x.residuals.sensitivity for x, _ in pairs]).mean()
        result.apart[a, b] = float(distance)
        relative.append(float(distance) / max(float(sensitivity), FLOOR))
    result.noise = dataclasses.replace(noise, apart=min(relative, default=noise.apart))


def _table(
    rows: AuditRows,
    spans: Mapping[int, Span],
    verdicts: Mapping[int, Hypothesis],
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


def _values(span: Span, verdict: Hypothesis, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return the columns of a verdict that depend on the span's scores."""
    inverse, place = span.setting
    truncation = OFF if place or span.is_raw else span.truncation
    values: dict[str, Any] = {
        "best_temperature": 1 / (span.inverse if inverse is None else inverse),
        **truncation.columns,
        "offset": 0,
        **verdict.values,
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


MOST_CLEAN_TOKENS = 20_000
"""Maximum number of tokens of earlier iterations used to estimate the engine's noise."""
ROWS_TO_STOP = 2
"""Number of faulty rows that stop a run; if fewer rows are audited, all must be faulty."""


@dataclass(kw_only=True)
class IterationAudit:
    """Audits rows of each iteration before the policy is trained on them.

    Attributes:
        config: Configuration of the run.
        source: Absolute path of the model from which the run started.
        clean: Log-probability differences in faultless rows of earlier iterations.
    """

    config: RlConfig
    source: Path
    clean: list[Residuals] = field(default_factory=list)

    def check(self, dataset: Path, iteration: int, policy: Policy) -> dict[str, int]:
        """Audit rows of an iteration, and warn or stop if they were not sampled as labelled.

        Rows are forwarded only under their labelled weights, unless these do not fit. The policy
        in memory is version `iteration`; earlier versions are loaded if they are kept. The verdicts are
        written to the run's folder `audit`, where `rollouts view` finds them.

        Returns:
            Metrics: `num_audited_rows` and `num_mismatched_rows`; empty if the rows cannot be audited.

        Raises:
            InputError: `weights_mismatch`: rows do not fit, and `on_mismatch` is `stop`.
        """
        try:
            result = self._audited(dataset, iteration, policy)
        except (RolloutError, torch.OutOfMemoryError) as error:
            if not isinstance(error, RolloutError) and not is_sharded(policy):
                raise
            warn(f"rows of iteration {iteration + 1} cannot be audited: {error}")
            return {}
        file = Path(self.config.run.out) / AUDIT / f"{dataset.name}.parquet"
        file.parent.mkdir(exist_ok=True)
        with whole(file) as partial:
            result.verdicts.write_parquet(partial)
        if sum(len(one.difference) for one in self.clean) < MOST_CLEAN_TOKENS:
            self.clean += result.clean
        checked = result.verdicts.filter(pl.col("kind") != "not_checked")
        row = pl.struct("trajectory_id", "step_index").n_unique()
        num_rows, num_faulty = (spans.select(row).item() for spans in (checked, result.faults))
        if num_faulty:
            self._report(dataset, result, num_rows, num_faulty)
        return {"num_audited_rows": num_rows, "num_mismatched_rows": num_faulty}

    def _audited(self, dataset: Path, iteration: int, policy: Policy) -> AuditResult:
        rollouts, metadata = rollout_io.scan(dataset), rollout_io.read_metadata(dataset)
        rng = np.random.default_rng([self.config.run.seed, iteration])
        ids = rollouts.select(pl.col("trajectory_id").unique().sort()).collect().to_series()
        chosen = ids.gather(rng.permutation(len(ids))[: self.config.loop.audit_rows])
        rows = rollouts.filter(pl.col("trajectory_id").is_in(chosen.to_list()))
        steps = read_steps(rows, metadata).filter(pl.col("response_ids").list.len() > 0)
        draw = pl.Series(rng.random(len(steps)))
        steps = steps.sort(draw).unique("trajectory_id", keep="first").sort("trajectory_id")
        folder = Path(self.config.run.out) / "weights"
        names = (path.name.removeprefix("version_") for path in folder.glob("version_*"))
        versions = {0, iteration, *(int(name) for name in names if name.isdecimal())}
        paths = {n: folder / f"version_{n}" if n else self.source for n in sorted(versions)}
        candidates = [  # the versions that are kept, ending with the current one
            Candidate(version=n, path=path, base=self.source if (path / CONFIG).is_file() else None)
            for n, path in paths.items()
            if n <= iteration
        ]
        weights = Weights(
            candidates,
            device=next(policy.parameters()).device,
            # Each process has only a shard of the policy, so the main process loads all of it.
            loaded={} if is_sharded(policy) else {len(candidates) - 1: policy},
            trees=False,
            budget=self.config.training.batch.tokens_per_micro_batch,
        )
        audited, named = [to_audit_rows(steps, metadata.logprobs_mode)], str(dataset)
        return run_audit(audited, weights, dataset=named, clean=self.clean, explains=False)

    def _report(self, dataset: Path, result: AuditResult, num_rows: int, num_faulty: int) -> None:
        worst = result.worst(1).row(0, named=True)
        were = "were" if num_faulty > 1 else "was"
        causes = " ".join(likely_causes(result)[:2])
        text = (
            f"{num_faulty} of {count(num_rows, 'audited row')} {were} not sampled as labelled;"
            f" trajectory '{worst['trajectory_id']}', row {worst['step_index']}: {worst['reason']}"
            f" ({worst['log_likelihood_ratio']:.0f} nats)\nlikely cause: {causes}"
        )
        if self.config.loop.on_mismatch == "stop" and num_faulty >= min(ROWS_TO_STOP, num_rows):
            command = f"rollouts audit {dataset} --weights {self.config.run.out}"
            hint = f"run `{command}` to check every row, or pass --set loop.on_mismatch=warn to train anyway"
            raise InputError("weights_mismatch", str(dataset), text, hint=hint)
        warn(text)
