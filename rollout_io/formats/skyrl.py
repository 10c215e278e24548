"""The `skyrl` format: a GeneratorOutput as one JSON object, as `rollouts export` writes it.

Its fields become columns of the rollout table (see `from_generator_output`), except
`rollout_metrics`, which concern the entire output: they are added to the history of the dataset
(`made_by`).
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import (
    About,
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
)
from rollout_io.formats.parsing.jsonl import read_document
from rollout_io.formats.skyrl_generator_output import read_rows
from rollout_io.formats.skyrl_other_fields import OPTIONAL, REQUIRED
from schemas.errors import ConfigError, RolloutError

METRICS = "rollout_metrics"
_FIELDS = {name.encode() for name in (*REQUIRED, *OPTIONAL, METRICS)}
_FIRST_KEY = re.compile(rb'\s*\{\s*"([a-z_]+)"\s*:')


class _Metrics(msgspec.Struct, gc=False):
    rollout_metrics: Any = None


_METRICS_DECODER = msgspec.json.Decoder(_Metrics)


def recognizes(path: Path) -> bool:
    """True if a file begins like a GeneratorOutput and contains its required fields.

    The file is searched but not parsed, so this is fast even for gigabytes.
    """
    try:
        if not path.is_file():
            return False
        with open_input(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            first = _FIRST_KEY.match(text)
            is_field = first is not None and first[1] in _FIELDS
            del first  # the match references the map, which could not be closed otherwise
            return is_field and all(text.find(f'"{name}"'.encode()) >= 0 for name in REQUIRED)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return False


def find_outputs(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per file; it covers all trajectories in the file."""
    metrics: dict[str, Any] = {}
    runs: list[Found] = []
    for given in inputs:
        num_bytes = given.path.stat().st_size
        place = Place(given.path, given.name, 0, num_bytes)
        progress(num_bytes)
        try:
            found = read_document(_METRICS_DECODER, given.path)[0].rollout_metrics
        except RolloutError as error:
            runs.append(Rejected(place, error))
            continue
        if found is not None:
            metrics[given.name] = found
        runs.append(Run(instance_id=given.name, repetition_id=0, places=[place]))
    if metrics:
        yield About(METRICS, metrics)
    yield from runs


def read_output(run: Run, options: Options) -> pa.Table:
    """Read the rows of a file, in order; `source` is the file and the row.

    A placeholder row becomes a trajectory with an `error` and a null reward.

    Raises:
        RolloutError: The file is invalid, or `options.reward` is set.
    """
    (place,) = run.places
    if options.reward is not None:
        got = "--reward does not apply: the log has one reward per row"
        raise ConfigError("reward_key", place.where, got, hint="remove --reward")
    try:
        table = read_rows(place.path, place.where, options.group_size, options.other_fields)
    except RolloutError as error:
        here = error.where == str(place.path)
        where = place.where if here else f"{place.where}, {error.where}"
        raise error.at(where, error.hint or "") from None
    return table.replace_schema_metadata(None)


ADAPTER = Adapter(
    summary="SkyRL's GeneratorOutput as JSON, one object per file (as `rollouts export` writes it)",
    recognizes=recognizes,
    find=find_outputs,
    read=read_output,
    is_table=True,
)
