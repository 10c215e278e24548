"""`rollouts formats`: what the package knows of logs and of chats."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollout_io.cli.output import emit, emit_json, example, next_command, show_error, warn
from schemas.errors import InputError, RolloutError, count

if TYPE_CHECKING:
    from rollout_io.formats.detect import Formats, Match

_SHOWN = 8  # maximum number of unknown keys that are listed


@click.command(
    epilog=example(
        "rollouts formats examples/shop.calls.jsonl",
        'vllm serve MODEL --chat-template "$(rollouts formats --templates chatml_tools_thinking)"',
    )
)
@click.argument("inputs", nargs=-1, metavar="[FILE...]", type=click.Path())
@click.option(
    "--templates",
    is_flag=True,
    help="List the chat templates in the package, or print the paths of those named in place of FILE. "
    "Options of `rollouts` take their names, engines the paths.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def formats(ctx: click.Context, inputs: tuple[str, ...], *, templates: bool, as_json: bool) -> None:
    """List the log formats, or detect the format of each FILE.

    FILE is a file, a directory, a quoted pattern, a URL, or - for standard input. The logs in a
    directory are those that `rollouts convert` would read. Exit code 1 if a FILE matches no format,
    or several.
    """
    if templates:
        _list_templates(inputs, as_json=as_json)
        return
    from rollout_io.formats.detect import load_formats

    installed = load_formats()
    if not inputs:
        _list(installed, as_json=as_json)
    else:
        note_failures(installed)
        ctx.exit(0 if _identify(inputs, installed, as_json=as_json) else 1)


def note_failures(installed: Formats) -> None:
    """Print a warning for each format that failed to load."""
    for name, why in installed.failures.items():
        warn(f"format {name} is not available: {why}")


def _list(installed: Formats, *, as_json: bool) -> None:
    if as_json:
        records = [
            {"name": n, "summary": a.summary, "error": None} for n, a in installed.adapters.items()
        ]
        records += [{"name": n, "summary": None, "error": w} for n, w in installed.failures.items()]
        emit_json(records)
        return
    width = max(map(len, installed.adapters), default=0)
    for name, adapter in installed.adapters.items():
        emit(f"{name:<{width}}  {adapter.summary}")
    note_failures(installed)
    next_command("rollouts", "convert", "INPUT...", "--out", "DS")


def _identify(inputs: tuple[str, ...], installed: Formats, *, as_json: bool) -> bool:
    """Print the formats of each input, and why; return True if every input matches exactly one.

    An input that cannot be read is reported, and the others are still identified.
    """
    from rollout_io.conversion.inputs import expanded

    answers = []
    for pattern in inputs:
        paths = [pattern]
        with suppress(RolloutError, OSError):  # the path is reported below
            paths = expanded(pattern)
        answers += [_answer(path, installed) for path in paths]
    for answer in answers:
        if answer.error is not None:
            show_error(answer.error)
        if not as_json and answer.line:
            emit(answer.line)
    if as_json:
        emit_json([answer.as_json for answer in answers])
    return all(answer.error is None for answer in answers)


def _answer(path: str, installed: Formats) -> _Answer:
    """Identify an input as `rollouts convert` does."""
    from rollout_io.conversion.opened_logs import AUTO, open_log
    from rollout_io.formats.detect import matches

    with tempfile.TemporaryDirectory() as spool:
        try:
            opened = open_log([path], AUTO, Path(spool), skips=True)
        except RolloutError as error:
            file = Path(path)
            candidates = matches(file, installed.adapters) if file.is_file() else []
            names = [match.format for match in candidates if match.is_best]
            return _Answer(path, dict.fromkeys(names, 1), candidates, error=error)
        except OSError as error:
            finding = (error.strerror or type(error).__name__).lower()
            return _Answer(path, error=InputError("file", str(error.filename or path), finding))
        sizes = {log.format: len(log.inputs) for log in opened.logs}
        if Path(path).is_dir() and [one.name for one in opened.inputs] != [path]:
            return _Answer(path, sizes, num_skipped=len(opened.left))
        return _Answer(path, sizes, matches(opened.inputs[0].path, installed.adapters))


@dataclass(frozen=True)
class _Answer:
    """What is known of an input.

    Attributes:
        formats: Number of logs in each format.
        matches: The formats that recognize an input that is itself a log.
        num_skipped: Number of entries of a directory that `rollouts convert` skips.
        error: Why the input cannot be converted.
    """

    path: str
    formats: Mapping[str, int] = field(default_factory=dict)
    matches: Sequence[Match] = ()
    num_skipped: int | None = None
    error: RolloutError | None = None

    @property
    def line(self) -> str:
        """The answer as a line of text; empty if the input cannot be read."""
        if not self.formats:
            is_unknown = self.error is not None and self.error.rule == "known_format"
            return f"{self.path}: no known format" if is_unknown else ""
        if self.num_skipped is None:
            return f"{self.path}: {' or '.join(self.formats)}{_why(self.matches)}"
        listed = ", ".join(f"{n} ({count(size, 'log')})" for n, size in self.formats.items())
        skipped = f"; {count(self.num_skipped, 'entry')} skipped" if self.num_skipped else ""
        return f"{self.path}: {listed}{skipped}"

    @property
    def as_json(self) -> dict[str, object]:
        """The answer as JSON."""
        return {
            "path": self.path,
            "formats": list(self.formats),
            "matches": _as_json(self.matches),
            "num_logs": dict(self.formats),
            "num_skipped": self.num_skipped or 0,
            "error": None if self.error is None else self.error.sentence,
        }


def _as_json(matches: Sequence[Match]) -> list[dict[str, object]]:
    return [
        {
            "format": match.format,
            "num_known_keys": match.coverage and match.coverage.num_known,
            "num_keys": match.coverage and match.coverage.num_keys,
            "unknown": list(match.coverage.unknown) if match.coverage else [],
        }
        for match in matches
    ]


def _why(matches: Sequence[Match]) -> str:
    """Return how many keys of the first records each format knows, and which it does not know."""
    texts = []
    for match in matches:
        if match.coverage is None or not match.coverage.num_keys:
            continue
        text = f"{match.coverage.num_known:,} of {count(match.coverage.num_keys, 'key')} known"
        text += "" if match.is_best else f" to {match.format}"
        names = match.coverage.unknown if match.is_best else ()
        listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        texts.append(text + (f"; unknown: {listed}" if names else ""))
    return f" ({'; '.join(texts)})" if texts else ""


def _list_templates(names: tuple[str, ...], *, as_json: bool) -> None:
    from rollout_io.retokenize.chat_template import TEMPLATES, template_path

    paths = {name: str(template_path(name)) for name in names or TEMPLATES}
    width = max(map(len, TEMPLATES))
    if as_json:
        emit_json([{"name": n, "summary": TEMPLATES[n], "path": p} for n, p in paths.items()])
        return
    for name, path in paths.items():
        emit(path if names else f"{name:<{width}}  {TEMPLATES[name]}")
    if not names:
        next_command("rollouts", "formats", "--templates", "NAME")
