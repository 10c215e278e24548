"""Run the Python blocks of a Markdown page in order, and write their output below them.

    python docs/notebook.py examples/afternoon.md

Each `python` block gets a `text` block with its printed output and the value of its last expression,
as in a notebook. `make docs` writes the page; a test compares it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import polars as pl

CELL = re.compile(r"```python\n(.*?)```\n(?:\n```text\n.*?```\n)?", re.DOTALL)


def rendered(page: str) -> str:
    """Return the page with the output of each block."""
    names: dict[str, Any] = {}

    def with_output(cell: re.Match[str]) -> str:
        source = cell.group(1)
        shown = "\n".join(line.rstrip() for line in output(source, names).splitlines())
        below = f"\n```text\n{shown}\n```\n" if shown else ""
        return f"```python\n{source}```\n{below}"

    with pl.Config(tbl_hide_dataframe_shape=True, tbl_rows=20, tbl_width_chars=110):
        return CELL.sub(with_output, page)


def output(source: str, names: dict[str, Any]) -> str:
    """Return the printed output of a block, and the value of its last expression."""
    *body, last = ast.parse(source).body
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "<page>", "exec"), names)
        exec(compile(ast.Interactive([last]), "<page>", "single"), names)
    return printed.getvalue()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rendered(path.read_text()))
