"""What an iteration's rollouts are like, and the line that people see of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

import rollout_io


def rollout_figures(dataset: Path, iteration: int) -> dict[str, Any]:
    """Staleness and lengths of the groups that an iteration trains.

    Returns:
        `staleness_mean`, `staleness_max`, `staleness_histogram` over the rows that were sampled,
        `response_tokens_mean`, `steps_mean` over trajectories; None where there is nothing to count.
    """
    scanned = rollout_io.scan(dataset)
    names = scanned.collect_schema().names()
    version = pl.col("policy_version") if "policy_version" in names else pl.lit(None, pl.Int32)
    rows = scanned.select(
        "trajectory_id",
        staleness=iteration - version,
        num_tokens=pl.col("response_ids").list.len().cast(pl.Int64),
    ).collect()
    staleness = rows["staleness"].drop_nulls()
    counts = staleness.value_counts(name="rows").sort("staleness")
    per_trajectory = rows.group_by("trajectory_id").agg(
        pl.col("num_tokens").sum(), steps=(pl.col("num_tokens") > 0).sum()
    )
    return {
        "staleness_mean": staleness.mean(),
        "staleness_max": staleness.max(),
        "staleness_histogram": {str(age): number for age, number in counts.iter_rows()},
        "response_tokens_mean": per_trajectory["num_tokens"].mean(),
        "steps_mean": per_trajectory["steps"].mean(),
    }


def iteration_line(
    lines: Sequence[dict[str, Any]], num_iterations: int, sync_seconds: float
) -> str:
    """An iteration in a line: means over its mini-batches.

    Example:
        >>> first = {"iteration": 2, "return_mean": 0.5, "response_tokens_mean": 12.25}
        >>> first |= {"loss": 0.125, "staleness_mean": 0.0, "wait_seconds": 3.0, "seconds": 2.0}
        >>> first |= {"rollout_logprobs_abs_diff_mean": 0.00123}
        >>> iteration_line([first], 10, 1.0)
        'iteration 3 of 10: reward 0.5, 12.2 tokens, loss 0.125, logprobs apart 0.0012, staleness 0, \
3.0 s sampled + 2.0 s trained + 1.0 s synced'
    """
    first = lines[0]
    shown = [
        ("reward {:.3g}", mean_of(lines, "return_mean")),
        ("{:.1f} tokens", first.get("response_tokens_mean")),
        ("loss {:.4g}", mean_of(lines, "loss")),
        ("logprobs apart {:.2g}", mean_of(lines, "rollout_logprobs_abs_diff_mean")),
        ("staleness {:.2g}", first.get("staleness_mean")),
    ]
    known = ", ".join(text.format(value) for text, value in shown if value is not None)
    seconds = sum(line["seconds"] for line in lines)
    times = (
        f"{first['wait_seconds']:.1f} s sampled + {seconds:.1f} s trained"
        f" + {sync_seconds:.1f} s synced"
    )
    return f"iteration {first['iteration'] + 1} of {num_iterations}: {known}, {times}"


def evaluation_line(metrics: dict[str, Any], version: int) -> str:
    """An evaluation in a line."""
    mean = metrics["evaluation/return_mean"]
    shown = "unknown" if mean is None else f"{mean:.3g}"
    failed = metrics["evaluation/num_failed"]
    others = f", {failed} failed" if failed else ""
    count = metrics["evaluation/num_trajectories"]
    return f"evaluation after {version} iterations: reward {shown}, {count} trajectories{others}"


def mean_of(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean over the lines that have a number of that name; None: none has."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None
