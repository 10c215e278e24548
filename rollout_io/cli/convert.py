"""`rollouts convert`: convert harness logs to a rollout dataset."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.formats import note_failures
from rollout_io.cli.options import num_converters, workers_options
from rollout_io.cli.output import (
    emit_json,
    example,
    going_on,
    next_command,
    note,
    progress_bar,
    warn,
)
from rollout_io.cli.redact import show_report
from rollout_io.retokenize.local import tokenizer_directory
from rollout_io.startup import keep_pandas_out_of_arrow
from schemas.errors import InputError, RolloutError, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollout_io.conversion.driver import Conversion
    from rollout_io.dataset.parallel import Engine
    from rollout_io.redaction.redact import Report

_NAMED = 10  # calls named in the summary
_SHOWN = 100  # maximum number of file names in --json
_READS = 2  # every log is read twice: to find its runs, then to convert them


def _paths(_ctx: click.Context, _param: click.Parameter, text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if wrong := [name for name, _, path in pairs if not (name and path)]:
        raise click.BadParameter(f"{wrong[0]!r} is not FIELD=PATH.")
    return {name: path for name, _, path in pairs}


@click.command(
    epilog=example("rollouts convert shop.calls.jsonl --rewards shop.rewards.jsonl --out shop/")
)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path())
@click.option(
    "--format",
    default="auto",
    show_default=True,
    help="Log format (see `rollouts formats`); auto detects it from the content.",
)
@click.option("--out", required=True, metavar="DS", help="Directory of the new dataset.")
@click.option(
    "--rewards",
    type=click.Path(),
    metavar="FILE",
    help="JSONL file of outcomes, which replace the rewards in the logs.",
)
@click.option(
    "--map",
    metavar="FIELD=PATH,...",
    callback=_paths,
    help="Read logs of any names: where their records have `session`, `attempt`, `request`, `response` "
    "and `reward`, such as request=call.req,response=call.resp.",
)
@click.option("--reward", metavar="KEY", help="Name of the logged reward to use as the outcome.")
@click.option(
    "--group-by",
    metavar="LABEL[,LABEL...]",
    help="Labels that identify a group, instead of the format's default.",
)
@click.option(
    "--tokenizer",
    metavar="DIR|NAME",
    help="Tokenizer to re-tokenize text and verify exact ids: a directory, or a Hub id in the local "
    "cache.",
)
@click.option(
    "--chat-template",
    metavar="NAME|FILE",
    help="Template for re-tokenization.  [default: the tokenizer's own]",
)
@click.option(
    "--join",
    type=click.Path(),
    metavar="RECORDED",
    help="Calls that were recorded of these runs, as a dataset or a log of calls: the rows get their "
    "exact tokens.",
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="If a record is invalid: write nothing, or skip it and list it in DS.rejected.jsonl.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Reject runs with content that is neither read nor left out on purpose and, in directories, "
    "files that match no log format.",
)
@click.option(
    "--timeouts",
    type=click.Choice(["fail", "keep"]),
    default="fail",
    show_default=True,
    help="If a run timed out: mark it as failed, or convert it like any other run.",
)
@click.option(
    "--other-fields",
    type=click.Choice(["refuse", "keep", "drop"]),
    default="refuse",
    show_default=True,
    help="skyrl: how to treat fields that match no column.",
)
@click.option(
    "--group-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="skyrl: attempts per prompt, for outputs without trajectory_ids: N consecutive rows are a "
    "group.",
)
@click.option(
    "--overflows",
    type=click.Choice(["zero", "fail", "keep"]),
    default="zero",
    show_default=True,
    help="If a run exceeded the context: set its reward to 0, mark it as failed, or convert it like "
    "any other run.",
)
@workers_options
@click.option(
    "--layout",
    type=click.Choice(["prefix", "full"]),
    default="prefix",
    show_default=True,
    help="Store prompts as references to earlier steps, or in full.",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["raw", "processed"]),
    help="Whether log-probabilities were computed before (raw) or after (processed) temperature and "
    "truncation; vLLM's default is raw.",
)
@click.option(
    "--redact",
    "redacts",
    is_flag=True,
    help="Remove secrets from the dataset, as `rollouts redact` does, before it becomes visible.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def convert(
    inputs: tuple[str, ...],
    out: str,
    workers: int | None,
    engine: Engine,
    *,
    redacts: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert agent logs to a rollout dataset.

    INPUT is a file, a directory, a quoted pattern, a URL, or - for standard input. Files ending in
    .gz or .zst are decompressed. Logs in several formats are combined into one dataset; other files
    inside directories are skipped. To resume an interrupted conversion, run the same command again.
    """
    if redacts and options["on_error"] == "skip":
        raise click.UsageError("--redact writes no rejected records: leave out --on-error skip.")
    tokenizer: str | None = options["tokenizer"]
    if tokenizer is not None:
        tokenizer_directory(tokenizer)  # before slow imports
    keep_pandas_out_of_arrow()
    from rollout_io.conversion import driver
    from rollout_io.dataset.parallel import Workers

    if options["map"] is None:
        _note_formats(options["format"])
    start_s = time.monotonic()
    where = f"in {_hidden(out)}, which only you can read" if redacts else "kept"
    with (
        going_on(lambda: f"finished work is {where}; run the same command again to resume"),
        progress_bar(_num_bytes(inputs), "B", "convert", counts="rows") as advance,
    ):

        def progress(num_bytes: int, num_rows: int) -> None:
            advance(num_bytes / _READS, num_rows)

        num = workers or num_converters(_num_bytes(inputs), retokenizes=tokenizer is not None)
        try:
            converting = partial(
                driver.convert,
                inputs,
                workers=Workers(num, engine),
                progress=progress,
                **options,
            )
            done, redacted = (
                _converted_and_redacted(converting, out, tokenizer)
                if redacts
                else (converting(out=out), None)
            )
        except driver.NothingUsable as error:
            note(error.summary.rejections_text())
            raise
    if as_json:
        state = {
            "num_left": len(done.left),
            "left": done.left[:_SHOWN],
            "was_done": done.was_done,
            "num_resumed_chunks": done.num_resumed,
        }
        joined = {} if done.joined is None else {"joined": done.joined}
        joined |= {} if redacted is None else {"redacted": dataclasses.asdict(redacted)}
        emit_json({"format": done.format, **done.summary.to_dict(), **joined, **state})
    else:
        if redacted is not None:
            show_report(redacted)
        _report(done, out, time.monotonic() - start_s, _num_bytes(inputs), tokenizer)


def _hidden(out: str) -> Path:
    return Path(out).with_name(f".{Path(out).name}.unredacted")


def _converted_and_redacted(
    convert_to: Callable[..., Conversion], out: str, tokenizer: str | None
) -> tuple[Conversion, Report]:
    """Convert to a hidden directory beside `out`, write it to `out` without secrets, and remove it.

    A secret that is found in one run is removed from all, so the conversion has to end first. An
    interrupted command leaves the directory, which only its owner can read, and resumes from it.
    """
    from shutil import rmtree

    from rollout_io.dataset.storage import Location, occupied, refuse_open
    from rollout_io.redaction.redact import redact
    from rollout_io.redaction.scanner import Rules

    if not Location.of(out).is_local:
        hint = "convert to a local directory, and copy it"
        raise InputError("out_is_free", out, "--redact needs a local directory", "", hint)
    rules, target = Rules.of({}, personal=False), Path(out)
    hidden = _hidden(out)
    shards = Location.of(out).datasets()
    if not os.path.lexists(hidden):
        if shards:
            raise occupied(out, len(shards))
        hidden.mkdir(mode=0o700, parents=True)
    refuse_open(hidden)
    if shards:
        finding = f"the dataset exists, and {hidden} beside it has the unredacted rows of a killed command"
        hint = f"remove {hidden}; if `rollouts validate {out}` fails, remove both and convert again"
        raise InputError("out_is_free", out, finding, "", hint)
    try:
        done = convert_to(out=str(hidden / target.name))
    except RolloutError as error:
        raise error.at(error.where, _hint_without_skip(error.hint or "")) from None
    report = redact(str(hidden / target.name), out, rules, tokenizer=tokenizer)
    rmtree(hidden)
    return done, report


def _hint_without_skip(hint: str) -> str:
    """Leave out of a hint what `--redact` does not take."""
    clauses = [re.sub(r"(?:^|,? )or (?:pass )?--on-error skip.*", "", c) for c in hint.split("; ")]
    usable = [clause for clause in clauses if clause and "--on-error skip" not in clause]
    return "; ".join(usable) or "correct or remove the record, and run the same command again"


def _note_formats(format_name: str) -> None:
    from rollout_io.conversion.opened_logs import AUTO
    from rollout_io.formats.detect import load_formats

    if format_name == AUTO:
        note_failures(load_formats())


def _report(
    done: Conversion, out: str, elapsed_s: float, num_bytes: int, tokenizer: str | None
) -> None:
    from rollout_io.conversion.staging import rejected_path
    from rollout_io.dataset.checking import mixed_text
    from rollout_io.formats.detect import find_adapter
    from rollout_io.formats.parsing.records import MODELS

    note(_found(done))
    if done.was_done:
        note(f"{out} is up to date with these logs; nothing to do")
    if done.num_resumed:
        were = "was" if done.num_resumed == 1 else "were"
        note(f"resumed: {count(done.num_resumed, 'chunk')} {were} already converted")
    for name, value in done.about.items():
        text = value if isinstance(value, str) else "see `made_by` in the metadata of the dataset"
        text = ", ".join(value) if name == MODELS else text
        note(f"{name}: {text}")
    note(done.summary.text(out))
    for text in _joined_texts(done):
        note(text)
    if about_tokenizer := done.summary.tokenizer_text(out, tokenizer):
        note(about_tokenizer)
    if not done.was_done:
        rows_per_s, mb_per_s = done.summary.num_rows / elapsed_s, num_bytes / elapsed_s / 1e6
        # Below a megabyte, loading takes longer than converting.
        rates = f": {rows_per_s:,.0f} rows/s, {mb_per_s:,.1f} MB/s" if num_bytes >= 1e6 else ""
        note(f"{elapsed_s:.1f} s{rates}")
    if unread := done.summary.unread_text():
        warn(unread)
    is_own = any(find_adapter(name).is_own for name in done.summary.formats)
    if is_own and (mixed := mixed_text(out)):
        warn(mixed)
    if done.summary.num_rejected:
        rejected = count(done.summary.num_rejected, "record")
        warn(f"{rejected} rejected: see {rejected_path(out)}")
    next_command("rollouts", "validate", out)


def _joined_texts(done: Conversion) -> Iterator[str]:
    """Yield the names of the calls that were not joined."""
    if done.joined is None:
        return
    for kind, of in (("call", "answers of the log"), ("answer", "recorded calls")):
        number, names = done.joined[f"num_without_{kind}"], done.joined[f"without_{kind}"]
        if number:
            more = f", and {number - _NAMED:,} more" if number > _NAMED else ""
            article = "an answer in the log" if kind == "answer" else "a recorded call"
            yield f"{of} without {article}: {number:,} ({'; '.join(names[:_NAMED])}{more})"


def _found(done: Conversion) -> str:
    from rollout_io.formats.detect import find_adapter

    counts = done.summary.formats.items()
    text = ", ".join(f"{count(num, find_adapter(name).noun)} ({name})" for name, num in counts)
    return f"{text}; skipped {count(len(done.left), 'other file')}" if done.left else text


def _num_bytes(inputs: tuple[str, ...]) -> int:
    from rollout_io.conversion.inputs import expanded
    from rollout_io.conversion.remote import is_url

    local = (path for path in inputs if path != "-" and not is_url(path))
    paths = [Path(path) for pattern in local for path in expanded(pattern)]
    files = [f for path in paths for f in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file())
