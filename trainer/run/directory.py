"""The directory of a run, wherever user code moves the working directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from trainer.run.run_store import is_remote, local_copy

Result = TypeVar("Result")


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
