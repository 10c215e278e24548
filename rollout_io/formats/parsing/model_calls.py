"""Conversion of logged model calls with their messages to steps.

The steps are exact if the log has raw API responses with the engine's tokens. Otherwise each
context becomes one conversation: a chain of calls, each of which saw the prompt and the reply of
the previous one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout_io.formats.base import Conversation, Step
from rollout_io.formats.parsing.bodies import Request, Response
from rollout_io.formats.parsing.completions import ASK, holds_tokens, read_choices
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import InputError

_SAMPLED = b'"token_ids"'
_RESPONSE_DECODER = msgspec.json.Decoder(Response)


@dataclass(kw_only=True, slots=True)
class Call:
    """A model call, as logged by a harness.

    Attributes:
        where: Location of the call, for error messages.
        prompt: Messages that the model saw.
        reply: Assistant message that the model returned.
        answer: Raw JSON response of the API; None or null if it was not logged.
        tools: OpenAI-style tool definitions, if known.
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
    top_k: int | None = None
    sampling_extra: str | None = None


@dataclass(kw_only=True, slots=True)
class Context:
    """A chain of calls, each of which saw the prompt and the reply of the previous one.

    Attributes:
        first: First call.
        last: Last call so far.
    """

    first: Call
    last: Call

    @property
    def num_given(self) -> int:
        """Number of messages in the first prompt; no call of this context produced them."""
        return len(self.first.prompt)

    def conversation(self) -> Conversation:
        """Return the context as a conversation that ends with the last reply."""
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
    """Return the contexts of calls, ordered by their first calls.

    A call continues the latest context of its agent that its prompt extends (including the last
    reply), unless the prompt has another assistant message after that reply. Any other call begins
    a new context (a sub-agent, or a shortened history).
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
    """Convert calls to steps: exact steps if the responses have token ids, otherwise text.

    Args:
        calls: Calls in order.
        where: Location of the run, for error messages.
        failed: True if the run failed. A failed run may have no calls; calls without tokens are left
            out if other calls have tokens.

    Raises:
        InputError: `no_calls`: there are no calls; `no_token_ids`: only some responses have tokens.
    """
    if not calls and not failed:
        hint = "delete the log, or give its run an `error` in --rewards"
        raise InputError("no_calls", where, "the run has no model calls", hint=hint)
    answers = [(call, _answer(call)) for call in calls]
    exact = [(call, answer) for call, answer in answers if answer is not None]
    if not exact:
        return [context.conversation() for context in contexts_of(calls)]
    if len(exact) < len(calls) and not failed:
        first = next(call for call, answer in answers if answer is None)
        got = f"token ids are missing for {len(calls) - len(exact)} of {len(calls)} calls; "
        got += f"this one has {_reason(first.answer)}"
        raise InputError("no_token_ids", first.where, got, hint=ASK)
    return [step for call, answer in exact for step in _exact(call, answer)]


def _answer(call: Call) -> Response | None:
    """Return the response of a call, if it has tokens."""
    if call.answer is None or _SAMPLED not in bytes(call.answer):
        return None
    answer = decode_line(_RESPONSE_DECODER, bytes(call.answer), f"{call.where}, response")
    return answer if holds_tokens(answer) else None


def _reason(raw: msgspec.Raw | None) -> str:
    if raw is None or bytes(raw) == b"null":
        return "no API response"
    if _SAMPLED in bytes(raw):
        return "a response whose ids are null or empty"
    return "a response for which no ids were requested"


def _exact(call: Call, answer: Response) -> list[Step]:
    sent = msgspec.Raw(msgspec.json.encode(list(call.prompt)))
    request = Request(
        messages=sent, temperature=call.temperature, top_p=call.top_p, top_k=call.top_k
    )
    steps = read_choices(answer, request, call.where)
    for step in steps:
        step.agent = call.agent
        step.sampling_extra = call.sampling_extra
        step.stop_reason = step.stop_reason or call.stop_reason
    return steps
