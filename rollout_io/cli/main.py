"""The `rollouts` command, which runs a verb and maps errors to messages and exit codes.

Exit codes: 0 success, 1 findings or invalid input, 2 wrong usage or an unexpected error, 130
interrupted, 143 terminated. Verbs are click commands, registered as entry points of the group
`rollout_io.verbs`. A verb is imported when it is called or listed by `--help`; verbs therefore
import heavy libraries inside functions.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from rollout_io import __version__
from rollout_io.cli.options import UnknownVerbError, explained_usage
from rollout_io.cli.output import kept_log, say, show_error, show_log
from rollout_io.plugins import Plugin, plugins
from rollout_io.startup import HiddenPackageError, keep_torch_out_of_transformers, require_ours
from rollout_io.terminal import silence
from schemas.errors import InputError, RolloutError
from schemas.imports import explained

GROUP = "rollout_io.verbs"
SECTIONS = {
    "Get data in": ("convert", "record", "generate", "formats"),
    "Look": ("inspect", "view", "stats", "diff", "drift", "plot", "validate"),
    "Shape": ("filter", "merge", "rescore", "redact", "export"),
    "Train": ("train", "rl"),
    "Explain a run": ("audit", "replay", "blame"),
}
"""The verbs by what people do. Verbs of other packages come after them."""

ORDER = tuple(name for names in SECTIONS.values() for name in names)

_WIDEST_VERB = 12
_TOKENIZING = frozenset({"convert", "drift", "record", "view"})
"""Verbs that may load a tokenizer, and never a model."""


class Verbs(click.Group):
    """The verbs of all installed packages, in the order of a typical workflow."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs."""
        ranks = {name: index for index, name in enumerate(ORDER)}
        return sorted(_registered(ctx), key=lambda name: (ranks.get(name, len(ORDER)), name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs in sections."""
        names = self.list_commands(ctx)
        others = tuple(name for name in names if name not in ORDER)
        for title, verbs in {**SECTIONS, "Of other packages": others}.items():
            commands = [(name, self.get_command(ctx, name)) for name in verbs if name in names]
            if lines := [
                (name, command.get_short_help_str(100)) for name, command in commands if command
            ]:
                with formatter.section(title):
                    formatter.write_dl(lines, col_max=_WIDEST_VERB)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a verb; return a stub that reports the missing library if the import fails."""
        entry = _registered(ctx).get(cmd_name)
        if entry is None:
            return None
        try:
            require_ours(entry.module.partition(".")[0])
            command: click.Command = entry.load()
        except Exception as error:  # a package's verb that fails must not end the others
            reason = error if isinstance(error, ImportError) else ImportError(str(error))
            return _unavailable(cmd_name, reason)
        return with_common_options(command)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; add its context to any usage error that click raises without one."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            name = ctx.invoked_subcommand
            if error.ctx is None and name and (command := self.get_command(ctx, name)):
                error.ctx = click.Context(command, parent=ctx, info_name=name)
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or suggest a similar name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if args[0].startswith("-"):
                raise
            raise UnknownVerbError(args[0], self.list_commands(ctx), ctx) from None


def _registered(ctx: click.Context) -> dict[str, Plugin]:
    """Return all verbs by name; search the installed packages only on the first call."""
    if GROUP not in ctx.meta:
        ctx.meta[GROUP] = {entry.name: entry for entry in plugins(GROUP)}
    verbs: dict[str, Plugin] = ctx.meta[GROUP]
    return verbs


def _unavailable(name: str, error: ImportError) -> click.Command:
    def fail(*_: object) -> NoReturn:
        raise explained(error, "train", f"rollouts {name}")

    accept_all = {"ignore_unknown_options": True, "allow_extra_args": True}
    text = "Not available: a library is missing."
    return click.Command(name, callback=fail, context_settings=accept_all, help=text)


EXAMPLE = """\b
Examples:
  rollouts convert logs.jsonl --rewards rewards.jsonl --out rollouts/
  rollouts inspect rollouts/ --where "return > 0" --limit 2
  rollouts VERB --help
"""


@click.group(cls=Verbs, epilog=EXAMPLE, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="rollouts")
def rollouts() -> None:
    """Turn agent logs into exact-token rollout datasets, and train on them.

    Data is written to stdout, everything else to stderr. Exit code 0: success; 1: problems were
    found, or the input is invalid; 2: wrong usage or an unexpected error. An error ends with its
    id, such as [json_line]; docs/errors.md has a cause and a fix for each id.
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; SIGTERM triggers the same cleanup as an interrupt."""
    open_standard_streams()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments and arguments[0] in _TOKENIZING:
        keep_torch_out_of_transformers()
    sys.exit(run(arguments))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    with kept_log():
        return copy_context().run(_run, args)  # the effect of -q ends with the command


def _run(args: Sequence[str] | None) -> int:
    try:
        arguments = list(sys.argv[1:] if args is None else args)
        result = rollouts.main(
            arguments, prog_name="rollouts", standalone_mode=False, obj=arguments
        )
        sys.stdout.flush()
    except click.exceptions.Abort:
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _report(explained_usage(error), 2)
    except RolloutError as error:
        return _report(error)
    except HiddenPackageError as error:
        say(f"Error: {error}")
        return 1
    except BrokenPipeError:
        return _close_stdout()
    except OSError as error:
        return _report(_file_error(error))
    except RecursionError:
        finding, hint = "an input is nested too deeply", "flatten the input or its directories"
        return _report(InputError("nesting", "this command", finding, hint=hint))
    except MemoryError:
        finding = "there is not enough memory"
        hint = "use a machine with more memory, or split the input"
        return _report(InputError("memory", "this command", finding, hint=hint))
    except Exception as error:
        return _unexpected(error)
    except BaseException as error:
        if not _is_panic(error):
            raise
        return _unexpected(error)
    return result if isinstance(result, int) else 0


def _report(error: RolloutError, code: int = 1) -> int:

    if _is_debugging():
        traceback.print_exc()
    show_error(error)
    return code


def _file_error(error: OSError) -> RolloutError:
    """Convert an error of the operating system, such as a file error, to one for the user."""
    from rollout_io.dataset.opening import too_many_open_files

    where = str(error.filename or "this command")
    if limit := too_many_open_files(error, where):
        return limit
    if error.filename is None and not _has_working_directory():
        finding = "the working directory does not exist any more"
        return InputError("working_directory", where, finding, hint="cd to another directory")
    finding = " ".join((error.strerror or str(error) or type(error).__name__).lower().split())
    hint = None if error.filename else "check the disk and the network connection"
    return InputError("file", where, finding, hint=hint)


def _has_working_directory() -> bool:
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _is_panic(error: BaseException) -> bool:
    """True for a panic of Polars, which is no `Exception`."""
    polars = sys.modules.get("polars")
    return polars is not None and isinstance(error, polars.exceptions.PanicException)


def _unexpected(error: BaseException) -> int:
    if _is_debugging():
        traceback.print_exc()
        return 2
    text = " ".join(str(error).split())
    say(f"Error: unexpected {type(error).__name__}: {text}")
    say("Hint: set ROLLOUTS_DEBUG=1 to see the traceback.")
    return 2


def _close_stdout() -> int:
    """Redirect stdout to /dev/null, because its reader is gone and Python flushes it at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _is_debugging() -> bool:
    return bool(os.environ.get("ROLLOUTS_DEBUG"))


_QUIET = "Hide notes and progress; warnings and errors are still printed."


def with_common_options(command: click.Command) -> click.Command:
    """Add the common options to a command, unless it already has them."""
    options = {name for param in command.params for name in param.opts}
    for param in command.params:
        if "--out" in param.opts and "-o" not in options:
            param.opts = ["-o", *param.opts]
    if not options & {"-q", "--quiet"}:
        command.params.append(_flag(["-q", "--quiet"], silence, _QUIET))
    if not options & {"-v", "--verbose"}:
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


def open_standard_streams() -> None:
    """Replace closed standard streams.

    Their descriptors are reserved: the first files that a command opens would get them, and
    messages would then be written into these files. Writing to a closed stdout raises
    `BrokenPipeError`, as if its reader were gone; text for a closed stderr is dropped.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Closed()), encoding="utf-8", write_through=True
        )
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


class _Closed(io.RawIOBase):
    """A stream that nobody reads."""

    def writable(self) -> bool:
        return True

    def write(self, _: Any) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
