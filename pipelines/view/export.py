"""Export the viewer as one HTML file: the report page with the answers to its requests embedded.

The file stores blobs: raw deflate streams in base64, which browsers decompress. The first blob is a
JSON index, which maps the key of each answer to its position. JSON answers are concatenated in
blobs of about 100 KB. Tables with the same columns are concatenated in one Arrow stream, and an
answer is a range of its records, so that ids and numbers of all rows are compressed together; token
ids are indices into one vocabulary.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import msgspec
import numpy as np
import pyarrow as pa
from starlette.responses import Response

from pipelines.view import trajectories
from pipelines.view.annotations import SHARE
from pipelines.view.api import Api
from pipelines.view.app import Bundle
from pipelines.view.dataset import Dataset, TokensMissing
from pipelines.view.responses import JSON, json_response
from pipelines.view.run_files import FLAGS, NUMBERS, read_tokens
from pipelines.view.sources import Sources
from rollout_io.dataset.filesystems import replace_text
from rollout_io.dataset.locking import destination
from schemas.columns import TASK
from schemas.errors import InputError, count
from schemas.numpy_arrays import filled, to_arrow, to_numpy
from schemas.ragged import IntArray

NUM_TASKS = 200
"""Maximum number of tasks that an exported file lists."""
NUM_TARGETS = 2000
"""Maximum number of targets per update in an exported file."""
NUM_SHARES = 100
"""Maximum number of rows per table of row shares in an exported file."""

_SCRIPT = re.compile(r'<script type="module"[^>]*></script>')
_STYLE = re.compile(r'<link rel="stylesheet"[^>]*>')
_RECORDED = frozenset({*NUMBERS.values(), *FLAGS})
_UNQUOTED = "-_.!~*'()"  # characters that encodeURIComponent keeps

_NO_PICTURE = json_response({"url": None}).body

_LEVEL = _MEMORY_LEVEL = 9
_TEXT_BYTES = 100_000


def key_of(path: str, **parameters: object) -> str:
    """Return the key of an answer: the request's path, with its parameters sorted by name.

    Example:
        >>> key_of("/api/datasets/d0/tokens", trajectory_id="a 0", step_index=1, run=None)
        '/api/datasets/d0/tokens?step_index=1&trajectory_id=a%200'
    """
    pairs = sorted((name, value) for name, value in parameters.items() if value is not None)
    query = "&".join(f"{name}={quote(str(value), safe=_UNQUOTED)}" for name, value in pairs)
    return f"{path}?{query}" if query else path


def export(sources: Sources, bundle: Bundle, out: str, *, where: str | None, limit: int) -> str:
    """Write one HTML file with the page and the data of the selected trajectories.

    Args:
        sources: The datasets and runs.
        bundle: The built page.
        out: HTML file; an existing file is replaced.
        where: Condition on the rows of a trajectory.
        limit: Maximum number of trajectories of each dataset.

    Returns:
        The number of trajectories, the size of the file, and the number of pictures that are missing,
        changed, or too large, as text for the user.

    Raises:
        InputError: `output_file`: `out` is a directory; `nothing_left`: no trajectory is selected.
        ConfigError: `condition`: the condition is not SQL or cannot be evaluated on each row;
            `known_column`: it uses an unknown column.
    """
    if Path(out).is_dir():
        raise InputError("output_file", out, "a directory with that name exists")
    chosen = {
        number: _chosen(dataset, where, limit) for number, dataset in sources.datasets.items()
    }
    if not any(len(numbers) for numbers in chosen.values()) and not sources.runs:
        finding = "no trajectory matches" if where else "there are no trajectories to export"
        raise InputError("nothing_left", where or "dataset", finding)
    with destination(out, noun="path"):
        packing, num_missing = Packing(), 0
        for key, answer in _responses(sources, chosen, where, limit):
            _add(packing, key, answer)
            num_missing += answer.body == _NO_PICTURE
        replace_text(Path(out), inlined(bundle, packing.blobs()))
    size = f"{os.path.getsize(out) / 1e6:.1f} MB"  # noqa: PTH202
    missing = [f"without {count(num_missing, 'picture')} that cannot be read"] * bool(num_missing)
    return ", ".join([count(sum(map(len, chosen.values())), "trajectory"), size, *missing])


def _add(packing: Packing, key: str, answer: Response) -> None:
    """Pack an answer.

    All token tables of a dataset are stored as one table. The columns of each update, and each
    column of row shares, are stored as separate tables.
    """
    if answer.media_type == JSON:
        packing.add_text(key, bytes(answer.body))
        return
    table = pa.ipc.open_stream(answer.body).read_all()
    parts = urlsplit(key)
    if not parts.path.endswith("/tokens"):
        packing.add_table(key, {(key, ""): table})
        return
    parameters = dict(parse_qsl(parts.query))
    row = f"{parameters['trajectory_id']} {parameters['step_index']}"
    recorded = [name for name in table.column_names if name in _RECORDED]
    shares = [name for name in table.column_names if name.startswith(SHARE)]
    stored = {(parts.path, row): table.drop_columns([*recorded, *shares])}
    for name in shares:  # rows of other updates lack the column
        stored[f"{parts.path} {name}", row] = table.select([name])
    if recorded:
        stored[f"{parts.path} {parameters['run']} {parameters['update']}", row] = table.select(
            recorded
        )
    packing.add_table(key, stored)


def _chosen(dataset: Dataset, where: str | None, limit: int) -> IntArray:
    mask = dataset.index.matching(where)
    matches = np.arange(len(dataset.index)) if mask is None else np.flatnonzero(mask)
    return matches[:limit]


def _responses(
    sources: Sources, chosen: dict[str, IntArray], where: str | None, limit: int
) -> Iterator[tuple[str, Response]]:
    """Yield the answers that the page requests, with their keys."""
    api = Api(sources)
    described = sources.describe()
    totals = {number: len(numbers) for number, numbers in chosen.items()}
    selected = {"where": where, "limit": limit, "num_trajectories": totals}
    yield "/api/sources", json_response(described | {"export": selected})

    def asked(path: str, **parameters: object) -> tuple[str, Response]:
        key = key_of(path, **parameters)
        return key, api.answer(key)

    for number, numbers in chosen.items():
        root, index = f"/api/datasets/{number}", sources.datasets[number].index
        window = key_of(f"{root}/trajectories", offset=0, limit=limit)
        filtered = key_of(f"{root}/trajectories", offset=0, limit=limit, where=where)
        yield window, api.answer(filtered)
        lines = index.trajectories[numbers]
        of_groups = index.trajectories.join(
            lines, on="instance_id", how="semi", maintain_order="left"
        )
        yield (
            key_of(f"{root}/tasks", limit=NUM_TASKS),
            json_response(trajectories.tasks(of_groups, NUM_TASKS)),
        )
        has_tokens = sources.datasets[number].has_tokens
        for instance_id in lines["instance_id"].unique(maintain_order=True):
            yield asked(f"{root}/group", instance_id=instance_id)
            yield asked(f"{root}/task", instance_id=instance_id)
            if has_tokens:
                yield asked(f"{root}/tree", instance_id=instance_id)
            if sources.runs:
                yield asked(f"{root}/recorded", instance_id=instance_id)
        pictures = set[str]()
        for name, num_rows in lines.select("trajectory_id", "num_rows").rows():
            if has_tokens:
                yield asked(f"{root}/tree", trajectory_id=name)
            key, answer = asked(f"{root}/conversation", trajectory_id=name)
            yield key, answer
            shown = _pictures(answer)
            for step in range(num_rows if has_tokens else 0):
                with suppress(TokensMissing):  # of logs, only some trajectories may have tokens
                    key, answer = asked(f"{root}/tokens", trajectory_id=name, step_index=step)
                    yield key, answer
                    shown |= _pictures(answer)
                if (
                    sources.datasets[number].verdicts is not None
                    or sources.datasets[number].findings
                ):
                    yield asked(f"{root}/verdicts", trajectory_id=name, step_index=step)
                if sources.runs:
                    yield asked(f"{root}/recorded", trajectory_id=name, step_index=step)
            for blob in sorted(shown - pictures):
                yield asked(f"{root}/picture", blob=blob)
            pictures |= shown
    for number in sources.shares:
        yield asked(f"/api/shares/{number}", limit=NUM_SHARES)
    for number in sources.runs:
        yield asked(f"/api/runs/{number}/metrics")
        for update in _updates(described, number):
            root = f"/api/runs/{number}/updates/{update}"
            yield asked(root)
            yield asked(f"{root}/targets", limit=NUM_TARGETS)
            for path, parameters in _recorded(sources, number, update, chosen):
                yield asked(path, **parameters, run=number, update=update)
    if len(sources.datasets) > 1:
        a, b = sources.compared_pair() or list(sources.datasets)[:2]
        yield asked("/api/diff", a=a, b=b)
        tasks = [sources.datasets[n].index.trajectories[chosen[n]] for n in (a, b)]
        both = tasks[0].join(tasks[1], on=TASK, how="semi")
        for task in both[TASK].unique(maintain_order=True):
            yield asked("/api/diff/pair", a=a, b=b, task=task)


def _pictures(answer: Response) -> set[str]:
    """Return the references to the pictures that a conversation, or the tokens of a row, show."""
    if answer.media_type != JSON:
        metadata = pa.ipc.open_stream(answer.body).schema.metadata
        return {picture["sha256"] for picture in json.loads(metadata[b"pictures"])}
    lanes = json.loads(bytes(answer.body))["lanes"]
    parts = (part for lane in lanes for turn in lane["turns"] for part in turn["parts"])
    return {
        part["text"]
        for part in parts
        if part["type"] == "image" and part["text"].startswith("sha256:")
    }


def _updates(described: dict[str, object], number: str) -> list[int]:
    runs = described["runs"]
    assert isinstance(runs, list)
    updates: list[int] = next(run["token_updates"] for run in runs if run["id"] == number)
    return updates


def _recorded(
    sources: Sources, number: str, update: int, chosen: dict[str, IntArray]
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the requests for the rows of an update that belong to selected trajectories."""
    run = sources.runs[number]
    keys = ["dataset", "instance_id", "trajectory_id", "step_index"]
    names = {
        dataset: set(
            sources.datasets[dataset].index.trajectories["trajectory_id"][numbers].to_list()
        )
        for dataset, numbers in chosen.items()
    }
    seen = set()
    for path, instance_id, trajectory_id, step_index in read_tokens(run.path, update, keys).rows():
        dataset = run.dataset_of(path)
        if dataset is None or trajectory_id not in names[dataset]:
            continue
        root = f"/api/datasets/{dataset}"
        yield f"{root}/tokens", {"trajectory_id": trajectory_id, "step_index": step_index}
        for view, of in (
            ("group", {"instance_id": instance_id}),
            ("tree", {"instance_id": instance_id}),
            ("tree", {"trajectory_id": trajectory_id}),
        ):
            if (dataset, view, *of.items()) not in seen:
                seen.add((dataset, view, *of.items()))
                yield f"{root}/{view}", dict(of)


def inlined(bundle: Bundle, blobs: Sequence[str]) -> str:
    """Return the page as one file: script and style inline, and the blobs of `Packing.blobs`.

    Its Content-Security-Policy allows this script and style, by hash, and no connections.
    """
    script, style = bundle.text("/assets/index.js"), bundle.text("/assets/index.css")
    script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    answers = json.dumps(list(blobs), separators=(",", ":"))
    scripts = (
        f'<script id="answers" type="application/json">{answers}</script>\n'
        f'<script type="module">{script}</script>\n</body>'
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}" />'
    page = _STYLE.sub(lambda _: f"<style>{style}</style>", _SCRIPT.sub("", bundle.text("/")))
    page = page.replace('<meta charset="utf-8" />', f'<meta charset="utf-8" />\n    {head}', 1)
    return page.replace("</body>", scripts, 1)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@dataclass(slots=True)
class Packing:
    """Collects the answers of a report."""

    _texts: list[tuple[str, bytes]] = field(default_factory=list)
    _tables: dict[str, list[pa.Table]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _places: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _ranges: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    _totals: dict[str, dict[str, str]] = field(default_factory=dict)

    def add_text(self, key: str, content: bytes) -> None:
        """Add a JSON answer."""
        self._texts.append((key, content))

    def add_table(self, key: str, parts: dict[tuple[str, str], pa.Table]) -> None:
        """Add an Arrow answer.

        Args:
            key: Key of the answer.
            parts: Tables that together have the columns of the answer, by (name of the stored
                table, name of the part). All parts of a stored table have the same columns. A part
                that several answers share is stored once.
        """
        ranges = []
        for (name, part), table in parts.items():
            if (name, part) not in self._places:
                begin = self._sizes.get(name, 0)
                self._places[name, part] = begin, begin + table.num_rows
                self._tables.setdefault(name, []).append(table.replace_schema_metadata(None))
                self._sizes[name] = begin + table.num_rows
            ranges.append((name, *self._places[name, part]))
            for total, value in (table.schema.metadata or {}).items():
                self._totals.setdefault(key, {})[total.decode()] = value.decode()
        self._ranges[key] = ranges

    def blobs(self) -> list[str]:
        """Return the blobs to store in the report: the index, then texts, then tables."""
        blobs: list[bytes] = []
        texts: dict[str, tuple[int, int, int]] = {}
        for part in self._text_parts():
            begin = 0
            for key, content in part:
                texts[key] = (len(blobs) + 1, begin, begin + len(content))
                begin += len(content)
            blobs.append(b"".join(content for _, content in part))
        number: dict[str, int] = {}
        for name, tables in self._tables.items():
            blobs.append(_stream(pa.concat_tables(tables)))
            number[name] = len(blobs)
        tables_index = {
            key: {
                "parts": [(number[name], begin, end) for name, begin, end in ranges],
                "totals": self._totals.get(key, {}),
            }
            for key, ranges in self._ranges.items()
        }
        index: dict[str, Any] = {"texts": texts, "tables": tables_index}
        return [_stored(content) for content in (msgspec.json.encode(index), *blobs)]

    def _text_parts(self) -> Iterator[list[tuple[str, bytes]]]:
        part: list[tuple[str, bytes]] = []
        for key, content in self._texts:
            part.append((key, content))
            if sum(len(one) for _, one in part) >= _TEXT_BYTES:
                yield part
                part = []
        if part:
            yield part


def _stored(content: bytes) -> str:
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY_LEVEL)
    return base64.b64encode(compressor.compress(content) + compressor.flush()).decode()


def _with_vocabulary(table: pa.Table) -> pa.Table:
    """Dictionary-encode the ids and bytes of tokens; frequent tokens have low indices."""
    ids = to_numpy(table.column("id").combine_chunks())
    used, first, index, counts = np.unique(
        ids, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    kind = np.uint16 if len(order) <= 1 << 16 else np.int32
    indices = to_arrow(rank[index].astype(kind))
    spelled = table.column("bytes").take(pa.array(first[order])).combine_chunks()
    for name, values in (("id", to_arrow(used[order])), ("bytes", spelled)):
        column = pa.DictionaryArray.from_arrays(indices, values)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _stream(table: pa.Table) -> bytes:
    """Return an Arrow stream of one batch."""
    if {"id", "bytes"} <= set(table.column_names):
        table = _with_vocabulary(table)
    columns = [_without_hidden(column.combine_chunks()) for column in table.columns]
    plain = pa.Table.from_arrays(columns, names=table.column_names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    return bytes(sink.getvalue())


def _without_hidden(column: pa.Array) -> pa.Array:
    """Overwrite the values hidden behind nulls with 0, so that they take no space."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not is_number or not column.null_count:
        return column
    return to_arrow(filled(column, 0), mask=~to_numpy(column.is_valid()))
