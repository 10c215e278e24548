"""OpenAPI 3.1 description of the recorder's API."""

from __future__ import annotations

from typing import Any

_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_WHOLE = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_ERROR = {
    "description": "Rejected by the recorder or the engine: {error: {message, type, code}}.",
    "content": {"application/json": {"schema": {"type": "object"}}},
}


def _json(schema: dict[str, Any], description: str = "JSON.") -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required or [],
        "additionalProperties": False,
    }


def _operation(
    summary: str,
    answers: dict[str, Any],
    body: dict[str, Any] | None = None,
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    made: dict[str, Any] = {"summary": summary, "responses": answers | {"default": _ERROR}}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if parameters is not None:
        made["parameters"] = parameters
    return made


def _in_path(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


_SESSION = [
    _in_path("instance", {"type": "string", "minLength": 1, "maxLength": 200}),
    _in_path("repetition", _WHOLE),
]
_MESSAGE = {"type": "object", "properties": {"role": _TEXT, "content": _TEXT}, "required": ["role"]}
_CHAT = {
    "type": "object",
    "properties": {
        "model": _TEXT,
        "messages": {"type": "array", "items": _MESSAGE},
        "stream": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 1, "maximum": 4},
        "logprobs": {"type": "boolean"},
    },
    "required": ["model", "messages"],
}
_COMPLETION = {
    "type": "object",
    "properties": {"model": _TEXT, "prompt": _TEXT, "stream": {"type": "boolean"}},
    "required": ["model", "prompt"],
}
_OUTCOME = _object(
    {
        "reward": {"type": ["number", "null"]},
        "error": {"type": ["string", "null"], "minLength": 1},
        "metrics": {"type": "object", "additionalProperties": _NUMBER},
    }
)
_OPENED = _object(
    {"session": _TEXT, "base_url": _TEXT, "url": _TEXT}, ["session", "base_url", "url"]
)
_OPENING = _object(
    {"instance_id": {"type": "string", "minLength": 1, "maxLength": 200}, "repetition_id": _WHOLE},
    ["instance_id"],
)
_VERSION = _object(
    {"policy_version": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}, ["policy_version"]
)
_ANY: dict[str, Any] = {"type": "object"}
_ANSWER = {
    "description": "The engine's response, streamed or not.",
    "content": {"application/json": {"schema": _ANY}, "text/event-stream": {"schema": _ANY}},
}
_CALLS = {
    "chat/completions": _operation("Create and record a chat completion.", {"200": _ANSWER}, _CHAT),
    "completions": _operation(
        "Create and record a text completion.", {"200": _ANSWER}, _COMPLETION
    ),
}
_METRICS = {"description": "Prometheus text format.", "content": {"text/plain": {"schema": _TEXT}}}
_OF_SESSION = "/s/{instance}/{repetition}"

DESCRIPTION: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "rollouts record", "version": "1"},
    "paths": {
        **{f"/v1/{name}": {"post": call} for name, call in _CALLS.items()},
        **{
            f"{_OF_SESSION}/v1/{name}": {"post": {**call, "parameters": _SESSION}}
            for name, call in _CALLS.items()
        },
        "/v1/models": {"get": _operation("List the engine's models.", {"200": _json(_ANY)})},
        "/sessions": {"post": _operation("Open a session.", {"201": _json(_OPENED)}, _OPENING)},
        f"{_OF_SESSION}/end": {
            "post": _operation("End a session.", {"200": _json(_ANY)}, _OUTCOME, _SESSION)
        },
        _OF_SESSION: {
            "get": _operation("Get the state of a session.", {"200": _json(_ANY)}, None, _SESSION)
        },
        "/policy_version": {
            "post": _operation(
                "Set the version of the weights.", {"200": _json(_VERSION)}, _VERSION
            )
        },
        "/health": {
            "get": _operation(
                "Report whether calls can be written.", {"200": _json(_ANY), "507": _json(_ANY)}
            )
        },
        "/metrics": {"get": _operation("Get metrics for Prometheus.", {"200": _METRICS})},
    },
}
