"""`rollouts stats`."""

from __future__ import annotations

from typing import Any

import click

from rollout_io.cli.output import emit, emit_json, example


@click.command(epilog=example("rollouts stats shop/"))
@click.argument("dataset", metavar="DS")
@click.option(
    "--outcome",
    type=click.Choice(["last", "sum"]),
    default="last",
    show_default=True,
    help="Return of a trajectory: its last step's reward, or the sum over its steps.",
)
@click.option("--json", "as_json", is_flag=True, help="The numbers as JSON on stdout.")
def stats(dataset: str, outcome: Any, *, as_json: bool) -> None:
    """Rows, trajectories, groups, tokens, rewards of a dataset.

    Rewards are per trajectory; lengths are per row.
    """
    from pipelines.statistics import dataset_statistics
    from rollout_io.cli.dataset import open_dataset

    numbers = dataset_statistics(open_dataset(dataset), outcome)
    if as_json:
        emit_json(numbers)
        return
    reasons = numbers.pop("stop_reasons")
    shown = {name: _number(value) for name, value in numbers.items()}
    shown |= {f"stop_reason {name!r}": str(count) for name, count in reasons.items()}
    width = max(len(name) for name in shown)
    for name, value in shown.items():
        emit(f"{name:<{width}}  {value:>12}")


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
