"""Look for the cause of differences that no candidate explains: another prompt, or rounded weights.

Each possible cause needs separate forward passes. It is tried on a few rows first, and on all
others only if it explains at least one of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from pipelines.tables import ROUTING
from schemas.ragged import IntArray
from trainer.forensics.audit.hypotheses import PENALTY, UNRELATED_FACTOR, Fit, Judge, Span
from trainer.forensics.audit.noise import MEDIAN
from trainer.forensics.audit.prompts import PromptVariants
from trainer.forensics.audit.rows import AuditRows, to_audit_rows
from trainer.forensics.audit.scores import Scored
from trainer.models.policy import Policy

TRIED_ROWS = 8
"""Number of rows on which every cause is tried."""
UNUSUAL = 6.0
"""A fault in the version remains open if it leaves this multiple of the usual mean difference."""
MOST_COMPUTED, LEAST_COMPUTED = 6.0, 2.0
"""Differences of an engine that computes in bfloat16 are 3 to 5 times those of rounded weights (vLLM,
SmolLM2); if the noise of the dataset exceeds twice those, all its engines compute in that precision."""
DECISIVE = 3.0
"""If rounding the weights lowers the log-likelihood of a span by at least this many nats, the span
does not come from an engine with that precision."""
COMPUTED = ("bfloat16", "float16")
"""Precisions in which engines also compute: rounded weights then explain a part of the differences."""

Score = Callable[[Policy, AuditRows], Scored | None]
"""Forwards rows; None if that would take too long."""


class Rounding(NamedTuple):
    """Effect of rounding the weights on a span."""

    gain: float  # in log-likelihood, nats; both fits use the best larger noise
    residual: float  # typical scale of the differences from the unrounded weights
    change: float  # typical scale of the differences between rounded and unrounded weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A search for the causes of faults that no candidate explains; it replaces `verdicts`."""

    rows: AuditRows
    spans: Sequence[Span | None]  # None without scores
    verdicts: list[Fit | None]
    policy: Callable[[int], Policy]
    judge: Judge
    score: Score
    roundings: dict[tuple[int, str], Rounding] = field(default_factory=dict)  # by span, precision

    def run(self, label: IntArray, variants: PromptVariants | None) -> None:
        """Try to explain every span whose verdict names no cause."""
        by_weights: dict[int, list[int]] = {}
        for number, verdict in enumerate(self.verdicts):
            if verdict is not None and self._is_open(verdict):
                labelled = int(label[self.rows.spans[number, 0]])
                weights = labelled if labelled >= 0 else verdict.candidate
                by_weights.setdefault(weights, []).append(number)
        names = set[str]()  # a harness renders all prompts in the same way, whatever the weights
        for weights, numbers in by_weights.items():
            if variants is not None:
                self._try_prompts(weights, numbers, variants, names)
            for precision in PRECISIONS:
                self._try_precision(weights, numbers, precision)
        self._settle([number for numbers in by_weights.values() for number in numbers])

    def _is_open(self, verdict: Fit) -> bool:
        """True if a verdict names no cause, or only other weights that leave unusual differences.

        Rounding reverts part of a small update, so the previous version may fit better than the label.
        """
        if verdict.kind in {"version", "swap"}:
            return verdict.mean_difference > UNUSUAL * self.judge.noise.mean_difference
        return verdict.kind in {"noise", "unknown_model"}

    def _parts(self, numbers: Sequence[int]) -> Iterator[IntArray]:
        """Yield the rows of spans in two parts: a few of each scale of noise to try first, the rest."""
        scale = [verdict.scale if (verdict := self.verdicts[n]) else 0.0 for n in numbers]
        rows = self.rows.spans[np.array(numbers)[np.argsort(scale, kind="stable")], 0]
        rows = rows[np.sort(np.unique(rows, return_index=True)[1])]
        tried = np.unique(np.linspace(0, len(rows) - 1, TRIED_ROWS).astype(np.int64))
        yield np.sort(rows[tried])
        yield np.sort(np.delete(rows, tried))

    def _try_prompts(
        self, weights: int, numbers: list[int], variants: PromptVariants, names: set[str]
    ) -> None:
        """Try other prompts, and add those that explain a span to `names`."""
        wanted: Collection[str] | None = None
        for part in self._parts(numbers):
            copies = self._with_prompts(part, variants, wanted)
            names |= self._attempt(self.policy(weights), weights, numbers, copies, "prompt")
            wanted = names

    def _with_prompts(
        self, part: IntArray, variants: PromptVariants, wanted: Collection[str] | None
    ) -> pl.DataFrame:
        """Copy rows with the variants of their prompts that are in `wanted`; None: all."""
        table, prompts = self.rows.table, self.rows.prompts
        messages = table["messages"] if "messages" in table.columns else [None] * len(table)
        copies = [
            (row, name, prompt)
            for row in part.tolist()
            for name, prompt in variants.of(prompts.row(row).tolist(), messages[row]).items()
            if wanted is None or name in wanted
        ]
        kind = table.schema["prompt_token_ids"]
        names = {"origin": pl.Int64(), "reason": pl.String(), "prompt_token_ids": kind}
        changes = pl.DataFrame(copies, schema=names, orient="row")
        # Recorded experts belong to the stored prompt's tokens.
        return table.drop(ROUTING, strict=False)[changes["origin"]].with_columns(*changes)

    def _try_precision(self, weights: int, numbers: list[int], precision: str) -> None:
        policy = rounded(self.policy(weights), precision)
        for part in self._parts(numbers):
            reason = pl.lit(f"its weights rounded to {precision}")
            copies = self.rows.table[part].with_columns(origin=part, reason=reason)
            helpful = self._attempt(policy, weights, numbers, copies, "noise", precision)
            if not helpful and precision not in COMPUTED:
                return

    def _attempt(
        self,
        policy: Policy,
        weights: int,
        numbers: Sequence[int],
        copies: pl.DataFrame,
        kind: str,
        precision: str | None = None,
    ) -> set[str]:
        """Score copies of rows, and replace the verdicts that these explain better.

        `origin` is the row of a copy, and `reason` describes what differs. Returns the reasons of the
        copies that fit better.
        """
        helpful, reasons, origin = set[str](), copies["reason"], copies["origin"].to_numpy()
        rows = to_audit_rows(copies, self.rows.mode, self.rows.defaults)
        scored = self.score(policy, rows)
        if scored is None:
            return helpful
        for number in numbers:
            row, start, _ = self.rows.spans[number]
            span, verdict = self.spans[number], self.verdicts[number]
            assert span is not None
            assert verdict is not None
            slots = start - self.rows.responses.offsets[row] + np.arange(len(span.stored))
            for at in np.flatnonzero(origin == row).tolist():
                scores = {weights: scored.of(slots + rows.responses.offsets[at])}
                other = dataclasses.replace(span, scores=scores, label=weights)
                if precision in COMPUTED and weights in span.scores:
                    self.roundings[number, precision] = self._rounding(span, other, weights)
                better = self.judge.better(other, verdict, weights, kind, reasons[at])
                if better is not None:
                    self.verdicts[number] = verdict = better
                    helpful.add(reasons[at])
        return helpful

    def _rounding(self, span: Span, other: Span, weights: int) -> Rounding:
        """Compare a span under some weights (`span`) with the span under rounded ones (`other`)."""
        judge = self.judge
        plain, changed = (
            judge.noisy(one, judge.fit(one, "noise", weights)) for one in (span, other)
        )
        difference = changed.residuals.predicted - plain.residuals.predicted
        change = plain.residuals._replace(difference=difference)
        return Rounding(changed.total - plain.total, plain.residuals.scale, change.scale)

    def _settle(self, numbers: Sequence[int]) -> None:
        """Decide whether spans without a cause come from another precision, or from another model.

        An engine that computes in a lower precision also rounds the weights, so rounded weights fit
        its log-probabilities slightly better. If another model sampled the span, they fit no better.
        A single span rarely shows this, so all such spans of the dataset are judged together.
        """
        still_open = {
            number: verdict
            for number in numbers
            if (verdict := self.verdicts[number]) is not None
            and verdict.kind in {"noise", "unknown_model"}
            and not verdict.reason
            and all((number, precision) in self.roundings for precision in COMPUTED)
        }
        usual, gains = MEDIAN * self.judge.noise.kappa, dict[int, float]()
        for precision in COMPUTED:
            effects = {number: self.roundings[number, precision] for number in still_open}
            change = float(np.median([effect.change for effect in effects.values()] or [0.0]))
            for number, effect in effects.items() if usual <= LEAST_COMPUTED * change else ():
                if effect.residual <= MOST_COMPUTED * change:
                    gains[number] = max(gains.get(number, -np.inf), effect.gain)
        is_computed = sum(gains.values()) >= PENALTY
        for number, verdict in still_open.items():
            is_noise = is_computed and gains.get(number, -np.inf) > -DECISIVE
            is_noise |= verdict.residuals.scale <= UNRELATED_FACTOR * usual
            kind: str = "noise" if is_noise else "unknown_model"
            self.verdicts[number] = dataclasses.replace(verdict, kind=kind)


@torch.no_grad()
def rounded(policy: Policy, precision: str) -> Policy:
    """Return a copy of a policy with weights rounded to one of `PRECISIONS`."""
    policy = copy.deepcopy(policy)
    ends = (policy.model.get_output_embeddings(), policy.model.get_input_embeddings())
    is_end = {id(layer.weight) for layer in ends}
    for weights in policy.parameters():
        if not (precision.endswith("except embeddings") and id(weights) in is_end):
            weights.copy_(PRECISIONS[precision](weights))
    return policy


def _in_8_bits(weights: Tensor, largest: float, round_: Callable[[Tensor], Tensor]) -> Tensor:
    """Round a matrix with one scale for each of its rows."""
    if weights.ndim != 2:
        return weights
    step = (weights.abs().amax(1, keepdim=True) / largest).clamp(min=1e-12)
    return round_(weights / step) * step


PRECISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda weights: weights.bfloat16().float(),
    "float16": lambda weights: weights.half().float(),
    "8-bit integers": lambda weights: _in_8_bits(weights, 127.0, torch.round),
    "8-bit integers except embeddings": lambda weights: _in_8_bits(weights, 127.0, torch.round),
    "8-bit floats except embeddings": lambda weights: _in_8_bits(
        weights, 448.0, lambda scaled: scaled.to(torch.float8_e4m3fn).float()
    ),
}
