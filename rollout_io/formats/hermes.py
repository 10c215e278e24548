"""The `hermes` format: sessions that Hermes Agent exports (`hermes sessions export`), one per line.

    {"id": "20260618_102031_bb7d6b", "source": "cli", "model": "...", "system_prompt": "...",
     "started_at": 1781792578.4, "message_count": 2, "messages": [
        {"id": 1, "role": "user", "content": "...", "active": 1},
        {"id": 2, "role": "assistant", "content": "...", "reasoning": "...", "tool_calls": [...]}]}

A session is a run, named by its `id`. A compression writes the first messages again, then a summary, then
the last messages again: into a child session (`parent_session_id`, `end_reason`), which belongs to the run
of its parent, or into the same session, whose earlier messages become `compacted`. What it wrote is part
of the prompt; the answers before it train in the context in which they were sampled.

    rows        1 2 3 4 5 6 | 1 2 S 5 6 7      contexts     1 2 3 4 5 6
                (compacted)                                 1 2 S 5 6 7, of which 7 is new

So are the messages of its parent with which a branch begins. Messages that are neither `active` nor
`compacted` were taken back by the user and are left out. The messages of a request are those of
`hermes_requests`; compressions are those of Hermes 0.19 (`agent/context_compressor.py`), whose export has
active messages alone. The log has no tool definitions, no reward and no token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

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
from rollout_io.formats.engines.records import Records, is_object_with, joined
from rollout_io.formats.grammar import inner
from rollout_io.formats.hermes_requests import (
    HERMES_MESSAGE,
    SENDS,
    THOUGHTS,
    Row,
    name_of,
    rows_of,
    say,
    sends_thoughts,
)
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.messages import openai_tools
from rollout_io.formats.parsing.records import read_record
from rollout_io.formats.requests import Sends

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

    messages: Annotated[list[msgspec.Raw], inner(HERMES_MESSAGE)]
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


def _parts(rows: Iterable[Row], *, is_continued: bool) -> list[list[Row]]:
    """Divide the messages of a session at its compressions: each part begins with what one wrote.

    Args:
        rows: The messages.
        is_continued: True if the first part begins with what a compression wrote, too.
    """
    parts, is_before_summary = [list[Row]()], is_continued
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


def _is_head(part: Sequence[Row], parts: Sequence[Sequence[Row]]) -> bool:
    """True if the last of some parts is no more than the beginning of the one before it."""
    before = parts[-2][: len(part)] if len(parts) > 1 else []
    return [name_of(row.message) for row in part] == [name_of(row.message) for row in before]


def _num_repeated(rows: Sequence[Row]) -> int:
    """Return the largest number of messages at the end that are copies of the first ones."""
    names = [name_of(row.message) for row in rows]
    sizes = range(len(names) // 2, 0, -1)
    return next((size for size in sizes if names[:size] == names[-size:]), 0)


def _num_summarized(rows: Sequence[Row]) -> int:
    """Return the number of messages up to the last summary."""
    return max((i + 1 for i, row in enumerate(rows) if row.is_summary), default=0)


def _num_inserted(rows: Sequence[Row]) -> int:
    """Return how many copies a compression wrote behind a summary, by their times.

    Args:
        rows: The summary, and what follows it.
    """
    times_s = [row.state.timestamp for row in rows]
    first_s = end_s = times_s[0]
    if first_s is None or end_s is None:
        return 0
    for count, time_s in enumerate(times_s[1:]):
        if time_s is None or first_s <= time_s > end_s + _INSERTED_S:
            return count
        end_s = max(end_s, time_s)
    return len(rows) - 1


def _num_written(rows: Sequence[Row], others: Sequence[Any], *, is_compressed: bool) -> int:
    """Return how many messages a compression or a branch wrote: copies, around a summary.

    Args:
        rows: Messages of a session, or of a part of it.
        others: Names of the messages of what it continues.
        is_compressed: True if that ended with a compression.
    """
    names = [name_of(row.message) for row in rows]
    pairs = enumerate(zip(names, others, strict=False))
    num_head = next(
        (i for i, (name, other) in pairs if name != other), min(len(names), len(others))
    )
    gap = rows[num_head : num_head + _NUM_SUMMARIES]
    num_marked = max((i + 1 for i, row in enumerate(gap) if row.is_summary), default=0)
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
        _parts(rows_of(before.messages, ""), is_continued=is_child) or [[]],
        _parts(rows_of(session.messages, ""), is_continued=True) or [[]],
    )
    others = [name_of(row.message) for row in last]
    return _num_written(first, others, is_compressed=before.end_reason == _COMPRESSION) > 0


def read(session: Session, run: Run, _: Options) -> Trajectory:
    """Read the contexts of a session, and of those that continue it, whose counts are added up.

    Raises:
        InputError: `message`: there are two system prompts, or an invalid message.
    """
    log = Contexts(tools=openai_tools(session.tools))
    ends: dict[str, tuple[list[Any], bool]] = {}
    for i, place in enumerate(run.places):
        other = _session(place) if i else session
        rows = rows_of(other.messages, place.where)
        system = system_of(other, (row.message for row in rows), place.where)
        provider, url = other.billing_provider or "", other.billing_base_url or ""
        has_thoughts = sends_thoughts(provider, url, other.model or "", rows)
        parent = other.parent_session_id
        before, is_compressed = ends.get(parent or "", ([], False))
        # Hermes stores how each of its calls ended: else another program made the requests.
        is_called = any(row.state.finish_reason for row in rows)
        log.sends = SENDS if is_called else Sends()
        log.sends = log.sends._replace(unsent_thoughts=None if has_thoughts else THOUGHTS)
        for part in _parts(rows, is_continued=parent is not None):
            num_written = _num_summarized(part)
            if before:
                num_repeated = _num_written(part, before, is_compressed=is_compressed)
                num_written = max(num_written, num_repeated)
            elif num_written:
                note(NO_OLD if parent is None else NO_PARENT)
                num_written += _num_inserted(part[num_written - 1 :])
            note(SUMMARIES, any(row.is_summary for row in part[:num_written]))
            log.replace()
            log.say(system, place.where)
            say(part, num_written, log)
            live = log.sent(log.sends._replace(missing=None))  # what a compression copies
            before, is_compressed = [*map(name_of, live[len(system) :])], True
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
    run=run_of,
    read=read,
    is_record=is_object_with(["id", "source", "system_prompt", "message_count", "messages"]),
    finish=lambda items: joined(with_groups(items), _names, _is_continued),
).adapter(
    "sessions of Hermes Agent, as it exports them: JSONL; text only", "session", is_agent=True
)
