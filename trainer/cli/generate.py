"""The `rollouts generate` command."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollout_io.cli.output import (
    emit,
    emit_json,
    example,
    going_on,
    next_command,
    note,
    shown_log,
    warn,
)

if TYPE_CHECKING:
    from pipelines.generation.run import GenerateResult


@click.command(
    short_help="Sample trajectories for tasks from an engine.",
    epilog=example("rollouts generate gsm8k.toml --out rollouts/ --set group_size=8"),
)
@click.argument("config", metavar="CONFIG.toml", type=click.Path())
@click.option("--out", metavar="DS", help="Dataset to write, or to resume.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one key of the configuration (docs/generation.md); may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def generate(*, config: str, out: str | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Sample trajectories for tasks from an engine, and write them to a rollout dataset.

    CONFIG.toml sets tasks, model and environment (all keys: docs/generation.md). Paths, and modules
    with your own environments and agents, are relative to the current directory. Groups are written
    to DS as they complete. Run the same command again to generate the missing trajectories.
    Trajectories that fail are kept in the dataset with their error and are not retried. The exit
    code is 1 if all generated trajectories failed.
    """
    import asyncio

    from pipelines.generation.config import load_generate_config
    from pipelines.generation.run import generate as run
    from trainer.engine import open_engine

    sys.path.insert(0, str(Path.cwd()))
    settings = load_generate_config(config, overrides, out=out)
    how = "complete groups are kept; run the same command again to resume"
    with shown_log(), going_on(lambda: how):
        result = asyncio.run(run(settings, open_engine))
    for warning in result.warnings:
        warn(warning)
    emit_json(dataclasses.asdict(result)) if as_json else emit(_report(result))
    if result.first_error:
        warn(f"first error: {result.first_error}")
        next_command("rollouts", "inspect", result.out, "--where", "error is not null")
    else:
        next_command("rollouts", "validate", result.out)
    if result.num_held and not result.num_trajectories:
        note("note: the dataset is complete; to retry failed trajectories, choose a new --out")
    return int(result.num_failed == result.num_trajectories > 0)


def _report(result: GenerateResult) -> str:
    held = f", {result.num_held} already in the dataset" if result.num_held else ""
    errors = ", ".join(f"{name} {count}" for name, count in sorted(result.errors.items()))
    rate = result.num_response_tokens / max(result.duration_s, 1e-9)
    mean = "unknown" if result.mean_return is None else f"{result.mean_return:.4f}"
    lines = [
        f"trajectories   {result.num_trajectories}{held}",
        f"failed         {result.num_failed}{f' ({errors})' if errors else ''}",
        f"steps          {result.num_steps}",
        f"tokens         {result.num_response_tokens} in {result.duration_s:.1f} s ({rate:,.0f}/s)",
        f"mean reward    {mean}",
        f"dataset        {result.out}",
    ]
    return "\n".join(lines)
