"""Conversion of a context of a Claude Code session to chat messages.

An answer is one or more lines with the same `message.id`, wherever the results of its tools are
logged. Versions differ in what the lines contain: one block each, or states of the answer while it
was streamed, each of which repeats earlier blocks. Of the states of a block, the most complete
counts. If blocks follow in an order that a chat message cannot express, such as a thought after a
tool call, the answer becomes several messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout_io.formats.claude_code_lines import Line, replaced
from rollout_io.formats.dialects.anthropic import (
    CALLS,
    is_server_result,
    messages_of,
    parts_of_result,
)
from rollout_io.formats.parsing.content import THOUGHTS, Part, canonical_json, is_shown, parts_in

_MARKERS = frozenset({"fallback"})
"""Types of blocks without text: `fallback` records that a different model continued."""


@dataclass(slots=True)
class Reply:
    """An answer.

    Attributes:
        where: Location of its first line.
        blocks: Blocks in order, each in its most complete state.
        indices: Index of each block in the answer, if the log has it.
        uuids: Uuids of its lines.
    """

    where: str
    blocks: list[Part] = field(default_factory=list)
    indices: list[int | None] = field(default_factory=list)
    uuids: set[str] = field(default_factory=set)

    def add(self, line: Line) -> None:
        """Add the blocks of a line, or replace earlier states of them."""
        assert line.message is not None
        states = [part for part in parts_in(line.message.content) if part.type not in _MARKERS]
        is_restart = line.parent is not None and line.parent not in self.uuids
        if line.uuid is not None:
            self.uuids.add(line.uuid)
        if not states:
            return
        start = self._start(line.index, states, is_restart=is_restart)
        for at, state in enumerate(states, start):
            known = self._calls().get(state.id) if _is_call(state) else None
            if known is not None or at < len(self.blocks):
                at = at if known is None else known
                self.blocks[at] = _more_complete(self.blocks[at], state)
            else:
                self.blocks.append(state)
                self.indices.append(line.index)

    def _calls(self) -> dict[str | None, int]:
        """Return the position of each tool call that has an id."""
        return {part.id: at for at, part in enumerate(self.blocks) if _is_call(part) and part.id}

    def _start(self, index: int | None, states: Sequence[Part], *, is_restart: bool) -> int:
        """Return the position in `blocks` of the first of these states.

        States repeat the last blocks, unless they contain a call that is already there or the log
        repeats an answer from its start.
        """
        end, calls = len(self.blocks), self._calls()
        if index is not None and len(states) == 1 and None not in self.indices:
            return self.indices.index(index) if index in self.indices else end
        again = (calls[s.id] - i for i, s in enumerate(states) if _is_call(s) and s.id in calls)
        covering = (at for at in range(end) if at + len(states) >= end)
        others = (at for at in range(end) if is_restart)
        starts = (at for at in (*again, *covering, *others) if at >= 0)
        return next((at for at in starts if self._are_states(at, states)), end)

    def _are_states(self, start: int, states: Sequence[Part]) -> bool:
        pairs = zip(self.blocks[start:], states, strict=False)
        return all(_is_state(block, state) for block, state in pairs)

    def messages(self) -> list[dict[str, Any]]:
        """Return the answer as one message, or several if the order of its blocks needs them.

        Raises:
            InputError: Any error of `messages_of`.
        """
        return messages_of("assistant", self.blocks, f"{self.where}, message")

    @property
    def unknown(self) -> str | None:
        """Type of the first block that is neither text, a thought nor a tool call; None if none."""
        return next((p.type for p in self.blocks if not _is_written(p)), None)


def _is_written(part: Part) -> bool:
    is_call = _is_call(part) and bool(part.name) and bool(_arguments(part))
    return is_shown(part) or part.type in THOUGHTS or is_call or is_server_result(part)


def _is_call(part: Part) -> bool:
    return part.type in CALLS


def _is_state(one: Part, other: Part) -> bool:
    """True if one block may be a later state of the other."""
    if one.type != other.type:
        return False
    if not _is_call(one):
        return one.said.startswith(other.said) or other.said.startswith(one.said)
    return one.id == other.id and (one.id is not None or _arguments(one) == _arguments(other))


def _more_complete(before: Part, state: Part) -> Part:
    """Return the later state, unless it has less than the earlier one."""
    if _is_call(before) and _is_call(state):
        return before if len(_arguments(before)) > len(_arguments(state)) else state
    return before if len(before.said) > len(state.said) else state


def _arguments(part: Part) -> str:
    return "" if bytes(part.input) == b"null" else canonical_json(bytes(part.input))


class Entry(NamedTuple):
    """A message of a context.

    Attributes:
        name: Name of an answer, unique in the session; "" for other messages.
        where: Location of the first line.
        last: Location of the last line.
        messages: Chat messages; empty if `unknown` is set.
        unknown: Type of a part that is not text, such as an image; None if there is none.
        is_answer: True for an assistant message.
        is_given: True for an assistant message that is not to be trained on.
        is_copied: True if another session has the answer.
        request: Name of the request that was answered, if the log has it.
        agent_id: Name of a sub-agent.
    """

    name: str
    where: str
    last: str
    messages: list[dict[str, Any]]
    unknown: str | None
    is_answer: bool = False
    is_given: bool = False
    is_copied: bool = False
    stop_reason: str | None = None
    request: str | None = None
    agent_id: str = ""


def entries_of(lines: Sequence[Line], replacements: dict[str, str]) -> Iterator[Entry]:
    """Yield the messages of a context in order.

    Args:
        lines: Lines of the context.
        replacements: What the model saw in place of the results of tools, by call id.

    Raises:
        InputError: Any error of `messages_of`.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        assert line.message is not None
        name = f"line {line.uuid or line.where}"
        if line.is_answer and line.message.id is not None:
            name = f"answer {line.message.id}"
        groups.setdefault(name, []).append(line)
    for name, group in groups.items():
        entry = _answer(name, group) if group[0].is_answer else _said(group[0], replacements)
        if entry is not None:
            yield entry


def _answer(name: str, lines: Sequence[Line]) -> Entry | None:
    reply = Reply(lines[0].where)
    for line in lines:
        reply.add(line)
    if not reply.blocks:
        return None
    reasons = [line.message.stop_reason for line in lines if line.message]
    return Entry(
        name,
        lines[0].where,
        lines[-1].where,
        [] if reply.unknown else reply.messages(),
        reply.unknown,
        is_answer=True,
        is_given=any(line.is_copied or line.is_kept or line.is_synthetic for line in lines),
        is_copied=any(line.is_copied for line in lines),
        stop_reason=next((reason for reason in reversed(reasons) if reason is not None), None),
        request=next((line.request for line in lines if line.request is not None), None),
        agent_id=lines[0].agent_id or "",
    )


def _said(line: Line, replacements: dict[str, str]) -> Entry:
    assert line.message is not None
    where = f"{line.where}, message"
    content = replaced(line.message, replacements).content
    unknown = _unknown(content, where)
    messages = [] if unknown else messages_of("user", content, where)
    return Entry("", line.where, line.where, messages, unknown)


def _unknown(content: str | list[Part], where: str) -> str | None:
    for part in parts_in(content):
        inner = parts_of_result(part, where) if part.type == "tool_result" else [part]
        for each in inner:
            if not is_shown(each):
                return each.type
    return None
