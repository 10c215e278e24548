"""Suggest commands for a finished run."""

from __future__ import annotations

import shlex

from rollout_io.cli.output import next_command, note


def suggest_next_steps(out: str, checkpoint: str) -> None:
    """Print to stderr how to view and plot a run, and how to load its model."""
    run = shlex.quote(out)
    next_command(f"rollouts view {run}")
    next_command(f"rollouts plot {run}")
    note(f"next: transformers.AutoModelForCausalLM.from_pretrained({checkpoint!r})")
