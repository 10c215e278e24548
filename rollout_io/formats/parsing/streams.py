"""Assembly of streamed chunks into complete responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from rollout_io.formats.parsing.bodies import (
    NO_JSON,
    Answer,
    Choice,
    Delta,
    Logprobs,
    Message,
    Response,
    Usage,
    ids_of,
)
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.tokens import broken, num_ids, same_ids
from schemas.errors import InputError, count

T = TypeVar("T")

_CHUNK = msgspec.json.Decoder(Response)
_AS_IT_CAME = "keep the chunks exactly as the engine sent them"
_FAILED = "delete the line, or give its session an `error` in --rewards"


def whole_response(answer: Answer, where: str, *, echo: bool = False) -> Response:
    """Return the complete response, assembled from its chunks if it was streamed.

    Args:
        answer: The response.
        where: Location of the call, for error messages.
        echo: True if the engine repeats the prompt's text, which has no ids in the response.

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
    error = response.error
    if (error is NO_JSON or bytes(error) == b"null") and response.object != "error":
        return
    got = f"the engine returned an error: {str(response.error, 'utf-8')[:200]}"
    raise InputError("no_response", where, got, hint=_FAILED)


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
            if not echo and _has_text(choice) and ids_of(choice, place) == b"null":
                without_ids.setdefault(choice.index, place)
    for index, place in without_ids.items():
        _refuse_partial(by_index[index], place)
    if not by_index and chunks:
        return chunks[0]  # of another API, or without choices
    choices = [_join_choice(index, pieces, where) for index, pieces in by_index.items()]
    prompts = [chunk.prompt_token_ids for chunk in chunks]
    return Response(
        choices=choices, prompt_token_ids=_one_prompt(prompts, where), usage=_usage_of(chunks)
    )


def _has_text(piece: Choice) -> bool:
    delta = piece.delta or Delta()
    said = (piece.text, delta.content, delta.reasoning, delta.reasoning_content, delta.tool_calls)
    return any(said)


def _refuse_partial(pieces: Sequence[Choice], place: str) -> None:
    """Reject a chunk with text but no ids if other chunks of the same choice have ids."""
    if any(ids_of(piece, place) != b"null" for piece in pieces):
        got = "the chunk has text but no token ids, although other chunks have ids"
        hint = (
            "update the engine, or record the calls without streaming: ids of tool calls are lost"
        )
        raise InputError("no_token_ids", place, got, "ids in every chunk with text", hint)


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
        got = f"token_ids {text.decode()[:40]}"
        raise InputError("record_type", place, got, "a list of integers", _AS_IT_CAME)
    if logprobs is None:
        return
    values = logprobs.token_logprobs if logprobs.content is None else logprobs.content
    if values is not None and len(values) != num_ids(text):
        got, expected = count(len(values), "logprob"), f"{num_ids(text)}, one per token"
        raise broken("lengths_align", place, got, expected)


def _usage_of(chunks: Sequence[Response]) -> Usage | None:
    """Return the last token counts of the stream if they cover all choices, else None."""
    told = [chunk for chunk in chunks if chunk.usage is not None]
    if not told:
        return None
    is_total = (
        not told[-1].choices or len({c.index for chunk in chunks for c in chunk.choices}) == 1
    )
    return told[-1].usage if is_total else None


def _one_prompt(prompts: Iterable[msgspec.Raw], where: str) -> msgspec.Raw:
    """Return the prompt of a streamed response, whose chunks may repeat or omit it."""
    told = [raw for raw in prompts if bytes(raw) != b"null"]
    for other in told[1:]:
        same_ids(bytes(told[0]), bytes(other), "prompt_token_ids", where)
    return told[0] if told else NO_JSON


def _join_choice(index: int, pieces: Sequence[Choice], where: str) -> Choice:
    ids = [text for piece in pieces if (text := ids_of(piece, where)) != b"null"]
    routes = [p.routed_experts for p in pieces if bytes(p.routed_experts) != b"null"]
    reasons = [p.finish_reason for p in pieces if p.finish_reason is not None]
    texts = [p.text for p in pieces if p.text is not None]
    if len(routes) > 1:
        got = f"{len(routes)} streamed chunks have routed_experts; at most one may"
        raise broken("routing_shape", where, got)
    return Choice(
        index=index,
        message=_join_deltas([p.delta for p in pieces if p.delta is not None]),
        text="".join(texts) if texts else None,
        prompt_token_ids=_one_prompt([p.prompt_token_ids for p in pieces], where),
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


def _join_logprobs(pieces: Sequence[Logprobs]) -> Logprobs | None:
    if not pieces:
        return None
    return Logprobs(
        content=_concatenated([p.content for p in pieces]),
        token_logprobs=_concatenated([p.token_logprobs for p in pieces]),
        tokens=_concatenated([p.tokens for p in pieces]),
    )


def _concatenated(lists: Iterable[list[T] | None]) -> list[T] | None:
    told = [values for values in lists if values is not None]
    return [value for values in told for value in values] if told else None


def _join_deltas(deltas: Sequence[Delta]) -> Message | None:
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
    return Message(
        reasoning=joined("reasoning"),
        reasoning_content=joined("reasoning_content"),
        content=joined("content"),
        tool_calls=msgspec.Raw(msgspec.json.encode(list(calls.values()))) if calls else NO_JSON,
    )
