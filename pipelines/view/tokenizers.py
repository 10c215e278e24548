"""Find and load a dataset's tokenizer, as named in its metadata or by the model of a run."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rollout_io.dataset.opening import read_input
from rollout_io.retokenize import ChatTokenizer, load_tokenizer
from rollout_io.retokenize.local import (
    find_tokenizer,
    has_fingerprint,
    has_tokenizer,
    not_found,
    remembered_tokenizer,
)
from rollout_io.retokenize.token_bytes import load_token_bytes
from schemas.errors import RolloutError
from schemas.metadata import DatasetMetadata


class Found(NamedTuple):
    """The directory of a tokenizer; or None, and the reason as a clause."""

    directory: str | None
    reason: str = ""


class Tokenizers:
    """Tokenizers on this machine.

    Example:
        >>> Tokenizers().find(DatasetMetadata(), None).reason
        'the dataset names no tokenizer'
    """

    def __init__(self) -> None:
        self._find = cache(_found)
        self.token_bytes = cache(load_token_bytes)
        """Load the bytes of each token in the vocabulary of a directory."""
        self.chat = cache(_chat_tokenizer)
        """Load the tokenizer of a directory for `drift`; None if it cannot be loaded."""

    def find(self, metadata: DatasetMetadata, model: str | None) -> Found:
        """Find the tokenizer of a dataset.

        Args:
            metadata: Metadata of the dataset.
            model: Model of the run that trained on the dataset. Its tokenizer is used if the dataset
                has the same fingerprint or none.
        """
        return self._find(metadata.tokenizer, metadata.tokenizer_fingerprint, model)


def _found(name: str | None, fingerprint: str | None, model: str | None) -> Found:
    of_dataset = DatasetMetadata(tokenizer=name, tokenizer_fingerprint=fingerprint)
    directory = remembered_tokenizer(of_dataset)
    if directory is not None:
        return Found(directory)
    reason = _missing(name, fingerprint)
    return Found(None, reason) if model is None else _of_model(model, fingerprint, reason)


def _of_model(model: str, fingerprint: str | None, reason: str) -> Found:
    directory = find_tokenizer(model)
    if directory is None or not Path(directory).is_dir():
        return Found(None, f"{reason}, and the run's model {model} {not_found(model)}")
    if not has_tokenizer(Path(directory)):
        return Found(None, f"{reason}, and the run's model {model} has no tokenizer")
    if fingerprint is not None and not has_fingerprint(directory, fingerprint):
        return Found(None, f"{reason}, and the run's model {model} has a different tokenizer")
    try:
        load_token_bytes(directory)
    except RolloutError as error:
        why = f"the tokenizer of the run's model is unusable: {error.sentence}"
        return Found(None, f"{reason}, and {why}")
    return Found(directory)


def _missing(name: str | None, fingerprint: str | None) -> str:
    if name is None:
        return "the dataset names no tokenizer"
    if find_tokenizer(name) is None:
        return f"the tokenizer {name} {not_found(name)}"
    if fingerprint is None:
        return f"the dataset has no fingerprint of its tokenizer {name}"
    return f"the tokenizer {name} has changed"


def _chat_tokenizer(directory: str) -> ChatTokenizer | None:
    if find_spec("tokenizers") is not None and (Path(directory) / "tokenizer.json").is_file():
        with suppress(Exception):  # tokenizers raises bare Exception
            return ChatTokenizer(directory, _Fast(Path(directory)))
    if find_spec("transformers") is None:
        return None
    try:
        return load_tokenizer(directory, needs_template=False)
    except RolloutError:
        return None


class _Fast:
    """Decodes like a Transformers tokenizer, without importing Transformers, which takes seconds.

    Args:
        directory: Directory with a `tokenizer.json`.
    """

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.added_tokens_decoder = self._tokenizer.get_added_tokens_decoder()
        named = _special_tokens(directory)
        ids = (self._tokenizer.token_to_id(token) for token in named)
        self.all_special_ids = [i for i in ids if i is not None]

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def decode(self, ids: list[int], **_: bool) -> str:
        """Decode ids; special tokens are kept, and spaces are not cleaned up."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _special_tokens(directory: Path) -> set[str]:
    """Return the special tokens named in a tokenizer's settings, such as `eos_token`."""
    texts = set()
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if not (directory / name).is_file():
            continue
        settings = json.loads(read_input(directory / name))
        more = settings.get("additional_special_tokens") or []
        single = [value for key, value in settings.items() if key.endswith("_token")]
        for token in (*single, *more):
            text = token.get("content") if isinstance(token, dict) else token
            texts |= {text} if isinstance(text, str) else set()
    return texts
