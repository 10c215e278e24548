"""The `hermes` format: sessions that Hermes Agent exports (`hermes sessions export`), one per line.

A session is a run, named by its `id`. A compression writes the first messages again, then a summary, then
the last messages again: into a child session (`parent_session_id`, `end_reason`), which belongs to the run
of its parent, or into the same session, whose earlier messages become `compacted`. What it wrote is part
of the prompt; the answers before it train in the context in which they were sampled.

    rows        1 2 3 4 5 6 | 1 2 S 5 6 7      contexts     1 2 3 4 5 6
                (compacted)                                 1 2 S 5 6 7, of which 7 is new

So are the messages of its parent with which a branch begins. Messages that are neither `active` nor
`compacted` were taken back by the user and are left out. The rules are those of Hermes 0.19, whose export has
active messages alone: what it stores (`hermes_state.py`, `run_agent.py`), what it makes of that for a request
(`agent/conversation_loop.py`, `agent/agent_runtime_helpers.py`), and compressions
(`agent/context_compressor.py`). Not in a log, so unknown here: a system prompt for one call only, prefilled
messages, and what is said during a call after its result was stored; nor tool definitions, a reward or token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import eq
from typing import Annotated, Any, NamedTuple

import msgspec

from rollout_io.formats.base import Options, Place, Run, Trajectory, note
from rollout_io.formats.chats import (
    Line,
    metrics_of,
    run_of,
    system_of,
    trajectory_of,
    with_groups,
)
from rollout_io.formats.contexts import SUMMARIES, Contexts
from rollout_io.formats.engines.records import Records, joined
from rollout_io.formats.grammar import inner, like
from rollout_io.formats.parsing.content import NO_JSON, Message
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import CALLS, INACTIVE, MESSAGE, openai_tools, read_message
from rollout_io.formats.parsing.records import read_record
from rollout_io.formats.requests import Sends

NOT_SENT = "messages with a role that Hermes does not send: left out"
NOT_SAMPLED = "answers that no call ended (no `finish_reason`): interrupted, or the program's: part of the prompt"
_ROLES = {"system", "user", "assistant", "tool", "function", "developer"}
ORPHANS = "results without a call before them, which Hermes does not send: left out"
UNANSWERED = "calls without a result, for which Hermes sends one"
ASKED = "answers that the program asked for in words that are not in the log: part of the prompt"
_SENDS = Sends(
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
_MESSAGE = MESSAGE.plus(
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


class _State(msgspec.Struct, gc=False):
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


class _Row(NamedTuple):
    """A message.

    Attributes:
        is_old: True if a later compression took its place.
        state: Its other fields.
        given: Why an answer is part of the prompt; None: it is not.
    """

    message: Message
    where: str
    is_old: bool
    state: _State
    given: str | None = None

    @property
    def role(self) -> str:
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
        content = self.message["content"] or ()
        parts = [{"text": content}] if isinstance(content, str) else content
        text = "\n".join(part.get("text", "") for part in parts)
        return text.rpartition(_MERGED)[2].lstrip().startswith(_SUMMARY)


def _name_of(message: Message) -> Any:
    """Return what a copy of a message has too: arguments and results of calls may be shortened in it."""
    calls = [call.get("id") for call in message.get("tool_calls", ())]
    call = message.get("tool_call_id")
    if all(calls) and calls:
        return ("calls", calls)
    return ("tool", call) if call else message


_STATE = msgspec.json.Decoder(_State)


def _rows_of(messages: Sequence[msgspec.Raw], where: str) -> list[_Row]:
    """Return the messages of a session as they are sent, without those that were taken back."""
    places = [f"{where}, messages[{i}]" for i in range(len(messages))]
    states = [decode_line(_STATE, bytes(r), p) for r, p in zip(messages, places, strict=True)]
    has_reasons = any(state.finish_reason for state in states)
    rows = list[_Row]()
    for raw, state, place in zip(messages, states, places, strict=True):
        is_active = state.active is None or bool(state.active)
        if not is_active and not state.compacted:
            note(INACTIVE)
        elif state.role not in _ROLES:
            note(NOT_SENT)
        else:
            is_sampled = state.finish_reason is not None or not has_reasons
            given = None if is_sampled or state.role != "assistant" else NOT_SAMPLED
            message = read_message(raw, place)
            content = message["content"]
            if state.api_content and state.role in {"user", "assistant"}:
                content = state.api_content
            is_text = isinstance(content, str) and state.role != "assistant"
            message["content"] = content.strip() if is_text else content
            rows.append(_Row(message, place, not is_active, state, given))
    return rows


def _sends_thoughts(session: Session, rows: Iterable[_Row]) -> bool:
    """True if thoughts of earlier answers are sent again, as text or as the API's own items."""
    url, model = session.billing_base_url or "", (session.model or "").lower()
    is_asked_for = session.billing_provider in _PROVIDERS or any(host in url for host in _HOSTS)
    is_thinker = any(name in model for name in _THINKERS)
    has_items = any(row.state.reasoning_details or row.state.is_interim for row in rows)
    return is_asked_for or is_thinker or has_items


def _say(rows: Sequence[_Row], num_written: int, log: Contexts) -> None:
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


def _replaces(row: _Row, last: _Row) -> bool:
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


NO_PARENT = (
    "compressed sessions whose parent is not in the log: kept answers are not told from new ones"
)
NO_OLD = "compressed sessions without the messages before the compression: kept answers are part of the prompt"
_INSERTED_S = 1e-5
"""Messages that a compression writes in its own session are a microsecond apart; others took a call, or
a transaction of the store."""
_NUM_SUMMARIES = 2
"""Most messages of a compression that are no copies."""
_COMPRESSION = "compression"
_FACTS = frozenset({"started_at", "ended_at", "archived"})
_LEAVES = {
    "settings of the harness": "model_config source cwd user_id platform chat_id session_key "
    "chat_type thread_id origin_json git_branch git_repo_root profile_name expiry_finalized "
    "compression_failure_cooldown_until compression_failure_error compression_fallback_streak",
    "facts about the session that are shown to the user": "title "
    "billing_mode cost_status cost_source pricing_version handoff_state "
    "handoff_platform handoff_error display_name",
}


class Session(Line, kw_only=True):
    """A session, whose numbers become metrics."""

    messages: Annotated[list[msgspec.Raw], inner(_MESSAGE)]
    message_count: int
    parent_session_id: str | None = None
    end_reason: str | None = None
    model: str | None = None
    billing_provider: str | None = None
    billing_base_url: str | None = None
    tool_call_count: msgspec.Raw = NO_JSON
    api_call_count: msgspec.Raw = NO_JSON
    rewind_count: msgspec.Raw = NO_JSON
    input_tokens: msgspec.Raw = NO_JSON
    output_tokens: msgspec.Raw = NO_JSON
    cache_read_tokens: msgspec.Raw = NO_JSON
    cache_write_tokens: msgspec.Raw = NO_JSON
    reasoning_tokens: msgspec.Raw = NO_JSON
    estimated_cost_usd: msgspec.Raw = NO_JSON
    actual_cost_usd: msgspec.Raw = NO_JSON
    archived: msgspec.Raw = NO_JSON
    started_at: msgspec.Raw = NO_JSON
    ended_at: msgspec.Raw = NO_JSON


_SESSION = msgspec.json.Decoder(Session)
_NAME = msgspec.json.Decoder(str | int | None)


def _session(place: Place) -> Session:
    content = read_record(place)
    return decode_line(_SESSION, content, place.where).keeping(content)


def _name(session: Session) -> str:
    return str(_NAME.decode(session.id))


def _run_of(session: Session, place: Place) -> Run:
    """Return the run of a session, if others can name it."""
    decode_line(_NAME, bytes(session.id), f"{place.where}, id")
    return run_of(session, place)


def _parts(rows: Iterable[_Row], *, is_continued: bool) -> list[list[_Row]]:
    """Divide messages at their compressions, each of which wrote the beginning of a part.

    If the session is continued, one wrote the beginning of the first part, too.
    """
    parts, is_before_summary = [list[_Row]()], is_continued
    for row in rows:
        part = parts[-1]
        if part and part[-1].is_old and not row.is_old:
            parts.append([row])
            is_before_summary = not row.is_summary
            continue
        if row.is_summary and row.is_old and part and not part[-1].is_summary:
            if not is_before_summary and not _is_head(part, parts):
                num_head = _num_repeated(part)
                parts[-1:] = [part[: len(part) - num_head], part[len(part) - num_head :]]
            is_before_summary = False
        parts[-1].append(row)
    return [part for part in parts if part]


def _is_head(part: Sequence[_Row], parts: Sequence[Sequence[_Row]]) -> bool:
    """True if the last of some parts is no more than the beginning of the one before it."""
    before = parts[-2][: len(part)] if len(parts) > 1 else []
    return [_name_of(row.message) for row in part] == [_name_of(row.message) for row in before]


def _num_repeated(rows: Sequence[_Row]) -> int:
    """Return the largest number of messages at the end that are copies of the first ones."""
    names = [_name_of(row.message) for row in rows]
    sizes = range(len(names) // 2, 0, -1)
    return next((size for size in sizes if names[:size] == names[-size:]), 0)


def _num_summarized(rows: Sequence[_Row]) -> int:
    """Return the number of messages up to the last summary."""
    return max((i + 1 for i, row in enumerate(rows) if row.is_summary), default=0)


def _num_inserted(rows: Sequence[_Row]) -> int:
    """Return how many copies a compression wrote behind a summary, the first of the rows, by their times."""
    times_s = [row.state.timestamp for row in rows]
    first_s = end_s = times_s[0]
    if first_s is None or end_s is None:
        return 0
    for count, time_s in enumerate(times_s[1:]):
        if time_s is None or first_s <= time_s > end_s + _INSERTED_S:
            return count
        end_s = max(end_s, time_s)
    return len(rows) - 1


def _num_written(rows: Sequence[_Row], others: Sequence[Any], *, is_compressed: bool) -> int:
    """Return how many messages a compression or a branch wrote: copies, around a summary.

    The others are the names of the messages of what the rows continue.
    """
    names = [_name_of(row.message) for row in rows]
    num_head: int = sum(takewhile(bool, map(eq, names, others)))
    gap = rows[num_head : num_head + _NUM_SUMMARIES]
    num_marked = _num_summarized(gap)
    if not is_compressed and not num_marked:
        return num_head
    for start in range(num_head + max(num_marked, 1), num_head + len(gap) + 1):
        sizes = range(min(len(names) - start, len(others)), 0, -1)
        size = next((n for n in sizes if names[start : start + n] == others[-n:]), 0)
        if size:
            return start + size
    return num_head + num_marked


def _names(run: Run) -> tuple[str, str | None]:
    session = _session(run.places[0])
    return _name(session), session.parent_session_id


def _is_continued(run: Run, parent: Run) -> bool:
    """True if a session begins with messages of its parent, or with a summary of them."""
    session, before = _session(run.places[0]), _session(parent.places[0])
    is_child = before.parent_session_id is not None
    (*_, last), (first, *_) = (
        _parts(_rows_of(before.messages, ""), is_continued=is_child) or [[]],
        _parts(_rows_of(session.messages, ""), is_continued=True) or [[]],
    )
    others = [_name_of(row.message) for row in last]
    return _num_written(first, others, is_compressed=before.end_reason == _COMPRESSION) > 0


def read(session: Session, run: Run, _: Options) -> Trajectory:
    """Read the contexts of a session, and of those that continue it, whose counts are added up.

    Raises:
        InputError: `message`: there are two system prompts, or an invalid message.
    """
    log = Contexts(tools=openai_tools(session.tools))
    ends: dict[str, tuple[list[list[Any]], bool]] = {}
    for i, place in enumerate(run.places):
        other = _session(place) if i else session
        rows = _rows_of(other.messages, place.where)
        system = system_of(other, (row.message for row in rows), place.where)
        parent = other.parent_session_id
        before, is_compressed = ends.get(parent or "", ([], False))
        # Hermes stores how each of its calls ended: else another program made the requests.
        is_called = any(row.state.finish_reason for row in rows)
        unsent = None if _sends_thoughts(other, rows) else THOUGHTS
        log.sends = (_SENDS if is_called else Sends())._replace(unsent_thoughts=unsent)
        for part in _parts(rows, is_continued=parent is not None):
            num_written = _num_summarized(part)
            if before:
                counts = [_num_written(part, one, is_compressed=is_compressed) for one in before]
                num_written = max(num_written, *counts)
            elif num_written:
                note(NO_OLD if parent is None else NO_PARENT)
                num_written += _num_inserted(part[num_written - 1 :])
            note(SUMMARIES, any(row.is_summary for row in part[:num_written]))
            log.replace()
            log.say(system, place.where)
            _say(part, num_written, log)
            # A compression copies messages as they were sent, or as they were stored.
            live = log.sent(log.sends._replace(missing=None))[len(system) :]
            stored = [row.message for row in part]
            before, is_compressed = [[*map(_name_of, one)] for one in (live, stored)], True
        ends[_name(other)] = before, other.end_reason == _COMPRESSION
    trajectory = trajectory_of(session, run, log.steps())
    totals = dict(trajectory.metrics)
    for place in run.places[1:]:
        for name, value in metrics_of(_session(place), place).items():
            totals[name] = totals.get(name, 0.0) + (value if name not in _FACTS else 0.0)
    trajectory.metrics = totals
    return trajectory


ADAPTER = Records(
    records={"": Session},
    leaves=_LEAVES,
    run=_run_of,
    read=read,
    is_record=like("id source system_prompt message_count messages"),
    finish=lambda items: joined(with_groups(items), _names, _is_continued),
).adapter(
    "sessions of Hermes Agent, as it exports them: JSONL; text only", "session", is_agent=True
)
