"""Gemini's API: contents of parts, system instructions, function declarations.

    {"role": "model", "parts": [{"text": "...", "thought": true}, {"text": "..."},
        {"functionCall": {"name": "ls", "args": {}, "id": "c1"}}]}
    {"role": "user", "parts": [{"functionResponse": {"name": "ls", "response": {"output": "..."}}}]}

Responses of functions become messages of their own, and so does the result of code that the API ran.
A chat message has its thoughts first, then its text, then its calls: contents whose parts are in
another order become several messages. Calls without an id get one from their position, and responses
the id of the first open call with their name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.dialects.responses import add_piece
from rollout_io.formats.grammar import Contents
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    function_tool,
    json_text,
    known,
    raw_of,
    tool_call,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.media import part_of_data
from schemas.errors import InputError

PARTS = Contents(
    reads={
        "": "text thought functionCall.name functionCall.args functionResponse.name "
        "functionResponse.response functionResponse.parts inlineData fileData "
        "executableCode codeExecutionResult"
    },
    leaves={
        "names of calls": "functionCall.id functionResponse.id",
        "encrypted, for the API": "thoughtSignature thought_signature",
        "how a video is sampled": "videoMetadata mediaResolution",
    },
)
"""Parts of contents."""

CONTENT = Contents(reads={"": "role"}, inner={"parts": PARTS})
"""Contents: a message."""

_ROLES = {"model": "assistant", "function": "user"}
_WORD = re.compile(r"_([a-z])")
_SNAKE = frozenset(
    {
        *("function_call", "function_response", "executable_code", "code_execution_result"),
        *("inline_data", "file_data", "mime_type", "file_uri"),
    }
)
MOVED = "results behind a text or a picture of their message, which stand in front of it here"
_CODE = "code_execution"


class _Call(msgspec.Struct, gc=False):
    name: str = ""
    args: msgspec.Raw = NO_JSON
    id: str | None = None


class _Response(msgspec.Struct, gc=False):
    name: str = ""
    response: msgspec.Raw = NO_JSON
    id: str | None = None
    parts: list[dict[str, Any]] | None = None


class Part(msgspec.Struct, gc=False, rename="camel"):
    """A part of contents; usually one field is set."""

    text: str | None = None
    thought: bool | str | None = None
    function_call: _Call | None = None
    function_response: _Response | None = None
    inline_data: dict[str, Any] | None = None
    file_data: dict[str, Any] | None = None
    executable_code: msgspec.Raw = NO_JSON
    code_execution_result: msgspec.Raw = NO_JSON


class _Content(msgspec.Struct, gc=False):
    parts: str | Part | list[Part | str] | None = None
    role: str | None = None


_CONTENT_DECODER = msgspec.json.Decoder(_Content)
_ANSWER_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
Parts = str | Part | list[Part | str] | None


def messages(contents: Iterable[Any], where: str, before: Sequence[Message] = ()) -> list[Message]:
    """Convert contents to messages.

    Example:
        >>> messages([{"role": "model", "parts": [{"text": "Hm.", "thought": True}]}], "a")
        [{'role': 'assistant', 'content': '', 'reasoning_content': 'Hm.'}]
    """
    converted: list[Message] = []
    for i, logged in enumerate(contents):
        place = f"{where}[{i}]"
        content = decode_line(_CONTENT_DECODER, bytes(raw_of(logged)), place)
        role = _ROLES.get(content.role or "user", content.role or "user")
        converted += messages_of(role, content.parts, place, open_calls([*before, *converted]))
    return converted


def camel(value: Any) -> Any:
    """Return contents with the names of Gemini's REST API, which its SDKs write in snake case."""
    if isinstance(value, list):
        return [camel(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    return {
        _WORD.sub(lambda match: match[1].upper(), name) if name in _SNAKE else name: (
            inner if name in {"args", "response"} else camel(inner)
        )
        for name, inner in value.items()
        if inner is not None
    }


def open_calls(messages: Iterable[Message]) -> list[tuple[str, str]]:
    """Return the id and the name of each call that has no result yet."""
    calls: list[tuple[str, str]] = []
    for message in messages:
        named = [
            (c["id"], c["function"]["name"]) for c in message.get("tool_calls", ()) if "id" in c
        ]
        calls += named
        answered = message.get("tool_call_id")
        calls = [call for call in calls if call[0] != answered] if answered else calls
    return calls


def messages_of(
    role: str, parts: Parts, where: str, calls: Iterable[tuple[str, str]] = ()
) -> list[Message]:
    """Convert the parts of one message; the results of functions precede the rest."""
    results: list[Message] = []
    pieces: list[Message] = []
    waiting = list(calls)
    for i, part in enumerate(parts_in(parts)):
        if part.function_response is not None:
            note(MOVED, bool(pieces))
            results.append(_result(part.function_response, waiting, where))
            continue
        if bytes(part.code_execution_result) != b"null":
            text = json_text(part.code_execution_result, where)
            pieces.append({"role": "tool", "content": text, "tool_call_id": _CODE})
            continue
        piece = {"role": role, "content": ""} | _piece(part, f"{where}.parts[{i}]")
        if len(piece) > 2 or piece["content"]:
            add_piece(pieces, piece, is_open=bool(pieces) and pieces[-1]["role"] == role)
    return [*results, *(pieces if pieces or results else [{"role": role, "content": ""}])]


def _piece(part: Part, where: str) -> Message:
    """Return what a part adds to a message."""
    if part.function_call is not None:
        call = part.function_call
        call_id = call.id or f"call_{where.rpartition('[')[2].rstrip(']')}_{call.name}"
        return {"tool_calls": [tool_call(call_id, call.name, json_text(call.args, where))]}
    if bytes(part.executable_code) != b"null":
        return {"tool_calls": [tool_call(_CODE, _CODE, json_text(part.executable_code, where))]}
    data = part.inline_data or part.file_data
    if data is not None:
        return {"content": [part_of_data(data) or {"type": "data"}]}
    if isinstance(part.thought, str) or part.thought:
        thought = part.thought if isinstance(part.thought, str) else part.text or ""
        return {"reasoning_content": thought} if thought else {}
    return {"content": part.text or ""}


def joined_content(contents: Iterable[str | list[Message]]) -> str | list[Message]:
    """Join contents with newlines; with parts that are not text, the result is a list of parts."""
    listed = [content for content in contents if content]
    if all(isinstance(content, str) for content in listed):
        return "\n".join(content for content in listed if isinstance(content, str))
    parts: list[Message] = []
    for content in listed:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def parts_in(content: Parts) -> list[Part]:
    """Return the parts of contents; a string is one part, None has no parts."""
    if content is None or content == "":
        return []
    listed = content if isinstance(content, list) else [content]
    return [Part(text=part) if isinstance(part, str) else part for part in listed]


def _result(response: _Response, waiting: list[tuple[str, str]], where: str) -> Message:
    known_call = next((c for c in waiting if response.id == c[0]), None)
    call = known_call or next(
        (c for c in waiting if not response.id and c[1] == response.name), None
    )
    if call is not None:
        waiting.remove(call)
    content = result_content(response, where)
    call_id = response.id or (call and call[0])
    return known({"role": "tool", "content": content, "tool_call_id": call_id})


def result_content(response: _Response, where: str) -> str | list[Message]:
    """Return the text of a function's response; with its pictures, the result is a list of parts."""
    text: str | list[Message] = answer_text(response.response, where)
    data = [p.get("inlineData") or p.get("fileData") or {} for p in response.parts or ()]
    media = [part_of_data(fields) for fields in data]
    return joined_content([text, [part for part in media if part is not None]])


def answer_text(raw: msgspec.Raw, where: str) -> str:
    """Return the output or the error of a function's response; a response with more as JSON."""
    try:
        fields = _ANSWER_DECODER.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        return json_text(raw, where)
    said = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    is_text = len(said) == 1 and said.keys() <= {"output", "error"}
    return json_text(next(iter(said.values())) if is_text else raw, where)


def system_prompt(instruction: Any, where: str) -> str:
    """Return the text of a request's `systemInstruction`: a string, or contents."""
    if instruction is None or isinstance(instruction, str):
        return instruction or ""
    content = decode_line(_CONTENT_DECODER, bytes(raw_of(instruction)), where)
    return "\n".join(part.text for part in parts_in(content.parts) if part.text)


def tools(declarations: Any) -> list[Message] | None:
    """Return function declarations in OpenAI's format; None if there are none.

    Tools of the API, such as `googleSearch`, are kept by their name.
    """
    converted: list[Message] = []
    for tool in declarations if isinstance(declarations, list) else ():
        for name, value in tool.items() if isinstance(tool, Mapping) else ():
            if name in {"functionDeclarations", "function_declarations"}:
                declared = value if value is not None else []
                if not isinstance(declared, list) or not all(
                    isinstance(one, Mapping) for one in declared
                ):
                    finding = f"a value of type {type(value).__name__}"
                    raise InputError("record_type", name, finding, "a list of objects")
                for one in (one for one in declared if "name" in one):
                    parameters = one.get("parameters") or one.get("parametersJsonSchema")
                    converted.append(function_tool(one["name"], one.get("description"), parameters))
            else:
                converted.append(function_tool(name))
    return converted or None
