"""`rollouts redact`: write a dataset again without secrets and personal data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import dataset_argument, layout_option, workers_of, workers_options
from rollout_io.cli.output import emit, emit_json, example, next_command, note, progress_bar
from schemas.errors import count

if TYPE_CHECKING:
    from rollout_io.redaction.redact import Report


def _split(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    patterns = dict(text.partition("=")[::2] for text in texts)
    if not all(name and pattern for name, pattern in patterns.items()):
        raise click.BadParameter("expected NAME=REGEX")
    if len(patterns) < len(texts):
        raise click.BadParameter("two patterns have the same name")
    return patterns


pattern_option = click.option(
    "--pattern",
    "patterns",
    multiple=True,
    callback=_split,
    metavar="NAME=REGEX",
    help="Also redact what matches; the first group that matches is the secret, if REGEX has any.",
)
personal_option = click.option(
    "--personal",
    is_flag=True,
    help="Also redact e-mail addresses, phone, card, account and social security numbers (Presidio).",
)


@click.command(
    epilog=example(
        "rollouts redact shop/ --tokenizer smollm2/ --pattern 'customer=C-\\d{8}' --out clean/"
    )
)
@dataset_argument()
@click.option("--out", required=True, metavar="DS2", help="Directory of the new dataset.")
@click.option(
    "--tokenizer",
    metavar="DIR",
    help="Directory of the dataset's tokenizer.  [default: the one that DS names]",
)
@pattern_option
@personal_option
@click.option(
    "--keep-pictures",
    is_flag=True,
    help="Copy pictures and documents, which are not scanned.  [default: leave them out]",
)
@layout_option
@workers_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def redact(
    dataset: str,
    out: str,
    tokenizer: str | None,
    patterns: dict[str, str],
    layout: Any,
    workers: int | None,
    engine: Any,
    *,
    personal: bool,
    keep_pictures: bool,
    as_json: bool,
) -> None:
    """Remove secrets from texts, token ids and metadata.

    A secret that is found once is removed everywhere. Replaced tokens are not trained on, and
    `redacted` marks them. Pictures and documents cannot be scanned, so they are left out.
    """
    import polars as pl

    from rollout_io.cli.options import open_dataset
    from rollout_io.redaction.redact import redact as redact_dataset
    from rollout_io.redaction.scanner import Rules

    rules = Rules.of(patterns, personal=personal)
    num_rows = open_dataset(dataset).select(pl.len()).collect().item()
    with progress_bar(2 * num_rows, " rows", "redact") as bar:
        report = redact_dataset(
            dataset,
            out,
            rules,
            tokenizer=tokenizer,
            keep_pictures=keep_pictures,
            layout=layout,
            workers=workers_of(workers, engine, dataset),
            progress=bar,
        )
    if as_json:
        emit_json(asdict(report))
    else:
        show_report(report)
    next_command("rollouts", "validate", out)


def show_report(report: Report) -> None:
    """Print what was redacted: kinds and numbers, no secret."""
    for kind, numbers in report.kinds.items():
        emit(
            f"{kind}: {count(numbers['num_secrets'], 'secret')} in {count(numbers['num_rows'], 'row')}"
        )
    note(
        f"{count(report.num_secrets, 'secret')} in {count(report.num_rows, 'row')}; their tokens became "
        f"id {report.fill_token_id}, including {count(report.num_tokens_replaced, 'response token')} "
        f"in {count(report.num_rows_with_marks, 'row')}"
    )
    if report.num_blobs:
        done = "copied without a scan" if report.keeps_pictures else "left out"
        note(f"{count(report.num_blobs, 'file')} in DS.blobs {done}")
