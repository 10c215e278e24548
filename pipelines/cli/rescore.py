"""The `rollouts rescore` command."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.datasets import dataset_argument, open_valid
from rollout_io.cli.output import emit_json, example, next_command, note, progress_bar
from rollout_io.cli.usage import Number

if TYPE_CHECKING:
    import polars as pl

    from pipelines.rewards import Outcome

EXAMPLE = example(
    "rollouts rescore shop/ --reward rewards:strict\n"
    "  rollouts rescore math/ --environment gsm8k --tasks math.jsonl --name gsm8k"
)
_SHOWN = 5


@click.command(short_help="Score trajectories with another reward function.", epilog=EXAMPLE)
@dataset_argument()
@click.option("--reward", metavar="MODULE:FUNCTION", help="Function from an attempt to a number.")
@click.option(
    "--environment",
    metavar="NAME|MODULE:CLASS",
    help="Replay the responses in this environment instead; requires --tasks.",
)
@click.option("--tasks", type=click.Path(), metavar="FILE", help="Tasks of the environment.")
@click.option("--name", metavar="NAME", help="Name of the new version.  [default: the function's]")
@click.option(
    "--timeout-s",
    type=Number(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Time limit for one trajectory, in seconds.",
)
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Number of processes.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def rescore(
    dataset: str,
    reward: str | None,
    environment: str | None,
    tasks: str | None,
    name: str | None,
    timeout_s: float,
    workers: int | None,
    *,
    as_json: bool,
) -> None:
    """Score trajectories with another reward function, and keep the result beside the dataset.

    The function gets each trajectory that did not fail (pipelines.rescoring.attempts.Attempt). Its
    rewards become a version, DS.rewards/NAME.arrow; the dataset does not change. Train on it with
    --set data.reward=NAME, or write it into a new dataset with filter --reward NAME. A run that was
    stopped continues where it was; trajectories without a score are tried again.
    """
    import polars as pl

    from pipelines.rescoring.rescore import rescore as run
    from pipelines.rescoring.scorers import Scorer
    from rollout_io.dataset.parallel import num_cores
    from rollout_io.dataset.returns import dataset_outcome

    if (reward is None) == (environment is None):
        raise click.UsageError("Pass either --reward or --environment.")
    if (environment is None) != (tasks is None):
        raise click.UsageError("--environment and --tasks must be passed together.")
    sys.path.append(str(Path.cwd()))  # for user functions; last, so that it shadows no module
    function = reward or environment or ""
    name = name or function.rpartition(":")[2].rpartition(".")[2]
    frame, outcome = open_valid(dataset), dataset_outcome(dataset)
    scorer = Scorer(function=function, tasks=tasks, outcome=outcome, timeout_s=timeout_s)
    num = frame.select(pl.col("trajectory_id").n_unique()).collect().item()
    with progress_bar(num, " trajectories", "rescore") as bar:
        found = run(dataset, name, scorer, num_workers=workers or num_cores(), progress=bar)
    compared = _compared(frame, outcome, dataset, name)
    if as_json:
        emit_json(dataclasses.asdict(found) | {"dataset": dataset, "name": name, **compared})
        return
    before = f" ({found.num_resumed:,} kept from before)" if found.num_resumed else ""
    again = f" ({found.num_retried:,} tried again)" if found.num_retried else ""
    without = f"{found.num_errors:,} without a score"
    note(f"{dataset}: {found.num_scored:,} scored{before}, {without}{again}")
    for reason, times in list(found.errors.items())[:_SHOWN]:
        note(f"  {times:,} x {reason}")
    before, after = compared["mean_before"], compared["mean_after"]
    note(
        f"mean return {_text(before)} -> {_text(after)}: {compared['num_higher']:,} higher, "
        f"{compared['num_equal']:,} equal, {compared['num_lower']:,} lower"
    )
    filtered = f"{dataset.rstrip('/')}-{name}"
    next_command("rollouts", "filter", dataset, "--reward", name, "--out", filtered)


def _compared(frame: pl.LazyFrame, outcome: Outcome, dataset: str, name: str) -> dict[str, Any]:
    """Compare the returns of the dataset and of a version, where both are known."""
    import polars as pl

    from pipelines.rescoring.versions import read_version
    from pipelines.rewards import is_above, trajectory_returns

    scores, _ = read_version(dataset, name)
    known = trajectory_returns(frame, outcome).select("trajectory_id", before="return").collect()
    both = known.join(scores, on="trajectory_id").drop_nulls(["before", "reward"])
    old, new = pl.col("before"), pl.col("reward")
    return both.select(
        mean_before=pl.col("before").mean(),
        mean_after=pl.col("reward").mean(),
        num_higher=is_above(new, old).sum(),
        num_equal=(~is_above(new, old) & ~is_above(old, new)).sum(),
        num_lower=is_above(old, new).sum(),
    ).row(0, named=True)


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
