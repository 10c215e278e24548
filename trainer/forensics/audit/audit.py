"""Audit a dataset: find the weights and settings that sampled each span.

All rows are forwarded under their labelled weights. A sample of the rows, and all rows that do not
fit their label, are also forwarded under every other candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import polars as pl

from schemas.ragged import IntArray
from trainer.forensics.audit.candidates import Candidate, context_tokens
from trainer.forensics.audit.chunk import MISSING, UNKNOWN, Chunk
from trainer.forensics.audit.noise import Noise, Residuals
from trainer.forensics.audit.prompts import PromptVariants
from trainer.forensics.audit.rescoring import Cost, Weights
from trainer.forensics.audit.result import SCHEMA, AuditResult, AuditSettings, Plan
from trainer.forensics.audit.rows import NO_WEIGHTS, TOO_LONG, AuditRows

CHUNK_TOKENS = 200_000
"""Number of sampled tokens whose scores are in memory at once."""
EXTRA = 1.1
"""Limit on the number of tokens to forward, as a multiple of candidates x distinct tokens."""
EXTRA_TOKENS = 10_000
"""Number of tokens that may be forwarded beyond the limit of `EXTRA` to explain differences, so
that a few rows of a small dataset can be explained."""


def labelled_candidates(rows: AuditRows, candidates: Sequence[Candidate]) -> IntArray:
    """Return the index of each row's labelled candidate; `UNKNOWN` or `MISSING` if there is none.

    A single candidate without a version is assumed to have sampled all rows.
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
        known: Residuals of rows without faults, from which the noise of the same engine is
            estimated. If empty, a sample of the rows is scored under all candidates instead.
        announce: Called after each micro-batch with the number of its tokens. The first micro-batch
            shows how long the audit will take.

    Raises:
        InputError: A candidate cannot be loaded.
    """
    label = labelled_candidates(rows, weights.candidates)
    rows.refuse(label == MISSING, NO_WEIGHTS)
    contexts = [tokens for one in weights.candidates if (tokens := context_tokens(one))]
    if contexts:
        lengths = rows.prompts.lengths + rows.responses.lengths
        rows.refuse(lengths > min(contexts), TOO_LONG)
    parts = [Chunk(rows.part(a, b), label[a:b], weights, settings) for a, b in _chunks(rows)]
    plan = _plan(parts, settings, with_sample=not known)
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
    for number, chunk in enumerate(parts):
        chunk.begin(cost)
        if number == 0:
            chunk.learn(found, known)
        chunk.first_pass(found.noise, found.mode)
        if number == 0:
            chunk.learn(found, known)
        found.num_suspicious += chunk.second_pass(found.noise, found.mode)
        found.num_first_scored += chunk.num_first_scored
        found.num_sampled += chunk.num_sampled
        allowance = round(EXTRA * plan.num_candidates * plan.num_distinct)
        allowance = max(allowance, cost.num_tokens + EXTRA_TOKENS)
        tables.append(chunk.verdicts(found.noise, found.mode, variants, allowance))
        found.clean += chunk.clean_residuals(tables[-1], found.mode)
        chunk.end()
    named = [table.with_columns(dataset=pl.lit(dataset)) for table in tables]
    found.verdicts = pl.concat([found.verdicts, *named])
    return found


def _chunks(rows: AuditRows) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that consist of complete groups with about `CHUNK_TOKENS` targets."""
    lengths = np.bincount(rows.span_row, rows.span_length, minlength=rows.num_rows)
    upto, group = np.cumsum(lengths), rows.group
    ends = np.flatnonzero(np.append(np.diff(group) != 0, [True])) + 1
    first, before = 0, 0.0
    for end in ends.tolist() if rows.num_rows else []:
        if upto[end - 1] - before >= CHUNK_TOKENS or end == rows.num_rows:
            yield first, end
            first, before = end, float(upto[end - 1])


def _plan(parts: Sequence[Chunk], settings: AuditSettings, *, with_sample: bool) -> Plan:
    """Plan each chunk, and add up the tokens to forward."""
    plans = [
        chunk.plan(with_sample=(number == 0 and with_sample) or settings.thorough)
        for number, chunk in enumerate(parts)
    ]
    return Plan(
        num_candidates=plans[0].num_candidates if plans else 0,
        num_distinct=sum(one.num_distinct for one in plans),
        num_first=sum(one.num_first for one in plans),
        num_most=sum(one.num_most for one in plans),
    )
