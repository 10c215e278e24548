"""The directory of a run: absolute, written by one run at a time, on a disk that may be full."""

from __future__ import annotations

import dataclasses
import errno
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from rollout_io.dataset.locking import destination
from schemas.errors import InputError
from trainer.run.checkpoint import latest_checkpoint
from trainer.run.run_store import is_remote, local_copy

Result = TypeVar("Result")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def stays_in_place(run: Callable[..., Result]) -> Callable[..., Result]:
    """Make the directory of a run absolute while it runs, because user code may call `os.chdir`.

    A run in an object store runs in a local copy: see `trainer.run.run_store`.

    Args:
        run: Function of a configuration with a section `[run]`, whose result has `out` and `checkpoint`.

    Returns:
        The function; its result has the paths as given.
    """

    @wraps(run)
    def with_absolute_paths(config: Any, **settings: Any) -> Result:
        given_out = config.run.out
        place: AbstractContextManager[Path] = nullcontext(Path(given_out).absolute())
        if is_remote(given_out):
            place = local_copy(given_out, resume=settings.get("resume", False))
        with place as out:
            section = dataclasses.replace(config.run, out=str(out))
            result: Any = run(dataclasses.replace(config, run=section), **settings)
        checkpoint = result.checkpoint.replace(str(out), given_out.rstrip("/"), 1)
        moved: Result = dataclasses.replace(result, out=given_out, checkpoint=checkpoint)
        return moved

    return with_absolute_paths


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep other processes from writing to the same directory, if its filesystem supports locks.

    Raises:
        InputError: `run_in_use`: another process is training in the directory, or writing to it.
    """
    with ExitStack() as held:
        try:
            held.enter_context(destination(out))
        except InputError as error:
            if error.rule != "out_is_free":
                raise
            finding = "another process is training in this directory, or writing to it"
            hint = "wait for it to end, or stop it"
            raise InputError("run_in_use", str(out), finding, hint=hint) from None
        yield


@contextmanager
def stops_when_full(out: Path) -> Iterator[None]:
    """Turn a full disk into an error that names the checkpoint to resume from.

    Raises:
        InputError: `disk_full`: a file could not be written because the disk is full.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not _is_full(error):
            raise
        hint = f"free some disk space, then continue with --resume {shlex.quote(str(out))}"
        if latest := latest_checkpoint(out):
            hint += f" from {latest}"
        raise InputError("disk_full", str(out), f"cannot write: {error}", hint=hint) from error


def _is_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"os error {number})" in str(error) for number in FULL)
