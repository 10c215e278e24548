"""The error ids with kind, cause and fix; docs/errors.md is generated from them.

Cause and fix of an invariant are declared with its rule in `rules.py`, those of all other ids in
`error_ids.toml`. A test compares these ids with the ids that the code raises.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from schemas import errors
from schemas.rules import RULES


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorId:
    """The error classes, cause and fix of an error id.

    Attributes:
        kinds: Error classes that use this id; several if the class depends on where the cause is.
        cause: Cause of the error, as one sentence.
        fix: How to fix the error, as one sentence.
    """

    kinds: tuple[type[errors.RolloutError], ...]
    cause: str
    fix: str


@cache
def error_ids() -> dict[str, ErrorId]:
    """Return all error ids, ordered by kind and name."""
    ids = {
        rule.name: ErrorId(
            kinds=(errors.InvariantError,),
            cause=f"The data breaks an invariant: {rule.meaning}.",
            fix=f"{rule.hint[0].upper()}{rule.hint[1:]}.",
        )
        for rule in sorted(RULES.values(), key=lambda rule: rule.name)
    }
    text = Path(__file__).with_name("error_ids.toml").read_text(encoding="utf-8")
    for names, entries in tomllib.loads(text).items():
        kinds = tuple(getattr(errors, name) for name in names.split(" or "))
        ids |= {name: ErrorId(kinds=kinds, **entry) for name, entry in entries.items()}
    return ids


def fix_of(name: str) -> str:
    """Return the fix of an error id as a hint.

    Example:
        >>> fix_of("lfs_pointer")
        'run `git lfs pull`'
    """
    fix = error_ids()[name].fix
    return f"{fix[0].lower()}{fix[1:-1]}"
