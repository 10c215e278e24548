"""The option `--num-processes`, and the exit status of a verb in each of several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from schemas.errors import ConfigError, RolloutError

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
