"""Dumps of decoded text without roles: read line by line, and refused by name.

Such a line has a prompt and a response as a tokenizer decoded them. It is no conversation: the chat
template is in the text already, mostly without its special tokens, so that neither the roles nor the
tokens can be told again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from rollout_io.adapters import Found, Input, Options, Progress, Rejected, Run, Trajectory
from rollout_io.adapters.jsonl import decode_line
from rollout_io.adapters.records import Record, find_lines
from schemas.errors import RolloutError

RULE = "text_without_roles"
_EXPECTED = "messages with roles, or the ids the engine saw and sampled"


def text_without_roles(where: str, what: str, hint: str) -> RolloutError:
    """The error of a record of decoded text.

    Args:
        where: Its place.
        what: The text: "a prompt and a response as verl decoded them".
        hint: Where the tokens are to be had.
    """
    return RolloutError(RULE, where, what, _EXPECTED, hint)


def find_texts(
    decoder: msgspec.json.Decoder[Any], what: str, hint: str
) -> Callable[[Sequence[Input], Progress], Iterator[Found]]:
    """A `find` that refuses each line: damaged ones as such, the others as text without roles."""

    def find(record: Record) -> Found:
        decode_line(decoder, record.content, record.place.where)
        return Rejected(record.place, text_without_roles(record.place.where, what, hint))

    return lambda inputs, progress: find_lines(inputs, progress, find)


def read_nothing(run: Run, _: Options) -> Trajectory:
    """Of a format whose records are all refused, no run is found."""
    raise AssertionError(run)
