"""`rollouts export`: write a dataset in another project's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rollout_io.cli.options import dataset_argument, open_valid
from rollout_io.cli.output import emit_json, example, note
from rollout_io.formats.exports import export as write_export
from rollout_io.formats.exports import formats
from rollout_io.startup import keep_pandas_out_of_arrow

if TYPE_CHECKING:
    from rollout_io.formats.exporting import Failed


FORMATS = formats()
EXAMPLES = example(
    "rollouts export shop/ --format skyrl --out shop.json"
    "\n  rollouts export shop/ --format sft --select best --out best.jsonl"
    "\n  rollouts export shop/ --format dpo_tokens --out pairs.parquet"
)


def _selections() -> str:
    """Describe the selections of each format that has some; formats with the same share a clause."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, target in FORMATS.items():
        names.setdefault(target.selections, []).append(name)
    clauses = (
        f"{', '.join(format_names)}: {', '.join(selections)}"
        for selections, format_names in names.items()
        if selections
    )
    return "; ".join(clauses)


@click.command(epilog=EXAMPLES)
@dataset_argument()
@click.option(
    "--format",
    "format_name",
    required=True,
    type=click.Choice(list(FORMATS)),
    metavar="NAME",
    help="; ".join(f"{name}: {target.summary}" for name, target in FORMATS.items()) + ".",
)
@click.option("--out", required=True, type=click.Path(), metavar="PATH", help="Output path.")
@click.option(
    "--failed",
    type=click.Choice(["group", "trajectory"]),
    help="If a trajectory failed: mask its entire group, or only the trajectory (hf, "
    "session_traces and parquet keep all rows).  [default: group; trajectory for formats with "
    "--select]",
)
@click.option(
    "--select",
    metavar="WHAT",
    help=f"Which samples to write, by return. {_selections()}. The first is the default.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def export(
    dataset: str,
    format_name: str,
    out: str,
    failed: Failed | None,
    select: str | None,
    *,
    as_json: bool,
) -> None:
    """Export a dataset in another project's format."""
    from rollout_io.dataset.sources import refuse_changed

    keep_pandas_out_of_arrow()
    with refuse_changed(dataset):
        open_valid(dataset)
    done = write_export(dataset, out, format_name, failed, select)
    if as_json:
        counts = {"num_rows_read": done.num_rows_read, "num_rows_written": done.num_rows_written}
        if done.num_samples is not None:
            counts |= {"num_samples": done.num_samples} | done.counts
        emit_json(counts | {"left_out": done.left_out, "remarks": done.remarks})
        return
    for remark in done.remarks:
        note(remark)
    note(f"{dataset} -> {out} ({format_name}): {done.text()}")
