"""Calls of a model as harnesses log them with their messages, to steps.

Exact steps, where the raw responses of the API are in the log and hold the engine's tokens; else one
conversation per context: a chain of calls of which each saw all that the ones before it had seen and
said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout_io.adapters import Conversation, Step
from rollout_io.logs.completions import ASK, Request, Response, holds_tokens, read_choices
from rollout_io.logs.content import Message
from rollout_io.logs.jsonl import decode_line
from schemas.errors import RolloutError

_SAMPLED = b'"token_ids"'
_RESPONSE_DECODER = msgspec.json.Decoder(Response)


@dataclass(kw_only=True, slots=True)
class Call:
    """One call of a model, as a harness logged it.

    Attributes:
        where: Its place.
        prompt: The messages that the model saw.
        reply: What it answered, an assistant message.
        answer: The response of the API as it came, JSON; None or null: not kept.
        tools: OpenAI-style tool definitions, where known.
    """

    where: str
    prompt: Sequence[Message]
    reply: Message
    answer: msgspec.Raw | None = None
    agent: str | None = None
    tools: list[dict[str, Any]] | None = None
    stop_reason: str | None = None
    temperature: float | None = None
    top_p: float | None = None


@dataclass(kw_only=True, slots=True)
class Context:
    """Calls of which each saw all that the ones before it had seen and said.

    Attributes:
        first: The first of them.
        last: The last of them.
    """

    first: Call
    last: Call

    @property
    def num_given(self) -> int:
        """Messages of the first prompt: no call of this context wrote them."""
        return len(self.first.prompt)

    def conversation(self) -> Conversation:
        """From the first message to the last reply."""
        last = self.last
        return Conversation(
            source=self.first.where,
            messages=[*last.prompt, last.reply],
            tools=last.tools,
            num_given=self.num_given,
            stop_reason=last.stop_reason,
            temperature=last.temperature,
            top_p=last.top_p,
            agent=last.agent,
        )


def contexts_of(calls: Iterable[Call]) -> list[Context]:
    """The contexts of calls, in order of their first.

    A call continues the latest context of its agent whose messages, the last reply included, its
    prompt begins with, if no assistant message follows in it that the context did not write.
    Otherwise it begins a new one (a sub-agent; a history that was cut).
    """
    found: list[Context] = []
    for call in calls:
        context = next((c for c in reversed(found) if _continues(call, c.last)), None)
        if context is None:
            found.append(Context(first=call, last=call))
        else:
            context.last = call
    return found


def _continues(call: Call, last: Call) -> bool:
    size = len(last.prompt)
    return (
        call.agent == last.agent
        and len(call.prompt) > size
        and call.prompt[size] == last.reply
        and list(call.prompt[:size]) == list(last.prompt)
        and all(message["role"] != "assistant" for message in call.prompt[size + 1 :])
    )


def steps_of(
    calls: Sequence[Call], where: str, *, failed: bool = False
) -> list[Step | Conversation]:
    """The steps of calls: exact where all of their responses hold tokens, else conversations.

    Args:
        calls: In order.
        where: Place of the run.
        failed: Whether the run failed: then there may be no calls, and those without tokens are
            left out where others have them.

    Raises:
        RolloutError: `no_calls`; `no_token_ids`: some responses hold tokens, and others do not.
    """
    if not calls and not failed:
        hint = (
            "an agent that never started? delete the log, or give its run an `error` in --rewards"
        )
        raise RolloutError("no_calls", where, "no model call", "at least one", hint)
    answers = [(call, _answer(call)) for call in calls]
    exact = [(call, answer) for call, answer in answers if answer is not None]
    if not exact:
        return [context.conversation() for context in contexts_of(calls)]
    if len(exact) < len(calls) and not failed:
        first = next(call for call, answer in answers if answer is None)
        got = f"{len(calls) - len(exact)} of {len(calls)} calls without the ids of what was sampled"
        got += f"; the first has {_reason(first.answer)}"
        raise RolloutError("no_token_ids", first.where, got, "the ids of all, or of none", ASK)
    return [step for call, answer in exact for step in _exact(call, answer)]


def _answer(call: Call) -> Response | None:
    """The response of a call, if it holds tokens."""
    if call.answer is None or _SAMPLED not in bytes(call.answer):
        return None
    answer = decode_line(_RESPONSE_DECODER, bytes(call.answer), f"{call.where}, response")
    return answer if holds_tokens(answer) else None


def _reason(raw: msgspec.Raw | None) -> str:
    if raw is None or bytes(raw) == b"null":
        return "no response of the API"
    if _SAMPLED in bytes(raw):
        return "a response with null or an empty list for them"
    return "a response that was not asked for them"


def _exact(call: Call, answer: Response) -> list[Step]:
    sent = msgspec.Raw(msgspec.json.encode(list(call.prompt)))
    request = Request(messages=sent, temperature=call.temperature, top_p=call.top_p)
    steps = read_choices(answer, request, call.where)
    for step in steps:
        step.agent = call.agent
        step.stop_reason = step.stop_reason or call.stop_reason
    return steps
