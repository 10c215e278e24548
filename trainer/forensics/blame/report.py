"""The result of blame, as JSON or as text for the terminal."""

from __future__ import annotations

from typing import Any

import polars as pl
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollout_io.terminal import printable
from schemas.errors import count
from trainer.forensics.blame.blame import Blame
from trainer.forensics.screens import bare_table, drawn, section

STANDS_OUT = 4.0
"""Minimum score at which a row is reported as standing out."""
NUM_UNITS = 3
"""Number of trajectories and of groups that the screen shows."""
MAJORITY = 0.5
"""Minimum share of the gradient at which a trajectory with several rows is reported."""


def summary(result: Blame, limit: int) -> dict[str, Any]:
    """Return the result for JSON, with the first `limit` rows, trajectories and groups."""
    return {
        "run": result.run,
        "update": result.update,
        "dataset": result.dataset,
        "num_rows": len(result.rows),
        "num_targets": result.num_targets,
        "gradient_norm": result.gradient_norm,
        "max_grad_norm": result.max_grad_norm,
        "finding": finding(result),
        "rows": result.rows.head(limit).to_dicts(),
        "trajectories": result.trajectories.head(limit).to_dicts(),
        "groups": result.groups.head(limit).to_dicts(),
    }


def finding(result: Blame) -> str:
    """Return a sentence that names the trajectory or row that stands out, or says that none does."""
    if (unit := _dominant(result)) is not None:
        rows, share = count(unit["num_rows"], "row"), f"{100 * unit['share']:.0f} %"
        return f"{unit['trajectory_id']} ({rows}) accounts for {share} of the gradient."
    first = result.rows.row(0, named=True)
    if first["score"] < STANDS_OUT:
        most = result.rows.sort(pl.col("share").abs(), descending=True).row(0, named=True)
        return f"No row stands out. {most['row']} has the largest share, {most['share']:.0%}."
    return f"{first['row']} stands out: {describe(first, result.rows)}."


def _dominant(result: Blame) -> dict[str, Any] | None:
    """Return the trajectory with several rows that accounts for most of the gradient, if any."""
    first = result.trajectories.row(0, named=True)
    if abs(first["share"]) < MAJORITY or first["num_rows"] == 1 or len(result.trajectories) < 3:
        return None
    return first


def replay_without(result: Blame) -> list[str] | None:
    """Return the words of the command that replays the update without the row or trajectory that stands out.

    None if none stands out, or if the update has no other row.
    """
    first = result.rows.row(0, named=True)
    unit = _dominant(result)
    if (unit is None and first["score"] < STANDS_OUT) or len(result.rows) < 2:
        return None
    names = first["selectors"] if unit is None else [unit["trajectory_id"]]
    options = [("--without", name) for name in names]
    options += [("--set", f"{key}={path}") for key, path in result.places.items()]
    command = ["rollouts", "replay", result.run, "--update", str(result.update)]
    return [*command, *(part for option in options for part in _option(*option))]


def _option(name: str, value: str) -> list[str]:
    """Return an option as command-line arguments: "NAME=VALUE" if the value starts with "-"."""
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def describe(row: dict[str, Any], rows: pl.DataFrame) -> str:
    """Describe why a row stands out, relative to the median of all rows.

    Example:
        >>> rows = pl.DataFrame({"gradient_norm": [1.0, 1.0, 40.0]})
        >>> describe({"trait": "gradient_norm", "gradient_norm": 40.0, "share": 0.61}, rows)
        'its gradient has 40 times the median norm, and it accounts for 61 % of the gradient'
    """
    trait = row["trait"]
    makes = f"and it accounts for {100 * row['share']:.0f} % of the gradient"
    if trait == "share":
        times = _times(row["gradient_norm"], rows["gradient_norm"])
        whole = f"{100 * row['share']:.0f} % of the gradient"
        return f"it accounts for {whole}, with {times} the median norm"
    if trait == "gradient_norm":
        times = _times(row["gradient_norm"], rows["gradient_norm"])
        return f"its gradient has {times} the median norm, {makes}"
    if trait == "advantage":
        times = _times(abs(row["advantage"]), rows["advantage"].abs())
        return f"its advantage is {row['advantage']:+.2f}, {times} the median magnitude, {makes}"
    times = _times(row[trait], rows[trait])
    if trait == "mismatch":
        text = f"its log-probabilities differ from the sampler's by {row[trait]:.2g} nats per token"
    else:
        text = f"its tokens are improbable, with {row[trait]:.2g} nats per token"
    return f"{text}, {times} the median, {makes}"


def _times(value: float, values: pl.Series) -> str:
    middle = float(values.median() or 0.0)  # type: ignore[arg-type]
    if middle <= 0:
        return "far above"
    ratio = value / middle
    return f"{ratio:.0f} times" if ratio >= 9.5 else f"{ratio:.1f} times"


def screen(result: Blame, limit: int) -> str:
    """Format the result for the terminal."""
    clipped = result.gradient_norm > result.max_grad_norm
    norm = f"{result.gradient_norm:.3g}"
    norm += f", clipped to {result.max_grad_norm:g}" if clipped else ""
    num_groups = len(result.groups)
    parts: list[RenderableType] = [
        Text(
            printable(
                f"{result.run}, update {result.update}: {count(len(result.rows), 'row')},"
                f" {count(num_groups, 'group')}, {count(result.num_targets, 'trained token')}"
            )
        ),
        Text(f"norm of the gradient: {norm}"),
        Text(),
        Text(printable(finding(result)), style="bold"),
        *section("Rows", _row_table(result, limit)),
    ]
    if len(result.trajectories) < len(result.rows):
        parts += section("Trajectories", _unit_table(result.trajectories, "trajectory_id"))
    if 1 < num_groups < len(result.trajectories):
        parts += section("Groups", _unit_table(result.groups, "instance_id"))
    return drawn(parts)


def _row_table(result: Blame, limit: int) -> Table:
    table = bare_table()
    has_mismatch = result.rows["mismatch"].is_not_nan().any()
    table.add_column("", justify="right")
    table.add_column("row", overflow="fold")
    optional = ["mismatch"] if has_mismatch else []
    for title in ("tokens", "advantage", "share", "norm", "surprise", *optional, "score"):
        table.add_column(title, justify="right", no_wrap=True)
    for number, row in enumerate(result.rows.head(limit).iter_rows(named=True), start=1):
        table.add_row(
            str(number),
            printable(row["row"]),
            f"{row['num_targets']:,}",
            f"{row['advantage']:+.2f}",
            f"{row['share']:.1%}",
            f"{row['gradient_norm']:.2g}",
            f"{row['surprise']:.2f}",
            *(f"{row[name]:.2g}" for name in optional),
            f"{row['score']:.1f}",
            style="red" if row["score"] >= STANDS_OUT else "",
        )
    return table


def _unit_table(units: pl.DataFrame, key: str) -> Table:
    table = bare_table()
    table.add_column(key.removesuffix("_id").replace("instance", "group"), overflow="fold")
    for title in ("rows", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    for unit in units.head(NUM_UNITS).iter_rows(named=True):
        table.add_row(printable(unit[key]), f"{unit['num_rows']:,}", f"{unit['share']:.1%}")
    return table
