"""Rewrite a client's request so that the engine returns exact tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from pipelines.generation.engines.completions import support_fields
from pipelines.record.dialects.anthropic import MessagesCall, MessagesShape
from pipelines.record.dialects.base import DialectCall, PlainMessage
from pipelines.record.dialects.gemini import GeminiCall, GeminiShape
from pipelines.record.dialects.responses import ResponsesCall, ResponsesShape
from pipelines.record.secrets import without_secrets
from pipelines.record.upstreams import check_request, num_prompts
from rollout_io.formats.parsing.bodies import Sampling
from schemas.metadata import LogprobsMode

Fields = dict[str, msgspec.Raw]
Kind = Literal["chat", "text"]


class ChatRequest(msgspec.Struct):
    """The fields of a chat completion that most clients send; engines know more."""

    model: str
    messages: list[PlainMessage]
    stream: bool = False
    n: Annotated[int, msgspec.Meta(ge=1, le=4)] = 1
    logprobs: bool = False


class TextRequest(msgspec.Struct):
    """The fields of a text completion that most clients send; engines know more."""

    model: str
    prompt: str
    stream: bool = False


class ModelApi(NamedTuple):
    """An API of the engines whose calls are recorded.

    Attributes:
        path: Path of its route, as the API describes it.
        kind: How its requests and responses are read.
        summary: One line for the API description.
        body: Shape of a request, for the API description.
        dialect: Translator of its requests to chat completions; None if it needs none.
        is_count: True if it returns the length of a prompt, without a call.
        any_version: True if clients put other versions of the API, other collections, or nothing
            before the last two parts of the path.
        answer: Type of its whole responses, for the API description.
    """

    path: str
    kind: Kind
    summary: str
    body: type[msgspec.Struct]
    dialect: type[DialectCall] | None = None
    is_count: bool = False
    any_version: bool = False
    answer: type = dict

    @property
    def route(self) -> str:
        """Path of its route, in Starlette's syntax; a model's name may have slashes."""
        path = self.path.replace("{model}", "{model:path}")
        return "/{api:path}" + path[path.index("models/") :] if self.any_version else path


_GEMINI = "/v1beta/models/{model}:"
MODEL_APIS = (
    ModelApi("/v1/chat/completions", "chat", "Create and record a chat completion.", ChatRequest),
    ModelApi("/v1/completions", "text", "Create and record a text completion.", TextRequest),
    ModelApi(
        *("/v1/messages", "chat", "Create and record a message (Anthropic's API)."),
        *(MessagesShape, MessagesCall),
    ),
    ModelApi(
        *("/v1/messages/count_tokens", "chat", "Count the tokens of a prompt (Anthropic's API)."),
        *(MessagesShape, MessagesCall, True),
    ),
    ModelApi(
        *("/v1/responses", "chat", "Create and record a response (OpenAI's Responses API)."),
        *(ResponsesShape, ResponsesCall),
    ),
    ModelApi(
        *("/v1/responses/input_tokens", "chat", "Count the tokens of an input."),
        *(ResponsesShape, ResponsesCall, True),
    ),
    ModelApi(
        f"{_GEMINI}generateContent",
        "chat",
        "Create and record an answer (Gemini's API).",
        GeminiShape,
        GeminiCall,
        any_version=True,
    ),
    ModelApi(
        f"{_GEMINI}streamGenerateContent",
        "chat",
        "Stream and record an answer.",
        GeminiShape,
        GeminiCall,
        any_version=True,
        answer=list,
    ),
    ModelApi(
        f"{_GEMINI}countTokens",
        "chat",
        "Count the tokens of a prompt (Gemini's API).",
        GeminiShape,
        GeminiCall,
        is_count=True,
        any_version=True,
    ),
)
"""The APIs that `rollouts record` and the endpoint of harnesses serve; a line adds one."""

NULL = msgspec.Raw(b"null")
_IDS = frozenset({"prompt_token_ids", "token_ids", "sampling_support"})
_LOGPROBS = frozenset({"logprobs"})
_ABSENT = (b"", b"null", b"false")
_DECODER = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A completion request.

    Attributes:
        kind: Kind of the endpoint.
        fields: Body fields as the client sent them.
        sent: Body fields for the engine: the client's, plus fields that request exact tokens.
        body: Body for the engine: `sent` as JSON; as received if it is no JSON object, which the
            engine rejects.
        hidden: Fields of the response that the client did not request.
        is_text: True if the client requested only text: no ids, no log-probabilities.
        num_choices: Number of expected choices.
        is_exact: True if the engine returns tokens that were sampled one by one; false for an echo
            or a beam search.
        model: The client's name for the model if it differs from the engine's.
    """

    kind: Kind
    fields: Fields
    sent: Fields
    body: bytes
    hidden: frozenset[str]
    is_text: bool
    num_choices: int
    is_exact: bool
    model: str | None = None

    def recorded(self) -> Fields:
        """Return the fields to record, without credentials."""
        return without_secrets(self.fields)


def read_request(
    kind: Kind,
    body: bytes,
    models: tuple[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    logprobs_mode: LogprobsMode | None = None,
) -> Asked:
    r"""Parse a request body.

    Args:
        kind: Kind of the endpoint.
        body: Body as received.
        models: The model's names for clients and for the engine; None if they are the same.
        defaults: Sampling settings to send and record if the client leaves them out.
        logprobs_mode: Distribution of the engines' log-probabilities; if it is `processed`, the ids
            that truncated sampling keeps are requested, too.

    Raises:
        InputError: `request_size`: decoding the body would take too much memory.

    Example:
        >>> asked = read_request("chat", b'{"messages": [], "n": 2}')
        >>> asked.body
        b'{"messages":[],"n":2,"return_token_ids":true,"logprobs":true}'
        >>> sorted(asked.hidden), asked.num_choices
        (['logprobs', 'prompt_token_ids', 'sampling_support', 'token_ids'], 2)
    """
    try:
        check_request(body)
        fields = _DECODER.decode(body)
        body.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Asked(
            kind=kind,
            fields={},
            sent={},
            body=body,
            hidden=frozenset(),
            is_text=False,
            num_choices=1,
            is_exact=False,
        )
    for name, value in (defaults or {}).items():
        if bytes(fields.get(name, NULL)) == b"null":
            fields[name] = msgspec.Raw(msgspec.json.encode(value))
    is_exact = not _is_true(fields, "echo") and not _is_true(fields, "use_beam_search")
    changed, hidden = dict(fields), set[str]()
    if is_exact and _is_absent(fields, "return_token_ids"):
        changed["return_token_ids"] = msgspec.Raw(b"true")
        hidden |= _IDS
    if is_exact and _may_ask_logprobs(kind, fields):
        changed["logprobs"] = msgspec.Raw(b"true" if kind == "chat" else b"0")
        if logprobs_mode == "processed":  # else no settings need to be read
            asked = support_fields(_sampling(fields), logprobs_mode, is_chat=kind == "chat")
            changed |= {n: msgspec.Raw(msgspec.json.encode(value)) for n, value in asked.items()}
        hidden |= _LOGPROBS
    renamed = models is not None and value_of(fields, "model") == models[0]
    if models is not None and renamed:
        changed["model"] = msgspec.Raw(msgspec.json.encode(models[1]))
    return Asked(
        kind=kind,
        fields=fields,
        sent=changed,
        body=msgspec.json.encode(changed),
        hidden=frozenset(hidden),
        is_text=hidden >= _IDS and not _asks_logprobs(kind, fields),
        num_choices=_whole(fields, "n") * num_prompts(bytes(fields.get("prompt", b""))),
        is_exact=is_exact,
        model=models[0] if models is not None and renamed else None,
    )


def _sampling(fields: Fields) -> Sampling:
    """Return the sampling settings of a request; none if the engine will reject them."""
    names = ("temperature", "top_p", "top_k", "min_p")
    try:
        return msgspec.convert({n: value_of(fields, n) for n in names if n in fields}, Sampling)
    except msgspec.ValidationError:
        return Sampling()


def value_of(fields: Fields, name: str) -> Any:
    """Decode a field; None if it is missing."""
    return msgspec.json.decode(fields.get(name, NULL))


def _may_ask_logprobs(kind: Kind, fields: Fields) -> bool:
    """True if `logprobs` can be added without the engine rejecting the request."""
    if not _is_absent(fields, "logprob_token_ids"):
        return False
    no_top = kind == "text" or bytes(fields.get("top_logprobs", NULL)) in {b"null", b"0"}
    return no_top and not _asks_logprobs(kind, fields)


def _asks_logprobs(kind: Kind, fields: Fields) -> bool:
    # In a chat, 0 is false; in a text completion, it asks for those of the sampled tokens.
    return value_of(fields, "logprobs") not in ((None, False) if kind == "chat" else (None,))


def _is_absent(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, b"")) in _ABSENT


def _is_true(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, b"")) not in (*_ABSENT, b"0", b'"false"')


def _whole(fields: Fields, name: str) -> int:
    text = bytes(fields.get(name, b""))
    return max(int(text), 1) if text.isdigit() and len(text) < 6 else 1
