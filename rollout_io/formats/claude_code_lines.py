"""Lines of a Claude Code session: their types, and the text that each adds to the context.

Besides user and assistant messages, these lines have text that the model saw:

- `attachment`: the text that was sent (`rendered`, written by recent versions), the prompt of a
  `queued_command`, which the user sent while the model was working, or a picture.
- `system` with subtype `local_command`: a command that the user ran, and its output.
- `queue-operation`: a queued message with reason `absorbed_mid_turn` was sent; only recent versions
  write both this line and the attachment.
- `content-replacement`: what was sent in place of the results of tools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.dialects.anthropic import BLOCKS, MESSAGE
from rollout_io.formats.engines.sessions import Names
from rollout_io.formats.grammar import ITSELF, inner
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Content,
    Part,
    Parts,
    canonical_json,
    parts_in,
    raw_of,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.records import named_in

SPOKEN = frozenset({"user", "assistant"})
QUEUED = "queued_command"
_SUB_AGENTS = "subagents"
_NUM_CHARS_OF_UUID = 24
"""Uuids in lists of retracted lines have the same first characters as the uuids of the lines."""

_SILENT = "command_permissions deferred_tools_record hook_success prompt_snapshot session_context"
"""Attachments for which versions that log what they send (`rendered`) send nothing."""

_UNSENT = "queued messages of which the log does not tell whether they were sent"
_NOT_RENDERED = "attachments without the text that was sent"
_MICRO = "microcompactions, which remove the results of tools from later prompts"
_SYNTHETIC = "<synthetic>"
_API_ERROR = "API Error"


class _Origin(msgspec.Struct, gc=False, rename="camel"):
    session_id: str | None = None
    message_uuid: str | None = None


class Record(msgspec.Struct, gc=False, rename="camel"):
    """A line of any type."""

    uuid: str | None = None
    parent_uuid: str | None = None
    session_id: str | None = None
    agent_id: str | None = None
    is_sidechain: bool | None = None
    timestamp: Any = None
    forked_from: _Origin | None = None
    request_session_id: str | None = None
    cwd: str | None = None
    git_branch: str | None = None
    version: str | None = None


class Spoken(Record, gc=False, rename="camel"):
    """A message of the user, of a tool, or of the harness."""

    message: Annotated[msgspec.Raw, inner(MESSAGE)] = NO_JSON
    is_compact_summary: bool | None = None
    is_virtual: bool | None = None
    hook_text_lead: str | None = None
    supersedes_uuids: list[str] | None = None
    retracted_message_uuids: list[str] | None = None


class Answer(Spoken, gc=False, rename="camel"):
    """A message of the model, or a part of one."""

    is_api_error_message: bool | None = None
    api_block_index: int | None = None
    request_ref: str | None = None

    @property
    def names(self) -> list[str]:
        """Its content with its uuid, and with that of the line that it was copied from."""
        content = canonical_json(bytes(_CONTENT.decode(self.message).content))
        copied_from = self.forked_from.message_uuid if self.forked_from is not None else None
        return [f"{uuid}\0{content}" for uuid in (self.uuid, copied_from) if uuid]


class System(Record, gc=False, rename="camel"):
    """A line for the user, which may retract messages."""

    retracted_message_uuids: list[str] | None = None


class Kept(msgspec.Struct, gc=False, rename="camel"):
    """Lines that a compaction keeps, after the line `anchor`: a list, or the first and last."""

    anchor_uuid: str | None = None
    uuids: list[str] | None = None
    head_uuid: str | None = None
    tail_uuid: str | None = None


class _Compaction(msgspec.Struct, gc=False, rename="camel"):
    """What a compaction keeps; recent versions list the messages, all name the segment."""

    preserved_messages: Kept | None = None
    preserved_segment: Kept | None = None


class Boundary(System, gc=False, rename="camel"):
    """Where a compaction begins a new context."""

    compact_metadata: _Compaction | None = None

    @property
    def kept(self) -> Kept | None:
        """What it keeps."""
        compaction = self.compact_metadata or _Compaction()
        return compaction.preserved_messages or compaction.preserved_segment


class Trimmed(System, gc=False, rename="camel"):
    """A compaction that removes results of tools."""


class Command(System, gc=False, rename="camel"):
    """A command that the user ran, or its output."""

    content: msgspec.Raw = NO_JSON


class _Rendered(msgspec.Struct, gc=False):
    content: Annotated[Content, inner(BLOCKS)] = None


class _Attachment(msgspec.Struct, gc=False):
    type: str = ""
    prompt: Content = None
    filename: str | None = None
    content: Any = None


class Attached(Record, gc=False):
    """What is sent beside a message; recent versions write the text (`rendered`)."""

    attachment: _Attachment = msgspec.field(default_factory=_Attachment)
    rendered: list[_Rendered] | None = None


class Queued(Record, gc=False):
    """A message that the user sends while the model works."""

    operation: str | None = None
    content: Content = None
    reason: str | None = None


class Fork(Record, gc=False, rename="camel"):
    """The line of the parent that is the last one that a forked sub-agent inherits."""

    parent_session_id: str | None = None
    parent_last_uuid: str | None = None


class _Replacement(msgspec.Struct, gc=False, rename="camel"):
    tool_use_id: str | None = None
    replacement: str | None = None


class Replaced(Record, gc=False):
    """What the model saw in place of the results of tools."""

    replacements: list[_Replacement] | None = None


class Export(msgspec.Struct, gc=False):
    """The lines of a session in one document."""

    loglines: Annotated[list[msgspec.Raw], ITSELF]


class _Content(msgspec.Struct, gc=False):
    content: msgspec.Raw = NO_JSON


_CONTENT = msgspec.json.Decoder(_Content)


class ApiMessage(msgspec.Struct, gc=False):
    """A message of Anthropic's API, or part of one."""

    role: str
    content: str | list[Part]
    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None

    @property
    def is_synthetic(self) -> bool:
        """True if the harness, not the model, wrote it."""
        return self.model == _SYNTHETIC


class _Head(Record, gc=False, rename="camel"):
    type: str | None = None
    parent_session_id: str | None = None


_HEAD = msgspec.json.Decoder(_Head)


def session_above(name: str) -> str | None:
    """Return the session of a sub-agent's file, which is in `SESSION/subagents/`; else None."""
    folders = PurePosixPath(name.replace("\\", "/")).parts[:-1]
    if _SUB_AGENTS not in folders[1:]:
        return None
    return folders[len(folders) - 2 - folders[::-1].index(_SUB_AGENTS)]


def names_in(path: Path, content: bytes) -> Names | None:
    """Return the names in a line; those in files of sub-agents belong to the session of the folder."""
    try:
        head = _HEAD.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        head = _Head(session_id=named_in(content, "sessionId"))
    parent = session_above(str(path)) or head.parent_session_id
    session = parent or head.session_id
    if session is None:
        return None if head.type is not None else Names(str(path))
    is_main = parent is not None or (head.type in SPOKEN and not head.is_sidechain)
    origin = head.forked_from.session_id if head.forked_from is not None else None
    if head.request_session_id not in {None, session}:
        origin = origin or head.request_session_id
    labels = {"cwd": head.cwd, "git_branch": head.git_branch, "version": head.version}
    return Names(
        session,
        parent=None if is_main else "",
        origin=origin,
        labels=labels if session == head.session_id else {},
    )


class Entry(NamedTuple):
    """A line with what the model saw of it.

    Attributes:
        content: Content of its message; None if it adds nothing to the context.
        api: The message of a line of the model.
        is_copied: True if another session has the line too.
        is_side: True for a line of a sub-agent.
    """

    where: str
    record: Record
    content: Parts = None
    api: ApiMessage | None = None
    is_copied: bool = False
    is_side: bool = False

    @property
    def name(self) -> str:
        """Name of the answer that it is a part of."""
        if self.api is not None and self.api.id is not None:
            return f"answer {self.api.id}"
        return self.record.uuid or self.where

    @property
    def is_prompt(self) -> bool:
        """True if a user, not a tool, wrote the line."""
        is_user = isinstance(self.record, Spoken) and self.api is None
        parts = parts_in(self.content)
        return is_user and self.content is not None and all(p.type != "tool_result" for p in parts)

    @property
    def is_compaction(self) -> bool:
        """True for the boundary of a compaction, or a summary."""
        record = self.record
        return isinstance(record, Boundary) or (
            isinstance(record, Spoken) and bool(record.is_compact_summary)
        )


_MESSAGE = msgspec.json.Decoder(ApiMessage)
_TEXT = msgspec.json.Decoder(str)


def entries_of(records: Sequence[tuple[str, Record, bool]]) -> list[Entry]:
    """Return the lines of a session, without the messages that were retracted.

    Args:
        records: Place of each line, the line, and whether another session has it too.

    Raises:
        InputError: `record_type`: the line of a message has no complete one.
    """
    replacements, retracted = dict[str | None, str](), set[str]()
    for _, record, _ in records:
        if isinstance(record, Replaced):
            texts = {one.tool_use_id: one.replacement for one in record.replacements or ()}
            replacements |= {call: text for call, text in texts.items() if text is not None}
        if isinstance(record, Spoken | System):
            retracted |= {*map(_short, record.retracted_message_uuids or ())}
        if isinstance(record, Spoken):
            retracted |= {*map(_short, record.supersedes_uuids or ())}
    entries = list[Entry]()
    for where, record, is_copied in records:
        content, api = _said_in(record, where, replacements)
        is_side = bool(record.is_sidechain) or isinstance(record, Fork)
        is_side |= record.agent_id is not None and not isinstance(record, Spoken)
        is_side |= session_above(where) is not None
        entries.append(Entry(where, record, content, api, is_copied, is_side))
    return [
        entry._replace(content=None, api=None) if _short(entry.record.uuid) in retracted else entry
        for entry in _with_queued(entries, _texts_of(entries))
    ]


def _short(uuid: str | None) -> str:
    """Return the characters of a uuid by which lines are retracted."""
    return (uuid or "")[:_NUM_CHARS_OF_UUID]


def _said_in(
    record: Record, where: str, replacements: Mapping[str | None, str]
) -> tuple[Parts, ApiMessage | None]:
    """Return what a line adds to the context, or None, and the message of a line of the model."""
    match record:
        case Spoken():
            message = decode_line(_MESSAGE, bytes(record.message), f"{where}, message")
            parts = parts_in(message.content)
            if not isinstance(record, Answer):
                lead = [Part(text=record.hook_text_lead)] if record.hook_text_lead else []
                parts_said = [*lead, *(_replaced(part, replacements) for part in parts)]
                return None if record.is_virtual else parts_said, None
            text = "".join(part.text or "" for part in parts)
            is_error = bool(record.is_api_error_message) or text.startswith(_API_ERROR)
            if record.is_virtual or (message.is_synthetic and is_error):
                return None, None
            return parts, message
        case Attached():
            return _attached(record) or None, None
        case Command() if bytes(record.content).startswith(b'"'):
            return [Part(text=decode_line(_TEXT, bytes(record.content), where))], None
    return None, None


def _replaced(part: Part, replacements: Mapping[str | None, str]) -> Part:
    text = replacements.get(part.tool_use_id) if part.type == "tool_result" else None
    if text is None:
        return part
    return msgspec.structs.replace(part, content=msgspec.Raw(msgspec.json.encode(text)))


def _attached(record: Attached) -> list[Part]:
    """Return what is sent of an attachment: its text, a queued message, or a picture."""
    attachment = record.attachment
    if record.rendered is not None:
        return [part for block in record.rendered for part in parts_in(block.content)]
    if attachment.type == QUEUED:
        return parts_in(attachment.prompt)
    file = attachment.content.get("file") if isinstance(attachment.content, dict) else None
    if not isinstance(file, dict) or not isinstance(file.get("base64"), str):
        return []
    call = canonical_json(bytes(raw_of({"file_path": attachment.filename})))
    text = f"Called the Read tool with the following input: {call}"
    source = {"type": "base64", "media_type": file.get("type"), "data": file["base64"]}
    return [
        Part(text=f"<system-reminder>\n{text}\n</system-reminder>"),
        Part("image", source=source),
    ]


def _with_queued(lines: Iterable[Entry], texts: Counter[str]) -> Iterator[Entry]:
    """Yield the lines; a queued message that only the queue shows as sent is one of them."""
    for line in lines:
        record = line.record
        if isinstance(record, Queued) and record.reason == "absorbed_mid_turn":
            text = _text_of(record.content)
            if record.operation == "remove" and text and not texts[text]:
                line = line._replace(content=parts_in(record.content))
            elif record.operation == "remove":
                texts[text] -= 1
        yield line


def _texts_of(lines: Iterable[Entry]) -> Counter[str]:
    """Return the texts of the queued messages that are attachments or messages of the user."""
    texts = Counter[str]()
    for line in lines:
        record = line.record
        if isinstance(record, Attached) and record.attachment.type == QUEUED:
            texts[_text_of(record.attachment.prompt)] += 1
        elif line.is_prompt:
            texts[_text_of(line.content)] += 1
    return texts


def _text_of(content: Parts) -> str:
    """Return the text of a queued message, by which its records are matched."""
    return "\n".join(part.text or "" for part in parts_in(content)).strip()


def note_unsent(lines: Iterable[Entry]) -> None:
    """Count what the model may have seen but the log does not show."""
    lines = [*lines]
    texts, waiting = _texts_of(lines), list[str]()
    is_rendered = any(isinstance(r := line.record, Attached) and r.rendered for line in lines)
    silent = _SILENT.split() if is_rendered else ()
    for line in lines:
        record = line.record
        if isinstance(record, Attached) and line.content is None:
            kind = record.attachment.type
            note(f"{_NOT_RENDERED} ({kind})", bool(kind) and kind not in silent)
        note(_MICRO, isinstance(record, Trimmed))
        if isinstance(record, Queued) and record.operation == "enqueue":
            waiting.append(_text_of(record.content))
        elif isinstance(record, Queued) and waiting and record.operation in {"dequeue", "remove"}:
            text = _text_of(record.content)
            taken = waiting.pop(waiting.index(text) if text in waiting else 0)
            is_unknown = record.operation == "remove" and record.reason is None
            note(_UNSENT, is_unknown and taken not in texts)
