"""The requests that recent versions of Claude Code log: what the model was sent, exactly.

    {"type": "api-request-shape", "shapeHash": "s1", "shape": {"system": [...], "tools": [...]}}
    {"type": "api-request-blob", "hash": "h1", "message": {"role": "user", "content": [...]}}
    {"type": "api-request", "id": "r1", "shapeHash": "s1", "params": {...}, "keep": 0, "tail": ["h1"]}
    {"type": "api-request", "id": "r2", "base": "r1", "keep": 1, "tail": ["h2", "h3"], ...}
    {"type": "assistant", "requestRef": "r2", ...}

The messages of a request are the first `keep` messages of the request `base`, and then those of
`tail`, each named by the SHA-256 of its canonical JSON (sorted keys, without `cache_control`). A
message that the session's own lines already have is not logged again: its digest is that of an
answer, of a line of the user, or of the results of an answer's calls.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout_io.formats.dialects import anthropic
from rollout_io.formats.parsing.content import Message, raw_of
from rollout_io.formats.parsing.jsonl import decode_line

_BLOB, _REQUEST, _SHAPE = "api-request-blob", "api-request", "api-request-shape"
_CACHE = "cache_control"


class _Thread(msgspec.Struct, gc=False):
    type: str = "none"


class _Params(msgspec.Struct, gc=False):
    temperature: float | None = None
    top_p: float | None = None


class _Blob(msgspec.Struct, gc=False):
    hash: str
    message: dict[str, Any]


class _Shape(msgspec.Struct, gc=False):
    system: Any = None
    tools: Any = None


class _Shaped(msgspec.Struct, gc=False):
    name: str | None = msgspec.field(name="shapeHash", default=None)
    shape: _Shape | None = None


class Request(msgspec.Struct, gc=False):
    """A request, as it is logged."""

    id: str
    tail: list[str]
    keep: int = 0
    base: str | None = None
    shape: str | None = msgspec.field(name="shapeHash", default=None)
    params: _Params | None = None
    thread: _Thread | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model was sent for an answer.

    Attributes:
        messages: Chat messages, the system prompt first.
        shape: Name of the system prompt and the tools.
        tools: Tool definitions in OpenAI's format; None if there are none.
    """

    messages: list[Message]
    shape: str | None
    tools: list[Message] | None
    temperature: float | None = None
    top_p: float | None = None


@dataclass(slots=True)
class Requests:
    """The requests of a session, with the messages that they name.

    Attributes:
        num_unknown: Number of prompts that could not be found although their request is logged.
    """

    num_unknown: int = 0
    _where: str = ""
    _requests: dict[str, Request] = field(default_factory=dict)
    _shapes: dict[str, _Shape] = field(default_factory=dict)
    _blobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _said: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _answers: dict[tuple[str, str], dict[str, list[Any]]] = field(default_factory=dict)
    _converted: dict[str, list[Message]] = field(default_factory=dict)
    _heads: dict[str, tuple[list[Message], list[Message] | None]] = field(default_factory=dict)
    _is_indexed: bool = False

    def add(self, record: dict[str, Any], agent: str, where: str) -> None:
        """Add a line.

        Args:
            record: The decoded line.
            agent: Name of the file of the agent: a copy of an answer there is another answer.
            where: Location of the line, for error messages.

        Raises:
            InputError: `record_type`: a field of a request has the wrong type.
        """
        kind, message = record.get("type"), record.get("message")
        self._where = self._where or where
        if kind == _REQUEST:
            request = _checked(Request, record, where)
            self._requests[request.id] = request
        elif kind == _SHAPE:
            shaped = _checked(_Shaped, record, where)
            if shaped.name is not None and shaped.shape is not None:
                self._shapes[shaped.name] = shaped.shape
        elif kind == _BLOB:
            blob = _checked(_Blob, record, where)
            self._blobs[blob.hash] = blob.message
        elif kind == "user" and isinstance(message, dict):
            self._said.append((agent, message))
        elif kind == "assistant" and isinstance(message, dict):
            lines = self._answers.setdefault((agent, str(message.get("id"))), {})
            lines.setdefault(str(record.get("uuid")), message.get("content") or [])

    def knows(self, name: str | None) -> bool:
        """True if the log has all messages of a request; counts a request of which it has not."""
        request = None if name is None else self._requests.get(name)
        if request is None:
            return False
        self._index()
        digests = self._digests(request)
        is_whole = request.thread is None or request.thread.type == "none"
        is_whole &= digests is not None and all(d in self._blobs for d in digests)
        self.num_unknown += not is_whole
        return is_whole

    def prompt(self, name: str, since: Iterable[Message] = ()) -> Prompt:
        """Return what was sent with a request that is known, and after it.

        Raises:
            InputError: `record_type`: a message has a field of the wrong type.
        """
        request = self._requests[name]
        system, tools = self._head(request.shape)
        messages = [*system]
        for each in self._digests(request) or ():
            messages += self._messages(each)
        messages += since
        params = request.params or _Params()
        return Prompt(messages, request.shape, tools, params.temperature, params.top_p)

    def _digests(self, request: Request) -> list[str] | None:
        """Return the digests of a request's messages; None if a base is missing."""
        parts, need, name = [request.tail], request.keep, request.base
        seen: set[str] = set()
        while need > 0:
            base = None if name is None or name in seen else self._requests.get(name)
            if base is None or need > base.keep + len(base.tail):
                return None
            seen.add(base.id)
            if need > base.keep:
                parts.append(base.tail[: need - base.keep])
            need, name = min(need, base.keep), base.base
        return [digest for part in reversed(parts) for digest in part]

    def _index(self) -> None:
        """Add the messages of the session's own lines to the blobs."""
        if self._is_indexed:
            return
        self._is_indexed = True
        results: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
        callers: dict[tuple[str, str], tuple[str, str]] = {}
        for key, lines in self._answers.items():
            content: Any = [block for each in lines.values() for block in _blocks(each)]
            self._put({"role": "assistant", "content": content})
            for block in content:
                if isinstance(block, dict) and block.get("type") == "tool_use":
                    callers[key[0], str(block.get("id"))] = key
        for agent, message in self._said:
            content = message.get("content")
            self._put({"role": "user", "content": content})
            self._put({"role": "user", "content": _blocks(content)})
            for block in _blocks(content):
                caller = callers.get((agent, str(block.get("tool_use_id"))))
                if caller is not None:
                    results[caller].append(block)
        for blocks in results.values():
            self._put({"role": "user", "content": blocks})
        self._said, self._answers = [], {}

    def _put(self, message: dict[str, Any]) -> None:
        self._blobs.setdefault(digest_of(message), message)

    def _messages(self, digest: str) -> list[Message]:
        if digest not in self._converted:
            where = f"{self._where}, message {digest[:12]}"
            self._converted[digest] = anthropic.messages([self._blobs[digest]], where)
        return self._converted[digest]

    def _head(self, name: str | None) -> tuple[list[Message], list[Message] | None]:
        """Return the system prompt, as a message if there is one, and the tools."""
        shape = self._shapes.get(name or "", _Shape())
        if name is None or name not in self._heads:
            text = anthropic.system_prompt(shape.system, f"{self._where}, shape.system")
            system: list[Message] = [{"role": "system", "content": text}] if text else []
            self._heads[name or ""] = system, anthropic.tools(shape.tools)
        return self._heads[name or ""]


@dataclass(slots=True)
class Chain:
    """Calls of an agent, each of which was sent the prompt and the answer of the one before it."""

    prompt: Prompt
    reply: list[Message]
    num_given: int
    where: str
    stop_reason: str | None = None

    def is_continued_by(self, prompt: Prompt) -> bool:
        """True if a prompt is this prompt, the answer to it, and then no other answer."""
        size = len(self.prompt.messages)
        end = size + len(self.reply)
        return (
            prompt.shape == self.prompt.shape
            and prompt.messages[:size] == self.prompt.messages
            and prompt.messages[size:end] == self.reply
            and all(message["role"] != "assistant" for message in prompt.messages[end:])
        )


def chained(calls: Iterable[tuple[Prompt, list[Message], str, str | None]]) -> list[Chain]:
    """Return the chains of an agent's calls, in the order in which they begin.

    Args:
        calls: Prompt, answer, location of the answer's last line, and stop reason of each call.
    """
    found: list[Chain] = []
    for prompt, reply, where, stop_reason in calls:
        chain = next((c for c in reversed(found) if c.is_continued_by(prompt)), None)
        if chain is None:
            chain = Chain(prompt, reply, len(prompt.messages), where)
            found.append(chain)
        chain.prompt, chain.reply, chain.where = prompt, reply, where
        chain.stop_reason = stop_reason or chain.stop_reason
    return found


def digest_of(message: dict[str, Any]) -> str:
    """Return the name of a message: the SHA-256 of its canonical JSON.

    Example:
        >>> digest_of({"role": "user", "content": [{"type": "text", "text": "Hi."}]})[:16]
        'd3eaf30c2b5b1c95'
    """
    bare = _without_cache(message)
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _without_cache(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_cache(each) for name, each in value.items() if name != _CACHE}
    return [_without_cache(each) for each in value] if isinstance(value, list) else value


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    listed = content if isinstance(content, list) else []
    return [block for block in listed if isinstance(block, dict)]


def _checked(kind: type[Any], record: dict[str, Any], where: str) -> Any:
    return decode_line(msgspec.json.Decoder(kind), bytes(raw_of(record)), where)
