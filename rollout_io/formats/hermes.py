"""The `hermes` format: sessions that Hermes Agent exports (`hermes sessions export`), one per line.

    {"id": "20260618_102031_bb7d6b", "source": "cli", "model": "...", "system_prompt": "...",
     "started_at": 1781792578.4, "message_count": 2, "messages": [
        {"id": 1, "role": "user", "content": "...", "active": 1},
        {"id": 2, "role": "assistant", "content": "...", "reasoning": "...", "tool_calls": [...]}]}

A session is a run, named by its `id`. The system prompt is the first message; messages that are not
`active` were taken back by the user and are left out. The log has no tool definitions, no reward and
no token ids.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from rollout_io.formats.engines.records import Records, is_object_with
from rollout_io.formats.grammar import inner
from rollout_io.formats.openai_messages import Line, read, run_of, with_groups
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.messages import MESSAGE

_MESSAGE = MESSAGE.plus(
    leaves={
        "repeats the name of a call": "message/tool_name",
        "names and times of messages": "message/session_id message/timestamp "
        "message/platform_message_id message/active message/observed",
        "repeats the reasoning and the text, for the API": "message/reasoning_details "
        "message/codex_reasoning_items message/codex_message_items",
    },
)
_LEAVES = {
    "settings of the harness": "model model_config source cwd user_id platform chat_id",
    "facts about the session that are shown to the user": "title end_reason "
    "parent_session_id billing_provider billing_base_url billing_mode cost_status "
    "cost_source pricing_version handoff_state handoff_platform handoff_error",
}


class Session(Line, gc=False, kw_only=True):
    """A session, whose numbers become metrics."""

    messages: Annotated[list[msgspec.Raw], inner(_MESSAGE)]
    message_count: int
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


ADAPTER = Records(
    records={"": Session},
    leaves=_LEAVES,
    run=run_of,
    read=read,
    is_record=is_object_with(["id", "source", "system_prompt", "message_count", "messages"]),
    finish=with_groups,
).adapter(
    "sessions of Hermes Agent, as it exports them: JSONL; text only", "session", is_agent=True
)
