"""The text of a task: the first user message of its first step."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
import pyarrow as pa

from schemas.numpy_arrays import to_frame

MAX_START = 200
"""Characters that the index keeps of a task's text."""


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None


_decoder = msgspec.json.Decoder(list[_Message] | str)


def task_text(messages: str | None) -> str | None:
    """Return the text of the first user message; None if there is none.

    Args:
        messages: Value of the column `messages`: JSON of a list of messages, or of a prompt.

    Example:
        >>> task_text(
        ...     '[{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]'
        ... )
        '2+2?'
    """
    try:
        found = _decoder.decode(messages or "[]")
    except (msgspec.MsgspecError, RecursionError):
        return None
    if isinstance(found, str):
        return found.strip() or None
    texts = (_text(message.content) for message in found if message.role == "user")
    return next((text for text in texts if text), None)


def add_starts(table: pa.Table, starts: dict[str, str | None]) -> None:
    """Add the start of the text of each task that a table introduces, on one line.

    Args:
        table: The next rows of a dataset, with `instance_id`; without `messages`, texts are None.
        starts: Starts by instance_id.
    """
    frame = to_frame({"instance_id": table.column("instance_id"), "step": first_steps(table)})
    begun = frame.with_row_index("row").sort("step", maintain_order=True)
    begun = begun.unique("instance_id", keep="first").sort("row")
    said = table.column("messages") if "messages" in table.column_names else None
    for row, name, _ in begun.rows():
        if name not in starts:
            starts[name] = None if said is None else _start(task_text(said[row].as_py()))


def first_steps(table: pa.Table) -> pa.ChunkedArray:
    """Return the index of each row's first step: a merged row may stand after one that began later."""
    steps = table.column("step_index")
    if "segments" not in table.column_names:
        return steps
    frame = to_frame({"step": steps, "of": table.column("segments")})
    first = pl.col("of").list.first().struct.field("step_index").fill_null(pl.col("step"))
    return frame.select(first.alias("step")).to_arrow().column("step")


def _start(text: str | None) -> str | None:
    if text is None:
        return None
    line = " ".join(text[: 4 * MAX_START].split())
    is_whole = len(line) <= MAX_START and len(text) <= 4 * MAX_START
    return line if is_whole else f"{line[: MAX_START - 1]}\u2026"


def _text(content: Any) -> str:
    """Return the text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content.strip()
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str)).strip()
