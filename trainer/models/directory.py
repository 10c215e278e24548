"""Check a model directory without importing torch."""

from __future__ import annotations

import re
from pathlib import Path

from schemas.errors import InputError


def check_model_directory(path: str) -> None:
    """Check that a directory has a `config.json`.

    Raises:
        InputError: `model_directory`: the directory or its `config.json` does not exist.
    """
    if (Path(path) / "config.json").is_file():
        return
    got, hint = "config.json is missing from this model directory", None
    if not Path(path).is_dir():
        got = "the model directory does not exist"
        name = path if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) else "ORG/NAME"
        hint = f"download the model: `hf download {name} --local-dir DIR`, then pass DIR"
    raise InputError("model_directory", path, got, hint=hint)
