"""A local tokenizer together with a chat template: text in, ids out, errors for people."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rollout_io.retokenize.chat_template import find_template
from schemas.errors import RolloutError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LONE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A tokenizer whose chat template is fixed; `load_tokenizer` makes one.

    Attributes:
        name: The directory it was loaded from.
        backend: The Transformers tokenizer; its `chat_template` is the one in use.
    """

    name: str
    backend: Any

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token."""
        token: str | None = self.backend.eos_token
        return token

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        token_id: int | None = self.backend.eos_token_id
        return token_id

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of vocabulary, merges, normalisation and added tokens.

        The same for every copy of a tokenizer, however its files are formatted.
        """
        fast = getattr(self.backend, "backend_tokenizer", None)
        if fast is None:
            return _digest(json.dumps(self.backend.get_vocab(), sort_keys=True))
        parts = json.loads(fast.to_str())
        content = {k: v for k, v in parts.items() if k not in {"truncation", "padding", "version"}}
        return _digest(json.dumps(content, sort_keys=True))

    @cached_property
    def template_fingerprint(self) -> str | None:
        """SHA-256 (hex) of the chat template's text (of named templates: of all, as JSON).

        None: there is no template.
        """
        template = self.backend.chat_template
        if not template:
            return None
        is_text = isinstance(template, str)
        return _digest(template if is_text else json.dumps(template, sort_keys=True))

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        generation_prompt: bool = False,
        where: str = "messages",
    ) -> str:
        """The text of a conversation, with the header of the next assistant message if asked.

        Raises:
            RolloutError: chat_template: the template raised, or there is none.
        """
        if not self.backend.chat_template:
            raise _without_template(self.name)
        try:
            text = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template may raise anything
            got = f"an error in the chat template: {_one_line(error)}"
            hint = f"it was given {_roles(messages)}; another template: --chat-template"
            raise RolloutError(
                "chat_template", where, got, "messages that it takes", hint
            ) from None
        return str(text)

    def render_marked(
        self, messages: Sequence[Message], *, where: str = "messages"
    ) -> tuple[list[int], list[bool]]:
        """Ids of a conversation, and which of them its template marks with {% generation %}.

        Raises:
            RolloutError: chat_template: the template raised, or there is none; assistant_masks: it
                has no such marks.
        """
        if not _MARK.search(str(self.backend.chat_template or "")):
            hint = "chat_template = qwen3_without_thinking, or a file with such marks"
            got = "a chat template without {% generation %} marks"
            raise RolloutError("assistant_masks", where, got, "marks round assistant text", hint)
        self.render(messages, where=where)
        made = self.backend.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]]

    def encode(self, texts: Sequence[str], places: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with no special tokens added; those in the text are recognised.

        Args:
            texts: Any number.
            places: Place of each text, for errors.

        Raises:
            RolloutError: tokenizer: a text that is no Unicode (lone surrogates).
        """
        if not texts:
            return []
        try:
            batch = self.backend(
                list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
            )
        except Exception as error:  # tokenizers raises bare TypeError
            bad = [where for text, where in zip(texts, places, strict=True) if _LONE.search(text)]
            got, where = ("a lone surrogate", bad[0]) if bad else (_one_line(error), places[0])
            raise RolloutError("tokenizer", where, got, "text that it can encode") from None
        ids: list[list[int]] = batch["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included, nothing cleaned up."""
        plain = [int(token) for token in ids]
        text = self.backend.decode(
            plain, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


def load_tokenizer(
    path: str | os.PathLike[str], chat_template: str | None = None, *, needs_template: bool = True
) -> ChatTokenizer:
    """Load a tokenizer from a local directory; nothing is downloaded, no code of it is run.

    Args:
        path: Directory of a downloaded model.
        chat_template: Name or file of a template (`find_template`); None: the tokenizer's own.
        needs_template: Whether a tokenizer without a template is refused: text alone needs none.

    Raises:
        RolloutError: tokenizer: not a directory, or none that loads there; chat_template: no such
            template, or the tokenizer has none; extra_installed: no `transformers`.
    """
    where = os.fspath(path)
    if not Path(where).is_dir():
        hint = "give the directory of a downloaded model"
        raise RolloutError("tokenizer", where, "no such directory", "a local directory", hint)
    template = None if chat_template is None else find_template(chat_template)
    backend = _load(where)
    if template is not None:
        backend.chat_template = template
    if needs_template and not backend.chat_template:
        raise _without_template(where)
    return ChatTokenizer(where, backend)


def _without_template(where: str) -> RolloutError:
    hint = "--chat-template NAME or FILE"
    return RolloutError("chat_template", where, "a tokenizer without one", "a template", hint)


def _load(where: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        hint = 'pip install "rollout-io[retokenize]"'
        raise RolloutError(
            "extra_installed", where, "no `transformers` package", "", hint
        ) from None
    hint = "the directory needs tokenizer.json and tokenizer_config.json"
    try:
        backend: Any = AutoTokenizer.from_pretrained(
            where, local_files_only=True, trust_remote_code=False
        )
        is_empty = not backend.encode("user", add_special_tokens=False)
    except Exception as error:  # transformers raises what its files make it raise
        raise RolloutError("tokenizer", where, _one_line(error), "a tokenizer", hint) from None
    if is_empty:
        raise RolloutError("tokenizer", where, "no vocabulary", "a tokenizer", hint)
    return backend


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _roles(messages: Sequence[Message]) -> str:
    roles = [str(message.get("role")) for message in messages]
    shown = roles if len(roles) <= 6 else [*roles[:5], "..."]
    return ", ".join(shown) or "no message"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
