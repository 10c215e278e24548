"""Names and schemas of Gemini's API in the one form that the rest reads: as on the right.

{"generation_config": {"top_p": 1}}        {"generationConfig": {"topP": 1}}
{"type": "STRING", "nullable": true}       {"type": ["string", "null"]}

Arguments of calls and names of properties stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pipelines.record.bounds import check_density

_SNAKE = re.compile(rb'[{,]\s*"[a-z]+(?:_[a-z]+)+"\s*:')
_WORD = re.compile(r"_([a-z])")
_OPAQUE = frozenset(
    {"args", "response", "properties", "parametersJsonSchema", "responseJsonSchema"}
)
_SCHEMAS = ("anyOf", "items", "prefixItems", "additionalProperties")
_NUMBERS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def camel(body: bytes) -> bytes:
    """Return a request with names in camel case.

    Example:
        >>> camel(b'{"contents":[],"generation_config":{"top_p":1}}')
        b'{"contents":[],"generationConfig":{"topP":1}}'
    """
    if not _SNAKE.search(body):
        return body
    check_density(body)
    try:
        return msgspec.json.encode(_camel(msgspec.json.decode(body)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body  # its decoder says what is wrong


def _camel(value: Any) -> Any:
    if isinstance(value, list):
        return [_camel(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    named = {_WORD.sub(lambda found: found[1].upper(), name): each for name, each in value.items()}
    return {name: each if name in _OPAQUE else _camel(each) for name, each in named.items()}


def json_schema(given: Any) -> Any:
    """Return a schema as JSON Schema: types in lower case, null as a type, numbers as numbers.

    Example:
        >>> json_schema(
        ...     {"type": "OBJECT", "properties": {"n": {"type": "NUMBER", "nullable": True}}}
        ... )
        {'type': 'object', 'properties': {'n': {'type': ['number', 'null']}}}
    """
    if isinstance(given, list):
        return [json_schema(each) for each in given]
    if not isinstance(given, Mapping):
        return given
    made = {name: each for name, each in given.items() if name != "nullable"}
    kind = made.get("type")
    if isinstance(kind, str):
        made["type"] = [kind.lower(), "null"] if given.get("nullable") is True else kind.lower()
    for name in _SCHEMAS:
        if name in made:
            made[name] = json_schema(made[name])
    if isinstance(made.get("properties"), Mapping):
        made["properties"] = {name: json_schema(each) for name, each in made["properties"].items()}
    for name in _NUMBERS:
        if isinstance(made.get(name), str) and made[name].isdecimal():
            made[name] = int(made[name])
    return made
