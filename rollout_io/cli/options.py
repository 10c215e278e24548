"""Options that verbs share, how verbs open a dataset, and click's usage errors as `ConfigError`.

The options are `--workers`, `--engine` and `--layout`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from schemas.errors import ConfigError, InvariantError, count

if TYPE_CHECKING:
    import polars as pl

    from rollout_io.dataset.parallel import Engine, Workers
    from rollout_io.dataset.storage import Paths


_BYTES_PER_PROCESS = 64 << 20  # starting a process takes as long as reading tens of MB

_CONVERTED_ALONE_BYTES = 320 << 20
"""One process converts logs up to this size, because starting a second process takes longer."""

_LOG = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def _one_dataset(_: click.Context, __: click.Parameter, paths: tuple[str, ...]) -> str | None:
    from rollout_io.dataset.storage import joined

    return joined(paths) if paths else None


def dataset_argument(*, required: bool = True) -> Callable[[F], F]:
    """Add the argument DS: one or several paths, which are read as one dataset."""
    return click.argument(
        "dataset",
        metavar="DS...",
        nargs=-1,
        required=required,
        type=click.Path(),
        callback=_one_dataset,
    )


def engine_option(command: F) -> F:
    """Add the option `--engine`."""
    return click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="local: processes on this machine. ray: Ray Data, on the cluster at RAY_ADDRESS, or "
        "on a new cluster on this machine, whose ports are open to the network.",
    )(command)


def workers_options(command: F) -> F:
    """Add the options `--workers` and `--engine`."""
    option = click.option(
        "--workers",
        type=click.IntRange(1),
        metavar="N",
        help="Number of processes.  [default: based on the amount of data]",
    )
    return option(engine_option(command))


def workers_of(num: int | None, engine: Engine, dataset: str) -> Workers:
    """Return the workers for a dataset; by default, their number depends on its size."""
    from rollout_io.dataset.parallel import Workers
    from rollout_io.dataset.storage import find_shards

    shards = find_shards(dataset)
    if num is None:
        num = num_for(sum(shard.fs.size(shard.path) for shard in shards))
    chosen = Workers(max(1, min(num, len(shards))), engine)
    processes = count(chosen.num, "process", "es")
    _LOG.debug("%s: %s, %s (%s)", dataset, count(len(shards), "shard"), processes, engine)
    return chosen


def num_for(num_bytes: int) -> int:
    """Return the default number of processes for data of this size."""
    from rollout_io.dataset.parallel import num_cores

    return min(num_cores(), 1 + num_bytes // _BYTES_PER_PROCESS)


def num_converters(num_bytes: int, *, retokenizes: bool) -> int:
    """Return the default number of processes that convert logs of this size.

    Args:
        num_bytes: Size of the logs.
        retokenizes: True if text is re-tokenized, which makes the conversion many times slower.
    """
    is_small = num_bytes <= _CONVERTED_ALONE_BYTES
    return 1 if is_small and not retokenizes else num_for(num_bytes)


layout_option = click.option(
    "--layout",
    type=click.Choice(["prefix", "full"]),
    help="Store prompts as references to earlier steps, or in full.  [default: as in DS]",
)


_LOG = logging.getLogger(__name__)


def open_dataset(path: str) -> pl.LazyFrame:
    """Scan a dataset, after checking that the required columns exist with their declared types.

    Raises:
        InputError: `dataset_exists`: the path is not a dataset.
        InvariantError: `columns_and_types`: a column is missing or has the wrong type.
    """
    import polars as pl

    from rollout_io.dataset.reader import scan
    from schemas.type_checks import check_types
    from schemas.view import View

    frame = scan(path)
    empty = pl.DataFrame(schema=frame.collect_schema()).to_arrow()
    breaches = View(empty).run(check_types)
    if len(breaches):
        hint = f"run `rollouts validate {path}` to list every error"
        raise InvariantError("columns_and_types", path, breaches["message"][0], "", hint)
    return frame


def open_valid(path: str, workers: Workers | None = None) -> pl.LazyFrame:
    """Scan a dataset, after checking every row against the named invariants.

    Raises:
        InputError: `dataset_exists`: the path is not a dataset.
        InvariantError: The dataset breaks an invariant, whose name is the rule id.
    """
    from rollout_io.dataset.checking import validate

    frame, start_s = open_dataset(path), time.monotonic()
    validate(path, workers or workers_of(None, "local", path))
    _LOG.debug("%s: checked in %.2f s", path, time.monotonic() - start_s)
    return frame


def can_audit(dataset: Paths) -> bool:
    """True if a row has log-probabilities and shows no picture, which `audit` does not recompute."""
    import polars as pl

    from rollout_io.dataset.reader import scan
    from schemas.columns import PICTURES

    rows = scan(dataset)
    names = rows.collect_schema().names()
    if "rollout_logprobs" not in names:
        return False
    present = rows.filter(pl.col("rollout_logprobs").is_not_null())
    if PICTURES in names:
        present = present.filter(pl.col(PICTURES).is_null())
    return not present.select("rollout_logprobs").head(1).collect().is_empty()


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
