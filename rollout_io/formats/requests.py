"""What a program makes of its history for a request.

A log has messages as its program stores them. Programs differ in what they send of these: whether messages
of one role behind each other are one, and what they do with calls that have no result, and results that have
no call. A reader says so as data (`Contexts.sends`), and says the messages as they are logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from rollout_io.formats.base import note
from rollout_io.formats.parsing.content import Message, extend, tool_result


class Sends(NamedTuple):
    """What a program sends of its history.

    Attributes:
        joins: Roles whose messages are one if they follow each other, each with what is between their texts.
        missing: Text of the result that a call gets if it has none when another message follows.
        is_missing_first: True if such a result is before the others of its answer.
        unanswered: Note about calls that get one.
        orphans: Note about results without an open call, which are not sent; None if they are.
        unsent_thoughts: Note about thoughts, which are not sent again; None if they are.
        media_text: Text of the message of the user in which pictures and files of results are sent,
            behind these, as in chat completions, whose results have none; None if results have them.
        textless: Text of a result of which nothing else is left.
    """

    joins: Mapping[str, str] = MappingProxyType({})
    missing: str | None = None
    is_missing_first: bool = False
    unanswered: str | None = None
    orphans: str | None = None
    unsent_thoughts: str | None = None
    media_text: str | None = None
    textless: str = ""


class Piece(NamedTuple):
    """A message of a context.

    Attributes:
        message: The message.
        record: Number of its record: an answer may be several messages.
        is_given: True if it is part of the prompt.
        is_alone: True if it is never joined with another.
    """

    message: Message
    record: int = 0
    is_given: bool = False
    is_alone: bool = False


def sent(pieces: Iterable[Piece], sends: Sends, noted: set[int]) -> list[Piece]:
    """Return the messages of a context as they are sent.

    Identities of calls and results in `noted` are counted already, because contexts share them.

    Example:
        >>> logged = [{"role": "user", "content": "Hm."}, {"role": "user", "content": "Go."}]
        >>> sent(map(Piece, logged), Sends({"user": " "}), set())[0].message
        {'role': 'user', 'content': 'Hm. Go.'}
    """
    if sends.missing is not None or sends.orphans is not None:
        pieces = _answered(pieces, sends, noted)
    if sends.media_text is not None:
        pieces = _with_media_behind(pieces, sends.media_text, sends.textless)
    joined = list[Piece]()
    for piece in pieces:
        between = sends.joins.get(piece.message["role"])
        if between is None or not joined or not _continues(piece, joined[-1]):
            joined.append(piece)
        else:
            whole = dict(joined[-1].message)
            extend(whole, piece.message, between)
            joined[-1] = joined[-1]._replace(message=whole)
    return joined


def _answered(pieces: Iterable[Piece], sends: Sends, noted: set[int]) -> list[Piece]:
    """Return messages with results for calls that are followed, and without results of no call."""
    answered, behind, record = list[Piece](), 0, -1  # the last answer's end, and its record
    open_calls = dict[str | None, Message]()
    for piece in pieces:
        message = piece.message
        if message["role"] == "tool":
            name = message.get("tool_call_id")
            if open_calls.pop(name, None) is None and name and sends.orphans is not None:
                _note(sends.orphans, [message], noted)
                continue
        elif piece.record != record:
            if sends.missing is not None and open_calls:
                at = behind if sends.is_missing_first else len(answered)
                is_given = (*answered[at:], piece)[0].is_given
                results = [tool_result(sends.missing, name) for name in open_calls]
                answered[at:at] = [Piece(result, record, is_given) for result in results]
                _note(sends.unanswered, open_calls.values(), noted)
            open_calls = {}
        answered.append(piece)
        if calls := {call["id"]: call for call in message.get("tool_calls", ()) if call.get("id")}:
            open_calls |= calls
            behind, record = len(answered), piece.record
    return answered


def _with_media_behind(pieces: Iterable[Piece], text: str, textless: str) -> Iterator[Piece]:
    """Yield messages with the media of results in a message behind the last result of an answer."""
    for is_result, run in groupby(pieces, lambda piece: piece.message["role"] == "tool"):
        if not is_result:
            yield from run
            continue
        media = list[Message]()
        for piece in run:
            result = dict(piece.message)
            if isinstance(result["content"], list):
                texts = [part["text"] for part in result["content"] if part["type"] == "text"]
                media += [part for part in result["content"] if part["type"] != "text"]
                result["content"] = "\n".join(texts) or textless
            yield piece._replace(message=result)
        if media:
            shown = {"role": "user", "content": [{"type": "text", "text": text}, *media]}
            yield piece._replace(message=shown)


def _note(text: str | None, messages: Iterable[Message], noted: set[int]) -> None:
    new = {id(message) for message in messages} - noted
    noted |= new
    if text is not None:
        note(text, len(new))


def _continues(piece: Piece, last: Piece) -> bool:
    """True if two messages of a role can be one: thoughts come before texts, and these before calls."""
    if last.message["role"] != piece.message["role"] or last.is_given != piece.is_given:
        return False
    has_calls, has_text = "tool_calls" in last.message, bool(last.message["content"])
    is_late = (has_calls or has_text) and "reasoning_content" in piece.message
    is_late = is_late or (has_calls and bool(piece.message["content"]))
    return not (is_late or last.is_alone or piece.is_alone)
