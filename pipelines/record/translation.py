"""Translate calls between clients and engines: routes, headers, answers, streams and errors.

The recorder serves and records the dialects of harnesses as chat completions (`model_call`), and may
send a chat as a text completion (`exact_prefix`). The client gets what it asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from pipelines.http_server import JSON, error_event, error_response, message_of, status_of
from pipelines.record.dialects.base import Chat, DialectCall, Usage
from pipelines.record.engine_requests import MODEL_APIS, NULL, Asked, Fields, ModelApi, value_of
from pipelines.record.engine_responses import DONE, Answer, Events, data_of
from pipelines.record.sessions import KEY_HEADERS, api_key_of
from pipelines.record.upstreams import Answered, Upstreams, passed_on
from schemas.errors import EngineError, RolloutError

CHAT_PATH = "/v1/chat/completions"
TOKENIZE_PATH = "/tokenize"
ESTIMATED = "x-rollouts-estimated"
"""Header of an answer that is an estimate."""

_CHAT = msgspec.json.Decoder(Chat)
_OWN_HEADERS = ("anthropic-", "x-goog-", "x-stainless-", "openai-")
_BYTES_A_TOKEN = 4
_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_OF_TEXT = frozenset({"text", "message", "prompt_token_ids", "prompt_logprobs"})


class _Length(msgspec.Struct):
    count: int


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None
    detail: Any = None


_LENGTH, _REFUSAL = msgspec.json.Decoder(_Length), msgspec.json.Decoder(_Refusal)


class Received(NamedTuple):
    """A request as its engine is to get it: in OpenAI's API.

    Attributes:
        path: API path.
        headers: Headers, by lower-case name.
        body: Body.
        dialect: The call in the client's dialect; None if that is OpenAI's chat or completions.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes
    dialect: DialectCall | None


def received(api: ModelApi, body: bytes, request: Request) -> Received:
    """Translate a request with `state.headers`, if its API needs it.

    Raises:
        InputError: The request is invalid or cannot be expressed.
    """
    path, headers = request.scope["path"], request.state.headers
    if api.dialect is None:
        return Received(path, headers, body, None)
    dialect = api.dialect(body, path, request.query_params)
    return Received(CHAT_PATH, _engine_headers(headers), msgspec.json.encode(dialect.chat), dialect)


@cache
def _patterns(apis: tuple[ModelApi, ...]) -> list[tuple[re.Pattern[str], type[DialectCall]]]:
    routes = [(compile_path(api.route)[0].pattern, api.dialect) for api in apis]
    return [(re.compile(p.removeprefix("^")), d) for p, d in routes if d is not None]


def _dialect_at(path: str) -> type[DialectCall] | None:
    """Return the dialect of a path, with or without a session; None for OpenAI's API."""
    return next((d for pattern, d in _patterns(MODEL_APIS) if pattern.search(path)), None)


def refusal(error: RolloutError, path: str) -> Response:
    """Build the response to an error in the dialect of a path."""
    dialect = _dialect_at(path)
    if dialect is None:
        return error_response(error)
    status = status_of(error)
    content = msgspec.json.encode(dialect.error(status, message_of(error)))
    return Response(content, status, media_type=JSON)


def last_event(call: DialectCall | None, error: RolloutError) -> bytes:
    """Return the event that ends the stream of a call with an error."""
    if call is None:
        return error_event(error)
    return call.error_event(status_of(error), message_of(error))


def with_type(response: Answered, media_type: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of an engine's response for the client, with another content type."""
    others = [(name, value) for name, value in passed_on(response) if name != b"content-type"]
    return [*others, (b"content-type", media_type.encode())]


def _engine_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for the engine: the client's key as a bearer token."""
    passed = {
        name: value
        for name, value in headers.items()
        if name not in KEY_HEADERS and not name.startswith(_OWN_HEADERS)
    }
    key = api_key_of(headers)
    return passed | ({"authorization": f"Bearer {key}"} if key else {})


def _decoded_chat(content: bytes) -> Chat:
    try:
        return _CHAT.decode(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        finding = f"the engine's response is no chat completion: {error}"
        raise EngineError("engine_answer", CHAT_PATH, finding) from None


def engine_error(call: DialectCall, status: int, content: bytes) -> bytes:
    """Translate an error response of an engine."""
    return msgspec.json.encode(call.error(status, engine_message(status, content)))


def engine_message(status: int, content: bytes) -> str:
    """Return the message of an error response of an engine."""
    text = content[:2000].decode(errors="replace")
    try:
        refusal = _REFUSAL.decode(content)
        error = refusal.error
        message = error.message if isinstance(error, _Error) else error
        text = message or refusal.message or text
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass  # no JSON: its text is the message
    return text or f"status {status}"


class Speaker:
    """Says the engine's answer to one call as the client asked for it, at once or event by event.

        engine's answer --> of a chat completion --> in the dialect of the client

    Args:
        asked: The client's request.
        dialect: The call in the client's dialect; None if that is OpenAI's chat or completions.
        as_text: True if a chat was sent as a text completion.
        is_parsed: True if that completion's ids were parsed; the engine then sends no stream.
    """

    def __init__(
        self, request: Asked, dialect: DialectCall | None, *, as_text: bool, is_parsed: bool
    ) -> None:
        self._asked, self._dialect, self.is_parsed = request, dialect, is_parsed
        self._as_chat = _ChatShown(request) if as_text else None
        self._stream = None if dialect is None else dialect.stream()
        self._streams_parsed = is_parsed and value_of(request.fields, "stream") is True
        self._num_seen, self._has_failed = 0, False

    def whole(self, answer: Answer) -> bytes:
        """Say a complete answer, as events if the client asked for those of a parsed one.

        Raises:
            EngineError: `engine_answer`: the answer is no chat completion.
        """
        if self._as_chat is None:
            content = answer.shown(self._asked) or answer.content
        else:
            chat = self._as_chat.whole(answer)
            if self._streams_parsed:
                options = value_of(self._asked.fields, "stream_options") or {}
                events = _chunks_of(chat, with_usage=bool(options.get("include_usage")))
                return self.events(events, answer.num_prompt()) + self.end(is_whole=True)
            content = msgspec.json.encode(chat)
        if self._dialect is None:
            return content
        return msgspec.json.encode(self._dialect.answer(_decoded_chat(content)))

    def chunk(self, answer: Answer) -> bytes | None:
        """Return the chunk of OpenAI's API that the client asked for; None to hide it."""
        return answer.shown(self._asked) if self._as_chat is None else self._as_chat.chunk(answer)

    def events(self, part: bytes, num_prompt: int) -> bytes:
        """Say events of `chunk`, each complete.

        Args:
            part: The events.
            num_prompt: Length of the prompt, which engines report only at the end; 0: unknown.

        Raises:
            EngineError: `engine_answer`: an event is no chunk of a chat completion.
        """
        if self._dialect is None or self._stream is None:
            return part
        events = Events(len(part) + 1)
        translated = b""
        for event in [*events.feed(part), events.rest()]:
            data = data_of(event)[0]
            if not data or data == DONE or self._has_failed:
                continue
            chat = _decoded_chat(data)
            if chat.error is not None:
                self._has_failed = True
                translated += self._dialect.error_event(500, engine_message(500, data))
                continue
            self._num_seen += 1
            if self._num_seen == 1 and chat.usage is None:
                chat.usage = Usage(prompt_tokens=num_prompt)
            translated += self._stream.take(chat)
        return translated

    def end(self, *, is_whole: bool) -> bytes:
        """Return what follows the last event: the end, or an error if the answer was cut off."""
        if self._dialect is None or self._stream is None or self._has_failed:
            return b""
        if is_whole:
            return self._stream.end()
        text = "The engine ended the stream before the answer was complete."
        return self._dialect.error_event(502, text)

    def headers(self, response: Answered, *, has_events: bool = False) -> list[tuple[bytes, bytes]]:
        """Return the headers for the client; what is translated has a content type of its own."""
        if self._dialect is None and self._as_chat is None:
            return passed_on(response)
        events = DialectCall.media_type if self._dialect is None else self._dialect.media_type
        return with_type(response, events if has_events or self._streams_parsed else JSON)


class _ChatShown:
    """Converts the text completions of one call.

    Args:
        asked: The chat request.
    """

    def __init__(self, request: Asked) -> None:
        self._model, self._has_begun = request.model, False

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Convert a complete response; its message is the text, unless the ids were parsed."""
        (choice,) = answer.choices
        message = choice.get("message")
        if message is None:
            message = {"role": "assistant", "content": choice["text"], **_MESSAGE}
        top = {"object": "chat.completion", "choices": [{"message": message, **_shown(choice)}]}
        return self._named(answer.fields) | top | {"prompt_token_ids": None}

    def chunk(self, answer: Answer) -> bytes:
        """Convert a chunk; the first one is preceded by a chunk with the role."""
        top = self._named(answer.fields) | {"object": "chat.completion.chunk"}
        choices = [
            {"delta": {"content": choice["text"]}, **_shown(choice)} for choice in answer.choices
        ]
        shown = msgspec.json.encode(top | {"choices": choices})
        if self._has_begun:
            return shown
        self._has_begun = True
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        head = {"choices": [first | {"logprobs": None}], "prompt_token_ids": None}
        top.pop("usage", None)
        return msgspec.json.encode(top | head) + b"\n\ndata: " + shown

    def _named(self, fields: Fields) -> dict[str, Any]:
        name = str(value_of(fields, "id")).replace("cmpl-", "chatcmpl-", 1)
        model = {} if self._model is None else {"model": self._model}
        return {**fields, "id": name, **model}


def _shown(choice: Fields) -> dict[str, Any]:
    others = {name: value for name, value in choice.items() if name not in _OF_TEXT}
    return others | {"logprobs": NULL, "token_ids": NULL}


def _chunks_of(chat: Mapping[str, Any], *, with_usage: bool) -> bytes:
    """Return a chat completion of `_ChatShown.whole` as the events of a stream."""
    top = {k: v for k, v in chat.items() if k not in {"choices", "usage", "prompt_token_ids"}}
    top["object"] = "chat.completion.chunk"
    (choice,) = chat["choices"]
    message = msgspec.json.decode(choice["message"])
    calls = message.get("tool_calls") or ()
    delta = {name: value for name, value in message.items() if value not in (None, [])}
    if calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    head = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    end = {n: choice[n] for n in ("finish_reason", "stop_reason") if n in choice}
    chunks = [
        {**top, "choices": [head]},
        {**top, "choices": [{"index": 0, "delta": {}, "logprobs": None, **end}]},
    ]
    if with_usage:
        chunks.append({**top, "choices": [], "usage": chat.get("usage")})
    events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])


async def count_tokens(
    call: DialectCall, upstreams: Upstreams, headers: Mapping[str, str], model: str | None
) -> Response:
    """Answer a request for the length of a prompt, by the engine or, if it cannot, by an estimate.

    Raises:
        EngineError: Any error of `Upstreams.answer`.
    """
    names = ("model", "messages", "tools", "chat_template_kwargs")
    fields = {name: call.chat[name] for name in names if name in call.chat}
    fields |= {} if model is None else {"model": model}
    body = msgspec.json.encode(fields)
    sent_headers = {**headers, "content-type": JSON}
    async with upstreams.answer("POST", TOKENIZE_PATH, body, sent_headers, None) as response:
        content = await upstreams.whole(response)
        is_exact = response.status == 200
    try:
        number = _LENGTH.decode(content).count if is_exact else 0
    except (msgspec.MsgspecError, UnicodeDecodeError):
        is_exact = False
    if not is_exact:
        number = len(body) // _BYTES_A_TOKEN + 1
    answer = Response(msgspec.json.encode(call.count(number)), media_type=JSON)
    if not is_exact:
        answer.headers[ESTIMATED] = f"{_BYTES_A_TOKEN} bytes a token"
    return answer
