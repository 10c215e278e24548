"""The directory of a run, wherever user code moves the working directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")


def stays_in_place(run: Callable[..., Result]) -> Callable[..., Result]:
    """Make the directory of a run absolute while it runs, because user code may call `os.chdir`.

    Args:
        run: Function of a configuration with a section `[run]`, whose result has `out` and `checkpoint`.

    Returns:
        The function; its result has the paths as given.
    """

    @wraps(run)
    def with_absolute_paths(config: Any, **settings: Any) -> Result:
        relative_out, out = config.run.out, str(Path(config.run.out).absolute())
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, out=out))
        result: Any = run(config, **settings)
        checkpoint = result.checkpoint.replace(out, relative_out, 1)
        moved: Result = dataclasses.replace(result, out=relative_out, checkpoint=checkpoint)
        return moved

    return with_absolute_paths
