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

from rollout_io.retokenize.chat_template import TEMPLATES, find_template
from rollout_io.retokenize.messages import normalize
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
            self._rendered(tokenizer, one, generation_prompt=prompt) or ""
            for prompt in (False, True)
        )
        self._header = with_header.removeprefix(without) if with_header != without else ""
        self._user = self._header.replace("assistant", "user", 1) if self._header else ""
        self._end = tokenizer.eos_token or ""
        self._begin = tokenizer.backend.bos_token or ""
        self._systems = dict(self._system_blocks(without))

    def of(self, ids: Sequence[int], messages: str | None) -> dict[str, list[int]]:
        """Return the variants of a prompt by name, except variants that equal the prompt.

        Args:
            ids: The stored prompt.
            messages: JSON of the messages that were sent, or None.
        """
        text = self._tokenizer.decode(ids)
        texts = {**dict(self._from_messages(messages)), **dict(self._edits(text))}
        texts["with its text tokenized again"] = text
        names = list(texts)
        try:
            encoded = self._tokenizer.encode([texts[name] for name in names], names)
        except RolloutError:
            return {}
        prompts: dict[str, list[int]] = {}
        seen = {tuple(ids), ()}
        for name, tokens in zip(names, encoded, strict=True):
            if tuple(tokens) not in seen:
                seen.add(tuple(tokens))
                prompts[name] = tokens
        return prompts

    def _edits(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each edited version of a prompt."""
        if self._header:
            if text.endswith(self._header):
                yield "without the generation prompt", text.removesuffix(self._header)
                yield "with an empty thinking block", f"{text}<think>\n\n</think>\n\n"
            else:
                yield "with the generation prompt", text + self._header
        if self._user and self._user in text:
            at = text.index(self._user)
            if at:
                yield "without the system prompt", text[at:]
            for name, block in self._systems.items():
                yield name, block + text[at:]
        if self._end:
            joined = text.replace(f"{self._end}\n", self._end)
            split = re.sub(f"{re.escape(self._end)}(?!\n)", f"{self._end}\n", text)
            yield "without newlines after messages", joined
            yield "with newlines after messages", split
        if self._begin:
            yield "with another beginning-of-sequence token", self._begin + text
            yield "without a beginning-of-sequence token", text.removeprefix(self._begin)
        yield "without thinking in earlier answers", _THINKING.sub("", text)

    def _from_messages(self, messages: str | None) -> Iterator[tuple[str, str]]:
        """Yield the name and text of each rendering of the stored messages."""
        try:
            stored = json.loads(messages or "null")
            if not isinstance(stored, list) or not stored:
                return
            plain = [normalize(message, _WHERE) for message in stored]
        except (ValueError, RecursionError):
            return
        templates: dict[str, str | None] = {"the tokenizer's chat template": None}
        templates |= {f"the template {name}": name for name in TEMPLATES}
        for name, template in templates.items():
            tokenizer = self._tokenizer if template is None else _with(self._tokenizer, template)
            text = self._rendered(tokenizer, plain, generation_prompt=True)
            if text:
                yield f"rendered with {name}", text

    def _system_blocks(self, plain: str) -> Iterator[tuple[str, str]]:
        """Yield a name and the text before the first user message, for several system prompts."""
        if not self._user or self._user not in plain:
            return
        if before := plain[: plain.index(self._user)]:
            yield "with the template's system prompt", before
        for system in SYSTEM_PROMPTS:
            chat = [{"role": "system", "content": system}, {"role": "user", "content": "-"}]
            text = self._rendered(self._tokenizer, chat, generation_prompt=False)
            if text and self._user in text:
                yield f"with the system prompt {system!r}", text[: text.index(self._user)]

    @staticmethod
    def _rendered(
        tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str | None:
        try:
            return tokenizer.render(messages, generation_prompt=generation_prompt, where=_WHERE)
        except RolloutError:
            return None


def _with(tokenizer: ChatTokenizer, template: str) -> ChatTokenizer:
    """Return a copy of the tokenizer with another chat template."""
    backend = copy(tokenizer.backend)
    backend.chat_template = find_template(template)
    return dataclasses.replace(tokenizer, backend=backend)
