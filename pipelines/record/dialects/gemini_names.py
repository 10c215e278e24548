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

from pipelines.record.upstreams import check_density

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
        return [_camel(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    named = {
        _WORD.sub(lambda match: match[1].upper(), name): inner for name, inner in value.items()
    }
    return {name: inner if name in _OPAQUE else _camel(inner) for name, inner in named.items()}


def json_schema(schema: Any) -> Any:
    """Return a schema as JSON Schema: types in lower case, null as a type, numbers as numbers.

    Example:
        >>> json_schema(
        ...     {"type": "OBJECT", "properties": {"n": {"type": "NUMBER", "nullable": True}}}
        ... )
        {'type': 'object', 'properties': {'n': {'type': ['number', 'null']}}}
    """
    if isinstance(schema, list):
        return [json_schema(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    converted = {name: inner for name, inner in schema.items() if name != "nullable"}
    kind = converted.get("type")
    if isinstance(kind, str):
        converted["type"] = (
            [kind.lower(), "null"] if schema.get("nullable") is True else kind.lower()
        )
    for name in _SCHEMAS:
        if name in converted:
            converted[name] = json_schema(converted[name])
    if isinstance(converted.get("properties"), Mapping):
        converted["properties"] = {
            name: json_schema(inner) for name, inner in converted["properties"].items()
        }
    for name in _NUMBERS:
        if isinstance(converted.get(name), str) and converted[name].isdecimal():
            converted[name] = int(converted[name])
    return converted
