"""Decide for one span which weights and settings its stored log-probabilities fit best.

Each hypothesis predicts the log-probability of every token. The differences between predicted and
stored log-probabilities, relative to the engine's noise, give a likelihood. A hypothesis replaces
the label only if its log-likelihood exceeds the label's by more than its penalty, and only if this
does not depend on a single token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isnan, log
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.metadata import LogprobsMode
from schemas.verdicts import NO_FAULT
from trainer.audit.noise import (
    LARGER_SCALES,
    SCALES,
    Array,
    Noise,
    Residuals,
    outlier_density,
    relative_mean,
    typical_noise,
    typical_scale,
)
from trainer.audit.token_scores import (
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
FAULTS: tuple[Kind, ...] = (
    *("version", "swap", "temperature", "truncation", "raw_logprobs", "processed_logprobs"),
    *("offset", "noise", "prompt", "unknown_model"),
)
PENALTY = 10.0
"""Minimum log-likelihood ratio for reporting a fault, in nats. It corresponds to prior odds of
22,000 to 1 against a fault."""
DOUBT = 2.0
"""Log-likelihood ratio against the label, in nats, above which a span is suspicious."""
COLDEST = INVERSE_TEMPERATURES[-1]
"""Largest inverse temperature of the grid."""
OFFSETS = (-2, -1, 1, 2)
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
REFINED = 9
"""Number of temperatures tried between two neighbouring temperatures of the grid."""
SHORT_TOKENS = 20
DECIDED = 3.0
"""Log-likelihood ratio, in nats, below which a short span is undecided between two versions."""


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
    plain = (_plain(span, number, mode, noise.dependence) for number in span.scores)
    fits = {one.candidate: _fit(span, one, noise, mode) for one in plain}
    versions = sorted(fits.values(), key=lambda fit: -fit.log_likelihood)
    first = versions[0]
    label = first if span.labelled is None else fits[span.labelled]
    others = [fit for fit in versions if fit is not label]
    candidates = [label, *others]
    candidates += [
        _fit(span, one, noise, mode) for one in _settings(span, label, first, noise, mode)
    ]
    if len(span.scores) > 1:
        candidates += _swaps(span, noise, mode)
    best = max(candidates, key=lambda fit: fit.score)
    noisy = max((_noisy(fit, span, noise) for fit in versions), key=lambda fit: fit.score)
    # Rounding reverts part of a small update, so an earlier version may be slightly closer.
    own = _noisy(label, span, noise)
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
        fit = _fit(one, _plain(one, number, mode), noise, mode)
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
    label = _fit(own, _plain(own, number, mode), noise, mode)
    others = [_fit(own, one, noise, mode) for one in _settings(own, label, label, noise, mode)]
    best = max([_noisy(label, own, noise), *others], key=lambda fit: fit.score)
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


def _plain(
    span: Span, candidate: int, mode: LogprobsMode | None, dependence: float = 1.0
) -> Hypothesis:
    is_label = candidate == span.labelled or span.labelled is None
    return Hypothesis(
        kind="as_labelled" if is_label else "version",
        candidate=candidate,
        inverse_temperature=span.inverse(mode),
        sampled_inverse=span.sampled_inverse,
        truncation=NO_TRUNCATION if mode == "raw" else span.truncation,
        penalty=0.0 if is_label else dependence * (PENALTY + log(max(len(span.scores) - 1, 1))),
    )


def _settings(
    span: Span, label: Fit, first: Fit, noise: Noise, mode: LogprobsMode | None
) -> Iterator[Hypothesis]:
    """Yield hypotheses with other sampling settings, for the labelled and best-fitting weights."""
    for number in dict.fromkeys([label.hypothesis.candidate, first.hypothesis.candidate]):
        extra = 0.0 if number == label.hypothesis.candidate else noise.dependence * PENALTY
        usual = _plain(span, number, mode)
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
        after = _predicted(span, _plain(span, one.second, mode), mode)
        predicted = np.where(np.arange(len(predicted)) < (one.position or 0), predicted, after)
    if not one.offset:
        return predicted
    moved = np.full_like(predicted, np.nan)
    if one.offset > 0:
        moved[: -one.offset] = predicted[one.offset :]
    else:
        moved[-one.offset :] = predicted[: one.offset]
    return moved


def _fit(span: Span, one: Hypothesis, noise: Noise, mode: LogprobsMode | None) -> Fit:
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


def _noisy(fit: Fit, span: Span, noise: Noise) -> Fit:
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


def _swaps(span: Span, noise: Noise, mode: LogprobsMode | None) -> list[Fit]:
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
    return [_fit(span, one, noise, mode)]


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
    plain = _plain(other, number, mode)
    fit = _fit(other, plain, noise, mode)
    if kind == "noise":  # the engine may also compute in this precision
        fit = max(fit, _noisy(fit, other, noise), key=lambda one: one.log_likelihood)
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
        _noisy(_fit(one, _plain(one, number, mode), noise, mode), one, noise)
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
