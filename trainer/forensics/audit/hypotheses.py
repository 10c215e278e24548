"""Decide which weights and settings a span's stored log-probabilities fit best.

Each hypothesis predicts the log-probability of every sampled token, and fits as well as the differences
from the stored ones are likely under the engine's noise. A hypothesis replaces the label only if its
log-likelihood exceeds the label's by its penalty, and not because of a single token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isnan, log, nan, pi
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.metadata import LogprobsMode
from trainer.forensics.audit.noise import (
    MEDIAN,
    OUTLIER_SCALE,
    OUTLIERS,
    Array,
    Noise,
    Residuals,
    log_density,
)
from trainer.forensics.audit.rows import OFF, Truncation
from trainer.forensics.audit.scores import INVERSE_TEMPERATURES, TRUNCATIONS, TokenScores

MISSING_DENSITY = log(OUTLIERS / (pi * OUTLIER_SCALE)) - 0.22
"""Log-density of a stored value that belongs to no token of the span: that of a typical outlier."""
SPREAD = 0.25
"""Standard deviation of the log of a span's scale of noise."""
SCALES = 2.0 ** np.arange(-1, 1.01, 0.25)
"""Factors by which the sigma of a span may differ from the sigma of its engine."""
LARGER_SCALES = 2.0 ** np.arange(0.75, 12.01, 0.25)
"""Factors of sigma that indicate a source of noise other than the engine."""
PENALTY = 10.0
"""Minimum log-likelihood ratio for reporting a fault, in nats. It corresponds to prior odds of
22,000 to 1 against a fault."""
OFFSETS = (-2, -1, 1, 2)
OUTSIDE = -5.0
"""Log-likelihood, in nats, of a token that a truncation would have excluded: finite, because the
engine's noise moves tokens across the boundary."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Stored values and scores of a span of n tokens."""

    stored: npt.NDArray[np.float32]  # [n] nats
    scores: Mapping[int, TokenScores]  # by candidate
    label: int | None  # the labelled candidate; None if the version is unknown
    inverse: float = 1.0  # labelled 1 / temperature
    truncation: Truncation = OFF  # labelled truncation
    temperature: float = 1.0  # as stored: 0 for greedy sampling, NaN if unknown
    is_assumed: bool = False  # the row records no settings: these are the model's defaults

    def residuals(self, candidate: int, mode: LogprobsMode) -> Residuals:
        """Return the residuals of a candidate at the labelled settings."""
        is_neutral = mode == "raw" or self.is_assumed
        return self.at_temperature(candidate, 1.0) if is_neutral else self.processed(candidate)

    def processed(self, candidate: int, place: int = 0) -> Residuals:
        """Return the residuals at the row's temperature, with the truncation of a column of scores."""
        scores = self.scores[candidate]
        predicted = scores.labelled - scores.mass[:, place]
        return Residuals(self.stored - predicted, predicted, self.inverse)

    def at_temperature(self, candidate: int, inverse: float) -> Residuals:
        """Return the residuals of a candidate at another temperature, without truncation."""
        predicted = self.scores[candidate].at(inverse)
        return Residuals(self.stored - predicted, predicted, inverse)

    def shifted(self, residuals: Residuals, offset: int) -> Residuals:
        """Return the residuals if stored values belong to the tokens `offset` positions later."""
        size = len(self.stored) - abs(offset)
        predicted = residuals.predicted[max(offset, 0) :][:size]
        stored = self.stored[max(-offset, 0) :][:size]
        return residuals._replace(difference=stored - predicted, predicted=predicted)

    def tokens(self, candidate: int, inverse: float | None = None, place: int = 0) -> float:
        """Log-likelihood of the sampled tokens, in nats.

        At the temperature and truncation (column `place` of the scores) of the row, or at another
        temperature without truncation.
        """
        scores = self.scores[candidate]
        if inverse is not None:
            return float(scores.at(inverse).sum(dtype=np.float64))
        logprobs = scores.labelled - scores.mass[:, place] + OUTSIDE * scores.outside[:, place]
        return float(logprobs.sum(dtype=np.float64))

    def tokens_as_labelled(self, candidate: int) -> float:
        """Log-likelihood of the sampled tokens at the labelled settings, in nats."""
        if self.is_assumed:
            return self.tokens(candidate, 1.0)
        # Greedy sampling counts as sampling at the lowest temperature of the grid.
        return self.tokens(candidate, inf if self.temperature == 0 else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A possible origin of a span, and how well it explains the span; the best one is the verdict."""

    kind: str  # the fault, or `as_labelled`
    candidate: int  # weights; for a swap, those of the first part
    second: int | None = None  # weights after a swap
    position: int | None = None  # first token after a swap
    inverse: float  # 1 / temperature at which the tokens were sampled
    truncation: Truncation  # of the log-probabilities
    offset: int = 0  # position of the predicted token minus that of the stored log-probability
    penalty: float = 0.0  # nats by which the fit must exceed the label's
    bonus: float = 0.0  # log-likelihood of the sampled tokens, minus that under the label
    per_token: Array  # [n] log-likelihood of each stored value
    total: float  # log-likelihood of the stored values, with the prior of the scale
    scale: float  # factor by which the noise of the span exceeds the dataset's noise
    residuals: Residuals  # of the tokens with a prediction
    # Of a verdict: the evidence for it.
    ratio: float = 0.0  # log-likelihood minus the label's, in nats; 0 for the label
    margin: float = nan  # log-likelihood minus the next-best version's; NaN with one candidate
    rival: int | None = None  # the next-best version
    num_decisive: int = 0  # tokens that favour either by more than 0.5 nats
    reason: str = ""  # details of the fault, in words

    @property
    def score(self) -> float:
        """Log-likelihood minus the penalty."""
        return self.total + self.bonus - self.penalty

    @property
    def mean_difference(self) -> float:
        """Mean absolute difference of the tokens with a prediction, nats."""
        return float(np.abs(self.residuals.difference).mean())


class Judge:
    """Compares hypotheses about spans, given the engine's noise and the kind of log-probabilities."""

    def __init__(self, noise: Noise, mode: LogprobsMode) -> None:
        self.noise, self.mode = noise, mode

    def fit(
        self,
        span: Span,
        kind: str,
        candidate: int,
        residuals: Residuals | None = None,
        scales: Array = SCALES,
        **details: Any,
    ) -> Fit:
        """Compute the log-likelihood of a hypothesis at the best scale of the engine's noise.

        By default, the residuals and details are those of the labelled settings.
        """
        residuals = residuals or span.residuals(candidate, self.mode)
        density = log_density(residuals.difference, self.noise.sigma(residuals) * scales[:, None])
        missing = np.full((len(scales), len(span.stored) - density.shape[1]), MISSING_DENSITY)
        is_later = details.get("offset", 0) > 0
        density = np.concatenate([density, missing] if is_later else [missing, density], 1)
        totals = density.sum(1)
        if scales is SCALES:
            totals = totals - 0.5 * (np.log(scales) / SPREAD) ** 2
        best = int(np.argmax(totals))
        neutral = self.mode == "raw" or span.is_assumed
        usual: dict[str, Any] = {
            "inverse": inf if span.temperature == 0 else 1.0 if span.is_assumed else span.inverse,
            "truncation": OFF if neutral else span.truncation,
        }
        return Fit(
            kind=kind,
            candidate=candidate,
            residuals=residuals,
            per_token=density[best],
            total=float(totals[best]),
            scale=float(scales[best]),
            **usual | details,
        )

    def noisy(self, span: Span, fit: Fit) -> Fit:
        """Fit the same weights again, with larger noise than the engine has."""
        penalty = fit.penalty + PENALTY + 2.0
        return self.fit(span, "noise", fit.candidate, fit.residuals, LARGER_SCALES, penalty=penalty)

    def versions(self, span: Span) -> list[Fit]:
        """Fit each candidate at the labelled settings; the label comes first, or else the best."""
        others = self.noise.caution * (PENALTY + log(max(len(span.scores) - 1, 1)))
        fits = []
        for number in span.scores:
            is_label = number == span.label or span.label is None
            kind: str = "as_labelled" if is_label else "version"
            fits.append(self.fit(span, kind, number, penalty=0.0 if is_label else others))
        return sorted(fits, key=lambda fit: (fit.candidate != span.label, -fit.total))

    def settings(self, span: Span, candidate: int, extra: float) -> Iterator[Fit]:
        """Fit other settings of some weights; their penalties are increased by `extra`."""
        usual, tokens = span.residuals(candidate, self.mode), span.tokens_as_labelled(candidate)
        raw, processed = span.at_temperature(candidate, 1.0), span.processed(candidate)
        extra += PENALTY
        for offset in OFFSETS:
            if abs(offset) < len(span.stored):
                shifted, penalty = span.shifted(usual, offset), extra + log(len(OFFSETS))
                yield self.fit(span, "offset", candidate, shifted, penalty=penalty, offset=offset)
        as_sampled: dict[str, Any] = {"inverse": span.inverse, "truncation": span.truncation}
        if not span.is_assumed and (span.inverse != 1 or span.truncation != OFF):
            if self.mode == "raw":
                kind: str = "processed_logprobs"
                residuals = processed
            else:
                kind, residuals, as_sampled = "raw_logprobs", raw, {}
            yield self.fit(span, kind, candidate, residuals, penalty=extra, **as_sampled)
        is_cut = span.truncation != OFF and not span.is_assumed
        if not (is_cut and self.mode == "raw"):
            inverse = self._temperature(span, candidate)
            residuals = usual if self.mode == "raw" else span.at_temperature(candidate, inverse)
            if is_cut:  # the truncation at this temperature is not known exactly
                predicted = residuals.predicted - span.scores[candidate].mass[:, 0]
                residuals = Residuals(span.stored - predicted, predicted, inverse)
            details: dict[str, Any] = {"inverse": inverse, "penalty": extra + 2.0}
            details["bonus"] = -2.0 if is_cut else span.tokens(candidate, inverse) - tokens
            yield self.fit(span, "temperature", candidate, residuals, **details)
        if self.mode == "raw" or span.is_assumed:
            return
        for place in range(1, span.scores[candidate].mass.shape[1]):
            cut = TRUNCATIONS[place - 1]
            if cut != span.truncation:
                residuals = span.processed(candidate, place)
                bonus = span.tokens(candidate, place=place) - tokens
                details = {
                    "truncation": cut,
                    "penalty": extra + log(len(TRUNCATIONS)),
                }
                yield self.fit(span, "truncation", candidate, residuals, bonus=bonus, **details)

    def _temperature(self, span: Span, candidate: int) -> float:
        """Return the inverse temperature, other than the labelled one, that fits best.

        Raw log-probabilities do not depend on the temperature, so only the sampled tokens reveal it.
        """
        label = inf if span.temperature == 0 else 1.0 if span.is_assumed else span.inverse

        def likelihood(inverse: float) -> float:
            total = span.tokens(candidate, inverse)
            if self.mode == "processed":
                residuals = span.at_temperature(candidate, inverse)
                total += float(log_density(residuals.difference, self.noise.sigma(residuals)).sum())
            return total

        best, grid = 1.0, list(INVERSE_TEMPERATURES)
        for step in (2 ** (1 / 27), 2 ** (1 / 243), 1.0):
            best = max((b for b in grid if abs(b / label - 1) > 0.02), key=likelihood)
            grid = [best * step**k for k in range(-9, 10)]
        return best

    def swap(self, span: Span) -> Fit:
        """Fit a swap of weights within a span: the best pair of candidates and the best position."""
        residuals = {number: span.residuals(number, self.mode) for number in span.scores}
        density = [log_density(r.difference, self.noise.sigma(r)) for r in residuals.values()]
        upto, numbers, size = np.cumsum(density, axis=1), list(span.scores), len(span.stored)
        gain = upto[:, None, :-1] + (upto[:, -1:] - upto[:, :-1])[None]
        gain[np.eye(len(numbers), dtype=np.bool_)] = -np.inf
        first, second, at = (int(i) for i in np.unravel_index(int(np.argmax(gain)), gain.shape))
        before, after = residuals[numbers[first]], residuals[numbers[second]]
        joined = Residuals(
            np.concatenate([before.difference[: at + 1], after.difference[at + 1 :]]),
            np.concatenate([before.predicted[: at + 1], after.predicted[at + 1 :]]),
            before.inverse,
        )
        penalty = PENALTY + log(size) + log(len(numbers) * (len(numbers) - 1))
        details: dict[str, Any] = {"second": numbers[second], "position": at + 1}
        penalty *= self.noise.caution
        return self.fit(span, "swap", numbers[first], joined, penalty=penalty, **details)

    def __call__(self, span: Span) -> Fit:
        """Compare all hypotheses for a span, and return the verdict."""
        versions = self.versions(span)
        label, first = versions[0], max(versions, key=lambda fit: fit.total)
        fits = [*versions, *self.settings(span, label.candidate, 0.0)]
        if first is not label:
            fits += self.settings(span, first.candidate, self.noise.caution * PENALTY)
        if len(versions) > 1 and len(span.stored) > 1:
            fits.append(self.swap(span))
        default = self._default(span, label.candidate) if span.is_assumed else label
        best = max([*fits, default], key=lambda fit: fit.score)
        noisy = max((self.noisy(span, fit) for fit in versions), key=lambda fit: fit.score)
        # Rounding reverts part of a small update, so an earlier version may be slightly closer.
        of_label = self.noisy(span, label)
        if of_label.scale <= SIMILAR_NOISE * noisy.scale:
            noisy = of_label
        if noisy.score > best.score and noisy.scale >= SMALLEST_NOISE:
            best = noisy
        if best.kind == "temperature" and isnan(span.temperature):  # no label to contradict
            is_label = best.candidate == label.candidate
            best = dataclasses.replace(best, kind="as_labelled" if is_label else "version")
            if default.score > label.score:
                best = default
        gain = float((best.per_token - label.per_token).max())
        ratio = best.total + best.bonus - label.total
        if ratio - max(gain, 0.0) <= PENALTY / 2:  # the evidence rests on a single token
            best = label
        rivals = [fit for fit in versions if fit.candidate != best.candidate]
        rival = max(rivals, key=lambda fit: fit.total, default=None)
        margin = nan if rival is None else best.total - rival.total
        reference = (rival or label) if best.kind == "as_labelled" else label
        return dataclasses.replace(
            best,
            kind=self._kind(span, best, margin, default.total + default.bonus - label.total),
            ratio=0.0 if best.kind == "as_labelled" else ratio,
            margin=margin,
            rival=None if rival is None else rival.candidate,
            num_decisive=int((np.abs(best.per_token - reference.per_token) > 0.5).sum()),
        )

    def _default(self, span: Span, candidate: int) -> Fit:
        """Fit the assumed settings of a row that records none."""
        kind: str = "temperature" if span.inverse != 1 else "truncation"
        is_raw = self.mode == "raw"
        residuals = span.at_temperature(candidate, 1.0) if is_raw else span.processed(candidate)
        details: dict[str, Any] = {
            "inverse": span.inverse,
            "truncation": span.truncation,
            "penalty": PENALTY,
        }
        details["bonus"] = span.tokens(candidate) - span.tokens_as_labelled(candidate)
        return self.fit(span, kind, candidate, residuals, **details)

    def _kind(self, span: Span, best: Fit, margin: float, default_ratio: float) -> str:
        if best.kind != "as_labelled":
            return "unknown_model" if self._is_unrelated(best) else best.kind
        if span.is_assumed and default_ratio > -DECIDED:
            return "too_short"
        if span.label is None or len(span.stored) < SHORT_TOKENS:
            evidence = self._evidence(best) if isnan(margin) else abs(margin)
            return "too_short" if evidence < DECIDED * self.noise.caution else best.kind
        return best.kind

    def _is_unrelated(self, fit: Fit) -> bool:
        limit = max(UNRELATED_SCALE, UNRELATED_FACTOR * MEDIAN * self.noise.kappa)
        return fit.residuals.scale > limit

    def _evidence(self, fit: Fit) -> float:
        """Return the log-likelihood ratio between a fit and weights as far apart as two candidates."""
        difference, sigma = fit.residuals.difference, self.noise.sigma(fit.residuals) * fit.scale
        other = np.hypot(sigma, self.noise.apart * fit.residuals.sensitivity)
        return float((log_density(difference, sigma) - log_density(difference, other)).sum())

    def is_suspicious(self, span: Span) -> bool:
        """True if the labelled weights alone do not clearly explain a span, or a part of it.

        A few percent of clean spans are suspicious.
        """
        if span.label is None:
            return True
        span = dataclasses.replace(span, scores={span.label: span.scores[span.label]})
        (label,) = self.versions(span)
        fits = [self.noisy(span, label), *self.settings(span, label.candidate, 0.0)]
        if max(fit.score for fit in fits) + PENALTY > label.score + DOUBT:
            return True
        difference, sigma = label.residuals.difference, self.noise.sigma(label.residuals)
        sigma = sigma * label.scale
        for factor in 2.0 ** np.arange(1, 12, 2):
            # The run of tokens that gains most from larger noise: the end of a late swap.
            gains = log_density(difference, factor * sigma) - log_density(difference, sigma)
            upto = np.append([0.0], np.cumsum(gains))
            if float((upto - np.minimum.accumulate(upto)).max()) > DOUBT + log(len(gains)):
                return True
        z = np.clip(difference / sigma, -3, 3)
        # Differences far below the noise may have a common sign: rounding in float32 is not random.
        return bool(abs(z.sum()) > 3.0 * max(float((z**2).sum()), 0.25 * len(z)) ** 0.5)

    def better(
        self, span: Span, verdict: Fit, candidate: int, kind: str, reason: str
    ) -> Fit | None:
        """Return the verdict if other scores explain a span better by more than `PENALTY`.

        `span` has the scores of another prompt or of rounded weights, which `reason` describes.
        """
        fit = self.fit(span, kind, candidate)
        if kind == "noise":  # the engine may also compute in this precision
            fit = max(fit, self.noisy(span, fit), key=lambda fit: fit.total)
        gain = fit.total - verdict.total
        if gain <= PENALTY or self._is_unrelated(fit):
            return None
        evidence = {name: getattr(verdict, name) for name in ("margin", "rival", "num_decisive")}
        ratio = verdict.ratio + gain
        return dataclasses.replace(fit, kind=kind, ratio=ratio, reason=reason, **evidence)
