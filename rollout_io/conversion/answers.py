"""Selection of the answers in a conversation; each answer is trained on exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from rollout_io.formats.base import Conversation, Logged, Trajectory
from schemas.errors import InputError, InvariantError
from schemas.messages import SAID, is_answer

MIN_CHARS = 64
"""Shorter answers without tool calls may equal an example in the prompt by chance."""


def with_answers(trajectory: Trajectory) -> list[Logged]:
    """Return the steps of a trajectory, with each conversation cut after its last answer.

    Messages after the last answer are omitted because they were not sent to the model.
    Conversations without an answer are omitted too. Everything before the first answer becomes the
    prompt (`num_given`).

    Raises:
        InputError: `no_calls`: a run that did not fail has no answer.
        InvariantError: `response_in_prompt`: see `_refuse_repeated`.
    """
    if not any(isinstance(step, Conversation) for step in trajectory.steps):
        return list(trajectory.steps)
    steps = [cut for step in trajectory.steps if (cut := _cut(step)) is not None]
    if trajectory.steps and not steps and trajectory.error is None:
        got = "no answer in the run has text, reasoning or tool calls"
        hint = "give the run an `error` in --rewards if every model call failed"
        raise InputError("no_calls", trajectory.steps[0].source, got, "", hint)
    _refuse_repeated(step for step in steps if isinstance(step, Conversation))
    return steps


def _cut(step: Logged) -> Logged | None:
    if not isinstance(step, Conversation):
        return step
    numbered = enumerate(step.messages)
    answers = [i for i, m in numbered if i >= step.num_given and is_answer(m)]
    if not answers:
        return None
    return replace(step, messages=step.messages[: answers[-1] + 1], num_given=answers[0])


def _refuse_repeated(conversations: Iterable[Conversation]) -> None:
    """Reject a conversation whose prompt ends with the conversation's first answer.

    The prompt was logged after the call if it contains the answer more often than earlier
    conversations of the trajectory produced the answer. Short answers are exempt, see `MIN_CHARS`.
    """
    answered: Counter[bytes] = Counter()
    for conversation in conversations:
        spoken = [
            (i, msgspec.json.encode(message))
            for i, message in enumerate(conversation.messages)
            if message["role"] == "assistant"
        ]
        given = [text for i, text in spoken if i < conversation.num_given]
        own = [text for i, text in spoken if i >= conversation.num_given]
        answer = conversation.messages[conversation.num_given]
        texts = (str(answer.get(name) or "") for name in SAID)
        is_long = answer.get("tool_calls") or sum(map(len, texts)) >= MIN_CHARS
        if is_long and given[-1:] == own[:1] and given.count(own[0]) > answered[own[0]]:
            got = "the last assistant message of the prompt is the answer itself"
            hint = "log the messages before the answer is appended to them, not after the call"
            raise InvariantError("response_in_prompt", conversation.source, got, "", hint)
        answered.update(own)
