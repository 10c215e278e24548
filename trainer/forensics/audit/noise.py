"""Model the differences between an engine's log-probabilities and exact ones: the engine's noise.

Reduced precision changes every logit a little. If the logits have independent errors, the error of
a log-probability is proportional to 1 - p: almost certain tokens have almost no error. The scale of
the noise is therefore

    sigma = FLOOR + kappa(-logprob) * (1 - p) / temperature

where kappa is estimated from the data, by ranges of the log-probability. Errors have a Student t
distribution, mixed with a small fraction of outliers, so that no single token decides a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lgamma, log, pi
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]

FLOOR = 1e-3
"""Smallest scale, in nats, due to rounding in float32 and interpolation between temperatures."""
EDGES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Boundaries between the ranges of -logprob, in nats; kappa is estimated for each range."""
OUTLIERS, OUTLIER_SCALE = 0.01, 2.0
"""Fraction of outliers, and the scale of their Cauchy distribution in nats."""
DEGREES = {2.0: 0.816, 3.0: 0.765, 4.0: 0.741, 6.0: 0.718, 12.0: 0.695}
"""Candidate degrees of freedom, each with the median absolute value of its distribution."""
ASSUMED_KAPPA, SMALLEST_KAPPA, LARGEST_KAPPA = 0.08, 2e-3, 0.35
"""Kappa if it cannot be estimated (typical of bfloat16), and the limits of an estimate."""
ASSUMED_APART = 0.05
"""Assumed difference between weights, relative to the sensitivity, if it is unknown."""
MOST_DEPENDENT = 4.0
"""Upper limit of `Noise.dependence`."""
ASSUMED_DEPENDENCE, ASSUMED_SPANS = 2.5, 8
"""Assumed `Noise.dependence` of engines with reduced precision, and the weight of this assumption in
the estimate, in spans. We measured 2.7 for vLLM with SmolLM2 in bfloat16."""
EXACT_NOISE = 0.01
"""If `typical_noise` is below this value, the engine computes in float32 and does not round weights."""
CHI_SQUARED_MEDIAN = 0.455
"""Median of the square of a standard normal variable."""
SCALES = tuple(float(x) for x in 2.0 ** np.arange(-1, 1.01, 0.25))
"""Factors by which the sigma of a span may differ from the sigma of its engine."""
LARGER_SCALES = tuple(float(x) for x in 2.0 ** np.arange(0.75, 9.01, 0.25))
"""Factors of sigma that indicate a source of noise other than the engine."""
LARGEST_MEAN = 0.5
"""Mean absolute difference, relative to the mean of (1 - p) / temperature, above which a span fits no
candidate, even if most of its tokens do."""
SPREAD_BOUNDS = (0.12, 0.4)
LEAST_SENSITIVE = 0.02
"""Constant added to the sensitivity of each token, so that almost certain tokens are not
decisive."""
FEWEST_USUAL = 3
"""Minimum number of spans for `Noise.usual`."""
PRIOR_TOKENS = 30
"""Weight of the common kappa in the estimate of a range, in tokens."""
NEAR = 2.5
"""A span has the usual noise if its typical scale is at most this multiple of the usual scale."""
MIN_TOKENS = 8
"""Spans with fewer tokens are not used for the estimate, unless all are shorter."""


class Residuals(NamedTuple):
    """Differences between the stored and the predicted log-probabilities of a span of n tokens.

    Attributes:
        difference: [n] stored minus predicted log-probabilities, nats.
        predicted: [n] predicted log-probabilities, nats.
        inverse_temperature: Inverse of the temperature at which they are predicted.
    """

    difference: Array
    predicted: Array
    inverse_temperature: float

    @property
    def sensitivity(self) -> Array:
        """[n] (1 - p) / temperature, which scales the effect of an error in the logits."""
        return -np.expm1(self.predicted.astype(np.float64)) * self.inverse_temperature


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Model of the differences between an engine's log-probabilities and recomputed ones.

    Attributes:
        kappa: Scale of the errors in the logits, by range of the log-probability.
        degrees: Degrees of freedom of the Student t distribution.
        spread: Standard deviation of the log of a span's scale.
        mean_difference: Mean absolute difference, in nats, of the spans used for the estimate.
        num_tokens: Number of tokens used for the estimate; 0 if the noise is assumed.
        apart: Mean difference between the two closest candidates, relative to the mean sensitivity.
        dependence: Variance of `agreement` with other weights, relative to its variance for
            independent errors. It exceeds 1 if the engine rounds its weights, which makes large
            likelihood ratios between weights more frequent by chance.
        usual: Median of the `relative_mean` of the spans used for the estimate; infinite if there
            are too few.
    """

    kappa: tuple[float, ...] = (ASSUMED_KAPPA,) * (len(EDGES) + 1)
    degrees: float = 4.0
    spread: float = 0.25
    mean_difference: float = float("nan")
    num_tokens: int = 0
    apart: float = ASSUMED_APART
    dependence: float = 1.0
    usual: float = float("inf")

    def sigma(self, predicted: Array, inverse_temperature: Array | float) -> Array:
        """Return the scale of the noise at predicted log-probabilities, in nats."""
        kappa = np.asarray(self.kappa)[np.digitize(-predicted, EDGES)]
        found: Array = FLOOR + kappa * -np.expm1(np.minimum(predicted, 0)) * inverse_temperature
        return found

    def log_density(self, difference: Array, sigma: Array) -> Array:
        """Return the log-density of differences, in nats per token."""
        n = self.degrees
        constant = lgamma((n + 1) / 2) - lgamma(n / 2) - log(n * pi) / 2 + log(1 - OUTLIERS)
        usual = constant - np.log(sigma) - (n + 1) / 2 * np.log1p((difference / sigma) ** 2 / n)
        found: Array = np.logaddexp(usual, outlier_density(difference))
        return found

    def agreement(self, residuals: Residuals, change: Array) -> float:
        """Measure how well residuals agree with a change of the prediction.

        The result is the derivative of the log-likelihood in the direction of the change, divided
        by the standard deviation that it would have if the errors were independent.
        """
        n, sigma = self.degrees, self.sigma(residuals.predicted, residuals.inverse_temperature)
        z, direction = residuals.difference / sigma, change / sigma
        information = (n + 1) / (n + 3) * float((direction**2).sum())
        score = float(((n + 1) * z / (n + z**2) * direction).sum())
        return float(score / max(information, 1e-12) ** 0.5)

    def prior(self, scales: Array) -> Array:
        """Return the log-prior of multiplying a span's sigma by each of `scales`.

        The log-prior is relative to the factor 1.
        """
        return -0.5 * (np.log(scales) / self.spread) ** 2


def outlier_density(difference: Array) -> Array:
    """Return the log of the density of outliers, weighted by the fraction of outliers."""
    found: Array = log(OUTLIERS / (pi * OUTLIER_SCALE)) - np.log1p(
        (difference / OUTLIER_SCALE) ** 2
    )
    return found


def typical_scale(residuals: Residuals) -> float:
    """Return the median of the absolute differences, each relative to its token's sensitivity."""
    sensitivity = residuals.sensitivity + FLOOR / ASSUMED_KAPPA
    return float(np.median(np.abs(residuals.difference) / sensitivity))


def relative_mean(residuals: Residuals) -> float:
    """Return the mean absolute difference, relative to the mean sensitivity of the tokens."""
    sensitivity = residuals.sensitivity + LEAST_SENSITIVE
    return float(np.abs(residuals.difference).sum() / sensitivity.sum())


def typical_noise(noise: Noise) -> float:
    """Return the `typical_scale` that spans with this noise are expected to have."""
    return DEGREES[noise.degrees] * float(np.median(noise.kappa))


def dependence_of(noise: Noise, agreements: Sequence[Sequence[float]]) -> float:
    """Estimate `Noise.dependence` from the `Noise.agreement` of each span with other candidates."""
    assumed = 1.0 if typical_noise(noise) < EXACT_NOISE else ASSUMED_DEPENDENCE
    squares = np.square([one for own in agreements for one in own])
    found = float(np.median(squares)) / CHI_SQUARED_MEDIAN if len(squares) else assumed
    found = float(np.clip(found, 1.0, MOST_DEPENDENT))
    weight = len(agreements) / (len(agreements) + ASSUMED_SPANS)
    return float(found**weight * assumed ** (1 - weight))


def fit_noise(spans: Sequence[Residuals]) -> Noise:
    """Estimate the noise from the residuals of the best fit of each span.

    Spans that fit no candidate do not affect the estimate if at least a fifth of all spans do fit.
    """
    usable = [one for one in spans if len(one.difference) >= MIN_TOKENS] or list(spans)
    if not usable:
        return Noise()
    typical = np.array([typical_scale(one) for one in usable])
    reference = max(float(np.quantile(typical, 0.2)), SMALLEST_KAPPA)
    noise = Noise()
    for _ in range(3):
        near = typical <= NEAR * reference
        chosen = [one for one, is_near in zip(usable, near.tolist(), strict=True) if is_near]
        noise = _fitted(chosen)
        reference = float(np.median(typical[near]))
    distance = sum(float(np.abs(one.difference).sum()) for one in chosen)
    mean = distance / max(sum(float(one.sensitivity.sum()) for one in chosen), FLOOR)
    if noise.kappa[len(EDGES) // 2] > LARGEST_KAPPA or mean > LARGEST_MEAN:
        return Noise()
    return noise


def _fitted(spans: Sequence[Residuals]) -> Noise:
    difference = np.concatenate([one.difference for one in spans]).astype(np.float64)
    predicted = np.concatenate([one.predicted for one in spans]).astype(np.float64)
    sensitivity = np.concatenate([one.sensitivity for one in spans])
    distance = np.abs(difference)
    place = np.digitize(-predicted, EDGES)
    # Where sensitivity is below the floor, rounding hides the noise of the engine.
    informative = sensitivity > 0.05
    if not informative.any():
        informative = np.ones_like(informative)
    ratio = distance / np.maximum(sensitivity, 1e-6)
    common = float(np.median(ratio[informative]))
    found = Noise()
    best = -np.inf
    for degrees, median in DEGREES.items():
        kappa = []
        for number in range(len(EDGES) + 1):
            own = ratio[informative & (place == number)]
            weight = len(own) / (len(own) + PRIOR_TOKENS)
            middle = float(np.median(own)) if len(own) else common
            value = np.exp(weight * log(middle + 1e-9) + (1 - weight) * log(common + 1e-9))
            kappa.append(max(float(value) / median, SMALLEST_KAPPA))
        noise = Noise(kappa=tuple(kappa), degrees=degrees)
        inverse = np.concatenate([np.full(len(s.difference), s.inverse_temperature) for s in spans])
        sigma = noise.sigma(predicted, inverse)
        likelihood = float(noise.log_density(difference, sigma).sum())
        if likelihood > best:
            best, found = likelihood, noise
    return Noise(
        kappa=found.kappa,
        degrees=found.degrees,
        spread=_spread(spans, found),
        mean_difference=float(distance.mean()),
        num_tokens=len(distance),
        usual=float(np.median([relative_mean(one) for one in spans]))
        if len(spans) >= FEWEST_USUAL
        else float("inf"),
    )


def _spread(spans: Sequence[Residuals], noise: Noise) -> float:
    """Estimate how much the scale of the noise varies between spans, net of estimation error."""
    logs, errors = [], []
    for one in spans:
        if len(one.difference) < 20:
            continue
        sigma = noise.sigma(one.predicted, one.inverse_temperature)
        middle = float(np.median(np.abs(one.difference) / sigma))
        logs.append(log(max(middle, 1e-3) / DEGREES[noise.degrees]))
        errors.append(1.36 / len(one.difference))
    if len(logs) < 5:
        return Noise().spread
    low, high = np.quantile(logs, [0.16, 0.84])
    variance = ((high - low) / 2) ** 2 - float(np.mean(errors))
    return float(np.clip(max(variance, 0.0) ** 0.5, *SPREAD_BOUNDS))
