"""Export the viewer as one HTML file: the report page with the answers to its requests embedded."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

import numpy as np
import pyarrow as pa
from starlette.responses import Response

from pipelines.view import attempts
from pipelines.view.api import Api
from pipelines.view.app import Bundle
from pipelines.view.dataset import Dataset, TokensMissing
from pipelines.view.packing import Packing
from pipelines.view.responses import JSON, json_response
from pipelines.view.row_tables import SHARE
from pipelines.view.run_files import FLAGS, NUMBERS, read_tokens
from pipelines.view.sources import Sources
from rollout_io.dataset.filesystems import replace_text
from rollout_io.dataset.locking import destination
from schemas.columns import TASK
from schemas.errors import InputError, count
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
            json_response(attempts.tasks(of_groups, NUM_TASKS)),
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
