"""What dialects share: the contract of a translated call, and a chat answer as blocks.

An answer is a list of blocks: a thought, a text, or a tool call. A stream says the same in three steps,
each block at a time: it begins, gets more text, and ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from pipelines.record.upstreams import check_density
from rollout_io.formats.parsing.content import Message, extend
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import EngineError, InputError

T = TypeVar("T")
Fields = dict[str, Any]
Said = Literal["begin", "more", "end"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]

_DATA_URL = "data:{};base64,{}"
_FALLBACK_TYPE = "application/octet-stream"


class PlainMessage(msgspec.Struct):
    """A message, as most clients send it."""

    role: str
    content: str = ""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class Piece(msgspec.Struct):
    """A message of a chat answer, or a streamed piece of it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprobs(msgspec.Struct):
    content: list[Fields] | None = None


class Choice(msgspec.Struct):
    """A choice of a chat answer, or a streamed piece of it."""

    message: Piece | None = None
    delta: Piece | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _AnswerDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Numbers of tokens of a call."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _AnswerDetails | None = None

    @property
    def num_sampled(self) -> int:
        """Number of tokens of the answer."""
        return self.completion_tokens or 0

    @property
    def num_cached(self) -> int:
        """Number of tokens of the prompt that came from the engine's cache."""
        details = self.prompt_tokens_details
        return (details and details.cached_tokens) or 0

    @property
    def num_thought(self) -> int:
        """Number of tokens of the answer that are reasoning, if the engine counts them."""
        details = self.completion_tokens_details
        return (details and details.reasoning_tokens) or 0


class Chat(msgspec.Struct):
    """A chat completion, or a chunk of one."""

    id: str = ""
    created: int = 0
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Block:
    """A part of an answer.

    Attributes:
        kind: What it is.
        text: Its text; of a call, the arguments as JSON.
        id: Id of a call.
        name: Name of a called function.
        logprobs: Log-probabilities of the tokens of a text, if the request asks for them.
    """

    kind: Literal["thought", "text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[Fields] = field(default_factory=list)


class Step(NamedTuple):
    """A step of a stream: a block begins, gets more text, or ends.

    Attributes:
        said: Which of these.
        at: Position of the block in the answer.
        block: The block with its text so far.
        text: The text that was added, if any.
        logprobs: Log-probabilities of the tokens that were added to a text.
    """

    said: Said
    at: int
    block: Block
    text: str = ""
    logprobs: Sequence[Fields] = ()


@dataclass(slots=True)
class Blocks:
    """The blocks of one answer, from its message or from the chunks of a stream.

    Attributes:
        all: Blocks so far.
        finish_reason: The engine's finish reason; None while the stream has none.
        stop: The stop string that the model wrote, or None.
        usage: Numbers of tokens.
        id: Name of the answer.
        created: Time of the answer, in seconds since 1970.
    """

    all: list[Block] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None
    usage: Usage = field(default_factory=Usage)
    id: str = ""
    created: int = 0
    _is_open: bool = False
    _call_index: int = -1

    def take(self, chat: Chat) -> Iterator[Step]:
        """Add a chunk, or a whole answer; yield the steps of its stream.

        Raises:
            EngineError: `engine_answer`: a piece belongs to no call, or to one that has ended.
        """
        self.id, self.created = self.id or chat.id, self.created or chat.created
        self.usage = chat.usage or self.usage
        for choice in chat.choices[:1]:
            piece = choice.delta or choice.message or Piece()
            yield from self._more("thought", piece.reasoning or piece.reasoning_content)
            logprobs = (choice.logprobs and choice.logprobs.content) or []
            if choice.message is not None:  # they are those of thoughts and calls too
                logprobs = _of_text(logprobs, piece.content or "")
            yield from self._more("text", piece.content, logprobs)
            for index, call in enumerate(piece.tool_calls or ()):
                number = call.index if call.index is not None else index
                yield from self._call(number, call, call.function or _Function())
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self.stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
                yield from self._end()

    def _more(
        self, kind: Literal["thought", "text"], text: str | None, logprobs: Sequence[Fields] = ()
    ) -> Iterator[Step]:
        if not text:
            return
        if not self._is_open or self.all[-1].kind != kind:
            yield from self._begin(Block(kind))
        self.all[-1].logprobs += logprobs
        yield self._add(text)._replace(logprobs=logprobs)

    def _call(self, number: int, call: _Call, function: _Function) -> Iterator[Step]:
        last = self.all[-1] if self._is_open else None
        is_same = last is not None and last.kind == "call" and number == self._call_index
        is_other = bool(call.id and function.name and last and call.id != last.id)
        if not is_same or is_other:
            if not function.name or (number <= self._call_index and not is_other):
                finding = f"pieces of tool call {number} after it ended, or before it has a name"
                raise EngineError("engine_answer", "engine", finding)
            call_id = call.id or f"call_{self.id.removeprefix('chatcmpl-')}_{len(self.all)}"
            yield from self._begin(Block("call", id=call_id, name=function.name))
            self._call_index = number
        if function.arguments:
            yield self._add(function.arguments)

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self._end()
        self.all.append(block)
        self._is_open = True
        yield Step("begin", len(self.all) - 1, block)

    def _add(self, text: str) -> Step:
        block = self.all[-1]
        block.text += text
        return Step("more", len(self.all) - 1, block, text)

    def _end(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Step("end", len(self.all) - 1, self.all[-1])

    @property
    def has_calls(self) -> bool:
        """True if the model called a tool."""
        return any(block.kind == "call" for block in self.all)


def _of_text(logprobs: list[Fields], text: str) -> list[Fields]:
    """Select the log-probabilities of the tokens of a text; all of them if it is not found in them.

    Example:
        >>> tokens = [{"token": token} for token in ("<a>", "It", " is", "<end>")]
        >>> [one["token"] for one in _of_text(tokens, "It is")]
        ['It', ' is']
    """
    ends = list(accumulate(len(str(one.get("token"))) for one in logprobs))
    begin = "".join(str(one.get("token")) for one in logprobs).find(text)
    if begin < 0:
        return logprobs
    return logprobs[bisect_right(ends, begin) : bisect_left(ends, begin + len(text)) + 1]


class Stream(ABC):
    """The translator of one streamed answer."""

    @abstractmethod
    def take(self, chat: Chat) -> bytes:
        """Translate a chunk."""

    @abstractmethod
    def end(self) -> bytes:
        """Return what follows the last chunk of a complete answer."""


class DialectCall(ABC):
    """A call in a dialect, translated to a chat completion.

    Args:
        body: Body as received.
        path: Path of the request, without its session.
        query: Parameters of the request's URL.

    Raises:
        InputError: The request is invalid, or needs what a chat completion cannot express.

    Attributes:
        model: The harness's name for the model.
        chat: Body of the chat completion.
        is_stream: True if the answer is to be streamed.
        session: Name of the session as the harness's request has it; None if it has none.
        num_hidden_thoughts: Number of thoughts in the request that only the API could read.
        media_type: Content type of a streamed answer.
    """

    model: str
    chat: Fields
    is_stream: bool
    session: str | None = None
    num_hidden_thoughts: int = 0
    media_type: str = "text/event-stream; charset=utf-8"

    @abstractmethod
    def __init__(self, body: bytes, path: str, query: Mapping[str, str]) -> None:
        """Translate the request."""

    @abstractmethod
    def answer(self, chat: Chat) -> Fields:
        """Translate a complete answer."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return the translator of a streamed answer."""

    @staticmethod
    @abstractmethod
    def count(num_tokens: int) -> Fields:
        """Return the answer to a request that asks for the length of a prompt."""

    @staticmethod
    @abstractmethod
    def error(status: int, message: str) -> Fields:
        """Return the body of an error."""

    def error_event(self, status: int, message: str) -> bytes:
        """Return the event that ends a stream with an error."""
        return sse(self.error(status, message), "error")


def sse(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Encode an event of a stream."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def decoded(decoder: msgspec.json.Decoder[T], body: bytes, path: str) -> T:
    """Decode the body of a request.

    Raises:
        InputError: `json_line`, `record_type`: the body is invalid; `request_size`: decoding it
            would take too much memory.
    """
    check_density(body)
    try:
        return decode_line(decoder, body, path)
    except InputError as error:
        raise error.at(error.where, "send the fields that the API documents") from None


def inexpressible(path: str, what: str) -> InputError:
    """Return the error for a request that a chat completion cannot express."""
    finding = f"{what} cannot be sent to an engine of chat completions"
    return InputError("dialect", path, finding)


def engine_messages(messages: Iterable[Message], path: str) -> list[Message]:
    """Convert media of messages to the parts that engines take.

    Raises:
        InputError: `dialect`: a part is neither text, nor an image, audio or video with its data or
            URL.
    """
    return [
        message | {"content": [_engine_part(part, path) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _engine_part(part: Message, path: str) -> Message:
    kind, source = part.get("type"), part.get("source")
    if kind == "text":
        return part
    if isinstance(source, Mapping) and str(kind) in {"image", "video", "audio"}:
        mime, data = source.get("media_type") or _FALLBACK_TYPE, source.get("data")
        url = source.get("url") if data is None else _DATA_URL.format(mime, data)
        if kind == "audio" and data is not None:
            return {
                "type": "input_audio",
                "input_audio": {"data": data, "format": mime.rpartition("/")[2]},
            }
        if url is not None:
            return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    raise inexpressible(path, f"content of type {part.get('type')!r}")


def one_system(messages: Iterable[Message]) -> list[Message]:
    """Join the system messages at the start, and give later ones the role "user".

    Many chat templates reject a system message that is not the first one.
    """
    joined: list[Message] = []
    for message in messages:
        is_system, last = message["role"] == "system", joined[-1] if joined else None
        if is_system and last is not None and len(joined) == 1 and last["role"] == "system":
            extend(last, message)
        else:
            joined.append(message | {"role": "user"} if is_system and joined else dict(message))
    return joined


def arguments_of(block: Block) -> Any:
    """Return the arguments of a call; text that is no JSON object is kept under a name."""
    try:
        value = msgspec.json.decode(block.text or "{}")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": block.text}
