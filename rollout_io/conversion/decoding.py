"""Comparison of decoded ids with logged text, to check that the tokenizer is the right one."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_io.conversion.text import cached_tokenizer
from rollout_io.formats.base import Step
from rollout_io.formats.parsing.tokens import parse_ids
from rollout_io.formats.parsing.witnesses import holds, shortened
from schemas.errors import InputError
from schemas.messages import RETOKENIZED


def check_decoded(steps: Iterable[Step], directory: str) -> None:
    """Decode the sampled ids and compare them with the text in the log.

    If the log has the text of each token next to its log-probability, all tokens are compared;
    otherwise only the text of one response per run.

    Args:
        steps: Steps of one run.
        directory: Directory of the tokenizer.

    Raises:
        InputError: other_tokenizer.
    """
    is_sampled = False
    for step in steps:
        told = () if step.token_text is None else (step.token_text,)
        texts = told or (() if is_sampled else step.texts)
        if step.token_source == RETOKENIZED or not texts:
            continue
        tokenizer = cached_tokenizer(directory, None)
        ids = _ids(step)
        if not ids or max(ids) >= tokenizer.vocab_size or min(ids) < 0:
            continue  # reported by token_range
        decoded = tokenizer.decode_each(ids) if told else tokenizer.decode(ids)
        is_sampled = is_sampled or not told
        for text in texts:
            if not holds(decoded, text):
                raise _other(step, directory, decoded, text)


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
    hint = "pass the tokenizer of the model that sampled them, or check that ids and text belong "
    hint += "to the same call"
    return InputError("other_tokenizer", step.source, got, "", hint)
