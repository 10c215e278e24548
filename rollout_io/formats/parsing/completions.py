"""Conversion of OpenAI-compatible calls to steps; see `bodies` for their fields."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from rollout_io.formats.base import Ids, Step
from rollout_io.formats.parsing.bodies import (
    NO_JSON,
    Answer,
    Choice,
    Logprobs,
    Request,
    Response,
    Usage,
    ids_of,
)
from rollout_io.formats.parsing.other_apis import other_api, sglang
from rollout_io.formats.parsing.sampling import sampling_extra
from rollout_io.formats.parsing.streams import whole_response
from rollout_io.formats.parsing.tokens import broken, num_ids, route_array, same_ids, usage_differs
from rollout_io.formats.parsing.witnesses import check_tokens, words_of_calls
from schemas.errors import InputError

ASK = 'set "return_token_ids": true in the request (vLLM)'


def read_choices(
    answer: Answer, request: Request, where: str, *, failed: bool = False
) -> list[Step]:
    """Return the choices of a call as steps, ordered by index.

    Args:
        answer: Response of the engine.
        request: Body of the request.
        where: Location of the call, for error messages.
        failed: If true, ids may be missing, since the run is not trained on.

    Raises:
        InputError: `no_token_ids`: the call has no ids, or ids of a chunk are missing;
            `other_api`: it is of another API; `no_response`: it has no response;
            `choice_index`, `conflicting_ids`, `logprob_tokens`, `usage_counts`: the call
            contradicts itself.
        InvariantError: `nonempty_prompt`, `nonempty_response`: the ids are empty; `routing_shape`:
            the routing is invalid. Other invariants are checked later, on the complete table.
    """
    response = whole_response(answer, where, echo=bool(request.echo))
    if not response.choices and (error := other_api(response, where)):
        raise error
    choices = _in_order(response.choices, where)
    steps = []
    for choice in choices:
        prompt = _ids(_prompt_of(choice, response, where), "prompt", where, failed=failed)
        steps.append(_step(choice, prompt, request, where, failed=failed))
    if response.usage is not None:
        _take_usage(response.usage, steps, where)
    return steps


def _in_order(choices: Sequence[Choice], where: str) -> Sequence[Choice]:
    if not choices:
        raise broken("nonempty_response", where, "the response has no choices")
    if len(choices) == 1:
        return choices
    choices = sorted(choices, key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if indices != list(range(len(choices))):
        got = f"choices with the indices {indices}"
        expected = f"each index from 0 to {len(choices) - 1} once"
        hint = "keep the response exactly as the engine returned it"
        raise InputError("choice_index", where, got, expected, hint)
    return choices


def _prompt_of(choice: Choice, response: Response, where: str) -> bytes:
    shared, own = bytes(response.prompt_token_ids), choice.prompt_token_ids
    if shared == b"null":
        return bytes(own)
    if own is not NO_JSON and bytes(own) != b"null":
        same_ids(shared, bytes(own), "prompt_token_ids", where)
    return shared


def _take_usage(usage: Usage, steps: Sequence[Step], where: str) -> None:
    """Store or check the token counts that the engine reported.

    If there is one choice, its step stores both counts. If there are several, the response count
    must equal the total over all choices. If they share one prompt, the first step stores the
    prompt count, because the engine counts each distinct prompt only once.
    """
    counted = (usage.prompt_tokens or None, usage.completion_tokens or None)
    if len(steps) == 1:
        steps[0].num_counted = counted
        return
    num_ids_sampled = sum(num_ids(step.response_ids) for step in steps)
    if counted[1] not in {None, num_ids_sampled}:
        raise usage_differs("response", num_ids_sampled, counted[1], where)
    if len({bytes(step.prompt_token_ids) for step in steps}) == 1:
        steps[0].num_counted = (counted[0], None)


def holds_tokens(answer: Answer) -> bool:
    """True if a response has the ids of sampled tokens."""
    if not isinstance(answer, Response):
        return True
    return any(ids_of(choice, "") not in {b"null", b"[]"} for choice in answer.choices)


def _step(choice: Choice, prompt: Ids, request: Request, where: str, *, failed: bool) -> Step:
    if not failed and ids_of(choice, where) == b"null" and (error := sglang(choice, where)):
        raise error
    response = _ids(ids_of(choice, where), "response", where, failed=failed)
    messages = request.prompt if request.messages is NO_JSON else request.messages
    routes = None
    if choice.routed_experts != NO_JSON:
        place = f"{where}, choice {choice.index}, routed_experts"
        num_tokens = num_ids(prompt) + num_ids(response)
        routes = route_array(choice.routed_experts, num_tokens, place)
    logprobs, texts = choice.logprobs, () if request.echo else _texts(choice)
    called: Sequence[str] = ()
    if choice.message is not None and choice.message.tool_calls is not NO_JSON:
        is_forced = isinstance(request.tool_choice, dict)
        called = words_of_calls(choice.message.tool_calls, has_names=not is_forced)
    token_text = None
    if logprobs is not None:
        token_text = check_tokens(logprobs, response, texts, where, called)
    return Step(
        source=where,
        prompt_token_ids=prompt,
        response_ids=response,
        rollout_logprobs=_logprobs(logprobs),
        rollout_expert_indices=routes,
        stop_reason=choice.finish_reason,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        sampling_extra=sampling_extra(request),
        messages=None if messages is NO_JSON else _json_text(messages),
        response_text=_text(choice),
        texts=texts,
        called=called,
        token_text=token_text,
    )


def _ids(text: bytes, what: str, where: str, *, failed: bool) -> Ids:
    if len(text) > len(b"null"):
        return text
    if text == b"null" and failed:
        return np.zeros(0, np.int32)
    if text == b"null":
        raise InputError("no_token_ids", where, f"the call has no {what} token ids", hint=ASK)
    if text == b"[]" and not failed:
        raise broken(f"nonempty_{what}", where, f"the {what} has no tokens")
    return text


def _logprobs(logprobs: Logprobs | None) -> array[float] | None:
    if logprobs is None:
        return None
    if logprobs.content is not None:
        return array("f", [token.logprob for token in logprobs.content])
    if logprobs.token_logprobs is not None:
        return array("f", logprobs.token_logprobs)
    return None


def _texts(choice: Choice) -> Sequence[str]:
    """Return the verbatim text of the response, from which the server has removed tool calls."""
    message = choice.message
    if message is None:
        return (choice.text,) if choice.text else ()
    thought = message.reasoning_content or message.reasoning
    if thought:
        return (thought, message.content) if message.content else (thought,)
    return (message.content,) if message.content else ()


def _text(choice: Choice) -> str | None:
    message = choice.message
    if message is None:
        return choice.text
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    calls = None if message.tool_calls is NO_JSON else _json_text(message.tool_calls)
    if thought is None and calls is None:
        return message.content
    return "\n".join(part for part in (thought, message.content, calls) if part is not None)


def _json_text(raw: msgspec.Raw) -> str | None:
    text = str(raw, "utf-8")
    return None if text == "null" else text
