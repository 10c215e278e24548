"""What may have sampled a span: each hypothesis predicts the log-probability of every token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.forensics.audit.noise import Array, Noise, Residuals
from trainer.forensics.audit.rows import OFF, Truncation
from trainer.forensics.audit.scores import INVERSE_TEMPERATURES, TRUNCATIONS, TokenScores

OFFSETS = (-2, -1, 1, 2)
OUTSIDE = -5.0
"""Log-likelihood, in nats, of a token that a truncation would have excluded: finite, because the
engine's noise moves tokens across the boundary."""
DIFFERENT = 0.02
"""A temperature counts as another one if it differs from the label by more than this fraction."""


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
    def setting(self) -> tuple[float | None, int]:
        """1 / temperature (None: labelled) and truncation (column of `mass`) of the sampling."""
        return (1.0, 1) if self.is_assumed else (inf if self.temperature == 0 else None, 0)

    def sampled(self, weights: int, inverse: float | None, place: int) -> Array:
        """[n] log-probability with which each token was sampled, if with these settings."""
        scores = self.scores[weights]
        logprobs = scores.labelled if inverse is None else scores.at(inverse)
        return logprobs - scores.mass[:, place]

    def likelihood(self, weights: int, inverse: float | None, place: int) -> float:
        """Log-likelihood of the tokens, nats; finite for tokens outside a truncation."""
        outside = OUTSIDE * self.scores[weights].outside[:, place]
        return float((self.sampled(weights, inverse, place) + outside).sum(dtype=np.float64))


class Hypothesis(NamedTuple):
    """A possible origin of a span."""

    kind: str  # the fault, or `as_labelled`
    weights: int  # candidate; for a swap, that of the first part
    predicted: Array  # [n] nats; NaN at tokens without a prediction
    inverse: float  # 1 / temperature of the predictions
    penalty: float = 0.0  # nats by which the fit must exceed the label's
    bonus: float = 0.0  # log-likelihood of the sampled tokens, minus that under the label
    values: Mapping[str, Any] = {}  # columns of the verdict

    @property
    def sensitivity(self) -> Array:
        """[n] (1 - p) / temperature."""
        p = np.exp(np.minimum(self.predicted, 0, dtype=np.float64))
        sensitivity: Array = (1 - p) * self.inverse
        return sensitivity

    def residuals(self, span: Span) -> Residuals:
        """Return the differences from the stored values."""
        return Residuals(span.stored - self.predicted, self.sensitivity)


def with_settings(
    span: Span, kind: str, weights: int, inverse: float | None, place: int, **more: Any
) -> Hypothesis:
    """Some weights, with a 1 / temperature (None: labelled) and a truncation (column of `mass`)."""
    bonus = span.likelihood(weights, inverse, place) - span.likelihood(weights, *span.setting)
    if span.is_raw:
        return Hypothesis(kind, weights, span.scores[weights].at(1.0), 1.0, bonus=bonus, **more)
    # Engines compute the log-probabilities of greedy rows at temperature 1.
    inverse = None if inverse == inf else inverse
    used = span.inverse if inverse is None else inverse
    return Hypothesis(
        kind, weights, span.sampled(weights, inverse, place), used, bonus=bonus, **more
    )


def labelled(span: Span, weights: int, kind: str = "as_labelled") -> Hypothesis:
    """Some weights, with the labelled settings."""
    return with_settings(span, kind, weights, *span.setting)


def _offsets(span: Span, weights: int, _: Noise) -> Iterator[Hypothesis]:
    usual, size = labelled(span, weights, "offset"), len(span.stored)
    for by in (by for by in OFFSETS if abs(by) < size):
        moved = np.roll(usual.predicted, -by)
        moved[slice(size - by, None) if by > 0 else slice(0, -by)] = np.nan
        yield usual._replace(predicted=moved, penalty=log(len(OFFSETS)), values={"offset": by})


def _modes(span: Span, weights: int, _: Noise) -> Iterator[Hypothesis]:
    if not span.is_assumed and (span.inverse != 1 or span.truncation != OFF):
        raw, processed = span.scores[weights].at(1.0), span.sampled(weights, None, 0)
        if span.is_raw:
            yield Hypothesis("processed_logprobs", weights, processed, span.inverse)
        else:
            yield Hypothesis("raw_logprobs", weights, raw, 1.0)


def _temperatures(span: Span, weights: int, noise: Noise) -> Iterator[Hypothesis]:
    """Raw log-probabilities do not depend on the temperature: only the sampled tokens reveal it."""
    usual, place = span.setting
    if span.is_raw and not place and span.truncation != OFF:
        return  # its effect on the tokens is not known exactly at another temperature
    usual = span.inverse if usual is None else usual

    def at(inverse: float) -> Hypothesis:
        values = {"best_temperature": 1 / inverse}
        return with_settings(
            span, "temperature", weights, inverse, place, penalty=4.0, values=values
        )

    def evidence(inverse: float) -> float:
        tried = at(inverse)
        return float(noise.log_density(tried.residuals(span)).sum()) + tried.bonus

    best, grid = 1.0, list(INVERSE_TEMPERATURES)
    for step in (2 ** (1 / 27), 2 ** (1 / 243), 1.0):
        best = max((b for b in grid if abs(b / usual - 1) > DIFFERENT), key=evidence)
        grid = [best * step**k for k in range(-9, 10)]
    yield at(best)


def _truncations(span: Span, weights: int, _: Noise) -> Iterator[Hypothesis]:
    if span.is_raw or span.is_assumed:
        return
    penalty = log(len(TRUNCATIONS))
    for place, cut in enumerate(TRUNCATIONS, start=1):
        if cut != span.truncation:
            values = {f"best_{name}": value for name, value in cut._asdict().items()}
            more = {"penalty": penalty, "values": values}
            yield with_settings(span, "truncation", weights, None, place, **more)


def _defaults(span: Span, weights: int, _: Noise) -> Iterator[Hypothesis]:
    """The assumed settings of a row that records none."""
    if span.is_assumed:
        kind = "temperature" if span.inverse != 1 else "truncation"
        values = {f"best_{name}": value for name, value in span.truncation._asdict().items()}
        values |= {"best_temperature": 1 / span.inverse}
        yield with_settings(span, kind, weights, None, 0, values=values)


SETTINGS = (_offsets, _modes, _temperatures, _truncations, _defaults)
"""Functions of a span, weights and the noise: hypotheses about settings other than the labelled ones."""


def settings(span: Span, weights: int, noise: Noise) -> Iterator[Hypothesis]:
    """Yield all hypotheses about the settings with which some weights were used."""
    for hypotheses in SETTINGS:
        yield from hypotheses(span, weights, noise)


def swap(span: Span, noise: Noise) -> Hypothesis:
    """The best pair of candidates, and the best position of the first token of the second one."""
    numbers, size = list(span.scores), len(span.stored)
    fits = [labelled(span, weights, "swap") for weights in numbers]
    upto = np.cumsum([noise.log_density(fit.residuals(span)) for fit in fits], axis=1)
    gain = upto[:, None, :-1] + (upto[:, -1:] - upto[:, :-1])[None]
    gain[np.eye(len(fits), dtype=np.bool_)] = -np.inf
    first, second, last = (int(i) for i in np.unravel_index(int(np.argmax(gain)), gain.shape))
    parts = fits[first].predicted, fits[second].predicted
    return fits[first]._replace(
        predicted=np.where(np.arange(size) <= last, *parts),
        penalty=log(size) + log(len(numbers) * (len(numbers) - 1)),
        values={"second_version": numbers[second], "swap_position": last + 1},
    )
