"""A local tokenizer with a chat template: text to ids, with errors that name the text."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rollout_io.dataset.opening import refuse_irregular
from rollout_io.retokenize.chat_template import find_template
from rollout_io.retokenize.local import tokenizer_directory, vocabulary_fingerprint
from rollout_io.retokenize.processor import PictureProcessor, load_processor
from rollout_io.startup import importing_transformers
from schemas.errors import InputError, RolloutError
from schemas.imports import requires_extra

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

_IN_TEXT = frozenset({"", "<think>", "</think>"})
_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
PICTURE = re.compile("\ufdd0[^\ufdd1]*\ufdd1")
"""Texts that stand for a picture until a conversation is rendered: no text has these code points."""
_LONE = re.compile("[\ud800-\udfff]")


def picture_mark(part: Message) -> str:
    """Return the text that stands for a picture of messages until they are rendered."""
    return f"\ufdd0{part.get('blob', '')}\ufdd1"


@dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A tokenizer with a fixed chat template; create it with `load_tokenizer`.

    Attributes:
        name: Directory from which the tokenizer was loaded.
        backend: The Transformers tokenizer; `chat_template` is the template in use.
        template_kwargs: Arguments of every template call, such as `enable_thinking`.
        expansions: Texts in place of the placeholder, by the text that stands for the picture
            (`picture_mark`); `encode` writes the placeholder for all others.
    """

    name: str
    backend: Any
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    expansions: dict[str, str] = field(default_factory=dict)

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
    def special_tokens(self) -> dict[int, str]:
        """Special tokens (id to text), which decoding usually leaves out of the text."""
        added = self.backend.added_tokens_decoder
        return {int(i): str(token.content) for i, token in added.items() if token.special}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the mapping from ids to tokens, including added tokens.

        It is the same for all copies of a tokenizer, regardless of their file format and text
        processing (normalisation, added special tokens, padding, templates).
        """
        return vocabulary_fingerprint(self.backend.get_vocab())

    @cached_property
    def vocab_size(self) -> int:
        """Exclusive upper bound of the ids, including ids of added tokens."""
        return 1 + int(max(self.backend.get_vocab().values()))

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Texts of the tokens that no answer contains as such: special tokens and role markers.

        Other added tokens, such as those around thinking and tool calls, may be part of answers.
        """
        special = {str(token) for token in self._added_tokens if token.special}
        messages = [{"role": role, "content": ""} for role in ("system", "user")]
        try:
            shown = self.render(messages, generation_prompt=True)
        except RolloutError:
            shown = ""
        marks = {str(token) for token in self._added_tokens if str(token) in shown}
        return frozenset({*special, *map(str, self.backend.all_special_tokens), *marks}) - _IN_TEXT

    @cached_property
    def marker_tokens(self) -> frozenset[str]:
        """`control_tokens`, and added tokens that look like them, which no other message contains.

        Example: "<|fim_prefix|>" of Qwen.
        """
        alike = {str(token) for token in self._added_tokens if _MARKER.fullmatch(str(token))}
        return self.control_tokens | alike

    @property
    def _added_tokens(self) -> list[Any]:
        return list(self.backend.added_tokens_decoder.values())

    @cached_property
    def literals(self) -> dict[int, Any]:
        """Cache of `rollout_io.retokenize.encoding`."""
        return {}

    @cached_property
    def template_fingerprint(self) -> str | None:
        """SHA-256 (hex) of the chat template's text; None if there is no template.

        Several named templates are hashed together as JSON, as are a template and its
        `template_kwargs`.
        """
        template = self.backend.chat_template
        if not template:
            return None
        is_text = isinstance(template, str) and not self.template_kwargs
        if self.template_kwargs:
            template = [template, dict(self.template_kwargs)]
        text = template if is_text else json.dumps(template, sort_keys=True)
        return template_fingerprint(text)

    @cached_property
    def placeholder(self) -> str | None:
        """Text that the chat template writes for a picture; None if it has none.

        Example: "<|vision_start|><|image_pad|><|vision_end|>" of Qwen's vision models.
        """
        parts = ({"type": "text", "text": "before"}, {"type": "text", "text": "after"})
        with_picture = [{"role": "user", "content": [parts[0], {"type": "image"}, parts[1]]}]
        try:
            whole = self.render(with_picture)
            text = self.render([{"role": "user", "content": [*parts]}])
        except RolloutError:
            return None
        match = re.search("before(.*?)after", whole, re.DOTALL)
        if match is None or "before" + "after" not in text:
            return None
        marks = [str(token) for token in self._added_tokens]
        return match[1] if any(mark in match[1] for mark in marks) else None

    @cached_property
    def placeholder_id(self) -> int | None:
        """The token of `placeholder` that stands for the picture itself; None without one."""
        if self.placeholder is None:
            return None
        named = getattr(self.backend, "image_token", None)
        added = [
            token
            for token in self.backend(self.placeholder, add_special_tokens=False)["input_ids"]
            if token in self.backend.added_tokens_decoder
        ]
        same = [token for token in added if self.decode([token]) == named]
        return int((same or added[len(added) // 2 :])[0]) if added else None

    @cached_property
    def processor(self) -> PictureProcessor | None:
        """The image processor of the directory; None without one (see `load_processor`)."""
        return load_processor(tokenizer_directory(self.name), self.backend)

    def added_text(self, *, system: bool) -> str:
        """Return the text that the chat template adds to a user message.

        Special tokens and role names are omitted. The result is empty if nothing is added or there
        is no template.

        Args:
            system: If true, a system message precedes the user message.
        """
        roles = ("system", "user") if system else ("user",)
        messages = [{"role": role, "content": f"the-{role}-text"} for role in roles]
        try:
            text = self.render(messages)
        except RolloutError:
            return ""
        marks = sorted(map(str, self.backend.get_added_vocab()), key=len, reverse=True)
        marks += [message["content"] for message in messages]
        pieces = re.split("|".join(map(re.escape, marks)), text)
        return "\n".join(added for piece in pieces if (added := _without_role(piece)))

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        generation_prompt: bool = False,
        where: str = "messages",
    ) -> str:
        """Render a conversation as text, optionally with the header of the next assistant message.

        Raises:
            InputError: `chat_template`: the template raised an error or exceeded a bound of
                `bounded_templates`, or there is no template.
        """
        if not self.backend.chat_template:
            raise _without_template(self.name)
        try:
            with _bounded():
                text = self.backend.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=list(tools) if tools else None,
                    **self.template_kwargs
                    | {"add_generation_prompt": generation_prompt, "tokenize": False},
                )
        except Exception as error:  # a template is a program and may raise anything
            finding = f"the chat template raised {_one_line(error)}"
            hint = f"use a --chat-template that renders the roles {_roles(messages)}"
            raise InputError("chat_template", where, finding, "", hint) from None
        return str(text)

    def render_marked(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        where: str = "messages",
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation and a mask, true inside {% generation %} blocks.

        Raises:
            InputError: `chat_template`: the template raised an error, or there is no template;
                `assistant_masks`: the template has no such blocks.
        """
        if not _MARK.search(str(self.backend.chat_template or "")):
            hint = (
                "set chat_template to qwen3_without_thinking, or to a template file with such marks"
            )
            finding = "the chat template has no {% generation %} marks around assistant text"
            raise InputError("assistant_masks", where, finding, "", hint)
        self.render(messages, tools, where=where)
        with _bounded():
            rendered = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                **self.template_kwargs
                | {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True},
            )
        return list(rendered["input_ids"]), [bool(mark) for mark in rendered["assistant_masks"]]

    def encode(self, texts: Sequence[str], places: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; special tokens are recognised in the text but never added.

        Args:
            texts: Texts to encode; may be empty.
            places: Name of each text, for error messages.

        Raises:
            InputError: `tokenizer`: a text is invalid Unicode (it has lone surrogates).
        """
        if not texts:
            return []
        texts = self.with_placeholders(texts)
        try:
            batch = self.backend(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
        except Exception as error:  # tokenizers raises bare TypeError
            self.refuse_lone_surrogates(texts, places)
            finding = f"the tokenizer raised {_one_line(error)}"
            raise InputError("tokenizer", places[0], finding) from None
        ids: list[list[int]] = batch["input_ids"]
        return ids

    def with_placeholders(self, texts: Sequence[str]) -> list[str]:
        """Replace each `PICTURE` by its expansion, or by the placeholder of the chat template."""
        return [PICTURE.sub(self._expanded, text) for text in texts]

    def _expanded(self, mark: re.Match[str]) -> str:
        return self.expansions.get(mark[0], self.placeholder or mark[0])

    @staticmethod
    def refuse_lone_surrogates(texts: Sequence[str], places: Sequence[str]) -> None:
        """Check that texts are valid Unicode.

        Raises:
            InputError: `tokenizer`: a text has a lone surrogate.
        """
        for text, where in zip(texts, places, strict=True):
            if _LONE.search(text):
                finding = "the text contains a lone surrogate (half of a character)"
                hint = "replace it by U+FFFD where the log is written"
                raise InputError("tokenizer", where, finding, "", hint)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, with special tokens and without clean-up."""
        plain = [int(token) for token in ids]
        text = self.backend.decode(
            plain, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def decode_each(self, ids: Sequence[int]) -> str:
        """Decode each id separately and join the texts.

        Engines decode tokens in this way when they report log-probabilities.
        """
        texts = self._token_texts
        for token in {*ids} - texts.keys():
            texts[token] = self.decode([token])
        return "".join([texts[token] for token in ids])

    @cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}


def load_tokenizer(
    path: str | os.PathLike[str], chat_template: str | None = None, *, needs_template: bool = True
) -> ChatTokenizer:
    """Load a local tokenizer, without downloading files or running code from its directory.

    Args:
        path: Directory of a downloaded model, or its Hub id if it is in the local cache.
        chat_template: Name or file of a template (`find_template`); None uses the tokenizer's.
        needs_template: If true, reject a tokenizer without a template. Plain text can be encoded
            without one.

    Raises:
        InputError: `input_file`: one of the directory's files is not a regular file; `tokenizer`:
            the tokenizer does not exist or cannot be loaded; `chat_template`: it has no template.
        ConfigError: `chat_template`: the template is unknown or cannot be read.
        MissingExtra: `extra_installed`: `transformers` is not installed.
    """
    where = os.fspath(path)
    directory = tokenizer_directory(where)
    for file in Path(directory).iterdir():
        if not file.is_dir():
            refuse_irregular(file)  # Transformers would block on a pipe
    template = None if chat_template is None else find_template(chat_template)
    backend = _load(directory)
    if template is not None:
        backend.chat_template = template
    if needs_template and not backend.chat_template:
        raise _without_template(where)
    return ChatTokenizer(where, backend)


def _bounded() -> AbstractContextManager[None]:
    """Bound templates rendered inside a `with` block: they are programs of strangers."""
    # Imported here because it imports Jinja.
    from rollout_io.retokenize.bounded_templates import bind, bounded

    bind()
    return bounded()


def _without_template(where: str) -> InputError:
    finding, hint = "the tokenizer has no chat template", "pass --chat-template NAME or FILE"
    return InputError("chat_template", where, finding, "", hint)


def _load(where: str) -> Any:
    with requires_extra("text", where), importing_transformers():
        from transformers import AutoTokenizer
    hint = "check that the directory contains tokenizer.json and tokenizer_config.json"
    try:
        with importing_transformers():
            backend: Any = AutoTokenizer.from_pretrained(
                where, local_files_only=True, trust_remote_code=False
            )
        is_empty = not backend.encode("user", add_special_tokens=False)
    except Exception as error:  # Transformers does not wrap the errors of its parsers
        finding = f"the tokenizer cannot be loaded: {_one_line(error)}"
        raise InputError("tokenizer", where, finding, "", hint) from None
    if is_empty:
        raise InputError("tokenizer", where, "the tokenizer has no vocabulary", "", hint)
    return backend


def _without_role(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    return rest.strip() if first.strip() in {"system", "user"} else text.strip()


def template_fingerprint(text: str) -> str:
    """Return the fingerprint of a chat template: the SHA-256 of its text, in hex."""
    return _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _roles(messages: Sequence[Message]) -> str:
    roles = [str(message.get("role")) for message in messages]
    shown = roles if len(roles) <= 6 else [*roles[:5], "..."]
    return ", ".join(shown) or "no message"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
