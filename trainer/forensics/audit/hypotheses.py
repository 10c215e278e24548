"""Hypotheses about the weights and settings that sampled a span, and how well each fits it.

Each hypothesis predicts the log-probability of every token. The differences between predicted and
stored log-probabilities, relative to the engine's noise, give a likelihood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.metadata import LogprobsMode
from trainer.forensics.audit.noise import (
    LARGER_SCALES,
    SCALES,
    Array,
    Noise,
    Residuals,
    outlier_density,
)
from trainer.forensics.audit.token_scores import (
    INVERSE_TEMPERATURES,
    NO_TRUNCATION,
    OUTSIDE,
    TRUNCATIONS,
    TokenScores,
    Truncation,
)

Kind = Literal[
    "as_labelled",
    "version",
    "swap",
    "temperature",
    "truncation",
    "raw_logprobs",
    "processed_logprobs",
    "offset",
    "noise",
    "prompt",
    "unknown_model",
    "too_short",
    "not_checked",
]
PENALTY = 10.0
"""Minimum log-likelihood ratio for reporting a fault, in nats. It corresponds to prior odds of
22,000 to 1 against a fault."""
COLDEST = INVERSE_TEMPERATURES[-1]
"""Largest inverse temperature of the grid."""
OFFSETS = (-2, -1, 1, 2)
REFINED = 9
"""Number of temperatures tried between two neighbouring temperatures of the grid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Stored values and scores of a span of n tokens.

    Attributes:
        stored: [n] stored log-probabilities, float32 nats.
        scores: Scores by candidate, an index into the audit's candidates.
        labelled: The labelled candidate; None if the version is unknown.
        inverse_temperature: Inverse of the labelled temperature.
        truncation: Labelled truncation.
        stored_temperature: The labelled temperature as stored: 0 for greedy sampling, NaN if
            unknown.
        is_whole: False if only some tokens of the span are included, so that they need not be
            adjacent.
        neutral: The same span as sampled at temperature 1 without truncation, if the row records no
            settings and those of the model's `generation_config.json` are in their place.
    """

    stored: npt.NDArray[np.float32]
    scores: Mapping[int, TokenScores]
    labelled: int | None
    inverse_temperature: float
    truncation: Truncation
    stored_temperature: float = 1.0
    is_whole: bool = True
    neutral: Span | None = None

    def predicted(self, candidate: int, mode: LogprobsMode | None) -> Array:
        """[n] log-probabilities of a candidate at the labelled settings."""
        scores = self.scores[candidate]
        return scores.at_one if mode == "raw" else scores.labelled - scores.own_kept

    def inverse(self, mode: LogprobsMode | None) -> float:
        """Inverse of the labelled temperature, or 1 for raw log-probabilities."""
        return 1.0 if mode == "raw" else self.inverse_temperature

    @property
    def modes_differ(self) -> bool:
        """True if raw and processed log-probabilities differ under the labelled settings."""
        return abs(self.inverse_temperature - 1) > 1e-6 or not self.truncation.is_off

    @property
    def sampled_inverse(self) -> float:
        """Inverse of the temperature at which the tokens were sampled, according to the label."""
        return inf if self.stored_temperature == 0 else self.inverse_temperature

    def under_label(self, candidate: int) -> float:
        """Log-likelihood of the sampled tokens at the labelled settings, in nats.

        Greedy sampling counts as sampling at the lowest temperature of the grid.
        """
        if self.stored_temperature == 0:
            return self.sampled(candidate, COLDEST)
        scores = self.scores[candidate]
        each = scores.labelled - scores.own_kept + OUTSIDE * scores.own_outside
        return float(each.sum(dtype=np.float64))

    def sampled(self, candidate: int, inverse_temperature: float) -> float:
        """Log-likelihood of the sampled tokens at a temperature, without truncation, in nats."""
        return float(self.scores[candidate].at(inverse_temperature).sum(dtype=np.float64))

    def residuals(
        self, mode: LogprobsMode, *, offsets: bool = False, temperatures: bool = True
    ) -> Iterator[Residuals]:
        """Yield the residuals of the span under each candidate, offset and temperature."""
        inverse = self.inverse(mode)
        for number, scores in self.scores.items():
            predicted = self.predicted(number, mode)
            yield Residuals(self.stored - predicted, predicted, inverse)
            for offset in OFFSETS if offsets and self.is_whole else ():
                n = len(predicted) - abs(offset)
                if n > 0:
                    shifted = predicted[max(offset, 0) :][:n]
                    yield Residuals(self.stored[max(-offset, 0) :][:n] - shifted, shifted, inverse)
            if mode == "processed" and temperatures:
                for b in INVERSE_TEMPERATURES:
                    predicted = scores.at(b)
                    yield Residuals(self.stored - predicted, predicted, b)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """A possible origin of a span.

    Attributes:
        kind: The fault, or `as_labelled`.
        candidate: Weights; for a swap, the weights of the first part.
        second: Weights of the second part of a swap.
        position: First token of the second part of a swap.
        inverse_temperature: Inverse temperature of the log-probabilities.
        sampled_inverse: Inverse temperature at which the tokens were sampled.
        truncation: Truncation of the log-probabilities.
        offset: Position of the predicted token minus the position of the stored log-probability.
        penalty: Log-likelihood in nats by which the hypothesis must exceed the label.
        bonus: Log-likelihood of the sampled tokens, minus their log-likelihood under the label.
    """

    kind: Kind
    candidate: int
    second: int | None = None
    position: int | None = None
    inverse_temperature: float
    sampled_inverse: float
    truncation: Truncation = NO_TRUNCATION
    offset: int = 0
    penalty: float = 0.0
    bonus: float = 0.0


class Fit(NamedTuple):
    """A hypothesis with its log-likelihood.

    Attributes:
        hypothesis: The hypothesis.
        log_likelihood: Log-likelihood in nats at the best scale, including the prior of the scale.
        scale: Factor by which the noise of the span exceeds the dataset's noise.
        per_token: [n] log-likelihood of each token.
        predicted: [n] predicted log-probabilities.
    """

    hypothesis: Hypothesis
    log_likelihood: float
    scale: float
    per_token: Array
    predicted: Array

    @property
    def score(self) -> float:
        """Log-likelihood minus the penalty."""
        return self.log_likelihood + self.hypothesis.bonus - self.hypothesis.penalty


def as_sampled(
    span: Span, candidate: int, mode: LogprobsMode | None, dependence: float = 1.0
) -> Hypothesis:
    """Return the hypothesis that a candidate sampled the span, with the labelled settings."""
    is_label = candidate == span.labelled or span.labelled is None
    return Hypothesis(
        kind="as_labelled" if is_label else "version",
        candidate=candidate,
        inverse_temperature=span.inverse(mode),
        sampled_inverse=span.sampled_inverse,
        truncation=NO_TRUNCATION if mode == "raw" else span.truncation,
        penalty=0.0 if is_label else dependence * (PENALTY + log(max(len(span.scores) - 1, 1))),
    )


def other_settings(
    span: Span, label: Fit, first: Fit, noise: Noise, mode: LogprobsMode | None
) -> Iterator[Hypothesis]:
    """Yield hypotheses with other sampling settings, for the labelled and best-fitting weights."""
    for number in dict.fromkeys([label.hypothesis.candidate, first.hypothesis.candidate]):
        extra = 0.0 if number == label.hypothesis.candidate else noise.dependence * PENALTY
        usual = as_sampled(span, number, mode)
        for offset in OFFSETS:
            if span.is_whole and abs(offset) < len(span.stored):
                yield _changed(usual, "offset", extra + log(len(OFFSETS)), offset=offset)
        tokens = span.under_label(number)
        if span.modes_differ:
            if mode == "processed":
                yield _changed(
                    usual,
                    "raw_logprobs",
                    extra,
                    inverse_temperature=1.0,
                    truncation=NO_TRUNCATION,
                )
            else:
                processed: dict[str, object] = {"inverse_temperature": span.inverse_temperature}
                processed |= {"truncation": span.truncation}
                yield _changed(usual, "processed_logprobs", extra, **processed)
        for inverse in _temperatures(span, number, noise, mode):
            bonus = span.sampled(number, inverse) - tokens if span.truncation.is_off else -2.0
            changes = {"inverse_temperature": 1.0 if mode == "raw" else inverse, "bonus": bonus}
            yield _changed(usual, "temperature", extra + 2.0, sampled_inverse=inverse, **changes)
        scores = span.scores[number]
        if mode == "raw" or not scores.kept.shape[1]:
            continue
        others = [NO_TRUNCATION, *TRUNCATIONS]
        untruncated = float(scores.labelled.sum(dtype=np.float64))
        for place, one in enumerate(others, start=-1):
            if one == span.truncation:
                continue
            changed = 0.0
            if place >= 0:
                kept, outside = scores.kept[:, place], scores.outside[:, place]
                changed = float((OUTSIDE * outside - kept).sum(dtype=np.float64))
            bonus = untruncated + changed - tokens
            penalty = extra + log(len(others))
            yield _changed(usual, "truncation", penalty, truncation=one, bonus=bonus)


def _changed(usual: Hypothesis, kind: Kind, penalty: float, **changes: object) -> Hypothesis:
    values = {name: getattr(usual, name) for name in Hypothesis.__slots__} | changes
    return Hypothesis(**values | {"kind": kind, "penalty": PENALTY + penalty})


def _temperatures(span: Span, number: int, noise: Noise, mode: LogprobsMode | None) -> list[float]:
    """Return the best-fitting inverse temperature other than the labelled one, in a list.

    Raw log-probabilities do not depend on the temperature, so only the sampled tokens reveal it.
    """
    scores, stored = span.scores[number], span.stored

    def likelihood(inverse: float) -> float:
        tokens = span.sampled(number, inverse) if span.truncation.is_off else 0.0
        if mode == "raw":
            return tokens
        predicted = scores.at(inverse)
        sigma = noise.sigma(predicted, inverse)
        return tokens + float(noise.log_density(stored - predicted, sigma).sum())

    if mode == "raw" and not span.truncation.is_off:
        return []
    grid = [b for b in INVERSE_TEMPERATURES if abs(b / span.sampled_inverse - 1) > 0.02]
    values = [likelihood(b) for b in grid]
    best = grid[int(np.argmax(values))]
    step = INVERSE_TEMPERATURES[1] / INVERSE_TEMPERATURES[0]
    for _ in range(2):
        grid = [best * step ** (k / REFINED) for k in range(-REFINED, REFINED + 1)]
        grid = [b for b in grid if abs(b / span.sampled_inverse - 1) > 0.02]
        best = grid[int(np.argmax([likelihood(b) for b in grid]))]
        step **= 1 / REFINED
    return [best]


def _predicted(span: Span, one: Hypothesis, mode: LogprobsMode | None) -> Array:
    """[n] log-probabilities that a hypothesis predicts; NaN where it predicts none."""
    scores = span.scores[one.candidate]
    if mode == "raw" and one.kind != "processed_logprobs":
        predicted = scores.at_one
    elif one.truncation == span.truncation and one.inverse_temperature == span.inverse_temperature:
        predicted = scores.labelled - scores.own_kept
    elif one.kind == "truncation":
        predicted = scores.labelled
        if not one.truncation.is_off:
            predicted = predicted - scores.kept[:, TRUNCATIONS.index(one.truncation)]
    elif one.kind == "temperature":  # the truncation at this temperature is not known exactly
        predicted = scores.at(one.inverse_temperature) - scores.own_kept
    else:
        predicted = scores.at(one.inverse_temperature)
    if one.second is not None:
        after = _predicted(span, as_sampled(span, one.second, mode), mode)
        predicted = np.where(np.arange(len(predicted)) < (one.position or 0), predicted, after)
    if not one.offset:
        return predicted
    moved = np.full_like(predicted, np.nan)
    if one.offset > 0:
        moved[: -one.offset] = predicted[one.offset :]
    else:
        moved[-one.offset :] = predicted[: one.offset]
    return moved


def fit_of(span: Span, one: Hypothesis, noise: Noise, mode: LogprobsMode | None) -> Fit:
    """Compute the log-likelihood of a hypothesis at the best scale of the engine's noise."""
    predicted = _predicted(span, one, mode)
    return _at_scales(span, one, predicted, noise, np.asarray(SCALES))


def _at_scales(span: Span, one: Hypothesis, predicted: Array, noise: Noise, scales: Array) -> Fit:
    is_known = ~np.isnan(predicted)
    difference = np.where(is_known, span.stored - predicted, 0.0)
    sigma = noise.sigma(np.where(is_known, predicted, 0.0), one.inverse_temperature)
    each = noise.log_density(difference, sigma * scales[:, None])
    each = np.where(is_known, each, outlier_density(np.ones(1)))
    totals = each.sum(-1) + noise.prior(scales)
    best = int(np.argmax(totals))
    return Fit(one, float(totals[best]), float(scales[best]), each[best], predicted)


def with_larger_noise(fit: Fit, span: Span, noise: Noise) -> Fit:
    """Fit the same weights again, with larger noise than the engine has."""
    one = _changed(fit.hypothesis, "noise", fit.hypothesis.penalty + 2.0)
    scales = np.asarray(LARGER_SCALES)
    is_known = ~np.isnan(fit.predicted)
    assert is_known.all()
    sigma = noise.sigma(fit.predicted, one.inverse_temperature)
    each = noise.log_density(span.stored - fit.predicted, sigma * scales[:, None])
    totals = each.sum(-1)
    best = int(np.argmax(totals))
    return Fit(one, float(totals[best]), float(scales[best]), each[best], fit.predicted)


def swaps(span: Span, noise: Noise, mode: LogprobsMode | None) -> list[Fit]:
    """Fit a swap of weights within a span: the best pair of candidates and the best position."""
    n, numbers = len(span.stored), list(span.scores)
    if n < 2:
        return []
    each = []
    for number in numbers:
        predicted = span.predicted(number, mode)
        sigma = noise.sigma(predicted, span.inverse(mode))
        each.append(noise.log_density(span.stored - predicted, sigma))
    upto = np.cumsum(each, axis=1)
    total = upto[:, -1]
    gain = upto[:, None, :-1] + total[None, :, None] - upto[None, :, :-1]
    gain[np.eye(len(numbers), dtype=np.bool_)] = -np.inf
    i, j, at = (int(index) for index in np.unravel_index(int(np.argmax(gain)), gain.shape))
    penalty = noise.dependence * (PENALTY + log(n) + log(len(numbers) * (len(numbers) - 1)))
    one = Hypothesis(
        kind="swap",
        candidate=numbers[i],
        second=numbers[j],
        position=at + 1,
        inverse_temperature=span.inverse(mode),
        sampled_inverse=span.sampled_inverse,
        truncation=NO_TRUNCATION if mode == "raw" else span.truncation,
        penalty=penalty,
    )
    return [fit_of(span, one, noise, mode)]
