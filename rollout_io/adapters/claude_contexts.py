"""What the model had before it in a session of Claude Code: its lines as conversations.

- The main agent's lines are in the order of the log; a sub-agent's (`isSidechain`) are those of one
  `agentId`, or of one chain of `parentUuid`.
- A reply of the API stands on several lines (one block each) that share `message.id`: it is one
  message, with all its tool calls, wherever their results stand.
- A compaction (`compact_boundary`, or the summary it leaves) begins a new context.
- A prompt of the user's whose parent is not the end of the context goes back to that parent: a new
  context, with what was before; the one that was left is kept if the model answered in it.
- A line with the `uuid` of an earlier one is a copy, and "<synthetic>" messages are not the model's:
  both are left out. Thoughts that were redacted are not in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import msgspec

from rollout_io.adapters import Conversation
from rollout_io.logs.content import NO_JSON, Part, bad_message, extend, parts_in
from rollout_io.logs.jsonl import decode_line
from rollout_io.logs.messages import messages_of

MAIN, SIDECHAIN = "main", "sidechain"
_SYNTHETIC = "<synthetic>"
_BOUNDARY = "compact_boundary"


class Message(msgspec.Struct, gc=False):
    """A message of Anthropic's API, or a piece of one."""

    role: str
    content: str | list[Part]
    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None


class LoggedLine(msgspec.Struct, gc=False):
    """The fields of a line that are read."""

    type: str
    subtype: str | None = None
    uuid: str | None = None
    parent: str | None = msgspec.field(name="parentUuid", default=None)
    is_sidechain: bool | None = msgspec.field(name="isSidechain", default=None)
    agent_id: str | None = msgspec.field(name="agentId", default=None)
    is_summary: bool | None = msgspec.field(name="isCompactSummary", default=None)
    message: msgspec.Raw = NO_JSON


_MESSAGE_DECODER = msgspec.json.Decoder(Message)


class Line(NamedTuple):
    """A line, its place, and the message on it."""

    where: str
    logged: LoggedLine
    message: Message | None

    @classmethod
    def of(cls, logged: LoggedLine, where: str) -> Self:
        """A line with its message decoded.

        Raises:
            RolloutError: `record_type`: a user's or assistant's line without a whole message.
        """
        message = None
        if logged.type in {"user", "assistant"}:
            message = decode_line(_MESSAGE_DECODER, bytes(logged.message), f"{where}, message")
        return cls(where, logged, message)

    @property
    def is_compaction(self) -> bool:
        """Whether a new context begins here."""
        is_boundary = self.logged.type == "system" and self.logged.subtype == _BOUNDARY
        return is_boundary or bool(self.logged.is_summary)

    @property
    def is_answer(self) -> bool:
        """Whether the model wrote it."""
        return self.logged.type == "assistant"

    @property
    def is_prompt(self) -> bool:
        """Whether a user wrote it, and no tool."""
        message = self.message
        if message is None or self.is_answer:
            return False
        return all(part.type != "tool_result" for part in parts_in(message.content))


@dataclass(slots=True)
class _Thread:
    """The contexts of one agent, in order."""

    agent: str
    contexts: list[list[Line]] = field(default_factory=lambda: [[]])

    def cut(self) -> None:
        if self.contexts[-1]:
            self.contexts.append([])

    def add(self, line: Line, parent: Line | None) -> None:
        """Continue the context, or go back to a parent further up."""
        context = self.contexts[-1]
        if parent is not None and line.is_prompt and context[-1:] != [parent]:
            found = next((c for c in reversed(self.contexts) if parent in c), None)
            if found is not None:
                self._go_back(found, found.index(parent))
        self.contexts[-1].append(line)

    def _go_back(self, found: list[Line], at: int) -> None:
        """Leave what follows a line of a context, if more than its own results does."""
        context, later = self.contexts[-1], found[at + 1 :]
        if found is not context or any(line.is_answer for line in later):
            if found is not context or _goes_on(found[at], later):
                self.contexts.append(found[: at + 1])
        elif _goes_on(found[at], later):
            del context[at + 1 :]


def _goes_on(line: Line, later: Sequence[Line]) -> bool:
    """Whether more than the results of a line's own tool calls follows it."""
    assert line.message is not None
    return any(
        other.is_prompt
        or (other.is_answer and (other.message is None or other.message.id != line.message.id))
        for other in later
    )


def conversations(lines: Iterable[Line]) -> list[Conversation]:
    """The contexts in which the model wrote something, by where they end; the main agent's last.

    The `source` of each is its last line.

    Raises:
        RolloutError: `message`: a block that is neither text, thought nor tool call.
    """
    lines = list(lines)
    numbers = {line.where: number for number, line in enumerate(lines)}
    threads = _threads(lines)
    contexts = [(thread.agent, c) for thread in threads for c in thread.contexts if c]
    contexts = [(a, c) for a, c in contexts if any(line.is_answer for line in c)]
    contexts.sort(key=lambda item: numbers[item[1][-1].where])
    main = next((item for item in reversed(contexts) if item[0] == MAIN), None)
    if main is not None:
        contexts.remove(main)
        contexts.append(main)
    return [made for agent, context in contexts if (made := _conversation(agent, context))]


def _threads(lines: Iterable[Line]) -> list[_Thread]:
    threads: dict[str, _Thread] = {}
    keys: dict[str, str] = {}
    spoken: dict[str, Line] = {}
    for number, line in enumerate(lines):
        logged = line.logged
        if logged.uuid is not None and logged.uuid in keys:
            continue
        key = _thread_key(logged, keys, number)
        parent = spoken.get(logged.parent or "")
        thread = threads.setdefault(key, _Thread(SIDECHAIN if logged.is_sidechain else MAIN))
        if line.is_compaction:
            thread.cut()
            parent = None
        if line.message is not None and line.message.model != _SYNTHETIC:
            thread.add(line, parent)
            parent = line
        if logged.uuid is not None:
            keys[logged.uuid] = key
            if parent is not None:
                spoken[logged.uuid] = parent
    return list(threads.values())


def _thread_key(logged: LoggedLine, keys: dict[str, str], number: int) -> str:
    if not logged.is_sidechain:
        return MAIN
    if logged.agent_id is not None:
        return f"agent {logged.agent_id}"
    above = keys.get(logged.parent or "", MAIN)
    return above if above != MAIN else f"chain {logged.uuid or number}"


def _conversation(agent: str, context: Sequence[Line]) -> Conversation | None:
    messages = list(_messages(context))
    reasons = [line.message.stop_reason for line in context if line.message and line.is_answer]
    known = [reason for reason in reasons if reason is not None]
    if not any(message["role"] == "assistant" for message in messages):
        return None
    return Conversation(
        source=context[-1].where,
        messages=messages,
        agent=agent,
        stop_reason=known[-1] if known else None,
    )


def _messages(context: Iterable[Line]) -> Iterator[dict[str, Any]]:
    """Messages in OpenAI's style; those that make one reply of the API joined."""
    made: list[dict[str, Any]] = []
    replies: dict[str, dict[str, Any]] = {}
    for line in context:
        assert line.message is not None
        pieces = messages_of(line.logged.type, line.message.content, f"{line.where}, message")
        if not line.is_answer:
            made += pieces
            continue
        reply = replies.get(line.message.id or "")
        if reply is None:
            reply = {"role": "assistant", "content": ""}
            made.append(reply)
            if line.message.id is not None:
                replies[line.message.id] = reply
        for piece in pieces:
            _refuse_others(piece, line.where)
            extend(reply, piece)
    return iter(made)


def _refuse_others(piece: dict[str, Any], where: str) -> None:
    """Refuse what the model cannot have written.

    Raises:
        RolloutError: `message`.
    """
    content = piece["content"]
    if piece["role"] == "assistant" and isinstance(content, str):
        return
    kinds = [f"{part['type']!r}" for part in content] if piece["role"] == "assistant" else []
    got = f"blocks of type {', '.join(kinds) or 'tool_result'}"
    raise bad_message(f"{where}, message.content", got, "text, thinking or tool_use")
