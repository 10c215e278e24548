"""Errors for missing optional packages, which name the extra of `rollout-io` to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import MissingExtra

_OURS = {"schemas", "rollout_io", "pipelines", "trainer"}


@contextmanager
def requires_extra(extra: str, where: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra to install.

    Args:
        extra: Name of the extra in `pyproject.toml`, or several names separated by commas.
        where: Command or setting that needs the package: "rollouts plot", "lora_rank".

    Raises:
        MissingExtra: `extra_installed`: a package of the extra is not installed.

    Example:
        >>> try:
        ...     with requires_extra("plot", "rollouts plot"):
        ...         raise ModuleNotFoundError(name="matplotlib")
        ... except MissingExtra as error:
        ...     print(error.hint)
        pip install "rollout-io[plot]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise explained(error, extra, where) from None


def explained(error: ImportError, extra: str, where: str) -> ImportError | MissingExtra:
    """Return the error that `requires_extra` raises for a failed import.

    The original error is returned if one of our own modules is missing, or if an installed package
    fails to import.
    """
    package = (error.name or "").partition(".")[0]
    if package in _OURS or not isinstance(error, ModuleNotFoundError):
        return error
    return MissingExtra(
        "extra_installed",
        where,
        f"no package {package}",
        f"the packages of rollout-io[{extra}]",
        f'pip install "rollout-io[{extra}]"',
        message=f"{where} needs the package {package}, which is not installed",
    )
