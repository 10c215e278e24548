"""Decide for one span which weights and settings its stored log-probabilities fit best.

A hypothesis replaces the label only if its log-likelihood exceeds the label's by more than its
penalty, and only if this does not depend on a single token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import isnan, log
from typing import NamedTuple

import numpy as np

from schemas.forensics import NO_FAULT
from schemas.metadata import LogprobsMode
from trainer.forensics.audit.hypotheses import (
    PENALTY,
    Fit,
    Hypothesis,
    Kind,
    Span,
    as_sampled,
    fit_of,
    other_settings,
    swaps,
    with_larger_noise,
)
from trainer.forensics.audit.noise import (
    Noise,
    Residuals,
    relative_mean,
    typical_noise,
    typical_scale,
)

FAULTS: tuple[Kind, ...] = (
    *("version", "swap", "temperature", "truncation", "raw_logprobs", "processed_logprobs"),
    *("offset", "noise", "prompt", "unknown_model"),
)
DOUBT = 2.0
"""Log-likelihood ratio against the label, in nats, above which a span is suspicious."""
SMALLEST_SQUARE = 0.25
"""Mean square of the differences, relative to the noise, below which a common sign is not evidence
of a fault."""
UNUSUAL = 6.0
"""A span is suspicious if the mean difference of the span, or of its end, exceeds this multiple of
`Noise.usual`. The smallest scale of the noise model would hide such differences for a float32 engine."""
SMALLEST_NOISE = 1.6
"""Minimum scale, relative to the usual noise, at which larger noise is reported as a fault."""
SIMILAR_NOISE = 1.5
"""Larger noise is attributed to the labelled weights if their scale is at most this multiple of the
scale under the best-fitting weights."""
UNRELATED_SCALE, UNRELATED_FACTOR = 0.05, 8.0
"""Differences are not attributed to rounding if their typical scale exceeds two limits: an absolute
one, which is about the scale of bfloat16, and a multiple of the dataset's noise."""
SHORT_TOKENS = 20
DECIDED = 3.0
"""Log-likelihood ratio, in nats, below which a short span is undecided between two versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Verdict on one span, with the evidence for it.

    Attributes:
        kind: The fault, or `as_labelled`.
        hypothesis: The best hypothesis.
        log_likelihood_ratio: Log-likelihood of the best hypothesis minus the label's, in nats; 0
            for `as_labelled`. Without a label, log-likelihood of the best candidate minus the
            second-best candidate's.
        margin: Log-likelihood of the best version minus the next best version's, in nats; NaN with
            a single candidate.
        rival: Candidate of the next best version; None with a single candidate.
        num_decisive: Number of tokens that favour either hypothesis by more than 0.5 nats.
        total: Log-likelihood of the best hypothesis, in nats.
        scale: Scale of the differences relative to the dataset's noise.
        mean_difference: Mean absolute difference from the best hypothesis, in nats.
        reason: Details of the fault, in words.
    """

    kind: Kind
    hypothesis: Hypothesis
    log_likelihood_ratio: float
    margin: float
    rival: int | None = None
    num_decisive: int
    total: float
    scale: float
    mean_difference: float
    reason: str = ""


def judge(span: Span, noise: Noise, mode: LogprobsMode | None) -> Verdict:
    """Compare all hypotheses for a span, and return the verdict.

    Args:
        span: Tokens with the scores of all candidates, or of some.
        noise: Noise of the dataset's engine.
        mode: Kind of log-probabilities that the dataset contains.
    """
    if span.neutral is not None:
        return _judge_unrecorded(span, span.neutral, noise, mode)
    plain = (as_sampled(span, number, mode, noise.dependence) for number in span.scores)
    fits = {one.candidate: fit_of(span, one, noise, mode) for one in plain}
    versions = sorted(fits.values(), key=lambda fit: -fit.log_likelihood)
    first = versions[0]
    label = first if span.labelled is None else fits[span.labelled]
    others = [fit for fit in versions if fit is not label]
    candidates = [label, *others]
    candidates += [
        fit_of(span, one, noise, mode) for one in other_settings(span, label, first, noise, mode)
    ]
    if len(span.scores) > 1:
        candidates += swaps(span, noise, mode)
    best = max(candidates, key=lambda fit: fit.score)
    noisy = max(
        (with_larger_noise(fit, span, noise) for fit in versions), key=lambda fit: fit.score
    )
    # Rounding reverts part of a small update, so an earlier version may be slightly closer.
    own = with_larger_noise(label, span, noise)
    if own.scale <= SIMILAR_NOISE * noisy.scale:
        noisy = own
    if noisy.score > best.score and noisy.scale >= SMALLEST_NOISE:
        best = noisy
    if best is not label and not _rests_on_several(best, label):
        best = label
    return _verdict(span, best, label, versions, noise)


def _judge_unrecorded(
    span: Span, neutral: Span, noise: Noise, mode: LogprobsMode | None
) -> Verdict:
    """Judge a span whose row does not record how it was sampled.

    Temperature 1 without truncation (`neutral`) is not a label either: the tokens must rule out the
    settings of the model's `generation_config.json`, which `span` has.
    """
    span, given = dataclasses.replace(span, neutral=None), judge(neutral, noise, mode)
    number = given.hypothesis.candidate
    ratio = 0.0
    for one, sign in ((span, 1), (neutral, -1)):
        fit = fit_of(one, as_sampled(one, number, mode), noise, mode)
        ratio += sign * (fit.log_likelihood + one.under_label(number))
    if ratio <= PENALTY:
        is_open = ratio > -DECIDED and given.kind == "as_labelled"
        return dataclasses.replace(given, kind="too_short") if is_open else given
    found = judge(span, noise, mode)
    if found.kind not in NO_FAULT:
        return found
    changed = span.inverse_temperature != neutral.inverse_temperature
    best = dataclasses.replace(
        found.hypothesis, sampled_inverse=span.inverse_temperature, truncation=span.truncation
    )
    return dataclasses.replace(
        found,
        kind="temperature" if changed else "truncation",
        hypothesis=best,
        log_likelihood_ratio=ratio,
    )


def is_suspicious(span: Span, noise: Noise, mode: LogprobsMode | None) -> bool:
    """True if the labelled weights alone do not clearly explain a span, or a part of it.

    A few percent of clean spans are suspicious. To test parts of the span, the noise is compared
    with a larger noise: the statistic is the largest sum of log-likelihood ratios over any run of
    tokens.
    """
    number, span = span.labelled, span.neutral or span
    if number is None:
        return True
    own = dataclasses.replace(span, scores={number: span.scores[number]}, neutral=None)
    label = fit_of(own, as_sampled(own, number, mode), noise, mode)
    others = [
        fit_of(own, one, noise, mode) for one in other_settings(own, label, label, noise, mode)
    ]
    best = max([with_larger_noise(label, own, noise), *others], key=lambda fit: fit.score)
    if best.score + PENALTY > label.score + DOUBT:
        return True
    difference = own.stored - label.predicted
    sigma = noise.sigma(label.predicted, label.hypothesis.inverse_temperature) * label.scale
    usual = noise.log_density(difference, sigma)
    for factor in (2.0, 4.0):
        gain = np.cumsum(noise.log_density(difference, factor * sigma) - usual)
        lowest = np.minimum.accumulate(np.concatenate([np.zeros(1), gain[:-1]]))
        if float((gain - lowest).max()) > DOUBT + log(len(gain)):
            return True
    z = np.clip(difference / sigma, -3, 3)
    # Differences far below the noise may have a common sign: rounding in float32 is not random.
    squares = max(float((z**2).sum()), SMALLEST_SQUARE * len(z))
    if abs(z.sum()) > 3.0 * squares**0.5:
        return True
    third = -(-len(difference) // 3)
    every = Residuals(difference, label.predicted, label.hypothesis.inverse_temperature)
    last = every._replace(difference=difference[-third:], predicted=label.predicted[-third:])
    return max(relative_mean(every), relative_mean(last)) > UNUSUAL * noise.usual


def better_explained(
    other: Span, found: Verdict, kind: Kind, reason: str, noise: Noise, mode: LogprobsMode | None
) -> Verdict:
    """Return the verdict for a span that is scored with another prompt or with other weights.

    Args:
        other: The span with scores computed for the other prompt or weights.
        found: Verdict for the span as stored, with a `total`.
        kind: Kind of the verdict if these scores fit better.
        reason: Description of the other prompt or weights.
        noise: Noise of the dataset's engine.
        mode: Kind of log-probabilities.
    """
    (number,) = other.scores
    plain = as_sampled(other, number, mode)
    fit = fit_of(other, plain, noise, mode)
    if kind == "noise":  # the engine may also compute in this precision
        fit = max(fit, with_larger_noise(fit, other, noise), key=lambda one: one.log_likelihood)
    ratio = fit.log_likelihood - found.total
    return dataclasses.replace(
        found,
        kind=kind,
        hypothesis=plain,
        log_likelihood_ratio=found.log_likelihood_ratio + ratio,
        total=fit.log_likelihood,
        scale=fit.scale,
        mean_difference=float(np.abs(other.stored - fit.predicted).mean()),
        reason=reason,
    )


class Rounding(NamedTuple):
    """Effect of rounding the weights on the fit of a span.

    Attributes:
        gain: Gain in log-likelihood from rounding, in nats; both fits use the best larger noise.
        residual: Typical scale of the stored values' differences from the unrounded weights.
        change: Typical scale of the differences between rounded and unrounded weights.
    """

    gain: float
    residual: float
    change: float


def rounding_of(span: Span, other: Span, noise: Noise, mode: LogprobsMode | None) -> Rounding:
    """Compare a span under some weights with the same span under the rounded weights.

    Args:
        span: The span, with scores of these weights.
        other: The span with the scores of the rounded weights only.
        noise: Noise of the dataset's engine.
        mode: Kind of log-probabilities.
    """
    (number,) = other.scores
    plain, rounded = (
        with_larger_noise(fit_of(one, as_sampled(one, number, mode), noise, mode), one, noise)
        for one in (span, other)
    )
    inverse = span.inverse(mode)
    differences = (span.stored - plain.predicted, rounded.predicted - plain.predicted)
    residual, change = (
        typical_scale(Residuals(one, plain.predicted, inverse)) for one in differences
    )
    return Rounding(rounded.log_likelihood - plain.log_likelihood, residual, change)


def _rests_on_several(best: Fit, label: Fit) -> bool:
    """True if the evidence for a fault is sufficient without the token that supports it most."""
    gains = best.per_token - label.per_token
    total = best.log_likelihood + best.hypothesis.bonus - label.log_likelihood
    return bool(total - max(float(gains.max()), 0.0) > PENALTY / 2)


def _evidence(span: Span, fit: Fit, noise: Noise) -> float:
    """Return the log-likelihood ratio between a fit and weights as far apart as two candidates."""
    inverse, difference = fit.hypothesis.inverse_temperature, span.stored - fit.predicted
    sigma = noise.sigma(fit.predicted, inverse) * fit.scale
    other = noise.apart * Residuals(difference, fit.predicted, inverse).sensitivity
    ratios = noise.log_density(difference, sigma) - noise.log_density(
        difference, np.hypot(sigma, other)
    )
    return float(ratios.sum())


def _verdict(span: Span, best: Fit, label: Fit, versions: list[Fit], noise: Noise) -> Verdict:
    one = best.hypothesis
    is_label = best is label
    margin, rival = float("nan"), None
    if len(versions) > 1:
        next_best = versions[1] if best is versions[0] else versions[0]
        margin = best.log_likelihood - next_best.log_likelihood
        rival = next_best.hypothesis.candidate
    reference = next((fit for fit in versions if fit is not best), best) if is_label else label
    gains = np.abs(best.per_token - reference.per_token)
    known = ~np.isnan(best.predicted)
    kind = one.kind
    if kind == "noise":
        residuals = Residuals(span.stored - best.predicted, best.predicted, one.inverse_temperature)
        own = UNRELATED_FACTOR * typical_noise(noise)
        is_unrelated = typical_scale(residuals) > max(UNRELATED_SCALE, own)
        kind = "unknown_model" if is_unrelated else "noise"
    elif kind == "temperature" and isnan(span.stored_temperature):  # no label to contradict
        is_label = one.candidate == label.hypothesis.candidate
        kind = "as_labelled" if is_label else "version"
    can_be_undecided = span.labelled is None or len(span.stored) < SHORT_TOKENS
    if is_label and can_be_undecided:
        evidence = _evidence(span, best, noise) if isnan(margin) else abs(margin)
        kind = "too_short" if evidence < DECIDED * noise.dependence else kind
    ratio = best.log_likelihood + one.bonus - label.log_likelihood
    return Verdict(
        kind=kind,
        hypothesis=one,
        log_likelihood_ratio=0.0 if is_label else ratio,
        margin=margin,
        rival=rival,
        num_decisive=int((gains > 0.5).sum()),
        total=best.log_likelihood,
        scale=best.scale,
        mean_difference=float(np.abs(span.stored - best.predicted)[known].mean()),
    )
