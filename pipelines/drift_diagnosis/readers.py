"""Compare a prompt with the step that it should continue, as decoded text or logged messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pipelines.drift_diagnosis.turns import Reading, Turn, compare
from rollout_io.dataset.prefix_layout import Ids
from rollout_io.retokenize import ChatTokenizer
from schemas.messages import RETOKENIZED, sent_messages
from schemas.ragged import BoolArray

TEXTS = ("messages", "response_text", "token_source", "segments")
"""Columns from which the text of a step is read; `messages` and `response_text` are required."""

_LONGEST_HEADER = 16  # at most this many tokens precede the text of the first message

Piece: TypeAlias = tuple[str, int | None]
"""Text between two special tokens, and the id of the second one (None at the end of the ids)."""


def read_text(before: Ids, prompt: Ids, shared: int, tokenizer: ChatTokenizer) -> Reading | None:
    """Decode both sides, starting at the message in which they first differ, and compare them.

    Args:
        before: Prompt and response of the earlier step.
        prompt: The later prompt.
        shared: Number of leading tokens that both share.
        tokenizer: The tokenizer that produced the ids.

    Returns:
        The change and its evidence; None if some ids are unknown to the tokenizer, or if the text
        differs and no special tokens separate its messages.
    """
    start, whole = _message_start(prompt[:shared], tokenizer)
    sides = before[start:], prompt[start:]
    if any(_is_unknown(ids, tokenizer).any() for ids in sides):
        return None
    old, new = (_pieces(ids, tokenizer) for ids in sides)
    if _is_same(old, new, plain=not _is_mark(prompt, tokenizer).any()):
        return "same_text", "the same text in different ids"
    if all(end is None for _, end in (*old, *new)):
        return None
    return compare(_turns(old), _turns(new), whole=whole)


def read_messages(before: Mapping[str, Any], now: Mapping[str, Any]) -> Reading | None:
    """Compare two logged conversations.

    Args:
        before: Columns `TEXTS` of the earlier step; each may be absent.
        now: The same columns of the later step.

    Returns:
        The change and its evidence; None if a text is missing, or if a conversation is not a list
        of messages.
    """
    old, new = _turns_of(before, answered=True), _turns_of(now, answered=False)
    if old is None or new is None:
        return None
    if old == new[: len(old)]:
        return "unchanged", "the logged messages repeat the earlier ones word for word"
    return compare(old, new, whole=True)


@lru_cache(maxsize=8)
def special_ids(tokenizer: ChatTokenizer) -> npt.NDArray[np.int64]:
    """Return the sorted ids of the special tokens; these rarely include <think> and <tool_call>."""
    backend = tokenizer.backend
    added = (i for i, token in backend.added_tokens_decoder.items() if token.special)
    return np.array(sorted({*backend.all_special_ids, *added}), np.int64)


@lru_cache(maxsize=8)
def _num_ids(tokenizer: ChatTokenizer) -> int:
    return int(max(tokenizer.backend.get_vocab().values())) + 1


def decode(ids: Ids, tokenizer: ChatTokenizer) -> str:
    """Decode ids; show ids that the tokenizer does not know, and would drop, as <id>."""
    unknown = np.flatnonzero(_is_unknown(ids, tokenizer)).tolist()
    if not unknown:
        return tokenizer.decode(ids.tolist())
    starts, ends = [0, *(at + 1 for at in unknown)], [*unknown, len(ids)]
    texts = [tokenizer.decode(ids[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
    shown = [f"<{ids[at]}>" for at in unknown]
    return texts[0] + "".join(a + b for a, b in zip(shown, texts[1:], strict=True))


def turns_of_ids(ids: Ids, tokenizer: ChatTokenizer) -> list[Turn]:
    """Decode ids and split them into messages at special tokens."""
    return _turns(_pieces(ids, tokenizer))


def _is_unknown(ids: Ids, tokenizer: ChatTokenizer) -> BoolArray:
    return np.asarray((ids < 0) | (ids >= _num_ids(tokenizer)))


def _is_mark(ids: Ids, tokenizer: ChatTokenizer) -> BoolArray:
    return np.isin(ids, special_ids(tokenizer))


def _message_start(kept: Ids, tokenizer: ChatTokenizer) -> tuple[int, bool]:
    """Find where the last shared message starts, and whether it is the conversation's first."""
    marks = np.flatnonzero(_is_mark(kept, tokenizer))
    start = int(marks[-1]) if len(marks) else 0
    whole = start < _LONGEST_HEADER and not any(
        turn.text for turn in _turns(_pieces(kept[:start], tokenizer))
    )
    return (0 if whole else start), whole


def _pieces(ids: Ids, tokenizer: ChatTokenizer) -> list[Piece]:
    marks = np.flatnonzero(_is_mark(ids, tokenizer))
    starts, ends = [0, *(marks + 1).tolist()], [*marks.tolist(), len(ids)]
    texts = [decode(ids[a:b], tokenizer) for a, b in zip(starts, ends, strict=True)]
    pieces = list(zip(texts, [*ids[marks].tolist(), None], strict=True))
    return pieces if texts[-1] else pieces[:-1]


def _is_same(old: Sequence[Piece], new: Sequence[Piece], *, plain: bool) -> bool:
    """True if the new pieces begin with the old ones; the last old piece may be incomplete."""
    if not old or len(new) < len(old):
        return not old
    (text, end), (now, ends) = old[-1], new[len(old) - 1]
    last = text == now or (plain and now.startswith(text))
    return last and end in {None, ends} and list(old[:-1]) == list(new[: len(old) - 1])


def _turns(pieces: Sequence[Piece]) -> list[Turn]:
    """Parse pieces into messages; a piece with only a role is joined with the text after it."""
    turns: list[Turn] = []
    for turn in (Turn.parse(text) for text, _ in pieces if text.strip()):
        if turns and not turn.role and turns[-1].role and not turns[-1].text:
            turns[-1] = Turn(turns[-1].role, turn.text)
        else:
            turns.append(turn)
    return turns


def _turns_of(row: Mapping[str, Any], *, answered: bool) -> list[Turn] | None:
    """Parse a row's messages, plus its response if `answered`; None if they are unreadable."""
    try:
        sent = sent_messages(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(sent, list) or not all(isinstance(message, dict) for message in sent):
        return None
    if not answered:
        return [_turn(message) for message in sent]
    if row.get("token_source") == RETOKENIZED:
        return [_turn(message) for message in json.loads(row["messages"])]
    response = row.get("response_text")
    if response is None:
        return None
    return [*map(_turn, sent), Turn("assistant", _spelled(response))]


def _turn(message: dict[str, Any]) -> Turn:
    return Turn(str(message.get("role", "")), _said(message))


def _said(message: dict[str, Any]) -> str:
    """Join reasoning, content and tool calls of a message as `response_text` does."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    thought = message.get("reasoning_content") or message.get("reasoning")
    called = json.dumps(calls, sort_keys=True) if calls else None
    return "\n".join(str(part) for part in (thought, content, called) if part)


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else json.dumps(part)


def _spelled(response: str) -> str:
    """Rewrite the tool calls at the end of a response as JSON with sorted keys, like `_said`."""
    text, _, calls = response.rpartition("\n")
    try:
        called = json.loads(calls) if calls.startswith("[{") else None
    except (ValueError, RecursionError):
        called = None
    if called is None:
        return response
    return "\n".join(part for part in (text, json.dumps(called, sort_keys=True)) if part)
