"""Parts of the screens of audit and blame."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollout_io.cli.output import wants_color
from rollout_io.terminal import console

WIDTH = 100


def section(title: str, body: RenderableType) -> list[RenderableType]:
    """Return a heading and its body."""
    return [Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2))]


def bare_table() -> Table:
    """Return a table without lines."""
    return Table(box=None, pad_edge=False, show_edge=False, header_style="dim")


def drawn(parts: Sequence[RenderableType]) -> str:
    """Draw parts as text for the terminal."""
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    screen = console(width=width, no_color=not wants_color(sys.stdout), highlight=False)
    with screen.capture() as captured:
        screen.print(Group(*parts))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
