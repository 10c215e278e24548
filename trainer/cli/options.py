"""Options shared by several commands of this package, and the hints at their end."""

import importlib.util
import shlex

import click

from rollout_io.cli.output import next_command, note

algorithm_option = click.option(
    "--algorithm",
    metavar="NAME",
    help="Advantage estimator: grpo, rloo, maxrl, reinforce++, gae, or your module:function "
    "(advantage.estimator).",
)

update_option = click.option(
    "--update",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Number of the update: its global_step in RUN/metrics.jsonl.",
)


_PACKAGES = {"view": ("httptools", "uvicorn", "jinja2"), "plot": ("matplotlib",)}
"""Packages that each command needs; the extra with the name of the command installs them."""


def suggest_next_steps(out: str, checkpoint: str) -> None:
    """Print to stderr how to view and plot a run, and how to load its model.

    For a command whose packages are missing, print how to install them first.
    """
    run = shlex.quote(out)
    for verb, packages in _PACKAGES.items():
        if all(importlib.util.find_spec(name) for name in packages):
            next_command(f"rollouts {verb} {run}")
        else:
            note(f'next: pip install "rollout-io[{verb}]", then rollouts {verb} {run}')
    note(f"next: transformers.AutoModelForCausalLM.from_pretrained({checkpoint!r})")
