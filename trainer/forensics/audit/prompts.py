"""Look for another rendering of a prompt that explains the stored log-probabilities.

A harness that renders prompts again, with another chat template or without the system prompt,
stores tokens that the engine never received. The variants below are tried for spans that fit no
candidate.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from rollout_io.retokenize.chat_template import TEMPLATES, find_template, normalize
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import RolloutError

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
)
"""System prompts that common chat templates add."""
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_WHERE = "prompt"


class PromptVariants:
    """Renders prompts as a faulty harness might have rendered them.

    Args:
        tokenizer: The tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        one = [{"role": "user", "content": "the-user-text"}]
        without, with_header = (
            _rendered(tokenizer, one, generation_prompt=prompt) for prompt in (False, True)
        )
        self._header = with_header.removeprefix(without) if with_header != without else ""
        self._user = self._header.replace("assistant", "user", 1)
        self._systems = {"with the template's system prompt": self._before_user(without)}
        for system in SYSTEM_PROMPTS:
            chat = [{"role": "system", "content": system}, {"role": "user", "content": "-"}]
            text = _rendered(tokenizer, chat, generation_prompt=False)
            self._systems[f"with the system prompt {system!r}"] = self._before_user(text)

    def _before_user(self, text: str) -> str:
        """Return the text before the first user message; empty if it has none."""
        return text.partition(self._user)[0] if self._user and self._user in text else ""

    def of(self, ids: Sequence[int], messages: str | None) -> dict[str, list[int]]:
        """Return the variants of a prompt by name, except variants that equal the prompt.

        Args:
            ids: The stored prompt.
            messages: JSON of the messages that were sent, or None.
        """
        text = self._tokenizer.decode(ids)
        texts = {**dict(self._from_messages(messages)), **dict(self._edits(text))}
        texts["with its text tokenized again"] = text
        try:
            encoded = self._tokenizer.encode(list(texts.values()), list(texts))
        except RolloutError:
            return {}
        by_tokens: dict[tuple[int, ...], str] = {}
        for name, tokens in zip(texts, encoded, strict=True):
            by_tokens.setdefault(tuple(tokens), name)
        return {
            name: list(ids_) for ids_, name in by_tokens.items() if ids_ not in {tuple(ids), ()}
        }

    def _edits(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each edited version of a prompt."""
        if self._header and text.endswith(self._header):
            yield "without the generation prompt", text.removesuffix(self._header)
            yield "with an empty thinking block", f"{text}<think>\n\n</think>\n\n"
        elif self._header:
            yield "with the generation prompt", text + self._header
        if self._user and self._user in text:
            user = text[text.index(self._user) :]
            yield "without the system prompt", user
            yield from ((name, block + user) for name, block in self._systems.items() if block)
        if end := self._tokenizer.eos_token:
            yield "without newlines after messages", text.replace(f"{end}\n", end)
            split = re.sub(f"{re.escape(end)}(?!\n)", f"{end}\n", text)
            yield "with newlines after messages", split
        if begin := self._tokenizer.backend.bos_token:
            yield "with another beginning-of-sequence token", begin + text
            yield "without a beginning-of-sequence token", text.removeprefix(begin)
        yield "without thinking in earlier answers", _THINKING.sub("", text)

    def _from_messages(self, messages: str | None) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each rendering of the stored messages."""
        try:
            stored = json.loads(messages or "null")
            plain = [normalize(message, _WHERE) for message in stored]
        except (TypeError, ValueError, RecursionError):  # not a list of messages
            return
        templates: dict[str, str | None] = {"the tokenizer's chat template": None}
        for name, template in (
            templates | {f"the template {one}": one for one in TEMPLATES}
        ).items():
            tokenizer = self._tokenizer
            if template is not None:
                backend = copy(tokenizer.backend)
                backend.chat_template = find_template(template)
                tokenizer = dataclasses.replace(tokenizer, backend=backend)
            if plain and (text := _rendered(tokenizer, plain, generation_prompt=True)):
                yield f"rendered with {name}", text


def _rendered(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool
) -> str:
    """Render messages; empty if the template cannot."""
    try:
        return tokenizer.render(messages, generation_prompt=generation_prompt, where=_WHERE)
    except RolloutError:
        return ""
