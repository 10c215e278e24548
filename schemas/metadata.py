"""What a rollout file says about itself, and how older files are brought up to date."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from schemas.errors import RolloutError

SCHEMA_VERSION = 1

Upgrade = Callable[[pa.Table], pa.Table]

UPGRADES: Mapping[int, Upgrade] = {}
"""`UPGRADES[v]` turns a table of schema version v into one of version v + 1."""

Layout = Literal["prefix", "full"]
LogprobsMode = Literal["raw", "processed"]

_KEY = "rollout_io."


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetMetadata:
    """Key-value metadata of a rollout file.

    Attributes:
        tokenizer: Name or path of the tokenizer whose ids the table holds.
        tokenizer_fingerprint: Digest of that tokenizer.
        chat_template_fingerprint: Digest of the chat template that rendered the prompts.
        logprobs_mode: `raw` (before temperature and truncation; vLLM's default) or `processed`
            (of the distribution that was sampled); None: unknown.
        made_by: How the table was made, oldest first: tool version, verb, parents, parameters.
    """

    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    chat_template_fingerprint: str | None = None
    logprobs_mode: LogprobsMode | None = None
    made_by: tuple[dict[str, Any], ...] = ()

    def replace(self, **changes: Any) -> DatasetMetadata:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def made(self, verb: str, **parameters: Any) -> DatasetMetadata:
        """A copy whose history ends with `verb` and its parameters."""
        return self.replace(made_by=(*self.made_by, {"verb": verb, **parameters}))

    def encode(self, layout: Layout) -> dict[bytes, bytes]:
        """Parquet key-value pairs; fields that are None are left out."""
        pairs: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "layout": layout}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                pairs[field.name] = value
        return {(_KEY + k).encode(): json.dumps(v).encode() for k, v in pairs.items()}

    @classmethod
    def decode(cls, pairs: Mapping[bytes, bytes] | None) -> DatasetMetadata:
        """Read what `encode` wrote; pairs of others are ignored."""
        found = _ours(pairs)
        names = {field.name for field in dataclasses.fields(cls)} & found.keys()
        values = {name: found[name] for name in names}
        made_by = values.get("made_by", [])
        if not isinstance(made_by, list):
            raise _unreadable("made_by", made_by, "a list")
        return cls(**values | {"made_by": tuple(made_by)})


def layout_of(pairs: Mapping[bytes, bytes] | None) -> Layout | None:
    """Layout a file declares; None for a file that this library did not write."""
    layout: Layout | None = _ours(pairs).get("layout")
    return layout


def version_of(pairs: Mapping[bytes, bytes] | None) -> int:
    """Schema version a file declares; files of others count as current."""
    version = _ours(pairs).get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int):
        raise _unreadable("schema_version", version, "a whole number")
    return version


def upgrade(
    table: pa.Table,
    version: int,
    *,
    upgrades: Mapping[int, Upgrade] = UPGRADES,
    current: int = SCHEMA_VERSION,
) -> pa.Table:
    """Bring a table of an older schema version up to `current`, one version at a time.

    Raises:
        RolloutError: The table is newer than this library, or no path leads up from its version.
    """
    where = f"schema version {version}"
    if version > current:
        hint = "pip install --upgrade rollout-io"
        raise RolloutError("schema_version", where, "a newer table", f"at most {current}", hint)
    for step in range(version, current):
        if step not in upgrades:
            raise RolloutError("schema_version", where, "no upgrade path", f"{current}")
        table = upgrades[step](table)
    return table


def _ours(pairs: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    found = {}
    for key, value in (pairs or {}).items():
        if key.startswith(_KEY.encode()):
            try:
                found[key.decode().removeprefix(_KEY)] = json.loads(value)
            except (ValueError, RecursionError):
                raise _unreadable(repr(key)[2:-1], value, "JSON") from None
    return found


def _unreadable(name: str, got: object, expected: str) -> RolloutError:
    hint = "the file is damaged, or another program's: write it again from its source"
    return RolloutError("file_metadata", f"metadata {name!r}", repr(got)[:80], expected, hint)
