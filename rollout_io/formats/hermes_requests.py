"""The messages of Hermes Agent's sessions as it sends them to its model.

The rules are those of Hermes 0.19: what it stores (`hermes_state.py`, `run_agent.py`), and what it makes of
that for a request (`agent/conversation_loop.py`, `agent/agent_runtime_helpers.py`). Not in a log, so
unknown here: a system prompt for one call only, prefilled messages, and what is said during a call
after its result was stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import CALLS, INACTIVE, MESSAGE, read_message
from rollout_io.formats.requests import Sends

NOT_SENT = "messages with a role that Hermes does not send: left out"
NOT_SAMPLED = "answers that no call ended (no `finish_reason`): interrupted, or the program's: part of the prompt"
_ROLES = {"system", "user", "assistant", "tool", "function", "developer"}
ORPHANS = "results without a call before them, which Hermes does not send: left out"
UNANSWERED = "calls without a result, for which Hermes sends one"
ASKED = "answers that the program asked for in words that are not in the log: part of the prompt"
SENDS = Sends(
    {"user": "\n\n"},
    missing="[Result unavailable — see context summary above]",
    is_missing_first=True,
    unanswered=UNANSWERED,
    orphans=ORPHANS,
)
_CANDIDATES = {"verification_required", "verify_hook_continue"}
"""Ends of answers that the next one replaces."""
THOUGHTS = "thoughts that Hermes sends again only to DeepSeek, Kimi and MiMo, before later answers"
_THINKERS = ("deepseek", "mimo")
_PROVIDERS = {"deepseek", "xiaomi", "kimi-coding", "kimi-coding-cn"}
_HOSTS = ("api.kimi.com", "moonshot.ai", "moonshot.cn", "api.deepseek.com", "xiaomimimo.com")
_SUMMARY = ("[CONTEXT COMPACTION", "[CONTEXT SUMMARY")
_MERGED = "[END OF PRIOR CONTEXT — COMPACTION SUMMARY BELOW]"
"""What stands before a summary that was written behind the text of the first message that was kept."""
_OF_CALLS = {
    "names of calls, and signatures, for the API": "call_id response_item_id extra_content"
}
HERMES_MESSAGE = MESSAGE.plus(
    reads={"message": "compacted api_content finish_reason timestamp"},
    leaves={
        "repeats the name of a call": "message/tool_name",
        "names of messages": "message/session_id message/platform_message_id message/observed",
        "facts about a message": "message/token_count message/effect_disposition",
        "repeats the reasoning and the text, for the API": "message/reasoning_details "
        "message/codex_reasoning_items message/codex_message_items",
    },
    inner={"message/tool_calls": CALLS.plus(leaves=_OF_CALLS)},
)


class State(msgspec.Struct, gc=False):
    """What a message has beside its text."""

    role: str
    active: bool | int | None = None
    compacted: bool | int | None = None
    api_content: str | None = None
    finish_reason: str | None = None
    timestamp: float | None = None
    reasoning_details: Any = None
    codex_reasoning_items: Any = None
    codex_message_items: Any = None

    @property
    def is_interim(self) -> bool:
        """True if the API has items of the answer."""
        has_items = bool(self.codex_reasoning_items or self.codex_message_items)
        return has_items or self.finish_reason == "incomplete"


class Row(NamedTuple):
    """A message.

    Attributes:
        is_old: True if a later compression took its place.
        state: Its other fields.
        given: Why an answer is part of the prompt; None: it is not.
    """

    message: Message
    where: str
    is_old: bool
    state: State
    given: str | None = None

    @property
    def role(self) -> str:
        """Its role."""
        return str(self.message["role"])

    @property
    def is_thought(self) -> bool:
        """True if it is an answer of thoughts alone, which is not sent again."""
        message = self.message
        is_empty = not message.get("tool_calls") and not message["content"]
        return self.role == "assistant" and is_empty and not self.state.is_interim

    @property
    def is_alone(self) -> bool:
        """True if it is never merged with one beside it."""
        is_text = isinstance(self.message["content"], str) or self.role == "assistant"
        return self.is_summary or self.state.is_interim or not is_text

    @property
    def is_summary(self) -> bool:
        """True if a compression wrote it, by what it says at its start."""
        content = self.message["content"]
        parts = (
            [content] if isinstance(content, str) else [p.get("text", "") for p in content or ()]
        )
        text = "\n".join(parts)
        return text.rpartition(_MERGED)[2].lstrip().startswith(_SUMMARY)


def name_of(message: Message) -> Any:
    """Return what a copy of a message has too: arguments and results of calls may be shortened in it."""
    calls = [call.get("id") for call in message.get("tool_calls", ())]
    call = message.get("tool_call_id")
    if all(calls) and calls:
        return ("calls", calls)
    return ("tool", call) if call else message


_STATE = msgspec.json.Decoder(State)


def rows_of(messages: Sequence[msgspec.Raw], where: str) -> list[Row]:
    """Return the messages of a session as they are sent, without those that were taken back."""
    states = [
        decode_line(_STATE, bytes(raw), f"{where}, messages[{i}]") for i, raw in enumerate(messages)
    ]
    has_reasons = any(state.finish_reason for state in states)
    rows = list[Row]()
    for i, (raw, state) in enumerate(zip(messages, states, strict=True)):
        place = f"{where}, messages[{i}]"
        is_active = state.active is None or bool(state.active)
        if not is_active and not state.compacted:
            note(INACTIVE)
        elif state.role not in _ROLES:
            note(NOT_SENT)
        else:
            is_sampled = state.finish_reason is not None or not has_reasons
            given = None if is_sampled or state.role != "assistant" else NOT_SAMPLED
            message = _sent(read_message(raw, place), state)
            rows.append(Row(message, place, not is_active, state, given))
    return rows


def sends_thoughts(provider: str, url: str, model: str, rows: Iterable[Row]) -> bool:
    """True if thoughts of earlier answers are sent again, as text or as the API's own items."""
    is_asked_for = provider in _PROVIDERS or any(host in url for host in _HOSTS)
    is_thinker = any(name in model.lower() for name in _THINKERS)
    has_items = any(row.state.reasoning_details or row.state.is_interim for row in rows)
    return is_asked_for or is_thinker or has_items


def _sent(message: Message, state: State) -> Message:
    """Return a message as Hermes sends it: with what it added, and without space around it."""
    content = message["content"]
    if state.api_content and state.role in {"user", "assistant"}:
        content = state.api_content
    is_text = isinstance(content, str) and state.role != "assistant"
    return message | {"content": content.strip() if is_text else content}


def say(rows: Sequence[Row], num_written: int, log: Contexts) -> None:
    """Say the messages of a context, of which a compression or a branch wrote the first ones.

    An answer behind an answer takes its place in later requests, or is merged with it: the program had
    asked for it in words that are not in the log.
    """
    last, start, is_asked = None, None, False  # the last message that is no result; what it follows
    for n, row in enumerate(rows):
        is_answer = row.role == "assistant"
        is_asked = is_asked and row.role != "user"
        if log.sends.joins and last is not None and _replaces(row, last):
            log.rewind(start)
            is_asked = is_asked or is_answer
            if is_answer and last.state.finish_reason not in _CANDIDATES:
                row = row._replace(message=_merged(last.message, row.message))
        if row.role != "tool":
            last, start = row, log.tip
        given = n < num_written or row.given or (ASKED if is_asked and is_answer else False)
        log.say([row.message], row.where, given=given, is_alone=row.is_alone)


def _replaces(row: Row, last: Row) -> bool:
    """True if requests behind a message do not have the answer before it."""
    if last.role != "assistant" or last.message.get("tool_calls"):
        return False
    return not (last.is_alone or row.is_alone) if row.role == "assistant" else last.is_thought


def _merged(last: Message, message: Message) -> Message:
    """Return two answers as one."""
    contents = [other["content"] for other in (last, message)]
    content = next(filter(None, contents), "")
    if all(isinstance(content, str) for content in contents):
        content = "\n".join(filter(None, map(str.strip, contents)))
    return {**message, **last, "content": content}
