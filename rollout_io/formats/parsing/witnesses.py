"""Checks of values that a log records twice: if they differ, one was shifted or misattributed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rollout_io.formats.base import Ids
from rollout_io.formats.parsing.bodies import Function, Logprobs, ToolCall
from rollout_io.formats.parsing.tokens import parse_ids
from schemas.errors import InputError, count, fragment, quoted

_NAMED = "token_id:"
_REPLACEMENT = "\ufffd"
_SPELLED = re.compile(r"[\u0120\u010a\u2581\u00c3]|\\x|bytes:")
"""Signs that tokens are spelled as in the vocabulary (bytes as substitute letters), not decoded."""

_WORD = re.compile(r"[A-Za-z0-9_]+")
_LOST = (
    "record the call again, without streaming or with a newer engine: ids of tool calls are lost"
)
_HINT = "record the call again: shifted log-probabilities silently corrupt training"

_SHORT = 4096
"""Characters of a text in which each word is searched for; a longer one is split into words once."""

_ANY_DECODER = msgspec.json.Decoder()
_CALLS_DECODER = msgspec.json.Decoder(list[ToolCall] | None)


def check_tokens(
    logprobs: Logprobs, ids: Ids, texts: Iterable[str], where: str, called: Iterable[str] = ()
) -> str | None:
    """Compare a response's ids and text with the tokens listed with its log-probabilities.

    Returns:
        The text of all tokens, if the log has it.
    """
    content = logprobs.content
    tokens: Sequence[Any] = (
        _plain_tokens(logprobs, where) if content is None else [t.token for t in content]
    )
    try:
        whole = "".join(tokens)
    except TypeError:  # null: no text
        return None
    if whole.startswith(_NAMED):
        _check_names(tokens, ids, where)
        return None
    if not whole:
        return None
    for text in texts:
        if text not in whole and not holds(whole, text):
            finding = f"the logprobs belong to the text {quoted(whole)}, not to {quoted(text)}"
            raise InputError("logprob_tokens", where, finding, hint=_HINT)
    if (word := missing_word(whole, called)) is not None:
        finding = (
            f"the tokens {quoted(whole)} do not contain {fragment(word)}, a word of the tool calls"
        )
        raise InputError("logprob_tokens", where, finding, hint=_LOST)
    return whole


def words_of_calls(raw: msgspec.Raw, *, has_names: bool = True) -> list[str]:
    """Return the words that the sampled text of a response's tool calls must contain.

    Engines parse tool calls, so their texts are not verbatim. But whatever the syntax, names, keys
    and strings consist of the same letters. A request that forces a call has no sampled names.
    """
    try:
        calls = _CALLS_DECODER.decode(raw) or ()
    except msgspec.MsgspecError:  # not OpenAI's format: there is nothing to compare
        return []
    texts: list[str] = []
    for call in calls:
        function = call.function or Function()
        texts += [function.name or ""] if has_names else []
        texts += _strings_in(function.arguments or "")
    return [word for text in texts for word in _WORD.findall(text)]


def _strings_in(arguments: str) -> list[str]:
    try:
        waiting = [_ANY_DECODER.decode(arguments)]
    except (msgspec.MsgspecError, RecursionError):
        return [arguments]
    texts: list[str] = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
    return texts


def missing_word(whole: str, words: Iterable[str]) -> str | None:
    """Return the first word that does not occur in a text; None if all do."""
    missing = [word for word in words if word not in whole[:_SHORT]]
    if not missing:
        return None
    whole_words = set(_WORD.findall(whole))
    return next((word for word in missing if word not in whole_words and word not in whole), None)


def _plain_tokens(logprobs: Logprobs, where: str) -> Sequence[Any]:
    """Return the tokens of text completions."""
    values, others = logprobs.token_logprobs, (logprobs.tokens, logprobs.text_offset)
    for listed in others:
        if listed is not None and values is not None and len(listed) != len(values):
            finding, expected = count(len(values), "logprob"), f"{len(listed)}, one per token"
            raise InputError("logprob_tokens", where, finding, expected, _HINT)
    return logprobs.tokens or ()


def _check_names(names: Sequence[str], ids: Ids, where: str) -> None:
    """Compare `token_id:N` with the ids; invalid ids are reported when the table is built."""
    try:
        parsed_ids = parse_ids([ids])[0].tolist() if isinstance(ids, bytes) else ids.tolist()
    except ValueError:
        return
    expected = [f"{_NAMED}{i}" for i in parsed_ids]
    if names == expected or len(names) != len(expected):
        return  # a different length: lengths_align reports it
    at = next(i for i, name in enumerate(names) if name != expected[i])
    finding = f"logprob {at} is for {names[at]!r}, but token_ids has id {parsed_ids[at]} there"
    raise InputError("logprob_tokens", where, finding, hint=_HINT)


def holds(whole: str, part: str) -> bool:
    """True if the decoded tokens contain a part of the response's text.

    Engines omit special tokens, reasoning and tool calls from the text and strip it. They decode
    tokens one by one, which can lose a leading space or split a character. If the part does not
    occur verbatim, its letters must occur in order. A fragment of a character may appear as U+FFFD
    in the text, the tokens, or both. In the text it is ignored, since the engine may have written
    an empty token for it; in the tokens it matches any one non-ASCII letter.

    Example:
        >>> holds("caf\ufffd\ufffd!", "café!"), holds("caf\ufffd\ufffd!", "cafés!")
        (True, False)
    """
    if part in whole:
        return True
    whole, part = ("".join(text.split()) for text in (whole, part.replace(_REPLACEMENT, "")))
    if _SPELLED.search(whole):
        whole, part = (text.encode("ascii", "ignore").decode() for text in (whole, part))
    letters = iter(whole)
    if _REPLACEMENT not in whole:
        return all(letter in letters for letter in part)
    return all(
        any(
            decoded == letter or (decoded == _REPLACEMENT and not letter.isascii())
            for decoded in letters
        )
        for letter in part
    )
