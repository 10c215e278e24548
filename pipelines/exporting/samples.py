"""The sampled steps of sequences as samples: their token ids, or messages as other projects write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.formats.exporting import PictureBytes
from rollout_io.formats.parsing.content import calls_in, known
from schemas.columns import JOINED
from schemas.errors import InputError
from schemas.messages import RETOKENIZED, is_answer, media_in
from schemas.numpy_arrays import to_numpy
from schemas.pictures import identities
from schemas.ragged import IntArray, Ragged, list_lengths, offsets_of

_DIGEST_BYTES = 16

Message: TypeAlias = dict[str, Any]
Turn: TypeAlias = tuple[list[Message], Message]
"""The messages before an answer, and the answer."""
COLUMNS = ("token_source", "messages", "response_text", "segments", "tools")
_FROM = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt"}


class Tokens:
    """The tokens of N sequences, and the samples made of them.

    Args:
        table: Rows with full prompts, merged or not.

    Attributes:
        prompts: [N] int32 ids.
        responses: [N] int32 ids.
        masks: [N] bool, the `loss_mask`.
        suffix: Ending of the names of columns with prompts and completions.
    """

    suffix = "_ids"

    def __init__(self, table: pa.Table) -> None:
        self.prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
        self.responses = Ragged.from_arrow(table.column("response_ids"))
        self.masks = Ragged.from_arrow(table.column("loss_mask"))
        self._starts, self._lengths, self._first = _spans(table, self.responses.lengths)

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Return the start and the length, in the response, of each step of a sequence."""
        steps = slice(self._first[row], self._first[row + 1])
        return list(zip(self._starts[steps].tolist(), self._lengths[steps].tolist(), strict=True))

    def trained(self, row: int) -> list[int]:
        """Return the numbers of the steps of a sequence whose tokens all train."""
        mask, spans = self.masks.row(row), enumerate(self.spans(row))
        return [i for i, (at, num) in spans if num and mask[at : at + num].all()]

    def whole(self, row: int) -> dict[str, Any]:
        """Return a sequence as a sample of TRL's SFT trainer: its ids, and 1 where they train."""
        prompt, mask = self.prompts.row(row), self.masks.row(row)
        masks = np.concatenate([np.zeros(len(prompt), np.int8), mask.astype(np.int8)])
        ids = np.concatenate([prompt, self.responses.row(row)])
        return {"input_ids": ids, "assistant_masks": masks}

    def step(self, row: int, step: int) -> tuple[Any, Any, dict[str, Any]]:
        """Return the prompt of a step, which is all tokens before it, its sampled tokens, and {}."""
        start, length = self.spans(row)[step]
        response = self.responses.row(row)
        before = np.concatenate([self.prompts.row(row), response[:start]])
        return before, response[start : start + length].copy(), {}  # keeps no table in memory


def _spans(table: pa.Table, lengths: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return start and length of all steps, and the [N + 1] first step of each row."""
    alone = np.zeros(len(lengths), np.int64), lengths, np.arange(len(lengths) + 1)
    if "segments" not in table.column_names:
        return alone
    column = table.column("segments")
    is_merged = to_numpy(column.is_valid())
    count = np.where(is_merged, list_lengths(column), 1)
    first, is_listed = offsets_of(count), np.repeat(is_merged, count)
    flat = pc.list_flatten(column)
    starts, sizes = np.zeros(int(first[-1]), np.int64), np.repeat(lengths, count)
    starts[is_listed] = to_numpy(pc.struct_field(flat, "start"))
    sizes[is_listed] = to_numpy(pc.struct_field(flat, "length"))
    return starts, sizes, first


def _digest(ids: IntArray) -> blake2b:
    return blake2b(ids.data, digest_size=_DIGEST_BYTES)


def index_steps(table: pa.Table, first_row: int) -> pl.DataFrame:
    """List the steps of sequences.

    Args:
        table: Merged rows of complete trajectories.
        first_row: Number of the first row.

    Returns:
        instance_id, trajectory_id; row (int64) and step (int64, its number in the row); context
        and sampled (16-byte digests of the tokens and pictures before the step, and of the step); trains (true
        if every token of the step trains); place (step_index before merging), num_tokens, and
        is_cut_off (true if the engine stopped at its limit). Time grows with the tokens of the sequences, not with
        the sum of the prompts.

    Example:
        A sequence with prompt [1, 2] and response [3, 9, 4], in which 9 is an observation, has two
        steps: [3] after [1, 2], and [4] after [1, 2, 3, 9].
    """
    tokens, (prompts, responses) = Tokens(table), identities(table)
    rows, steps, contexts, sampled, trains = [], [], [], [], []
    for row in range(table.num_rows):
        response, trained = responses.row(row).astype(np.int64), tokens.trained(row)
        digest, done = _digest(prompts.row(row).astype(np.int64)), 0
        for step, (start, length) in enumerate(tokens.spans(row)):
            digest.update(response[done:start].data)
            ids = _digest(response[start : start + length])
            rows.append(row)
            steps.append(step)
            contexts.append(digest.digest())
            sampled.append(ids.digest())
            trains.append(step in trained)
            done = start
    names = table.select(["instance_id", "trajectory_id"]).take(pa.array(rows, pa.int64()))
    lengths = [length for row in range(table.num_rows) for _, length in tokens.spans(row)]
    reasons = _per_step(table, "stop_reason", rows)
    frame = pl.from_arrow(names)
    assert isinstance(frame, pl.DataFrame)
    return frame.with_columns(
        pl.Series("row", rows, pl.Int64) + first_row,
        pl.Series("step", steps, pl.Int64),
        pl.Series("context", contexts, pl.Binary),
        pl.Series("sampled", sampled, pl.Binary),
        pl.Series("trains", trains, pl.Boolean),
        pl.Series("place", _per_step(table, "step_index", rows), pl.Int64),
        pl.Series("num_tokens", lengths, pl.Int64),
        pl.Series("is_cut_off", [reason == "length" for reason in reasons], pl.Boolean),
    )


def _per_step(table: pa.Table, name: str, rows: list[int]) -> list[Any]:
    """Return the value of each step: its segment's if that has one, else its row's."""
    if name not in table.column_names:
        return [None] * len(rows)
    values, step_values = table.column(name).to_pylist(), list[Any]()
    segments: list[Any] = [None] * len(values)
    if "segments" in table.column_names:
        segments = table.column("segments").to_pylist()
    for row_segments, value in zip(segments, values, strict=True):
        step_values += (
            [value]
            if row_segments is None
            else [segment.get(name, value) for segment in row_segments]
        )
    return step_values


def turns(row: Mapping[str, Any]) -> list[Turn]:
    """Return a turn for each step of a row, in order; none if the text of a step is unknown.

    Args:
        row: The columns `COLUMNS`; each but `token_source` may be absent.
    """
    segments = row.get("segments") or []
    is_merged = bool(segments and segments[0].get(JOINED))
    steps, num = (segments, 1) if is_merged else ([row], len(segments) or 1)
    is_text = row["token_source"] == RETOKENIZED
    listed = [turn for step in steps for turn in _turns(step, num, is_text=is_text)]
    return listed if len(listed) == len(steps) * num else []


def _turns(step: Mapping[str, Any], num: int, *, is_text: bool) -> list[Turn]:
    try:
        messages = json.loads(step.get("messages") or "null")
    except (ValueError, RecursionError):
        return []
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return []
    if is_text:
        answers = [i for i, message in enumerate(messages) if is_answer(message)][-num:]
        return [(messages[:i], messages[i]) for i in answers]
    text = step.get("response_text")
    if not messages or not text:
        return []
    content, calls = calls_in(text)
    answer: Message = {"role": "assistant", "content": content}
    return [(messages, answer | ({"tool_calls": calls} if calls else {}))]


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value.get("tool_calls") or []
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    )


def num_shown(row: Mapping[str, Any]) -> int | None:
    """Return the number of stored pictures in a row's messages that trainers show the model.

    These are the images outside of tool results, of which TRL shows none. None: the messages, or
    the text of an answer, are unknown.
    """
    turns_of_row = turns(row)
    if not turns_of_row:
        return None
    sent = [m for m in turns_of_row[-1][0] if m["role"] != "tool"]
    parts = [part for message in sent for part in media_in(message)]
    return len([part for part in parts if part["type"] == "image" and "blob" in part])


def plain(message: Mapping[str, Any], *, in_parts: bool = False) -> Message:
    """Return a message as chat templates take it: text as one string, arguments as an object.

    Args:
        message: The message.
        in_parts: Whether to return a list of parts instead of the one string, with its pictures.
    """
    content = message.get("content")
    fields = known(dict(message)) | {"content": _parts(content) if in_parts else _text(content)}
    if message.get("tool_calls"):
        fields["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return fields


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(p.get("text", "")) if isinstance(p, dict) else str(p) for p in content)
    return "" if content is None else str(content)


def _parts(content: Any) -> list[Message]:
    parts = content if isinstance(content, list) else [content] if content else []
    return [
        part
        if isinstance(part, dict) and part.get("type") == "image"
        else {"type": "text", "text": _text([part])}
        for part in parts
    ]


def _call(call: Mapping[str, Any]) -> Message:
    function = dict(call["function"])
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):  # an object already, or damaged
        arguments = function.get("arguments")
    return {
        **known(dict(call)),
        "type": "function",
        "function": {**function, "arguments": arguments},
    }


def _trl(messages: Sequence[Message], tools: str | None) -> Message:
    return {"messages": list(messages)} | known({"tools": tools})


def _sharegpt(messages: Sequence[Message], tools: str | None) -> Message:
    """Tool calls and reasoning are in the text, as in Hermes's data."""
    conversation: list[Message] = [
        {"from": _FROM.get(m["role"], m["role"]), "value": _hermes(m)} for m in messages
    ]
    return {"conversations": conversation} | known({"tools": tools})


def _hermes(message: Message) -> str:
    thought = message.get("reasoning_content")
    parts = [f"<think>\n{thought}\n</think>"] if thought else []
    parts += [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        named = {name: call["function"].get(name) for name in ("name", "arguments")}
        parts.append(f"<tool_call>\n{json.dumps(named, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(parts)


def _openai(messages: Sequence[Message], tools: str | None) -> Message:
    """Each call has an id, which its result names; arguments are JSON; `weight` 0: does not train."""
    converted, unanswered, num_calls = list[Message](), list[str](), 0
    for message in messages:
        sent: Message = {"role": message["role"], "content": message["content"]}
        calls = [_numbered(c, num_calls + i) for i, c in enumerate(message.get("tool_calls", ()))]
        if calls:
            num_calls += len(calls)
            unanswered = [call["id"] for call in calls]
            sent["tool_calls"] = calls
        elif sent["role"] == "tool":
            answered = message.get("tool_call_id") or next(iter(unanswered), None)
            unanswered = [name for name in unanswered if name != answered]
            sent |= known({"tool_call_id": answered})
        converted.append(sent | known({"weight": message.get("weight")}))
    return {"messages": converted} | known({"tools": json.loads(tools) if tools else None})


def _numbered(call: Message, number: int) -> Message:
    name, arguments = call["function"].get("name"), call["function"].get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": function}


PICTURED = ("images", "openai")
"""Dialects that have pictures."""
DIALECTS: dict[str, Callable[[Sequence[Message], str | None], Message]] = {
    "trl": _trl,
    "images": _trl,
    "sharegpt": _sharegpt,
    "openai": _openai,
}
"""The function that turns a conversation and its tools (JSON) into a sample, by dialect."""


class Messages:
    """The messages of N sequences, and the samples made of them.

    Args:
        table: Rows, merged or not.
        tokens: Their tokens.
        dialect: One of `DIALECTS`.
        pictures: The pictures of the dataset.
    """

    suffix = ""

    def __init__(
        self, table: pa.Table, tokens: Tokens, dialect: str, pictures: PictureBytes
    ) -> None:
        self._table = table.select([name for name in COLUMNS if name in table.column_names])
        self._tokens, self._dialect, self._pictures = tokens, dialect, pictures
        self._names = table.column("trajectory_id")
        self._row, self._found = -1, list[Turn]()

    def whole(self, row: int) -> Message | None:
        """Return a sequence as a sample: all messages up to its last answer; None if unknown."""
        turns_of_row = self._turns(row)
        if not turns_of_row:
            return None
        before, answer = turns_of_row[-1]
        messages, images = self._sent([*before, answer])
        if self._dialect == "openai":  # an answer that another sequence has, too, trains only there
            ends = {len(earlier) for earlier, _ in turns_of_row}
            for i, message in enumerate(messages):
                if message["role"] == "assistant" and i not in ends:
                    message["weight"] = 0
        return DIALECTS[self._dialect](messages, self._tools(row)) | images

    def step(self, row: int, step: int) -> tuple[Any, Any, Message] | None:
        """Return the messages before a step, its answer in a list, and other fields; None if unknown."""
        turns_of_row = self._turns(row)
        if not turns_of_row:
            return None
        before, answer = turns_of_row[step]
        messages, images = self._sent(before)
        return messages, self._sent([answer])[0], images

    def _sent(self, messages: Sequence[Message]) -> tuple[list[Message], Message]:
        """Return messages with their pictures, or with the field of a sample that has these."""
        if self._dialect == "images":
            parts = [plain(message, in_parts=True) for message in messages]
            apart, images = self._pictures.apart(parts)
            return apart, {"images": images}
        shown = [
            plain(m, in_parts=self._dialect in PICTURED and bool(media_in(m))) for m in messages
        ]
        return self._pictures.in_messages(shown), {}

    def _tools(self, row: int) -> str | None:
        if "tools" not in self._table.column_names:
            return None
        text = self._table.column("tools")[row].as_py()
        try:
            is_known = text is None or isinstance(json.loads(text), list)
        except (TypeError, ValueError, RecursionError):
            is_known = False
        if not is_known:
            where = f"trajectory {self._names[row].as_py()!r}, column 'tools'"
            raise InputError("tools", where, "the value is not a JSON list of tool definitions")
        return None if text is None else str(text)

    def _turns(self, row: int) -> list[Turn]:
        if self._row != row:
            listed = turns(self._table.slice(row, 1).to_pylist()[0])
            is_whole = len(listed) == len(self._tokens.spans(row))
            self._row, self._found = row, listed if is_whole else []
        return self._found
