"""The `rollouts rescore` command."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import Number, dataset_argument, open_valid
from rollout_io.cli.output import emit_json, example, next_command, note, progress_bar

if TYPE_CHECKING:
    import polars as pl

    from pipelines.rescoring.rescore import Rescored
    from pipelines.rescoring.scorers import Scorer
    from pipelines.rewards import Outcome

EXAMPLE = example(
    "rollouts rescore shop/ --reward rewards:strict\n"
    "  rollouts rescore shop/ --findings loops --findings refusals\n"
    "  rollouts rescore math/ --environment gsm8k --tasks math.jsonl --name gsm8k"
)
_SHOWN = 5


@click.command(short_help="Score trajectories with another reward function.", epilog=EXAMPLE)
@dataset_argument()
@click.option("--reward", metavar="MODULE:FUNCTION", help="Function from an attempt to a number.")
@click.option(
    "--findings",
    multiple=True,
    metavar="NAME|MODULE:FUNCTION",
    help="Finder instead: loops, test_edits, false_success, refusals, truncations or your own; may be "
    "repeated.",
)
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
    findings: tuple[str, ...],
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
    --set data.reward=NAME, or write it into a new dataset with filter --reward NAME. With --findings,
    it returns what it found and where, DS.findings/NAME.arrow: filter by it with --where
    "findings('NAME') > 0", and read it in view, stats and diff. A run that was stopped continues
    where it was; trajectories without a score are tried again.
    """
    from pipelines.rescoring.finders import FINDERS
    from pipelines.rescoring.scorers import Scorer
    from rollout_io.dataset.trajectory_facts import dataset_outcome

    if (reward is not None) + (environment is not None) + bool(findings) != 1:
        raise click.UsageError("Pass one of --reward, --environment and --findings.")
    if (environment is None) != (tasks is None):
        raise click.UsageError("--environment and --tasks must be passed together.")
    if name is not None and len(findings) > 1:
        raise click.UsageError("--name names one version: pass one --findings.")
    sys.path.append(str(Path.cwd()))  # for user functions; last, so that it shadows no module
    frame, outcome = open_valid(dataset), dataset_outcome(dataset)
    built_in = {finder.__name__: f"{finder.__module__}:{finder.__name__}" for finder in FINDERS}
    functions = [built_in.get(one, one) for one in findings] or [reward or environment or ""]
    runs = []
    for function in functions:
        scorer = Scorer(
            function=function,
            tasks=tasks,
            outcome=outcome,
            timeout_s=timeout_s,
            gives="findings" if findings else "reward",
        )
        version = name or function.rpartition(":")[2].rpartition(".")[2]
        rescored = _run(dataset, frame, version, scorer, workers)
        reported = dataclasses.asdict(rescored) | {"dataset": dataset, "name": version}
        compared = {} if findings else _compared(frame, outcome, dataset, version)
        runs.append(reported | compared)
        if not as_json:
            _note(dataset, version, rescored, compared)
    if as_json:
        emit_json(runs if len(runs) > 1 else runs[0])
    elif findings:
        next_command("rollouts", "view", dataset)
    else:
        filtered = f"{dataset.rstrip('/')}-{version}"
        next_command("rollouts", "filter", dataset, "--reward", version, "--out", filtered)


def _run(
    dataset: str, frame: pl.LazyFrame, version: str, scorer: Scorer, workers: int | None
) -> Rescored:
    import polars as pl

    from pipelines.rescoring.rescore import rescore as run
    from rollout_io.dataset.parallel import num_cores

    num = frame.select(pl.col("trajectory_id").n_unique()).collect().item()
    with progress_bar(num, " trajectories", "rescore") as bar:
        return run(dataset, version, scorer, num_workers=workers or num_cores(), progress=bar)


def _note(dataset: str, version: str, rescored: Rescored, compared: dict[str, Any]) -> None:
    before = f" ({rescored.num_resumed:,} kept from before)" if rescored.num_resumed else ""
    again = f" ({rescored.num_retried:,} tried again)" if rescored.num_retried else ""
    without = f"{rescored.num_errors:,} without a score"
    note(f"{dataset}: {rescored.num_scored:,} scored{before}, {without}{again}")
    for reason, times in list(rescored.errors.items())[:_SHOWN]:
        note(f"  {times:,} x {reason}")
    if rescored.findings is not None:
        labels = ", ".join(f"{num:,} {label}" for label, num in rescored.findings.items())
        note(f"findings {version}: {labels or 'none'}")
    if compared:
        note(
            f"mean return {_text(compared['mean_before'])} -> {_text(compared['mean_after'])}: "
            f"{compared['num_higher']:,} higher, {compared['num_equal']:,} equal, "
            f"{compared['num_lower']:,} lower"
        )


def _compared(frame: pl.LazyFrame, outcome: Outcome, dataset: str, name: str) -> dict[str, Any]:
    """Compare the returns of the dataset and of a version, where both are known."""
    import polars as pl

    from pipelines.rewards import is_above, trajectory_returns
    from rollout_io.dataset.versions import read_version

    scores, _ = read_version(dataset, name)
    returns = trajectory_returns(frame, outcome).select("trajectory_id", before="return").collect()
    both = returns.join(scores, on="trajectory_id").drop_nulls(["before", "reward"])
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
