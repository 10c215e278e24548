"""The engine's noise: differences between its log-probabilities and recomputed ones.

Reduced precision changes every logit a little. If the logits have independent errors, the error of
a log-probability is proportional to 1 - p: almost certain tokens have almost no error. The scale of
the noise is therefore

    sigma = FLOOR + kappa (1 - p) / temperature

where kappa is estimated from the spans that fit. Errors have a Student t distribution with 4 degrees
of freedom, mixed with a few outliers, so that no single token decides a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, nan, pi
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
FLOOR = 3e-4
"""Smallest scale of the noise, in nats, due to rounding in float32."""
SMALLEST_KAPPA, ASSUMED_KAPPA, LARGEST_KAPPA = 1e-3, 0.08, 0.35
"""Limits of an estimate of kappa, and its value if no span fits (typical of bfloat16)."""
LARGEST_MEAN = 0.5
"""Mean absolute difference, relative to the mean of (1 - p) / temperature, above which a span fits no
candidate, even if most of its tokens do."""
MEDIAN = 0.741
"""Median absolute value of Student's t with 4 degrees of freedom."""
OUTLIERS, OUTLIER_SCALE = 0.01, 2.0
"""Fraction of outliers, and the scale of their Cauchy distribution in nats."""
EXACT_KAPPA, CAUTION = 0.01, 3.0
"""An engine with a larger kappa also rounds its weights, which resembles a small change of version:
it takes `CAUTION` times the evidence for other weights."""
ASSUMED_APART = 0.05
NEAR, FEWEST = 2.5, 8
"""Spans whose scale is at most `NEAR` times the usual one, with at least `FEWEST` tokens, estimate it."""


class Residuals(NamedTuple):
    """Differences of n tokens: stored minus predicted, predicted (nats), inverse temperature."""

    difference: Array
    predicted: Array
    inverse: float

    @property
    def sensitivity(self) -> Array:
        """[n] (1 - p) / temperature, which scales the effect of an error in the logits."""
        return -np.expm1(np.minimum(self.predicted.astype(np.float64), 0)) * self.inverse

    @property
    def scale(self) -> float:
        """Median of the absolute differences, each relative to its token's sensitivity."""
        relative = np.abs(self.difference) / (self.sensitivity + FLOOR / ASSUMED_KAPPA)
        return float(np.median(relative))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Model of the differences between an engine's log-probabilities and recomputed ones."""

    kappa: float = ASSUMED_KAPPA  # scale of the errors in the logits
    mean_difference: float = nan  # mean absolute difference of the spans it is estimated from, nats
    num_tokens: int = 0  # of these spans; 0 if the noise is assumed
    apart: float = ASSUMED_APART  # relative difference between the two closest candidates

    @property
    def caution(self) -> float:
        """Factor of the evidence that other weights need."""
        return 1.0 if self.kappa < EXACT_KAPPA else CAUTION

    def sigma(self, residuals: Residuals) -> Array:
        """[n] scale of the noise, in nats."""
        sigma: Array = FLOOR + self.kappa * residuals.sensitivity
        return sigma


def log_density(difference: Array, sigma: Array) -> Array:
    """Return the log-density of differences, in nats per token."""
    z = difference / sigma
    usual = log(0.375 * (1 - OUTLIERS)) - np.log(sigma) - 2.5 * np.log1p(z * z / 4)
    outlier = log(OUTLIERS / (pi * OUTLIER_SCALE)) - np.log1p((difference / OUTLIER_SCALE) ** 2)
    density: Array = np.logaddexp(usual, outlier)
    return density


def fit_noise(spans: Sequence[Residuals]) -> Noise:
    """Estimate the noise from the residuals of the best fit of each span.

    Spans that fit no candidate do not affect the estimate if at least a fifth of all spans do fit.
    """
    spans = [span for span in spans if len(span.difference) >= FEWEST] or list(spans)
    if not spans:
        return Noise()
    scales = np.array([span.scale for span in spans])
    usual = max(float(np.quantile(scales, 0.2)), SMALLEST_KAPPA)
    for _ in range(3):
        near = scales <= NEAR * usual
        usual = max(float(np.median(scales[near])), SMALLEST_KAPPA)
    fitting = [span for span, is_near in zip(spans, near, strict=True) if is_near]
    distance = np.concatenate([np.abs(span.difference) for span in fitting])
    sensitivity = np.concatenate([span.sensitivity for span in fitting])
    # Where the sensitivity is below the floor, rounding hides the noise of the engine.
    informative = sensitivity > min(0.05, float(sensitivity.max()) / 2)
    kappa = float(np.median(distance[informative] / sensitivity[informative])) / MEDIAN
    if kappa > LARGEST_KAPPA or distance.sum() > LARGEST_MEAN * max(sensitivity.sum(), FLOOR):
        return Noise()
    return Noise(
        kappa=max(kappa, SMALLEST_KAPPA),
        mean_difference=float(distance.mean()),
        num_tokens=len(distance),
    )
