"""`rollouts merge`."""

from __future__ import annotations

from typing import Any

import click

from rollout_io.cli.output import emit_json, example, next_command, note, progress_bar


@click.command(epilog=example("rollouts merge shop/ --out merged/"))
@click.argument("dataset", metavar="DS")
@click.option("--out", required=True, metavar="DS2", help="Directory of the merged dataset.")
@click.option("--json", "as_json", is_flag=True, help="Counts before and after as JSON on stdout.")
def merge(dataset: str, out: str, *, as_json: bool) -> None:
    """Merge steps that continue each other token for token into one row.

    Nothing is lost: `segments` keeps each step's range and values, and training on the merged rows
    gives the same loss. Memory use does not grow with the dataset.
    """
    counts = merge_dataset(dataset, out)
    if as_json:
        emit_json(counts)
    note(f"rows    {counts['num_rows_before']:>9,} -> {counts['num_rows_after']:,}")
    note(f"tokens  {counts['num_tokens_before']:>9,} -> {counts['num_tokens_after']:,}")
    next_command(f"rollouts stats {out}")


def merge_dataset(dataset: str, out: str) -> dict[str, int]:
    """Merge a dataset into a new one, row group by row group; counts before and after."""
    import polars as pl

    from pipelines.merging import merge_table
    from rollout_io.cli.dataset import open_dataset
    from rollout_io.reader import iter_tables, read_metadata
    from rollout_io.writer import RolloutWriter

    num_rows = open_dataset(dataset).select(pl.len()).collect().item()
    before, after = [0, 0], [0, 0]
    metadata = read_metadata(dataset).made("merge", parents=[dataset], rule="consecutive")
    progress = progress_bar(num_rows, " rows", "merge")
    with RolloutWriter(out, metadata=metadata) as writer, progress as bar:
        for table in iter_tables(dataset):
            merged = merge_table(table)
            _count(before, table)
            _count(after, merged)
            writer.write(merged)
            bar(table.num_rows)
    names = ("num_rows", "num_tokens")
    counts = {f"{name}_before": n for name, n in zip(names, before, strict=True)}
    return counts | {f"{name}_after": n for name, n in zip(names, after, strict=True)}


def _count(totals: list[int], table: Any) -> None:
    import pyarrow.compute as pc

    totals[0] += table.num_rows
    for name in ("prompt_token_ids", "response_ids"):
        totals[1] += pc.sum(pc.list_value_length(table.column(name))).as_py() or 0
