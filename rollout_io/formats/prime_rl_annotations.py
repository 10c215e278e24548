"""Annotations of prime-rl: what it learned about a trace after it had written the episode.

    {"version": 1, "trace_id": "0d19", "info": {"effective": true, "advantage": 0.5, "ship": {"step": 3}},
     "branches": [{"index": 0, "trainer_logprobs": [null, null, -0.25, -1.5], "entropies": [...]}]}

Since September 2026, prime-rl writes an episode once (`traces/stream/`), and appends what the
orchestrator and the trainer find out later to `traces/annotations/<producer>/`
(`prime_rl.monitors.file.traces.update`). A branch is a path from the root to a leaf, in the order of
the leaves; a stream has one value per token of its path, or of the first tokens of it, and null where
there is none. Later records override earlier ones: objects in `info` are merged, and a message takes
a stream that has a value for one of its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_io.formats.base import Place, note_unread
from rollout_io.formats.grammar import Grammar
from rollout_io.formats.parsing.jsonl import decode_line
from rollout_io.formats.parsing.records import read_record
from rollout_io.formats.parsing.tokens import broken, logprob_array
from schemas.errors import InputError, count

PART = "annotation"
"""`Place.part` of the annotations among the records of an episode."""

LOGPROBS, _FLAGS = "trainer_logprobs", "is_masked"
_Numbers = list[float | None] | None


class Head(msgspec.Struct, gc=False):
    """The fields by which an annotation is recognized, and the trace that it is about."""

    trace_id: str
    version: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    branches: list[msgspec.Raw] | None = None
    advantage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    subset: str | None = None

    def __post_init__(self) -> None:
        is_update = self.version is not msgspec.UNSET and self.branches is not None
        is_flat = self.advantage is not msgspec.UNSET and self.subset is not None
        if not is_update and not is_flat:
            raise ValueError("the record is not an annotation")


class _Info(msgspec.Struct, gc=False):
    effective: bool | None = None
    advantage: float | None = None
    subset: str | None = None


class _Branch(msgspec.Struct, gc=False):
    """The values of a path's tokens: its streams."""

    index: int
    trainer_logprobs: _Numbers = None
    advantages: _Numbers = None
    entropies: _Numbers = None
    mismatch_kl: _Numbers = None
    is_masked: list[bool | None] | None = None


class _Record(msgspec.Struct, gc=False):
    trace_id: str
    version: int = 1
    info: dict[str, Any] | None = None
    branches: list[_Branch] | None = None


class Update(NamedTuple):
    """One annotation: its location, the facts about its trace, and its values by token."""

    where: str
    info: dict[str, Any]
    branches: list[_Branch]


HEAD = msgspec.json.Decoder(Head)
UPDATES = Grammar(records={"": _Record}).contents
_RECORD = msgspec.json.Decoder(_Record)
_FIELDS = msgspec.json.Decoder(dict[str, Any])


def read_updates(places: Sequence[Place]) -> dict[str, list[Update]]:
    """Read annotations, by the trace that they are about.

    Raises:
        InputError: `record_type`: a field has the wrong type, or the version is not 1.
    """
    updates: dict[str, list[Update]] = {}
    for place in places:
        content, where = read_record(place), place.where
        record = decode_line(_RECORD, content, where)
        fields = decode_line(_FIELDS, content, where)
        if record.version != 1:
            hint = "convert the episodes without their annotations"
            finding = f"an annotation of version {record.version}"
            raise InputError("record_type", where, finding, "version 1", hint)
        for name in (name for branch in fields.get("branches") or () for name in branch):
            if name not in _Branch.__struct_fields__:
                note_unread(f"branches.{name}")
        flat = {k: value for k, value in fields.items() if k not in _Record.__struct_fields__}
        update = Update(where, {**flat, **(record.info or {})}, record.branches or [])
        updates.setdefault(record.trace_id, []).append(update)
    return updates


class Annotations:
    """What all annotations of one trace say together.

    Attributes:
        columns: Values of the trace's rows in the columns `effective` (bool), `advantage` (double)
            and `annotations` (the merged `info`, as JSON).

    Args:
        updates: Annotations, the newest last.
        paths: Node indices from the root to each leaf, in the order of the leaves.
        masks: For each node, [tokens] bool, true for sampled tokens.

    Raises:
        RolloutError: `dangling_reference`: a branch does not exist; `lengths_align`: a stream is longer
            than its path; `record_type`: a fact has the wrong type.

    Example:
        >>> update = Update("a:1", {"effective": True}, [_Branch(0, entropies=[None, 0.5])])
        >>> made = Annotations([update], [[0, 1]], [np.array([False]), np.array([True])])
        >>> made.columns["effective"].as_py(), made.of(1, 0, 1)[1]["entropies"].as_py()
        (True, [0.5])
    """

    def __init__(
        self,
        updates: Sequence[Update],
        paths: Sequence[Sequence[int]],
        masks: Sequence[npt.NDArray[np.bool_]],
    ) -> None:
        self.columns: dict[str, pa.Scalar] = {}
        self._streams: dict[int, dict[str, tuple[list[Any], str]]] = {}
        info: dict[str, Any] = {}
        for update in updates:
            info = _merged(info, update.info)
            try:
                facts = msgspec.convert(info, _Info)
            except msgspec.ValidationError as error:
                raise InputError("record_type", update.where, str(error)) from None
            for branch in update.branches:
                if not 0 <= branch.index < len(paths):
                    finding = (
                        f"branch {branch.index}, but the trace has {count(len(paths), 'branch')}"
                    )
                    raise InputError("dangling_reference", update.where, finding)
                self._take(branch, paths[branch.index], masks, update.where)
        if not updates:
            return
        effective = facts.effective
        if effective is None and facts.subset is not None:
            effective = facts.subset == "effective"
        text = msgspec.json.encode(info).decode()
        columns = {
            "effective": pa.scalar(effective, pa.bool_()),
            "advantage": pa.scalar(facts.advantage, pa.float64()),
            "annotations": pa.scalar(text if info else None, pa.string()),
        }
        self.columns = {name: value for name, value in columns.items() if value.is_valid}

    def _take(
        self,
        branch: _Branch,
        path: Sequence[int],
        masks: Sequence[npt.NDArray[np.bool_]],
        where: str,
    ) -> None:
        num_tokens = sum(len(masks[node]) for node in path)
        for name in _Branch.__struct_fields__[1:]:
            values = getattr(branch, name) or []
            if len(values) > num_tokens:
                finding = f"branch {branch.index} has {len(values)} {name}"
                expected = f"at most {num_tokens}, one per token"
                raise broken("lengths_align", where, finding, expected)
            for node, part in _cut(values, path, masks):
                if any(v is not None for v, m in zip(part, masks[node], strict=True) if m):
                    self._streams.setdefault(node, {})[name] = (part, where)

    def of(
        self, node: int, start: int, stop: int
    ) -> tuple[npt.NDArray[np.float32] | None, dict[str, pa.Scalar]]:
        """Return the values of a node's tokens from `start` to `stop`.

        Returns:
            `trainer_logprobs`, [tokens] float32 nats, 0.0 at tokens without one, None if unknown; and
            the other columns: those of the trace, and each stream as a list with nulls.

        Raises:
            InvariantError: `logprobs_finite`, `logprobs_nonpositive`: a value is invalid.
        """
        columns, logprobs = dict(self.columns), None
        for name, (values, where) in self._streams.get(node, {}).items():
            part = values[start:stop]
            if name == LOGPROBS:
                logprobs = logprob_array([v or 0.0 for v in part], len(part), where)
            else:
                kind = pa.bool_() if name == _FLAGS else pa.float64()
                columns[name] = pa.scalar(part, pa.list_(kind))
        return logprobs, columns


def _cut(
    values: Sequence[Any], path: Sequence[int], masks: Sequence[npt.NDArray[np.bool_]]
) -> Iterator[tuple[int, list[Any]]]:
    """Yield each node of a path with its part of a stream, null after the stream's end."""
    start = 0
    for node in path:
        part = list(values[start : start + len(masks[node])])
        yield node, part + [None] * (len(masks[node]) - len(part))
        start += len(masks[node])


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}
    return new
