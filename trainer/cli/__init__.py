"""Commands of the trainer, and what they share: `--num-processes`, `--resume`, hints at the end."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import click

from rollout_io.cli.options import HintedUsageError
from rollout_io.cli.output import next_command, note
from schemas.errors import ConfigError, InputError, RolloutError

algorithm_option = click.option(
    "--algorithm",
    metavar="NAME",
    help="Advantage estimator: grpo, rloo, maxrl, gdpo, reinforce++, gae, or your module:function "
    "(advantage.estimator).",
)

resume_option = click.option(
    "--resume",
    metavar="RUN",
    type=click.Path(),
    help="Resume RUN from its latest checkpoint, with its configuration. Options and --set change "
    "keys that may change.",
)


def _config_text(run: str, options: Mapping[str, str | None]) -> str:
    from rollout_io.dataset.storage import Location

    if "://" not in run:
        return config_to_resume(run, options).read_text(encoding="utf-8")
    _refuse_surplus(run, options)
    file = Location.of(run).join("config.json")
    if not file.fs.exists(file.path):
        raise InputError("resume_config", run, "no run to resume (no config.json)")
    with file.fs.open(file.path) as opened:
        return str(opened.read().decode())


def _refuse_surplus(run: str, options: Mapping[str, str | None]) -> None:
    if surplus := [name for name, value in options.items() if value is not None]:
        text = f"--resume {run} reads {', '.join(surplus)} from the run"
        raise HintedUsageError(text, f"leave out {' and '.join(surplus)}")


def config_to_resume(run: str, options: Mapping[str, str | None]) -> Path:
    """Return the file with the configuration of a run to resume.

    Args:
        run: Directory of the run.
        options: Arguments that the configuration replaces, by name.

    Raises:
        InputError: `resume_config`: there is no run in the directory.
    """
    _refuse_surplus(run, options)
    file = Path(run) / "config.json"
    if not file.is_file():
        import difflib

        runs = [other.parent.name for other in Path(run).parent.glob("*/config.json")]
        near = difflib.get_close_matches(Path(run).name, runs, cutoff=0.8)
        names = " or ".join(str(Path(run).parent / name) for name in near)
        hint = f"did you mean {names}?" if near else "start a new run: leave out --resume"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not near:
            hint = (
                "start rank 0 on the machine that has the run, or copy the run to rank 0's machine"
            )
        raise InputError("resume_config", run, "no run to resume (no config.json)", hint=hint)
    return file


def config_from_main(run: str, options: Mapping[str, str | None]) -> Path:
    """Return a file with the configuration of a run to resume, which other machines need not have.

    Raises:
        InputError: See `config_to_resume`.
    """
    from trainer.distributed.meeting import from_main
    from trainer.distributed.processes import is_main

    text = from_main(lambda: _config_text(run, options))
    if is_main() and "://" not in run:
        return config_to_resume(run, options)
    folder = Path(tempfile.mkdtemp(prefix="rollouts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder / "config.json"


def resume_command(verb: str, run: str, num_processes: int) -> str:
    """Return the shell command that resumes a run on the same number of processes.

    Example:
        >>> resume_command("train", "my run", 2)
        "rollouts train --resume 'my run' --num-processes 2"
    """
    processes = f" --num-processes {num_processes}" if num_processes > 1 else ""
    return f"rollouts {verb} --resume {shlex.quote(run)}{processes}"


def require(ctx: click.Context, **values: object) -> None:
    """Reject a command without an argument or option that only --resume makes superfluous.

    Raises:
        MissingParameter: A value, by name of its parameter, is None.
    """
    for param in ctx.command.params:
        if param.name in values and values[param.name] is None:
            raise click.MissingParameter(ctx=ctx, param=param)


_PACKAGES = {"view": ("httptools", "uvicorn", "jinja2"), "plot": ("matplotlib",)}
"""Packages that each command needs; the extra with the name of the command installs them."""


def suggest_next_steps(out: str, checkpoint: str) -> None:
    """Print to stderr how to view and plot a run, and how to load its model.

    For a command whose packages are missing, print how to install them first.
    """
    for verb, packages in _PACKAGES.items():
        if all(importlib.util.find_spec(name) for name in packages):
            next_command("rollouts", verb, out)
        else:
            then = shlex.join(["rollouts", verb, out])
            note(f'next: pip install "rollout-io[{verb}]", then {then}')
    note(f"next: transformers.{_loader(checkpoint)}.from_pretrained({checkpoint!r})")


def _loader(checkpoint: str) -> str:
    """Return the name of the class that loads a checkpoint; the usual one for adapters and stores."""
    from transformers import AutoConfig

    from trainer.models.policy import auto_class

    try:
        config = AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError):
        config = None
    name: str = auto_class(config).__name__ if config is not None else "AutoModelForCausalLM"
    return name


num_processes_option = click.option(
    "--num-processes",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Train with N processes on this machine: one per GPU, or on the CPU.",
)


def in_processes(num_processes: int, hint: str) -> int | None:
    """Run this command in several processes, and return its exit status; None: run it here.

    Raises:
        RolloutError: `process_lost`: see `start_processes`; `launch`: the processes are started by
            another launcher.
    """
    from trainer.distributed.processes import STORE

    if num_processes == 1 or STORE in os.environ:
        return None
    if "WORLD_SIZE" in os.environ:
        finding = f"--num-processes {num_processes} in a process that a launcher has started"
        hint = "leave out --num-processes, or start `rollouts` without torchrun and accelerate"
        raise ConfigError("launch", "--num-processes", finding, hint=hint)
    from trainer.distributed.spawn import start_processes

    arguments = click.get_current_context().find_root().obj
    return start_processes(num_processes, sys.argv[1:] if arguments is None else arguments, hint)


def errors_printed_once(verb: Callable[..., int]) -> Callable[..., int]:
    """Print an error only in the first process of each machine if a verb runs in several processes.

    If a process is lost, the process that started them prints the error, because it knows which
    process was lost and why.
    """

    @wraps(verb)
    def run(**options: Any) -> int:
        try:
            return verb(**options)
        except RolloutError as error:
            from trainer.distributed.processes import STORE, is_first_here
            from trainer.distributed.spawn import LOST

            if error.rule == "process_lost" and STORE in os.environ:
                return LOST
            if is_first_here():
                raise
            return 1

    return run
