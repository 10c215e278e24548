"""Requests as recent versions of Claude Code log them, and answers as all versions do.

    {"type": "api-request-shape", "shapeHash": "s1", "shape": {"system": [...], "tools": [...]}}
    {"type": "api-request-blob", "hash": "h1", "message": {"role": "user", "content": [...]}}
    {"type": "api-request", "id": "r1", "shapeHash": "s1", "params": {...}, "keep": 0, "tail": ["h1"]}
    {"type": "api-request", "id": "r2", "base": "r1", "keep": 1, "tail": ["h2", "h3"], ...}
    {"type": "assistant", "requestRef": "r2", ...}

The messages of a request are the first `keep` messages of the request `base`, and then those of
`tail`, each named by the SHA-256 of its canonical JSON (sorted keys, without `cache_control`). A
message that the session's own lines already have is not logged again: its digest is that of an
answer, of the results of an answer's calls, or of lines of the user that follow each other.

An answer is one or more lines with the same `message.id`, wherever the results of its tools are
logged. Versions differ in what the lines contain: one block each, or states of the answer while it
was streamed, each of which repeats earlier blocks. Of the states of a block, the most complete
counts. If blocks follow in an order that a chat message cannot express, such as a thought after a
tool call, the answer becomes several messages.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import msgspec

from rollout_io.formats.claude_code_lines import Answer, Record, Spoken
from rollout_io.formats.contexts import Item
from rollout_io.formats.dialects import anthropic
from rollout_io.formats.dialects.anthropic import CALLS, is_server_result, parts_of_result
from rollout_io.formats.dialects.responses import chat_role
from rollout_io.formats.grammar import inner
from rollout_io.formats.parsing.content import (
    THOUGHTS,
    Message,
    Part,
    Parts,
    canonical_json,
    is_shown,
    parts_in,
)
from rollout_io.formats.parsing.media import restored

_CACHE = "cache_control"
_MAX_LINES = 16
"""Most lines of the user that are one message."""

_MARKERS = frozenset({"fallback"})
"""Types of blocks without text: `fallback` records that a different model continued."""

_SENT = anthropic.MESSAGE.plus(
    leaves={"parameters that are not part of the prompt": "output_config"}
)


class Shape(msgspec.Struct, gc=False):
    """The system prompt and the tools of a request, as sent."""

    system: Any = None
    tools: Any = None


class Shaped(Record, gc=False, rename="camel"):
    """The shape of the requests that follow."""

    shape_hash: str | None = None
    shape: Shape | None = None


class Blob(Record, gc=False, kw_only=True):
    """A message of requests."""

    hash: str
    message: Annotated[dict[str, Any], inner(_SENT)]


class _Thread(msgspec.Struct, gc=False):
    type: str = "none"


class _Params(msgspec.Struct, gc=False):
    temperature: float | None = None
    top_p: float | None = None


class Request(Record, gc=False, kw_only=True):
    """A request: the first messages of another one, and those of `tail`."""

    id: str
    tail: list[str]
    keep: int = 0
    base: str | None = None
    shape_hash: str | None = msgspec.field(name="shapeHash", default=None)
    params: _Params = msgspec.field(default_factory=_Params)
    thread: _Thread = msgspec.field(default_factory=_Thread)


@dataclass
class Requests:
    """The requests of a session, with the messages that they name.

    Attributes:
        num_unknown: Number of answers whose prompt could not be found although their request is logged.
    """

    num_unknown: int = 0
    _where: str = ""
    _requests: dict[str, Request] = field(default_factory=dict)
    _shapes: dict[str, Shape] = field(default_factory=dict)
    _sent: dict[str, dict[str, Any]] = field(default_factory=dict)
    _spoken: list[tuple[str, Spoken]] = field(default_factory=list)
    _items: dict[tuple[str, bool], Item] = field(default_factory=dict)

    def add(self, record: Any, where: str) -> None:
        """Add a line; a copy of an answer in another file is another answer."""
        self._where = self._where or where
        match record:
            case Request():
                self._requests[record.id] = record
            case Shaped(shape_hash=str(name), shape=Shape() as shape):
                self._shapes[name] = shape
            case Blob():
                self._sent[record.hash] = record.message
            case Spoken():
                self._spoken.append((where.rpartition(":")[0], record))

    def sent(self, name: str | None) -> tuple[Request, list[Item]] | None:
        """Return a request with its messages; one of which the log lacks some is counted.

        Raises:
            InputError: `record_type`: a message has a field of the wrong type.
        """
        request = None if name is None else self._requests.get(name)
        if request is None:
            return None
        digests = self._digests(request) if request.thread.type == "none" else None
        if digests is None or not all(digest in self._messages for digest in digests):
            self.num_unknown += 1
            return None
        items, is_answered = list[Item](), False
        for digest in digests:
            item = self._items.get((digest, is_answered))
            if item is None:
                item = self._item(digest, is_answered=is_answered)
                self._items[digest, is_answered] = item
            is_answered = is_answered or not item.key
            items.append(item)
        return request, items

    def _item(self, digest: str, *, is_answered: bool) -> Item:
        """Return a message; what the model wrote is given, unless it is an answer that was read."""
        where, message = f"{self._where}, message {digest[:12]}", self._messages[digest]
        messages = [
            piece | {"role": chat_role(piece["role"], is_answered=is_answered)}
            for piece in anthropic.messages([message], where)
        ]
        key = "" if message.get("role") == "assistant" else digest
        return Item(key, messages, where, given=True)

    def head(self, shape: Shape | str | None) -> tuple[str | None, list[Message] | None]:
        """Return the system prompt and the tools of a shape or its name; None for what it lacks."""
        known_shape = shape if isinstance(shape, Shape) else self._shapes.get(shape or "", Shape())
        text = anthropic.system_prompt(known_shape.system, f"{self._where}, shape.system")
        return text or None, anthropic.tools(known_shape.tools)

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

    @cached_property
    def _messages(self) -> dict[str, dict[str, Any]]:
        """The messages of requests by their digests: those that are logged, and those of the lines."""
        sent = dict(self._sent)

        def put(role: str, content: Any) -> None:
            message = {"role": role, "content": content}
            sent.setdefault(digest_of(message), message)

        answers = defaultdict[Any, dict[str | None, list[Any]]](dict)
        callers, results = dict[Any, Any](), defaultdict[Any, list[Any]](list)
        runs = defaultdict[str, list[list[Any]]](list)
        for file, line in self._spoken:
            try:
                message: Any = msgspec.json.decode(line.message)
            except msgspec.MsgspecError:
                message = None  # the reader reports the damage
            message = message if isinstance(message, dict) else {}
            content = message.get("content")
            text = [{"type": "text", "text": content}] if isinstance(content, str) else None
            listed = content if isinstance(content, list) else text or []
            blocks = [block for block in listed if isinstance(block, dict)]
            if isinstance(line, Answer):
                key = file, message.get("id")
                answers[key].setdefault(line.uuid, blocks)
                callers |= {(file, block.get("id")): key for block in blocks}
                runs[file] = []
                continue
            put("user", content)
            runs[file] = [*runs[file][1 - _MAX_LINES :], blocks]
            joined: list[Any] = []
            for run in reversed(runs[file]):
                joined = [*run, *joined]
                put("user", joined)
            for block in blocks:
                if caller := callers.get((file, block.get("tool_use_id"))):
                    results[caller].append(block)
        for lines in answers.values():
            put("assistant", [block for blocks in lines.values() for block in blocks])
        for blocks in results.values():
            put("user", blocks)
        return sent


def digest_of(message: Mapping[str, Any]) -> str:
    """Return the name of a message: the SHA-256 of its canonical JSON.

    Example:
        >>> digest_of({"role": "user", "content": [{"type": "text", "text": "Hi."}]})[:16]
        'd3eaf30c2b5b1c95'
    """
    bare = _without_cache(restored(message))
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _without_cache(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_cache(inner) for name, inner in value.items() if name != _CACHE}
    return [_without_cache(inner) for inner in value] if isinstance(value, list) else value


@dataclass(slots=True)
class Reply:
    """An answer.

    Attributes:
        where: Location of its first line.
        blocks: Blocks in order, each in its most complete state.
        indices: Index of each block in the answer, if the log has it.
        uuids: Uuids of its lines.
    """

    where: str
    blocks: list[Part] = field(default_factory=list)
    indices: list[int | None] = field(default_factory=list)
    uuids: set[str] = field(default_factory=set)

    def add(self, line: Answer, content: Parts) -> None:
        """Add the blocks of a line, or replace earlier states of them."""
        states = [part for part in parts_in(content) if part.type not in _MARKERS]
        is_restart = line.parent_uuid is not None and line.parent_uuid not in self.uuids
        if line.uuid is not None:
            self.uuids.add(line.uuid)
        if not states:
            return
        start = self._start(line.api_block_index, states, is_restart=is_restart)
        for at, state in enumerate(states, start):
            place = self._calls().get(state.id) if _is_call(state) else None
            if place is not None or at < len(self.blocks):
                at = at if place is None else place
                self.blocks[at] = _more_complete(self.blocks[at], state)
            else:
                self.blocks.append(state)
                self.indices.append(line.api_block_index)

    def _calls(self) -> dict[str | None, int]:
        """Return the position of each tool call that has an id."""
        return {part.id: at for at, part in enumerate(self.blocks) if _is_call(part) and part.id}

    def _start(self, index: int | None, states: Sequence[Part], *, is_restart: bool) -> int:
        """Return the position in `blocks` of the first of these states.

        States repeat the last blocks, unless they contain a call that is already there or the log
        repeats an answer from its start.
        """
        end, calls = len(self.blocks), self._calls()
        if index is not None and len(states) == 1 and None not in self.indices:
            return self.indices.index(index) if index in self.indices else end
        again = (calls[s.id] - i for i, s in enumerate(states) if _is_call(s) and s.id in calls)
        covering = (at for at in range(end) if at + len(states) >= end)
        others = (at for at in range(end) if is_restart)
        starts = (at for at in (*again, *covering, *others) if at >= 0)
        return next((at for at in starts if self._are_states(at, states)), end)

    def _are_states(self, start: int, states: Sequence[Part]) -> bool:
        pairs = zip(self.blocks[start:], states, strict=False)
        return all(_is_state(block, state) for block, state in pairs)

    def messages(self, *, is_sent: bool = False) -> list[Message]:
        """Return the answer as one message, or several if the order of its blocks needs them.

        With `is_sent`, it is as later requests have it, which is also the log's form.
        """
        blocks = self.blocks if is_sent else [*map(_as_written, self.blocks)]
        return anthropic.messages_of("assistant", blocks, f"{self.where}, message")

    @property
    def num_edited(self) -> int:
        """Number of its calls to which Claude Code added something."""
        return sum(_as_written(block) is not block for block in self.blocks)

    @property
    def unknown(self) -> str | None:
        """Type of the first block that is neither text, a thought nor a tool call; None if none."""
        for part in self.blocks:
            is_call = _is_call(part) and bool(part.name) and bool(_arguments(part))
            is_said = is_shown(part) or part.type in THOUGHTS or is_server_result(part)
            if not is_call and not is_said:
                return part.type
        return None


def unknown_in(content: Parts, where: str) -> str | None:
    """Return the type of the first part of a message that is neither text nor media."""
    for part in parts_in(content):
        for nested in parts_of_result(part, where) if part.type == "tool_result" else [part]:
            if not is_shown(nested):
                return nested.type
    return None


def _as_written(part: Part) -> Part:
    """Return a block without what Claude Code adds before all arguments of a call of Edit."""
    if not _is_call(part) or part.name != "Edit":
        return part
    try:
        arguments = msgspec.json.decode(part.input, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return part
    if next(iter(arguments), None) != "replace_all" or bytes(arguments["replace_all"]) != b"false":
        return part
    del arguments["replace_all"]
    return msgspec.structs.replace(part, input=msgspec.Raw(msgspec.json.encode(arguments)))


def _is_call(part: Part) -> bool:
    return part.type in CALLS


def _is_state(one: Part, other: Part) -> bool:
    """True if one block may be a later state of the other."""
    if one.type != other.type:
        return False
    if not _is_call(one):
        return one.said.startswith(other.said) or other.said.startswith(one.said)
    return one.id == other.id and (one.id is not None or _arguments(one) == _arguments(other))


def _more_complete(before: Part, state: Part) -> Part:
    """Return the later state, unless it has less than the earlier one."""
    if _is_call(before) and _is_call(state):
        return before if len(_arguments(before)) > len(_arguments(state)) else state
    return before if len(before.said) > len(state.said) else state


def _arguments(part: Part) -> str:
    return "" if bytes(part.input) == b"null" else canonical_json(bytes(part.input))
