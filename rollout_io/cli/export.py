"""`rollouts export`: a dataset in another project's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rollout_io.cli.dataset import open_dataset
from rollout_io.cli.output import example, note

if TYPE_CHECKING:
    from rollout_io.generator_output import Failed


@click.command(epilog=example("rollouts export shop/ --format skyrl --out shop.json"))
@click.argument("dataset", metavar="DS")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["skyrl"]),
    default="skyrl",
    show_default=True,
    help="skyrl: a GeneratorOutput as JSON.",
)
@click.option("--out", required=True, type=click.Path(), metavar="FILE", help="File to write.")
@click.option(
    "--failed",
    type=click.Choice(["group", "trajectory"]),
    default="group",
    show_default=True,
    help="What a failed trajectory masks.",
)
def export(dataset: str, format_name: str, out: str, failed: Failed) -> None:
    """Export a dataset in another project's format."""
    del format_name
    from rollout_io.generator_output import write_generator_output
    from rollout_io.reader import read

    open_dataset(dataset)
    table = read(dataset)
    write_generator_output(table, out, failed)
    note(f"{dataset}: {table.num_rows} rows -> {out}")
