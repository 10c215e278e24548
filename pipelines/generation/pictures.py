"""Pictures that environments return: their bytes, their tokens in prompts, and their files.

    content parts ---> text with a mark for each picture ---> prompt ids, with the spans of pictures
                  seen                                   encode                             shown

A mark is a text that no environment writes (`picture_mark`); the tokenizer of the trajectory encodes it
as the tokens that the model's image processor has for the picture.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import Engine, Picture, pictures_by
from rollout_io.dataset.blobs import MEDIA_TYPES, PREFIX, Blobs, extension_of
from rollout_io.formats.parsing.media import decoded, media_part
from rollout_io.retokenize.chat_template import normalize
from rollout_io.retokenize.processor import Expansion, spans_in
from rollout_io.retokenize.tokenizer import PICTURE, ChatTokenizer, picture_mark
from schemas.errors import EngineError, InputError, RolloutError

Message = Mapping[str, Any]

RENDERED = frozenset({"step_wise", "retokenize"})
"""Values of `history` with which a server can render each prompt from messages."""

_MARKS = re.compile(f"({PICTURE.pattern})")
_DATA_URL = "a data URL with base64, such as data:image/png;base64,iVBORw0K"


def seen(message: object, where: str) -> dict[str, Any]:
    r"""Return a message as `normalize` does; if it shows pictures, its content is a list of parts.

    Returns:
        The message; texts are `str` in the list, pictures `bytes`.

    Raises:
        InputError: `message`: see `normalize`; a picture is not in the message, but at a URL or in a
            file; its base64 is invalid.

    Example:
        >>> url = {"url": "data:image/png;base64,iVBORw=="}
        >>> parts = [{"type": "text", "text": "Now?"}, {"type": "image_url", "image_url": url}]
        >>> seen({"role": "user", "content": parts}, "message 0")
        {'role': 'user', 'content': ['Now?', b'\x89PNG']}
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list | tuple) else ()
    pictures = [_picture(part, where) for part in parts]
    if not isinstance(message, Mapping) or not any(pictures):
        return normalize(message, where)
    texts = [[] if picture else [part] for picture, part in zip(pictures, parts, strict=True)]
    plain = [normalize({"role": "user", "content": text}, where)["content"] for text in texts]
    shown = [picture or text for picture, text in zip(pictures, plain, strict=True)]
    return normalize({**message, "content": None}, where) | {"content": shown}


def _picture(part: object, where: str) -> bytes | None:
    media = media_part(part) if isinstance(part, Mapping) else None
    if media is None and isinstance(part, Mapping) and "image" in str(part.get("type")):
        finding = f"a picture without its content, in a part of type {part['type']!r}"
        raise InputError("message", where, finding, _DATA_URL)
    if media is None or media["type"] != "image":
        return None
    source = media["source"]
    if source["type"] != "base64":
        finding = f"a picture at {str(source.get('url', source.get('file_id')))[:60]!r}"
        raise InputError("message", where, f"{finding}, which is not fetched", _DATA_URL)
    content = decoded(source["data"])
    if content is None:
        raise InputError("message", where, "a picture with invalid base64", _DATA_URL)
    return content


@lru_cache(maxsize=8)
def _placeholders_of(tokenizer: ChatTokenizer) -> frozenset[int]:
    """Return the ids that stand for parts of pictures; none if no picture can be shown."""
    try:
        return frozenset() if tokenizer.processor is None else tokenizer.processor.pads
    except RolloutError:  # raised again if an environment returns a picture
        return frozenset()


class _Shown(NamedTuple):
    name: str
    content: bytes
    expansion: Expansion

    def stored(self) -> dict[str, Any]:
        return {"type": "image", "blob": self.name, "media_type": self._media_type}

    def sent(self) -> dict[str, Any]:
        url = f"data:{self._media_type};base64,{base64.b64encode(self.content).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    @property
    def _media_type(self) -> str | None:
        return MEDIA_TYPES.get(extension_of(self.content))


class Pictures:
    """The pictures of one trajectory.

    Args:
        tokenizer: Tokenizer of the engine.
        engine: The engine that samples.
        config: Settings of the generation.
        store: Store of the files; None refuses pictures.
        where: The trajectory, for error messages.

    Attributes:
        tokenizer: Tokenizer of the trajectory, which encodes marks.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        engine: Engine,
        config: GenerateConfig,
        store: Blobs | None,
        where: str,
    ) -> None:
        self._loaded, self._store, self._where = tokenizer, store, where
        self._history = config.history
        self._pads, self.by = _placeholders_of(tokenizer), pictures_by(engine)
        has = bool(self._pads)
        self.tokenizer = dataclasses.replace(tokenizer, expansions={}) if has else tokenizer
        self._by_mark: dict[str, _Shown] = {}

    async def marked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages from `seen` with a mark in place of each picture, which is stored.

        Raises:
            EngineError: `engine_pictures`: the engine cannot show pictures.
            InputError: `picture_file`, `processor`: the image processor refuses a picture, or cannot
                be loaded; `chat_template`: the template has no place for it.
        """
        if all(isinstance(message["content"], str) for message in messages):
            return messages
        self._check()
        return await asyncio.to_thread(lambda: [self._marked(message) for message in messages])

    def _check(self) -> None:
        finding, problem, hint = "the environment returned a picture", "", ""
        if self._store is None:
            expected = "text: SkyRL's generator interface has no pictures"
            raise InputError("env_output", self._where, finding, expected)
        if self._loaded.processor is None:
            problem = f"the model {self._loaded.name} has no image processor"
            hint = "use a model that sees pictures, with its preprocessor_config.json"
        elif not self.by:
            problem, hint = "the engine does not show them", "set engine = transformers"
        elif self.by == "chat" and self._history not in RENDERED:
            problem = f"a server shows them in messages only, not with history {self._history}"
            hint = "set history = step_wise, or engine = transformers"
        if problem:
            raise EngineError("engine_pictures", self._where, f"{finding}, but {problem}", "", hint)
        if self._loaded.placeholder is None:
            hint = "use the chat template of the model: leave out chat_template"
            finding += ", but the chat template has no placeholder for it"
            raise InputError("chat_template", self._where, finding, "", hint)

    def _marked(self, message: Message) -> Message:
        content = message["content"]
        if isinstance(content, str):
            return message
        return {**message, "content": "".join(map(self._mark, content))}

    def _mark(self, part: str | bytes) -> str:
        """Return the text of a part; a picture is stored, and its mark returned."""
        if isinstance(part, str):
            return part
        name = PREFIX + hashlib.sha256(part).hexdigest()
        mark, processor = picture_mark({"blob": name}), self._loaded.processor
        if mark not in self._by_mark:
            assert processor is not None
            assert self._store is not None
            expansion = processor.expansion(part, f"{self._where}, picture {name[:15]}")
            self._store.add(part)
            text = (self._loaded.placeholder or "").replace(processor.token, expansion.text)
            self.tokenizer.expansions[mark] = text
            self._by_mark[mark] = _Shown(name, part, expansion)
        return mark

    def shown(self, messages: Sequence[Message], ids: Sequence[int]) -> tuple[Picture, ...]:
        """Return the pictures of marked messages, at their tokens in the prompt's ids.

        Raises:
            InputError: `picture_tokens`: the ids do not have the tokens of each picture, or have
                others.
        """
        if not self._by_mark:
            return ()
        marks = [mark for m in messages for mark in PICTURE.findall(m["content"])]
        shown = [self._by_mark[mark] for mark in marks if mark in self._by_mark]
        expansions = [one.expansion for one in shown]
        try:
            spans = spans_in(np.array(ids, np.int32), expansions, self._pads, self._where)
        except InputError as error:
            hint = "show each picture as one content part, without its placeholders in texts; "
            hint += "serve the model with its own image processor"
            raise error.at(self._where, hint) from None
        return tuple(
            Picture(sha256=one.name, content=one.content, start=start, length=length)
            for one, (start, length) in zip(shown, spans, strict=True)
        )

    def refuse_sampled(self, response_ids: Sequence[int]) -> None:
        """Check that a response has no placeholder.

        Raises:
            InputError: `picture_tokens`: it has one.
        """
        if self._pads and not self._pads.isdisjoint(response_ids):
            token = min(self._pads.intersection(response_ids))
            finding = f"the model sampled token {token}, a placeholder of pictures"
            raise InputError("picture_tokens", self._where, finding, "tokens of text")

    def expanded(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return marked messages with the text of each picture's tokens in place of its mark."""
        if not self._by_mark:
            return messages
        texts = self.tokenizer.with_placeholders([message["content"] for message in messages])
        return [{**one, "content": text} for one, text in zip(messages, texts, strict=True)]

    def stored(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return marked messages with references to the files of pictures, for a row."""
        return self._with_parts(messages, _Shown.stored)

    def sent(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return marked messages with data URLs of pictures, for a server."""
        return self._with_parts(messages, _Shown.sent)

    def _with_parts(
        self, messages: Sequence[Message], part: Callable[[_Shown], dict[str, Any]]
    ) -> Sequence[Message]:
        if not self._by_mark:
            return messages
        return [{**one, "content": self._parts(one["content"], part)} for one in messages]

    def _parts(self, text: str, part: Callable[[_Shown], dict[str, Any]]) -> Any:
        pieces = [piece for piece in _MARKS.split(text) if piece]
        if self._by_mark.keys().isdisjoint(pieces):
            return text
        return [
            part(self._by_mark[piece])
            if piece in self._by_mark
            else {"type": "text", "text": piece}
            for piece in pieces
        ]
