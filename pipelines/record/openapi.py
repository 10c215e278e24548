"""OpenAPI 3.1 description of an API, generated from its operations and their message types."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipelines.http_server import JSON

OF_SESSION = "/s/{instance}/{repetition}"
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Repetition = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]

_IN_PATH: dict[str, Any] = {"instance": Name, "repetition": Repetition, "model": Name}
_NAMED = re.compile(r"\{(\w+)\}")
_REFUSAL = {
    "description": "Rejected by the recorder or the engine: {error: {message, type, code}}.",
    "content": {JSON: {"schema": {"type": "object"}}},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """A route, and its entry in the description.

    Attributes:
        method: HTTP method.
        path: Path of the route, after the session if it has one, in Starlette's syntax.
        handle: The handler.
        summary: One line for the description.
        body: Type of the request's body; None if it has none.
        answer: Type of the response's body.
        statuses: Statuses of a response that is no error.
        media: Media types of the response.
        prefixes: Where the route is described: at the root, in a session, or both.
        shown: Path in the description, if it differs.
    """

    method: str
    path: str
    handle: Callable[[Request], Awaitable[Response]]
    summary: str
    body: Any = None
    answer: Any = dict
    statuses: Sequence[int] = (200,)
    media: Sequence[str] = (JSON,)
    prefixes: Sequence[str] = ("",)
    shown: str | None = None

    @property
    def route(self) -> Route:
        """The route."""
        return Route(self.path, self.handle, methods=[self.method])


def description(title: str, operations: Iterable[Operation]) -> dict[str, Any]:
    """Describe an API."""
    operations = list(operations)
    types: list[Any] = [*_IN_PATH.values()]
    types += [t for operation in operations for t in (operation.body, operation.answer) if t]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(map(repr, types), schemas, strict=True))

    def content(kind: Any, media: Iterable[str] = (JSON,)) -> dict[str, Any]:
        return {name: {"schema": schema_of[repr(kind)]} for name in media}

    def entry(operation: Operation, prefix: str) -> dict[str, Any]:
        answer = {
            "description": "The response.",
            "content": content(operation.answer, operation.media),
        }
        responses = {str(status): answer for status in operation.statuses}
        described: dict[str, Any] = {
            "summary": operation.summary,
            "responses": responses | {"default": _REFUSAL},
        }
        if operation.body is not None:
            described["requestBody"] = {"required": True, "content": content(operation.body)}
        if named := _NAMED.findall(path_of(operation, prefix)):
            described["parameters"] = [
                {
                    "name": name,
                    "in": "path",
                    "required": True,
                    "schema": schema_of[repr(_IN_PATH[name])],
                }
                for name in named
            ]
        return described

    def path_of(operation: Operation, prefix: str) -> str:
        path = operation.shown or operation.path
        return prefix + (path if path != "/" else "")

    paths: dict[str, Any] = {}
    for operation in operations:
        for prefix in operation.prefixes:
            described = paths.setdefault(path_of(operation, prefix), {})
            described[operation.method.lower()] = entry(operation, prefix)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }
