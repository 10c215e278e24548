"""The messages that Goose stores, and their parts as Goose sends them.

    {"type": "text", "text": "...", "annotations": {"audience": ["user"]}}

This text is shown to the user and not sent (`filter_for_audience` of Goose's `conversation/message.rs`).
A result of which nothing is sent is "(empty result)" (`fix_empty_tool_results` of `conversation.rs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.grammar import SELF, Contents, inner
from rollout_io.formats.parsing.content import NO_JSON, Part, known
from rollout_io.formats.parsing.jsonl import decode_document

PARTS = Contents(
    kind="type",
    default="result",
    reads={
        "text": "text annotations.audience",
        "image": "data mimeType annotations.audience",
        "resource": "resource.text annotations.audience",
        "thinking": "thinking",
        "reasoning": "text",
        "toolRequest": "id toolCall.value.name toolCall.value.arguments",
        "toolResponse": "id toolResult.error",
    },
    leaves={
        "facts about a part": "*/annotations.priority */annotations.lastModified */_meta */metadata "
        "toolRequest/toolCall.status toolResponse/toolResult.status",
        "facts about a resource": "resource/resource.uri resource/resource.mimeType "
        "resource/resource._meta",
        "why a call could not be read": "toolRequest/toolCall.error",
        "repeats the text": "result/structuredContent",
        "encrypted, for the API": "thinking/signature redactedThinking",
        "shown to the user, not sent": "systemNotification actionRequired toolConfirmationRequest "
        "contextLengthExceeded summarizationRequested conversationCompacted error",
    },
    inner={"toolResponse/toolResult.value": SELF, "result/content": SELF},
)
FAILED = "calls that Goose could not read, of which the log has only the error: left out"
_EMPTY = "(empty result)"
_COMMANDS = {
    "prompts",
    "compact",
    "summarize",
    "clear",
    "skills",
    "doctor",
    "goal",
    "grind",
    "status",
}
_TRIGGER = "Please compact this conversation"


class _Told(msgspec.Struct, gc=False):
    """What a call, or a result, is: a value or an error."""

    value: Any = None
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        marked = isinstance(self.value, Mapping) and self.value.get("isError") is True
        return marked or self.error is not None


class _Annotations(msgspec.Struct, gc=False):
    audience: list[str] | None = None


class _Resource(msgspec.Struct, gc=False):
    text: str | None = None


class _Part(msgspec.Struct, gc=False, rename="camel"):
    type: str
    id: str | None = None
    text: str | None = None
    thinking: str | None = None
    data: Any = None
    mime_type: str | None = None
    tool_call: _Told | None = None
    tool_result: _Told | None = None
    annotations: _Annotations | None = None
    resource: _Resource | None = None

    @property
    def is_for_model(self) -> bool:
        """True if the assistant is in its audience, which is everyone if it names none."""
        audience = self.annotations.audience if self.annotations is not None else None
        return audience is None or "assistant" in audience


class _Metadata(msgspec.Struct, gc=False, rename="camel"):
    user_visible: bool = True
    agent_visible: bool = True
    turn_context: bool = False


class StoredMessage(msgspec.Struct, gc=False):
    """A row of `messages`."""

    role: str
    content: Annotated[list[_Part], inner(PARTS)]
    metadata: _Metadata | None = None
    created: int | None = None

    @property
    def facts(self) -> _Metadata:
        """Who sees it."""
        return self.metadata or _Metadata()

    @property
    def is_hidden(self) -> bool:
        """True if the user does not see it."""
        return not self.facts.user_visible

    @property
    def has_tools(self) -> bool:
        """True if it has calls or results."""
        return bool(self.ids("toolRequest") or self.ids("toolResponse"))

    def ids(self, kind: str) -> list[str | None]:
        """Return the ids of its calls (`toolRequest`) or of its results (`toolResponse`)."""
        return [part.id for part in self.content if part.type == kind]

    @property
    def text(self) -> str:
        """Its text, without whitespace around it."""
        return "".join(part.text or "" for part in self.content if part.type == "text").strip()

    @property
    def is_command(self) -> bool:
        """True if it is a command, which Goose runs itself."""
        name = self.text.partition(" ")[0]
        is_named = name.startswith("/") and name[1:] in _COMMANDS
        return self.role == "user" and (is_named or self.text == _TRIGGER)


class _Call(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = NO_JSON


_CALL = msgspec.json.Decoder(_Call)
_PART_LIST = msgspec.json.Decoder(list[_Part])


def part_of(part: _Part, where: str) -> Part | None:
    """Return a part as in Anthropic's API; None if it is not sent."""
    if not part.is_for_model:
        return None
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
            shown = [sent for one in inner if (sent := part_of(one, where)) is not None]
            if not any(p.text or p.source or p.type not in PARTS.types for p in shown):
                shown = [Part(text=_EMPTY)]
            encoded = msgspec.json.encode([_block(p) for p in shown])
        return Part(
            type="tool_result",
            tool_use_id=part.id,
            content=msgspec.Raw(encoded),
            is_error=result.has_failed,
        )
    if part.type == "image":
        source = {"type": "base64", "media_type": part.mime_type, "data": part.data}
        return Part(type="image", source=known(source))
    if part.type == "resource" and part.resource is not None and part.resource.text is not None:
        return Part(text=part.resource.text)
    return Part(type=part.type, text=part.text, thinking=part.thinking) if is_sent(part) else None


def _block(part: Part) -> dict[str, Any]:
    """Return a part of a result as JSON, without fields that are not set."""
    fields = {"type": part.type, "text": part.text, "source": part.source}
    return {name: value for name, value in fields.items() if value}


def is_sent(part: _Part) -> bool:
    """True if a part is text, a thought, or of an unknown type."""
    return part.type in {"text", "thinking", "reasoning"} or part.type not in PARTS.types
