"""The option `--layout` of verbs that derive a dataset from another."""

from __future__ import annotations

import click

layout_option = click.option(
    "--layout",
    type=click.Choice(["prefix", "full"]),
    help="Store prompts as references to earlier steps, or in full.  [default: as in DS]",
)
