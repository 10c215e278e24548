"""Bounds on what an engine may answer: its size, no compression, no redirects.

Decoding JSON that is mostly punctuation takes many times its size in Python objects. So the number
of choices and fields of answers, and of prompts and fields of requests, is bounded too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from schemas.errors import RolloutError

if TYPE_CHECKING:
    import aiohttp

ANSWER_SIZE, ANSWER_ENCODING, REDIRECT = "answer_size", "answer_encoding", "engine_redirect"
REFUSED_ANSWERS = frozenset({ANSWER_SIZE, ANSWER_ENCODING, REDIRECT})
MOST_EVENTS, MOST_ITEMS = 1 << 20, 4096

_LARGE_BYTES, _OTHER_BYTES = 1 << 20, 4 << 20
# Above _LARGE_BYTES, fields other than the known long ones may take _OTHER_BYTES at most.
_HINT = "rollouts record --max-answer-mb N"


class _Large(msgspec.Struct):
    """Fields of an answer or a choice that may be long."""

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
    forbid_unknown_fields=True,  # msgspec bounds a list while decoding only this way
)
_LARGE, _ITEMS = msgspec.json.Decoder(_Large), msgspec.json.Decoder(_Items)
_LARGE_REQUEST = msgspec.json.Decoder(_LargeRequest)


def too_large(what: str, most_bytes: int) -> RolloutError:
    """Build the error for an answer that exceeds a bound."""
    got, most = f"{what} of more than {most_bytes:,} bytes", f"at most {most_bytes:,}"
    return RolloutError(ANSWER_SIZE, "the engine", got, most, _HINT)


def check_head(response: aiohttp.ClientResponse) -> None:
    """Reject redirects and compressed answers.

    Raises:
        RolloutError: engine_redirect, answer_encoding.
    """
    if 300 <= response.status < 400:
        to = repr(response.headers.get("location", "")[:200])
        hint = "give --upstream the URL that it leads to"
        got = f"a redirect (status {response.status}) to {to}"
        raise RolloutError(REDIRECT, "the engine", got, "an answer", hint)
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        got, hint = f"an answer in {encoding[:40]!r}", "turn the compression of answers off there"
        raise RolloutError(ANSWER_ENCODING, "the engine", got, "one that is not compressed", hint)


def check_shape(content: bytes) -> None:
    """Reject an answer that would be far larger once it is decoded.

    Raises:
        RolloutError: answer_size.
        msgspec.MsgspecError: If it is not an answer.
    """
    if len(content) <= _LARGE_BYTES:
        return
    top = _LARGE.decode(content)
    num_other = _num_other(content, top)
    for choice in _items(bytes(top.choices), "choices", ANSWER_SIZE, "the engine"):
        if choice[:1] == b"{":
            num_other += _num_other(choice, _LARGE.decode(choice))
    if num_other > _OTHER_BYTES:
        raise too_large("fields that are no tokens, texts or log-probabilities", _OTHER_BYTES)


def check_request(body: bytes) -> None:
    """Reject a request that would be far larger once it is decoded.

    Raises:
        RolloutError: request_size.
        msgspec.MsgspecError: If it is not a JSON object.
    """
    if len(body) <= _LARGE_BYTES:
        return
    if _num_other(body, _LARGE_REQUEST.decode(body)) > _OTHER_BYTES:
        got = f"fields beside messages, prompt and tools of more than {_OTHER_BYTES:,} bytes"
        raise RolloutError("request_size", "the request", got, f"at most {_OTHER_BYTES:,}")


def num_prompts(prompt: bytes) -> int:
    """Count the prompts of a text completion.

    Args:
        prompt: JSON: a text, token ids, or a list of either.

    Raises:
        RolloutError: request_size.
    """
    if not prompt.startswith(b"[") or not prompt[1:].lstrip().startswith((b'"', b"[")):
        return 1
    return len(_items(prompt, "prompts", "request_size", "the request"))


def _items(content: bytes, what: str, rule: str, where: str) -> list[bytes]:
    """Split a JSON list into its items; anything else has none."""
    if content[:1] != b"[":
        return []
    try:
        found = _ITEMS.decode(content)
    except msgspec.ValidationError:
        got, most = f"more than {MOST_ITEMS:,} {what}", f"at most {MOST_ITEMS:,}"
        raise RolloutError(rule, where, got, most) from None
    return [item for raw in msgspec.structs.astuple(found) if (item := bytes(raw))]


def _num_other(content: bytes, known: Any) -> int:
    return len(content) - sum(memoryview(raw).nbytes for raw in msgspec.structs.astuple(known))
