"""Facts about trajectories, from their rows: returns, steps, tasks, called tools; digests of rows.

Returns and steps are the same for rows that were merged. What the messages say: a call repeats the messages
of earlier calls, so each tool call has a key: counting distinct keys over the rows of a trajectory counts
every call once. A digest changes with any value, its place, and the other values of its row.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.reader import read_metadata
from rollout_io.dataset.storage import PathLike
from schemas.columns import JOINED
from schemas.messages import RETOKENIZED
from schemas.metadata import Outcome
from schemas.numpy_arrays import filled, to_numpy
from schemas.ragged import list_lengths, offsets_of

MAX_TASK_CHARS = 200
"""Characters of a task's text that `task_text` keeps."""

TOOL_CALLS = pl.List(pl.Struct({"key": pl.UInt64(), "name": pl.String(), "failed": pl.Boolean()}))
"""Type of the values of `tool_calls`."""

TAGGED_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>\s*", re.DOTALL)
"""A tool call in the text of a response, as Hermes and Qwen write it: JSON between tags."""

CALLED = ("messages", "agent", "response_text", "token_source", "is_last_step")
"""Columns that `tool_calls` reads."""

# Harnesses' own words: "Exit code 1" (Claude Code) first, or a line of its own (Codex, Gemini CLI).
_FAILS = re.compile(
    r"[\s<\[\"]*(?:(?:error|traceback|command failed|exception|tool_use_error|tool_error)\b"
    r"|exit[ _]code\W*[1-9])",
    re.IGNORECASE,
)
_FAILED_LINE = re.compile(r"^(?:Process exited with code|Exit Code:) -?[1-9]\d*$", re.MULTILINE)
_EXIT_CODES = ("exit_code", "exitCode", "returncode")
_RESULT_ROLES = frozenset({"tool", "function"})


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None


_task_decoder = msgspec.json.Decoder(list[_Message] | str)
_decoder = msgspec.json.Decoder()


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
        decoded = _task_decoder.decode(messages or "[]")
    except (msgspec.MsgspecError, RecursionError):
        return None
    if isinstance(decoded, str):
        return decoded.strip() or None
    texts = (_text(message.content).strip() for message in decoded if message.role == "user")
    return next((text for text in texts if text), None)


def task_start(messages: str | None) -> str | None:
    """Return the start of `task_text` on one line, of at most `MAX_TASK_CHARS` characters."""
    text = task_text(messages)
    if text is None:
        return None
    line = " ".join(text[: 4 * MAX_TASK_CHARS].split())
    is_whole = len(line) <= MAX_TASK_CHARS and len(text) <= 4 * MAX_TASK_CHARS
    return line if is_whole else f"{line[: MAX_TASK_CHARS - 1]}\u2026"


def tool_calls() -> pl.Expr:
    """Select the tool calls in the messages of each row: their key, name, and whether they failed.

    The calls of a last step's response follow those of its messages; the responses of other steps
    are messages of the next.

    A call failed if its result did (`has_failed`); `failed` is null without a result.

    Returns:
        list<struct<key: uint64, name, failed: bool>> per row; null where `messages` is null, no
        JSON, or text without roles.
    """
    return pl.struct(CALLED).map_batches(
        _calls_of_rows, return_dtype=TOOL_CALLS, is_elementwise=True
    )


def count_calls(calls: pl.Expr, name: str | None = None, *, failed: bool = False) -> pl.Expr:
    """Count the distinct calls of a trajectory in its rows' `tool_calls`.

    Args:
        calls: The rows' `tool_calls`.
        name: Count only calls of this tool.
        failed: Count only those that failed.

    Returns:
        A count; null if no row of the trajectory has messages, and of failed ones if there are calls,
        but no result of any.
    """
    one = calls.drop_nulls().explode()
    chosen = one.struct.field("key").is_not_null()
    if name is not None:
        chosen &= one.struct.field("name") == name
    is_known = calls.is_not_null().any()
    if failed:
        has_failed = one.struct.field("failed")
        is_known &= ~chosen.any() | (chosen & has_failed.is_not_null()).any()
        chosen &= has_failed
    num: pl.Expr = one.struct.field("key").filter(chosen).n_unique()
    return pl.when(is_known).then(num)


def count_results(calls: pl.Expr) -> pl.Expr:
    """Count the distinct calls of a trajectory that have a result."""
    one = calls.drop_nulls().explode()
    has_result = one.struct.field("failed").is_not_null()
    num: pl.Expr = one.struct.field("key").filter(has_result).n_unique()
    return num


def _calls_of_rows(rows: pl.Series) -> pl.Series:
    return pl.Series(rows.name, [_calls_of(row) for row in rows], TOOL_CALLS)


def _calls_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    text = row["messages"]
    if text is None or text.startswith('"'):  # null, or a conversation as text without roles
        return None
    is_said = row["is_last_step"] and row["token_source"] != RETOKENIZED
    response = row["response_text"] if is_said else None
    if '"tool' not in text and '"function' not in text and not response:
        return []
    try:
        decoded = _decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
    messages = [m for m in decoded if isinstance(m, dict)] if isinstance(decoded, list) else []
    if response:
        messages.append({"role": "assistant", "tool_calls": calls_in_text(response)})
    by_id: dict[str, dict[str, Any]] = {}
    calls: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        for index, (call_id, name, arguments) in enumerate(_called(message)):
            # Without an id, equal calls are told apart by their position.
            place = (position, index) if call_id is None else call_id
            key = hash((row["agent"], place, name, str(arguments))) % (1 << 64)
            calls.append({"key": key, "name": name, "failed": None})
            by_id[str(call_id)] = calls[-1]
        for call_id, has_failed in _results(message):
            unanswered = next((call for call in calls if call["failed"] is None), None)
            call = unanswered if call_id is None else by_id.get(str(call_id))
            if call is not None:
                call["failed"] = has_failed
    return calls


def has_failed(result: Mapping[str, Any]) -> bool:
    """True if a tool's result says that the call failed: the one definition of a failed call.

    The result is marked as an error (`is_error`, `status`); or it is a JSON object with an `error`,
    an exit code (`exit_code`, `exitCode`, `returncode`) other than 0, or a false `success` or `ok`;
    or it begins with the word "Error", "Traceback", "Command failed", "Exception" or "Exit code" with
    another number than 0; or it has a line "Exit Code: 1" or "Process exited with code 1".

    Args:
        result: A message or part of a message, of any API.

    Example:
        >>> has_failed({"content": "Error: no such file"}), has_failed({"content": "0 errors"})
        (True, False)
        >>> has_failed({"content": "Exit code 1"}), has_failed({"content": "Exit code: 0"})
        (True, False)
    """
    if result.get("is_error") is True or result.get("status") == "error":
        return True
    text = _text(result.get("content"))
    fields = _json_or_text(text) if text.lstrip()[:1] == "{" else None
    if isinstance(fields, dict):
        is_refused = fields.get("success") is False or fields.get("ok") is False
        return bool(fields.get("error") or is_refused or any(map(fields.get, _EXIT_CODES)))
    return (_FAILS.match(text) or _FAILED_LINE.search(text)) is not None


def calls_in_text(response: str) -> list[Any]:
    """Return the tool calls in a response's text: between tags, or as a JSON list on its last line.

    Example:
        >>> calls_in_text('<tool_call>{"name": "ls", "arguments": {}}</tool_call>')
        [{'name': 'ls', 'arguments': {}}]
    """
    return [*map(_json_or_text, TAGGED_CALL.findall(response)), *split_calls(response)[1]]


def split_calls(response: str) -> tuple[str, list[Any]]:
    """Split a response into its text and the JSON list of tool calls on its last line."""
    head, _, tail = response.rpartition("\n")
    calls = _json_or_text(tail) if tail.startswith("[{") else None
    return (head, calls) if isinstance(calls, list) else (response, [])


def _json_or_text(text: str) -> Any:
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text


def _called(message: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the id, name and arguments of each call in a message of any API."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield call.get("id"), function["name"], function.get("arguments")
    for piece in _pieces(message):
        if piece.get("type") == "tool_use" and isinstance(piece.get("name"), str):
            yield piece.get("id"), piece["name"], piece.get("input")


def _results(message: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Yield the call's id and whether it failed, for each result in a message."""
    if message.get("role") in _RESULT_ROLES:
        yield message.get("tool_call_id"), has_failed(message)
    for piece in _pieces(message):
        if piece.get("type") == "tool_result":
            yield piece.get("tool_use_id"), has_failed(piece)


def _pieces(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    return (p for p in content if isinstance(p, dict)) if isinstance(content, list) else iter(())


def _text(content: Any) -> str:
    """Return the text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


Fold = Callable[[pl.Expr], pl.Expr]


def dataset_outcome(path: PathLike, chosen: Outcome | None = None) -> Outcome:
    """Choose how returns are computed: `chosen`, else the dataset's metadata, else `last`."""
    return chosen or read_metadata(path).outcome or "last"


def has_segment(frame: pl.LazyFrame, name: str) -> bool:
    """True if the frame has a `segments` column with this field."""
    kind = frame.collect_schema().get("segments")
    inner = kind.inner if isinstance(kind, pl.List) else None
    return isinstance(inner, pl.Struct) and name in {field.name for field in inner.fields}


def joined(frame: pl.LazyFrame) -> pl.Expr:
    """Build an expression that is true if a row was merged from several steps."""
    if not has_segment(frame, JOINED):
        return pl.lit(value=False)
    return pl.col("segments").list.first().struct.field(JOINED).fill_null(value=False)


def joined_steps(frame: pl.LazyFrame) -> pl.Expr:
    """Select the {start, length} of each step of a merged row; null if a row is one step."""
    spans = pl.List(pl.Struct({"start": pl.Int32(), "length": pl.Int32()}))
    if not has_segment(frame, "start"):
        return pl.lit(None, dtype=spans)
    fields = (pl.element().struct.field(name) for name in ("start", "length"))
    return pl.when(joined(frame)).then(pl.col("segments").list.eval(pl.struct(fields)).cast(spans))


def num_steps(frame: pl.LazyFrame) -> pl.Expr:
    """Count the steps of each row: those in its `segments`, merged or of a log's turns; else 1."""
    if not has_segment(frame, "step_index"):
        return pl.lit(1, pl.Int64)
    numbers = pl.col("segments").list.eval(pl.element().struct.field("step_index"))
    return numbers.list.n_unique().cast(pl.Int64).clip(lower_bound=1).fill_null(1)


def num_sampled_tokens(frame: pl.LazyFrame) -> pl.Expr:
    """Count the sampled tokens of each row's response: of a merged row, those in its `segments`."""
    whole = pl.col("response_ids").list.len().cast(pl.Int64)
    if not has_segment(frame, "length"):
        return whole
    lengths = pl.col("segments").list.eval(pl.element().struct.field("length")).list.sum()
    return pl.when(pl.col("segments").is_not_null()).then(lengths).otherwise(whole)


def earned_reward(frame: pl.LazyFrame, outcome: Outcome) -> pl.Expr:
    """Select the part of each row's reward that counts in the return.

    For `last`, that is the reward of the row's last step; for `sum`, the row's reward.
    """
    has_reward = "reward" in frame.collect_schema()
    reward = pl.col("reward") if has_reward else pl.lit(None, pl.Float64)
    if outcome == "sum" or not has_segment(frame, "reward"):
        return reward
    earned = pl.col("segments").list.last().struct.field("reward")
    return pl.when(joined(frame)).then(earned).otherwise(reward)


def metric_of(frame: pl.LazyFrame, name: str) -> pl.Expr:
    """Select an environment metric of each row; of a merged row, that of the last step with it."""
    if "metrics" not in frame.collect_schema():
        return pl.lit(None, pl.Float64)
    entries = pl.col("metrics")
    if has_segment(frame, "metrics"):
        inner = pl.col("segments").list.eval(pl.element().struct.field("metrics").list.explode())
        entries = pl.when(joined(frame)).then(inner).otherwise(entries)
    field = pl.element().struct.field
    return entries.list.eval(field("value").filter(field("key") == name)).list.last()


def fold_return(earned: pl.Expr, outcome: Outcome) -> pl.Expr:
    """Combine `earned_reward` of a trajectory's rows into its return; null if a part is null."""
    if outcome == "last":
        return earned.last()
    return pl.when(earned.is_null().any()).then(None).otherwise(earned.sum()).alias("return")


Digests = npt.NDArray[np.uint64]
_ZERO = np.uint64(0)
_PIECE_BYTES = 1 << 19
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


STORED = ("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", "rewards")
"""Columns of `stored_digests`: what a run or an audit reads of a row, as it is stored."""


def row_digest(columns: Iterable[str]) -> pl.Expr:
    """Build an expression that hashes the given columns of each row, int64.

    Digests are the same on all machines and versions. Columns without a value do not change them.
    """
    return pl.struct(sorted(columns)).map_batches(
        lambda rows: pl.Series(_in_pieces(rows.to_arrow()).view(np.int64)),
        return_dtype=pl.Int64,
        is_elementwise=True,
    )


def _in_pieces(rows: pa.StructArray) -> Digests:
    """Hash a few rows at a time: an intermediate array has eight bytes a token, and there are ten."""
    size = max(1, len(rows) * _PIECE_BYTES // max(rows.nbytes, 1))
    pieces = [_digests(rows.slice(begin, size)) for begin in range(0, len(rows), size)]
    return np.concatenate([np.empty(0, np.uint64), *pieces])


def with_stored_digest(frame: pl.LazyFrame) -> pl.LazyFrame:
    """Add a column `row_digest`: the digest of the columns `STORED`."""
    present = frame.collect_schema()
    return frame.with_columns(row_digest=row_digest(name for name in STORED if name in present))


def _digests(array: pa.Array) -> Digests:
    kind = array.type
    if pa.types.is_struct(kind):
        digests = np.zeros(len(array), np.uint64)
        for number, field in enumerate(kind):
            name = np.array([zlib.crc32(field.name.encode())], np.uint64)
            values = array.field(number)
            digests += np.where(to_numpy(values.is_valid()), _mixed(_digests(values), name), _ZERO)
    elif pa.types.is_nested(kind):
        lengths = list_lengths(array)
        offsets = offsets_of(lengths)
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        values = _mixed(_digests(pc.list_flatten(array)), place.astype(np.uint64))
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values)])
        digests = _mixed(total[offsets[1:]] - total[offsets[:-1]], lengths.astype(np.uint64))
    elif pa.types.is_floating(kind):
        digests = filled(array, 0).astype(np.float64).view(np.uint64)
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        digests = filled(array, 0).astype(np.int64).view(np.uint64)
    else:
        is_binary = pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind)
        texts = array.cast(pa.binary() if is_binary else pa.large_string()).dictionary_encode()
        values = texts.dictionary.cast(pa.large_binary()).to_pylist()
        hashes = [hashlib.sha256(value).digest()[:8] for value in values]
        digests = np.frombuffer(b"\0" * 8 + b"".join(hashes), "<u8")[filled(texts.indices, -1) + 1]
    digests[~to_numpy(array.is_valid())] = _FACTORS[1]
    return digests


def _mixed(values: Digests, with_: Digests) -> Digests:
    bits = values + (with_ + np.uint64(1)) * _FACTORS[0]
    bits = (bits ^ (bits >> np.uint64(30))) * _FACTORS[1]
    mixed: Digests = bits ^ (bits >> np.uint64(27))
    return mixed
