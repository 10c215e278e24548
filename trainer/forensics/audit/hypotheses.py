"""What may have sampled a span, and which hypothesis its stored log-probabilities fit best.

Each hypothesis predicts the log-probability of every token. It fits as well as its differences from
the stored values are likely under the engine's noise. It replaces the label only if its
log-likelihood exceeds the label's by its penalty, and not because of a single token.

Reduced precision changes every logit of an engine a little. If the logits have independent errors, the
error of a log-probability is proportional to 1 - p: almost certain tokens have almost no error. The
scale of the noise is therefore

    sigma = FLOOR + kappa (1 - p) / temperature

where kappa is estimated from the spans that fit. Errors have a Student t distribution with 4 degrees
of freedom, mixed with a few outliers, so that no single token decides a verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, isnan, log, nan, pi
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.metadata import LogprobsMode
from trainer.forensics.audit.rows import OFF, Truncation
from trainer.forensics.audit.scores import INVERSE_TEMPERATURES, TRUNCATIONS, TokenScores

Array = npt.NDArray[np.floating]
FLOOR = 3e-4
"""Smallest scale of the noise, in nats, due to rounding in float32."""
SMALLEST_KAPPA, ASSUMED_KAPPA, LARGEST_KAPPA = 1e-3, 0.08, 0.35
"""Limits of an estimate of kappa, and its value if no span fits (typical of bfloat16)."""
OUTLIERS, OUTLIER_SCALE = 0.01, 2.0
"""Fraction of outliers, and the scale of their Cauchy distribution in nats."""
MISSING_DENSITY = log(OUTLIERS / (pi * OUTLIER_SCALE)) - 0.22
"""Log-density of a stored value without a prediction: that of a typical outlier."""
EXACT_KAPPA, CAUTION = 0.01, 3.0
"""An engine with a larger kappa also rounds its weights, which resembles a small change of version:
it takes `CAUTION` times the evidence for other weights."""
NEAR, FEWEST = 2.5, 8
"""Spans whose scale is at most `NEAR` times the usual one, with at least `FEWEST` tokens, estimate it."""


class Residuals(NamedTuple):
    """Differences of n tokens, stored minus predicted in nats, and their sensitivities.

    A sensitivity, (1 - p) / temperature, scales the effect of an error in the logits. Both are NaN at
    tokens without a prediction.
    """

    difference: Array
    sensitivity: Array

    @property
    def scale(self) -> float:
        """Mean absolute difference, relative to the mean sensitivity."""
        total = np.nansum(self.sensitivity + FLOOR / ASSUMED_KAPPA)
        return float(np.nansum(np.abs(self.difference)) / total)


OFFSETS = (-2, -1, 1, 2)
OUTSIDE = -5.0
"""Log-likelihood, in nats, of a token that a truncation would have excluded: finite, because the
engine's noise moves tokens across the boundary."""
DIFFERENT = 0.02
"""A temperature counts as another one if it differs from the label by more than this fraction."""


Setting = tuple[float | None, int]
"""1 / temperature (None: labelled) and truncation (column of `mass`) with which tokens were sampled."""


@dataclass(kw_only=True, slots=True)
class Span:
    """Stored values and scores of a span of n tokens."""

    stored: npt.NDArray[np.float32]  # [n] nats
    label: int | None  # the labelled candidate; None if the version is unknown
    inverse: float = 1.0  # labelled 1 / temperature
    truncation: Truncation = OFF  # labelled truncation
    temperature: float = 1.0  # as stored: 0 for greedy sampling, NaN if unknown
    is_assumed: bool = False  # the row records no settings: these are the model's defaults
    is_raw: bool = False  # the log-probabilities are those before temperature and truncation
    scores: dict[int, TokenScores] = field(default_factory=dict)  # by candidate

    @property
    def setting(self) -> Setting:
        """The labelled setting; the neutral one if the row records none."""
        return (1.0, 1) if self.is_assumed else (inf if self.temperature == 0 else None, 0)

    def sampled(self, weights: int, setting: Setting) -> Array:
        """[n] log-probability with which each token was sampled, if with this setting."""
        scores, (inverse, place) = self.scores[weights], setting
        logprobs = scores.labelled if inverse is None else scores.at(inverse)
        return logprobs - scores.mass[:, place]

    def likelihood(self, weights: int, setting: Setting) -> float:
        """Log-likelihood of the tokens, nats; finite for tokens outside a truncation."""
        outside = OUTSIDE * self.scores[weights].outside[:, setting[1]]
        return float((self.sampled(weights, setting) + outside).sum(dtype=np.float64))

    def under(
        self, weights: int, kind: str = "as_labelled", setting: Setting | None = None, **more: Any
    ) -> Hypothesis:
        """The hypothesis that some weights sampled the span, with the labelled or another setting."""
        setting = setting or self.setting
        bonus = self.likelihood(weights, setting) - self.likelihood(weights, self.setting)
        inverse, place = setting
        if inverse == inf:  # engines compute the log-probabilities of greedy rows at temperature 1
            inverse = None
        predicted, used = self.sampled(weights, (inverse, place)), inverse or self.inverse
        if self.is_raw:
            predicted, used = self.scores[weights].at(1.0), 1.0
        return Hypothesis(kind, weights, self.stored, predicted, used, bonus=bonus, **more)


class Hypothesis(NamedTuple):
    """A possible origin of a span of n tokens; after `Noise.fit`, also how well it explains them.

    The hypothesis that explains a span best is the verdict.
    """

    kind: str  # the fault, or `as_labelled`
    weights: int  # candidate; for a swap, that of the first part
    stored: npt.NDArray[np.float32]  # [n] nats
    predicted: Array  # [n] nats; NaN at tokens without a prediction
    inverse: float  # 1 / temperature of the predictions
    penalty: float = 0.0  # nats by which the fit must exceed the label's
    bonus: float = 0.0  # log-likelihood of the sampled tokens, minus that under the label
    values: Mapping[str, Any] = {}  # columns of the verdict
    per_token: Array = np.zeros(0)  # [n] log-likelihood of each stored value
    total: float = nan  # log-likelihood of the stored values and the tokens, with the scale's prior
    scale: float = 1.0  # factor by which the noise of the span exceeds the dataset's noise
    evidence: Mapping[str, Any] = {}  # columns of the verdict
    reason: str = ""  # details of the fault, in words

    @property
    def residuals(self) -> Residuals:
        """Differences from the stored values, and their sensitivities (1 - p) / temperature."""
        p = np.exp(np.minimum(self.predicted, 0, dtype=np.float64))
        return Residuals(self.stored - self.predicted, (1 - p) * self.inverse)

    @property
    def score(self) -> float:
        """Log-likelihood minus the penalty."""
        return self.total - self.penalty

    @property
    def mean_difference(self) -> float:
        """Mean absolute difference of the tokens with a prediction, nats."""
        return float(np.nanmean(np.abs(self.residuals.difference)))


def settings(span: Span, weights: int, noise: Noise) -> Iterator[Hypothesis]:
    """Yield the hypotheses that some weights sampled a span, with other settings than labelled.

    The last one of a row that records no settings is that they were the assumed ones.
    """
    usual, size = span.under(weights, "offset"), len(span.stored)
    for by in (by for by in OFFSETS if abs(by) < size):
        moved = np.roll(usual.predicted, -by)
        moved[slice(size - by, None) if by > 0 else slice(0, -by)] = np.nan
        yield usual._replace(predicted=moved, penalty=log(len(OFFSETS)), values={"offset": by})
    if not span.is_assumed and (span.inverse != 1 or span.truncation != OFF):
        kind = "processed_logprobs" if span.is_raw else "raw_logprobs"
        yield dataclasses.replace(span, is_raw=not span.is_raw).under(weights, kind)
    # The effect of a truncation on raw log-probabilities is known only at the labelled temperature.
    if not span.is_raw or span.is_assumed or span.truncation == OFF:
        yield _temperature(span, weights, noise)
    for place, cut in enumerate(TRUNCATIONS, start=1):
        if cut != span.truncation and not span.is_raw and not span.is_assumed:
            values = cut.columns
            more = {"penalty": log(len(TRUNCATIONS)), "values": values}
            yield span.under(weights, "truncation", (None, place), **more)
    if span.is_assumed:
        kind = "temperature" if span.inverse != 1 else "truncation"
        values = span.truncation.columns | {"best_temperature": 1 / span.inverse}
        yield span.under(weights, kind, (None, 0), values=values)


def _temperature(span: Span, weights: int, noise: Noise) -> Hypothesis:
    """The temperature that fits best; of raw log-probabilities, only the sampled tokens reveal it."""
    labelled, place = span.setting
    usual = span.inverse if labelled is None else labelled

    def at(inverse: float) -> Hypothesis:
        more = {"penalty": 4.0, "values": {"best_temperature": 1 / inverse}}
        return span.under(weights, "temperature", (inverse, place), **more)

    def evidence(inverse: float) -> float:
        tried = at(inverse)
        return float(noise.log_density(tried.residuals).sum()) + tried.bonus

    best, grid = 1.0, list(INVERSE_TEMPERATURES)
    for step in (2 ** (1 / 27), 2 ** (1 / 243), 1.0):
        best = max((b for b in grid if abs(b / usual - 1) > DIFFERENT), key=evidence)
        grid = [best * step**k for k in range(-9, 10)]
    return at(best)


def swap(span: Span, noise: Noise) -> Hypothesis:
    """The best pair of candidates, and the best position of the first token of the second one."""
    numbers, size = list(span.scores), len(span.stored)
    fits = [span.under(weights, "swap") for weights in numbers]
    upto = np.cumsum([noise.log_density(fit.residuals) for fit in fits], axis=1)
    gain = upto[:, None, :-1] + (upto[:, -1:] - upto[:, :-1])[None]
    gain[np.eye(len(fits), dtype=np.bool_)] = -np.inf
    first, second, last = (int(i) for i in np.unravel_index(int(np.argmax(gain)), gain.shape))
    parts = fits[first].predicted, fits[second].predicted
    return fits[first]._replace(
        predicted=np.where(np.arange(size) <= last, *parts),
        penalty=log(size) + log(len(numbers) * (len(numbers) - 1)),
        values={"second_version": numbers[second], "swap_position": last + 1},
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Model of the differences between an engine's log-probabilities and recomputed ones.

    It compares hypotheses about spans by how likely their differences are.
    """

    kappa: float = ASSUMED_KAPPA  # scale of the errors in the logits
    mean_difference: float = nan  # mean absolute difference of the spans it is estimated from, nats
    num_tokens: int = 0  # of these spans; 0 if the noise is assumed
    apart: float = 0.05  # distance of the two closest candidates, relative to the sensitivity

    @property
    def caution(self) -> float:
        """Factor of the evidence that other weights need."""
        return 1.0 if self.kappa < EXACT_KAPPA else CAUTION

    def sigma(self, residuals: Residuals) -> Array:
        """[n] scale of the noise, in nats."""
        sigma: Array = FLOOR + self.kappa * residuals.sensitivity
        return sigma

    def log_density(self, residuals: Residuals, scales: Array | float = 1.0) -> Array:
        """Return the log-density of n differences, nats, at k multiples of sigma ([k, 1] or a number)."""
        sigma = self.sigma(residuals) * scales
        z = residuals.difference / sigma
        usual = log(0.375 * (1 - OUTLIERS)) - np.log(sigma) - 2.5 * np.log1p(z * z / 4)
        relative = residuals.difference / OUTLIER_SCALE
        outlier = log(OUTLIERS / (pi * OUTLIER_SCALE)) - np.log1p(relative**2)
        density = usual + np.log1p(np.exp(outlier - usual))  # `logaddexp` warns about NaN
        return np.where(np.isnan(density), MISSING_DENSITY, density)

    def fit(self, hypothesis: Hypothesis, penalty: float = 0.0) -> Hypothesis:
        """Compute the log-likelihood of a hypothesis at the best scale of noise."""
        is_noise = hypothesis.kind == "noise"
        scales = LARGER_SCALES if is_noise else SCALES
        density = self.log_density(hypothesis.residuals, scales)
        prior = 0.0 if is_noise else 0.5 * (np.log(scales[:, 0]) / SPREAD) ** 2
        totals = density.sum(1) - prior + hypothesis.bonus
        best = int(np.argmax(totals))
        return hypothesis._replace(
            penalty=hypothesis.penalty + penalty,
            per_token=density[best],
            total=float(totals[best]),
            scale=float(scales[best, 0]),
        )

    def noisy(self, fit: Hypothesis) -> Hypothesis:
        """Fit the same weights again, with larger noise than the engine has."""
        return self.fit(fit._replace(kind="noise"), PENALTY + 2)

    def _settings(self, span: Span, weights: int, penalty: float) -> list[Hypothesis]:
        return [self.fit(one, penalty) for one in settings(span, weights, self)]

    def judge(self, span: Span) -> Hypothesis:
        """Compare all hypotheses for a span, and return the verdict."""
        caution = self.caution
        of_version = caution * (PENALTY + log(max(len(span.scores) - 1, 1)))
        versions = [
            self.fit(span.under(weights))
            if span.label in {None, weights}
            else self.fit(span.under(weights, "version"), of_version)
            for weights in span.scores
        ]
        first = max(versions, key=lambda fit: fit.total)
        label = next((fit for fit in versions if fit.weights == span.label), first)
        fits = [*versions, *self._settings(span, label.weights, PENALTY)]
        default = fits[-1] if span.is_assumed else label  # see `settings`
        if first is not label:
            fits += self._settings(span, first.weights, PENALTY + caution * PENALTY)
        if len(versions) > 1 and len(span.stored) > 1:
            swapped = swap(span, self)
            fits.append(self.fit(swapped._replace(penalty=caution * (PENALTY + swapped.penalty))))
        best = max(fits, key=lambda fit: fit.score)
        # Rounding reverts part of a small update, so an earlier version may be slightly closer.
        noisy = max(map(self.noisy, versions), key=lambda fit: fit.score)
        if self.noisy(label).scale <= SIMILAR_NOISE * noisy.scale:
            noisy = self.noisy(label)
        if noisy.score > best.score and noisy.scale >= SMALLEST_NOISE:
            best = noisy
        if best.kind == "temperature" and isnan(span.temperature):  # no label to contradict
            kind = "as_labelled" if best.weights == label.weights else "version"
            best = default if default.score > label.score else best._replace(kind=kind)
        most = max(float((best.per_token - label.per_token).max()), 0.0)
        if best.total - label.total - most <= PENALTY / 2:
            best = label  # the evidence rests on a single token
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
            kind = "too_short" if evidence < DECIDED * caution else kind
        columns = {
            "log_likelihood_ratio": best.total - label.total if is_fault else 0.0,
            "margin": margin,
            "next_version": None if rival is None else rival.weights,
            "num_decisive": int((np.abs(best.per_token - reference.per_token) > 0.5).sum()),
        }
        return best._replace(kind=kind, evidence=columns)

    def _against_others(self, fit: Hypothesis) -> float:
        """Return the log-likelihood ratio between a fit and weights as far apart as two candidates."""
        residuals = fit.residuals
        other = self.apart * residuals.sensitivity / self.sigma(residuals)
        scales = (fit.scale, np.hypot(fit.scale, other))
        of_fit, of_others = (self.log_density(residuals, scale).sum() for scale in scales)
        return float(of_fit - of_others)

    def is_unrelated(self, fit: Hypothesis) -> bool:
        """True if differences are too large for another precision of the same weights."""
        return fit.residuals.scale > max(UNRELATED_SCALE, UNRELATED_FACTOR * self.kappa)

    def is_suspicious(self, span: Span) -> bool:
        """True if the labelled weights alone do not clearly explain a span, or a part of it.

        A few percent of clean spans are suspicious.
        """
        assert span.label is not None
        label = self.fit(span.under(span.label))
        fits = [self.noisy(label), *self._settings(span, span.label, PENALTY)]
        if max(fit.score for fit in fits) + PENALTY > label.score + DOUBT:
            return True
        factors = label.scale * 2.0 ** np.arange(0, 12, 2)[:, None]
        density = self.log_density(label.residuals, factors)
        # The run of tokens that gains most from larger noise: the end of a late swap.
        upto = np.cumsum(np.pad(density[1:] - density[0], ((0, 0), (1, 0))), 1)
        # Differences far below the noise may have a common sign: rounding in float32 is not random.
        z = np.clip(label.residuals.difference / self.sigma(label.residuals), -3, 3)
        limit = 3.0 * max(float((z**2).sum()), 0.25 * len(z)) ** 0.5
        is_late = (upto - np.minimum.accumulate(upto, 1)).max() > DOUBT + log(len(z))
        return bool(is_late or abs(z.sum()) > limit)


def fit_noise(spans: Sequence[Residuals]) -> Noise:
    """Estimate the noise from the residuals of the best fit of each span.

    Spans that fit no candidate do not affect the estimate if at least a fifth of all spans do fit.
    """
    spans = [span for span in spans if len(span.difference) >= FEWEST] or list(spans)
    scales = np.array([span.scale for span in spans])
    usual = max(float(np.quantile(scales, 0.2)), SMALLEST_KAPPA) if len(scales) else np.inf
    fitting = [span for span, scale in zip(spans, scales, strict=True) if scale <= NEAR * usual]
    kappa = float(np.median(scales[scales <= NEAR * usual])) if fitting else np.inf
    if kappa > LARGEST_KAPPA:
        return Noise()
    distance = np.abs(np.concatenate([span.difference for span in fitting]))
    return Noise(
        kappa=max(kappa, SMALLEST_KAPPA),
        mean_difference=float(np.nanmean(distance)),
        num_tokens=int((~np.isnan(distance)).sum()),
    )


def best_residuals(span: Span) -> Residuals:
    """Return the residuals of the hypothesis that comes closest to a span, in either mode."""
    likes = [dataclasses.replace(span, is_raw=is_raw) for is_raw in (True, False)]
    tried = (
        one.residuals
        for like, weights in product(likes, span.scores)
        for one in (like.under(weights), *settings(like, weights, Noise()))
    )
    return min(tried, key=lambda residuals: residuals.scale)


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
            tried = (like.under(c, setting=(b, 0)) for c in span.scores for b in inverses)
            scales.append(min(one.residuals.scale for one in tried))
        if min(scales) < CLEARLY * max(scales):
            balance += float(np.sign(scales[0] - scales[1])) * len(span.stored)
            num_tokens += len(span.stored)
    return "processed" if balance > 0 else "raw", num_tokens
