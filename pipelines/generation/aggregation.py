"""Aggregate environment metrics with the environments' `aggregate_metrics`, as SkyRL-gym does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from pipelines.generation.environments import as_number, environment_class, resolve
from pipelines.generation.user_code import OwnThread, encodable
from schemas.columns import metrics_dict
from schemas.errors import InputError, RolloutError

ENVIRONMENT = "environment/"
USED = ("instance_id", "is_last_step", "metrics", "error")
"""Columns from which environment metrics are computed."""
Metrics = Mapping[str, float]
Aggregate = Callable[[Sequence[Metrics]], Any]


async def environment_metrics(
    rows: pa.Table, names: Mapping[str, str], timeout_s: float
) -> tuple[dict[str, float], list[str]]:
    """Compute `environment/{key}` with the environments' static `aggregate_metrics(metrics)`.

    If an environment has no such method, or the method fails, each key is averaged over the
    trajectories that report it. A key that several environments report is averaged over
    them, weighted by their numbers of trajectories.

    Args:
        rows: Steps of complete trajectories with the columns `USED`; failed ones are ignored.
        names: Environment name by instance_id.
        timeout_s: Time limit for each call, in seconds.

    Returns:
        The metrics (empty if no environment has `aggregate_metrics`), and warnings.
    """
    found = {name: aggregate_of(name) for name in dict.fromkeys(names.values())}
    if not any(found.values()) or "metrics" not in rows.column_names:
        return {}, []
    warnings: list[str] = []
    weighted: dict[str, list[tuple[float, int]]] = {}
    for name, metrics in _by_environment(rows, names).items():
        aggregate, values = found[name], _means(metrics)
        if aggregate is not None:
            try:
                values = await _aggregated(name, partial(aggregate, metrics), timeout_s)
            except RolloutError as error:
                warnings.append(f"{error} Using means instead.")
        for key, value in values.items():
            weighted.setdefault(key, []).append((value, len(metrics)))
    means = {
        f"{ENVIRONMENT}{key}": sum(v * n for v, n in parts) / sum(n for _, n in parts)
        for key, parts in weighted.items()
    }
    return means, warnings


def aggregate_of(name: str) -> Aggregate | None:
    """Return the static `aggregate_metrics` of an environment; None if it has none.

    Raises:
        RolloutError: As for `environment_class`.
    """
    if ":" in name:
        return getattr(resolve(name, "environment"), "aggregate_metrics", None)
    environment_class(name)
    from skyrl_gym.metrics import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        aggregate_for_environment,
    )

    return partial(aggregate_for_environment, name)


def _by_environment(rows: pa.Table, names: Mapping[str, str]) -> dict[str, list[dict[str, float]]]:
    """Group metrics by environment, excluding failed trajectories."""
    columns = [name for name in USED if name in rows.column_names]
    found: dict[str, list[dict[str, float]]] = {}
    for row in rows.select(columns).to_pylist():
        if row["is_last_step"] and row.get("error") is None:
            metrics = metrics_dict(row["metrics"]) or {}
            found.setdefault(names[row["instance_id"]], []).append(metrics)
    return found


def _means(metrics: Sequence[Metrics]) -> dict[str, float]:
    keys = dict.fromkeys(key for one in metrics for key in one)
    values = {key: [one[key] for one in metrics if key in one] for key in keys}
    return {key: sum(of_key) / len(of_key) for key, of_key in values.items()}


async def _aggregated(name: str, call: Callable[[], Any], timeout_s: float) -> dict[str, float]:
    where, thread = f"environment {name}, aggregate_metrics", OwnThread("env")

    def numbers() -> dict[str, float]:
        made = call()
        if not isinstance(made, Mapping):
            raise InputError("env_output", where, f"the result {made!r:.60}", "a dict")
        found = {encodable(str(key)): as_number(value) for key, value in made.items()}
        return {key: number for key, number in found.items() if number is not None}

    try:
        return await thread.call(numbers, timeout_s, where)
    finally:
        thread.end()
