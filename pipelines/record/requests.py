"""What a client asks for, and what is asked of the engine in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Fields = dict[str, msgspec.Raw]
Kind = Literal["chat", "text"]

NULL = msgspec.Raw(b"null")
_IDS = frozenset({"prompt_token_ids", "token_ids"})
_LOGPROBS = frozenset({"logprobs"})
_ABSENT = (b"", b"null", b"false")
_SECRET = ("api_key",)
_DECODER = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request for a completion.

    Attributes:
        kind: Of its endpoint.
        fields: Of its body, as the client sent them.
        sent: For the engine: the same, and exact tokens asked for.
        hidden: Fields of the answer that the client did not ask for.
        is_text: Whether the client asked for text alone: no ids, no log-probabilities.
        num_choices: Answers that are expected.
        is_exact: Whether tokens that were sampled one by one come back: not of an echo, or of a
            beam search.
        model: The name that the client uses, where it is not the engine's.
    """

    kind: Kind
    fields: Fields
    sent: Fields
    hidden: frozenset[str]
    is_text: bool
    num_choices: int
    is_exact: bool
    model: str | None = None

    @property
    def body(self) -> bytes:
        """For the engine, as JSON."""
        return msgspec.json.encode(self.sent)

    def recorded(self) -> Fields:
        """The fields that are written: no credentials."""
        return {k: v for k, v in self.fields.items() if k not in _SECRET}


def read_request(kind: Kind, body: bytes, models: tuple[str, str] | None = None) -> Asked | None:
    r"""Read a body; None: it is no JSON object, which the engine is to refuse.

    Args:
        kind: Of the endpoint.
        body: As it came.
        models: The name that clients use, and the engine's.

    Example:
        >>> asked = read_request("chat", b'{"messages": [], "n": 2}')
        >>> asked.body
        b'{"messages":[],"n":2,"return_token_ids":true,"logprobs":true}'
        >>> sorted(asked.hidden), asked.num_choices
        (['logprobs', 'prompt_token_ids', 'token_ids'], 2)
    """
    try:
        fields = _DECODER.decode(body)
        body.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_exact = not _is_true(fields, "echo") and not _is_true(fields, "use_beam_search")
    changed, hidden = dict(fields), set[str]()
    if is_exact and _is_absent(fields, "return_token_ids"):
        changed["return_token_ids"] = msgspec.Raw(b"true")
        hidden |= _IDS
    if is_exact and _may_ask_logprobs(kind, fields):
        changed["logprobs"] = msgspec.Raw(b"true" if kind == "chat" else b"0")
        hidden |= _LOGPROBS
    renamed = models is not None and value_of(fields, "model") == models[0]
    if models is not None and renamed:
        changed["model"] = msgspec.Raw(msgspec.json.encode(models[1]))
    return Asked(
        kind=kind,
        fields=fields,
        sent=changed,
        hidden=frozenset(hidden),
        is_text=hidden >= _IDS and _is_absent(fields, "logprobs"),
        num_choices=_whole(fields, "n") * _num_prompts(fields),
        is_exact=is_exact,
        model=models[0] if models is not None and renamed else None,
    )


def value_of(fields: Fields, name: str) -> Any:
    """A field's value; None where it is absent."""
    return msgspec.json.decode(fields.get(name, NULL))


def _may_ask_logprobs(kind: Kind, fields: Fields) -> bool:
    """Whether the client did not, and no other field of it would be taken that is refused now."""
    if not _is_absent(fields, "logprob_token_ids"):
        return False
    if kind == "text":
        return bytes(fields.get("logprobs", NULL)) == b"null"
    no_top = bytes(fields.get("top_logprobs", NULL)) in {b"null", b"0"}
    return no_top and _is_absent(fields, "logprobs")


def _is_absent(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, b"")) in _ABSENT


def _is_true(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, b"")) not in (*_ABSENT, b"0", b'"false"')


def _whole(fields: Fields, name: str) -> int:
    text = bytes(fields.get(name, b""))
    return max(int(text), 1) if text.isdigit() and len(text) < 6 else 1


def _num_prompts(fields: Fields) -> int:
    prompt = bytes(fields.get("prompt", b""))
    if prompt[:1] != b"[":
        return 1
    parts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    return len(parts) if parts and bytes(parts[0])[:1] in {b'"', b"["} else 1
