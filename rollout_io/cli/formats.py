"""`rollouts formats` and `rollouts templates`: what the package knows of logs and of chats."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollout_io.cli.output import emit, emit_json, example, next_command, warn
from schemas.errors import count

if TYPE_CHECKING:
    from rollout_io.formats.detect import Formats, Match

_SHOWN = 8  # maximum number of unknown keys that are listed


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
    """Print the formats of each input, and why; return True if every input matches exactly one."""
    from rollout_io.conversion.inputs import open_inputs
    from rollout_io.formats.detect import matches, recognize

    with tempfile.TemporaryDirectory() as spool:
        opened, _ = open_inputs(inputs, Path(spool), lambda _: ["any"])
        checked = [(name, path, recognize(path, known.adapters)) for name, path in opened]
        found = [(name, names, matches(path, known.adapters)) for name, path, names in checked]
    if as_json:
        emit_json([{"path": p, "formats": n, "matches": _as_json(m)} for p, n, m in found])
    else:
        for path, names, each in found:
            emit(f"{path}: {' or '.join(names) or 'no known format'}{_why(each)}")
    return all(len(names) == 1 for _, names, _ in found)


def _as_json(found: list[Match]) -> list[dict[str, object]]:
    return [
        {
            "format": match.format,
            "num_known_keys": match.coverage and match.coverage.num_known,
            "num_keys": match.coverage and match.coverage.num_keys,
            "unknown": list(match.coverage.unknown) if match.coverage else [],
        }
        for match in found
    ]


def _why(found: list[Match]) -> str:
    """Return how many keys of the first records each format knows, and which it does not know."""
    texts = []
    for match in found:
        if match.coverage is None or not match.coverage.num_keys:
            continue
        text = f"{match.coverage.num_known:,} of {count(match.coverage.num_keys, 'key')} known"
        text += "" if match.is_best else f" to {match.format}"
        names = match.coverage.unknown if match.is_best else ()
        listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        texts.append(text + (f"; unknown: {listed}" if names else ""))
    return f" ({'; '.join(texts)})" if texts else ""


@click.command(
    epilog=example('vllm serve MODEL --chat-template "$(rollouts templates chatml_tools_thinking)"')
)
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, including the paths.")
def templates(name: str | None, *, as_json: bool) -> None:
    """List the chat templates in the package, or print the path of the template NAME.

    Options and keys of `rollouts` that expect a chat template accept its name. Engines need the
    path: with `vllm serve --chat-template PATH`, vLLM renders the prompts of agents and harnesses.
    """
    from rollout_io.retokenize.chat_template import TEMPLATES, template_path

    chosen = list(TEMPLATES) if name is None else [name]
    paths = {one: str(template_path(one)) for one in chosen}
    if as_json:
        emit_json([{"name": n, "summary": TEMPLATES[n], "path": p} for n, p in paths.items()])
    elif name is not None:
        emit(paths[name])
    else:
        width = max(map(len, TEMPLATES))
        for one, summary in TEMPLATES.items():
            emit(f"{one:<{width}}  {summary}")
        next_command("rollouts templates NAME")
