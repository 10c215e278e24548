"""Options that all verbs have: `-o` for `--out`, `-q` and `-v`."""

from __future__ import annotations

import logging

import click

from rollout_io.cli.output import show_log
from rollout_io.terminal import silence


def with_common_options(command: click.Command) -> click.Command:
    """Add the common options to a verb; a verb that has them already stays as it is."""
    known = {name for param in command.params for name in param.opts}
    for param in command.params:
        if "--out" in param.opts and "-o" not in known:
            param.opts = ["-o", *param.opts]
    if not known & {"-q", "--quiet"}:
        command.params.append(_quiet())
    if not known & {"-v", "--verbose"}:
        command.params.append(_verbose())
    return command


def _quiet() -> click.Option:
    return click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=lambda ctx, param, value: _be_quiet(ctx, param, value=value),
        help="Hide notes and progress; warnings and errors are still printed.",
    )


def _verbose() -> click.Option:
    return click.Option(
        ["-v", "--verbose"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=lambda ctx, param, value: _be_verbose(ctx, param, value=value),
        help="Print debug messages too.",
    )


def _be_quiet(ctx: click.Context, param: click.Parameter, *, value: bool) -> None:
    del ctx, param
    if value:
        silence()


def _be_verbose(ctx: click.Context, param: click.Parameter, *, value: bool) -> None:
    del ctx, param
    if value:
        show_log(logging.DEBUG)
