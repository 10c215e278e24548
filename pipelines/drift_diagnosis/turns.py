"""Compare two versions of a conversation message by message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

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
