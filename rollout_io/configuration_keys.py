"""Unknown keys of a configuration: suggestions, and one error for all of them."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from schemas.errors import ConfigError

_SIMILAR = 0.7
"""Lowest similarity of a suggested key: `batch` is no suggestion for `batch_size`."""
_SUGGESTION = "did you mean"


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of a configuration, for hints about unknown ones.

    Attributes:
        kind: Dataclass of the whole configuration.
        list_examples: Example value of each list-valued key.
        moved: Keys for names that earlier versions or other tools use.
        more: Further valid keys, such as entries of a key that is a table.
    """

    kind: type[Any]
    list_examples: Mapping[str, str] = dataclasses.field(default_factory=dict)
    moved: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: Sequence[str] = ()

    def known(self) -> Iterator[str]:
        """Yield all keys; those of sections as `section.key`."""
        yield from self.more
        for key, kind in typing.get_type_hints(self.kind).items():
            if dataclasses.is_dataclass(kind):
                yield from (f"{key}.{field.name}" for field in dataclasses.fields(kind))
            else:
                yield key

    def hint(self, key: str, table: str, own: Sequence[str]) -> str:
        """Suggest the key that an unknown key of a table ("" or "section.") was meant to be.

        `own` are the keys of the table.
        """
        place = self.moved.get(f"{table}{key}") or self.moved.get(key)
        homes = [place] if place else []
        # The keys of sections by their last names, which may be the same in several sections.
        leaves: dict[str, list[str]] = {}
        for dotted in filter(lambda dotted: "." in dotted, self.known()):
            leaves.setdefault(dotted.rpartition(".")[2], []).append(dotted)
        near = difflib.get_close_matches(key, own, n=1, cutoff=_SIMILAR)
        name = key.rpartition(".")[2]  # the first part may be the name of no section
        if not homes and (name in leaves or not near):
            homes = [
                home
                for near_name in difflib.get_close_matches(name, leaves, 1, _SIMILAR)
                for home in leaves[near_name]
            ]
        if homes:
            shown = " or ".join(f"`{home}`" for home in homes)
            tables = (home.rpartition(".")[0] for home in homes)
            places = dict.fromkeys(f"[{name}]" for name in tables if name)
            belongs = f" It belongs in {' or '.join(places)}" if places else ""
            return f"{_SUGGESTION} {shown}?{belongs}"
        if near:
            return f"{_SUGGESTION} `{table}{near[0]}`?"
        return f"use one of the keys {', '.join(f'{table}{name}' for name in own)}"


@contextmanager
def all_unknown_keys() -> Iterator[UnknownKeys]:
    """Collect errors about keys, and raise one error for all of them at the end.

    Raises:
        ConfigError: `config_key`: keys are unknown or misplaced.
    """
    unknown = UnknownKeys()
    yield unknown
    unknown.check()


class UnknownKeys:
    """Errors about keys of a configuration."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep a `config_key` error instead of raising it."""
        try:
            yield
        except ConfigError as error:
            if error.rule != "config_key":
                raise
            self._errors.append(error)

    def check(self) -> None:
        """Raise the errors kept so far as one.

        Raises:
            ConfigError: `config_key`: there are errors.
        """
        if not self._errors:
            return
        first, *others = self._errors
        if not others:
            raise first
        parts, hints = [], dict[str, None]()
        for error in self._errors:
            parts.append(error.sentence.removesuffix("."))
            if (hint := error.hint or "").startswith(_SUGGESTION):
                parts[-1] += f" ({hint.partition('?')[0]}?)"
            elif hint:
                hints[hint] = None
        text = "; ".join(parts)
        raise ConfigError("config_key", first.where, text, hint="; ".join(hints), message=text)
