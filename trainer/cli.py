"""The `train` verb."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trainer.loop import TrainResult


@click.command()
@click.argument("dataset")
@click.option("--model", required=True, metavar="DIR", help="Hugging Face model directory.")
@click.option("--out", required=True, metavar="RUN", help="Directory for the run; must be new.")
@click.option("--config", metavar="F.toml", help="Configuration file.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one key of the configuration; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def train(
    *,
    dataset: str,
    model: str,
    out: str,
    config: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    r"""Train a policy on a rollout dataset.

    Writes RUN/config.json, RUN/metrics.jsonl and RUN/checkpoints/global_step_N/, a model
    directory that Transformers loads.

    \b
    Example:
      rollouts train ds --model smollm2 --out run --set learning_rate=1e-5 --set max_updates=2
    """
    import trainer

    given = (f"dataset={dataset}", f"model={model}", f"out={out}")
    result = trainer.train(trainer.load_config(config, (*given, *overrides)))
    click.echo(json.dumps(dataclasses.asdict(result)) if as_json else _report(result))


def _report(result: TrainResult) -> str:
    skipped = f", {result.num_skipped_updates} skipped" if result.num_skipped_updates else ""
    failed = f", {result.num_failed} failed trajectories" if result.num_failed else ""
    dropped = f", {result.num_dropped_groups} without variance left out"
    lines = [
        f"updates      {result.num_updates}{skipped}",
        f"groups       {result.num_groups}{dropped if result.num_dropped_groups else ''}{failed}",
        f"metrics      {result.out}/metrics.jsonl",
        f"checkpoint   {result.checkpoint}",
    ]
    return "\n".join(lines)
