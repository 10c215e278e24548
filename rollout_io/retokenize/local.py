"""Local tokenizers: directories, and models in the local Hugging Face cache."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from schemas.errors import InputError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE = "tokenizer.json"


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
        file = try_to_load_from_cache(name, _FILE)
    except HFValidationError:
        return None
    return str(Path(file).parent) if isinstance(file, str) else None


def tokenizer_directory(name: str) -> str:
    """Return the local directory of a tokenizer.

    Raises:
        InputError: `tokenizer`: neither a directory nor a model in the local cache.
    """
    found = find_tokenizer(name)
    if found is not None:
        return found
    got, hint = "the tokenizer directory does not exist", "pass the directory of a downloaded model"
    if _HUB_ID.fullmatch(name):
        got = "it is neither a directory nor a model in the local Hugging Face cache"
        hint = (
            f"download it: hf download {name} --include 'tokenizer*' '*.jinja'; or pass a directory"
        )
    raise InputError("tokenizer", name, got, "", hint)
