"""`rollout_metrics` of generators: one JSON object per group, in the column `rollout_metrics`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ROLLOUT_METRICS = "rollout_metrics"


def to_json(metrics: Any) -> tuple[str | None, list[str]]:
    """Write the finite numbers of a generator's `rollout_metrics` as JSON.

    Returns:
        The JSON object, None if there are no numbers; and the names of the other values.
    """
    if metrics is None:
        return None, []
    if not isinstance(metrics, Mapping):
        return None, [ROLLOUT_METRICS]
    numbers: dict[str, float] = {}
    others = []
    for key, value in metrics.items():
        name, number = str(key).encode(errors="replace").decode(), _number(value)
        if number is None:
            others.append(name)
        else:
            numbers[name] = number
    return json.dumps(numbers) if numbers else None, others


def aggregated(objects: Iterable[str]) -> dict[str, float]:
    """Combine the metrics of several groups as SkyRL does, which decides by the name.

    A name with `avg` or `mean` is averaged, with `min` or `max` the extreme is taken, and all other
    metrics are added.

    Example:
        >>> aggregated(['{"avg_x": 1, "calls": 2}', '{"avg_x": 2, "calls": 3}'])
        {'avg_x': 1.5, 'calls': 5.0}
    """
    found: dict[str, list[float]] = {}
    for text in objects:
        for name, value in json.loads(text).items():
            found.setdefault(name, []).append(float(value))
    return {name: _how(name)(values) for name, values in found.items()}


def _how(name: str) -> Callable[[Sequence[float]], float]:
    if "avg" in name or "mean" in name:
        return lambda values: math.fsum(values) / len(values)
    if "min" in name:
        return min
    return max if "max" in name else math.fsum


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
