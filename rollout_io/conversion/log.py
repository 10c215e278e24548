"""A log: its format, adapter and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollout_io.conversion.inputs import copies_in, open_inputs
from rollout_io.formats.base import Adapter, Input, Place, Rejected
from rollout_io.formats.detect import HINT, RULE, detect, find_adapter, load_formats, recognize
from schemas.errors import InputError, RolloutError

AUTO = "auto"


class Log(NamedTuple):
    """Files of one format.

    Attributes:
        unused: Copies of other files, and files of no known format inside directories.
    """

    format: str
    adapter: Adapter
    inputs: list[Input]
    unused: Sequence[Rejected] = ()


def open_log(
    paths: Sequence[str],
    format_name: str,
    spool: Path,
    out: Path | None = None,
    *,
    skips: bool = False,
) -> Log:
    """Open the inputs, and detect their format if `format_name` is `auto`.

    Args:
        paths: Files and directories, or "-" for standard input.
        format_name: Name of a registered format, or `auto`.
        spool: Directory for decompressed and saved files.
        out: Output directory; files inside it are not inputs.
        skips: If true, set aside copies, and files of no known format inside directories.

    Raises:
        InputError: `known_format`, `input_file`, `duplicate_input`, `lfs_pointer`.
    """
    if format_name == AUTO:
        known = load_formats().adapters
    else:
        known = {format_name: find_adapter(format_name)}
    adapters = known.values()
    inputs = open_inputs(paths, spool, lambda path: any(a.recognizes(path) for a in adapters), out)
    unused: list[Rejected] = []
    for copy, error in copies_in(inputs):
        if not skips:
            raise error
        unused.append(Rejected(_whole(copy), error))
        inputs.remove(copy)
    if skips:
        own = [g for g in inputs if g.name in paths or _is_log(g.path, known)]
        unused += [_foreign(given) for given in inputs if own and given not in own]
        inputs = own or inputs
    if format_name == AUTO:
        format_name = detect({given.name: given.path for given in inputs}, known)
    return Log(format_name, known[format_name], inputs, unused)


def _is_log(path: Path, known: Mapping[str, Adapter]) -> bool:
    try:
        return bool(recognize(path, known))
    except RolloutError:
        return True  # a damaged log: keep it, so that its own error is reported


def _foreign(given: Input) -> Rejected:
    got = "content of no known format"
    message = f"{given.name} is in no format that rollouts can read"
    error = InputError(RULE, given.name, got, "", HINT, message=message)
    return Rejected(_whole(given), error)


def _whole(given: Input) -> Place:
    return Place(given.path, given.name, 0, given.path.stat().st_size)
