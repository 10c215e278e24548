"""Responses of OpenAI-compatible engines (chat and text completions) that hold exact tokens.

Source of the fields: vLLM's OpenAI-compatible server, asked for `return_token_ids` and `logprobs`.

    chat         {"prompt_token_ids": [...], "choices": [{"index": 0, "token_ids": [...],
                  "logprobs": {"content": [{"logprob": -0.1}, ...]}, "finish_reason": "stop",
                  "message": {"content": ..., "reasoning": ..., "tool_calls": ...}}, ...]}
    completions  {"choices": [{"prompt_token_ids": [...], "token_ids": [...],
                  "logprobs": {"token_logprobs": [...]}, "text": ...}, ...]}
    streamed     a list of chunks (objects, or server-sent lines "data: {...}"): prompt ids in the
                 first, of all else a piece in each (`delta` for `message`)
    LiteLLM      `choices[i].provider_specific_fields.token_ids`
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout_io.adapters import Ids, Step
from rollout_io.logs.jsonl import decode_line
from rollout_io.logs.tokens import INT32_MAX, broken, num_ids, route_array
from schemas.errors import RolloutError

ASK = 'ask the engine for them: "return_token_ids": true in the request (vLLM)'
NO_JSON = msgspec.Raw(b"null")

Int32 = Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1e38)]


class Request(msgspec.Struct, gc=False):
    """The body that was sent."""

    messages: msgspec.Raw = NO_JSON
    prompt: msgspec.Raw = NO_JSON
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Int32 | None = None


class _Token(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token] | None = None
    token_logprobs: list[float] | None = None


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    reasoning: str | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: msgspec.Raw = NO_JSON


class _Delta(msgspec.Struct, gc=False):
    reasoning: str | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Provider(msgspec.Struct, gc=False):
    token_ids: msgspec.Raw = NO_JSON


class Choice(msgspec.Struct, gc=False):
    """One of the n answers, or a piece of it."""

    index: int = 0
    message: _Message | None = None
    delta: _Delta | None = None
    text: str | None = None
    prompt_token_ids: msgspec.Raw = NO_JSON
    token_ids: msgspec.Raw = NO_JSON
    provider_specific_fields: _Provider | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = NO_JSON


class Response(msgspec.Struct, gc=False):
    """The body that came back, or a chunk of it."""

    choices: list[Choice] = []
    prompt_token_ids: msgspec.Raw = NO_JSON


Answer = Response | list[Response | str] | str | None
"""Whole; streamed, as objects or server-sent lines; the stream as one text."""

_CHUNK = msgspec.json.Decoder(Response)


def read_choices(
    answer: Answer, request: Request, where: str, *, failed: bool = False
) -> list[Step]:
    """The choices of a call as steps, by index.

    Args:
        answer: The response.
        request: What was asked.
        where: Place of the call.
        failed: Whether ids may be missing, for the run is not to be trained on.

    Raises:
        RolloutError: no_token_ids, no_response, nonempty_prompt, nonempty_response, routing_shape.
            What the named invariants say of the numbers is checked with the whole table.
    """
    response = whole_response(answer, where)
    choices = response.choices
    if len(choices) > 1:
        choices = sorted(choices, key=lambda choice: choice.index)
    if not choices:
        raise broken("nonempty_response", where, "a response without choices", "at least 1 choice")
    shared = bytes(response.prompt_token_ids)
    steps = []
    for choice in choices:
        own = bytes(choice.prompt_token_ids) if shared == b"null" else shared
        prompt = _ids(own, "prompt", where, failed=failed)
        steps.append(_step(choice, prompt, request, where, failed=failed))
    return steps


def whole_response(answer: Answer, where: str) -> Response:
    """A response as it would have come in one piece.

    Raises:
        RolloutError: no_response; json_line, record_type, routing_shape: of a chunk.
    """
    return answer if isinstance(answer, Response) else _joined(answer, where)


def holds_tokens(answer: Answer) -> bool:
    """Whether a response has the ids of what was sampled."""
    if not isinstance(answer, Response):
        return True
    return any(_ids_of(choice) not in {b"null", b"[]"} for choice in answer.choices)


def _step(choice: Choice, prompt: Ids, request: Request, where: str, *, failed: bool) -> Step:
    response = _ids(_ids_of(choice), "response", where, failed=failed)
    messages = request.prompt if request.messages is NO_JSON else request.messages
    routes = None
    if choice.routed_experts != NO_JSON:
        routes = _routes(choice, prompt, response, where)
    return Step(
        source=where,
        prompt_token_ids=prompt,
        response_ids=response,
        rollout_logprobs=_logprobs(choice.logprobs),
        rollout_expert_indices=routes,
        stop_reason=choice.finish_reason,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        messages=None if messages is NO_JSON else _json_text(messages),
        response_text=_text(choice),
    )


def _ids_of(choice: Choice) -> bytes:
    text = bytes(choice.token_ids)
    if text == b"null" and choice.provider_specific_fields is not None:
        return bytes(choice.provider_specific_fields.token_ids)
    return text


def _ids(text: bytes, what: str, where: str, *, failed: bool) -> Ids:
    if len(text) > len(b"null"):
        return text
    if text == b"null" and failed:
        return np.zeros(0, np.int32)
    if text == b"null":
        got = f"a call without the token ids of its {what}"
        raise RolloutError("no_token_ids", where, got, "the ids the engine saw and sampled", ASK)
    if text == b"[]" and not failed:
        raise broken(f"nonempty_{what}", where, f"a {what} of 0 tokens", "at least 1 token")
    return text


def _logprobs(logprobs: _Logprobs | None) -> array[float] | None:
    if logprobs is None:
        return None
    if logprobs.content is not None:
        return array("f", [token.logprob for token in logprobs.content])
    if logprobs.token_logprobs is not None:
        return array("f", logprobs.token_logprobs)
    return None


def _routes(choice: Choice, prompt: Ids, response: Ids, where: str) -> npt.NDArray[np.int16] | None:
    place = f"{where}, choice {choice.index}, routed_experts"
    return route_array(choice.routed_experts, num_ids(prompt) + num_ids(response), place)


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


def _joined(answer: list[Response | str] | str | None, where: str) -> Response:
    if answer is None:
        hint = "a call that failed: delete its line, or give its session an `error` in --rewards"
        raise RolloutError("no_response", where, "a call without a response", "its body", hint)
    pieces = answer.splitlines() if isinstance(answer, str) else answer
    chunks = list(_chunks(pieces, where))
    prompts = [c.prompt_token_ids for c in chunks if bytes(c.prompt_token_ids) != b"null"]
    by_index: dict[int, list[Choice]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            by_index.setdefault(choice.index, []).append(choice)
    choices = [_join_choice(index, pieces, where) for index, pieces in by_index.items()]
    return Response(choices=choices, prompt_token_ids=prompts[0] if prompts else NO_JSON)


def _chunks(pieces: Iterable[Response | str], where: str) -> Iterable[Response]:
    for piece in pieces:
        if isinstance(piece, Response):
            yield piece
            continue
        data = piece.strip().removeprefix("data:").strip()
        if data and data != "[DONE]" and not data.startswith((":", "event:", "id:", "retry:")):
            yield decode_line(_CHUNK, data.encode(), f"{where}, streamed chunk")


def _join_choice(index: int, pieces: Sequence[Choice], where: str) -> Choice:
    ids = [text for text in map(_ids_of, pieces) if text != b"null"]
    prompts = [p.prompt_token_ids for p in pieces if bytes(p.prompt_token_ids) != b"null"]
    routes = [p.routed_experts for p in pieces if bytes(p.routed_experts) != b"null"]
    reasons = [p.finish_reason for p in pieces if p.finish_reason is not None]
    texts = [p.text for p in pieces if p.text is not None]
    if len(routes) > 1:
        raise broken("routing_shape", where, f"routes in {len(routes)} chunks", "in one chunk")
    return Choice(
        index=index,
        message=_join_deltas([p.delta for p in pieces if p.delta is not None]),
        text="".join(texts) if texts else None,
        prompt_token_ids=prompts[0] if prompts else NO_JSON,
        token_ids=_join_lists(ids),
        logprobs=_join_logprobs([p.logprobs for p in pieces if p.logprobs is not None]),
        finish_reason=reasons[-1] if reasons else None,
        routed_experts=routes[0] if routes else NO_JSON,
    )


def _join_lists(lists: Sequence[bytes]) -> msgspec.Raw:
    if not lists:
        return NO_JSON
    inner = [text[1:-1].strip() for text in lists]
    return msgspec.Raw(b"[" + b",".join(part for part in inner if part) + b"]")


def _join_logprobs(pieces: Sequence[_Logprobs]) -> _Logprobs | None:
    if not pieces:
        return None
    content = [p.content for p in pieces if p.content is not None]
    plain = [p.token_logprobs for p in pieces if p.token_logprobs is not None]
    return _Logprobs(
        content=[token for tokens in content for token in tokens] if content else None,
        token_logprobs=[value for values in plain for value in values] if plain else None,
    )


def _join_deltas(deltas: Sequence[_Delta]) -> _Message | None:
    if not deltas:
        return None

    def joined(name: str) -> str | None:
        texts = [getattr(d, name) for d in deltas if getattr(d, name) is not None]
        return "".join(texts) if texts else None

    calls: dict[int, dict[str, Any]] = {}
    for call in (c for d in deltas for c in d.tool_calls or ()):
        known = calls.setdefault(call.index, {"id": None, "type": "function", "function": {}})
        known["id"] = known["id"] or call.id
        for name in ("name", "arguments"):
            text = getattr(call.function, name, None)
            if text is not None:
                known["function"][name] = known["function"].get(name, "") + text
    return _Message(
        reasoning=joined("reasoning"),
        reasoning_content=joined("reasoning_content"),
        content=joined("content"),
        tool_calls=msgspec.Raw(msgspec.json.encode(list(calls.values()))) if calls else NO_JSON,
    )
