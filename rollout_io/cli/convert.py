"""`rollouts convert`: harness logs to a rollout dataset."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import click

from rollout_io.cli.formats import note_failures
from rollout_io.cli.output import emit_json, example, going_on, next_command, note, progress_bar
from rollout_io.cli.workers import engine_option

if TYPE_CHECKING:
    from rollout_io.conversion.choices import Choices
    from rollout_io.conversion.driver import Conversion
    from rollout_io.parallel import Engine, Workers

_READS = 2  # every log is looked through to find its runs, then each run is read


@click.command(
    epilog=example("rollouts convert shop.calls.jsonl --rewards shop.rewards.jsonl --out shop/")
)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.Path())
@click.option(
    "--format",
    "format_name",
    default="auto",
    show_default=True,
    help="Format of the logs (`rollouts formats` lists them); auto: by their content.",
)
@click.option("--out", required=True, metavar="DS", help="Dataset directory to write.")
@click.option(
    "--rewards",
    type=click.Path(),
    metavar="FILE",
    help="JSONL of outcomes; they win over the log's.",
)
@click.option("--reward", metavar="KEY", help="Which of the log's rewards is the outcome.")
@click.option(
    "--group-by",
    metavar="LABEL[,LABEL...]",
    help="What names the group, instead of the format's rule.",
)
@click.option(
    "--tokenizer",
    metavar="DIR",
    help="Local tokenizer: re-tokenises text logs; for exact ones its name is noted.",
)
@click.option(
    "--chat-template",
    metavar="NAME|FILE",
    help="Template to re-tokenise with (the tokenizer's own).",
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="A bad record: write nothing, or put it aside in DS/rejected.jsonl.",
)
@click.option(
    "--timeouts",
    type=click.Choice(["fail", "keep"]),
    default="fail",
    show_default=True,
    help="Runs that ran out of time: failed, or used as they are.",
)
@click.option(
    "--overflows",
    type=click.Choice(["zero", "fail", "keep"]),
    default="zero",
    show_default=True,
    help="Runs that ran out of context: reward 0, failed, or used as they are.",
)
@click.option(
    "--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes to use."
)
@engine_option
@click.option(
    "--layout",
    type=click.Choice(["prefix", "full"]),
    default="prefix",
    show_default=True,
    help="Prompts as references to earlier steps, or in full.",
)
@click.option(
    "--logprobs-mode",
    type=click.Choice(["raw", "processed"]),
    help="Log-probabilities before or after temperature and truncation (vLLM: raw).",
)
@click.option("--json", "as_json", is_flag=True, help="Summary as JSON on stdout.")
def convert(
    inputs: tuple[str, ...],
    format_name: str,
    out: str,
    rewards: str | None,
    reward: str | None,
    group_by: str | None,
    tokenizer: str | None,
    chat_template: str | None,
    on_error: Literal["fail", "skip"],
    timeouts: str,
    overflows: str,
    workers: int,
    engine: Engine,
    layout: Literal["prefix", "full"],
    logprobs_mode: Literal["raw", "processed"] | None,
    *,
    as_json: bool,
) -> None:
    """Convert agent logs to a rollout dataset.

    INPUT is a file, a directory, or - for standard input; .gz and .zst are unpacked. A conversion
    that was stopped goes on when the same command is given again.
    """
    from rollout_io.adapters import Options
    from rollout_io.conversion.choices import Choices
    from rollout_io.parallel import Workers

    choices = Choices(
        format=format_name,
        rewards=rewards,
        group_by=tuple(group_by.split(",")) if group_by else (),
        options=Options(reward=reward, timeouts=timeouts, overflows=overflows),
        tokenizer=tokenizer,
        chat_template=chat_template,
        layout=layout,
        logprobs_mode=logprobs_mode,
        on_error=on_error,
    )
    _note_formats(format_name)
    start_s = time.monotonic()
    done = _converted(inputs, out, choices, Workers(workers, engine))
    if as_json:
        state = {"was_done": done.was_done, "num_resumed_chunks": done.num_resumed}
        emit_json({"format": done.format, **done.summary.to_dict(), **state})
    else:
        _report(done, out, time.monotonic() - start_s, _num_bytes(inputs))


def _converted(inputs: tuple[str, ...], out: str, choices: Choices, workers: Workers) -> Conversion:
    from rollout_io.conversion.driver import convert

    with (
        going_on("what is done is kept, and the same command goes on from there"),
        progress_bar(_num_bytes(inputs), "B", "convert", counts="rows") as advance,
    ):

        def progress(num_bytes: int, num_rows: int) -> None:
            advance(num_bytes / _READS, num_rows)

        return convert(inputs, out, choices, workers=workers, progress=progress)


def _note_formats(format_name: str) -> None:
    from rollout_io.adapters.detect import load_formats
    from rollout_io.conversion.log import AUTO

    if format_name == AUTO:
        note_failures(load_formats())


def _report(done: Conversion, out: str, elapsed_s: float, num_bytes: int) -> None:
    note(f"format: {done.format}")
    if done.was_done:
        note(f"{out} is what these logs convert to already: nothing to do")
    if done.num_resumed:
        note(f"went on after {done.num_resumed} chunks that an earlier run had done")
    for name, value in done.about.items():
        text = value if isinstance(value, str) else "in the history of the dataset (`made_by`)"
        note(f"{name}: {text}")
    note(done.summary.text(out))
    if not done.was_done:
        rows_per_s, mb_per_s = done.summary.num_rows / elapsed_s, num_bytes / elapsed_s / 1e6
        note(f"{elapsed_s:.1f} s: {rows_per_s:,.1f} rows/s, {mb_per_s:,.2f} MB/s")
    if done.summary.num_rejected:
        note(f"rejected records, each with its reason: {out.rstrip('/')}/rejected.jsonl")
    next_command(f"rollouts validate {out}")


def _num_bytes(inputs: tuple[str, ...]) -> int:
    from pathlib import Path

    paths = [Path(path) for path in inputs if path != "-"]
    files = [f for path in paths for f in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file())
