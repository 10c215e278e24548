"""The `rollouts rl` command."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollout_io.cli.output import emit, emit_json, example, going_on, note, shown_log
from schemas.errors import count
from trainer.cli import (
    algorithm_option,
    config_from_main,
    errors_printed_once,
    in_processes,
    num_processes_option,
    require,
    resume_command,
    resume_option,
    suggest_next_steps,
)

if TYPE_CHECKING:
    from trainer.rl.loop import RlResult


@click.command(
    short_help="Train a policy on its own samples, in a loop.",
    epilog=example("rollouts rl addition.toml --out run/ --set optimizer.learning_rate=5e-6"),
)
@click.argument("config", metavar="CONFIG.toml", type=click.Path(), required=False)
@click.option("--out", metavar="RUN", help="Directory for the run; must not contain a run.")
@click.option("--lr", type=float, metavar="X", help="Peak learning rate (optimizer.learning_rate).")
@algorithm_option
@num_processes_option
@resume_option
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one key, as SECTION.KEY=VALUE (docs/rl.md); may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@errors_printed_once
def rl(
    *,
    config: str | None,
    out: str | None,
    lr: float | None,
    algorithm: str | None,
    num_processes: int,
    resume: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Train a policy on its own samples: sample groups, update, reload the weights, repeat.

    CONFIG.toml sets loop.tasks, loop.num_iterations and model.path, and has a table [generate] with
    keys of `rollouts generate`, optionally [evaluate], and the sections of `rollouts train`
    (docs/rl.md). Each iteration samples batch.groups_per_batch groups of generate.group_size
    trajectories, trains on them, and loads the new weights into the engine. If loop.max_staleness is
    above 0, sampling continues during training.

    RUN/rollouts/ keeps every sampled rollout, one directory per iteration: `rollouts train
    'RUN/rollouts/*'` repeats the same updates. `rollouts plot` draws RUN/metrics.jsonl.
    Transformers can load the models in RUN/checkpoints/. Ctrl-C saves a checkpoint after the current
    iteration's update; `rollouts rl --resume RUN` continues without losing a finished group.
    """
    from rollout_io.configuration import flat, read_values
    from trainer.distributed.meeting import ARRIVAL, together
    from trainer.distributed.processes import is_main
    from trainer.rl import load_rl_config, run

    sys.path.insert(0, str(Path.cwd()))
    options = {"optimizer.learning_rate": lr, "advantage.estimator": algorithm, "run.out": out}
    if resume is None:
        require(click.get_current_context(), config=config)
        set_keys = {override.partition("=")[0].strip() for override in overrides}
        if "run.out" not in flat(read_values(config)).keys() | set_keys:
            require(click.get_current_context(), out=out)
    else:
        config = str(config_from_main(resume, {"CONFIG.toml": config, "--out": out}))
        options["run.out"] = resume
    command = {"command": "rl", "--out": out, "--resume": resume}
    settings = together(
        lambda: load_rl_config(config, overrides, options), lambda _: command, patience=ARRIVAL
    )
    again = f"continue with `{resume_command('rl', settings.run.out, num_processes)}`"
    how = f"finished work is kept; {again}"
    waits_for = "the current update, or running calls"
    if (status := in_processes(num_processes, again)) is not None:
        return status
    with shown_log(), going_on(lambda: how, waits_for) if is_main() else nullcontext():
        result = run(settings, resume=resume is not None)
    if not is_main():
        return 0
    emit_json(dataclasses.asdict(result)) if as_json else emit(_report(result))
    suggest_next_steps(result.out, result.checkpoint)
    if result.return_mean is None:
        note("note: all iterations are already complete; increase loop.num_iterations to continue")
    return 0


def _report(result: RlResult) -> str:
    skipped = f", {result.num_skipped_updates} skipped" if result.num_skipped_updates else ""
    greedy = result.num_greedy_rows
    lines = [
        f"iterations   {result.num_iterations}",
        f"updates      {result.num_updates}{skipped}",
        *([f"masked       {count(greedy, 'greedy row')}"] if greedy else []),
        f"return_mean  {_number(result.return_mean)}",
        f"evaluation   {_number(result.evaluation)}",
        f"rollouts     {result.out}/rollouts",
        f"metrics      {result.out}/metrics.jsonl",
        f"checkpoint   {result.checkpoint}",
    ]
    return "\n".join(line for line in lines if not line.endswith(" none"))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
