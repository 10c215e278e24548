"""The bytes of each token of a vocabulary; a token may contain only part of a character."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_io.dataset.opening import read_input
from rollout_io.retokenize.local import tokenizer_file
from schemas.errors import InputError
from schemas.imports import requires_extra
from schemas.ragged import gather, offsets_of

_HEX = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_TOKENS = 1 << 24
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of all tokens (ids 0..V-1), concatenated.

    Attributes:
        name: File from which the vocabulary was read.
        values: Bytes of all tokens.
        offsets: [V + 1] token i is `values[offsets[i]:offsets[i + 1]]`.
    """

    name: str
    values: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    def lengths(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the number of bytes of each token, [K]; 0 for unknown ids."""
        begins, ends = self._bounds(ids)
        return ends - begins

    def to_arrow(self, ids: npt.NDArray[np.int32]) -> pa.Array:
        """Return the bytes of each token as Arrow `binary`, [K]; empty for unknown ids."""
        begins, ends = self._bounds(ids)
        values = gather(self.values, begins, ends - begins)
        offsets = offsets_of(ends - begins).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(values))]
        return pa.Array.from_buffers(pa.binary(), len(ids), buffers)

    def join(self, ids: npt.NDArray[np.int32]) -> bytes:
        """Return the bytes of a sequence of tokens.

        Example:
            A byte-level vocabulary in which "é" is split into two tokens:

            >>> vocabulary.join(np.array([131, 102], np.int32)).decode()
            'é'
        """
        begins, ends = self._bounds(ids)
        if not len(ids):
            return b""
        joined: bytes = gather(self.values, begins, ends - begins).tobytes()
        return joined

    def text(self, ids: npt.NDArray[np.int32]) -> str:
        """Return the text of a sequence of tokens, with U+FFFD for bytes that are not UTF-8."""
        return self.join(ids).decode("utf-8", "replace")

    def _bounds(
        self, ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        in_range = (ids >= 0) & (ids < len(self.offsets) - 1)
        at = np.where(in_range, ids, 0)
        begins = self.offsets[at]
        return begins, np.where(in_range, self.offsets[at + 1], begins)


def load_token_bytes(path: str) -> TokenBytes:
    """Read the bytes of the tokens of a local tokenizer.

    The bytes are exact for byte-level vocabularies (GPT-2, Llama 3, Qwen) and for SentencePiece
    vocabularies with byte fallback. The bytes of a special token are its name.

    Args:
        path: A `tokenizer.json`, its directory, or a model in the local Hugging Face cache.

    Raises:
        InputError: `tokenizer`, `input_file`: the tokenizer does not exist or cannot be read.
    """
    file = tokenizer_file(path)
    if file.is_file():
        content = read_input(file).decode("utf-8", "replace")
    else:
        content = _converted(str(file.parent))
    try:
        return _parsed(json.loads(content), str(file))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        finding = f"the file is not a valid tokenizer.json: {' '.join(str(error).split())}"
        raise InputError("tokenizer", str(file), finding) from None


def _converted(directory: str) -> str:
    """Return the `tokenizer.json` text that Transformers creates from other tokenizer files."""
    from rollout_io.retokenize.tokenizer import load_tokenizer

    with requires_extra("text", "--tokenizer"):
        backend = load_tokenizer(directory, needs_template=False).backend
    fast = getattr(backend, "backend_tokenizer", None)
    if fast is None:
        finding = "the tokenizer has no tokenizer.json, and Transformers cannot create one"
        raise InputError("tokenizer", directory, finding)
    return str(fast.to_str())


def _parsed(tokenizer: Mapping[str, Any], name: str) -> TokenBytes:
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score] by id
        tokens = {i: token for i, (token, _) in enumerate(vocabulary)}
    else:
        tokens = {i: token for token, i in vocabulary.items()}
    decoders = _decoders(tokenizer.get("decoder"))
    spell = _speller(decoders, tokenizer["model"].get("continuing_subword_prefix") or "##")
    pieces = {i: spell(token) for i, token in tokens.items()}
    for added in tokenizer.get("added_tokens") or []:
        pieces[added["id"]] = added["content"].encode("utf-8", "replace")
    size = 1 + max(pieces, default=-1)
    if not 0 < size <= _MAX_TOKENS or min(pieces, default=0) < 0:
        raise ValueError(f"the token ids are not in 0..{_MAX_TOKENS - 1}")
    ordered = [pieces.get(i, b"") for i in range(size)]
    values = np.frombuffer(b"".join(ordered), np.uint8)
    return TokenBytes(name, values, offsets_of(np.array([len(p) for p in ordered], np.int64)))


def _decoders(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    parts: Sequence[Mapping[str, Any]] = decoder.get("decoders") or [decoder]
    return list(parts)


def _speller(decoders: Sequence[Mapping[str, Any]], continuing: str) -> Any:
    """Return the function that converts a token's name to its bytes."""
    kinds = {str(decoder.get("type")) for decoder in decoders}
    if "ByteLevel" in kinds:
        table = _byte_of_char()
        return lambda token: _from_byte_level(token, table)
    if "WordPiece" in kinds:
        return lambda token: _from_word_piece(token, continuing)
    has_bytes, has_spaces = "ByteFallback" in kinds, kinds & {"Metaspace", "Replace"}

    def spell(token: str) -> bytes:
        if has_bytes and (match := _HEX.fullmatch(token)):
            return bytes([int(match[1], 16)])
        text = token.replace(_SPACE, " ") if has_spaces else token
        return text.encode("utf-8", "replace")

    return spell


def _from_byte_level(token: str, table: Mapping[str, int]) -> bytes:
    if all(char in table for char in token):
        return bytes(table[char] for char in token)
    return token.encode("utf-8", "replace")


def _from_word_piece(token: str, continuing: str) -> bytes:
    is_inside = token.startswith(continuing)
    text = token.removeprefix(continuing) if is_inside else f" {token}"
    return text.encode("utf-8", "replace")


def _byte_of_char() -> dict[str, int]:
    """Return the byte that each character represents in byte-level vocabularies."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(256 + i): byte for i, byte in enumerate(hidden)}
