"""Columns of the viewer's index: short values of rows, starts of tasks, and what logs have of text.

Of rows, these are scalars, with long texts cut, and numbers of tokens; of logs, counts of text in place
of counts of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.frames import as_lazy
from pipelines.statistics.summary import row_lengths
from pipelines.turns import lanes_of
from rollout_io.dataset.trajectory_facts import CALLED, count_calls, task_start, tool_calls
from schemas.messages import RETOKENIZED
from schemas.numpy_arrays import to_frame
from schemas.ragged import list_lengths
from schemas.types import PREFIX_TYPES, is_string, with_absent

MAX_TEXT = 200
"""Characters that the index keeps of a longer text, followed by its length and a hash."""

LENGTHS = frozenset(f"num tokens: {name}" for name in ("prompt", "response", "sampled", "trained"))
"""Columns that the index adds to rows; the dataset's columns with these names are not kept."""
_NOT_KEPT = frozenset({"messages", "response_text", "source", "sampling_extra"})

FACTS = {
    "task_text": pl.String,
    "num_turns": pl.Int32,
    "num_messages": pl.Int32,
    "num_characters": pl.Int64,
    "num_tool_calls": pl.Int32,
    "num_tool_errors": pl.Int32,
    "num_images": pl.Int32,
    "num_agents": pl.Int32,
    "format": pl.String,
    "file": pl.String,
    "modified": pl.String,
}
"""Columns of the table of trajectories that only logs have; conditions may use them."""
TASK_CHARS = 160


def kind_of(kind: pa.DataType) -> str:
    """Classify the type of a column for the page: number, text, bool or other."""
    types = pa.types
    if types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind) or types.is_floating(kind):
        return "number"
    return "text" if is_string(kind) else "other"


def kept_columns(schema: pa.Schema) -> list[str]:
    """List the columns that the index keeps for each row: scalars, except long texts."""
    left_out = {*_NOT_KEPT, *PREFIX_TYPES, *LENGTHS}
    return [f.name for f in schema if kind_of(f.type) != "other" and f.name not in left_out]


def short_rows(table: pa.Table, names: list[str], cut: set[str]) -> pl.DataFrame:
    """Return the columns `names` of a table's rows, and numbers of tokens; add cut columns to `cut`."""
    rows = to_frame({name: table.column(name) for name in names})
    rows = rows.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    for name in set(names) - {"instance_id", "trajectory_id"}:
        column = rows[name]
        if column.dtype == pl.String and (column.str.len_bytes() > MAX_TEXT).any():
            shown = cut_texts(column)
            if not shown.equals(column, null_equal=True):
                cut.add(name)
                rows = rows.with_columns(shown.alias(name))
    lengths = row_lengths(table).select(
        pl.col("prompt", "response", "sampled", "trained")
        .cast(pl.Int32)
        .name.prefix("num tokens: ")
    )
    return rows.hstack(lengths)


def cut_texts(texts: pl.Series) -> pl.Series:
    """Truncate long texts; the appended length and hash distinguish texts that begin alike."""
    length, number = texts.str.len_chars(), texts.hash(0) % 10**12
    marks = pl.format(
        "{}\u2026 [cut: {} characters, #{}]", texts.str.head(MAX_TEXT), length, number
    )
    return pl.select(pl.when(length > MAX_TEXT).then(marks).otherwise(texts)).to_series()


def add_starts(table: pa.Table, starts: dict[str, str | None]) -> None:
    """Add the start of the text of each task that a table introduces, on one line.

    Args:
        table: The next rows of a dataset, with `instance_id`; without `messages`, texts are None.
        starts: Starts by instance_id.
    """
    frame = to_frame({"instance_id": table.column("instance_id"), "step": first_steps(table)})
    begun = frame.with_row_index("row").sort("step", maintain_order=True)
    begun = begun.unique("instance_id", keep="first").sort("row")
    messages = table.column("messages") if "messages" in table.column_names else None
    for row, name, _ in begun.rows():
        if name not in starts:
            starts[name] = None if messages is None else task_start(messages[row].as_py())


def first_steps(table: pa.Table) -> pa.ChunkedArray:
    """Return the index of each row's first step: a merged row may stand after one that began later."""
    steps = table.column("step_index")
    if "segments" not in table.column_names:
        return steps
    frame = to_frame({"step": steps, "of": table.column("segments")})
    first = pl.col("of").list.first().struct.field("step_index").fill_null(pl.col("step"))
    return frame.select(first.alias("step")).to_arrow().column("step")


def facts_of(table: pa.Table) -> pl.DataFrame:
    """Count the text of each trajectory of a table, as the conversation shows it.

    Repeated messages count once. Characters are null if a trajectory has tokens but no text.

    Returns:
        One line per trajectory: `trajectory_id` and the columns of `FACTS` that its rows determine.
    """
    names = table.column("trajectory_id")
    lines = [
        {"trajectory_id": name, **_facts(table.filter(pc.equal(names, name)))}
        for name in pc.unique(names).to_pylist()
    ]
    facts = pl.DataFrame(lines, {"trajectory_id": pl.String, **FACTS}, orient="row")
    return facts.update(_tool_counts(table), on="trajectory_id")


def _tool_counts(table: pa.Table) -> pl.DataFrame:
    frame = with_absent(as_lazy(table), CALLED)
    calls = frame.select("trajectory_id", calls=tool_calls()).group_by("trajectory_id")
    num_errors = count_calls(pl.col("calls"), failed=True)
    return calls.agg(
        num_tool_calls=count_calls(pl.col("calls")), num_tool_errors=num_errors
    ).collect()


def _facts(rows: pa.Table) -> dict[str, Any]:
    lanes = lanes_of(rows)
    turns = [turn for lane in lanes.values() for turn in lane if turn["is_new"]]
    logged = [turn for turn in turns if turn["from"] == "messages"]
    parts = [part for turn in logged for part in turn["parts"]]
    has_answers = logged or any(list_lengths(rows.column("response_ids")))
    question = next((turn for turn in logged if turn["role"] in {"user", "prompt"}), None)
    return {
        "task_text": None if question is None else _start(question["parts"]),
        "num_turns": _num_answers(rows) if has_answers else 0,
        "num_messages": len(logged) if logged else None,
        "num_characters": sum(len(part["text"]) for part in parts) if logged else None,
        "num_images": sum(part["type"] == "image" for part in parts),
        "num_agents": len(lanes),
    }


def text_of(rows: pa.Table) -> bytes:
    """Return all text of a trajectory as JSON, each message once; `escaped` text can be found in it."""
    texts: dict[bytes, None] = {}
    names = [name for name in ("messages", "response_text") if name in rows.column_names]
    for row in rows.select(names).to_pylist():
        try:
            sent = msgspec.json.decode(row.get("messages") or "null")
        except (msgspec.DecodeError, RecursionError):
            sent = row["messages"]
        for message in sent if isinstance(sent, list) else [sent]:
            texts[msgspec.json.encode(message)] = None
        texts[msgspec.json.encode(row.get("response_text"))] = None
    return b"\n".join(texts)


def escaped(text: str) -> bytes:
    """Encode a text as part of a JSON string."""
    return msgspec.json.encode(text)[1:-1]


def placed(facts: pl.DataFrame, places: Mapping[str, tuple[str, Path]], root: Path) -> pl.DataFrame:
    """Add the format and the file of each trajectory.

    Args:
        facts: See `facts_of`.
        places: Format and first file of each trajectory, by trajectory_id.
        root: Directory to which files are relative.
    """
    found_places = [places[name] for name in facts["trajectory_id"]]
    files = [path for _, path in found_places]
    return facts.with_columns(
        format=pl.Series([name or None for name, _ in found_places], dtype=pl.String),
        file=pl.Series([_relative(path, root) for path in files], dtype=pl.String),
        modified=pl.Series([_modified(path) for path in files], dtype=pl.String),
    )


def _num_answers(rows: pa.Table) -> int:
    """Count the answers: one per row, or per segment of a conversation."""
    num_rows: int = rows.num_rows
    if "segments" not in rows.column_names:
        return num_rows
    sources: list[str] = rows.column("token_source").to_pylist()
    segments: list[list[Any] | None] = rows.column("segments").to_pylist()
    counts = (
        len(spans) if source == RETOKENIZED and spans is not None else 1
        for source, spans in zip(sources, segments, strict=True)
    )
    return sum(counts)


def _start(parts: list[dict[str, Any]]) -> str | None:
    text = " ".join(
        " ".join(p["text"][: 4 * TASK_CHARS] for p in parts if p["type"] == "text").split()
    )
    return (text if len(text) <= TASK_CHARS else f"{text[: TASK_CHARS - 1]}…") or None


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def _modified(path: Path) -> str | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except OSError:
        return None
