"""Tool calls and reasoning of sampled ids, found by the engine's own parsers.

    POST /v1/chat/completions/derender
    {"generate_response": {"choices": [{"index": 0, "token_ids": [...], "finish_reason": "stop"}]},
     "prompt_token_ids": [...], "chat_request": {...}}
    {"choices": [{"message": {"content": ..., "reasoning": ..., "tool_calls": [...]}, ...}]}

vLLM has this with `--enable-scale-out`. The answer to a call that was sent as token ids thus becomes
the chat completion that the engine would have given, and nothing is tokenized again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipelines.generation.engines.http_pool import BROKEN
from pipelines.http_app import JSON
from pipelines.record.engine_requests import NULL, Asked, Fields, value_of
from pipelines.record.engine_responses import Answer
from pipelines.record.upstreams import Upstreams
from schemas.errors import EngineError

PATH = "/v1/chat/completions/derender"
_TAIL = 8  # ids of the prompt that parsers see, to decode the first token
_OWN_FIELDS = ("logprobs", "top_logprobs", "return_token_ids", "stream", "stream_options")
_PROBE = msgspec.Raw(b'[{"role":"user","content":"x"}]')


class _Parsed(msgspec.Struct):
    choices: list[Fields] = []


_PARSED = msgspec.json.Decoder(_Parsed)


class IdParser:
    """Parses ids by the engines.

    Args:
        upstreams: The engines.
        eos: Id of the end-of-sequence token, which is no text; None if there is none.
    """

    def __init__(self, upstreams: Upstreams, eos: int | None) -> None:
        self._upstreams, self._eos = upstreams, eos
        self._works: bool | None = None

    async def works(self, request: Asked, headers: Mapping[str, str]) -> bool:
        """Return true if the engines parse ids; they are asked once, with a request of ours."""
        if self._works is None:
            sent = {"model": request.sent.get("model", NULL), "messages": _PROBE}
            try:
                self._works = await self._choice(sent, [0], [0], "length", headers) is not None
            except EngineError:
                return False
        return self._works

    async def merged(self, answer: Answer, request: Asked, headers: Mapping[str, str]) -> Answer:
        """Return a text completion with the message that its ids are.

        Raises:
            EngineError: `engine_answer`: the engine does not parse the ids.
        """
        (sampled,) = answer.choices
        ids: list[int] = value_of(sampled, "token_ids") or []
        prompt: list[int] = value_of(sampled, "prompt_token_ids") or []
        reason = value_of(sampled, "finish_reason")
        shown = ids[:-1] if ids[-1:] == [self._eos] else ids
        choice = await self._choice(request.sent, prompt[-_TAIL:], shown, reason, headers)
        if choice is None:
            raise EngineError("engine_answer", PATH, "the engine did not parse the sampled ids")
        message: Fields = msgspec.json.decode(choice["message"], type=Fields)
        has_calls = bytes(message.get("tool_calls", NULL)) not in (b"null", b"[]")
        finish = "tool_calls" if has_calls and reason == "stop" else reason
        merged_choice = {k: v for k, v in sampled.items() if k != "text"}
        merged_choice |= {
            "message": choice["message"],
            "finish_reason": msgspec.Raw(msgspec.json.encode(finish)),
        }
        return Answer(msgspec.json.encode(answer.fields | {"choices": [merged_choice]}))

    async def _choice(
        self,
        sent: Fields,
        prompt: Sequence[int],
        ids: Sequence[int],
        reason: str | None,
        headers: Mapping[str, str],
    ) -> Fields | None:
        request = {k: v for k, v in sent.items() if k not in _OWN_FIELDS}
        if "tools" in request:
            request["skip_special_tokens"] = msgspec.Raw(b"false")  # marks of calls may be special
        body: dict[str, Any] = {
            "model": sent.get("model", NULL),
            "generate_response": {
                "choices": [{"index": 0, "token_ids": ids, "finish_reason": reason}]
            },
            "prompt_token_ids": prompt,
            "chat_request": request,
        }
        sent_headers = {**headers, "content-type": JSON}
        opened = self._upstreams.answer("POST", PATH, msgspec.json.encode(body), sent_headers, None)
        async with opened as response:
            try:
                content = await self._upstreams.whole(response)
            except BROKEN as error:
                finding = f"the connection broke ({type(error).__name__})"
                raise EngineError("engine_down", PATH, finding) from None
            if response.status != 200:
                return None
        try:
            choices = _PARSED.decode(content).choices
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return choices[0] if choices and "message" in choices[0] else None
