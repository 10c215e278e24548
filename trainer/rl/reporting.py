"""What the loop reports: metrics of an iteration's rollouts, terminal lines, progress of sampling."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import polars as pl

import rollout_io
from rollout_io.terminal import Bar, Pace, Part, duration
from schemas.errors import count
from trainer.run.messages import say


def rollout_numbers(dataset: Path, iteration: int) -> dict[str, Any]:
    """Compute staleness and lengths of the groups that an iteration trains on.

    Returns:
        `staleness_mean`, `staleness_max`, `staleness_histogram` over sampled rows;
        `response_tokens_mean`, `steps_mean` over trajectories; None if there are no rows.
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


def num_greedy_rows(rollouts: Path) -> int:
    """Count rows of a run that were masked because they were sampled at temperature 0."""
    scanned = rollout_io.scan(rollouts / "*")
    if "temperature" not in scanned.collect_schema():
        return 0
    error = pl.col("error").is_null() if "error" in scanned.collect_schema() else pl.lit(value=True)
    greedy = error & (pl.col("temperature") == 0) & pl.col("loss_mask").list.any()
    return int(scanned.select(greedy.sum()).collect().item())


def iteration_line(
    lines: Sequence[dict[str, Any]], num_iterations: int, sync_seconds: float
) -> str:
    """Format an iteration as one line, with means over its mini-batches.

    Example:
        >>> first = {"iteration": 2, "return_mean": 0.5, "response_tokens_mean": 12.25}
        >>> first |= {"loss": 0.125, "staleness_mean": 0.0, "wait_seconds": 3.0, "seconds": 2.0}
        >>> first |= {"rollout_logprobs_abs_diff_mean": 0.00123}
        >>> iteration_line([first], 10, 1.0)
        'iteration 3 of 10: return_mean 0.5, 12.2 tokens, loss 0.125, logprobs differ by \
0.0012, staleness 0; sampling 3.0 s, training 2.0 s, weight sync 1.0 s'
    """
    first = lines[0]
    shown = [
        ("return_mean {:.3g}", mean_of(lines, "return_mean")),
        ("{:.1f} tokens", first.get("response_tokens_mean")),
        ("loss {:.4g}", mean_of(lines, "loss")),
        ("logprobs differ by {:.2g}", mean_of(lines, "rollout_logprobs_abs_diff_mean")),
        ("staleness {:.2g}", first.get("staleness_mean")),
    ]
    numbers = ", ".join(text.format(value) for text, value in shown if value is not None)
    seconds = sum(line["seconds"] for line in lines)
    times = (
        f"sampling {first['wait_seconds']:.1f} s, training {seconds:.1f} s,"
        f" weight sync {sync_seconds:.1f} s"
    )
    return f"iteration {first['iteration'] + 1} of {num_iterations}: {numbers}; {times}"


def evaluation_line(metrics: dict[str, Any], version: int, sets: Iterable[str]) -> str:
    """Format an evaluation as one line, with the mean of each named set.

    Example:
        >>> counts = {"evaluation/num_trajectories": 8, "evaluation/num_failed": 0}
        >>> means = {"evaluation/return_mean": 0.5, "eval/sums/avg_score": 0.75}
        >>> evaluation_line(counts | means, 3, ["sums"])
        'evaluation after 3 iterations: return_mean 0.5 (sums 0.75), 8 trajectories'
    """
    means = [f"{name} {_mean(metrics[f'eval/{name}/avg_score'])}" for name in sets if name]
    of_sets = f" ({', '.join(means)})" if means else ""
    shown = _mean(metrics["evaluation/return_mean"]) + of_sets
    failed = metrics["evaluation/num_failed"]
    others = f", {failed} failed" if failed else ""
    number = metrics["evaluation/num_trajectories"]
    trajectories = f"{number} trajector{'y' if number == 1 else 'ies'}"
    after = f"evaluation after {count(version, 'iteration')}"
    return f"{after}: return_mean {shown}, {trajectories}{others}"


def _mean(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def mean_of(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    """Average a metric over the lines that have it; None if no line does."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


class SamplingProgress:
    """Shows a row below the run's bar on a terminal; else logs at most one line every 30 seconds.

    Args:
        bar: The bar of the run; None: nothing is shown.
        subject: Name of the set of trajectories, such as "iteration 1 of 10".
        total: Number of trajectories to sample.
    """

    def __init__(self, bar: Bar | None, subject: str, total: int) -> None:
        self._bar, self._subject, self._total = bar, subject, total
        self._part = bar.part(total, "trajectories", "sampling") if bar else Part()
        self._pace, self._done, self._began = Pace(), 0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._part.close()

    def show(self, done: int) -> None:
        """Update the progress: `done` trajectories have been sampled."""
        self._part.update(done - self._done)
        self._done = done
        if self._bar and not self._bar.is_shown and self._pace.is_due():
            took = duration(time.monotonic() - self._began)
            say(f"{self._subject}: sampled {done} of {self._total} trajectories in {took}")
