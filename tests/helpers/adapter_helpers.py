"""Conversions by an adapter alone, as `rollouts convert` would do them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

import rollout_io
from rollout_io.conversion.driver import Conversion, Keywords, convert
from rollout_io.conversion.inputs import open_inputs
from rollout_io.conversion.opened_logs import Log, Opened
from rollout_io.conversion.plan import Plan, plan_logs
from rollout_io.formats.base import (
    UNREAD,
    Adapter,
    Input,
    Options,
    Rejected,
    Run,
    Trajectory,
    noted,
    unread_in,
)
from rollout_io.formats.engines.files import Start
from rollout_io.formats.parsing.records import close_files
from schemas.errors import RolloutError


def convert_with(
    adapter: Adapter, paths: Iterable[Path], tmp_path: Path, **choices: Any
) -> tuple[Conversion, pa.Table]:
    """What became of a conversion, and its rows."""
    out, spool, chosen = tmp_path / "ds", tmp_path / "spool", Keywords(**choices)
    inputs, _ = open_inputs(
        [str(p) for p in paths], spool, lambda p: ["tried"] * adapter.recognizes(Start(p))
    )
    opened = Opened([Log("tried", adapter, inputs)])
    with patch("rollout_io.conversion.driver.open_log", lambda *_, **__: opened):
        conversion = convert(["tried"], out, **chosen)
    return conversion, rollout_io.read(out)


def planned(adapter: Adapter, *paths: Path, **choices: Any) -> Plan:
    """The runs that an adapter finds, numbered, and the records that it rejects."""
    inputs = [Input(str(path), path) for path in paths]
    close_files()  # as a conversion does
    (planned,), _ = plan_logs([adapter.find(inputs, lambda _: None)], {}, **choices)
    return planned


@dataclass(kw_only=True)
class Noted(Trajectory):
    """A trajectory with the notes that were made while it was read, and what was not read of it."""

    notes: Mapping[str, int]
    unread: Mapping[str, int]


def read_all(adapter: Adapter, *paths: Path) -> tuple[list[tuple[Run, Noted]], list[Rejected]]:
    """Runs with what they are read as, and rejected records; those of a run that is refused too."""
    made, (runs, rejected) = [], _found(adapter, *paths)
    for run in runs:
        try:
            with noted() as notes:
                found = adapter.read(run, Options())
            values = {each.name: getattr(found, each.name) for each in fields(found)}
            told = {what: n for what, n in notes.items() if not what.startswith(UNREAD)}
            made.append((run, Noted(**values, notes=told, unread=unread_in(notes))))
        except RolloutError as error:
            rejected += [Rejected(place, error) for place in run.places]
    return made, rejected


def _found(adapter: Adapter, *paths: Path) -> tuple[list[Run], list[Rejected]]:
    made = planned(adapter, *paths)
    return made.runs, made.rejected


def write_lines(path: Path, *records: Any) -> Path:
    """A file of JSON lines; a record that is bytes is written as it is."""
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path
