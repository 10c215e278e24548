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
    for name, value in options:  # a value may start as an option does
        command += [f"{name}={value}"] if value.startswith("-") else [name, value]
    return command


def describe(row: dict[str, Any], rows: pl.DataFrame) -> str:
    """Describe why a row stands out, relative to the median of all rows.

    Example:
        >>> rows = pl.DataFrame({"gradient_norm": [1.0, 1.0, 40.0]})
        >>> describe({"trait": "gradient_norm", "gradient_norm": 40.0, "share": 0.61}, rows)
        'its gradient has 40 times the median norm, and it accounts for 61 % of the gradient'
    """
    trait = row["trait"]
    name = "gradient_norm" if trait == "share" else trait
    makes = f"it accounts for {100 * row['share']:.0f} % of the gradient"
    times = _times(abs(row[name]), rows[name].abs())
    if trait == "share":
        return f"{makes}, with {times} the median norm"
    return f"{TRAITS[trait].format(value=row[name], times=times)}, and {makes}"


TRAITS = {
    "gradient_norm": "its gradient has {times} the median norm",
    "advantage": "its advantage is {value:+.2f}, {times} the median magnitude",
    "mismatch": "its log-probabilities differ from the sampler's by {value:.2g} nats per token,"
    " {times} the median",
    "surprise": "its tokens are improbable, with {value:.2g} nats per token, {times} the median",
}


def _times(value: float, values: pl.Series) -> str:
    middle = float(values.median() or 0.0)  # type: ignore[arg-type]
    if middle <= 0:
        return "far above"
    ratio = value / middle
    return f"{ratio:.0f} times" if ratio >= 9.5 else f"{ratio:.1f} times"


def screen(result: Blame, limit: int) -> str:
    """Format the result for the terminal."""
    norm, most = f"{result.gradient_norm:.3g}", result.max_grad_norm
    norm += f", clipped to {most:g}" if result.gradient_norm > most else ""
    num_rows, num_groups = len(result.rows), len(result.groups)
    counts = [
        count(num_rows, "row"),
        count(num_groups, "group"),
        count(result.num_targets, "trained token"),
    ]
    parts: list[RenderableType] = [
        Text(printable(f"{result.run}, update {result.update}: {', '.join(counts)}")),
        Text(f"norm of the gradient: {norm}"),
        Text(),
        Text(printable(finding(result)), style="bold"),
        *section("Rows", _row_table(result, limit)),
    ]
    if len(result.trajectories) < num_rows:
        parts += section("Trajectories", _unit_table(result.trajectories, "trajectory"))
    if 1 < num_groups < len(result.trajectories):
        parts += section("Groups", _unit_table(result.groups, "group"))
    return drawn(parts)


def _row_table(result: Blame, limit: int) -> Table:
    formats = {
        "num_targets": ("tokens", "{:,}"),
        "advantage": ("advantage", "{:+.2f}"),
        "share": ("share", "{:.1%}"),
        "gradient_norm": ("norm", "{:.2g}"),
        "surprise": ("surprise", "{:.2f}"),
        "mismatch": ("mismatch", "{:.2g}"),
        "score": ("score", "{:.1f}"),
    }
    if result.rows["mismatch"].is_nan().all():
        del formats["mismatch"]
    table = bare_table()
    table.add_column("", justify="right")
    table.add_column("row", overflow="fold")
    for title, _ in formats.values():
        table.add_column(title, justify="right", no_wrap=True)
    for number, row in enumerate(result.rows.head(limit).iter_rows(named=True), start=1):
        numbers = [text.format(row[name]) for name, (_, text) in formats.items()]
        style = "red" if row["score"] >= STANDS_OUT else ""
        table.add_row(str(number), printable(row["row"]), *numbers, style=style)
    return table


def _unit_table(units: pl.DataFrame, title: str) -> Table:
    table = bare_table()
    table.add_column(title, overflow="fold")
    for name in ("rows", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, num_rows, share in units.head(NUM_UNITS).iter_rows():
        table.add_row(printable(name), f"{num_rows:,}", f"{share:.1%}")
    return table
