"""Plot metrics of runs as an image (`rollouts plot RUN`). Does not import torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pipelines.view.run_files import lines_of
from schemas.errors import ConfigError, InputError
from schemas.imports import requires_extra
from schemas.run_metrics import LOOP_METRICS, METRICS

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
MAX_MARKED = 40
"""Maximum number of points joined by a line; a longer curve is smoothed."""

_WIDTH = 0.04  # standard deviation of the smoothing window, as a fraction of the curve
_NUM_DRAWN = 400

Curve: TypeAlias = tuple[list[int], list[float]]
Records: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]


def plot_runs(runs: Sequence[Path], out: Path, metrics: Sequence[str] = ()) -> list[str]:
    """Plot metrics of one or more runs, one panel per metric, over optimizer steps.

    Args:
        runs: Directories of runs, or their `metrics.jsonl`.
        out: Image file; the format follows from the extension.
        metrics: Keys of `metrics.jsonl`; empty: the metrics in `DEFAULT` that a run has.

    Returns:
        The plotted metrics.

    Raises:
        InputError: Metrics are missing or invalid, or a metric has no values in any run.
        ConfigError: Matplotlib does not support the format.
        MissingExtra: Matplotlib is not installed.
    """
    lines = dict(zip(names_of(runs), map(read_metrics, runs), strict=True))
    chosen = _chosen(lines, metrics)
    check_image(out)
    save(runs_figure(lines, chosen), out)
    return chosen


def runs_figure(runs: Records, metrics: Sequence[str]) -> Any:
    """Draw metrics of runs; `runs` maps the name of a run to the lines of its `metrics.jsonl`."""
    from matplotlib.ticker import MaxNLocator

    num_columns = 1 if len(metrics) == 1 else 2 if len(metrics) <= 6 else 3
    size = {1: (6.0, 3.6), 2: (4.2, 2.8), 3: (3.5, 2.5)}[num_columns]
    figure, axes = panels(len(metrics), num_columns, size)
    for axis, metric in zip(axes, metrics, strict=True):
        for number, records in enumerate(runs.values()):
            _draw(axis, curve(records, metric), color(number))
        described = METRICS | LOOP_METRICS
        unit = described[metric].unit if metric in described else ""
        title(axis, metric)
        axis.set_ylabel("" if unit == "1" else unit, fontsize=9.5)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    for axis in axes[-num_columns:]:
        axis.set_xlabel("update (global_step)", fontsize=9.5)
    if len(runs) > 1:
        legend(figure, list(runs), max(2, num_columns))
    return figure


def read_metrics(path: Path) -> list[Mapping[str, Any]]:
    """Read the lines of a run's `metrics.jsonl`, except a line that is still being written.

    Raises:
        InputError: The file does not exist or is empty, or a line is invalid.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.exists():
        hint = "pass a dataset, or the directory of a run (--out of `rollouts train`)"
        raise InputError("metrics_file", str(file), "the file does not exist", hint=hint)
    lines = lines_of(file)
    if not lines:
        hint = "wait for the first update of the run"
        raise InputError("metrics_file", str(file), "the file has no metrics yet", hint=hint)
    return lines


def curve(records: Sequence[Mapping[str, Any]], metric: str) -> Curve:
    """Extract the steps at which the metric is a number, and its values.

    Skipped updates are omitted. If several lines have the same step, the last one is used.
    """
    points = {
        record["global_step"]: float(record[metric])
        for record in records
        if isinstance(record.get(metric), int | float) and not record.get("skipped")
    }
    return list(points), list(points.values())


def _chosen(lines: Mapping[str, Sequence[Mapping[str, Any]]], metrics: Sequence[str]) -> list[str]:
    names = sorted({key for records in lines.values() for record in records for key in record})

    def is_there(metric: str) -> bool:
        return any(curve(records, metric)[0] for records in lines.values())

    for metric in dict.fromkeys(metrics):
        if not is_there(metric):
            near = difflib.get_close_matches(metric, names, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"use one of {', '.join(names)}"
            finding = f"metric `{metric}` has no values"
            raise InputError("metric", ", ".join(lines), finding, hint=hint)
    chosen = list(dict.fromkeys(metrics)) or [metric for metric in DEFAULT if is_there(metric)]
    if not chosen:
        raise InputError(
            "metric", ", ".join(lines), "no optimizer step was taken, so there is nothing to plot"
        )
    return chosen


def _draw(axis: Any, points: Curve, color: str) -> None:
    steps, values = points
    if not steps:
        return
    if len(steps) <= MAX_MARKED:
        size = 5 if len(steps) <= 20 else 3
        axis.plot(steps, values, color=color, linewidth=1.4, marker="o", markersize=size)
        return
    axis.plot(steps, values, ".", color=color, markersize=4, alpha=0.3, markeredgewidth=0)
    axis.plot(*smoothed(steps, values), color=color, linewidth=1.7)


def smoothed(
    steps: Sequence[int], values: Sequence[float]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Smooth a curve by local linear regression in a centred Gaussian window.

    The window is symmetric, and the regression follows the slope at the ends of the curve, so the
    result lags behind neither a trend nor a jump. It is clipped to the range of the values.

    Returns:
        Up to 400 of the steps, and the smoothed values there.

    Example:
        >>> smoothed(range(100), [2.0 * step for step in range(100)])[1][-1]
        198.0
    """
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(x) < 2:
        return x, y
    places = x[np.linspace(0, len(x) - 1, min(len(x), _NUM_DRAWN)).round().astype(int)]
    width = max(_WIDTH * (x[-1] - x[0]), float(np.median(np.diff(x))))
    fitted = np.array([_local_line(x - place, y, width) for place in places.tolist()])
    return places, fitted.clip(y.min(), y.max())


def _local_line(
    distance: npt.NDArray[np.float64], values: npt.NDArray[np.float64], width: float
) -> float:
    """Fit a line to the values, weighted by distance, and evaluate it at distance 0."""
    weight = np.exp(-0.5 * np.square(distance / width))
    weight /= weight.sum()
    centre, mean = float(weight @ distance), float(weight @ values)
    spread = float(weight @ np.square(distance - centre))
    slope = float(weight @ ((distance - centre) * (values - mean))) / spread if spread else 0.0
    return mean - slope * centre


FAINT, GREY, INK = "#d9d9d9", "#8a8a8a", "#333333"
_DPI, _NAME_LENGTH = 150, 36


def check_image(out: Path) -> None:
    """Check that matplotlib can write the image, and create its directory.

    Raises:
        InputError: The directory of the image cannot be created.
        ConfigError: Matplotlib does not support the format.
        MissingExtra: Matplotlib is not installed.
    """
    with requires_extra("plot", "rollouts plot"):
        from matplotlib.figure import Figure
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if out.suffix[1:].lower() not in kinds:
        finding, expected = f"extension {out.suffix!r}", f"one of {', '.join(kinds)}"
        raise ConfigError("image_format", str(out), finding, expected)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        finding = f"its directory cannot be created: {(error.strerror or str(error)).lower()}"
        raise InputError("image_file", str(out), finding) from error


def panels(num: int, num_columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Create a figure with panels, row by row; a bare `Figure` needs no display.

    Args:
        num: Number of panels.
        num_columns: Number of panels per row.
        size: Width and height of a panel in inches.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    num_rows = math.ceil(num / num_columns)
    width, height = size
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(width * num_columns, height * num_rows + 0.5), layout=layout)
    axes = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axis in axes[num:]:
        axis.remove()
    for axis in axes[:num]:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9, colors=INK)
    return figure, axes[:num]


def title(axis: Any, text: str, detail: str = "") -> None:
    """Write the title of a panel, with a detail below it in grey."""
    axis.set_title(text, fontsize=10.5, loc="left", color="black", pad=18 if detail else 6)
    if detail:
        place = {"xy": (0, 1), "xytext": (0, 5), "xycoords": "axes fraction"}
        axis.annotate(detail, **place, textcoords="offset points", fontsize=8.5, color=GREY)


def legend(figure: Any, names: Sequence[str], num_columns: int) -> None:
    """Draw a legend of runs or datasets, with their colors, above the panels.

    Names are shortened only as far as they remain distinct; long ones are listed one per line.
    """
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=color(i), linewidth=2.5) for i in range(len(names))]
    place = {"loc": "outside upper left", "frameon": False, "fontsize": 10}
    labels = list(map(shortened, names))
    if len(set(labels)) < len(set(names)):
        longest, num_columns = max(map(len, names)), 1
        tried = ([shortened(name, n) for name in names] for n in range(_NAME_LENGTH, longest + 1))
        labels = next(short for short in tried if len(set(short)) == len(set(names)))
    figure.legend(lines, labels, ncols=num_columns, **place)


def color(index: int) -> str:
    """Return the color of a run or dataset."""
    return f"C{index % 10}"


def shortened(text: str, length: int = _NAME_LENGTH) -> str:
    """Shorten a name in its middle, and escape `$`, which would start a formula."""
    if len(text) > length:
        text = f"{text[: length // 2 - 1]}…{text[-(length - length // 2) :]}"
    return text.replace("$", r"\$")


def names_of(paths: Sequence[str | Path]) -> list[str]:
    """Name paths by the shortest suffixes that distinguish them."""
    parts = [Path(path).resolve().parts for path in paths]
    for depth in range(1, 1 + max(map(len, parts))):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(paths):
            break
    return names


def save(figure: Any, out: Path) -> None:
    """Write the image; its format follows from the extension."""
    figure.savefig(out, dpi=_DPI, facecolor="white")
