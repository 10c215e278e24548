"""Conversion of click's usage errors to `ConfigError`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import click

from schemas.errors import ConfigError

_KINDS = {
    "integer range": "a whole number",
    "integer": "a whole number",
    "float range": "a number",
    "float": "a number",
}
"""Descriptions of click's types, by name."""
_SIMILAR = 0.65
_NEW_OUT = "existing results are never overwritten: choose a new --out, or delete the old one"
_INPUTS = "pass inputs as arguments, without an option"
_OTHER_TOOLS = {
    **dict.fromkeys(("--overwrite", "--force", "-f", "-y"), _NEW_OUT),
    **dict.fromkeys(("--input", "--inputs", "-i", "--file", "--data", "--dataset"), _INPUTS),
}
"""Hints for options that other tools have, and no verb here."""

_REPLACED = {"--where-all": 'write --where "all(CONDITION)"'}
"""Hints for options of earlier versions."""


class Number(click.FloatRange):
    """A number in a range; NaN, which no bound excludes, is none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Convert the text of an option."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is not a number", param, ctx)
        return number

    def _describe_range(self) -> str:  # click writes "x<=None" where there is no bound
        return "" if self.min is None and self.max is None else super()._describe_range()


class HintedUsageError(click.UsageError):
    """A usage error with a specific hint.

    Args:
        message: Description of the problem.
        hint: How to fix it.
        ctx: Context of the verb; by default the current one.
    """

    def __init__(self, message: str, hint: str, ctx: click.Context | None = None) -> None:
        super().__init__(message, ctx or click.get_current_context(silent=True))
        self.hint = hint


class UnknownVerbError(HintedUsageError):
    """The verb does not exist.

    Args:
        name: The mistyped verb.
        known: All verbs.
        ctx: Context of the group.
    """

    def __init__(self, name: str, verbs: list[str], ctx: click.Context) -> None:
        near = _closest(name, verbs)
        hint = f"did you mean {near[0]}?" if near else "run `rollouts --help` to list the verbs"
        super().__init__(f"unknown verb {name!r}", hint, ctx)


def explained_usage(error: click.ClickException) -> ConfigError:
    """Convert a usage error of click to a `ConfigError` with a hint."""
    ctx = getattr(error, "ctx", None)
    command = ctx.command_path if ctx is not None else "rollouts"
    return ConfigError("usage", command, _found(error), "", _hint(error, ctx))


def _found(error: click.ClickException) -> str:
    """Describe the error as a clause that begins in lower case."""
    if isinstance(error, click.NoSuchOption):
        return f"unknown option {error.option_name}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        kind = "option" if isinstance(error.param, click.Option) else "argument"
        return f"missing {kind} {_name(error.param, error.ctx)}"
    text = error.message
    for kind, words in _KINDS.items():
        text = text.replace(f"is not a valid {kind}.", f"is not {words}.")
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"{_name(error.param, error.ctx)}: {text}"
    return text[:1].lower() + text[1:] if not text.startswith("-") else text


def _hint(error: click.ClickException, ctx: click.Context | None) -> str:
    if isinstance(error, HintedUsageError):
        return error.hint
    if ctx is None:
        return "run `rollouts --help`"
    if isinstance(error, click.NoSuchOption):
        if error.option_name in _REPLACED:
            return _REPLACED[error.option_name]
        options = [name for param in ctx.command.params for name in param.opts if name[0] == "-"]
        if near := _closest(error.option_name, options):
            return f"did you mean {near[0]}?"
        if (hint := _OTHER_TOOLS.get(error.option_name)) and (
            "--out" in options or hint is _INPUTS
        ):
            return hint
        if "--set" in options:
            return "set a key of the configuration with --set KEY=VALUE"
    if isinstance(error, click.BadOptionUsage):
        for param in ctx.command.params:
            if error.option_name in param.opts:
                return f"pass {error.option_name} {param.make_metavar(ctx)}"
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Option):
        name = _name(error.param, ctx)
        text = f"pass {name} {error.param.make_metavar(ctx)}"
        return f"{text} ({error.param.help.rstrip('.')})" if error.param.help else text
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        return _value_hint(error, error.param, ctx)
    usage = " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])
    return f"write `{usage}`; `{ctx.command_path} --help` lists the options"


def _value_hint(error: click.BadParameter, option: click.Option, ctx: click.Context) -> str:
    """Suggest a value of an option: the closest choice, all choices, or the option's metavar."""
    name = _name(option, ctx)
    if isinstance(option.type, click.Choice):
        quoted = error.message.split("'")[1:2]
        near = _closest(quoted[0], option.type.choices) if quoted else []
        if near:
            return f"did you mean {name} {near[0]}?"
        return f"pass one of {', '.join(option.type.choices)}"
    return f"pass {name} {option.make_metavar(ctx)}; see `{ctx.command_path} --help`"


def _closest(name: str, names: Sequence[str]) -> list[str]:
    """Return the known name that is most similar to `name`, as a list; empty if none is similar.

    Dashes do not count: `--force` is not similar to `--format`.
    """
    import difflib

    bare = {option.lstrip("-"): option for option in names}
    return [bare[near] for near in difflib.get_close_matches(name.lstrip("-"), bare, 1, _SIMILAR)]


def _name(param: click.Parameter, ctx: click.Context | None) -> str:
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return param.make_metavar(ctx or click.Context(click.Command("rollouts")))
