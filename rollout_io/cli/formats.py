"""`rollouts formats`: list the log formats, or detect the format of a log."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollout_io.cli.output import emit, emit_json, example, next_command, warn

if TYPE_CHECKING:
    from rollout_io.formats.detect import Formats


@click.command(epilog=example("rollouts formats examples/shop.calls.jsonl"))
@click.argument("inputs", nargs=-1, metavar="[FILE...]", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def formats(ctx: click.Context, inputs: tuple[str, ...], *, as_json: bool) -> None:
    """List the log formats, or detect the format of each FILE.

    A FILE may be a directory. Exit code 1 if a FILE matches no format, or several.
    """
    from rollout_io.formats.detect import load_formats

    known = load_formats()
    if not inputs:
        _list(known, as_json=as_json)
    else:
        note_failures(known)
        ctx.exit(0 if _identify(inputs, known, as_json=as_json) else 1)


def note_failures(known: Formats) -> None:
    """Print a warning for each format that failed to load."""
    for name, why in known.failures.items():
        warn(f"format {name} is not available: {why}")


def _list(known: Formats, *, as_json: bool) -> None:
    if as_json:
        records = [
            {"name": n, "summary": a.summary, "error": None} for n, a in known.adapters.items()
        ]
        records += [{"name": n, "summary": None, "error": w} for n, w in known.failures.items()]
        emit_json(records)
        return
    width = max(map(len, known.adapters), default=0)
    for name, adapter in known.adapters.items():
        emit(f"{name:<{width}}  {adapter.summary}")
    note_failures(known)
    next_command("rollouts convert INPUT... --out DS")


def _identify(inputs: tuple[str, ...], known: Formats, *, as_json: bool) -> bool:
    """Print the formats of each input; return True if every input matches exactly one."""
    from rollout_io.conversion.inputs import open_inputs
    from rollout_io.formats.detect import recognize

    with tempfile.TemporaryDirectory() as spool:
        opened, _ = open_inputs(inputs, Path(spool), lambda _: ["any"])
        found = [(name, recognize(path, known.adapters)) for name, path in opened]
    if as_json:
        emit_json([{"path": path, "formats": names} for path, names in found])
    else:
        for path, names in found:
            emit(f"{path}: {' or '.join(names) or 'no known format'}")
    return all(len(names) == 1 for _, names in found)
