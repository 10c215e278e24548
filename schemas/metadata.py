"""Metadata of a rollout file, and upgrades from older schema versions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyarrow as pa

from schemas.errors import InputError
from schemas.pictures import images_renamed

SCHEMA_VERSION = 2

Upgrade = Callable[[pa.Table], pa.Table]

UPGRADES: Mapping[int, Upgrade] = {1: images_renamed}
"""`UPGRADES[v]` turns a table of schema version v into one of version v + 1."""

Layout = Literal["prefix", "full"]
LogprobsMode = Literal["raw", "processed"]
Outcome = Literal["last", "sum"]

_KEY = "rollout_io."
DIGEST, PLACE = b"rollout_io.digest", b"rollout_io.place"
"""Keys for a shard's digest and its position in the dataset (see `rollout_io.dataset.footer`)."""
ID_FILTERS = b"rollout_io.id_filters"
"""Key for each row group's filters of ids (see `rollout_io.dataset.footer`)."""
CONVERSION = b"rollout_io.conversion"
"""Key for the record that identifies a conversion (see `rollout_io.conversion.summary`)."""
_OF_ROWS = (
    *("tokenizer_fingerprint", "logprobs_mode", "vocab_size", "tokenizer"),
    "chat_template_fingerprint",
)
_LISTS = frozenset({"models", "made_by"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetMetadata:
    """Key-value metadata of a rollout file.

    Attributes:
        tokenizer: Name or path of the tokenizer that produced the table's token ids.
        tokenizer_fingerprint: Digest of that tokenizer.
        vocab_size: Exclusive upper bound of that tokenizer's ids, added tokens included.
        models: Sorted names of the models that sampled the responses, according to the log.
        chat_template_fingerprint: Digest of the chat template that rendered the prompts.
        logprobs_mode: `raw` (before temperature and truncation; vLLM's default) or `processed`
            (of the distribution that was sampled from); None if unknown.
        outcome: Return of a trajectory: the `last` step's reward, or the `sum` over its steps; None
            if unknown, which is treated as `last`.
        made_by: History of the table, oldest first: tool version, verb, parents, parameters.
    """

    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    vocab_size: int | None = None
    models: tuple[str, ...] = ()
    chat_template_fingerprint: str | None = None
    logprobs_mode: LogprobsMode | None = None
    outcome: Outcome | None = None
    made_by: tuple[dict[str, Any], ...] = ()

    def replace(self, **changes: Any) -> DatasetMetadata:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def made(self, verb: str, **parameters: Any) -> DatasetMetadata:
        """Return a copy with `verb` and its parameters appended to the history."""
        return self.replace(made_by=(*self.made_by, {"verb": verb, **parameters}))

    def encode(self, layout: Layout) -> dict[bytes, bytes]:
        """Return Parquet key-value pairs; fields that are None are omitted."""
        pairs: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "layout": layout}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value != ():
                pairs[field.name] = value
        return {(_KEY + k).encode(): json.dumps(v).encode() for k, v in pairs.items()}

    @classmethod
    def decode(cls, pairs: Mapping[bytes, bytes] | None) -> DatasetMetadata:
        """Parse the output of `encode`; keys of other programs are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in _ours(pairs).items() if name in names}
        for name in _LISTS & values.keys():
            if not isinstance(values[name], list):
                raise _unreadable(name, values[name], "a list")
            values[name] = tuple(values[name])
        size = values.get("vocab_size", 1)
        if type(size) is not int or size < 1:
            raise _unreadable("vocab_size", size, "a positive whole number")
        outcome = values.get("outcome", "last")
        if outcome not in get_args(Outcome):
            raise _unreadable("outcome", outcome, "last or sum")
        return cls(**values)


def common(metadata_of: Mapping[str, DatasetMetadata], refused: Collection[str]) -> DatasetMetadata:
    """Combine the metadata of several datasets into one.

    A field that describes rows becomes None unless all datasets have the same value. The history
    and the outcome are copied from the first dataset.

    Args:
        metadata_of: Metadata by path; at least one.
        refused: Fields that raise an error if their known values differ.

    Raises:
        InputError: `file_metadata`: two datasets differ in a field of `refused`.
    """
    first = next(iter(metadata_of.values()))
    for name in _OF_ROWS:
        values = {path: getattr(metadata, name) for path, metadata in metadata_of.items()}
        paths = [path for path, value in values.items() if value is not None]
        differs = [path for path in paths if values[path] != values[paths[0]]]
        if differs and name in refused:
            raise contradictory(f"{paths[0]} and {differs[0]}", name)
        if differs or len(paths) < len(values):
            first = first.replace(**{name: None})
    models = {name for metadata in metadata_of.values() for name in metadata.models}
    return first.replace(models=tuple(sorted(models)))


def contradictory(where: str, name: str) -> InputError:
    """Return the error for datasets that differ in a field of their metadata."""
    hint = "convert one of them again with the settings of the other"
    return InputError("file_metadata", where, f"the datasets differ in {name}", hint=hint)


def is_ours(keys: Iterable[bytes]) -> bool:
    """True if this library writes at least one of these keys."""
    return any(key.startswith(_KEY.encode()) for key in keys)


def layout_of(pairs: Mapping[bytes, bytes] | None) -> Layout | None:
    """Return the layout that a file declares; None if this library did not write the file."""
    layout: Layout | None = _ours(pairs).get("layout")
    return layout


def version_of(pairs: Mapping[bytes, bytes] | None) -> int:
    """Return the schema version that a file declares; if there is none, the current version."""
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
        InputError: `schema_version`: the table is newer than this library, or an upgrade function
            is missing.
    """
    where = f"schema version {version}"
    if version > current:
        hint = "pip install --upgrade rollout-io"
        finding = f"this release of rollout-io only reads versions up to {current}"
        raise InputError("schema_version", where, finding, "", hint)
    for step in range(version, current):
        if step not in upgrades:
            finding = f"rollout-io cannot upgrade tables of this version to version {current}"
            raise InputError("schema_version", where, finding)
        table = upgrades[step](table)
    return table


def _ours(pairs: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    values = {}
    for key, value in (pairs or {}).items():
        # The id filters are large, and do not describe the dataset.
        if key.startswith(_KEY.encode()) and key != ID_FILTERS:
            try:
                values[key.decode().removeprefix(_KEY)] = json.loads(value)
            except (ValueError, RecursionError):
                raise _unreadable(repr(key)[2:-1], value, "JSON") from None
    return values


def _unreadable(name: str, got: object, expected: str) -> InputError:
    hint = "write the file again from its source: its metadata is damaged"
    return InputError("file_metadata", f"metadata {name!r}", repr(got)[:80], expected, hint)
