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

from functools import partial

import msgspec

from rollout_io.formats.base import Adapter
from rollout_io.formats.contents import Contents
from rollout_io.formats.openai_messages import find_conversations, read_conversation
from rollout_io.formats.parsing.messages import MESSAGE
from rollout_io.formats.start import Start

_MESSAGE = MESSAGE.plus(
    leaves={
        "repeats the name of a call": "message/tool_name",
        "names and times of messages": "message/session_id message/timestamp "
        "message/platform_message_id message/active message/observed",
        "repeats the reasoning and the text, for the API": "message/reasoning_details "
        "message/codex_reasoning_items message/codex_message_items",
    },
)
CONTENTS = Contents(
    reads={
        "": "id system_prompt message_count tool_call_count api_call_count rewind_count "
        "input_tokens output_tokens cache_read_tokens cache_write_tokens reasoning_tokens "
        "estimated_cost_usd actual_cost_usd archived started_at ended_at"
    },
    leaves={
        "settings of the harness": "model model_config source cwd user_id platform chat_id",
        "facts about the session that are shown to the user": "title end_reason "
        "parent_session_id billing_provider billing_base_url billing_mode cost_status "
        "cost_source pricing_version handoff_state handoff_platform handoff_error",
    },
    inner={"messages": _MESSAGE},
)


class _Role(msgspec.Struct, gc=False):
    role: str


class _Shape(msgspec.Struct, gc=False):
    id: str
    source: str
    system_prompt: str | None
    message_count: int
    messages: list[_Role]


_DECODER = msgspec.json.Decoder(_Shape)


def recognizes(start: Start) -> bool:
    """True if a file has sessions with Hermes's own fields beside the messages."""
    return start.has_record(_DECODER)


ADAPTER = Adapter(
    summary="sessions of Hermes Agent, as it exports them: JSONL; text only",
    recognizes=recognizes,
    find=find_conversations,
    read=partial(read_conversation, contents=CONTENTS),
    is_text=True,
    noun="session",
    is_agent=True,
    line=_Shape,
    contents=CONTENTS,
)
