"""Messages of Pi and of the agents that are built on it, such as OpenClaw.

    {"role": "user", "content": [{"type": "text", "text": "..."}]}
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "..."},
        {"type": "toolCall", "id": "c1", "name": "ls", "arguments": {}}], "stopReason": "toolUse"}
    {"role": "toolResult", "toolCallId": "c1", "content": [{"type": "text", "text": "..."}]}

Commands that the user ran, messages of extensions and summaries are sent as messages of the user. An
answer that failed or was interrupted is not sent again, and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rollout_io.formats.base import note
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.dialects.responses import tools as openai_tools
from rollout_io.formats.grammar import Contents
from rollout_io.formats.parsing.content import (
    NO_JSON,
    Message,
    Part,
    all_text,
    known,
    shown,
    tool_result,
)

BLOCKS = Contents(
    kind="type",
    default="text",
    reads={
        "text": "text",
        "thinking": "thinking",
        "toolCall": "id name arguments",
        "image": "data mimeType",
    },
    leaves={
        "encrypted, for the API": "text/textSignature thinking/thinkingSignature "
        "thinking/signature toolCall/thoughtSignature toolCall/partialJson",
        "facts about a call": "toolCall/partialArgs",
    },
)
_FACTS = "api provider model usage responseId responseModel timestamp idempotencyKey diagnostics "
_FACTS += "rawStopReason thinkingLevel durationMs"
MESSAGE = Contents(
    kind="role",
    reads={
        "user": "",
        "system": "sections toolsAdded toolsRemoved",
        "assistant": "stopReason errorMessage model api",
        "toolResult": "toolCallId isError",
        "bashExecution": "command output exitCode cancelled truncated fullOutputPath "
        "excludeFromContext",
        "custom": "",
        "branchSummary": "summary",
        "compactionSummary": "summary",
    },
    leaves={
        "facts about a message": " ".join(f"*/{name}" for name in _FACTS.split()),
        "details for display": "toolResult/toolName toolResult/details "
        "custom/customType custom/display custom/details branchSummary/fromId user/sender",
    },
    inner=dict.fromkeys(
        (f"{role}/content" for role in ("user", "system", "assistant", "toolResult", "custom")),
        BLOCKS,
    ),
)
CUT = "answers that failed or were interrupted: left out, as they are not sent again"
FAILED = frozenset({"error", "aborted"})
_ROLES = {"user": "user", "custom": "user", "system": "system", "assistant": "assistant"}
_COMPACTED = "The conversation history before this point was compacted into the following summary:"
_BRANCH = "The following is a summary of a branch that this conversation came back from:"
_ORDER = {"thinking": 0, "toolCall": 2}


class Block(msgspec.Struct, gc=False):
    """A part of a message."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    arguments: msgspec.Raw = NO_JSON
    data: str | None = None
    mime_type: str | None = msgspec.field(name="mimeType", default=None)


class PiMessage(msgspec.Struct, gc=False, rename="camel"):
    """A message in the form of this module."""

    role: str
    content: str | list[Block] | None = None
    api: str | None = None
    model: str | None = None
    stop_reason: str | None = None
    error_message: str | None = None
    tool_call_id: str | None = None
    is_error: bool | None = None
    summary: str | None = None
    command: str | None = None
    output: str | None = None
    exit_code: int | None = None
    cancelled: bool | None = None
    truncated: bool | None = None
    full_output_path: str | None = None
    exclude_from_context: bool | None = None
    sections: dict[str, str | None] | None = None
    tools_added: list[dict[str, Any]] | None = None
    tools_removed: list[dict[str, Any]] | None = None

    @property
    def is_head(self) -> bool:
        """True for a system prompt by sections, or a change of it or of the tools."""
        is_changed = self.sections is not None or self.tools_added is not None
        return self.role == "system" and (is_changed or self.tools_removed is not None)

    @property
    def failure(self) -> str | None:
        """Why the model's answer failed or was interrupted; None if it did not."""
        if self.role != "assistant" or self.stop_reason not in FAILED:
            return None
        return self.error_message or self.stop_reason

    @property
    def calls(self) -> list[str]:
        """Ids of the calls of tools."""
        blocks = self.content if isinstance(self.content, list) else []
        return [block.id for block in blocks if block.type == "toolCall" and block.id]


def for_others(message: PiMessage, where: str, *, drops_thoughts: bool) -> list[Message] | None:
    """Return an answer as it is sent to another model; None if that is the same.

    Older versions send thoughts as text; those that drop them do not send them.
    """
    blocks = message.content if isinstance(message.content, list) else []
    is_sent = message.role == "assistant" and message.failure is None
    if not is_sent or all(block.type != "thinking" for block in blocks):
        return None
    texts = [
        Block(text=block.thinking) if block.type == "thinking" else block
        for block in blocks
        if block.type != "thinking" or (not drops_thoughts and (block.thinking or "").strip())
    ]
    pieces = messages_of(replace(message, content=texts), where)
    if (
        message.api == "openai-completions"
        and len(pieces) == 1
        and isinstance(pieces[0]["content"], str)
    ):
        pieces[0]["content"] = "".join(b.text or "" for b in texts if b.type == "text")
    return pieces


def messages_of(message: PiMessage, where: str) -> list[Message]:
    """Convert a message to those that are sent; a message of an unknown role to none."""
    if message.failure is not None:
        note(CUT)
        return []
    if message.role == "bashExecution":
        return [] if message.exclude_from_context else [_user(_command(message))]
    if message.role in {"branchSummary", "compactionSummary"}:
        return [summary_of(message.summary or "", is_branch=message.role == "branchSummary")]
    parts = _parts(message)
    if message.role == "custom" and not parts:
        return []
    if message.role == "toolResult":
        return [tool_result(shown(parts), message.tool_call_id, is_error=message.is_error)]
    role = _ROLES.get(message.role)
    return anthropic.messages_of(role, parts, where) if role is not None else []


def head_of(messages: Sequence[PiMessage]) -> tuple[str | None, list[Message] | None]:
    """Return the system prompt and the tools that all system messages of a path come to.

    Later contents follow the earlier ones, sections are replaced by name, and tools are added and
    removed; most APIs are sent the result as one leading message.
    """
    texts, sections, tools = list[str](), dict[str, str](), dict[str, Any]()
    for message in messages:
        texts.append(
            all_text(message.content if isinstance(message.content, str) else _parts(message))
        )
        for name, text in (message.sections or {}).items():
            sections = {
                key: value for key, value in sections.items() if key != name or text is not None
            }
            sections |= {} if text is None else {name: text}
        removed = {tool.get("name") for tool in message.tools_removed or ()}
        tools = {name: tool for name, tool in tools.items() if name not in removed}
        tools |= {str(tool.get("name")): tool for tool in message.tools_added or ()}
    text = "\n\n".join(filter(None, [*texts, *sections.values()]))
    return text or None, openai_tools([*tools.values()])


def summary_of(summary: str, *, is_branch: bool) -> Message:
    """Return the message that stands for a compacted history, or for another branch."""
    head, end = (_BRANCH, "</summary>") if is_branch else (_COMPACTED, "\n</summary>")
    return _user(f"{head}\n\n<summary>\n{summary}{end}")


def _parts(message: PiMessage) -> list[Part]:
    if message.content is None or isinstance(message.content, str):
        return [Part(text=message.content)] if message.content else []
    blocks = message.content
    if message.api == "openai-completions":  # its messages have no order of parts
        blocks = sorted(blocks, key=lambda block: _ORDER.get(block.type, 1))
    return [_part(block) for block in blocks]


def _part(block: Block) -> Part:
    if block.type == "toolCall":
        arguments = msgspec.Raw(b"{}") if bytes(block.arguments) == b"null" else block.arguments
        return Part(type="tool_use", id=block.id, name=block.name, input=arguments)
    if block.type == "image":
        source = {"type": "base64", "media_type": block.mime_type, "data": block.data}
        return Part(type="image", source=known(source))
    return Part(type=block.type, text=block.text, thinking=block.thinking)


def _command(message: PiMessage) -> str:
    """Return the text that is sent for a command of the user."""
    output = f"```\n{message.output}\n```" if message.output else "(no output)"
    text = f"Ran `{message.command or ''}`\n{output}"
    if message.cancelled:
        text += "\n\n(command cancelled)"
    elif message.exit_code:
        text += f"\n\nCommand exited with code {message.exit_code}"
    if message.truncated and message.full_output_path:
        text += f"\n\n[Output truncated. Full output: {message.full_output_path}]"
    return text


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
