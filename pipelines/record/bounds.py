"""Limit the responses of engines: bounded size, no compression, no redirects.

JSON that is mostly punctuation takes many times its size in memory once it is decoded. Therefore,
the choices and fields of responses, and the prompts and fields of requests, are bounded too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.errors import EngineError, InputError, cleaned

ANSWER_SIZE, ANSWER_ENCODING, REDIRECT = "answer_size", "answer_encoding", "engine_redirect"
ANSWER_STATUS = "answer_status"
REFUSED_ANSWERS = frozenset({ANSWER_SIZE, ANSWER_ENCODING, REDIRECT, ANSWER_STATUS})
MOST_EVENTS, MOST_ITEMS, MOST_VALUES = 1 << 20, 4096, 1 << 21

_LARGE_BYTES, _OTHER_BYTES = 1 << 20, 4 << 20
# Above _LARGE_BYTES, fields other than the known long ones may take at most _OTHER_BYTES.
_HINT = "raise the limit: rollouts record --max-answer-mb N"


class _Large(msgspec.Struct):
    """Fields of a response or a choice that may be long."""

    choices: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    prompt_text: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()
    delta: msgspec.Raw = msgspec.Raw()
    routed_experts: msgspec.Raw = msgspec.Raw()
    provider_specific_fields: msgspec.Raw = msgspec.Raw()


class _LargeRequest(msgspec.Struct):
    """Fields of a request that may be long."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()


_Items = msgspec.defstruct(
    "_Items",
    [(f"item{i}", msgspec.Raw, msgspec.Raw()) for i in range(MOST_ITEMS)],
    array_like=True,
    forbid_unknown_fields=True,  # the only way to bound a list while msgspec decodes it
)
_LARGE, _ITEMS = msgspec.json.Decoder(_Large), msgspec.json.Decoder(_Items)
_LARGE_REQUEST = msgspec.json.Decoder(_LargeRequest)


def too_large(what: str, most_bytes: int) -> EngineError:
    """Build the error for a response that exceeds a bound."""
    finding = f"{what} of more than {most_bytes:,} bytes"
    message = f"The engine sent {finding}"
    return EngineError(ANSWER_SIZE, "engine", finding, hint=_HINT, message=message)


def check_head(status: int, headers: Mapping[str, str]) -> None:
    """Reject redirects, compressed responses and statuses that end no HTTP exchange.

    Raises:
        EngineError: `answer_status`: the status is not from 200 to 599; `engine_redirect`: the
            response is a redirect; `answer_encoding`: the response is compressed.
    """
    if not 200 <= status < 600:
        finding = f"sent the HTTP status {status:03}"
        hint = "check that --upstream is the engine's URL"
        message = f"The engine {finding}; expected a status from 200 to 599"
        raise EngineError(ANSWER_STATUS, "engine", finding, hint=hint, message=message)
    if 300 <= status < 400:
        to = repr(cleaned(headers.get("location", ""))[:200])
        hint = "set --upstream to the target of the redirect"
        finding = f"redirects (status {status}) to {to}"
        raise EngineError(REDIRECT, "engine", finding, hint=hint, message=f"The engine {finding}")
    encoding = headers.get("content-encoding", "identity").strip()
    if encoding.lower() != "identity":
        finding = f"compresses its responses ({cleaned(encoding)[:40]!r})"
        hint = "turn off compression in the engine"
        raise EngineError(
            ANSWER_ENCODING, "engine", finding, hint=hint, message=f"The engine {finding}"
        )


def check_shape(content: bytes) -> None:
    """Reject a response that would take far more memory once it is decoded.

    Raises:
        EngineError: `answer_size`: the response has too many choices, or too many bytes in small
            fields.
        msgspec.MsgspecError: The response is not a completion.
    """
    if len(content) <= _LARGE_BYTES:
        return
    top = _LARGE.decode(content)
    num_other = _num_other(content, top)
    choices = _items(bytes(top.choices))
    if choices is None:
        finding = f"more than {MOST_ITEMS:,} choices"
        raise EngineError(ANSWER_SIZE, "engine", finding, message=f"The engine sent {finding}")
    for choice in choices:
        if choice[:1] == b"{":
            num_other += _num_other(choice, _LARGE.decode(choice))
    if num_other > _OTHER_BYTES:
        raise too_large("fields (other than tokens, texts and log-probabilities)", _OTHER_BYTES)


def check_request(body: bytes) -> None:
    """Reject a request that would take far more memory once it is decoded.

    Raises:
        InputError: `request_size`: the request has too many bytes in small fields.
        msgspec.MsgspecError: The request is not a JSON object.
    """
    if len(body) <= _LARGE_BYTES:
        return
    if _num_other(body, _LARGE_REQUEST.decode(body)) > _OTHER_BYTES:
        finding = f"fields other than messages, prompt and tools exceed {_OTHER_BYTES:,} bytes"
        raise InputError("request_size", "request", finding)


def check_density(body: bytes) -> None:
    """Reject a request that is mostly punctuation, before all of it is decoded.

    Raises:
        InputError: `request_size`: the request has too many lists, objects and items.
    """
    if len(body) > _LARGE_BYTES and sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
        finding = f"more than {MOST_VALUES:,} values"
        raise InputError("request_size", "request", finding)


def num_prompts(prompt: bytes) -> int:
    """Count the prompts of a text completion.

    Args:
        prompt: A text, token ids, or a list of either, as JSON.

    Raises:
        InputError: `request_size`: there are too many prompts.
    """
    if not prompt.startswith(b"[") or not prompt[1:].lstrip().startswith((b'"', b"[")):
        return 1
    prompts = _items(prompt)
    if prompts is None:
        raise InputError("request_size", "request", f"more than {MOST_ITEMS:,} prompts")
    return len(prompts)


def _items(content: bytes) -> list[bytes] | None:
    """Split a JSON list into its items; [] for other values, None if there are too many items."""
    if content[:1] != b"[":
        return []
    try:
        items = _ITEMS.decode(content)
    except msgspec.ValidationError:
        return None
    return [item for raw in msgspec.structs.astuple(items) if (item := bytes(raw))]


def _num_other(content: bytes, counted: Any) -> int:
    return len(content) - sum(memoryview(raw).nbytes for raw in msgspec.structs.astuple(counted))
