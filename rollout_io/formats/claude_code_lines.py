"""Lines of a Claude Code session, with the text that each adds to the context of the model.

Besides user and assistant messages, these lines have text that the model saw:

- `attachment`: the text that was sent (`rendered`, written by recent versions), or the prompt of a
  `queued_command`, which the user sent while the model was working.
- `system` with subtype `local_command`: a command that the user ran, and its output.
- `queue-operation`: a queued message with reason `absorbed_mid_turn` was sent; only recent versions
  write both this line and the attachment.
- `content-replacement`: what was sent in place of the results of tools.
- `api-request-shape`: the system prompt and the tools of the requests that follow
  (`claude_code_requests` reads the requests themselves).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout_io.formats.dialects.anthropic import tools
from rollout_io.formats.parsing.content import NO_JSON, Content, Part, Parts, parts_in
from rollout_io.formats.parsing.jsonl import decode_line

SPOKEN = frozenset({"user", "assistant"})
QUEUED = "queued_command"
_SYNTHETIC = "<synthetic>"
_API_ERROR = "API Error"
_BOUNDARY = "compact_boundary"
_NUM_CHARS_OF_UUID = 24
"""Uuids in lists of retracted lines have the same first characters as the uuids of the lines."""


class Message(msgspec.Struct, gc=False):
    """A message of Anthropic's API, or part of one."""

    role: str
    content: str | list[Part]
    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None


class Kept(msgspec.Struct, gc=False):
    """Lines that a compaction keeps, after the line `anchor`: a list, or the first and last."""

    anchor: str | None = msgspec.field(name="anchorUuid", default=None)
    uuids: list[str] | None = None
    head: str | None = msgspec.field(name="headUuid", default=None)
    tail: str | None = msgspec.field(name="tailUuid", default=None)


class Compaction(msgspec.Struct, gc=False):
    """What a compaction keeps; recent versions list the messages, all name the segment."""

    messages: Kept | None = msgspec.field(name="preservedMessages", default=None)
    segment: Kept | None = msgspec.field(name="preservedSegment", default=None)


class _Rendered(msgspec.Struct, gc=False):
    content: Content = None


class _Attachment(msgspec.Struct, gc=False):
    type: str = ""
    prompt: Content = None
    source_uuid: str | None = None


class Replacement(msgspec.Struct, gc=False):
    """What the model saw in place of the result of a tool."""

    tool_use_id: str | None = msgspec.field(name="toolUseId", default=None)
    replacement: str | None = None


class _Head(msgspec.Struct, gc=False):
    type: str
    session_id: str | None = msgspec.field(name="sessionId", default=None)
    uuid: str | None = None
    parent: str | None = msgspec.field(name="parentUuid", default=None)
    is_sidechain: bool | None = msgspec.field(name="isSidechain", default=None)
    agent_id: str | None = msgspec.field(name="agentId", default=None)
    timestamp: Any = None


class _Spoken(_Head, gc=False):
    is_summary: bool | None = msgspec.field(name="isCompactSummary", default=None)
    is_error: bool | None = msgspec.field(name="isApiErrorMessage", default=None)
    is_virtual: bool | None = msgspec.field(name="isVirtual", default=None)
    index: int | None = msgspec.field(name="apiBlockIndex", default=None)
    request: str | None = msgspec.field(name="requestRef", default=None)
    retracted: list[str] | None = msgspec.field(name="retractedMessageUuids", default=None)
    superseded: list[str] | None = msgspec.field(name="supersedesUuids", default=None)
    message: msgspec.Raw = NO_JSON


class _System(_Head, gc=False):
    subtype: str | None = None
    content: msgspec.Raw = NO_JSON
    compaction: Compaction | None = msgspec.field(name="compactMetadata", default=None)
    retracted: list[str] | None = msgspec.field(name="retractedMessageUuids", default=None)


class _Attached(_Head, gc=False):
    attachment: _Attachment | None = None
    rendered: list[_Rendered] | None = None


class _Queue(_Head, gc=False):
    operation: str | None = None
    content: Content = None
    reason: str | None = None


class _Fork(_Head, gc=False):
    parent_session: str | None = msgspec.field(name="parentSessionId", default=None)
    last: str | None = msgspec.field(name="parentLastUuid", default=None)


class Shape(msgspec.Struct, gc=False):
    """The system prompt and the tools of a request, as sent."""

    system: Content = None
    tools: list[msgspec.Raw] | None = None

    def system_prompt(self) -> str:
        """Return the text of the system prompt."""
        return "\n".join(part.text or "" for part in parts_in(self.system))

    def definitions(self) -> list[dict[str, Any]] | None:
        """Return the tools in OpenAI's format; None if there are none."""
        return tools(self.tools)


class _Shaped(_Head, gc=False):
    shape: Shape | None = None


class _Replaced(_Head, gc=False):
    replacements: list[Replacement] | None = None


_MESSAGE_DECODER = msgspec.json.Decoder(Message)
_HEAD_DECODER = msgspec.json.Decoder(_Head)
_TEXT_DECODER = msgspec.json.Decoder(str)
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "user": msgspec.json.Decoder(_Spoken),
    "assistant": msgspec.json.Decoder(_Spoken),
    "system": msgspec.json.Decoder(_System),
    "attachment": msgspec.json.Decoder(_Attached),
    "queue-operation": msgspec.json.Decoder(_Queue),
    "fork-context-ref": msgspec.json.Decoder(_Fork),
    "content-replacement": msgspec.json.Decoder(_Replaced),
    "api-request-shape": msgspec.json.Decoder(_Shaped),
}


@dataclass(eq=False, slots=True, kw_only=True)
class Line:
    """A line with what the model saw of it.

    Attributes:
        where: Location of the line.
        at: ISO time of the line; empty if unknown.
        message: What the line adds to the context; None if nothing.
        request: Name of the logged request that an answer belongs to.
        is_side: True for a line of a sub-agent.
        is_copied: True for a copy of a line of another session, which has the answer.
        is_kept: True for an answer from before a compaction, in the context after it.
        kept: Lines that a compaction keeps.
        retracted: First characters of the uuids of the lines that this line retracts.
        queue: Operation on the queue of messages, with its reason.
        inherited: Uuid of the last line of the parent that a forked sub-agent inherits.
        attached: Type of an attachment.
        was_rendered: True if an attachment has the text that was sent.
    """

    where: str
    type: str
    uuid: str | None = None
    parent: str | None = None
    agent_id: str | None = None
    at: str = ""
    message: Message | None = None
    request: str | None = None
    index: int | None = None
    is_side: bool = False
    is_copied: bool = False
    is_kept: bool = False
    is_compaction: bool = False
    is_microcompaction: bool = False
    kept: Kept | None = None
    retracted: frozenset[str] = frozenset()
    queue: tuple[str | None, str | None] | None = None
    queued: Parts = None
    inherited: str | None = None
    attached: str | None = None
    was_rendered: bool = False
    replacements: tuple[Replacement, ...] = ()
    shape: Shape | None = None

    @property
    def is_answer(self) -> bool:
        """True if the line is part of an assistant message."""
        return self.type == "assistant" and self.message is not None

    @property
    def is_synthetic(self) -> bool:
        """True if the harness, not the model, wrote an assistant message."""
        return self.message is not None and self.message.model == _SYNTHETIC

    @property
    def is_prompt(self) -> bool:
        """True if a user, not a tool, wrote the line."""
        if self.message is None or self.type != "user":
            return False
        return all(part.type != "tool_result" for part in parts_in(self.message.content))


def read_line(
    content: bytes, where: str, *, is_side: bool = False, is_copied: bool = False
) -> Line:
    """Decode a line.

    Args:
        content: JSON of the line.
        where: Location of the line.
        is_side: True if the file of the line belongs to a sub-agent.
        is_copied: See `Line`.

    Raises:
        InputError: `record_type`: a field has the wrong type, or a user or assistant line has no
            complete message.
    """
    head = decode_line(_HEAD_DECODER, content, where)
    line = Line(
        where=where,
        type=head.type,
        uuid=head.uuid,
        parent=head.parent,
        agent_id=head.agent_id,
        at=head.timestamp if isinstance(head.timestamp, str) else "",
        is_side=bool(head.is_sidechain) or is_side,
        is_copied=is_copied,
    )
    decoder = _DECODERS.get(head.type)
    if decoder is not None:
        _READERS[head.type](line, decode_line(decoder, content, where))
    return line


def _read_spoken(line: Line, found: _Spoken) -> None:
    message = decode_line(_MESSAGE_DECODER, bytes(found.message), f"{line.where}, message")
    line.is_compaction = bool(found.is_summary)
    line.index, line.request = found.index, found.request
    line.retracted = _shortened(found.retracted, found.superseded)
    is_error = line.type == "assistant" and message.model == _SYNTHETIC
    is_error &= bool(found.is_error) or _text(message.content).startswith(_API_ERROR)
    if not (is_error or found.is_virtual):
        line.message = message


def _read_system(line: Line, found: _System) -> None:
    line.retracted = _shortened(found.retracted)
    line.is_microcompaction = found.subtype == "microcompact_boundary"
    if found.subtype == _BOUNDARY:
        line.is_compaction = True
        kept = found.compaction and (found.compaction.messages or found.compaction.segment)
        line.kept = kept or None
    elif found.subtype == "local_command" and bytes(found.content).startswith(b'"'):
        text = decode_line(_TEXT_DECODER, bytes(found.content), line.where)
        line.message = Message("user", text)


def _read_attachment(line: Line, found: _Attached) -> None:
    attachment = found.attachment or _Attachment()
    line.attached, line.was_rendered = attachment.type, found.rendered is not None
    parts: list[Part] = []
    if found.rendered is not None:
        parts = [part for each in found.rendered for part in parts_in(each.content)]
    elif attachment.type == QUEUED:
        parts = parts_in(attachment.prompt)
    if attachment.type == QUEUED:
        line.queued = attachment.prompt
    if parts:
        line.message = Message("user", parts)


def _read_queue(line: Line, found: _Queue) -> None:
    line.queue, line.queued = (found.operation, found.reason), found.content


def _read_fork(line: Line, found: _Fork) -> None:
    line.inherited = found.last
    line.is_side = True


def _read_replaced(line: Line, found: _Replaced) -> None:
    line.replacements = tuple(found.replacements or ())


def _read_shape(line: Line, found: _Shaped) -> None:
    line.shape = found.shape
    line.is_side |= found.agent_id is not None


_READERS: dict[str, Any] = {
    "user": _read_spoken,
    "assistant": _read_spoken,
    "system": _read_system,
    "attachment": _read_attachment,
    "queue-operation": _read_queue,
    "fork-context-ref": _read_fork,
    "content-replacement": _read_replaced,
    "api-request-shape": _read_shape,
}


def short(uuid: str) -> str:
    """Return the characters of a uuid by which lines are retracted."""
    return uuid[:_NUM_CHARS_OF_UUID]


def _shortened(*lists: Iterable[str] | None) -> frozenset[str]:
    return frozenset(short(uuid) for uuids in lists for uuid in uuids or ())


def _text(content: str | list[Part]) -> str:
    return "".join(part.text or "" for part in parts_in(content))


def queued_text(content: Parts) -> str:
    """Return the text of a queued message, by which its records are matched."""
    return "\n".join(part.text or "" for part in parts_in(content)).strip()


def replaced(message: Message, replacements: dict[str, str]) -> Message:
    """Return a message with the results of tools that the model saw in place of its own."""
    if isinstance(message.content, str) or not replacements:
        return message
    parts = [_replaced(part, replacements) for part in message.content]
    return msgspec.structs.replace(message, content=parts)


def _replaced(part: Part, replacements: dict[str, str]) -> Part:
    text = replacements.get(part.tool_use_id or "") if part.type == "tool_result" else None
    if text is None:
        return part
    return msgspec.structs.replace(part, content=msgspec.Raw(msgspec.json.encode(text)))
