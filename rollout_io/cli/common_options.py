"""Options common to all verbs: `-o` for `--out`, `-q` and `-v`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import click

from rollout_io.cli.output import show_log
from rollout_io.terminal import silence

_QUIET = "Hide notes and progress; warnings and errors are still printed."


def with_common_options(command: click.Command) -> click.Command:
    """Add the common options to a command, unless it already has them."""
    known = {name for param in command.params for name in param.opts}
    for param in command.params:
        if "--out" in param.opts and "-o" not in known:
            param.opts = ["-o", *param.opts]
    if not known & {"-q", "--quiet"}:
        command.params.append(_flag(["-q", "--quiet"], silence, _QUIET))
    if not known & {"-v", "--verbose"}:
        debug = partial(show_log, logging.DEBUG)
        command.params.append(_flag(["-v", "--verbose"], debug, "Also print debug messages."))
    return command


def _flag(names: list[str], effect: Callable[[], None], text: str) -> click.Option:
    def apply(_ctx: click.Context, _param: click.Parameter, value: object) -> None:
        if value:
            effect()

    return click.Option(
        names, is_flag=True, expose_value=False, is_eager=True, callback=apply, help=text
    )
