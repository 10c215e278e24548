"""The turns of a trajectory: one lane per agent, with the messages that each call added."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.drift_diagnosis.texts import turns_of_ids
from pipelines.frames import Frame, over_tables
from pipelines.merging.merge import unmerge_table
from pipelines.merging.segments import is_joined
from rollout_io.dataset.prefix_layout import Tokens, common_prefix
from rollout_io.dataset.trajectory_facts import TAGGED_CALL, has_failed, split_calls
from rollout_io.retokenize.chat_template import REASONING_FIELDS
from rollout_io.retokenize.token_bytes import TokenBytes
from rollout_io.retokenize.tokenizer import ChatTokenizer
from rollout_io.terminal import whole_characters
from schemas.messages import MEDIA, RETOKENIZED, is_answer, sent_messages
from schemas.numpy_arrays import to_arrow, to_numpy

TURN_COLUMNS = (
    *("trajectory_id", "step_index", "is_last_step", "prompt_token_ids", "response_ids"),
    *("loss_mask", "agent", "messages", "response_text", "token_source", "segments", "error"),
    "stop_reason",
)
"""Columns that `lanes_of` reads."""
_IDS = ("prompt_token_ids", "response_ids")
_MAIN = (None, "main")
_THOUGHT = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)

MESSAGES = pa.schema(
    [
        *((name, pa.string()) for name in ("instance_id", "trajectory_id", "agent")),
        ("step_index", pa.int32()),
        ("turn", pa.int32()),
        *((name, pa.string()) for name in ("role", "kind", "name", "text")),
        *((name, pa.bool_()) for name in ("failed", "is_trained")),
        ("start", pa.int32()),
        ("length", pa.int32()),
    ]
)
"""Columns of `messages`."""

Part = dict[str, Any]
Message = Mapping[str, Any]


def messages(frame: Frame) -> pl.LazyFrame:
    """List what was said in each trajectory: one line per part of a message, each message once.

    Args:
        frame: Rows of complete trajectories, merged or not, with `messages`. Without them, the text of
            a turn lists its token ids.

    Returns:
        instance_id, trajectory_id, agent; step_index (of the step that first sent or sampled it); turn
        (from 0, of the agent); role; kind (text, thinking, tool_call, tool_result, image, file); name
        (of the tool or file); text (of a call: its arguments); failed (of a tool's result: see
        `has_failed`, else null); is_trained; start and length of the
        answer's tokens in the row's prompt + response, null unless they were sampled.

    Example:
        >>> calls = messages(scan("rollouts/")).filter(pl.col("kind") == "tool_call")
        >>> calls.group_by("name").len().collect().rows()
        [('bash', 12)]
    """
    return over_tables(frame, _messages_of)


def _messages_of(table: pa.Table) -> pa.Table:
    lines: list[dict[str, Any]] = []
    names = table.column("trajectory_id")
    for name in pc.unique(names).to_pylist():
        rows = table.filter(pc.equal(names, name))
        ids = {"instance_id": rows.column("instance_id")[0].as_py(), "trajectory_id": name}
        for agent, turns in lanes_of(rows).items():
            new = [turn for turn in turns if turn["is_new"]]
            for number, turn in enumerate(new):
                start, length = turn["span"] or (None, None)
                of_turn = {name: turn[name] for name in ("step_index", "role")}
                of_turn |= {"turn": number, "is_trained": turn["trained"]}
                of_turn |= {"start": start, "length": length, "agent": agent, **ids}
                lines += (
                    of_turn
                    | {"kind": part["type"], "name": part["name"], "failed": part["failed"]}
                    | {"text": whole_characters(part["text"])}
                    for part in turn["parts"] or [_part("text", "")]
                )
    return pa.Table.from_pylist(lines, MESSAGES)


def lanes_of(
    table: pa.Table, vocabulary: TokenBytes | None = None, tokenizer: ChatTokenizer | None = None
) -> dict[str | None, list[dict[str, Any]]]:
    """Return the turns of each agent; the main agent comes first.

    A turn belongs to the step that first sent or sampled it. If a call changes an earlier message,
    this message and all later ones are listed again; repeated messages have `is_new` false.
    `row` is the index of a turn's row in `table`; `span` the start and number of its tokens in the
    row's prompt + response, null unless they were sampled.

    Args:
        table: Rows of one trajectory.
        vocabulary: Decodes the tokens of rows without messages; None: their text lists the ids.
        tokenizer: Splits prompts without messages into turns; None: a prompt is one turn.
    """
    return lanes_of_steps(_steps(table), vocabulary, tokenizer)


def lanes_of_steps(
    steps: Iterable[Mapping[str, Any]],
    vocabulary: TokenBytes | None = None,
    tokenizer: ChatTokenizer | None = None,
) -> dict[str | None, list[dict[str, Any]]]:
    """Return `lanes_of` the steps of a trajectory, which are values of `TURN_COLUMNS`.

    Steps with messages need `num_prompt_tokens` only, not the prompts themselves.
    """
    lanes: dict[str | None, _Lane] = {}
    for step in steps:
        lanes.setdefault(step.get("agent"), _Lane(vocabulary, tokenizer)).add(step)
    named = sorted(lanes.items(), key=lambda lane: lane[0] not in _MAIN)
    return {name: lane.turns for name, lane in named}


def _steps(table: pa.Table) -> list[dict[str, Any]]:
    """Split a trajectory's rows into steps; `row` is the index of a step's row in `table`."""
    joined = is_joined(table)
    parts = []
    for row in range(table.num_rows):
        one = table.slice(row, 1)
        if joined[row]:
            last = to_arrow(np.ones(1, np.bool_))
            at = one.column_names.index("is_last_step")
            one = unmerge_table(one.set_column(at, "is_last_step", last))
        text = [n for n in one.column_names if n in TURN_COLUMNS and not n.endswith("_ids")]
        for step, values in enumerate(one.select(text).to_pylist()):
            ids = {
                name: to_numpy(one.column(name).slice(step, 1).combine_chunks().flatten())
                for name in _IDS
            }
            num = len(ids["prompt_token_ids"])
            parts.append({**values, **ids, "num_prompt_tokens": num, "row": row})
    return parts


class _Lane:
    """The turns of one agent; each step adds the messages or tokens that are new in it."""

    def __init__(self, vocabulary: TokenBytes | None, tokenizer: ChatTokenizer | None) -> None:
        self.turns: list[dict[str, Any]] = []
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self._sent: list[Message] = []
        self._ids = np.zeros(0, np.int32)
        self._calls: dict[str, str] = {}

    def add(self, step: Mapping[str, Any]) -> None:
        messages = _messages(step)
        if messages is None and not any(len(step[name]) for name in _IDS):
            return  # the trajectory failed before its first call
        if messages is None or (step.get("response_text") is None and not _answers(step)):
            self._add_tokens(step, messages)
        else:
            self._add_messages(step, messages)
        if "prompt_token_ids" in step:
            self._ids = np.concatenate([step["prompt_token_ids"], step["response_ids"]])

    def _add_messages(self, step: Mapping[str, Any], messages: list[Message]) -> None:
        same, before = self._continued(messages)
        trained = bool(any(step["loss_mask"]))
        spans = _answer_spans(step, messages)
        for index, message in enumerate(messages[same:], same):
            span = spans.get(index)
            self._add_message(step, message, before, trained=index in spans, span=span)
        self._sent = list(messages)
        response = step.get("response_text")
        if response is not None and step.get("token_source") != RETOKENIZED:
            parts = list(_text_parts(*split_calls(response)))
            self._add_turn(step, "assistant", parts, trained=trained, is_sampled=True)
            answer = {"role": "assistant", "content": response}
            self._sent = [*messages, answer]

    def _add_tokens(self, step: Mapping[str, Any], messages: list[Message] | None) -> None:
        if messages is not None:
            same, before = self._continued(messages)
            for message in messages[same:]:
                self._add_message(step, message, before, trained=False)
            self._sent = list(messages)
        else:
            prompt = step["prompt_token_ids"]
            new = prompt[common_prefix(self._ids, prompt) :]
            for role, text in self._read(new):
                parts = list(_text_parts(text))
                self._add_turn(step, role or "prompt", parts, trained=False, source="tokens")
        trained = bool(any(step["loss_mask"]))
        text = "".join(text for _, text in self._read(step["response_ids"], whole=True))
        parts = list(_text_parts(text))
        self._add_turn(step, "assistant", parts, trained=trained, source="tokens", is_sampled=True)

    def _read(self, ids: Tokens, *, whole: bool = False) -> Iterable[tuple[str, str]]:
        """Decode ids into roles and texts; without a tokenizer, the text lists the ids."""
        if self._vocabulary is None:
            return [("", " ".join(map(str, ids.tolist())))] if len(ids) else []
        if whole or self._tokenizer is None:
            return [("", self._vocabulary.text(ids))] if len(ids) else []
        return [(turn.role, turn.text) for turn in turns_of_ids(ids, self._tokenizer)]

    def _continued(self, messages: list[Message]) -> tuple[int, Counter[tuple[str, str]]]:
        """Compare the messages of a step with the messages of the agent's previous step."""
        same = _num_equal(self._sent, messages)
        for message in messages[max(len(self._sent) - 1, 0) : same]:
            self._parts(message)  # the last response, whose calls have ids only here
        return same, Counter(map(_said, self._sent[same:]))

    def _add_message(
        self,
        step: Mapping[str, Any],
        message: Message,
        before: Counter[tuple[str, str]],
        *,
        trained: bool,
        span: tuple[int, int] | None = None,
    ) -> None:
        said = _said(message)
        is_new = before[said] == 0
        before[said] -= not is_new
        parts = self._parts(message)
        self._add_turn(step, _role(message), parts, trained=trained, is_new=is_new, span=span)

    def _add_turn(
        self,
        step: Mapping[str, Any],
        role: str,
        parts: list[Part],
        *,
        trained: bool,
        is_new: bool = True,
        span: tuple[int, int] | None = None,
        source: str = "messages",
        is_sampled: bool = False,
    ) -> None:
        if is_sampled:
            span = step["num_prompt_tokens"], len(step["response_ids"])
        self.turns.append(
            {
                "role": role,
                "row": step["row"],
                "step_index": step["step_index"],
                "is_new": is_new,
                "trained": trained,
                "from": source,
                "span": span,
                "stop_reason": step.get("stop_reason") if is_sampled else None,
                "parts": parts,
            }
        )

    def _parts(self, message: Message) -> list[Part]:
        """Return the parts of a message, in the order of thinking, text, tool calls."""
        parts: list[Part] = []
        thought = next((t for n in REASONING_FIELDS if (t := message.get(n))), None)
        if thought:
            parts.append(_part("thinking", _as_text(thought)))
        if message.get("role") in {"tool", "function"}:
            name = message.get("name") or self._calls.get(str(message.get("tool_call_id")))
            return [*parts, *_result(message, name)]
        for piece in _pieces(message.get("content")):
            parts += self._piece(piece)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            parts.append(self._call(call))
        return parts

    def _piece(self, piece: Any) -> Iterable[Part]:
        if isinstance(piece, str):
            return _text_parts(piece)
        if not isinstance(piece, Mapping):
            return [_part("text", _as_text(piece))]
        kind = piece.get("type")
        if (shown := _picture(piece)) is not None:
            return [shown]
        if kind == "tool_use":
            return [self._call({**piece, "arguments": piece.get("input")})]
        if kind == "tool_result":
            name = self._calls.get(str(piece.get("tool_use_id")))
            return _result(piece, name)
        if kind in {"thinking", "reasoning"}:
            return [_part("thinking", _as_text(piece.get("thinking") or piece.get("text")))]
        text = piece.get("text")
        return _text_parts(text) if isinstance(text, str) else [_part("text", _as_text(piece))]

    def _call(self, call: Any) -> Part:
        if not isinstance(call, Mapping):
            return _part("tool_call", _as_text(call))
        function = call["function"] if isinstance(call.get("function"), Mapping) else call
        name = function.get("name")
        if isinstance(name, str) and call.get("id") is not None:
            self._calls[str(call["id"])] = name
        shown = function.get("arguments")
        return _part("tool_call", _as_text(shown), name if isinstance(name, str) else None)


def _answer_spans(
    step: Mapping[str, Any], messages: list[Message]
) -> dict[int, tuple[int, int] | None]:
    """Return where the answers in a re-tokenized row's messages are in its prompt + response."""
    if step.get("token_source") != RETOKENIZED:
        return {}
    num_tokens = len(step["response_ids"])  # 0 in logs, whose text has no tokens
    sent, start = sent_messages(step), step["num_prompt_tokens"]
    first = len(sent) if isinstance(sent, list) else 0
    answers = [i for i, message in enumerate(messages) if i >= first and is_answer(message)]
    whole = {"start": 0, "length": num_tokens}
    segments = [
        (start + one["start"], one["length"]) if num_tokens else None
        for one in step.get("segments") or [whole]
    ]
    return dict(zip_longest(answers, segments[: len(answers)]))


def _messages(step: Mapping[str, Any]) -> list[Message] | None:
    """Return the messages of a step; None if they are unknown or damaged."""
    try:
        found = json.loads(step.get("messages") or "null")
    except (ValueError, RecursionError):
        return None
    if isinstance(found, str):
        return [{"role": "prompt", "content": found}]
    is_chat = isinstance(found, list) and all(isinstance(m, dict) for m in found)
    return found if is_chat else None


def _answers(step: Mapping[str, Any]) -> bool:
    return step.get("token_source") == RETOKENIZED


def _num_equal(known: Sequence[Message], messages: Sequence[Message]) -> int:
    """Count the leading messages that are equal, or have the same role and text, in both lists."""
    for index, (old, new) in enumerate(zip(known, messages, strict=False)):
        if old != new and _said(old) != _said(new):
            return index
    return min(len(known), len(messages))


def _said(message: Message) -> tuple[str, str]:
    """Return a message's role, and its text without whitespace, to compare it with a response."""
    thought = next((t for n in REASONING_FIELDS if (t := message.get(n))), "")
    content, calls = _as_text(message.get("content")), message.get("tool_calls")
    text, called = split_calls(content)
    named = []
    for call in calls if isinstance(calls, list) else called:
        inner = call.get("function") if isinstance(call, Mapping) else None
        named.append(inner if isinstance(inner, Mapping) else call)
    spelled = json.dumps(named, sort_keys=True) if named else ""
    whole = "".join((_as_text(thought), text, spelled))
    return _role(message), "".join(whole.split())


def _text_parts(text: str, calls: Sequence[Any] = ()) -> Iterable[Part]:
    """Split a text into thinking, tagged tool calls, and the rest."""
    at = 0
    for found in _THOUGHT.finditer(text):
        yield from _called_parts(text[at : found.start()])
        if found[1].strip():
            yield _part("thinking", found[1].strip("\n"))
        at = found.end()
    yield from _called_parts(text[at:])
    for call in calls:
        inner = call.get("function") if isinstance(call, Mapping) else None
        function = inner if isinstance(inner, Mapping) else call
        name = function.get("name") if isinstance(function, Mapping) else None
        shown = function.get("arguments") if isinstance(function, Mapping) else function
        yield _part("tool_call", _as_text(shown), name if isinstance(name, str) else None)


def _called_parts(text: str) -> Iterable[Part]:
    at = 0
    for found in TAGGED_CALL.finditer(text):
        if text[at : found.start()].strip():
            yield _part("text", text[at : found.start()])
        yield _part("tool_call", found[1], _name_in(found[1]))
        at = found.end()
    if text[at:].strip() or not at:
        yield _part("text", text[at:])


def _name_in(call: str) -> str | None:
    try:
        name = json.loads(call).get("name")
    except (ValueError, RecursionError, AttributeError):
        return None
    return name if isinstance(name, str) else None


def _part(kind: str, text: str, name: str | None = None) -> Part:
    name = None if name is None else str(name)[:200]
    return {"type": kind, "name": name, "text": text, "failed": None}


def _result(result: Mapping[str, Any], name: str | None) -> list[Part]:
    """Return the parts of a tool's result: its text, then its pictures."""
    content, failed = result.get("content"), has_failed(result)
    pieces = content if isinstance(content, list) else []
    pictures = [part for piece in pieces if (part := _picture(piece)) is not None]
    if pictures:
        content = [piece for piece in pieces if _picture(piece) is None]
    text = [_part("tool_result", _as_text(content), name)] if content or not pictures else []
    return [part | {"failed": failed} for part in [*text, *pictures]]


def _picture(piece: Any) -> Part | None:
    """Return a part that is not text: `text` is the reference to its file, or its URL."""
    if not isinstance(piece, Mapping) or piece.get("type") not in MEDIA:
        return None
    source = piece.get("source")
    place = piece.get("blob") or (source.get("url") if isinstance(source, Mapping) else None)
    if not isinstance(place, str):
        return None
    name = piece.get("name") or piece.get("media_type") or piece["type"]
    return _part("image" if piece["type"] == "image" else "file", place, str(name))


def _pieces(content: Any) -> Sequence[Any]:
    if content is None or content == "":
        return []
    return content if isinstance(content, list) else [content]


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value
    ):
        return "\n".join(part["text"] for part in value)
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _role(message: Message) -> str:
    return str(message.get("role", ""))[:100]
