"""Checks of logs that users write themselves (`Adapter.is_own`): roles, and ids of tool calls.

Programs write the logs of other formats; their readers map every role. What the logs of agent programs
lack, although every request has it, is counted (`note_lacks`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollout_io.formats.base import Conversation, Logged, Step, Trajectory, note
from schemas.errors import InputError

ROLES = frozenset(
    {
        *("system", "developer", "user", "assistant", "tool", "function"),
        *("model", "ipython", "environment", "observation", "tool_call", "tool_response"),
        *("available_tools", "tools", "document", "documents", "context", "control", "root"),
        *("latest_reminder", "thinking"),
    }
)
"""Roles of OpenAI's API, and those that chat templates of open models know."""

NO_SYSTEM = "contexts without a system prompt: the log has none"
NO_TOOLS = "contexts without tool definitions: the log has none"
ORPHANS = "tool results whose `tool_call_id` is no earlier call's (they stay in the conversation)"


def check_slips(logged: Trajectory, *, strict: bool) -> None:
    """Check the messages of a run; tool results without a call are counted.

    A run of calls is checked by its last messages, which contain the earlier ones.

    Example:
        >>> messages = [{"role": "usr", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
        >>> check_slips(
        ...     Trajectory(steps=[Conversation(source="a.jsonl:1", messages=messages)]),
        ...     strict=False,
        ... )
        InputError: a.jsonl:1, message 0: role 'usr'; expected system, developer, user, ...
    """
    for source, messages in _conversations(logged.steps):
        calls = set[str]()
        for i, message in enumerate(messages):
            _check_role(message.get("role"), source, i)
            calls |= {str(call.get("id")) for call in _listed(message.get("tool_calls"))}
            answered = message.get("tool_call_id")
            if answered and str(answered) not in calls:
                note(ORPHANS)
                if strict:
                    finding = f"tool_call_id {str(answered)!r:.60}, which no earlier call has"
                    hint = "omit --strict to convert the run, or log the message with the call"
                    raise InputError("message", f"{source}, message {i}", finding, hint=hint)


def _check_role(role: object, source: str, index: int) -> None:
    if not isinstance(role, str) or role.lower() in ROLES:
        return
    near = difflib.get_close_matches(role.lower(), sorted(ROLES), 1)
    hint = f"did you mean {near[0]!r}?" if near else "rename the role in the log"
    expected = "system, developer, user, assistant, tool or function"
    raise InputError(
        "message_role", f"{source}, message {index}", f"role {role!r:.60}", expected, hint
    )


def _conversations(steps: Sequence[Logged]) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    for step in steps:
        if isinstance(step, Conversation):
            yield step.source, _listed(step.messages)
    for step in reversed(steps):
        if isinstance(step, Step) and step.messages:
            with suppress(ValueError, RecursionError):
                yield step.source, _listed(json.loads(step.messages))
            return


def _listed(value: object) -> list[Mapping[str, Any]]:
    """Return the objects in a list; none if it is not a list."""
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def note_lacks(logged: Trajectory) -> None:
    """Count the contexts of an agent program without what every request has (`Adapter.is_agent`)."""
    contexts = [step for step in logged.steps if isinstance(step, Conversation)]
    roles = [{message["role"] for message in step.messages[:1]} for step in contexts]
    note(NO_SYSTEM, sum(not role & {"system", "developer"} for role in roles))
    note(NO_TOOLS, sum(not step.tools for step in contexts))
