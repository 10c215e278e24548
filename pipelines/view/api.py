"""Routes of the viewer's API: each takes a path and a query, and returns JSON or Arrow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pipelines.view import attempts, diff, findings, labels, row_tokens, run_files, table, updates
from pipelines.view.answers import Answer, json_answer
from pipelines.view.conversation import conversation
from pipelines.view.prefix_icicle import tree
from pipelines.view.search import search
from pipelines.view.sources import Dataset, Run, Sources
from schemas.errors import InputError

_DEFAULT_LIMIT = 100
_DEFAULT_BINS = 40
_DEFAULT_TARGETS = 5000


@dataclass(frozen=True, slots=True)
class Query:
    """Query parameters of a request.

    Attributes:
        where: Path of the request, for error messages.
        values: Parameters by name.
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
        given = self.values.get(name, "" if default is None else str(default))
        if not re.fullmatch(r"[0-9]{1,9}", given):
            got = f"{name} must be a whole number of at most 9 digits, not {given[:40]!r}"
            raise InputError("view_query", self.where, got)
        return int(given)


class Api:
    """Answers the page's requests about datasets and runs.

    Args:
        sources: The datasets and runs.

    Example:
        >>> Api(Sources.open(["shop/"])).answer("/api/sources").kind
        'application/json'
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        part = "([a-z][0-9]+)"
        self._routes: list[tuple[re.Pattern[str], Callable[..., Answer]]] = [
            (re.compile(pattern.replace("{}", part).replace("{n}", "([0-9]{1,9})")), handler)
            for pattern, handler in (
                ("/api/sources", self._sources),
                ("/api/runs/{}/metrics", self._metrics),
                ("/api/runs/{}/updates/{n}", self._update),
                ("/api/runs/{}/updates/{n}/targets", self._targets),
                ("/api/datasets/{}/trajectories", self._trajectories),
                ("/api/datasets/{}/histogram", self._histogram),
                ("/api/datasets/{}/group", self._group),
                ("/api/datasets/{}/tasks", self._tasks),
                ("/api/datasets/{}/recorded", self._recorded),
                ("/api/datasets/{}/tree", self._tree),
                ("/api/datasets/{}/conversation", self._conversation),
                ("/api/datasets/{}/tokens", self._tokens),
                ("/api/datasets/{}/verdicts", self._verdicts),
                ("/api/datasets/{}/search", self._search),
                ("/api/shares/{}", self._shares),
                ("/api/diff", self._diff),
                ("/api/diff/pair", self._pair),
            )
        ]
        self._labels = re.compile(f"/api/datasets/{part}/labels")

    def answer(self, url: str) -> Answer:
        """Answer a GET request.

        Args:
            url: Path and query, such as "/api/datasets/d0/trajectories?limit=50".

        Raises:
            RolloutError: The request is invalid, or a file cannot be read.
        """
        parts = urlsplit(url)
        values = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=50)
        query = Query(parts.path, dict(values))
        for pattern, handler in self._routes:
            if found := pattern.fullmatch(parts.path):
                return handler(*found.groups(), query)
        raise InputError("no_such_path", parts.path, "unknown path")

    def is_labels(self, path: str) -> bool:
        """True if labels are posted to this path."""
        return self._labels.fullmatch(path) is not None

    def label(self, path: str, given: Mapping[str, Any]) -> Answer:
        """Write posted labels to a copy of a dataset."""
        found = self._labels.fullmatch(path)
        assert found is not None
        column, values, out = (given.get(name) for name in ("column", "values", "out"))
        is_sound = isinstance(column, str) and isinstance(out, str) and isinstance(values, dict)
        if not is_sound:
            got = "the body must have the keys column (text), values (object) and out (text)"
            raise InputError("view_query", path, got)
        assert isinstance(column, str)
        assert isinstance(out, str)
        assert isinstance(values, dict)
        dataset = self.sources.dataset(found[1])
        return json_answer(labels.write_labels(dataset, column, values, out))

    def _sources(self, _: Query) -> Answer:
        return json_answer(self.sources.describe())

    def _metrics(self, run: str, _: Query) -> Answer:
        return json_answer(run_files.read_metrics(self.sources.run(run).path))

    def _update(self, run: str, update: str, _: Query) -> Answer:
        return updates.update_rows(self.sources, self.sources.run(run), int(update))

    def _targets(self, run: str, update: str, query: Query) -> Answer:
        limit = query.number("limit", _DEFAULT_TARGETS)
        found = self.sources.run(run)
        return updates.update_targets(self.sources, found, int(update), limit)

    def _trajectories(self, number: str, query: Query) -> Answer:
        return table.window(
            self.sources.dataset(number).index,
            where=query.optional("where"),
            sort=query.optional("sort"),
            descending=query.number("descending", 0) > 0,
            offset=query.number("offset", 0),
            limit=query.number("limit", _DEFAULT_LIMIT),
        )

    def _histogram(self, number: str, query: Query) -> Answer:
        index, bins = self.sources.dataset(number).index, query.number("bins", _DEFAULT_BINS)
        return table.histogram(index, query.text("column"), query.optional("where"), bins)

    def _group(self, number: str, query: Query) -> Answer:
        dataset = self.sources.dataset(number)
        return json_answer(attempts.group(dataset, query.text("instance_id"), *self._of(query)))

    def _tasks(self, number: str, query: Query) -> Answer:
        lines = self.sources.dataset(number).index.trajectories
        return json_answer(attempts.tasks(lines, query.number("limit", _DEFAULT_LIMIT)))

    def _recorded(self, number: str, query: Query) -> Answer:
        """For each run, list the updates that recorded a task or, if requested, one of its rows."""
        dataset, row = self.sources.dataset(number), None
        if "trajectory_id" in query.values:
            row = query.text("trajectory_id"), query.number("step_index", 0)
            at = dataset.index.number(row[0])
            instance_id = dataset.index.trajectories["instance_id"][at]
        else:
            instance_id = query.text("instance_id")
        runs = self.sources.runs.items()
        return json_answer(
            {name: run.recorded_updates(dataset, instance_id, row) for name, run in runs}
        )

    def _tree(self, number: str, query: Query) -> Answer:
        dataset = self.sources.dataset(number)
        if "trajectory_id" in query.values:
            numbers = [dataset.index.number(query.text("trajectory_id"))]
        else:
            numbers = dataset.index.group(query.text("instance_id")).tolist()
        return json_answer(tree(dataset, numbers, *self._of(query)))

    def _conversation(self, number: str, query: Query) -> Answer:
        dataset = self.sources.dataset(number)
        return json_answer(conversation(dataset, query.text("trajectory_id")))

    def _tokens(self, number: str, query: Query) -> Answer:
        dataset, step_index = self.sources.dataset(number), query.number("step_index", 0)
        trajectory_id = query.text("trajectory_id")
        return row_tokens.tokens(dataset, trajectory_id, step_index, *self._of(query))

    def _verdicts(self, number: str, query: Query) -> Answer:
        verdicts = self.sources.dataset(number).verdicts
        row = query.text("trajectory_id"), query.number("step_index", 0)
        return json_answer({"spans": [] if verdicts is None else findings.spans(verdicts, *row)})

    def _shares(self, number: str, query: Query) -> Answer:
        limit = query.number("limit", _DEFAULT_LIMIT)
        return findings.top_shares(self.sources.share(number).rows, limit)

    def _search(self, number: str, query: Query) -> Answer:
        given = query.optional("ids")
        if given is not None and not re.fullmatch(r"[0-9]{1,9}([ ,]+[0-9]{1,9})*", given):
            got = f"ids must be whole numbers separated by commas or spaces, not {given[:40]!r}"
            raise InputError("view_query", query.where, got)
        found = search(
            self.sources.dataset(number),
            text=query.optional("text"),
            ids=None if given is None else [int(i) for i in re.findall("[0-9]+", given)],
            where=query.optional("where"),
            limit=query.number("limit", _DEFAULT_LIMIT),
        )
        return json_answer(found)

    def _diff(self, query: Query) -> Answer:
        return diff.diff(*self._pair_of(query), query.optional("where"))

    def _pair(self, query: Query) -> Answer:
        return json_answer(diff.pairs(*self._pair_of(query), query.text("instance_id")))

    def _pair_of(self, query: Query) -> tuple[Dataset, Dataset]:
        a, b = (self.sources.dataset(query.text(name)) for name in ("a", "b"))
        return a, b

    def _of(self, query: Query) -> tuple[Run | None, int | None]:
        """Return the run and update named in a request; (None, None) unless it names both."""
        if query.optional("run") is None or query.optional("update") is None:
            return None, None
        return self.sources.run(query.text("run")), query.number("update")
