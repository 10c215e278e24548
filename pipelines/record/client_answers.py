"""Reduce an engine's responses to the fields that the client requested."""

from __future__ import annotations

import msgspec

from pipelines.record.bounds import check_shape
from pipelines.record.engine_requests import NULL, Asked, Fields

_ANSWER = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(list[Fields] | None)
_EMPTY_DELTA = msgspec.Raw(b"{}")
_NO_TOKENS = (NULL, msgspec.Raw(b"[]"))
_ENCODER = msgspec.json.Encoder()


class Unread(ValueError):
    """Error for a response that is not a completion; the response is forwarded unchanged."""


class Answer:
    """A complete response, or a chunk of one.

    Args:
        content: JSON of the response.

    Raises:
        Unread: The content is not a JSON object with choices.
        EngineError: `answer_size`: decoding the content would take too much memory.
    """

    __slots__ = ("choices", "content", "fields")

    def __init__(self, content: bytes) -> None:
        self.content = content
        try:
            check_shape(content)
            self.fields = _ANSWER.decode(content)
            self.choices = _CHOICES.decode(self.fields["choices"]) or []
        except (KeyError, msgspec.MsgspecError, RecursionError):
            raise Unread from None

    def shown(self, asked: Asked) -> bytes | None:
        """Return the response to send to the client; None for a chunk that carries only tokens.

        Fields that the client did not request are null, as in the engine's own responses.
        """
        if asked.model is None and not asked.hidden:
            return self.content
        if asked.is_text and self.choices and all(map(_is_for_tokens, self.choices)):
            return None
        changed: dict[str, object] = {
            "choices": [_hide(choice, asked.hidden) for choice in self.choices]
        }
        if asked.model is not None and "model" in self.fields:
            changed["model"] = asked.model
        return _ENCODER.encode(_hide(self.fields, asked.hidden) | changed)

    def indices(self) -> list[int]:
        """Return the indices of the choices."""
        return [_index(choice) for choice in self.choices]

    def finished(self) -> list[int]:
        """Return the indices of the choices that end in this response or chunk."""
        return [_index(c) for c in self.choices if c.get("finish_reason", NULL) != NULL]

    def sampled(self) -> list[int]:
        """Return the indices of the choices that have tokens in this response or chunk."""
        return [_index(c) for c in self.choices if c.get("token_ids", NULL) not in _NO_TOKENS]


def _hide(fields: Fields, hidden: frozenset[str]) -> Fields:
    present = hidden.intersection(fields)
    return fields | dict.fromkeys(present, NULL) if present else fields


def _is_for_tokens(choice: Fields) -> bool:
    delta, reason = choice.get("delta"), choice.get("finish_reason", NULL)
    return delta == _EMPTY_DELTA and reason == NULL


def _index(choice: Fields) -> int:
    text = bytes(choice.get("index", b"0"))
    return int(text) if text.isdigit() else 0
