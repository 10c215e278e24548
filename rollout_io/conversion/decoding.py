"""Comparison of decoded ids with logged text, to check that the tokenizer is the right one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rollout_io.conversion.text import cached_tokenizer
from rollout_io.formats.base import Step
from rollout_io.formats.parsing.tokens import parse_ids
from rollout_io.formats.parsing.witnesses import holds, missing_word, shortened
from schemas.errors import InputError
from schemas.messages import RETOKENIZED

_WORD = re.compile(r"[A-Za-z]{4,}")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_MIN_WORDS = 6


def check_decoded(steps: Iterable[Step], directory: str) -> bool:
    """Decode the sampled ids and compare them with the text in the log.

    If the log has the text of each token next to its log-probability, all tokens are compared;
    otherwise only the text of one response per run, and the words of all tool calls. If the harness stored that text in a modified
    form (parsed, or joined with tool calls), only its words are compared (`has_words_of`).

    Args:
        steps: Steps of one run.
        directory: Directory of the tokenizer.

    Returns:
        True if there was text to compare with the ids of at least one step.

    Raises:
        InputError: `other_tokenizer`: the decoded ids differ from the text.
    """
    is_sampled = is_compared = False
    for step in steps:
        told = () if step.token_text is None else (step.token_text,)
        texts = told or (() if is_sampled else step.texts)
        edited = None if texts or is_sampled else _long_enough(step.response_text)
        if step.token_source == RETOKENIZED or not (texts or edited or step.called):
            continue
        tokenizer = cached_tokenizer(directory, None)
        ids = _ids(step)
        if not ids or max(ids) >= tokenizer.vocab_size or min(ids) < 0:
            continue  # reported by token_range
        decoded = tokenizer.decode_each(ids) if told else tokenizer.decode(ids)
        is_sampled, is_compared = is_sampled or bool(not told and (texts or edited)), True
        for text in texts:
            if not holds(decoded, text):
                raise _other(step, directory, decoded, text)
        if (word := missing_word(decoded, step.called)) is not None:
            raise _other(step, directory, decoded, f"a tool call with {word}")
        if edited and not has_words_of(decoded, edited):
            raise _other(step, directory, decoded, edited)
    return is_compared


def has_words_of(decoded: str, text: str) -> bool:
    """True if at least a third of the English words of a text occur in decoded tokens.

    Harnesses may store a response parsed, without markup, or escaped differently, so the texts need
    not be equal. With the tokenizer of a different model, nearly all words differ. Only words of at
    least four letters count.

    Example:
        >>> text = "Analysis: the terminal is ready. Plan: create a directory"
        >>> has_words_of('{"analysis": "the terminal is ready", "plan": "create', text)
        True
        >>> has_words_of("ized distled progironient tuvwxyz{|}~", text)
        False
    """
    words = _words(text)
    return 3 * sum(word in decoded for word in words) >= len(words)


def _words(text: str) -> set[str]:
    # Remove escapes such as \n, whose letter would otherwise join the next word. If the backslash
    # is literal, the rest of the word remains and still occurs in the decoded tokens.
    return set(_WORD.findall(_ESCAPE.sub(" ", text)))


def _long_enough(text: str | None) -> str | None:
    """Return the text if it has enough words to tell tokenizers apart, else None."""
    return text if text is not None and len(_words(text)) >= _MIN_WORDS else None


def _ids(step: Step) -> list[int]:
    ids = step.response_ids
    if not isinstance(ids, bytes):
        return [int(token) for token in ids]
    try:
        found: list[int] = parse_ids([ids])[0].tolist()
    except ValueError:  # reported when the table is built
        return []
    return found


def _other(step: Step, directory: str, decoded: str, text: str) -> InputError:
    got = f"{directory} decodes the response ids to {shortened(decoded)}"
    got += f", but the logged text is {shortened(text)}"
    hint = (
        "pass the tokenizer of the model that sampled the ids, or check that ids and text belong "
    )
    hint += "to the same call"
    return InputError("other_tokenizer", step.source, got, "", hint)
