"""Check a model directory without importing torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rollout_io.dataset.opening import read_input
from schemas.errors import InputError, RolloutError

_MOST_BYTES = 64 << 20


def check_model_directory(path: str) -> None:
    """Check that a directory has a `config.json` with a JSON object.

    Raises:
        InputError: `model_directory`: the directory or its `config.json` does not exist, or it is
            no JSON object, or nested too deeply.
    """
    file = Path(path) / "config.json"
    if file.is_file():
        try:
            is_object = isinstance(json.loads(read_input(file, _MOST_BYTES)), dict)
            finding = "config.json is not a JSON object"
        except ValueError as error:
            if isinstance(error, RolloutError):
                raise
            is_object, finding = False, f"config.json is not JSON: {error}"
        except RecursionError:
            is_object, finding = False, "config.json is nested too deeply"
        if is_object:
            return
        raise InputError("model_directory", path, finding, hint="download config.json again")
    hint: str | None = None
    finding = "config.json is missing from this model directory"
    if not Path(path).is_dir():
        finding = "the model directory does not exist"
        name = path if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) else "ORG/NAME"
        hint = f"download the model: `hf download {name} --local-dir DIR`, then pass DIR"
    raise InputError("model_directory", path, finding, hint=hint)


def has_weights(path: str) -> bool:
    """True unless a model directory has a configuration, but no file of weights."""
    names = [file.name for file in Path(path).iterdir()] if Path(path).is_dir() else []
    return "config.json" not in names or any(n.endswith((".safetensors", ".bin")) for n in names)


def code_of(path: str) -> str:
    """Return the classes of Python code that the directory of a model asks for (`auto_map`)."""
    config: Any = json.loads(read_input(Path(path) / "config.json", _MOST_BYTES))
    named = config.get("auto_map")
    values = named.values() if isinstance(named, dict) else [named] if named else []
    return ", ".join(sorted({str(value) for value in values}))
