"""Request and response bodies of OpenAI-compatible engines (chat and text completions).

Source of the fields: vLLM's OpenAI-compatible server with `return_token_ids` and `logprobs`.

    chat         {"prompt_token_ids": [...], "choices": [{"index": 0, "token_ids": [...],
                  "logprobs": {"content": [{"logprob": -0.1}, ...]}, "finish_reason": "stop",
                  "message": {"content": ..., "reasoning": ..., "tool_calls": ...}}, ...]}
    completions  {"choices": [{"prompt_token_ids": [...], "token_ids": [...],
                  "logprobs": {"token_logprobs": [...]}, "text": ...}, ...]}
    streamed     a list of chunks (objects, or server-sent lines "data: {...}"): prompt ids in the
                 first, pieces of the rest in each (`delta` instead of `message`)
    LiteLLM      `choices[i].provider_specific_fields.token_ids`
    redacted     `choices[i].redacted`: [start, end) ranges of the ids that replaced secrets

Responses of other APIs are explained by the error that rejects them.

The most likely tokens of an answer tell which ids truncated sampling kept at each token: a server with
processed log-probabilities gives excluded tokens -inf (in JSON -9999), and normalises over the others,
so the most likely tokens are the kept ones if their probabilities sum to 1. They are named `token_id:N`
if the request has `return_tokens_as_token_ids`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from rollout_io.formats.parsing.content import NO_JSON
from rollout_io.formats.parsing.tokens import INT32_MAX, same_ids
from schemas.columns import LOGPROB_SENTINEL
from schemas.errors import InputError


class SamplingFields(msgspec.Struct, gc=False):
    """Request fields that change the distribution unless they are null or have these defaults.

    Source: vLLM's SamplingParams and OpenAI-compatible server, the OpenAI API, SGLang, llama.cpp.
    Fields that only end a response (`stop`, `ignore_eos`) or set the seed are not included.
    """

    min_p: Any = 0
    typical_p: Any = 1
    min_tokens: Any = 0
    min_new_tokens: Any = 0
    presence_penalty: Any = 0
    frequency_penalty: Any = 0
    repetition_penalty: Any = 1
    no_repeat_ngram_size: Any = 0
    mirostat: Any = 0
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    vllm_xargs: Any = None
    extra_args: Any = None
    thinking_token_budget: Any = -1
    trace_decode_token_ids: Any = None
    structured_outputs: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    response_format: Any = None
    tool_choice: Any = "auto"
    function_call: Any = "auto"
    use_beam_search: Any = False
    best_of: Any = 1
    extra_body: Any = None
    """Fields that the OpenAI client merges into the body: any of the fields above, and `top_k`."""


_VALUES = attrgetter(*SamplingFields.__struct_fields__)
_DEFAULTS = _VALUES(SamplingFields())
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{f.name: (f.default, None, [], {}, "") for f in msgspec.structs.fields(SamplingFields)},
    "tool_choice": ("auto", "none", None),
    "function_call": ("auto", "none", None),
    "response_format": ({"type": "text"}, None),
    "allowed_token_ids": (None,),
    "top_k": (0, -1, None),
}


def sampling_extra(fields: SamplingFields | Mapping[str, Any]) -> str | None:
    """Return the fields that change the distribution, as JSON for the `sampling_extra` column.

    Return None if there are none. `top_k` is included if given, though it has a column of its own.

    Example:
        >>> sampling_extra({"repetition_penalty": 1.0, "min_p": 0.1, "seed": 7})
        '{"min_p":0.1}'
    """
    if isinstance(fields, SamplingFields):
        values = _VALUES(fields)
        if values == _DEFAULTS:  # the usual case
            return None
        settings = dict(zip(SamplingFields.__struct_fields__, values, strict=True))
    else:
        settings = dict(fields)
    body = settings.pop("extra_body", None)
    if isinstance(body, dict):
        settings |= body
    extra = {n: v for n, v in settings.items() if n in _NEUTRAL and v not in _NEUTRAL[n]}
    return json.dumps(extra, sort_keys=True, separators=(",", ":")) if extra else None


Int32 = Annotated[int, msgspec.Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1e38)]


class Sampling(SamplingFields, gc=False):
    """Sampling settings of a call."""

    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Int32 | None = None


class Request(Sampling, gc=False):
    """The body of a request."""

    messages: msgspec.Raw = NO_JSON
    prompt: msgspec.Raw = NO_JSON
    echo: bool | None = None


class Token(msgspec.Struct, gc=False):
    """The log-probability of a token, with its text or `token_id:N`."""

    logprob: float
    token: str | None = None
    top_logprobs: msgspec.Raw = NO_JSON


class Logprobs(msgspec.Struct, gc=False):
    """Log-probabilities of a response: `content` for chats, other fields for text completions."""

    content: list[Token] | None = None
    token_logprobs: list[float] | None = None
    tokens: list[str | None] | None = None
    text_offset: list[int] | None = None
    top_logprobs: list[msgspec.Raw] | None = None


class Function(msgspec.Struct, gc=False):
    """The function of a tool call, or a streamed piece of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    """A tool call, or a streamed piece of it."""

    index: int = 0
    id: str | None = None
    function: Function | None = None


class Message(msgspec.Struct, gc=False):
    """An assistant message in a response."""

    reasoning: str | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: msgspec.Raw = NO_JSON


class Delta(msgspec.Struct, gc=False):
    """A streamed piece of a message."""

    reasoning: str | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Provider(msgspec.Struct, gc=False):
    """LiteLLM's container for fields that OpenAI's API lacks."""

    token_ids: msgspec.Raw = NO_JSON


class Choice(msgspec.Struct, gc=False):
    """One of the n choices of a response, or a streamed piece of a choice."""

    index: int = 0
    message: Message | None = None
    delta: Delta | None = None
    text: str | None = None
    prompt_token_ids: msgspec.Raw = NO_JSON
    token_ids: msgspec.Raw = NO_JSON
    sampling_support: list[list[Int32]] | None = None
    redacted: list[tuple[int, int]] | None = None
    provider_specific_fields: Provider | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: msgspec.Raw = NO_JSON
    response_token_ids: msgspec.Raw = NO_JSON
    meta_info: msgspec.Raw = NO_JSON


class Usage(msgspec.Struct, gc=False):
    """Token counts reported by the engine; None or 0 if it reported none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Response(msgspec.Struct, gc=False):
    """The body of a response, or a chunk of it."""

    choices: list[Choice] = []
    prompt_token_ids: msgspec.Raw = NO_JSON
    usage: Usage | None = None
    error: msgspec.Raw = NO_JSON
    message: msgspec.Raw = NO_JSON
    detail: msgspec.Raw = NO_JSON
    object: str | None = None
    type: msgspec.Raw = NO_JSON
    content: msgspec.Raw = NO_JSON
    output: msgspec.Raw = NO_JSON
    candidates: msgspec.Raw = NO_JSON
    output_ids: msgspec.Raw = NO_JSON
    meta_info: msgspec.Raw = NO_JSON
    generated_text: msgspec.Raw = NO_JSON
    done: msgspec.Raw = NO_JSON


Answer = Response | list[Response | str] | str | None
"""A response: complete; streamed as objects or server-sent lines; or the stream as one string."""


def ids_of(choice: Choice, where: str) -> bytes:
    """Return the ids of a response as JSON; `null` if there are none.

    Raises:
        InputError: `conflicting_ids`: LiteLLM's ids differ from the engine's.
    """
    text, provider = bytes(choice.token_ids), choice.provider_specific_fields
    if provider is None:
        return text
    other = bytes(provider.token_ids)
    if text == b"null":
        return other
    if other != b"null":
        same_ids(text, other, "token_ids", where)
    return text


_NULL = b"null"
_LOG = "log the engine's chat completions with `return_token_ids` (vLLM)"
_SGLANG = "write `response_token_ids` as `choices[i].token_ids`, and the log-probabilities as "
_SGLANG += "`choices[i].logprobs.content[j].logprob`"
_GENERATE = "use SGLang's chat completions, or write `output_ids` as `choices[0].token_ids`, the "
_GENERATE += "prompt's ids as `prompt_token_ids`, and the first value of each entry of "
_GENERATE += "`meta_info.output_token_logprobs` as `choices[0].logprobs.content[j].logprob`"


_MESSAGES, _RESPONSES, _SGLANG_API = (
    "Anthropic's Messages API",
    "OpenAI's Responses API",
    "SGLang's /generate",
)
_APIS = {
    "candidates": "Gemini's API",
    "output_ids": _SGLANG_API,
    "meta_info": _SGLANG_API,
    "generated_text": "Text Generation Inference",
    "done": "Ollama's API",
    "output": _RESPONSES,
    "content": _MESSAGES,
}
"""Keys of the responses of other APIs."""


def other_api(response: Response, where: str) -> InputError | None:
    """Return the error for a response without choices, or the first chunk of one, of another API."""
    kind = bytes(response.type).decode().strip('"')
    api = next((api for key, api in _APIS.items() if bytes(getattr(response, key)) != _NULL), None)
    if response.object == "response" or kind.startswith("response."):
        api = _RESPONSES
    if kind in {"message", "ping"} or kind.startswith(("message_", "content_")):
        api = _MESSAGES
    if api is None:
        return None
    finding, expected = f"a response of {api}", "a chat or text completion with token ids"
    hint = _GENERATE if api == _SGLANG_API else _LOG
    return InputError("other_api", where, finding, expected, hint)


def sglang(choice: Choice, where: str) -> InputError | None:
    """Return the error for a choice whose ids are in SGLang's fields; None if there are none."""
    names = ("response_token_ids", "meta_info")
    fields = [f"`{name}`" for name in names if bytes(getattr(choice, name)) != _NULL]
    if not fields:
        return None
    finding = f"the ids are in SGLang's fields ({' and '.join(fields)}), which are not read"
    return InputError("other_api", where, finding, "`choices[i].token_ids`", _SGLANG)


MOST_LOGPROBS = 20
"""vLLM's default `--max-logprobs`; a larger number would be refused."""
_MISSING = 1e-3
"""Largest probability of kept tokens that may be missing from the answer."""
_NAMED = "token_id:"


class _Entry(msgspec.Struct):
    token: str
    logprob: float


_ENTRIES = msgspec.json.Decoder(list[_Entry])
_TABLE = msgspec.json.Decoder(dict[str, float])


def truncates(sampling: Sampling) -> bool:
    """Return true if a request draws from a part of the vocabulary by top_p, top_k or min_p.

    Temperature 0, where nothing is drawn, is no truncation.
    """
    is_cut = sampling.top_p is not None and sampling.top_p < 1
    is_cut = is_cut or (sampling.top_k or 0) > 0 or bool(sampling.min_p)
    return is_cut and sampling.temperature != 0


def num_to_ask(sampling: Sampling) -> int | None:
    """Return the number of most likely tokens that hold the kept ones; None if that is too many.

    Example:
        >>> [num_to_ask(Sampling(top_k=k)) for k in (3, 20, 21, None)]
        [4, 20, None, None]
        >>> num_to_ask(Sampling(top_p=0.9))
        20
    """
    top_k = max(sampling.top_k or 0, 0)
    if not truncates(sampling) or top_k > MOST_LOGPROBS:
        return None
    # One more than top_k, because ties with the last one are kept; only a top_k bounds the number.
    return min((top_k or MOST_LOGPROBS) + 1, MOST_LOGPROBS)


def read_support(logprobs: Logprobs | None, response_ids: Sequence[int]) -> list[list[int]] | None:
    """Return the kept ids at each token; None unless they are complete at every token.

    Example:
        >>> top = msgspec.Raw(b'{"token_id:7":-0.105,"token_id:5":-2.303,"token_id:6":-9999.0}')
        >>> read_support(Logprobs(top_logprobs=[top]), [5])
        [[7, 5]]
        >>> read_support(Logprobs(top_logprobs=[top]), [6]) is None
        True
    """
    if logprobs is None:
        return None
    try:
        if logprobs.content is not None:
            entries = [_ENTRIES.decode(token.top_logprobs) for token in logprobs.content]
            tokens = [{e.token: e.logprob for e in entry_list} for entry_list in entries]
        else:
            tokens = [_TABLE.decode(raw) for raw in logprobs.top_logprobs or ()]
        likely = [{_id_of(name): p for name, p in token.items()} for token in tokens]
        return complete_support(likely, response_ids)
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return None


def complete_support(
    likely: Sequence[Mapping[int, float]], response_ids: Sequence[int]
) -> list[list[int]] | None:
    """Return the kept ids at each token from the log-probabilities of the most likely ones.

    None unless they are complete at every token.

    Example:
        >>> complete_support([{7: -0.105, 5: -2.303, 6: -math.inf}], [5])
        [[7, 5]]
        >>> complete_support([{7: -0.105}], [7]) is None
        True
    """
    possible = [{i: p for i, p in token.items() if p > LOGPROB_SENTINEL} for token in likely]
    if any(math.fsum(map(math.exp, token.values())) < 1 - _MISSING for token in possible):
        return None
    is_whole = len(possible) == len(response_ids) and all(
        map(dict.__contains__, possible, response_ids)
    )
    return [list(token) for token in possible] if is_whole else None


def _id_of(name: str) -> int:
    number = name.removeprefix(_NAMED)
    if number == name or not number.isdecimal():
        raise ValueError(name)
    return int(number)
