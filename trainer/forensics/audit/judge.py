"""Decide which hypothesis a span's stored log-probabilities fit best.

A hypothesis fits as well as its differences from the stored values are likely under the engine's
noise. It replaces the label only if its log-likelihood exceeds the label's by its penalty, and not
because of a single token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isnan, log, nan
from typing import Any, NamedTuple

import numpy as np

from schemas.metadata import LogprobsMode
from trainer.forensics.audit.hypotheses import (
    Hypothesis,
    Span,
    labelled,
    settings,
    swap,
    with_settings,
)
from trainer.forensics.audit.noise import Array, Noise, Residuals
from trainer.forensics.audit.scores import INVERSE_TEMPERATURES

SPREAD = 0.25
"""Standard deviation of the log of a span's scale of noise."""
SCALES = 2.0 ** np.arange(-1, 1.01, 0.25)[:, None]
"""Factors by which the sigma of a span may differ from the sigma of its engine."""
LARGER_SCALES = 2.0 ** np.arange(0.75, 12.01, 0.25)[:, None]
"""Factors of sigma that indicate a source of noise other than the engine."""
PENALTY = 10.0
"""Minimum log-likelihood ratio for reporting a fault, in nats. It corresponds to prior odds of
22,000 to 1 against a fault."""
DOUBT = 2.0
"""Log-likelihood ratio against the label, in nats, above which a span is suspicious."""
SMALLEST_NOISE, SIMILAR_NOISE = 1.6, 1.5
"""Smallest scale that is reported as `noise`; it is attributed to the label if the label's scale is
at most `SIMILAR_NOISE` times the scale under the best-fitting weights."""
UNRELATED_SCALE, UNRELATED_FACTOR = 0.05, 10.0
"""Differences are not attributed to rounding if their typical scale exceeds two limits: an absolute
one, which is about the scale of bfloat16, and a multiple of the dataset's noise."""
SHORT_TOKENS, DECIDED = 20, 3.0
"""A span with fewer tokens is `too_short` if the next-best version is closer than `DECIDED` nats."""
CLEARLY = 0.5
"""A span clearly fits one kind of log-probabilities if its typical residual is less than this
fraction of the other's."""


class Fit(NamedTuple):
    """How well a hypothesis explains a span; the best one is the verdict."""

    kind: str  # the fault, or `as_labelled`
    hypothesis: Hypothesis
    residuals: Residuals
    per_token: Array  # [n] log-likelihood of each stored value
    total: float  # log-likelihood of the stored values and the tokens, with the prior of the scale
    scale: float  # factor by which the noise of the span exceeds the dataset's noise
    evidence: Mapping[str, Any] = {}  # columns of the verdict
    reason: str = ""  # details of the fault, in words

    @property
    def weights(self) -> int:
        """The candidate; for a swap, that of the first part."""
        return self.hypothesis.weights

    @property
    def score(self) -> float:
        """Log-likelihood minus the penalty."""
        return self.total - self.hypothesis.penalty

    @property
    def mean_difference(self) -> float:
        """Mean absolute difference of the tokens with a prediction, nats."""
        return float(np.nanmean(np.abs(self.residuals.difference)))


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares hypotheses about spans, given the engine's noise."""

    noise: Noise

    def fit(self, span: Span, hypothesis: Hypothesis, penalty: float = 0.0) -> Fit:
        """Compute the log-likelihood of a hypothesis at the best scale of noise."""
        hypothesis = hypothesis._replace(penalty=hypothesis.penalty + penalty)
        residuals, is_noise = hypothesis.residuals(span), hypothesis.kind == "noise"
        scales = LARGER_SCALES if is_noise else SCALES
        density = self.noise.log_density(residuals, scales)
        prior = 0.0 if is_noise else 0.5 * (np.log(scales[:, 0]) / SPREAD) ** 2
        totals = density.sum(1) - prior + hypothesis.bonus
        best = int(np.argmax(totals))
        total, scale = float(totals[best]), float(scales[best, 0])
        return Fit(hypothesis.kind, hypothesis, residuals, density[best], total, scale)

    def noisy(self, span: Span, fit: Fit) -> Fit:
        """Fit the same weights again, with larger noise than the engine has."""
        return self.fit(span, fit.hypothesis._replace(kind="noise"), PENALTY + 2)

    def _settings(self, span: Span, weights: int, penalty: float) -> list[Fit]:
        return [self.fit(span, one, penalty) for one in settings(span, weights, self.noise)]

    def __call__(self, span: Span) -> Fit:
        """Compare all hypotheses for a span, and return the verdict."""
        caution = self.noise.caution
        of_version = caution * (PENALTY + log(max(len(span.scores) - 1, 1)))
        versions = [
            self.fit(span, labelled(span, weights))
            if span.label in {None, weights}
            else self.fit(span, labelled(span, weights, "version"), of_version)
            for weights in span.scores
        ]
        first = max(versions, key=lambda fit: fit.total)
        label = next((fit for fit in versions if fit.weights == span.label), first)
        fits = [*versions, *self._settings(span, label.weights, PENALTY)]
        default = fits[-1] if span.is_assumed else label  # see `SETTINGS`
        if first is not label:
            fits += self._settings(span, first.weights, PENALTY + caution * PENALTY)
        if len(versions) > 1 and len(span.stored) > 1:
            swapped = swap(span, self.noise)
            penalty = caution * (PENALTY + swapped.penalty)
            fits.append(self.fit(span, swapped._replace(penalty=penalty)))
        best = max(fits, key=lambda fit: fit.score)
        # Rounding reverts part of a small update, so an earlier version may be slightly closer.
        noisy = max((self.noisy(span, fit) for fit in versions), key=lambda fit: fit.score)
        of_label = self.noisy(span, label)
        if of_label.scale <= SIMILAR_NOISE * noisy.scale:
            noisy = of_label
        if noisy.score > best.score and noisy.scale >= SMALLEST_NOISE:
            best = noisy
        if best.kind == "temperature" and isnan(span.temperature):  # no label to contradict
            kind = "as_labelled" if best.weights == label.weights else "version"
            best = default if default.score > label.score else best._replace(kind=kind)
        most = max(float((best.per_token - label.per_token).max()), 0.0)
        if best.total - label.total - most <= PENALTY / 2:
            best = label  # the evidence rests on a single token
        return self._with_evidence(span, best, label, default, versions)

    def _with_evidence(
        self, span: Span, best: Fit, label: Fit, default: Fit, versions: Sequence[Fit]
    ) -> Fit:
        """Return a verdict with its evidence, or that there is too little."""
        others = (fit for fit in versions if fit.weights != best.weights)
        rival = max(others, key=lambda fit: fit.total, default=None)
        kind, is_fault = best.kind, best.kind != "as_labelled"
        margin = nan if rival is None else best.total - rival.total
        reference = label if is_fault or rival is None else rival
        if is_fault:
            kind = "unknown_model" if self.is_unrelated(best) else kind
        elif span.is_assumed and default.total - label.total > -DECIDED:
            kind = "too_short"
        elif span.label is None or len(span.stored) < SHORT_TOKENS:
            evidence = self._against_others(best) if isnan(margin) else abs(margin)
            kind = "too_short" if evidence < DECIDED * self.noise.caution else kind
        columns = {
            "log_likelihood_ratio": best.total - label.total if is_fault else 0.0,
            "margin": margin,
            "next_version": None if rival is None else rival.weights,
            "num_decisive": int((np.abs(best.per_token - reference.per_token) > 0.5).sum()),
        }
        return best._replace(kind=kind, evidence=columns)

    def _against_others(self, fit: Fit) -> float:
        """Return the log-likelihood ratio between a fit and weights as far apart as two candidates."""
        residuals, noise = fit.residuals, self.noise
        other = noise.apart * residuals.sensitivity / noise.sigma(residuals)
        scales = (fit.scale, np.hypot(fit.scale, other))
        of_fit, of_others = (noise.log_density(residuals, scale).sum() for scale in scales)
        return float(of_fit - of_others)

    def is_unrelated(self, fit: Fit) -> bool:
        """True if differences are too large for another precision of the same weights."""
        return fit.residuals.scale > max(UNRELATED_SCALE, UNRELATED_FACTOR * self.noise.kappa)

    def is_suspicious(self, span: Span) -> bool:
        """True if the labelled weights alone do not clearly explain a span, or a part of it.

        A few percent of clean spans are suspicious.
        """
        assert span.label is not None
        label = self.fit(span, labelled(span, span.label))
        fits = [self.noisy(span, label), *self._settings(span, span.label, PENALTY)]
        if max(fit.score for fit in fits) + PENALTY > label.score + DOUBT:
            return True
        factors = label.scale * 2.0 ** np.arange(0, 12, 2)[:, None]
        density = self.noise.log_density(label.residuals, factors)
        # The run of tokens that gains most from larger noise: the end of a late swap.
        upto = np.cumsum(np.pad(density[1:] - density[0], ((0, 0), (1, 0))), 1)
        # Differences far below the noise may have a common sign: rounding in float32 is not random.
        z = np.clip(label.residuals.difference / self.noise.sigma(label.residuals), -3, 3)
        limit = 3.0 * max(float((z**2).sum()), 0.25 * len(z)) ** 0.5
        is_late = (upto - np.minimum.accumulate(upto, 1)).max() > DOUBT + log(len(z))
        return bool(is_late or abs(z.sum()) > limit)


def best_residuals(span: Span) -> Residuals:
    """Return the residuals of the hypothesis that comes closest to a span, in either mode."""
    likes = [dataclasses.replace(span, is_raw=is_raw) for is_raw in (True, False)]
    tried = (
        hypothesis
        for like, weights in product(likes, span.scores)
        for hypothesis in (labelled(like, weights), *settings(like, weights, Noise()))
    )
    return min((one.residuals(span) for one in tried), key=lambda residuals: residuals.scale)


def likely_mode(spans: Sequence[Span]) -> tuple[LogprobsMode, int]:
    """Infer the mode of stored log-probabilities from the spans that clearly fit only one mode.

    The mode that fits more tokens wins. Also returns the number of tokens in these spans. If the
    temperature is unknown, processed log-probabilities may be at any temperature.
    """
    balance, num_tokens = 0.0, 0
    for span in spans:
        scales = []
        for is_raw in (True, False):
            like = dataclasses.replace(span, is_raw=is_raw)
            inverses = INVERSE_TEMPERATURES if isnan(span.temperature) else (None,)
            fits = (with_settings(like, "", c, b, 0) for c in span.scores for b in inverses)
            scales.append(min(fit.residuals(span).scale for fit in fits))
        if min(scales) < CLEARLY * max(scales):
            balance += float(np.sign(scales[0] - scales[1])) * len(span.stored)
            num_tokens += len(span.stored)
    return "processed" if balance > 0 else "raw", num_tokens
