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

from rollout_io.formats.base import Conversation, Step, note
from rollout_io.formats.contexts import Contexts
from rollout_io.formats.parsing.bodies import Request, Response
from rollout_io.formats.parsing.completions import ASK, holds_tokens, read_choices
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import InputError
from schemas.messages import is_answer

_SAMPLED = b'"token_ids"'
EMPTY = "model calls whose answer says nothing: not trained on"
_FACTS = ("tools", "agent", "stop_reason", "temperature", "top_p")
_RESPONSE_DECODER = msgspec.json.Decoder(Response)


@dataclass(kw_only=True, slots=True)
class Call:
    """A model call, as logged by a harness."""

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


def conversations_of(calls: Iterable[Call]) -> list[Conversation]:
    """Return the conversations of calls, in the order of their first calls.

    A call continues the latest conversation of its agent that its prompt extends, unless the prompt has
    another answer behind the last one. Any other call begins a new one (a sub-agent, or a shortened
    history).
    """
    log, order = Contexts(has_prompts=True), dict[str, int]()
    for call in calls:
        note(EMPTY, not is_answer(call.reply))
        order.setdefault(call.where, len(order))
        facts = {name: getattr(call, name) for name in _FACTS}
        log.call(call.prompt, call.reply, call.where, facts)
    steps = [step for step in log.steps() if isinstance(step, Conversation)]
    return sorted(steps, key=lambda step: order[step.source])


def steps_of(
    calls: Sequence[Call], where: str, *, failed: bool = False
) -> list[Step | Conversation]:
    """Convert calls to steps: exact steps if the responses have token ids, otherwise text.

    A failed run may have no calls; its calls without tokens are left out if others have tokens.

    Raises:
        InputError: `no_calls`: there are no calls; `no_token_ids`: only some responses have tokens.
    """
    if not calls and not failed:
        hint = "delete the log, or give its run an `error` in --rewards"
        raise InputError("no_calls", where, "the run has no model calls", hint=hint)
    answers = [(call, _answer(call)) for call in calls]
    exact = [(call, answer) for call, answer in answers if answer is not None]
    if not exact:
        conversations = conversations_of(calls)
        if calls and not conversations and not failed:
            raise InputError("no_calls", where, "no model call has an answer that says something")
        return [*conversations]
    if len(exact) < len(calls) and not failed:
        first = next(call for call, answer in answers if answer is None)
        finding = f"token ids are missing for {len(calls) - len(exact)} of {len(calls)} calls; "
        finding += f"this one has {_reason(first.answer)}"
        raise InputError("no_token_ids", first.where, finding, hint=ASK)
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
