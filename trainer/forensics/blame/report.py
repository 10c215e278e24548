"""The result of blame, as JSON or as text for the terminal."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollout_io.cli.output import wants_color
from rollout_io.terminal import console, printable
from schemas.errors import count
from trainer.forensics.blame.blame import Blame

WIDTH = 100
STANDS_OUT = 4.0
"""Minimum score at which a row is reported as standing out."""
MAJORITY = 0.5
"""Minimum share of the gradient at which a trajectory with several rows is reported."""


def summary(found: Blame, limit: int) -> dict[str, Any]:
    """Return the result for JSON, with the first `limit` rows, trajectories and groups."""
    return {
        "run": found.run,
        "update": found.update,
        "dataset": found.dataset,
        "num_rows": len(found.rows),
        "num_targets": found.num_targets,
        "gradient_norm": found.gradient_norm,
        "max_grad_norm": found.max_grad_norm,
        "is_fast": found.is_fast,
        "finding": finding(found),
        "rows": found.rows.head(limit).to_dicts(),
        "trajectories": found.trajectories.head(limit).to_dicts(),
        "groups": found.groups.head(limit).to_dicts(),
    }


def finding(found: Blame) -> str:
    """Return a sentence that names the trajectory or row that stands out, or says that none does."""
    if (unit := _dominant(found)) is not None:
        rows, share = count(unit["num_rows"], "row"), f"{100 * unit['share']:.0f} %"
        others = f"{found.gradient_norm:.3g} to {unit['norm_without']:.3g}"
        return (
            f"{unit['trajectory_id']} ({rows}) accounts for {share} of the gradient: without it, the"
            f" norm would change from {others}."
        )
    first = found.rows.row(0, named=True)
    if first["score"] < STANDS_OUT:
        most = found.rows.sort(pl.col("share").abs(), descending=True).row(0, named=True)
        return f"No row stands out. {most['row']} has the largest share, {most['share']:.0%}."
    return f"{first['row']} stands out: {describe(first, found.rows)}."


def _dominant(found: Blame) -> dict[str, Any] | None:
    """Return the trajectory with several rows that accounts for most of the gradient, if any."""
    first = found.trajectories.row(0, named=True)
    if abs(first["share"]) < MAJORITY or first["num_rows"] == 1 or len(found.trajectories) < 3:
        return None
    return first


def replay_without(found: Blame) -> list[str] | None:
    """Return the words of the command that replays the update without the row or trajectory that stands out.

    None if none stands out, or if the update has no other row.
    """
    first = found.rows.row(0, named=True)
    unit = _dominant(found)
    if (unit is None and first["score"] < STANDS_OUT) or len(found.rows) < 2:
        return None
    names = first["selectors"] if unit is None else [unit["trajectory_id"]]
    options = [("--without", name) for name in names]
    options += [("--set", f"{key}={path}") for key, path in found.places.items()]
    command = ["rollouts", "replay", found.run, "--update", str(found.update)]
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
        said = f"its log-probabilities differ from the sampler's by {row[trait]:.2g} nats per token"
    else:
        said = f"its tokens are improbable, with {row[trait]:.2g} nats per token"
    return f"{said}, {times} the median, {makes}"


def _times(value: float, values: pl.Series) -> str:
    middle = float(values.median() or 0.0)  # type: ignore[arg-type]
    if middle <= 0:
        return "far above"
    ratio = value / middle
    return f"{ratio:.0f} times" if ratio >= 9.5 else f"{ratio:.1f} times"


def screen(found: Blame, limit: int) -> str:
    """Format the result for the terminal."""
    clipped = found.gradient_norm > found.max_grad_norm
    norm = f"{found.gradient_norm:.3g}"
    norm += f", clipped to {found.max_grad_norm:g}" if clipped else ""
    num_groups = len(found.groups)
    parts: list[RenderableType] = [
        Text(
            printable(
                f"{found.run}, update {found.update}: {count(len(found.rows), 'row')},"
                f" {count(num_groups, 'group')}, {count(found.num_targets, 'trained token')}"
            )
        ),
        Text(f"norm of the gradient: {norm}"),
        Text(),
        Text(printable(finding(found)), style="bold"),
        *_section("Rows", _row_table(found, limit)),
    ]
    if len(found.trajectories) < len(found.rows):
        parts += _section("Trajectories", _unit_table(found.trajectories, "trajectory_id"))
    if 1 < num_groups < len(found.trajectories):
        parts += _section("Groups", _unit_table(found.groups, "instance_id"))
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    drawn = console(width=width, no_color=not wants_color(sys.stdout), highlight=False)
    with drawn.capture() as captured:
        drawn.print(Group(*parts))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _section(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]


def _row_table(found: Blame, limit: int) -> Table:
    shown = found.rows.head(limit)
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    optional = {
        "mismatch": "mismatch",
        "step_change": "step change",
        "held_out_change": "held-out",
    }
    used = {name: title for name, title in optional.items() if _is_known(shown[name])}
    table.add_column("", justify="right")
    table.add_column("row", overflow="fold")
    for title in ("tokens", "advantage", "share", "norm", "without", "surprise", *used.values()):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    for number, row in enumerate(shown.iter_rows(named=True), start=1):
        table.add_row(
            str(number),
            printable(row["row"]),
            f"{row['num_targets']:,}",
            f"{row['advantage']:+.2f}",
            f"{row['share']:.1%}",
            f"{row['gradient_norm']:.2g}",
            _shown(row["norm_without"]),
            f"{row['surprise']:.2f}",
            *(_cell(name, row[name]) for name in used),
            f"{row['score']:.1f}",
            style="red" if row["score"] >= STANDS_OUT else "",
        )
    return table


def _is_known(values: pl.Series) -> bool:
    return bool((values.is_not_null() & values.is_not_nan()).any())


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name == "step_change":
        return f"{value:.1%}"
    return f"{value:+.2g}" if name == "held_out_change" else f"{value:.2g}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _unit_table(units: pl.DataFrame, key: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    table.add_column(key.removesuffix("_id").replace("instance", "group"), overflow="fold")
    for title in ("rows", "share", "norm", "without"):
        table.add_column(title, justify="right", no_wrap=True)
    for unit in units.filter(pl.col("gradient_norm").is_not_null()).iter_rows(named=True):
        table.add_row(
            printable(unit[key]),
            f"{unit['num_rows']:,}",
            f"{unit['share']:.1%}",
            f"{unit['gradient_norm']:.2g}",
            _shown(unit["norm_without"]),
        )
    return table
