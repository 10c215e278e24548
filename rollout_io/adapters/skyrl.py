"""The `skyrl` format: a GeneratorOutput dumped as one JSON object, as `rollouts export` writes it.

Its fields are columns of the rollout table (see `from_generator_output`), except `rollout_metrics`,
which are of the whole output and of no row: they go to the history of the dataset (`made_by`).
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.adapters import ABOUT, Adapter, Progress, raise_first, refuse_repeated
from rollout_io.generator_input import METRICS_KEY, OPTIONAL, REQUIRED
from rollout_io.generator_output import read_generator_output
from schemas.errors import RolloutError

METRICS = "rollout_metrics"
_FIELDS = {name.encode() for name in (*REQUIRED, *OPTIONAL, METRICS)}
_FIRST_KEY = re.compile(rb'\s*\{\s*"([a-z_]+)"\s*:')


def recognizes(path: Path) -> bool:
    """Whether a file begins as a GeneratorOutput and names its required fields.

    The file is searched, not parsed: quick for gigabytes too.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            first = _FIRST_KEY.match(text)
            is_field = first is not None and first[1] in _FIELDS
            del first  # it holds on to the map, which is closed here
            return is_field and all(text.find(f'"{name}"'.encode()) >= 0 for name in REQUIRED)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return False


def read_outputs(
    paths: Sequence[str | Path],
    *,
    rewards: str | Path | None = None,
    progress: Progress | None = None,
) -> Iterator[pa.Table]:
    """Read GeneratorOutputs as rollout tables, one table per file.

    Rows keep their order; `source` is the file and the row. A field that only some files have is
    null in the others. A placeholder row becomes a trajectory with an `error` and a null reward.

    Args:
        paths: JSON files.
        rewards: Refused: a GeneratorOutput has its rewards.
        progress: Told the bytes read; twice the size of the inputs in all.

    Returns:
        The tables; the metadata of their schema has the `rollout_metrics` by file, as JSON.

    Raises:
        RolloutError: A bad file (and how many more there are), a trajectory that two files have,
            outputs of models with different numbers of experts.
    """
    if rewards is not None:
        hint = "leave --rewards out"
        got = "a rewards file beside rewards in the log"
        raise RolloutError("rewards_file", str(rewards), got, "one source of rewards", hint)
    refuse_repeated(paths)
    tables: dict[str, pa.Table] = {}
    errors: list[RolloutError] = []
    for path in paths:
        try:
            tables[str(path)] = _read(str(path))
        except RolloutError as error:
            errors.append(error)
        if progress is not None:
            progress(2 * Path(path).stat().st_size if Path(path).is_file() else 0)
    errors = errors or list(_repeated(tables))
    if errors:
        raise_first(errors)
    return _cut(_joined(tables), [table.num_rows for table in tables.values()])


def _read(path: str) -> pa.Table:
    try:
        table = read_generator_output(path)
    except RolloutError as error:
        where = path if error.where == path else f"{path}, {error.where}"
        hint = error.hint
        if error.where == "GeneratorOutput, trajectory_ids" and error.rule == "fields":
            hint = "in Python, read_generator_output(file, group_size=n) numbers the rows"
        raise RolloutError(error.rule, where, error.got, error.expected, hint) from None
    sources = [f"{path}, row {row}" for row in range(table.num_rows)]
    return table.append_column("source", pa.array(sources))


def _repeated(tables: Mapping[str, pa.Table]) -> Iterator[RolloutError]:
    first: dict[str, str] = {}
    for path, table in tables.items():
        for name in pc.unique(table.column("trajectory_id")).to_pylist():
            other = first.setdefault(name, path)
            if other != path:
                got, expected = f"a trajectory that {other} has too", "each trajectory once"
                hint = "outputs of several training steps: make each a dataset of its own"
                where = f"{path}, trajectory {name!r}"
                yield RolloutError("unique_trajectory", where, got, expected, hint)


def _joined(tables: Mapping[str, pa.Table]) -> pa.Table:
    """All rows under one schema, whose metadata has the metrics of each file."""
    metrics: dict[str, Any] = {}
    for path, table in tables.items():
        found = (table.schema.metadata or {}).get(METRICS_KEY)
        if found is not None:
            metrics[path] = json.loads(found)
    joined = pa.concat_tables(tables.values(), promote_options="default")
    for path, table in tables.items():
        for column in table.schema:
            if joined.schema.field(column.name).type != column.type:  # Arrow found a wider one
                where, got = f"{path}, {column.name}", f"{column.type}"
                expected, hint = "one type in all files", "convert the outputs of each model apart"
                raise RolloutError("columns_and_types", where, got, expected, hint)
    return joined.replace_schema_metadata(
        {ABOUT + METRICS: json.dumps(metrics)} if metrics else None
    )


def _cut(table: pa.Table, lengths: Sequence[int]) -> Iterator[pa.Table]:
    start = 0
    for length in lengths:
        yield table.slice(start, length)
        start += length


ADAPTER = Adapter(
    summary="SkyRL's GeneratorOutput as JSON, one object a file (`rollouts export` writes it)",
    recognizes=recognizes,
    read=read_outputs,
)
