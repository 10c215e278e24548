"""Look for the cause of differences that no candidate explains: another prompt, or rounded weights.

Each possible cause needs separate forward passes. It is tried on a few rows first, and on all
others only if it explains at least one of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from schemas.metadata import LogprobsMode
from schemas.ragged import IntArray
from trainer.forensics.audit.hypotheses import PENALTY, Kind, Span
from trainer.forensics.audit.noise import Noise, typical_noise
from trainer.forensics.audit.prompts import PromptVariants, variant_rows
from trainer.forensics.audit.rescoring import Cost, Scored, num_distinct_tokens, score_rows
from trainer.forensics.audit.rows import AuditRows
from trainer.forensics.audit.verdicts import (
    UNRELATED_FACTOR,
    UNUSUAL,
    Rounding,
    Verdict,
    better_explained,
    rounding_of,
)
from trainer.models.policy import Policy

TRIED_ROWS = 8
"""Number of rows on which every cause is tried."""
UNEXPLAINED: tuple[Kind, ...] = ("noise", "unknown_model")
MOST_COMPUTED = 6.0
"""Upper limit on the differences of an engine that also computes in the precision of its weights,
as a multiple of the differences caused by rounding the weights. The multiple is 3 to 5 for vLLM
with SmolLM2 in bfloat16."""
LEAST_COMPUTED = 2.0
"""If the dataset's noise exceeds this multiple of the differences caused by rounding the weights,
the dataset's engine also computes in the precision of its weights."""
DECISIVE = 3.0
"""If rounding the weights to a precision lowers the log-likelihood of a span by at least this many
nats, the span does not come from an engine with that precision."""


def _is_open(verdict: Verdict, noise: Noise) -> bool:
    """True if a verdict names no cause, or only other weights that leave unusual differences.

    Rounding reverts part of a small update, so the previous version may fit better than the label.
    """
    if verdict.kind in {"version", "swap"}:
        return verdict.mean_difference > UNUSUAL * noise.mean_difference
    return verdict.kind in UNEXPLAINED


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A search for the causes of faults that no candidate explains.

    Attributes:
        rows: All rows.
        spans: Spans of `rows` with their scores; None without scores.
        found: Verdicts, which the search replaces.
        policy: Loads a candidate.
        noise: Noise of the dataset's engine.
        mode: Kind of log-probabilities.
        cost: Counts the forwarded tokens.
        allowance: Number of tokens that may be forwarded in total.
        budget: Maximum number of tokens per forward pass, except for longer rows.
        trees: Forward shared prefixes once.
        roundings: Effect of rounding the weights, by span and precision.
    """

    rows: AuditRows
    spans: Sequence[Span | None]
    found: list[Verdict | None]
    policy: Callable[[int], Policy]
    noise: Noise
    mode: LogprobsMode
    cost: Cost
    allowance: int
    budget: int
    trees: bool
    roundings: dict[tuple[int, str], Rounding] = field(default_factory=dict)

    def run(self, label: IntArray, variants: PromptVariants | None) -> None:
        """Try to explain every span whose verdict names no cause.

        Args:
            label: [R] labelled candidates; negative if unknown.
            variants: Renders prompts in other ways; None: they are not tried.
        """
        by_weights: dict[int, list[int]] = {}
        for number, verdict in enumerate(self.found):
            if verdict is not None and _is_open(verdict, self.noise):
                own = int(label[self.rows.span_row[number]])
                weights = own if own >= 0 else verdict.hypothesis.candidate
                by_weights.setdefault(weights, []).append(number)
        known = set[str]()
        for weights, numbers in by_weights.items():
            if variants is not None:
                self._try_prompts(weights, numbers, variants, known)
            for precision in PRECISIONS:
                self._try_precision(weights, numbers, precision)
        self._settle([number for numbers in by_weights.values() for number in numbers])

    def _parts(self, numbers: Sequence[int]) -> Iterator[IntArray]:
        """Yield the rows of the given spans in two parts: a few to try first, then the rest.

        The first part covers the whole range of noise scales, because different scales may have
        different causes.
        """
        spans = np.array(numbers)
        scales = [verdict.scale if (verdict := self.found[one]) else 0.0 for one in numbers]
        rows = self.rows.span_row[spans[np.argsort(scales, kind="stable")]]
        rows = rows[np.sort(np.unique(rows, return_index=True)[1])]
        spread = np.unique(np.linspace(0, len(rows) - 1, TRIED_ROWS).astype(np.int64))
        yield np.sort(rows[spread])
        yield np.sort(np.delete(rows, spread))

    def _try_prompts(
        self, weights: int, numbers: list[int], variants: PromptVariants, known: set[str]
    ) -> None:
        """Try other prompts; add the names of prompts that explain a span to `known`.

        `known` is shared by all weights, because a harness renders all prompts in the same way.
        """
        names: set[str] | None = None
        for part in self._parts(numbers):
            copies = variant_rows(self.rows, part, variants, names)
            if copies is None:
                return
            scored = self._scored(
                self.policy(weights), copies.rows, np.arange(copies.rows.num_rows)
            )
            if scored is None:
                return
            for number in numbers:
                row, start = self._place(number)
                for number_of_copy in np.flatnonzero(copies.origin == row).tolist():
                    at = copies.span(number_of_copy, start)
                    if self._improves(
                        number, weights, scored, at, "prompt", copies.names[number_of_copy]
                    ):
                        known.add(copies.names[number_of_copy])
            names = set(known)
            if not names:
                return

    def _try_precision(self, weights: int, numbers: list[int], precision: str) -> None:
        policy = rounded(self.policy(weights), precision)
        for part in self._parts(numbers):
            scored = self._scored(policy, self.rows, part)
            if scored is None:
                return
            reason, helps = f"its weights rounded to {precision}", False
            for number in numbers:
                if self._place(number)[0] not in part:
                    continue
                start = int(self.rows.span_start[number])
                if precision in COMPUTED:
                    self._compare(number, weights, scored, start, precision)
                helps |= self._improves(number, weights, scored, start, "noise", reason)
            if not helps and precision not in COMPUTED:
                return

    def _compare(
        self, number: int, weights: int, scored: Scored, start: int, precision: str
    ) -> None:
        """Store the effect of rounded weights on a span in `roundings`."""
        span = self.spans[number]
        assert span is not None
        other = self._under(number, weights, scored, start)
        if other is not None and weights in span.scores:
            self.roundings[number, precision] = rounding_of(span, other, self.noise, self.mode)

    def _settle(self, numbers: Sequence[int]) -> None:
        """Decide whether spans without a cause come from another precision, or from another model.

        An engine that computes in a lower precision also rounds the weights, so rounded weights fit
        its log-probabilities slightly better. If another model sampled the span, they fit no better.
        A single span rarely shows this, so all such spans of the dataset are judged together.
        """
        open_ones = [
            number
            for number in numbers
            if (verdict := self.found[number]) is not None
            and verdict.kind in UNEXPLAINED
            and not verdict.reason
            and all((number, precision) in self.roundings for precision in COMPUTED)
        ]
        own = typical_noise(self.noise)
        gains: dict[int, float] = {}
        for precision in COMPUTED:
            each = {number: self.roundings[number, precision] for number in open_ones}
            change = float(np.median([one.change for one in each.values()] or [0.0]))
            if own > LEAST_COMPUTED * change:
                continue
            for number, one in each.items():
                if one.residual <= MOST_COMPUTED * change:
                    gains[number] = max(gains.get(number, -np.inf), one.gain)
        computed = sum(gains.values()) >= PENALTY
        for number in open_ones:
            verdict = self.found[number]
            assert verdict is not None
            is_noise = computed and gains.get(number, -np.inf) > -DECISIVE
            is_noise |= self.roundings[number, COMPUTED[0]].residual <= UNRELATED_FACTOR * own
            kind: Kind = "noise" if is_noise else "unknown_model"
            self.found[number] = dataclasses.replace(verdict, kind=kind)

    def _scored(self, policy: Policy, rows: AuditRows, wanted: IntArray) -> Scored | None:
        """Score the given rows; None if there are no rows, or if they exceed the allowance."""
        tokens = num_distinct_tokens(rows, wanted) if len(wanted) else 0
        if not tokens or self.cost.num_tokens + tokens > self.allowance:
            return None
        scored = Scored(place=np.full(len(rows.responses.values), -1, np.int64))
        layout = (self.budget, self.trees)
        score_rows(policy, rows, wanted, scored, self.cost, budget=layout[0], trees=layout[1])
        return scored

    def _place(self, number: int) -> tuple[int, int]:
        """Return the row of a span, and the position of the span in the row's response."""
        row = int(self.rows.span_row[number])
        return row, int(self.rows.span_start[number] - self.rows.responses.offsets[row])

    def _improves(
        self, number: int, weights: int, scored: Scored, start: int, kind: Kind, reason: str
    ) -> bool:
        """Replace the verdict of a span if other scores explain it better by more than `PENALTY`.

        Returns whether the verdict was replaced.
        """
        verdict, own = self.found[number], self._under(number, weights, scored, start)
        assert verdict is not None
        if own is None:
            return False
        other = better_explained(own, verdict, kind, reason, self.noise, self.mode)
        gain = other.log_likelihood_ratio - verdict.log_likelihood_ratio
        if gain <= PENALTY:
            return False
        self.found[number] = other
        return True

    def _under(self, number: int, weights: int, scored: Scored, start: int) -> Span | None:
        """Return a copy of a span with other scores; None if a token has no score."""
        span = self.spans[number]
        assert span is not None
        scores = scored.at(start, len(span.stored))
        if scores is None:
            return None
        return dataclasses.replace(span, scores={weights: scores}, labelled=weights)


LARGEST_E4M3, LARGEST_INT8 = 448.0, 127.0
_SMALLEST = 1e-12


@torch.no_grad()
def rounded(policy: Policy, precision: str) -> Policy:
    """Return a copy of a policy with rounded weights.

    Args:
        policy: Policy with float32 weights.
        precision: A key of `PRECISIONS`.
    """
    found = copy.deepcopy(policy)
    head = found.model.get_output_embeddings().weight
    ends = {id(head), id(found.model.get_input_embeddings().weight)}
    for weights in found.parameters():
        weights.copy_(PRECISIONS[precision](weights, id(weights) in ends))
    return found


def _bfloat16(weights: Tensor, _: bool) -> Tensor:  # noqa: FBT001 - called by position
    return weights.bfloat16().float()


def _float16(weights: Tensor, _: bool) -> Tensor:  # noqa: FBT001
    return weights.half().float()


def _int8(weights: Tensor, _: bool) -> Tensor:  # noqa: FBT001
    if weights.ndim != 2:
        return weights
    step = (weights.abs().amax(1, keepdim=True) / LARGEST_INT8).clamp(min=_SMALLEST)
    return (weights / step).round() * step


def _int8_layers(weights: Tensor, is_end: bool) -> Tensor:  # noqa: FBT001
    return weights if is_end else _int8(weights, is_end)


def _float8_layers(weights: Tensor, is_end: bool) -> Tensor:  # noqa: FBT001
    if weights.ndim != 2 or is_end:
        return weights
    step = (weights.abs().amax(1, keepdim=True) / LARGEST_E4M3).clamp(min=_SMALLEST)
    return (weights / step).to(torch.float8_e4m3fn).float() * step


PRECISIONS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "bfloat16": _bfloat16,
    "float16": _float16,
    "8-bit integers": _int8,
    "8-bit integers except embeddings": _int8_layers,
    "8-bit floats except embeddings": _float8_layers,
}
"""Functions that round a tensor, given whether it is an embedding or the head.

8-bit formats have one scale for each row of a matrix.
"""

COMPUTED = ("bfloat16", "float16")
"""Precisions in which engines also compute. Rounded weights then explain only a part of the
differences. For SmolLM2, this part is about a tenth of the log-likelihood per token."""
