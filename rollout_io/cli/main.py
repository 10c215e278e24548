"""Finds the verbs, runs one, and turns whatever goes wrong into a message and an exit code.

Exit codes: 0 ok, 1 findings or a user's error, 2 wrong usage or an unexpected error, 130
interrupted, 143 terminated. Verbs are click commands registered as entry points of the group
`rollout_io.verbs`; one is imported when it is called or when `--help` lists it, so their modules
import heavy libraries inside functions.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn

import click

from schemas.errors import RolloutError

GROUP = "rollout_io.verbs"
ORDER = (
    *(
        "formats",
        "convert",
        "validate",
        "inspect",
        "stats",
        "filter",
        "merge",
        "unmerge",
        "drift",
        "export",
    ),
    *("record", "generate", "train", "rl", "plot"),
)


class Verbs(click.Group):
    """The verbs of all installed packages, in the order of the data path."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the verbs."""
        del ctx
        known = {name: index for index, name in enumerate(ORDER)}
        return sorted(_registered(), key=lambda name: (known.get(name, len(ORDER)), name))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a verb; one whose libraries are missing says so when it is called."""
        del ctx
        entry = _registered().get(cmd_name)
        if entry is None:
            return None
        try:
            command: click.Command = entry.load()
        except ImportError as error:
            return _unavailable(cmd_name, error)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or name the nearest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            if args[0].startswith("-") or not near:
                raise
            message = f"No such verb {args[0]!r}. Did you mean {near[0]!r}?"
            raise click.UsageError(message, ctx) from None


def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _unavailable(name: str, error: ImportError) -> click.Command:
    def fail(*_: object) -> NoReturn:
        hint = 'pip install "rollout-io[train]"'
        raise RolloutError("extra_installed", f"rollouts {name}", str(error), "", hint)

    accept_all = {"ignore_unknown_options": True, "allow_extra_args": True}
    text = "Not available: a library is missing."
    return click.Command(name, callback=fail, context_settings=accept_all, help=text)


EXAMPLE = """\b
Examples:
  rollouts convert logs.jsonl --rewards rewards.jsonl --out rollouts/
  rollouts inspect rollouts/ --where "reward > 0" --limit 2
  rollouts VERB --help
"""


@click.group(cls=Verbs, epilog=EXAMPLE, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rollout-io", prog_name="rollouts")
def rollouts() -> None:
    """From agent logs to a policy update: exact-token rollouts as Parquet.

    Data goes to stdout, everything else to stderr. Exit code 0: ok; 1: findings or an error of
    yours; 2: wrong usage or an unexpected error.
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; a polite kill cleans up as an interrupt does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    try:
        result = rollouts.main(args, prog_name="rollouts", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return 2
    except RolloutError as error:
        return _report(error)
    except BrokenPipeError:
        return _close_stdout()
    except OSError as error:
        return _report(_file_error(error)) if error.filename else _unexpected(error)
    except Exception as error:
        return _unexpected(error)
    return result if isinstance(result, int) else 0


def _report(error: RolloutError) -> int:
    from rollout_io.trajectory_view import printable

    if _is_debugging():
        traceback.print_exc()
    click.echo(printable(f"error: {error}"), err=True)
    if error.hint:
        click.echo(printable(f"\nhint: {error.hint}"), err=True)
    return 1


def _file_error(error: OSError) -> RolloutError:
    got = (error.strerror or str(error)).lower()
    return RolloutError("file", str(error.filename), got)


def _unexpected(error: Exception) -> int:
    if _is_debugging():
        traceback.print_exc()
        return 2
    text = " ".join(str(error).split())
    click.echo(f"error: unexpected {type(error).__name__}: {text}", err=True)
    click.echo("\nhint: ROLLOUTS_DEBUG=1 rollouts ... shows the traceback", err=True)
    return 2


def _close_stdout() -> int:
    """The reader of stdout has gone: say nothing, and give the interpreter nothing to flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _is_debugging() -> bool:
    return bool(os.environ.get("ROLLOUTS_DEBUG"))
