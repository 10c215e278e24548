"""Compare texts: a prompt with the step that it should continue, and exact ids with the logged text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_io.dataset.prefix_layout import Ids, Tokens, common_prefix
from rollout_io.dataset.reader import iter_tables, scan
from rollout_io.dataset.storage import PathLike
from rollout_io.retokenize import ChatTokenizer, retokenize
from schemas.errors import InputError, RolloutError
from schemas.messages import RETOKENIZED, sent_messages
from schemas.ragged import BoolArray

Change = Literal["unchanged", "same_text", "layout", "text", "system", "messages"]
"""How a conversation changed:

    unchanged   the messages are the same
    same_text   the same text has different ids
    layout      only special tokens, whitespace, think blocks or the spelling of tool calls differ
    text        the text of a message differs
    system      the conversation starts with a different first message
    messages    messages were added, removed or reordered
"""

Reading: TypeAlias = tuple[Change, str]
"""A change, and the evidence for it."""

ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython")
_HEADER = re.compile(rf"({'|'.join(ROLES)})(?:\s+|$)")
_CALL = re.compile(r"(<tool_call>)(.*?)(</tool_call>)", re.DOTALL)
_SHOWN = 60

TEXTS = ("messages", "response_text", "token_source", "segments")
"""Columns from which the text of a step is read; `messages` and `response_text` are required."""
_LONGEST_HEADER = 16  # at most this many tokens precede the text of the first message
Piece: TypeAlias = tuple[str, int | None]
"""Text between two special tokens, and the id of the second one (None at the end of the ids)."""
_COLUMNS = ("token_source", "messages", "response_text", "prompt_token_ids", "response_ids")


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, or a part of one between special tokens; `role` is "" if it names no role."""

    role: str
    text: str

    @classmethod
    def parse(cls, piece: str) -> Turn:
        r"""Parse the text between two special tokens.

        Example:
            >>> Turn.parse("user\nHi"), Turn.parse("Hi")
            (Turn(role='user', text='Hi'), Turn(role='', text='Hi'))
        """
        header = _HEADER.match(piece.lstrip())
        return cls("", piece) if not header else cls(header[1], piece.lstrip()[header.end() :])


def compare(before: Sequence[Turn], now: Sequence[Turn], *, whole: bool) -> Reading:
    """Classify how a later conversation changed an earlier one that it should repeat and extend.

    If neither the layout nor a new system message explains the change, the result is `text` if the
    roles of the earlier messages are unchanged, otherwise `messages`.

    Args:
        before: Messages of the earlier conversation, including the response, starting with the
            first message that may differ.
        now: Messages of the later conversation, starting at the same position.
        whole: Whether both start at the first message of the conversation.

    Example:
        >>> asked, said = Turn("user", "2+2?"), Turn("assistant", "4, I think.")
        >>> compare([asked, said], [asked, Turn("assistant", "4"), asked], whole=True)
        ('text', "assistant message, after '4': ', I think.' -> ''")
    """
    for name, form in _FORMS:
        if list(map(form, before)) == list(map(form, now))[: len(before)]:
            return "layout", f"{name} differ; everything else is the same"
    old, new = [_bordered(t) for t in before], _history([_bordered(t) for t in now])
    pairs = enumerate(zip(old, new, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
    num_returning = sum(turn in new for turn in old[at + 1 :])
    begins_anew = whole and at == 0 and not num_returning
    if begins_anew and old and new and "system" in {old[0].role, new[0].role}:
        return "system", "a different first message: " + _difference(old[0], new[0])
    if at < len(old) and [t.role for t in new[: len(old)]] == [t.role for t in old]:
        return "text", _difference(old[at], new[at])
    return "messages", f"messages that recur from there on: {num_returning} of {len(old) - at}"


def _history(turns: list[Turn]) -> list[Turn]:
    """Remove a trailing generation prompt: the header of an assistant message without text."""
    is_header = turns and turns[-1].role in {"assistant", "model"} and not turns[-1].text
    return turns[:-1] if is_header else turns


def _bordered(turn: Turn) -> Turn:
    return Turn(turn.role, turn.text.strip())


def _unthinking(turn: Turn) -> Turn:
    return Turn(turn.role, turn.text.rsplit("</think>", 1)[-1].strip())


def _called(turn: Turn) -> Turn:
    text = _CALL.sub(lambda m: m[1] + _canonical(m[2]) + m[3], _unthinking(turn).text)
    return Turn(turn.role, re.sub(r"\s*(</?tool_call>)\s*", r"\1", text))


# Each form ignores more than the previous form, so the first form that matches is the cause.
_FORMS: tuple[tuple[str, Callable[[Turn], Turn]], ...] = (
    ("special tokens, or whitespace where messages begin or end,", _bordered),
    ("think blocks", _unthinking),
    ("spellings of tool calls", _called),
)


def _canonical(call: str) -> str:
    try:
        return json.dumps(json.loads(call), sort_keys=True)
    except (ValueError, RecursionError):
        return call.strip()


def _difference(old: Turn, new: Turn) -> str:
    pairs = zip(old.text, new.text, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old.text), len(new.text)))
    before = old.text[max(0, at - 20) : at]
    role = f"{old.role} message, " if old.role else ""
    return f"{role}after {before!r}: {_short(old.text[at:])} -> {_short(new.text[at:])}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")


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


@dataclass(slots=True)
class TextReading:
    """Comparison of exact ids with the ids that `retokenize` computes from the logged text.

    `response_text` is tokenized as the response to `messages`. All tokens from the first to the
    last difference are counted as off, in the longer of the two versions.

    Attributes:
        num_compared: Steps with exact ids and both texts.
        num_not_compared: Steps that could not be compared.
        first_reason: Reason why the first of these could not be compared; None if all could.
        num_prompts_off: Steps whose recomputed prompt differs. `messages` does not contain the
            tools listed in the prompt; their tokens are counted as off.
        num_prompt_tokens_off: Tokens off in prompts.
        num_responses_off: Steps whose recomputed response differs.
        num_response_tokens_off: Tokens off in responses.
        num_ends_added: Responses that are off only by an end token that was never sampled, because
            the response was cut off.
    """

    num_compared: int = 0
    num_not_compared: int = 0
    first_reason: str | None = None
    num_prompts_off: int = 0
    num_prompt_tokens_off: int = 0
    num_responses_off: int = 0
    num_response_tokens_off: int = 0
    num_ends_added: int = 0

    @classmethod
    def of(cls, tables: Iterable[pa.Table], tokenizer: ChatTokenizer) -> TextReading:
        """Compare the rows of tables with full prompts; text columns may be absent."""
        reading = cls()
        for table in tables:
            for row in table.to_pylist():
                try:
                    reading._add(row, tokenizer)
                except RolloutError as error:
                    reading.num_not_compared += 1
                    reading.first_reason = reading.first_reason or str(error)
        return reading

    @classmethod
    def of_dataset(cls, path: PathLike, tokenizer: ChatTokenizer) -> TextReading:
        """Compare the rows of a dataset, one piece at a time."""
        present = scan(path).collect_schema().names()
        names = [name for name in _COLUMNS if name in present]
        return cls.of(iter_tables(path, names), tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as a dictionary."""
        return asdict(self)

    def _add(self, row: dict[str, Any], tokenizer: ChatTokenizer) -> None:
        prompt, response = _text_ids(row, tokenizer)
        self.num_compared += 1
        exact = (np.array(row[name], np.int32) for name in _COLUMNS[3:])
        prompt_off, response_off = map(num_off, exact, (prompt, response))
        self.num_prompts_off += prompt_off > 0
        self.num_prompt_tokens_off += prompt_off
        self.num_responses_off += response_off > 0
        self.num_response_tokens_off += response_off
        is_added = len(response) == len(row["response_ids"]) + 1 and response_off == 1
        self.num_ends_added += is_added and int(response[-1]) == tokenizer.eos_token_id


def num_off(exact: Tokens, read: Tokens) -> int:
    """Count the tokens from the first to the last difference, in the longer version.

    Example:
        >>> num_off(np.array([1, 26951, 3834, 2]), np.array([1, 94224, 2]))
        2
    """
    begin = common_prefix(exact, read)
    exact, read = exact[begin:], read[begin:]
    end = common_prefix(exact[::-1], read[::-1])
    return max(len(exact), len(read)) - end


def _text_ids(row: dict[str, Any], tokenizer: ChatTokenizer) -> tuple[Tokens, Tokens]:
    """Tokenize the prompt and the response of a row from its text."""
    where = "messages"
    if row["token_source"] != "engine":
        finding = "the ids come from re-tokenized text, not from the engine"
        raise InputError("token_source", where, finding)
    if row.get("messages") is None or row.get("response_text") is None:
        raise InputError("messages", where, "the row has no logged text")
    try:
        messages = json.loads(row["messages"])
    except (ValueError, RecursionError) as error:
        raise InputError("messages", where, f"invalid JSON: {error}") from None
    if not isinstance(messages, list):
        raise InputError("messages", where, "text without roles", "a list of messages")
    answer = {"role": "assistant", "content": row["response_text"]}
    read = retokenize([*messages, answer], tokenizer, num_given=len(messages))
    start, length = read.spans[0].tolist()
    before = np.concatenate([read.prompt_token_ids, read.response_ids[:start]])
    return before.astype(np.int32), read.response_ids[start : start + length]
