"""Compare two datasets: returns on their common tasks, and where paired attempts differ."""

from __future__ import annotations

from typing import Any

import polars as pl
from starlette.responses import Response

from pipelines.view.attempts import parting, sampled_tokens
from pipelines.view.responses import arrow_response
from pipelines.view.sources import Dataset


def diff(a: Dataset, b: Dataset, where: str | None) -> Response:
    """Return one line per task that both datasets contain; `where` filters their trajectories."""
    left, right = _tasks(a, where), _tasks(b, where)
    both = left.join(right, on="instance_id", how="inner", suffix="_b", maintain_order="left")
    names = ("num", "return", "solved", "response_tokens")
    ordered = both.select(
        "instance_id",
        *(e for n in names for e in (pl.col(n).alias(f"{n}_a"), pl.col(f"{n}_b"))),
    )
    return arrow_response(ordered, only_a=len(left) - len(both), only_b=len(right) - len(both))


def pairs(a: Dataset, b: Dataset, instance_id: str) -> dict[str, Any]:
    """Pair the attempts at a task by repetition_id; attempts without a counterpart are left out."""
    left, right = _attempts(a, instance_id), _attempts(b, instance_id)
    found = []
    for repetition, (number, name, value) in left.items():
        if repetition not in right:
            continue
        other, other_name, other_value = right[repetition]
        parts_at = parting(sampled_tokens(a, number), sampled_tokens(b, other))
        found.append(
            {
                "trajectory_a": name,
                "trajectory_b": other_name,
                "return_a": value,
                "return_b": other_value,
                "parts_at": parts_at,
            }
        )
    return {"pairs": found}


def _tasks(dataset: Dataset, where: str | None) -> pl.DataFrame:
    index = dataset.index
    mask, lines = index.matching(where), index.trajectories
    kept = lines if mask is None else lines.filter(pl.Series(mask))
    value = pl.col("return").fill_nan(None)
    return kept.group_by("instance_id", maintain_order=True).agg(
        pl.len().cast(pl.Int32).alias("num"),
        value.mean(),
        (value > 0).sum().cast(pl.Int32).alias("solved"),
        pl.col("response_tokens").mean(),
    )


def _attempts(dataset: Dataset, instance_id: str) -> dict[int, tuple[int, str, float | None]]:
    numbers = dataset.index.group(instance_id).tolist()
    lines = dataset.index.trajectories[numbers].select("repetition_id", "trajectory_id", "return")
    return {
        repetition: (number, name, value)
        for number, (repetition, name, value) in zip(numbers, lines.rows(), strict=True)
    }
