"""Conversion of OpenAI-compatible calls to steps; see `bodies` for their fields.

Streamed chunks are first assembled into complete responses.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from rollout_io.formats.base import Ids, Step
from rollout_io.formats.parsing.bodies import (
    Answer,
    Choice,
    Delta,
    Logprobs,
    Message,
    Request,
    Response,
    Usage,
    ids_of,
    other_api,
    read_support,
    sampling_extra,
    sglang,
    truncates,
)
from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.tokens import (
    broken,
    num_ids,
    route_array,
    same_ids,
    usage_differs,
    versions_of_meta,
)
from rollout_io.formats.parsing.witnesses import check_tokens, words_of_calls
from schemas.errors import InputError, cleaned, count

ASK = 'set "return_token_ids": true in the request (vLLM)'


def read_choices(
    answer: Answer,
    request: Request,
    where: str,
    *,
    failed: bool = False,
    logprobs_mode: str | None = None,
) -> list[Step]:
    """Return the choices of a call as steps, ordered by index.

    The call of a failed run may lack ids. With `processed` log-probabilities, the most likely tokens are
    those that truncation kept.

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
        step = _step(choice, prompt, request, where, failed=failed)
        step.sampling_support = choice.sampling_support
        if choice.redacted is not None:
            _mark(step, choice.redacted, where)
        if choice.sampling_support is None and logprobs_mode == "processed" and truncates(request):
            ids = step.response_ids
            listed = _INTEGERS.decode(ids) if isinstance(ids, bytes) else ()
            step.sampling_support = read_support(choice.logprobs, listed)
        steps.append(step)
    if response.usage is not None:
        _take_usage(response.usage, steps, where)
    return steps


def _mark(step: Step, spans: Sequence[tuple[int, int]], where: str) -> None:
    """Mark what replaced a secret; text and ids then differ, and are not compared."""
    marks = np.zeros(num_ids(step.response_ids), np.bool_)
    for start, end in spans:
        if not 0 <= start < end <= len(marks):
            finding, expected = f"the range {start}..{end}", f"ranges within 0..{len(marks)}"
            raise InputError("record_type", f"{where}, redacted", finding, expected)
        marks[start:end] = True
    step.redacted, step.loss_mask = marks, ~marks
    step.texts, step.called = (), ()


def _in_order(choices: Sequence[Choice], where: str) -> Sequence[Choice]:
    if not choices:
        raise broken("nonempty_response", where, "the response has no choices")
    if len(choices) == 1:
        return choices
    choices = sorted(choices, key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if indices != list(range(len(choices))):
        finding = f"choices with the indices {indices}"
        expected = f"each index from 0 to {len(choices) - 1} once"
        hint = "keep the response exactly as the engine returned it"
        raise InputError("choice_index", where, finding, expected, hint)
    return choices


def _prompt_of(choice: Choice, response: Response, where: str) -> bytes:
    shared, of_choice = bytes(response.prompt_token_ids), choice.prompt_token_ids
    if shared == b"null":
        return bytes(of_choice)
    if of_choice is not NO_JSON and bytes(of_choice) != b"null":
        same_ids(shared, bytes(of_choice), "prompt_token_ids", where)
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
    versions = versions_of_meta(choice.meta_info, num_ids(response), where)
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
        policy_version=None if versions is None else min(versions.tolist(), default=None),
        policy_versions=versions,
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
    if logprobs is not None and logprobs.content is not None:
        return array("f", [token.logprob for token in logprobs.content])
    values = None if logprobs is None else logprobs.token_logprobs
    return None if values is None else array("f", values)


def _texts(choice: Choice) -> Sequence[str]:
    """Return the verbatim text of the response, from which the server has removed tool calls."""
    message = choice.message
    if message is None:
        return (choice.text,) if choice.text else ()
    texts = (message.reasoning_content or message.reasoning, message.content)
    return [text for text in texts if text]


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


T = TypeVar("T")

_INTEGERS = msgspec.json.Decoder(list[int])
_CHUNK = msgspec.json.Decoder(Response)
_AS_IT_CAME = "keep the chunks exactly as the engine sent them"
_FAILED = "delete the line, or give its session an `error` in --rewards"


def whole_response(answer: Answer, where: str, *, echo: bool = False) -> Response:
    """Return the complete response, assembled from its chunks if it was streamed.

    With `echo`, the engine repeats the prompt's text, which has no ids in the response.

    Raises:
        InputError: `no_response`: there is no response, or it is an error from the engine;
            `json_line`, `record_type`, `conflicting_ids`: a chunk is invalid; `no_token_ids`: a
            chunk has text but no ids, although others have ids.
        InvariantError: `lengths_align`: a chunk has the wrong number of log-probabilities;
            `routing_shape`: several chunks have routed_experts.
    """
    response = answer if isinstance(answer, Response) else _joined(answer, where, echo=echo)
    _refuse_error(response, where)
    return response


def _refuse_error(response: Response, where: str) -> None:
    reason = bytes(response.error)
    if reason == b"null" and (response.object == "error" or not response.choices):
        # Older versions of vLLM answer {"object": "error", "message": ...}, FastAPI {"detail": ...}.
        message = bytes(response.message)  # an object in other APIs
        reason = message if message[:1] == b'"' else bytes(response.detail)
    if reason == b"null" and response.object != "error":
        return
    finding = f"the engine returned an error: {cleaned(reason.decode())[:200]}"
    raise InputError("no_response", where, finding, hint=_FAILED)


def _joined(answer: list[Response | str] | str | None, where: str, *, echo: bool) -> Response:
    if answer is None:
        raise InputError("no_response", where, "the call has no response", hint=_FAILED)
    pieces = answer.splitlines() if isinstance(answer, str) else answer
    chunks = list(_chunks(pieces, where))
    by_index: dict[int, list[Choice]] = {}
    without_ids: dict[int, str] = {}
    for number, chunk in enumerate(chunks, 1):
        place = f"{where}, streamed chunk {number}"
        _refuse_error(chunk, place)
        for choice in chunk.choices:
            _check_piece(choice, place)
            by_index.setdefault(choice.index, []).append(choice)
            delta = choice.delta or Delta()
            thought = delta.reasoning or delta.reasoning_content
            has_text = choice.text or delta.content or thought or delta.tool_calls
            if has_text and not echo and ids_of(choice, place) == b"null":
                without_ids.setdefault(choice.index, place)
    for index, place in without_ids.items():
        if any(ids_of(piece, place) != b"null" for piece in by_index[index]):
            finding = "the chunk has text but no token ids, although other chunks have ids"
            hint = "update the engine, or record the calls without streaming: ids of tool calls are lost"
            raise InputError("no_token_ids", place, finding, "ids in every chunk with text", hint)
    if not by_index and chunks:
        return chunks[0]  # of another API, or without choices
    choices = [_join_choice(index, pieces, where) for index, pieces in by_index.items()]
    prompts = [chunk.prompt_token_ids for chunk in chunks]
    return Response(
        choices=choices, prompt_token_ids=_one_prompt(prompts, where), usage=_usage_of(chunks)
    )


def _chunks(pieces: Iterable[Response | str], where: str) -> Iterable[Response]:
    for piece in pieces:
        if isinstance(piece, Response):
            yield piece
            continue
        data = piece.strip().removeprefix("data:").strip()
        if data and data != "[DONE]" and not data.startswith((":", "event:", "id:", "retry:")):
            yield decode_line(_CHUNK, data.encode(), f"{where}, streamed chunk")


def _check_piece(choice: Choice, place: str) -> None:
    """Reject ids that are not a list, and a wrong number of log-probabilities."""
    text, logprobs = ids_of(choice, place), choice.logprobs
    if text == b"null":
        return
    if text[:1] != b"[":
        finding = f"token_ids {cleaned(text.decode())[:40]}"
        raise InputError("record_type", place, finding, "a list of integers", _AS_IT_CAME)
    if logprobs is None:
        return
    values = logprobs.token_logprobs if logprobs.content is None else logprobs.content
    if values is not None and len(values) != num_ids(text):
        finding, expected = count(len(values), "logprob"), f"{num_ids(text)}, one per token"
        raise broken("lengths_align", place, finding, expected)


def _usage_of(chunks: Sequence[Response]) -> Usage | None:
    """Return the last token counts of the stream if they cover all choices, else None."""
    counting = [chunk for chunk in chunks if chunk.usage is not None]
    if not counting:
        return None
    indices = {choice.index for chunk in chunks for choice in chunk.choices}
    return counting[-1].usage if not counting[-1].choices or len(indices) == 1 else None


def _one_prompt(prompts: Iterable[msgspec.Raw], where: str) -> msgspec.Raw:
    """Return the prompt of a streamed response, whose chunks may repeat or omit it."""
    distinct = [raw for raw in prompts if bytes(raw) != b"null"]
    for other in distinct[1:]:
        same_ids(bytes(distinct[0]), bytes(other), "prompt_token_ids", where)
    return distinct[0] if distinct else NO_JSON


def _join_choice(index: int, pieces: Sequence[Choice], where: str) -> Choice:
    def present(name: str) -> list[Any]:
        return [v for p in pieces if (v := getattr(p, name)) is not None and v != NO_JSON]

    ids = [text[1:-1].strip() for p in pieces if (text := ids_of(p, where)) != b"null"]
    routes, metas, reasons = map(present, ("routed_experts", "meta_info", "finish_reason"))
    texts, logprobs = present("text"), present("logprobs")
    if len(routes) > 1:
        finding = f"{len(routes)} streamed chunks have routed_experts; at most one may"
        raise broken("routing_shape", where, finding)
    joined_logprobs = Logprobs(
        content=_concatenated([p.content for p in logprobs]),
        token_logprobs=_concatenated([p.token_logprobs for p in logprobs]),
        tokens=_concatenated([p.tokens for p in logprobs]),
        top_logprobs=_concatenated([p.top_logprobs for p in logprobs]),
    )
    return Choice(
        index=index,
        message=_join_deltas(present("delta")),
        text="".join(texts) if texts else None,
        prompt_token_ids=_one_prompt([p.prompt_token_ids for p in pieces], where),
        token_ids=msgspec.Raw(b"[" + b",".join(filter(None, ids)) + b"]") if ids else NO_JSON,
        logprobs=joined_logprobs if logprobs else None,
        finish_reason=reasons[-1] if reasons else None,
        routed_experts=routes[0] if routes else NO_JSON,
        meta_info=metas[-1] if metas else NO_JSON,
        sampling_support=_concatenated([p.sampling_support for p in pieces]),
    )


def _concatenated(lists: Iterable[list[T] | None]) -> list[T] | None:
    present = [values for values in lists if values is not None]
    return [value for values in present for value in values] if present else None


def _join_deltas(deltas: Sequence[Delta]) -> Message | None:
    if not deltas:
        return None

    def joined(name: str) -> str | None:
        texts = [getattr(d, name) for d in deltas if getattr(d, name) is not None]
        return "".join(texts) if texts else None

    calls: list[dict[str, Any]] = []
    by_index: dict[int, dict[str, Any]] = {}
    for piece in (c for d in deltas for c in d.tool_calls or ()):
        call = by_index.get(piece.index)
        # Some servers give parallel calls one index: another id with a name begins another call.
        is_other = call is not None and piece.id not in {None, "", call["id"]}
        if call is None or (is_other and getattr(piece.function, "name", None)):
            call = {"id": None, "type": "function", "function": {}}
            by_index[piece.index] = call
            calls.append(call)
        call["id"] = call["id"] or piece.id
        for name in ("name", "arguments"):
            text = getattr(piece.function, name, None)
            if text is not None:
                call["function"][name] = call["function"].get(name, "") + text
    return Message(
        reasoning=joined("reasoning"),
        reasoning_content=joined("reasoning_content"),
        content=joined("content"),
        tool_calls=msgspec.Raw(msgspec.json.encode(calls)) if calls else NO_JSON,
    )
