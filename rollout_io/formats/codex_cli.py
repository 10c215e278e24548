"""The `codex_cli` format: sessions of Codex CLI (`rollout-*.jsonl`), one JSON object per line.

`response_item` lines are the conversation: consecutive items of the model (reasoning, text, tool calls)
are one answer, which ends with its call (`token_usage_record`). `compacted` begins a new context; its
summary was written in a call of its own, whose prompt is not logged: that answer is left out, and
counted. `event_msg` lines repeat the conversation for display; only rollbacks are read from them. A
sub-agent names its parent (`parent_thread_id`). A fork (`forked_from_id`) begins with copies of another
session's lines, or refers to them (`history_base`), and so does a thread that was taken back. The log
has no reward and no token ids; encrypted reasoning is not readable. Of the tool definitions, it has only
those that a client added (`dynamic_tools`, `additional_tools`).

A `developer` message becomes a `system` message before the first answer, and a `user` message after
it, as chat templates require. If an item cannot be read (its type is unknown, or it is encrypted, such
as the summary of a compaction), the answers that depend on it are left out and noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import LOST, SUMMARIES, Contexts, Said
from rollout_io.formats.dialects.responses import (
    Item,
    add_piece,
    chat_role,
    read_item,
    results_in,
    tools,
)
from rollout_io.formats.engines.sessions import Base, Line, Names, Sessions
from rollout_io.formats.grammar import like
from rollout_io.formats.parsing.content import bad_message, canonical_json
from schemas.errors import InputError

__all__ = ["LOST", "SUMMARIES"]
EDITED = "sessions with the model's own instructions, of which Codex may have sent only a part: it "
EDITED += "leaves out sections about tools that are off, which the log does not tell"
UNENDED = (
    "answers without the end of their call, which broke off or which Codex wrote itself: part of "
)
UNENDED += "the prompt"
_KEPT_BYTES = 80_000
"""Codex keeps 20,000 tokens, which it estimates at four bytes each."""

_LEAVES = {
    "facts about the session": "*/timestamp */ordinal session_meta/payload.timestamp "
    "session_meta/payload.source session_meta/payload.model_provider session_meta/payload.git "
    "session_meta/payload.instructions session_meta/payload.memory_mode "
    "session_meta/payload.history_mode session_meta/payload.runtime_workspace_roots "
    "session_meta/payload.thread_source session_meta/payload.context_window "
    "session_meta/payload.agent_path session_meta/payload.base_instructions.provenance "
    "session_meta/payload.session_id session_meta/payload.multi_agent_version "
    "session_meta/payload.account_scoped session_meta/payload.history_base.end_byte_offset",
    "settings, which the harness sends as messages": "turn_context/payload world_state",
    "facts about items and calls": "response_item/metadata token_usage_record/payload",
    "for resuming": "compacted/payload.replacement_history_metadata compacted/payload.resume_metadata "
    "compacted/payload.retained_context compacted/payload.latest_token_usage_record "
    "compacted/payload.first_window_id compacted/payload.window_id compacted/payload.previous_window_id",
    "repeats the conversation for display; only rollbacks are read": "event_msg/payload",
}
_CONTEXT = re.compile(
    r"\s*(?:<(environment_context|user_instructions|skill|user_shell_command|turn_aborted|plugins"
    r"|recommended_plugins|subagent_notification|goal_context|hook_prompt|external_\w+"
    r"|codex_internal_context)\b.*</\1>\s*|# AGENTS\.md instructions.*)",
    re.DOTALL | re.IGNORECASE,
)
"""Messages of the user that Codex writes: no turns (`is_contextual_user_fragment` in codex-rs/core)."""

_SETTINGS = re.compile(
    r"\s*<(?:permissions instructions|model_switch|collaboration_mode|realtime_conversation"
    r"|skills_instructions|plugins_instructions|apps_instructions|personality_spec|token_budget"
    r"|multi_agent_role|multi_agent_mode|persistent_mode|managed_developer_instructions)>",
    re.IGNORECASE,
)
"""Developer messages that a rollback takes back with the turn behind them."""


class _Provenance(msgspec.Struct, gc=False):
    type: str | None = None


class _Instructions(msgspec.Struct, gc=False):
    text: str | None = None
    provenance: _Provenance | None = None


class _HistoryBase(msgspec.Struct, gc=False):
    thread_id: str
    end_ordinal_exclusive: int


class Meta(msgspec.Struct, gc=False):
    """The start of a file."""

    id: str | None = None
    forked_from_id: str | None = None
    forked_from_ordinal_exclusive: int | None = None
    history_base: _HistoryBase | None = None
    parent_thread_id: str | None = None
    agent_nickname: str | None = None
    agent_role: str | None = None
    cwd: str | None = None
    originator: str | None = None
    cli_version: str | None = None
    base_instructions: _Instructions | str | None = None
    dynamic_tools: Any = None


class Turn(msgspec.Struct, gc=False):
    """Settings of the turns that follow."""

    model: str | None = None


class Usage(msgspec.Struct, gc=False):
    """The end of a call."""

    response_id: str | None = None


class Compacted(msgspec.Struct, gc=False):
    """A new history."""

    compaction_response_id: str | None = None
    message: str | None = None
    replacement_history: list[Item] | None = None


class Event(msgspec.Struct, gc=False):
    """An event; only rollbacks are read."""

    type: str | None = None
    num_turns: int | None = None


class _Thread:
    """Tells the contexts what the items of a file say.

    Attributes:
        log: The contexts.
        reply: Answer that further items extend; None if the next item begins one.
        call: Answers since the end of the last call, which are those of the call that ends next.
        last_call: Name of the last call that ended, and its answers.
        unended: Answers behind which their call did not end.
        has_ends: True if the file tells where calls end, as versions since 0.171 do.
        turns: Messages at which a rollback may cut, by whether they begin a turn.
        summary: The last compaction's summary.
    """

    def __init__(self, log: Contexts) -> None:
        self.log = log
        self.reply: Said | None = None
        self.call: list[Said] = []
        self.last_call: tuple[str | None, list[Said]] = (None, [])
        self.unended: list[Said] = []
        self.has_ends = False
        self.turns: dict[Said, bool] = {}
        self.summary: Said | None = None

    def add(self, item: Item, where: str, key: str, *, given: bool = False) -> None:
        """Add an item."""
        log = self.log
        try:
            piece = read_item(item, where)
        except InputError as error:
            self.reply = None if item.is_of_environment else self.reply
            log.lose(error, where, in_answer=self.reply is not None)
            return
        if piece is None:
            return
        if piece["role"] != "assistant":
            self._break_off()
            role = chat_role(piece["role"], is_answered=any(n.is_answer for n in log.path()))
            node = log.say([piece | {"role": role}], where, key, given=given)
            if piece["role"] in {"user", "developer"}:
                text = str(piece["content"])
                is_user = piece["role"] == "user"
                is_context = (_CONTEXT.fullmatch if is_user else _SETTINGS.match)(text) is not None
                if is_user or is_context:
                    self.turns[node] = not is_context
            return
        if self.reply is not None and "reasoning_content" in piece and _is_thought(self.reply):
            self._break_off()  # one call thinks once: the stream before it broke off
        is_open = self.reply is not None
        if self.reply is None:
            self.reply = log.say([], where, key, given=given)
            self.call.append(self.reply)
        add_piece(self.reply.messages, piece, is_open=is_open)
        self.reply.where = where
        if results := results_in(item, where):
            self.reply = None
            log.say(results, where, f"{key} results")

    def _break_off(self) -> None:
        """End the answer; it was not the end of a call."""
        self.unended += self.call
        self.reply, self.call = None, []

    def end(self, name: str | None) -> None:
        """End the call, of which the open answer and those directly before it are the answers."""
        self.last_call = (name, self.call)
        self.reply, self.call, self.has_ends = None, [], True

    def compact(self, line: Compacted, where: str) -> None:
        """Begin a context with the new history; without one, Codex keeps the user's messages."""
        log, (name, answers) = self.log, self.last_call
        if name is not None and name == line.compaction_response_id and answers:
            log.rewind(answers[0].before)  # the call wrote the summary
            for answer in answers:
                answer.is_given = True
            note(SUMMARIES)
        self._break_off()
        path = [node for node in log.path() if node is not self.summary]
        system = [node for node in path[:1] if node.role == "system"]
        log.replace(system)
        for i, item in enumerate(line.replacement_history or ()):
            self.add(item, where, f"{where} {i}", given=True)
        self.reply, self.call, self.summary = None, [], None
        if not line.replacement_history and line.message:
            nodes = [n for n in path[len(system) :] if n.role in {"system", "user"}]
            if sum(len(str(node.messages[0]["content"]).encode()) for node in nodes) > _KEPT_BYTES:
                finding = "a compaction that kept an unknown part of the user's messages"
                log.lose(bad_message(where, finding))
            for node in nodes:
                self.turns[log.say(node.messages, node.where, node.key)] = self.turns.get(
                    node, False
                )
            self.summary = log.say([{"role": "user", "content": line.message}], where)
            self.turns[self.summary] = True

    def roll_back(self, num_turns: int) -> None:
        """Take back turns, and the settings directly before the first of them."""
        self._break_off()
        path = self.log.path()
        turns = [i for i, node in enumerate(path) if self.turns.get(node)]
        if num_turns <= 0 or not turns:
            return
        cut = turns[-min(num_turns, len(turns))]
        while cut > turns[0] and self.turns.get(path[cut - 1]) is False:
            cut -= 1
        self.log.rewind(path[cut - 1] if cut else None)

    def finish(self) -> None:
        """Make the answers without an end part of the prompt, in a file that tells the ends."""
        self._break_off()
        if self.has_ends:
            for answer in self.unended:
                note(UNENDED, answer.trains)
                answer.is_given = True


def _is_thought(reply: Said) -> bool:
    """True if an answer has nothing but reasoning so far."""
    last = reply.messages[-1]
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the items of a session."""
    thread = _Thread(log)
    for where, _, record in lines:
        match record:
            case Item():
                thread.add(record, f"{where}, payload", where)
            case Usage():
                thread.end(record.response_id)
            case Compacted():
                thread.compact(record, f"{where}, payload")
            case Meta():
                _begin(record, where, log)
            case Turn():
                log.model = record.model or log.model
            case Event(type="thread_rolled_back"):
                thread.roll_back(record.num_turns or 0)
    thread.finish()


def _begin(meta: Meta, where: str, log: Contexts) -> None:
    text = meta.base_instructions
    if isinstance(text, _Instructions):
        note(EDITED, text.provenance is not None and text.provenance.type == "model")
        text = text.text
    if text and log.tip is None:
        log.say([{"role": "system", "content": text}], where)
    log.tools = tools(meta.dynamic_tools) or log.tools


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def identity(kind: str, payload: bytes) -> str | None:
    """Return an item without its id, which a fork may change."""
    if kind not in {"response_item", "compacted"}:
        return None
    try:
        fields = _FIELDS.decode(payload)
    except msgspec.MsgspecError:
        return repr(payload)  # the reader reports the damage
    texts = (f"{name} {canonical_json(bytes(value))}" for name, value in fields.items())
    return "\0".join(sorted(text for text in texts if not text.startswith("id ")))


def names(path: Path, first: Sequence[Any]) -> Names:
    """Return the names in the first line."""
    meta = next((line for line in first if isinstance(line, Meta)), Meta())
    base = meta.history_base
    ordinal = meta.forked_from_ordinal_exclusive
    if base is None and meta.forked_from_id is not None and ordinal is not None:
        base = _HistoryBase(meta.forked_from_id, ordinal)
    return Names(
        meta.id or str(path),
        meta.parent_thread_id,
        meta.agent_nickname or meta.agent_role or meta.id,
        meta.forked_from_id,
        None if base is None else Base(base.thread_id, base.end_ordinal_exclusive),
        {"cwd": meta.cwd, "originator": meta.originator, "version": meta.cli_version},
    )


_RECORDS = {
    "session_meta": Meta,
    "turn_context": Turn,
    "response_item": Item,
    "event_msg": Event,
    "compacted": Compacted,
    "token_usage_record": Usage,
}
ADAPTER = Sessions(
    kind="type",
    payload="payload",
    records=_RECORDS,
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like({"type": {*_RECORDS, "world_state"}, "payload": dict, "timestamp": str}),
    identity=identity,
    is_prefix=True,
).adapter("sessions of Codex CLI (rollout-*.jsonl); text only")
