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


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Model of the differences between an engine's log-probabilities and recomputed ones."""

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
