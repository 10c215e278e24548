"""The `rollouts merge` command."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.options import dataset_argument, layout_option, workers_of, workers_options
from rollout_io.cli.output import emit_json, example, next_command, note, progress_bar

if TYPE_CHECKING:
    from pipelines.merging.lineage import Rule


@click.command(
    short_help="Join steps that extend each other into one row, or undo it.",
    epilog=example(
        "rollouts merge shop/ --out merged/", "rollouts merge --undo merged/ --out steps/"
    ),
)
@dataset_argument()
@click.option("--out", required=True, metavar="DS2", help="Directory of the new dataset.")
@click.option(
    "--rule",
    type=click.Choice(["lineage", "consecutive"]),
    help="lineage: a step continues the longest earlier step not yet continued, so sub-agents and "
    "resumed contexts merge too. consecutive: only the step right before it, as SkyRL does.  "
    "[default: lineage]",
)
@click.option(
    "--undo", is_flag=True, help="Split merged rows back into the exact steps that they contain."
)
@layout_option
@workers_options
@click.option("--json", "as_json", is_flag=True, help="Print the counts before and after as JSON.")
def merge(
    dataset: str,
    out: str,
    rule: Rule | None,
    layout: Any,
    workers: int | None,
    engine: Any,
    *,
    undo: bool,
    as_json: bool,
) -> None:
    """Merge steps into one row if each extends the previous one token for token.

    Training needs no merging (`sequence_layout` merges and shares prefixes as it reads), and gives the
    same loss either way. Nothing is lost: `segments` keeps each step's range and values, and `--undo`
    restores the steps. Memory use does not grow with the dataset.
    """
    if undo and rule is not None:
        raise click.UsageError("--undo splits the rows of any rule: leave out --rule.")
    import polars as pl

    from pipelines.merging.merge import merge_table, unmerge_table
    from rollout_io.cli.options import open_dataset
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.dataset.rewriting import rewrite
    from rollout_io.dataset.sources import Sources

    sources, rule = Sources(dataset), rule or "lineage"
    verb, parameters = ("unmerge", {}) if undo else ("merge", {"rule": rule})
    with progress_bar(
        open_dataset(dataset).select(pl.len()).collect().item(), " rows", verb
    ) as bar:
        counts = rewrite(
            dataset,
            out,
            unmerge_table if undo else partial(merge_table, rule=rule),
            read_metadata(dataset).made(verb, parents=[dataset], **parameters),
            decode=undo,
            layout=layout,
            workers=workers_of(workers, engine, dataset),
            progress=bar,
            sources=sources,
        )
    if as_json:
        emit_json(asdict(counts))
    note(f"rows    {counts.num_rows_before:>9,} -> {counts.num_rows_after:,}")
    note(f"tokens  {counts.num_tokens_before:>9,} -> {counts.num_tokens_after:,}")
    if undo and counts.num_rows_after == counts.num_rows_before:
        note("no row was merged, so there was nothing to undo")
    next_command("rollouts", "stats", out)
