"""Local tokenizers: directories, and models in the local Hugging Face cache."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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


def not_found(name: str) -> str:
    """Return a clause that says where a tokenizer or model was not found.

    Example:
        >>> not_found("/models/qwen"), not_found("models/qwen")
        ('is not on this machine',
         'is not on this machine (looked in the current directory and the Hugging Face cache)')
    """
    absent = "is not on this machine"
    if Path(name).is_absolute():
        return absent
    return f"{absent} (looked in the current directory and the Hugging Face cache)"


def remembered_tokenizer(metadata: DatasetMetadata) -> str | None:
    """Return the local directory of a dataset's tokenizer, or None if it is missing or changed."""
    directory = find_tokenizer(metadata.tokenizer) if metadata.tokenizer_fingerprint else None
    if directory is None or metadata.tokenizer_fingerprint is None:
        return None
    return directory if has_fingerprint(directory, metadata.tokenizer_fingerprint) else None


def has_fingerprint(directory: str, fingerprint: str) -> bool:
    """True if the tokenizer in a directory has this fingerprint; false if it cannot be read."""
    return fingerprint_of(Path(directory) / "tokenizer.json") == fingerprint


def fingerprint_of(file: Path) -> str | None:
    """Return the fingerprint of a `tokenizer.json`; None if it cannot be read."""
    if find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    try:
        return vocabulary_fingerprint(Tokenizer.from_file(str(file)).get_vocab())
    except Exception:  # tokenizers raises bare Exception
        return None


def tokenizer_file(name: str) -> Path:
    """Return the path of the `tokenizer.json` that a name refers to; it may not exist.

    Args:
        name: The file itself, its directory, or a Hub id in the local cache.

    Raises:
        InputError: `tokenizer`: see `tokenizer_directory`.
    """
    path = Path(name)
    return path if path.is_file() else Path(tokenizer_directory(name)) / "tokenizer.json"


def is_other_tokenizer(name: str, metadata: DatasetMetadata) -> bool:
    """True if a tokenizer is known to differ from a dataset's tokenizer.

    False if either has no fingerprint: a dataset that was converted without a tokenizer, or a
    tokenizer without `tokenizer.json`.
    """
    if metadata.tokenizer_fingerprint is None:
        return False
    return fingerprint_of(tokenizer_file(name)) not in {None, metadata.tokenizer_fingerprint}


def about_other_tokenizer(name: str, metadata: DatasetMetadata) -> str:
    """Return the warning about a tokenizer that differs from the dataset's."""
    of_dataset = metadata.tokenizer or "name unknown"
    return f"{name} is not the tokenizer of the dataset ({of_dataset}): decoded text may be wrong"


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Return the fingerprint of a tokenizer: the SHA-256 (hex) of its mapping from tokens to ids.

    Args:
        vocabulary: Ids by token, including added tokens.
    """
    import hashlib  # imported here because it loads OpenSSL

    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()


def tokenizer_directory(name: str) -> str:
    """Return the local directory of a tokenizer, without loading it.

    Args:
        name: Directory, or id on the Hugging Face Hub, which is looked up in the local cache.

    Raises:
        InputError: `tokenizer`: the path is neither a directory with a tokenizer nor a model in the
            local cache.
    """
    path, hint = Path(name), "pass the directory of a downloaded model"
    if path.is_dir():
        if has_tokenizer(path):
            return name
        finding = "the directory contains no tokenizer"
    elif path.exists():
        finding = "the path is not a directory"
        hint = f"pass the directory of the tokenizer: {path.parent}"
    elif _HUB_ID.fullmatch(name):
        directory = find_tokenizer(name)
        if directory is not None:
            return directory
        finding = "the tokenizer is neither a directory nor a model in the local Hugging Face cache"
        hint = (
            f"download it: hf download {name} --include 'tokenizer*' '*.jinja'; or pass a directory"
        )
    else:
        finding = "the tokenizer directory does not exist"
    near = None if path.exists() else _near(path)
    raise InputError(
        "tokenizer", name, finding, "", hint if near is None else f"did you mean {near}?"
    )


def _near(path: Path) -> Path | None:
    """Return the tokenizer directory that was probably meant by a missing path, or None.

    It has the same path in a subdirectory of the working directory (`smollm2` for
    `.cache/smollm2`), or a similar name in the same directory.
    """
    from difflib import get_close_matches  # imported here because only errors need it

    try:
        names = [child.name for child in path.parent.iterdir()] if path.name else []
        near = [path.parent / name for name in get_close_matches(path.name, names)]
        if not path.is_absolute():
            near = [child / path for child in sorted(Path().iterdir())] + near
        return next((folder for folder in near if folder.is_dir() and has_tokenizer(folder)), None)
    except (OSError, ValueError):  # an unreadable directory; a NUL byte in the name
        return None


def has_tokenizer(directory: Path) -> bool:
    """True if a directory contains a file of a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in FILES)
