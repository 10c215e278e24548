"""Reconstruction of a Claude Code session's contexts, as conversations, from its lines.

- The main agent's lines are in the order of the log; a sub-agent's lines (`isSidechain`) share an
  `agentId`, or form a chain of `parentUuid`.
- An API response may take several lines (one block each) with the same `message.id`. These lines
  form one message with all its tool calls, wherever the results are logged.
- A compaction (`compact_boundary`, or the summary after it) begins a new context.
- A user prompt whose parent is not the end of the context branches off at that parent: a new
  context begins with the lines up to it. The abandoned context is kept if the model answered in it.
  The shared lines were sampled once, so they are part of the prompt in the new context.
- A line with the `uuid` of an earlier line is a copy, and "<synthetic>" messages are not from the
  model: both are omitted. Redacted thoughts are not in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import msgspec

from rollout_io.formats.base import Conversation
from rollout_io.formats.parsing.content import NO_JSON, Part, bad_message, extend, parts_in
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import messages_of

MAIN, SIDECHAIN = "main", "sidechain"
_SYNTHETIC = "<synthetic>"
_BOUNDARY = "compact_boundary"


class Message(msgspec.Struct, gc=False):
    """A message of Anthropic's API, or part of one."""

    role: str
    content: str | list[Part]
    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None


class LoggedLine(msgspec.Struct, gc=False):
    """The relevant fields of a line."""

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
    """A line with its location and its message."""

    where: str
    logged: LoggedLine
    message: Message | None

    @classmethod
    def of(cls, logged: LoggedLine, where: str) -> Self:
        """Decode the message of a line.

        Raises:
            InputError: `record_type`: a user or assistant line has no complete message.
        """
        message = None
        if logged.type in {"user", "assistant"}:
            message = decode_line(_MESSAGE_DECODER, bytes(logged.message), f"{where}, message")
        return cls(where, logged, message)

    @property
    def is_compaction(self) -> bool:
        """True if the line marks a compaction, which begins a new context."""
        is_boundary = self.logged.type == "system" and self.logged.subtype == _BOUNDARY
        return is_boundary or bool(self.logged.is_summary)

    @property
    def is_answer(self) -> bool:
        """True if the model wrote the line."""
        return self.logged.type == "assistant"

    @property
    def is_prompt(self) -> bool:
        """True if a user, not a tool, wrote the line."""
        message = self.message
        if message is None or self.is_answer:
            return False
        return all(part.type != "tool_result" for part in parts_in(message.content))


@dataclass(slots=True)
class _Context:
    """One context of an agent.

    Attributes:
        lines: Lines in order.
        num_shared: Number of leading lines from an earlier context; answers in these lines are
            trained on only in that context.
    """

    lines: list[Line] = field(default_factory=list)
    num_shared: int = 0

    @property
    def is_answered(self) -> bool:
        """True if the model wrote something in this context."""
        return any(line.is_answer for line in self.lines[self.num_shared :])


@dataclass(slots=True)
class _Thread:
    """The contexts of one agent, in order."""

    agent: str
    contexts: list[_Context] = field(default_factory=lambda: [_Context()])

    def cut(self) -> None:
        if self.contexts[-1].lines:
            self.contexts.append(_Context())

    def add(self, line: Line, parent: Line | None) -> None:
        """Add a line; a prompt that continues an earlier line returns to that line first."""
        lines = self.contexts[-1].lines
        if parent is not None and line.is_prompt and lines[-1:] != [parent]:
            found = next((c.lines for c in reversed(self.contexts) if parent in c.lines), None)
            if found is not None:
                self._go_back(found, found.index(parent))
        self.contexts[-1].lines.append(line)

    def _go_back(self, found: list[Line], at: int) -> None:
        """Go back to an earlier line, unless only the results of its tool calls follow it."""
        context, later = self.contexts[-1], found[at + 1 :]
        if found is not context.lines or any(line.is_answer for line in later):
            if found is not context.lines or _goes_on(found[at], later):
                self.contexts.append(_Context(found[: at + 1], num_shared=at + 1))
        elif _goes_on(found[at], later):
            del context.lines[at + 1 :]
            context.num_shared = min(context.num_shared, at + 1)


def _goes_on(line: Line, later: Sequence[Line]) -> bool:
    """True if a line is followed by more than the results of its tool calls."""
    assert line.message is not None
    return any(
        other.is_prompt
        or (other.is_answer and (other.message is None or other.message.id != line.message.id))
        for other in later
    )


def conversations(lines: Iterable[Line]) -> list[Conversation]:
    """Return the contexts that have an answer, ordered by their last lines.

    The main agent's last context comes last. The `source` of a context is the location of its
    last line.

    Raises:
        InputError: `message`: a block of an answer is neither text, a thought nor a tool call.
    """
    lines = list(lines)
    numbers = {line.where: number for number, line in enumerate(lines)}
    threads = _threads(lines)
    contexts = [(thread.agent, c) for thread in threads for c in thread.contexts if c.is_answered]
    contexts.sort(key=lambda item: numbers[item[1].lines[-1].where])
    main = next((item for item in reversed(contexts) if item[0] == MAIN), None)
    if main is not None:
        contexts.remove(main)
        contexts.append(main)
    return [_conversation(agent, context) for agent, context in contexts]


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


def _conversation(agent: str, context: _Context) -> Conversation:
    lines = context.lines
    reasons = [line.message.stop_reason for line in lines if line.message and line.is_answer]
    known = [reason for reason in reasons if reason is not None]
    return Conversation(
        source=lines[-1].where,
        messages=_messages(lines),
        num_given=len(_messages(lines[: context.num_shared])),
        agent=agent,
        stop_reason=known[-1] if known else None,
    )


def _messages(context: Iterable[Line]) -> list[dict[str, Any]]:
    """Convert a context to OpenAI-style messages; lines of one API response are joined."""
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
    return made


def _refuse_others(piece: dict[str, Any], where: str) -> None:
    """Reject content that a model cannot have written.

    Raises:
        InputError: `message`: the content has a block that is not text, thinking or a tool call.
    """
    content = piece["content"]
    if piece["role"] == "assistant" and isinstance(content, str):
        return
    kinds = [f"{part['type']!r}" for part in content] if piece["role"] == "assistant" else []
    got = f"blocks of type {', '.join(kinds) or 'tool_result'}"
    raise bad_message(f"{where}, message.content", got, "text, thinking or tool_use")
