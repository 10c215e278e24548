"""The `rollouts merge` and `rollouts unmerge` commands."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from rollout_io.cli.datasets import dataset_argument, layout_option, workers_of, workers_options
from rollout_io.cli.output import emit_json, example, next_command, note, progress_bar

if TYPE_CHECKING:
    from rollout_io.dataset.rewriting import Counts
    from rollout_io.dataset.sources import Sources
    from schemas.metadata import DatasetMetadata

OUT = click.option("--out", required=True, metavar="DS2", help="Directory of the new dataset.")
JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print the counts before and after as JSON."
)


@click.command(
    short_help="Join steps that extend each other into one row.",
    epilog=example("rollouts merge shop/ --out merged/"),
)
@dataset_argument()
@OUT
@click.option(
    "--rule",
    type=click.Choice(["lineage", "consecutive"]),
    default="lineage",
    show_default=True,
    help="lineage: a step continues the longest earlier step not yet continued, so sub-agents and "
    "resumed contexts merge too. consecutive: only the step right before it, as SkyRL does.",
)
@layout_option
@workers_options
@JSON
def merge(
    dataset: str,
    out: str,
    rule: Any,
    layout: Any,
    workers: int | None,
    engine: Any,
    *,
    as_json: bool,
) -> None:
    """Merge steps into one row if each extends the previous one token for token.

    Nothing is lost: `segments` keeps each step's range and values, `rollouts unmerge` restores the
    steps, and training on merged rows gives the same loss. Memory use does not grow with the
    dataset.
    """
    from pipelines.merging.merge import merge_table
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.dataset.sources import Sources

    sources = Sources(dataset)
    metadata = read_metadata(dataset).made("merge", parents=[dataset], rule=rule)
    transform = partial(merge_table, rule=rule)
    chosen = (workers, engine)
    counts = _rewritten(dataset, out, transform, metadata, layout, chosen, "merge", sources)
    _say(counts, out, as_json=as_json)


@click.command(epilog=example("rollouts unmerge merged/ --out steps/"))
@dataset_argument()
@OUT
@layout_option
@workers_options
@JSON
def unmerge(
    dataset: str, out: str, layout: Any, workers: int | None, engine: Any, *, as_json: bool
) -> None:
    """Split merged rows back into the exact steps that they contain."""
    from pipelines.merging.merge import unmerge_table
    from rollout_io.dataset.reader import read_metadata
    from rollout_io.dataset.sources import Sources

    sources = Sources(dataset)
    metadata = read_metadata(dataset).made("unmerge", parents=[dataset])
    chosen = (workers, engine)
    counts = _rewritten(dataset, out, unmerge_table, metadata, layout, chosen, "unmerge", sources)
    _say(counts, out, as_json=as_json)


def _say(counts: Counts, out: str, *, as_json: bool) -> None:
    if as_json:
        emit_json(asdict(counts))
    note(f"rows    {counts.num_rows_before:>9,} -> {counts.num_rows_after:,}")
    note(f"tokens  {counts.num_tokens_before:>9,} -> {counts.num_tokens_after:,}")
    next_command("rollouts", "stats", out)


def _rewritten(
    dataset: str,
    out: str,
    transform: Any,
    metadata: DatasetMetadata,
    layout: Any,
    workers: tuple[int | None, Any],
    label: str,
    sources: Sources,
) -> Counts:
    import polars as pl

    from rollout_io.cli.datasets import open_dataset
    from rollout_io.dataset.rewriting import rewrite

    num_rows = open_dataset(dataset).select(pl.len()).collect().item()
    chosen = workers_of(*workers, dataset)
    with progress_bar(num_rows, " rows", label) as bar:
        return rewrite(
            dataset,
            out,
            transform,
            metadata,
            decode=label == "unmerge",
            layout=layout,
            workers=chosen,
            progress=bar,
            sources=sources,
        )
