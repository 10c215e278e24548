"""Figures with one panel per quantity, in the common style of `rollouts plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, InputError
from schemas.extras import requires_extra

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
