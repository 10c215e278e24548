"""The log that was given: its format, its adapter, its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollout_io.adapters import Adapter, Input
from rollout_io.adapters.detect import detect, find_adapter, load_formats
from rollout_io.conversion.inputs import open_inputs

AUTO = "auto"


class Log(NamedTuple):
    """Files of one format."""

    format: str
    adapter: Adapter
    inputs: list[Input]


def open_log(paths: Sequence[str], format_name: str, spool: Path) -> Log:
    """Open what was given, and find out its format where none is named.

    Args:
        paths: Files and directories, "-" for standard input.
        format_name: Of a registered format, or `auto`.
        spool: Directory for what has to be unpacked or saved.

    Raises:
        RolloutError: `known_format`, `input_file`, `duplicate_input`, `lfs_pointer`.
    """
    if format_name == AUTO:
        known = load_formats().adapters
    else:
        known = {format_name: find_adapter(format_name)}
    adapters = known.values()
    inputs = open_inputs(paths, spool, lambda path: any(a.recognizes(path) for a in adapters))
    if format_name == AUTO:
        format_name = detect({given.name: given.path for given in inputs}, known)
    return Log(format_name, known[format_name], inputs)
