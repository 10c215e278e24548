"""The `goose` format: sessions of Goose, in its database (sessions.db).

    tables `sessions` (id, parent_session_id, working_dir, ...) and `messages` (session_id, role,
    content_json, metadata_json, ...), with contents such as

    {"type": "text", "text": "..."}
    {"type": "toolRequest", "id": "c", "toolCall": {"value": {"name": "shell", "arguments": {...}}}}
    {"type": "toolResponse", "id": "c", "toolResult": {"value": {"content": [{"type": "text", ...}]}}}

A session is a run; sessions with a parent are its sub-agents. A compaction begins a context: its
summary and the answer that Goose writes after it are hidden from the user (`userVisible` is false).
The log has no reward, no token ids, no system prompt and no tool definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import (
    About,
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import SELF, Contents, account
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.parsing.content import NO_JSON, Part, known
from rollout_io.formats.parsing.jsonl import contained, decode_document
from rollout_io.formats.parsing.notes import note
from rollout_io.formats.parsing.sessions import GROUPS, SUMMARIES, Contexts, Item
from rollout_io.formats.parsing.sqlite import (
    Head,
    columns_in,
    columns_of,
    heads_in,
    opened,
    runs_of,
)
from schemas.errors import InputError, RolloutError

_PARTS = Contents(
    kind="type",
    default="result",
    reads={
        "text": "text",
        "image": "data mimeType",
        "thinking": "thinking",
        "toolRequest": "id toolCall.value.name toolCall.value.arguments",
        "toolResponse": "id toolResult.error",
    },
    leaves={
        "facts about a part": "*/annotations */_meta */metadata toolRequest/toolCall.status "
        "toolResponse/toolResult.status result/isError",
        "why a call could not be read": "toolRequest/toolCall.error",
        "repeats the text": "result/structuredContent",
        "encrypted, for the API": "thinking/signature redactedThinking",
        "shown to the user, not sent": "systemNotification actionRequired toolConfirmationRequest "
        "contextLengthExceeded summarizationRequested",
    },
    inner={"toolResponse/toolResult.value": SELF, "result/content": SELF},
)
CONTENTS = Contents(
    reads={"": "id role metadata.userVisible metadata.agentVisible"},
    leaves={"facts about a message": "created metadata"},
    inner={"content": _PARTS},
)
"""A message, as one object."""

WRITTEN = "answers that the program wrote after a compaction: part of the prompt"
FAILED = "calls that Goose could not read, of which the log has only the error: left out"
REPLACED = "summaries of single calls, which take their place in later prompts: left out"
_TABLES = {"sessions": {"id"}, "messages": {"session_id", "role", "content_json"}}


class _Told(msgspec.Struct, gc=False):
    """What a call, or a result, is: a value or an error."""

    value: Any = None
    error: str | None = None


class _Part(msgspec.Struct, gc=False, rename="camel"):
    type: str
    id: str | None = None
    text: str | None = None
    thinking: str | None = None
    data: Any = None
    mime_type: str | None = None
    tool_call: _Told | None = None
    tool_result: _Told | None = None


class _Metadata(msgspec.Struct, gc=False, rename="camel"):
    user_visible: bool = True
    agent_visible: bool = True


class _Message(msgspec.Struct, gc=False):
    role: str
    content: list[_Part]
    metadata: _Metadata | None = None

    @property
    def is_hidden(self) -> bool:
        """True if the user does not see it."""
        return self.metadata is not None and not self.metadata.user_visible


class _Call(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = NO_JSON


_MESSAGE = msgspec.json.Decoder(_Message)
_CALL = msgspec.json.Decoder(_Call)
_PART_LIST = msgspec.json.Decoder(list[_Part])


def find_sessions(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per session without a parent, with its sub-agents."""
    yield About("groups", GROUPS)
    heads: dict[str, list[Head]] = {}
    for given in inputs:
        progress(given.path.stat().st_size)
        try:
            with contained(given.name):
                for head in heads_in(given, "sessions", "parent_session_id", "working_dir"):
                    heads.setdefault(head.id, [head])
        except RolloutError as error:
            yield Rejected(Place(given.path, given.name, None, 1), error)
    yield from runs_of(heads)


def read_session(run: Run, _: Options) -> Trajectory:
    """Read the contexts of a session and its sub-agents.

    Raises:
        InputError: `record_type`, `json_document`: a message is damaged; `no_calls`: there is no
            answer; `sqlite_file`: the database is damaged.
    """
    steps = []
    for number, place in enumerate(run.places):
        contexts = Contexts()
        _add_contexts(list(_messages(place)), contexts)
        for step in contexts.found:
            step.agent = str(place.part) if number else None
        steps += contexts.found
    if not steps:
        raise InputError("no_calls", run.places[0].where, "the session has no model response")
    return Trajectory(steps=steps)


def _messages(place: Place) -> Iterator[tuple[_Message, str]]:
    with opened(place.path, place.where) as database:
        has = columns_in(database, "messages")
        metadata = "metadata_json" if "metadata_json" in has else "NULL"
        order = "created_timestamp, id" if has >= {"created_timestamp", "id"} else "rowid"
        query = f"SELECT role, content_json, {metadata} FROM messages WHERE session_id = ?"
        rows = database.execute(f"{query} ORDER BY {order}", (str(place.part),)).fetchall()
    for number, (role, content, facts) in enumerate(rows):
        where = f"{place.where}, message {number}"
        fields = b'{"role":%s,"content":%s,"metadata":%s}' % (
            msgspec.json.encode(role if isinstance(role, str) else None),
            _text(content),
            _text(facts) or b"null",
        )
        account(CONTENTS, fields)
        yield decode_document(_MESSAGE, fields, where), where


def _text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b"" if value is None else str(value).encode()


def _add_contexts(messages: Sequence[tuple[_Message, str]], contexts: Contexts) -> None:
    items: list[Item] = []
    for number, (message, where) in enumerate(messages):
        after = messages[number + 1][0] if number + 1 < len(messages) else None
        is_summary = message.is_hidden and message.role == "user"
        if is_summary and after is not None and after.is_hidden and after.role == "assistant":
            contexts.add(items)
            items = []
            note(SUMMARIES)
        elif is_summary and message.metadata is not None and message.metadata.agent_visible:
            note(REPLACED)
            continue
        is_written = message.is_hidden and message.role == "assistant"
        note(WRITTEN, is_written)
        parts = [made for part in message.content if (made := _part(part, where)) is not None]
        said = anthropic.messages_of(message.role, parts, where) if parts else []
        items.append(Item(where, said, where, is_given=is_written))
    contexts.add(items)


def _part(part: _Part, where: str) -> Part | None:
    """Return a part as in Anthropic's API; None if it is not sent."""
    if part.type == "toolRequest" and part.tool_call is not None:
        if part.tool_call.error is not None:
            note(FAILED)
            return None
        call = decode_document(_CALL, msgspec.json.encode(part.tool_call.value), where)
        return Part(type="tool_use", id=part.id, name=call.name, input=call.arguments)
    if part.type == "toolResponse":
        result = part.tool_result or _Told()
        content = result.value.get("content") if isinstance(result.value, Mapping) else result.value
        if result.error is not None or not isinstance(content, list):
            text = result.error if result.error is not None else content
            encoded = msgspec.json.encode(text if isinstance(text, str) else "")
        else:
            inner = decode_document(_PART_LIST, msgspec.json.encode(content), where)
            shown = [each for one in inner if (each := _part(one, where)) is not None]
            encoded = msgspec.json.encode(
                [known({n: v for n, v in msgspec.structs.asdict(p).items() if n in _SENT and v})
                 for p in shown]
            )  # fmt: skip
        return Part(type="tool_result", tool_use_id=part.id, content=msgspec.Raw(encoded))
    if part.type == "image":
        source = {"type": "base64", "media_type": part.mime_type, "data": part.data}
        return Part(type="image", source=known(source))
    return Part(type=part.type, text=part.text, thinking=part.thinking) if _is_sent(part) else None


_SENT = ("type", "text", "source")


def _is_sent(part: _Part) -> bool:
    return part.type in {"text", "thinking"} or part.type not in _PARTS.types


def recognizes(path: Path) -> bool:
    """True for a database with Goose's tables."""
    found = columns_of(path) if path.is_file() else {}
    return all(found.get(name, set()) >= columns for name, columns in _TABLES.items())


ADAPTER = Adapter(
    summary="sessions of Goose: its database (sessions.db); text only",
    recognizes=recognizes,
    find=find_sessions,
    read=read_session,
    is_text=True,
    noun="session",
    is_agent=True,
    contents=CONTENTS,
)
