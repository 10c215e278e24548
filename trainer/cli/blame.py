"""The `rollouts blame` command."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rollout_io.cli.output import emit_json, emit_styled, example, next_command, note, shown_log
from schemas.errors import ConfigError, count
from trainer.cli.options import update_option

EXAMPLES = example(
    "rollouts blame run/ --update 12"
    "\n  rollouts blame run/ --update 12 --out run/blame/update_12.parquet"
)


@click.command(epilog=EXAMPLES)
@click.argument("run", metavar="RUN", type=click.Path())
@update_option
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Number of rows to show.",
)
@click.option(
    "--out",
    metavar="FILE.parquet",
    help="Write the shares of all rows and tokens in the update's gradient. `rollouts view` shows"
    " RUN/blame/*.parquet.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=PATH",
    help="Path of a dataset or model that has moved: dataset=PATH, model=PATH; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def blame(
    *,
    run: str,
    update: int,
    top: int,
    out: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> int:
    """Find the rows that drove an update of a training run.

    Reconstructs the update from the newest checkpoint before it, and computes the gradient of each
    row: its share of the update's gradient, and its norm. Rows are ordered by how far they stand out
    from the others in the norm of their gradient, their advantage, the mismatch with the sampler, or
    the improbability of their tokens (docs/audit.md). Nothing is written to RUN unless --out names a
    file there.
    """
    from rollout_io.dataset.locking import check_table_out, write_table

    if out is not None:
        check_table_out(out)
    from schemas.imports import requires_extra

    sys.path.append(str(Path.cwd()))  # for user functions; last, so that it shadows no module
    with requires_extra("train", "rollouts blame"):
        from trainer.forensics.blame import blame as attribute
        from trainer.forensics.blame import replay_without, screen, summary
    with shown_log():
        places = _places(settings)
        result = attribute(run, update, places=places)
    if out is not None:
        write_table(result.shares, out)
        note(f"{count(len(result.shares), 'row')} -> {out}")
    emit_json(summary(result, top)) if as_json else emit_styled(screen(result, top))
    if command := replay_without(result):
        next_command(*command)
    return 0


def _places(settings: tuple[str, ...]) -> dict[str, str]:
    from trainer.forensics.reconstruct import PLACES
    from trainer.forensics.replay_changes import split_settings

    places, others = split_settings(settings)
    if others:
        hint = "to change other keys, use rollouts replay"
        expected = f"KEY=PATH, with one of the keys {', '.join(PLACES)}"
        raise ConfigError("config_key", "--set", others[0], expected, hint)
    return places
