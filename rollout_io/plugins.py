"""Entry points of the installed packages: verbs and formats; and users' functions, by `module:name`.

Importing `importlib.metadata`, which imports `email` and `zipfile`, takes a third of the time of
`rollouts --help`. Packages in directories, as pip installs them, are read here without it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, reduce
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from schemas.errors import ConfigError


class Plugin(NamedTuple):
    """One entry point.

    Attributes:
        name: Name of the entry point.
        value: Reference to its object: "package.module:attribute".
    """

    name: str
    value: str

    @property
    def module(self) -> str:
        """Name of the module that contains the object."""
        return self._parts()[0]

    def load(self) -> Any:
        """Import the module and return the object, or the module if no attribute is named.

        Raises:
            ImportError: The module cannot be found, or ends the process.
            Exception: What else the module raises.
        """
        module, attributes = self._parts()
        try:
            loaded = import_module(module)
        except SystemExit as error:  # which would end the command
            raise ImportError(f"the module calls sys.exit({error.code})") from error
        return reduce(getattr, filter(None, attributes.split(".")), loaded)

    def _parts(self) -> tuple[str, str]:
        module, _, attributes = self.value.partition("[")[0].partition(":")
        return module.strip(), attributes.strip()


def plugins(group: str) -> list[Plugin]:
    """Return the entry points of a group, in the order of `importlib.metadata.entry_points`.

    Args:
        group: Name of the group, such as "rollout_io.verbs".

    Example:
        >>> sorted(found.name for found in plugins("rollout_io.verbs"))[:3]
        ['audit', 'blame', 'convert']
    """
    if not _are_directories():
        from importlib.metadata import entry_points

        return [Plugin(entry.name, entry.value) for entry in entry_points(group=group)]
    return [plugin for of, plugin in _entry_points(_folders()) if of == group]


def _are_directories() -> bool:
    """True if all packages are in plain directories: no archives, eggs or import hooks."""
    finders = (finder for finder in sys.meta_path if finder is not PathFinder)
    if any(hasattr(finder, "find_distributions") for finder in finders):
        return False
    return not any(path.lower().endswith(".egg") or Path(path).is_file() for path in sys.path)


def _folders() -> tuple[tuple[str, int], ...]:
    """Return the directories on `sys.path`, each with the time of its last change in nanoseconds."""
    listed = []
    for folder in map(os.path.abspath, sys.path):
        with suppress(OSError):
            listed.append((folder, Path(folder).stat().st_mtime_ns))
    return tuple(listed)


# Each verb asks for all verbs, and each conversion for all formats; reading takes 7 ms. Installing or
# removing a package changes the time of its folder.
@lru_cache(maxsize=1)
def _entry_points(folders: tuple[tuple[str, int], ...]) -> list[tuple[str, Plugin]]:
    """Return the group and the plugin of each entry point."""
    return [entry for path in _distributions(folders) for entry in _read(path)]


def _distributions(folders: tuple[tuple[str, int], ...]) -> Iterator[Path]:
    """Yield the metadata directory of each package; the first one on `sys.path` wins."""
    seen = set()
    for folder, _ in folders:
        try:
            paths = list(Path(folder).iterdir())
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        for path in paths:
            if path.name.lower().endswith((".dist-info", ".egg-info")):
                package = re.sub(r"[-_.]+", "_", path.stem.partition("-")[0]).lower()
                if package not in seen:
                    seen.add(package)
                    yield path


def _read(path: Path) -> Iterator[tuple[str, Plugin]]:
    """Yield the entry points, with their groups, in the metadata directory of a package."""
    try:
        text = (path / "entry_points.txt").read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
        return
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield section, Plugin(name.strip(), value.strip())


def resolve(name: str, rule: str) -> Callable[..., Any]:
    """Import the class or function named by `module:name`.

    Raises:
        ConfigError: `{rule}`: the module cannot be imported, or the name does not exist or is not
            callable.
    """
    import difflib
    import pkgutil

    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:  # a module may raise anything
        absent = f"{error.name}." if isinstance(error, ModuleNotFoundError) else "."
        is_own = f"{name.partition(':')[0]}.".startswith(absent)
        hint = "run from the module's directory, or add it to PYTHONPATH" if is_own else ""
        finding = f"{type(error).__name__}: {error}"
        if ":" not in name:
            hint = "write module:name, with a colon"
        elif isinstance(error, AttributeError) and error.obj is not None and error.name:
            near = difflib.get_close_matches(error.name, dir(error.obj), 1)
            hint = f"did you mean `{near[0]}`?" if near else hint
        raise ConfigError(rule, name, f"cannot import it: {finding}", hint=hint) from None
    if not callable(found):
        finding = f"a value of type {type(found).__name__}"
        raise ConfigError(rule, name, finding, "a class or function")
    make: Callable[..., Any] = found
    return make
