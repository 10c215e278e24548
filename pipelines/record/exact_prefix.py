"""Send follow-up chat calls as exact token ids, for clients that use only the chat API.

The first call of a conversation is sent unchanged. A later call that repeats all earlier messages
and the response unmodified, and appends new messages, is sent as token ids:

    prompt = last prompt + tokens sampled for it + ids of the new messages

The client receives the engine's text completion as a chat completion. When in doubt (tools,
reasoning, an edited response, a template that changes earlier messages, a chat-only field), the
call is sent unchanged and counted by reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from pipelines.generation.histories import observation_ids
from pipelines.record.engine_requests import NULL, Asked, Fields, value_of
from pipelines.record.engine_responses import Answer
from pipelines.record.sessions import Seen, Session
from rollout_io.formats.parsing.bodies import NO_JSON
from rollout_io.retokenize.messages import normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import InputError, RolloutError

PATH = "/v1/completions"
MOST_CONVERSATIONS = 8
FIRST = "first"

_CARRIED = frozenset(
    {
        *("model", "stream", "stream_options", "user", "priority", "cache_salt", "seed", "stop"),
        *("temperature", "top_p", "top_k", "min_p", "min_tokens", "max_tokens", "ignore_eos"),
        *("stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("structured_outputs", "logit_bias", "request_id"),
        *("include_stop_str_in_output", "skip_special_tokens"),
    }
)
_DROPPED = frozenset({"messages", "max_completion_tokens"})
_OPTIONAL = (b"null", b"false", b"[]", b"{}", b"0")
_EMPTY: tuple[object, ...] = (None, [], {}, "")
_ENDED = frozenset({"stop", "length"})
_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))


class Conversation(NamedTuple):
    """A conversation that a later call may continue.

    Attributes:
        messages: Messages, ending with the engine's response.
        ids: Prompt and response of the last call.
        num_sampled: Number of ids at the end that belong to the response.
    """

    messages: list[dict[str, Any]]
    ids: list[int]
    num_sampled: int


@dataclass(frozen=True, slots=True)
class Unsure:
    """The reason why a call is sent unchanged.

    Attributes:
        reason: Short label for metrics; `FIRST` if there is no conversation to continue.
    """

    reason: str


class ExactPrefix:
    """The conversations of a recorder that can be continued token by token.

    Args:
        tokenizer: Tokenizer of the engines, with their chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, dict[str | None, list[Conversation]]] = {}

    def body(
        self, session: Session, agent: str | None, asked: Asked, room: int | None
    ) -> bytes | Unsure:
        """Build the text completion request that continues a conversation.

        Args:
            session: Session of the call.
            agent: Agent within the session.
            asked: A chat request.
            room: Context length of the engines, in tokens; None if unknown.

        Returns:
            The request body; or `Unsure` if the call has to be sent unchanged.
        """
        known = self._known.get(session.name, {}).get(agent, [])
        if not known:
            return Unsure(FIRST)
        if (field := _chat_only(asked.fields)) is not None:
            return Unsure(f"field {field}")
        try:
            messages = _plain(value_of(asked.fields, "messages"))
            found = _longest(known, messages)
            if found is None:
                return Unsure("another history")
            ids = self._continued(found, messages[len(found.messages) :])
        except RolloutError as error:
            return Unsure(error.rule)
        most = _limit(asked.fields, None if room is None else room - len(ids))
        if most is None:
            return Unsure("no room")
        carried = {k: v for k, v in asked.sent.items() if k in _CARRIED}
        exact = {"prompt": ids, "max_tokens": most, "logprobs": 0, "return_token_ids": True}
        return msgspec.json.encode(carried | exact)

    def _continued(self, so_far: Conversation, new: Sequence[dict[str, Any]]) -> list[int]:
        if not new or any(message["role"] not in {"user", "system"} for message in new):
            raise InputError(
                "new messages", "chat", "expected new messages with role user or system only"
            )
        response = so_far.ids[len(so_far.ids) - so_far.num_sampled :]
        return so_far.ids + observation_ids(response, new, self._tokenizer)

    def remember(self, session: Session, agent: str | None, asked: Asked, seen: Seen) -> None:
        """Store the conversation of a completed call if it can be continued."""
        text = _answer_text(seen)
        if asked.kind != "chat" or text is None or session.outcome is not None:
            return
        try:
            messages = _plain(value_of(asked.fields, "messages"))
            known = self._known.setdefault(session.name, {}).setdefault(agent, [])
            so_far = _longest(known, messages)
            if so_far is None and not self._renders(messages, seen):
                return
        except RolloutError:
            return
        said = {"role": "assistant", "content": text}
        ids = [*seen.prompt.tolist(), *seen.responses[0].tolist()]
        if so_far is not None:
            known.remove(so_far)
        known.append(Conversation([*messages, said], ids, len(seen.responses[0])))
        del known[:-MOST_CONVERSATIONS]

    def _renders(self, messages: Sequence[dict[str, Any]], seen: Seen) -> bool:
        """True if this tokenizer renders the messages to the prompt that the engine reported."""
        text = self._tokenizer.render(messages, generation_prompt=True)
        return bool(self._tokenizer.encode([text], ["chat"])[0] == seen.prompt.tolist())

    def forget(self, session: Session) -> None:
        """Forget the conversations of a session that has ended."""
        self._known.pop(session.name, None)


class ChatShown:
    """Converts text completions to chat completions.

    Args:
        asked: The chat request.
    """

    def __init__(self, asked: Asked) -> None:
        self._model, self._has_begun = asked.model, False

    def whole(self, answer: Answer) -> bytes:
        """Convert a complete response."""
        (choice,) = answer.choices
        message = {"role": "assistant", "content": choice["text"], **_MESSAGE}
        made = {"message": message, **_without(choice, "text")}
        top = {"object": "chat.completion", "choices": [made], "prompt_token_ids": None}
        return msgspec.json.encode(self._named(answer.fields) | top)

    def chunk(self, answer: Answer) -> bytes:
        """Convert a chunk; the first one is preceded by a chunk with the role."""
        top = self._named(answer.fields) | {"object": "chat.completion.chunk"}
        choices = [
            {"delta": {"content": choice["text"]}, **_without(choice, "text")}
            for choice in answer.choices
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


def _without(choice: Fields, name: str) -> dict[str, Any]:
    gone = {name, "prompt_token_ids", "prompt_logprobs"}
    kept = {k: v for k, v in choice.items() if k not in gone}
    return kept | {"logprobs": NULL, "token_ids": NULL}


def _chat_only(fields: Fields) -> str | None:
    """Find a field that a text completion lacks or treats differently; None if there is none."""
    for name, value in fields.items():
        is_default = bytes(value) in _OPTIONAL or (name, bytes(value)) == ("n", b"1")
        if name not in _CARRIED | _DROPPED and not is_default:
            return name
    return None


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


def _longest(known: Sequence[Conversation], messages: list[dict[str, Any]]) -> Conversation | None:
    """Find the longest conversation that the messages start with."""
    fits = [c for c in known if messages[: len(c.messages)] == c.messages]
    return max(fits, key=lambda c: len(c.messages), default=None)


def _answer_text(seen: Seen) -> str | None:
    """Return the response's text; None unless it is plain text and was not cut off by an error."""
    choices = seen.answer.choices
    if len(choices) != 1 or choices[0].finish_reason not in _ENDED:
        return None
    message = choices[0].message
    if message is None:
        return choices[0].text
    calls = NO_JSON if bytes(message.tool_calls) == b"[]" else message.tool_calls
    if calls != NO_JSON or message.reasoning or message.reasoning_content:
        return None
    return message.content
