"""What the scores of spans tell about the dataset: its log-probabilities, and its candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from schemas.metadata import LogprobsMode
from trainer.forensics.audit.hypotheses import OFFSETS, Span
from trainer.forensics.audit.noise import FLOOR, Residuals
from trainer.forensics.audit.scores import INVERSE_TEMPERATURES

MODES: tuple[LogprobsMode, ...] = ("raw", "processed")
CLEARLY = 0.5
"""A span clearly fits one mode if its typical residual is less than this fraction of the other's."""


def best_residuals(span: Span) -> Residuals:
    """Return the residuals of the best simple fit of a span."""

    def simple() -> Iterator[Residuals]:
        for candidate in span.scores:
            for mode in MODES:
                residuals = span.residuals(candidate, mode)
                yield residuals
                for offset in OFFSETS:
                    if abs(offset) < len(span.stored):
                        yield span.shifted(residuals, offset)
            yield from (span.at_temperature(candidate, inverse) for inverse in INVERSE_TEMPERATURES)

    return min(simple(), key=lambda residuals: residuals.scale)


def likely_mode(spans: Sequence[Span]) -> tuple[LogprobsMode, int]:
    """Infer the mode of stored log-probabilities from the spans that clearly fit only one mode.

    The mode that fits more tokens wins. Also returns the number of tokens in these spans. If the
    temperature is unknown, processed log-probabilities may be at any temperature.
    """
    balance, num_tokens = 0.0, 0
    for span in spans:
        raw = min(span.at_temperature(one, 1.0).scale for one in span.scores)
        processed = min(span.processed(one).scale for one in span.scores)
        if np.isnan(span.temperature):
            inverse = INVERSE_TEMPERATURES
            scales = (span.at_temperature(one, b).scale for one in span.scores for b in inverse)
            processed = min(processed, *scales)
        if min(raw, processed) < CLEARLY * max(raw, processed):
            balance += float(np.sign(raw - processed)) * len(span.stored)
            num_tokens += len(span.stored)
    return "processed" if balance > 0 else "raw", num_tokens


def distances(
    spans: Sequence[Span], mode: LogprobsMode
) -> tuple[dict[tuple[int, int], float], float | None]:
    """Compute the mean absolute difference of each pair of candidates in spans, in nats.

    Also returns the smallest difference relative to the mean sensitivity; None without a pair.
    """
    sums: dict[tuple[int, int], Any] = {}
    for span in spans:
        predicted = {one: span.residuals(one, mode) for one in span.scores}
        for a, b in ((a, b) for a in predicted for b in predicted if a < b):
            distance = np.abs(predicted[a].predicted - predicted[b].predicted).sum()
            sensitivity = predicted[a].sensitivity.sum()
            added = np.array([distance, sensitivity, len(span.stored)], np.float64)
            sums[a, b] = sums.get((a, b), 0.0) + added
    nats = {pair: float(total[0] / total[2]) for pair, total in sums.items()}
    relative = [float(total[0] / max(total[1], FLOOR)) for total in sums.values()]
    return nats, min(relative, default=None)
