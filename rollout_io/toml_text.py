"""Write values as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(values: Mapping[str, Any]) -> str:
    """Write a configuration as TOML that `rollout_io.configuration.load_record` reads back; None is written as "none".

    Example:
        >>> print(to_toml({"rate": 0.5, "limit": None, "loss": {"eps": 1, "names": ("a",)}}))
        rate = 0.5
        limit = "none"
        <BLANKLINE>
        [loss]
        eps = 1
        names = ["a"]
    """
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in values.items() if key not in tables}
    parts = ["\n".join(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items())]
    for name, table in tables.items():
        lines = (f"{_toml_key(key)} = {_toml_value(value)}" for key, value in table.items())
        parts.append("\n".join([f"[{_toml_key(name)}]", *lines]))
    return "\n\n".join(part for part in parts if part)


def _toml_key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else _toml_text(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(k)} = {_toml_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str | None):
        return _toml_text("none" if value is None else value)
    return json.dumps(value)


def _toml_text(text: str) -> str:
    """Quote text for TOML, which has no surrogate pairs and, unlike JSON, escapes DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
