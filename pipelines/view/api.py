"""Routes of the viewer's API: each takes a path and a query, and returns JSON or Arrow."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from pipelines.http_server import read_body
from pipelines.view import run_files, runs, table, tokens, trajectories
from pipelines.view.annotations import spans, top_shares
from pipelines.view.dataset import Dataset, write_labels
from pipelines.view.responses import JSON, json_response
from pipelines.view.runs import Run
from pipelines.view.sources import Sources
from schemas.errors import InputError

_DEFAULT_LIMIT = 100
_DEFAULT_BINS = 40
_DEFAULT_TARGETS = 5000
MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Query:
    """Parameters of a request.

    Attributes:
        where: Path of the request, for error messages.
        values: Parameters of the path and the query, by name.
    """

    where: str
    values: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return a required parameter.

        Raises:
            InputError: `view_query`: the parameter is missing.
        """
        if name not in self.values:
            raise InputError("view_query", self.where, f"the parameter {name} is missing")
        return self.values[name]

    def optional(self, name: str) -> str | None:
        """Return a parameter; None if it is missing or empty."""
        return self.values.get(name) or None

    def number(self, name: str, default: int | None = None) -> int:
        """Parse a parameter as a non-negative integer; return `default` if it is missing.

        Raises:
            InputError: `view_query`: the parameter is not a number of at most 9 digits, or is
                missing and has no default.
        """
        text = self.values.get(name, "" if default is None else str(default))
        if not re.fullmatch(r"[0-9]{1,9}", text):
            finding = f"{name} must be a whole number of at most 9 digits, not {text[:40]!r}"
            raise InputError("view_query", self.where, finding)
        return int(text)


class Api:
    """Answers the page's requests about datasets and runs.

    Args:
        sources: The datasets and runs.

    Attributes:
        routes: The routes of the API.

    Example:
        >>> Api(Sources.open(["shop/"])).answer("/api/sources").media_type
        'application/json'
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.routes = [
            *(
                Route(f"/api/{path}", _endpoint(handler))
                for path, handler in (
                    ("sources", self._sources),
                    ("changes", self._changes),
                    ("runs/{run}/metrics", self._metrics),
                    ("runs/{run}/updates/{update}", self._update),
                    ("runs/{run}/updates/{update}/targets", self._targets),
                    ("datasets/{dataset}/trajectories", self._trajectories),
                    ("datasets/{dataset}/histogram", self._histogram),
                    ("datasets/{dataset}/group", self._group),
                    ("datasets/{dataset}/tasks", self._tasks),
                    ("datasets/{dataset}/task", self._task),
                    ("datasets/{dataset}/recorded", self._recorded),
                    ("datasets/{dataset}/tree", self._tree),
                    ("datasets/{dataset}/conversation", self._conversation),
                    ("datasets/{dataset}/picture", self._picture),
                    ("datasets/{dataset}/tokens", self._tokens),
                    ("datasets/{dataset}/verdicts", self._verdicts),
                    ("datasets/{dataset}/search", self._search),
                    ("shares/{share}", self._shares),
                    ("diff", self._diff),
                    ("diff/pair", self._pair),
                )
            ),
            Route("/api/datasets/{dataset}/labels", self._label, methods=["POST"]),
        ]

    def answer(self, url: str) -> Response:
        """Answer a GET request without a server.

        Args:
            url: Path and query, such as "/api/datasets/d0/trajectories?limit=50".

        Raises:
            RolloutError: The request is invalid, or a file cannot be read.
        """
        parts = urlsplit(url)
        about = {"method": "GET", "path": parts.path, "query_string": parts.query.encode()}
        scope = {"type": "http", "headers": [], **about}
        for route in self.routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                answered: Response = route.endpoint(Request({**scope, **child_scope}))
                return answered
        raise InputError("no_such_path", parts.path, "unknown path")

    async def _label(self, request: Request) -> Response:
        """Write posted labels to a copy of a dataset."""
        where, body = request.scope["path"], await _json_body(request)
        column, values, out = (body.get(name) for name in ("column", "values", "out"))
        if not (isinstance(column, str) and isinstance(out, str) and isinstance(values, dict)):
            finding = "the body must have the keys column (text), values (object) and out (text)"
            raise InputError("view_query", where, finding)
        dataset = self.sources.dataset(request.path_params["dataset"])
        written = await asyncio.to_thread(write_labels, dataset, column, values, out)
        return json_response(written)

    def _sources(self, _: Query) -> Response:
        return json_response(self.sources.describe())

    def _changes(self, _: Query) -> Response:
        return json_response({"stamp": self.sources.changes()})

    def _metrics(self, query: Query) -> Response:
        return json_response(run_files.read_metrics(self.sources.run(query.text("run")).path))

    def _update(self, query: Query) -> Response:
        return runs.update_rows(
            self.sources, self.sources.run(query.text("run")), query.number("update")
        )

    def _targets(self, query: Query) -> Response:
        limit = query.number("limit", _DEFAULT_TARGETS)
        run = self.sources.run(query.text("run"))
        return runs.update_targets(self.sources, run, query.number("update"), limit)

    def _trajectories(self, query: Query) -> Response:
        return table.window(
            self.sources.dataset(query.text("dataset")).index,
            where=query.optional("where"),
            sort=query.optional("sort"),
            descending=query.number("descending", 0) > 0,
            offset=query.number("offset", 0),
            limit=query.number("limit", _DEFAULT_LIMIT),
        )

    def _histogram(self, query: Query) -> Response:
        index, bins = (
            self.sources.dataset(query.text("dataset")).index,
            query.number("bins", _DEFAULT_BINS),
        )
        return table.histogram(index, query.text("column"), query.optional("where"), bins)

    def _group(self, query: Query) -> Response:
        dataset = self.sources.dataset(query.text("dataset"))
        return json_response(
            trajectories.group(dataset, query.text("instance_id"), *self._of(query))
        )

    def _tasks(self, query: Query) -> Response:
        lines = self.sources.dataset(query.text("dataset")).index.trajectories
        return json_response(trajectories.tasks(lines, query.number("limit", _DEFAULT_LIMIT)))

    def _task(self, query: Query) -> Response:
        dataset = self.sources.dataset(query.text("dataset"))
        return json_response(trajectories.text(dataset, query.text("instance_id")))

    def _recorded(self, query: Query) -> Response:
        """For each run, list the updates that recorded a task or, if requested, one of its rows."""
        dataset, row = self.sources.dataset(query.text("dataset")), None
        if "trajectory_id" in query.values:
            row = query.text("trajectory_id"), query.number("step_index", 0)
            at = dataset.index.number(row[0])
            instance_id = dataset.index.trajectories["instance_id"][at]
        else:
            instance_id = query.text("instance_id")
        recorded = {
            name: run.recorded_updates(dataset, instance_id, row)
            for name, run in self.sources.runs.items()
        }
        return json_response(recorded)

    def _tree(self, query: Query) -> Response:
        dataset = self.sources.dataset(query.text("dataset"))
        if "trajectory_id" in query.values:
            numbers = [dataset.index.number(query.text("trajectory_id"))]
        else:
            numbers = dataset.index.group(query.text("instance_id")).tolist()
        return json_response(tokens.tree(dataset, numbers, *self._of(query)))

    def _conversation(self, query: Query) -> Response:
        dataset = self.sources.dataset(query.text("dataset"))
        return json_response(trajectories.conversation(dataset, query.text("trajectory_id")))

    def _picture(self, query: Query) -> Response:
        dataset = self.sources.dataset(query.text("dataset"))
        return json_response({"url": dataset.picture(query.text("blob"))})

    def _tokens(self, query: Query) -> Response:
        dataset, step_index = (
            self.sources.dataset(query.text("dataset")),
            query.number("step_index", 0),
        )
        trajectory_id = query.text("trajectory_id")
        return tokens.tokens(dataset, trajectory_id, step_index, *self._of(query))

    def _verdicts(self, query: Query) -> Response:
        dataset = self.sources.dataset(query.text("dataset"))
        name, row = query.text("trajectory_id"), query.number("step_index", 0)
        row_spans = [] if dataset.verdicts is None else spans(dataset.verdicts, name, row)
        more = [one for one in dataset.findings.of(dataset, name) if one["row"] == row]
        return json_response({"spans": row_spans, "findings": more})

    def _shares(self, query: Query) -> Response:
        limit = query.number("limit", _DEFAULT_LIMIT)
        return top_shares(self.sources.share(query.text("share")).rows, limit)

    def _search(self, query: Query) -> Response:
        ids = query.optional("ids")
        if ids is not None and not re.fullmatch(r"[0-9]{1,9}([ ,]+[0-9]{1,9})*", ids):
            finding = f"ids must be whole numbers separated by commas or spaces, not {ids[:40]!r}"
            raise InputError("view_query", query.where, finding)
        hits = table.search(
            self.sources.dataset(query.text("dataset")),
            text=query.optional("text"),
            ids=None if ids is None else [int(i) for i in re.findall("[0-9]+", ids)],
            where=query.optional("where"),
            limit=query.number("limit", _DEFAULT_LIMIT),
        )
        return json_response(hits)

    def _diff(self, query: Query) -> Response:
        return table.diff(*self._pair_of(query), query.optional("where"))

    def _pair(self, query: Query) -> Response:
        return json_response(table.pairs(*self._pair_of(query), query.text("task")))

    def _pair_of(self, query: Query) -> tuple[Dataset, Dataset]:
        a, b = (self.sources.dataset(query.text(name)) for name in ("a", "b"))
        return a, b

    def _of(self, query: Query) -> tuple[Run | None, int | None]:
        """Return the run and update named in a request; (None, None) unless it names both."""
        if query.optional("run") is None or query.optional("update") is None:
            return None, None
        return self.sources.run(query.text("run")), query.number("update")


def _endpoint(handler: Callable[[Query], Response]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        values = {**request.query_params, **request.path_params}
        return handler(Query(request.scope["path"], values))

    return endpoint


async def _json_body(request: Request) -> dict[str, object]:
    where, kind = request.scope["path"], request.headers.get("content-type", "")
    kind = kind.partition(";")[0].strip().lower()
    if kind != JSON:
        raise InputError("media_type", where, f"the content type must be {JSON}, not {kind!r}")
    body = await read_body(request, MAX_BODY_BYTES)
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError("json_line", where, f"invalid JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise InputError("json_line", where, "the body is not a JSON object")
    return decoded
