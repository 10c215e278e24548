"""The messages of a row as other projects write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from pipelines.exporting.steps import Tokens
from rollout_io.formats.exporting import PictureBytes
from rollout_io.formats.parsing.content import calls_in, known
from schemas.columns import JOINED
from schemas.errors import InputError
from schemas.messages import RETOKENIZED, is_answer, media_in

Message: TypeAlias = dict[str, Any]
Turn: TypeAlias = tuple[list[Message], Message]
"""The messages before an answer, and the answer."""

COLUMNS = ("token_source", "messages", "response_text", "segments", "tools")
_FROM = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt"}


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
