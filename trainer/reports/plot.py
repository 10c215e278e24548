"""Plot metrics of runs as an image (`rollouts plot`). Does not import torch."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_io.dataset.opening import read_input
from schemas.errors import ConfigError, InputError
from schemas.extras import requires_extra
from trainer.run.run_metrics import LOOP_METRICS, METRICS

DEFAULT = (
    "return_mean",
    "evaluation/return_mean",
    "response_tokens_mean",
    "staleness_mean",
    "loss",
    "policy_kl",
    "loss/avg_kl",
    "policy_entropy",
    "grad_norm",
    "clip_ratio",
    "is_ratio_mean",
    "critic/critic_loss",
    "tokens_per_s",
)
"""Metrics plotted by default, if a run has them."""
MAX_MARKED = 60
SMOOTHED = 100
"""Minimum number of points for which a running mean is plotted over the curve."""

Curve = tuple[list[int], list[float]]


def plot_runs(runs: Sequence[Path], out: Path, metrics: Sequence[str] = ()) -> list[str]:
    """Plot metrics of one or more runs, one panel per metric, over optimizer steps.

    Args:
        runs: Directories of runs, or their `metrics.jsonl`.
        out: Image file; the format follows from the extension.
        metrics: Keys of `metrics.jsonl`; empty: those of `DEFAULT` that a run has.

    Returns:
        The plotted metrics.

    Raises:
        InputError: If metrics are missing or invalid, or a metric has no values in any run.
        ConfigError: If matplotlib does not support the format.
        MissingExtra: If matplotlib is not installed.
    """
    lines = {name: read_metrics(path) for name, path in _names(runs).items()}
    chosen = _chosen(lines, metrics)
    figures, ticks = _matplotlib(out)
    columns = 1 if len(chosen) == 1 else 2 if len(chosen) <= 4 else 3
    num_rows = math.ceil(len(chosen) / columns)
    figure = figures.Figure(figsize=(4.6 * columns, 2.9 * num_rows + 0.4), layout="constrained")
    panels = figure.subplots(num_rows, columns, squeeze=False).flat
    for panel, metric in zip(panels, chosen, strict=False):
        for number, (name, records) in enumerate(lines.items()):
            _draw(panel, curve(records, metric), f"C{number % 10}", name)
        known = METRICS | LOOP_METRICS
        unit = known[metric].unit if metric in known else ""
        panel.set_title(metric, fontsize=10, loc="left")
        panel.set_ylabel("" if unit == "1" else unit, fontsize=9)
        panel.xaxis.set_major_locator(ticks.MaxNLocator(integer=True, nbins=6))
    for panel in figure.axes[len(chosen) :]:
        panel.remove()
    for panel in figure.axes[-columns:]:
        panel.set_xlabel("global_step", fontsize=9)
    if len(lines) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False)
    figure.savefig(out, dpi=150)
    return list(chosen)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's `metrics.jsonl`, except a line that is still being written.

    Raises:
        InputError: If the file does not exist or is empty, or a line is invalid.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.exists():
        hint = "pass the directory of a run, the --out of `rollouts train`"
        raise InputError("metrics_file", str(file), "the file does not exist", hint=hint)
    try:
        text = read_input(file).decode()
    except UnicodeDecodeError as error:
        got = f"the file is not UTF-8 text: {error}"
        raise InputError("metrics_file", str(file), got) from None
    whole = text[: text.rfind("\n") + 1].splitlines()
    if not whole:
        hint = "wait for the first update of the run"
        raise InputError("metrics_file", str(file), "the file has no metrics yet", hint=hint)
    return [_record(line, f"{file}:{number}") for number, line in enumerate(whole, 1)]


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("global_step"), int):
        expected = "a JSON object with a global_step"
        raise InputError("metrics_file", where, repr(line[:60]), expected)
    return record


def curve(records: Sequence[Mapping[str, Any]], metric: str) -> Curve:
    """Extract steps and values where the metric is a number; the last line of a step wins."""
    found = {
        record["global_step"]: float(record[metric])
        for record in records
        if isinstance(record.get(metric), int | float) and not record.get("skipped")
    }
    return list(found), list(found.values())


def _names(runs: Sequence[Path]) -> dict[str, Path]:
    """Name runs by the shortest path suffixes that distinguish them."""
    for depth in range(1, 1 + max(len(path.resolve().parts) for path in runs)):
        names = ["/".join(path.resolve().parts[-depth:]) for path in runs]
        if len(set(names)) == len(runs):
            break
    return dict(zip(names, runs, strict=True))


def _chosen(lines: Mapping[str, Sequence[Mapping[str, Any]]], metrics: Sequence[str]) -> list[str]:
    known = sorted({key for records in lines.values() for record in records for key in record})

    def is_there(metric: str) -> bool:
        return any(curve(records, metric)[0] for records in lines.values())

    for metric in dict.fromkeys(metrics):
        if not is_there(metric):
            near = difflib.get_close_matches(metric, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"use one of {', '.join(known)}"
            got = f"metric `{metric}` has no values"
            raise InputError("metric", ", ".join(lines), got, hint=hint)
    found = list(dict.fromkeys(metrics)) or [metric for metric in DEFAULT if is_there(metric)]
    if not found:
        raise InputError(
            "metric", ", ".join(lines), "no optimizer step was taken, so there is nothing to plot"
        )
    return found


def _draw(panel: Any, points: Curve, color: str, name: str) -> None:
    steps, values = points
    smoothed = len(steps) >= SMOOTHED
    marker = "o" if len(steps) <= MAX_MARKED else None
    style = {"color": color, "markersize": 3, "marker": marker}
    alpha = 0.3 if smoothed else 1.0
    panel.plot(steps, values, linewidth=1.2, alpha=alpha, label=None if smoothed else name, **style)
    if smoothed:
        panel.plot(steps, list(_running_mean(values)), color=color, linewidth=1.5, label=name)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)


def _running_mean(values: Sequence[float]) -> Iterator[float]:
    """Compute an exponential running mean with a time constant of a twentieth of the curve."""
    keep = 1 - min(1.0, 20 / len(values))
    total = weight = 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        yield total / weight


def _matplotlib(out: Path) -> tuple[Any, Any]:
    """Import matplotlib's `figure` and `ticker`; a bare `Figure` needs no display."""
    with requires_extra("plot", "rollouts plot"):
        from matplotlib import figure, ticker
    kinds = sorted(figure.Figure().canvas.get_supported_filetypes())
    if out.suffix[1:].lower() not in kinds:
        got, expected = f"extension {out.suffix!r}", f"one of {', '.join(kinds)}"
        raise ConfigError("image_format", str(out), got, expected)
    if not out.parent.is_dir():
        raise InputError("image_file", str(out), "its directory does not exist")
    return figure, ticker
