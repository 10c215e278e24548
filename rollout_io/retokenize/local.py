"""Local tokenizers: directories, and models in the local Hugging Face cache."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import InputError

if TYPE_CHECKING:
    from schemas.metadata import DatasetMetadata

FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Glob patterns of tokenizer files; a tokenizer directory has a file that matches one of them."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def find_tokenizer(name: str | None) -> str | None:
    """Return the local directory of a tokenizer, or None; nothing is downloaded.

    Args:
        name: Directory, or id on the Hugging Face Hub ("org/model"), which is looked up in the
            local cache (`HF_HOME`).
    """
    if not name or Path(name).is_dir():
        return name or None
    if find_spec("huggingface_hub") is None or Path(name).is_absolute():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None
    return str(Path(file).parent) if isinstance(file, str) else None


def remembered_tokenizer(metadata: DatasetMetadata) -> str | None:
    """Return the local directory of a dataset's tokenizer; None if it is missing or has changed."""
    directory = find_tokenizer(metadata.tokenizer) if metadata.tokenizer_fingerprint else None
    if directory is None or metadata.tokenizer_fingerprint is None:
        return None
    return directory if has_fingerprint(directory, metadata.tokenizer_fingerprint) else None


def has_fingerprint(directory: str, fingerprint: str) -> bool:
    """True if a directory has the tokenizer of a fingerprint; False too if it cannot be read."""
    if find_spec("tokenizers") is None:
        return False
    import hashlib  # loads OpenSSL

    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(Path(directory) / "tokenizer.json")).get_vocab()
    except Exception:  # tokenizers raises bare Exception
        return False
    found = hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()
    return found == fingerprint


def tokenizer_directory(name: str) -> str:
    """Return the local directory of a tokenizer, without loading it.

    Raises:
        InputError: `tokenizer`: neither a directory with a tokenizer nor a model in the local
            cache.
    """
    refuse_no_tokenizer(name)
    found = find_tokenizer(name)
    if found is not None:
        return found
    got = "the tokenizer is neither a directory nor a model in the local Hugging Face cache"
    hint = f"download it: hf download {name} --include 'tokenizer*' '*.jinja'; or pass a directory"
    raise InputError("tokenizer", name, got, "", hint)


def refuse_no_tokenizer(name: str) -> None:
    """Check that a path is a directory with a tokenizer; Hub ids are not checked.

    Raises:
        InputError: `tokenizer`: the path does not exist, or is not such a directory.
    """
    path, hint = Path(name), "pass the directory of a downloaded model"
    if path.is_dir():
        if has_tokenizer(path):
            return
        got = "the directory contains no tokenizer"
    elif path.exists():
        got = "the path is not a directory"
        hint = f"pass the directory of the tokenizer: {path.parent}"
    elif _HUB_ID.fullmatch(name):
        return
    else:
        got = "the tokenizer directory does not exist"
    raise InputError("tokenizer", name, got, "", hint)


def has_tokenizer(directory: Path) -> bool:
    """True if a directory contains a file of a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in FILES)
