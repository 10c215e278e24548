"""Counts of what the logs of agent programs lack although every request has it."""

from __future__ import annotations

from rollout_io.formats.base import Conversation, Trajectory
from rollout_io.formats.parsing.notes import note

NO_SYSTEM = "contexts without a system prompt: the log has none"
NO_TOOLS = "contexts without tool definitions: the log has none"


def note_lacks(logged: Trajectory) -> None:
    """Count the contexts of an agent program without what every request has (`Adapter.is_agent`)."""
    contexts = [step for step in logged.steps if isinstance(step, Conversation)]
    roles = [{message["role"] for message in step.messages[:1]} for step in contexts]
    note(NO_SYSTEM, sum(not found & {"system", "developer"} for found in roles))
    note(NO_TOOLS, sum(not step.tools for step in contexts))
