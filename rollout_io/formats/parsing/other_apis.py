"""Explain responses of APIs other than OpenAI's chat and text completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rollout_io.formats.parsing.bodies import Choice, Response
from schemas.errors import InputError

_NULL = b"null"
_LOG = (
    "log the engine's chat completions with `return_token_ids` (vLLM); without token ids, convert "
)
_LOG += "the text as `openai_messages`"
_SGLANG = "write `response_token_ids` as `choices[i].token_ids`, and the log-probabilities as "
_SGLANG += "`choices[i].logprobs.content[j].logprob`"
_GENERATE = "use SGLang's chat completions, or write `output_ids` as `choices[0].token_ids`, the "
_GENERATE += "prompt's ids as `prompt_token_ids`, and the first value of each entry of "
_GENERATE += "`meta_info.output_token_logprobs` as `choices[0].logprobs.content[j].logprob`"


class _Api(NamedTuple):
    name: str
    is_of: Callable[[Response, str], bool]
    hint: str = _LOG


def _has(name: str) -> Callable[[Response, str], bool]:
    return lambda response, _: bytes(getattr(response, name)) != _NULL


_APIS = (
    _Api(
        "Anthropic's Messages API",
        lambda _, kind: kind in {"message", "ping"} or kind.startswith(("message_", "content_")),
    ),
    _Api(
        "OpenAI's Responses API",
        lambda response, kind: response.object == "response" or kind.startswith("response."),
    ),
    _Api("Gemini's API", _has("candidates")),
    _Api("SGLang's /generate", _has("output_ids"), _GENERATE),
    _Api("SGLang's /generate", _has("meta_info"), _GENERATE),
    _Api("Text Generation Inference", _has("generated_text")),
    _Api("Ollama's API", _has("done")),
    _Api("OpenAI's Responses API", _has("output")),
    _Api("Anthropic's Messages API", _has("content")),
)


def other_api(response: Response, where: str) -> InputError | None:
    """Return the error for a response without choices, if it is of another known API.

    Args:
        response: The response, or the first chunk of a stream.
        where: Location of the call, for error messages.
    """
    kind = bytes(response.type).decode().strip('"')
    api = next((api for api in _APIS if api.is_of(response, kind)), None)
    if api is None:
        return None
    got = f"the response is of {api.name}, which the format `calls` does not read"
    return InputError("other_api", where, got, "a chat or text completion", api.hint)


def sglang(choice: Choice, where: str) -> InputError | None:
    """Return the error for a choice whose ids are in SGLang's fields; None if there are none."""
    names = ("response_token_ids", "meta_info")
    found = [f"`{name}`" for name in names if bytes(getattr(choice, name)) != _NULL]
    if not found:
        return None
    got = f"the ids are in SGLang's fields ({' and '.join(found)}), which are not read"
    return InputError("other_api", where, got, "`choices[i].token_ids`", _SGLANG)
