"""`rollouts export`: write a dataset in another project's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rollout_io.cli.datasets import open_valid
from rollout_io.cli.output import emit_json, example, note
from rollout_io.formats.exports import FORMATS
from rollout_io.formats.exports import export as write_export
from rollout_io.startup import keep_pandas_out_of_arrow

if TYPE_CHECKING:
    from rollout_io.formats.exporting import Failed


@click.command(epilog=example("rollouts export shop/ --format skyrl --out shop.json"))
@click.argument("dataset", metavar="DS", type=click.Path())
@click.option(
    "--format",
    "format_name",
    required=True,
    type=click.Choice(list(FORMATS)),
    metavar="NAME",
    help="; ".join(f"{name}: {what}" for name, (_, what) in FORMATS.items()) + ".",
)
@click.option("--out", required=True, type=click.Path(), metavar="PATH", help="Output path.")
@click.option(
    "--failed",
    type=click.Choice(["group", "trajectory"]),
    default="group",
    show_default=True,
    help="If a trajectory failed: mask its entire group, or only the trajectory (hf, "
    "session_traces and parquet keep all rows).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def export(dataset: str, format_name: str, out: str, failed: Failed, *, as_json: bool) -> None:
    """Export a dataset in another project's format."""
    from rollout_io.dataset.sources import refuse_changed

    keep_pandas_out_of_arrow()
    with refuse_changed(dataset):
        open_valid(dataset)
    done = write_export(dataset, out, format_name, failed)
    if as_json:
        counts = {"num_rows_read": done.num_rows_read, "num_rows_written": done.num_rows_written}
        emit_json(counts | {"left_out": done.left_out, "remarks": done.remarks})
        return
    for remark in done.remarks:
        note(remark)
    note(f"{dataset} -> {out} ({format_name}): {done.text()}")
