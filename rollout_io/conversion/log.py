"""The log that was given: its format, its adapter, its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollout_io.adapters import Adapter, Input, Place, Rejected
from rollout_io.adapters.detect import HINT, RULE, detect, find_adapter, load_formats, recognize
from rollout_io.conversion.inputs import open_inputs
from schemas.errors import RolloutError

AUTO = "auto"


class Log(NamedTuple):
    """Files of one format.

    Attributes:
        foreign: Files of directories that are of no format.
    """

    format: str
    adapter: Adapter
    inputs: list[Input]
    foreign: Sequence[Rejected] = ()


def open_log(
    paths: Sequence[str],
    format_name: str,
    spool: Path,
    out: Path | None = None,
    *,
    skip_foreign: bool = False,
) -> Log:
    """Open what was given, and find out its format where none is named.

    Args:
        paths: Files and directories, "-" for standard input.
        format_name: Of a registered format, or `auto`.
        spool: Directory for what has to be unpacked or saved.
        out: A directory whose files are no input.
        skip_foreign: Set files of directories aside that are of no format.

    Raises:
        RolloutError: `known_format`, `input_file`, `duplicate_input`, `lfs_pointer`.
    """
    if format_name == AUTO:
        known = load_formats().adapters
    else:
        known = {format_name: find_adapter(format_name)}
    adapters = known.values()
    inputs = open_inputs(paths, spool, lambda path: any(a.recognizes(path) for a in adapters), out)
    foreign: list[Rejected] = []
    if skip_foreign:
        own = [g for g in inputs if g.name in paths or _is_log(g.path, known)]
        foreign = [_foreign(given) for given in inputs if own and given not in own]
        inputs = own or inputs
    if format_name == AUTO:
        format_name = detect({given.name: given.path for given in inputs}, known)
    return Log(format_name, known[format_name], inputs, foreign)


def _is_log(path: Path, known: Mapping[str, Adapter]) -> bool:
    try:
        return bool(recognize(path, known))
    except RolloutError:
        return True  # a damaged log, which is refused for its own reason


def _foreign(given: Input) -> Rejected:
    place = Place(given.path, given.name, 0, given.path.stat().st_size)
    error = RolloutError(RULE, given.name, "content of no known format", "a log", HINT)
    return Rejected(place, error)
