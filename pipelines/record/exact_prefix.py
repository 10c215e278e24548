"""Send follow-up chat calls as exact token ids, for clients that use only the chat API.

The first call of a conversation is sent unchanged. A later call that repeats all earlier messages
and the response unmodified, and appends new messages, is sent as token ids:

    prompt = last prompt + tokens sampled for it + ids of the new messages

Clients send back what they parsed: arguments written anew, reasoning left out. A response is the same
if it has the same text, apart from whitespace around it, and the same calls. The client receives the
engine's text completion as a chat completion; if a call has tools, or the engine found reasoning,
its parsers read the ids (`IdParser`). When in doubt (an edited response, a template that changes
earlier messages, a chat-only field), the call is sent unchanged and counted by reason.

vLLM has its parsers as a route with `--enable-scale-out`, so that nothing is tokenized again:

    POST /v1/chat/completions/derender
    {"generate_response": {"choices": [{"index": 0, "token_ids": [...], "finish_reason": "stop"}]},
     "prompt_token_ids": [...], "chat_request": {...}}
    {"choices": [{"message": {"content": ..., "reasoning": ..., "tool_calls": [...]}, ...}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pipelines.generation.engines.http_pool import BROKEN
from pipelines.generation.histories import observation_ids
from pipelines.http_server import JSON
from pipelines.record.engine_requests import NULL, Asked, Fields, value_of
from pipelines.record.engine_responses import Answer
from pipelines.record.sessions import Seen, Session
from pipelines.record.upstreams import Upstreams
from rollout_io.formats.parsing.content import known
from rollout_io.retokenize.chat_template import normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import EngineError, InputError, RolloutError

PATH = "/v1/completions"
MOST_CONVERSATIONS = 8
FIRST = "first"

_CARRIED = frozenset(
    {
        *("model", "stream", "stream_options", "user", "priority", "cache_salt", "seed", "stop"),
        *("temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens", "ignore_eos"),
        *("stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("structured_outputs", "logit_bias", "request_id"),
        *("include_stop_str_in_output", "skip_special_tokens", "return_tokens_as_token_ids"),
    }
)
_DROPPED = frozenset({"messages", "max_completion_tokens"})
_PARSED = frozenset({"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"})
_FREE_CHOICES = (b'"auto"', b'"none"', b"null")
_OPTIONAL = (b"null", b"false", b"[]", b"{}", b"0")
_EMPTY: tuple[object, ...] = (None, [], {}, "")
_ENDED = frozenset({"stop", "length", "tool_calls"})

PARSE_PATH = "/v1/chat/completions/derender"
_TAIL = 8  # ids of the prompt that parsers see, to decode the first token
_OWN_FIELDS = ("logprobs", "top_logprobs", "return_token_ids", "stream", "stream_options")
_PROBE = msgspec.Raw(b'[{"role":"user","content":"x"}]')


class Conversation(NamedTuple):
    """A conversation that a later call may continue.

    Attributes:
        messages: Messages, ending with the engine's response.
        ids: Prompt and response of the last call.
        num_sampled: Number of ids at the end that belong to the response.
        is_plain: True if the response is text alone.
    """

    messages: list[dict[str, Any]]
    ids: list[int]
    num_sampled: int
    is_plain: bool


class Sent(NamedTuple):
    """What the engine is sent: as received, or a chat as a text completion of token ids.

    Attributes:
        path: API path.
        body: Body.
        as_text: True if it is a chat that is sent as a text completion.
        is_parsed: True if the engine's parsers have to read the sampled ids.
    """

    path: str
    body: bytes
    as_text: bool = False
    is_parsed: bool = False


class ExactPrefix:
    """The conversations of a recorder that can be continued token by token.

    Args:
        tokenizer: Tokenizer of the engines, with their chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, dict[str | None, list[Conversation]]] = {}

    @property
    def eos(self) -> int | None:
        """Id of the token that ends a response."""
        return self._tokenizer.eos_token_id

    def knows(self, session: Session, agent: str | None) -> bool:
        """True if the agent has a conversation that may be continued."""
        return bool(self._known.get(session.name, {}).get(agent))

    def body(
        self,
        session: Session,
        agent: str | None,
        request: Asked,
        room: int | None,
        *,
        parses: bool,
    ) -> Sent | str:
        """Build the text completion request that continues a conversation.

        Args:
            session: Session of the call.
            agent: Agent within the session.
            request: A chat request.
            room: Context length of the engines, in tokens; None if unknown.
            parses: True if the engines' parsers read ids.

        Returns:
            The request; or, if the call has to be sent unchanged, the reason as a short label: `FIRST` if
            there is no conversation to continue.
        """
        conversations = self._known.get(session.name, {}).get(agent, [])
        if not conversations:
            return FIRST
        if (field := _chat_only(request.fields, parses=parses)) is not None:
            return f"field {field}"
        try:
            messages = _plain(value_of(request.fields, "messages"))
            longest = _longest(conversations, _alike(messages))
            if longest is None:
                return "another history"
            is_parsed = not longest.is_plain or not _is_absent(request.fields, "tools")
            if is_parsed and (not parses or not _is_absent(request.fields, "stop")):
                return "field stop" if parses else "reasoning"
            ids = self._continued(longest, messages[len(longest.messages) :])
        except RolloutError as error:
            return error.rule
        most = _limit(request.fields, None if room is None else room - len(ids))
        if most is None:
            return "no room"
        carried = {k: v for k, v in request.sent.items() if k in _CARRIED}
        exact = {"prompt": ids, "max_tokens": most, "return_token_ids": True}
        exact["logprobs"] = value_of(request.sent, "top_logprobs") or 0  # ours: see `_chat_only`
        if is_parsed:
            carried = {k: v for k, v in carried.items() if k not in {"stream", "stream_options"}}
        return Sent(PATH, msgspec.json.encode(carried | exact), as_text=True, is_parsed=is_parsed)

    def _continued(self, so_far: Conversation, new: Sequence[dict[str, Any]]) -> list[int]:
        if not new or any(message["role"] == "assistant" for message in new):
            raise InputError("new messages", "chat", "expected new messages of others")
        response = so_far.ids[len(so_far.ids) - so_far.num_sampled :]
        return so_far.ids + observation_ids(response, new, self._tokenizer)

    def remember(self, session: Session, agent: str | None, request: Asked, seen: Seen) -> None:
        """Store the conversation of a completed call if it can be continued."""
        answer = _answer_of(seen)
        if request.kind != "chat" or answer is None or session.outcome is not None:
            return
        try:
            messages = _plain(value_of(request.fields, "messages"))
            alike = _alike(messages)
            conversations = self._known.setdefault(session.name, {}).setdefault(agent, [])
            so_far = _longest(conversations, alike)
            if so_far is None and not self._renders(messages, request, seen):
                return
            ended = [*alike, *_alike(_plain([answer]))]
        except RolloutError:
            return
        ids = [*seen.prompt.tolist(), *seen.responses[0].tolist()]
        if so_far is not None:
            conversations.remove(so_far)
        is_plain = answer.keys() == {"role", "content"}
        conversations.append(Conversation(ended, ids, len(seen.responses[0]), is_plain))
        del conversations[:-MOST_CONVERSATIONS]

    def _renders(self, messages: Sequence[dict[str, Any]], request: Asked, seen: Seen) -> bool:
        """True if this tokenizer renders the messages to the prompt that the engine reported.

        Engines write definitions of tools in their own way: then only the end of the prompt is
        compared, which is the last message and the head of the response.
        """
        tools = value_of(request.fields, "tools")
        text = self._tokenizer.render(messages, tools, generation_prompt=True)
        prompt = seen.prompt.tolist()
        if self._tokenizer.encode([text], ["chat"])[0] == prompt:
            return True
        eos = self._tokenizer.eos_token_id
        if not tools or eos is None:
            return False
        end = observation_ids([eos], messages[-1:], self._tokenizer)
        return bool(prompt[-len(end) :] == end)

    def forget(self, session: Session) -> None:
        """Forget the conversations of a session that has ended."""
        self._known.pop(session.name, None)


def _chat_only(fields: Fields, *, parses: bool) -> str | None:
    """Find a field that a text completion lacks or treats differently; None if there is none."""
    carried = _CARRIED | _DROPPED | (_PARSED if parses else frozenset())
    for name, value in fields.items():
        is_default = bytes(value) in _OPTIONAL or (name, bytes(value)) == ("n", b"1")
        if name not in carried and not is_default:
            return name
    if not _is_absent(fields, "tools"):
        if bytes(fields.get("tool_choice", NULL)) not in _FREE_CHOICES:
            return "tool_choice"
        if bytes(fields.get("parallel_tool_calls", NULL)) == b"false":
            return "parallel_tool_calls"
    return None


def _is_absent(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, NULL)) in _OPTIONAL


def _limit(fields: Fields, room: int | None) -> int | None:
    """Return `max_tokens`: the client's value, else the rest of the context, as in the chat API."""
    for name in ("max_completion_tokens", "max_tokens"):
        most = value_of(fields, name)
        if most is not None:
            return most if isinstance(most, int) and most > 0 else None
    return room if room is not None and room > 0 else None


def _plain(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise InputError("messages", "chat", type(messages).__name__, "a list")
    plain = [normalize(message, f"message {i}") for i, message in enumerate(messages)]
    return [
        {k: v for k, v in message.items() if k == "content" or not _is_empty(v)}
        for message in plain
    ]


def _is_empty(value: object) -> bool:
    """True if a field is empty; clients add such fields when they send a response back."""
    return value in _EMPTY or (isinstance(value, dict) and all(map(_is_empty, value.values())))


def _longest(
    conversations: Sequence[Conversation], messages: list[dict[str, Any]]
) -> Conversation | None:
    """Find the longest conversation that the messages start with."""
    fits = [c for c in conversations if messages[: len(c.messages)] == c.messages]
    return max(fits, key=lambda c: len(c.messages), default=None)


def _alike(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as they are compared: of responses, the text and the calls."""
    return [_said(message) if message["role"] == "assistant" else message for message in messages]


def _said(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    return {
        "role": "assistant",
        "content": message["content"].strip(),
        "calls": [(call["name"], call.get("arguments")) for call in calls],
    }


def _answer_of(seen: Seen) -> dict[str, Any] | None:
    """Return the response as a message; None unless it is one that was not cut off by an error."""
    choices = seen.answer.choices
    if len(choices) != 1 or choices[0].finish_reason not in _ENDED:
        return None
    message = choices[0].message
    if message is None:
        text = choices[0].text
        return None if text is None else {"role": "assistant", "content": text}
    answer = {"role": "assistant", "content": message.content or ""}
    calls = msgspec.json.decode(message.tool_calls) or []
    thought = message.reasoning or message.reasoning_content
    return answer | known({"tool_calls": calls or None, "reasoning_content": thought or None})


class _Derendered(msgspec.Struct):
    choices: list[Fields] = []


_DERENDERED = msgspec.json.Decoder(_Derendered)


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
            raise EngineError(
                "engine_answer", PARSE_PATH, "the engine did not parse the sampled ids"
            )
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
        opened = self._upstreams.answer(
            "POST", PARSE_PATH, msgspec.json.encode(body), sent_headers, None
        )
        async with opened as response:
            try:
                content = await self._upstreams.whole(response)
            except BROKEN as error:
                finding = f"the connection broke ({type(error).__name__})"
                raise EngineError("engine_down", PARSE_PATH, finding) from None
            if response.status != 200:
                return None
        try:
            choices = _DERENDERED.decode(content).choices
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return choices[0] if choices and "message" in choices[0] else None
