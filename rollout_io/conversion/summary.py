"""Counts of a conversion, and the records in the footers of the dataset that it wrote.

The last shard of each chunk stores the digest of the conversion's identity and the counts of the
chunk. In the first chunk, it also stores the counts of the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Self

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.conversion import rejections
from rollout_io.dataset.footer import Place
from rollout_io.dataset.reader import footers, scan
from rollout_io.dataset.storage import Location
from rollout_io.formats.base import UNREAD, Rejected, Run, added, unread_in
from rollout_io.formats.parsing.records import is_like_label
from schemas.errors import InputError, RolloutError
from schemas.errors import count as _num
from schemas.metadata import CONVERSION
from schemas.ragged import Ragged

_NUM_REASONS = 8
_NUM_NAMES = 20
_SHIFTED_SHARE, _LEAST_FIRST_IDS = 0.9, 4


@dataclass(slots=True)
class Summary:
    """Counts of a conversion; `num_records` = `num_written` + `num_rejected`.

    `num_rejected` includes the copies of records that `num_duplicates` counts.

    Attributes:
        formats: Number of runs found in the logs, by format.
        num_exact_without_logprobs: Number of an engine's rows without log-probabilities.
        num_with_logprobs: Number of rows with log-probabilities, re-tokenized ones included.
        num_first_zero: Number of rows of which the first log-probability alone is 0.0.
        first_zero_ids: Their first ids, until there are `_LEAST_FIRST_IDS`.
        num_without_sampling: Number of an engine's rows that lack a temperature, top_p or top_k.
        unrecorded: Those of these settings that are missing somewhere.
        num_exact: Number of trajectories with token ids from an engine.
        num_compared: Number of these trajectories whose ids were compared with the text in the log.
        notes: What the logs lack, or how their text was changed, with its count
            (`rollout_io.formats.base`).
        reasons: Reasons of the rejections, the most frequent first (`rejections.reasons`).
    """

    num_records: int = 0
    num_rejected: int = 0
    num_duplicates: int = 0
    num_calls: int = 0
    num_rows: int = 0
    num_trajectories: int = 0
    num_failed: int = 0
    num_without_reward: int = 0
    num_without_logprobs: int = 0
    num_exact_without_logprobs: int = 0
    num_with_logprobs: int = 0
    num_first_zero: int = 0
    num_without_sampling: int = 0
    num_retokenized: int = 0
    num_restarted: int = 0
    num_exact: int = 0
    num_compared: int = 0
    reward_sum: float = 0.0
    first_zero_ids: set[int] = field(default_factory=set)
    unrecorded: set[str] = field(default_factory=set)
    instances: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)
    formats: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    reasons: list[rejections.Reason] = field(default_factory=list)

    @property
    def num_written(self) -> int:
        """Number of records that are in the dataset."""
        return self.num_records - self.num_rejected

    def reject(self, rejected: Sequence[Rejected]) -> None:
        """Add rejected records."""
        self.num_rejected += len(rejected)
        self.num_duplicates += sum(r.error.rule in rejections.DUPLICATES for r in rejected)
        self.reasons = rejections.merged([*self.reasons, *rejections.reasons(rejected)])

    def add(
        self,
        table: pa.Table,
        compared: AbstractSet[str] = frozenset(),
        notes: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    ) -> None:
        """Add the counts of a table of complete trajectories."""
        frame = pl.DataFrame(
            pl.from_arrow(table.select([n for n in _NAMES if n in table.column_names]))
        )
        absent = {n: pl.lit(None, kind) for n, kind in _ABSENT.items() if n not in frame.columns}
        frame = frame.with_columns(**absent)
        counts = frame.select(**_COUNTS).row(0, named=True)
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)
        self.num_rows += len(frame)
        if len(self.first_zero_ids) < _LEAST_FIRST_IDS:
            first = pl.col("response_ids").list.first()
            self.first_zero_ids |= set(frame.filter(_IS_FIRST_ZERO).select(first).to_series())
        lacks = frame.filter(_LACKS_SAMPLING)
        self.unrecorded |= {name for name in _SAMPLING if lacks[name].is_null().any()}
        exact = set(frame.filter(_IS_CALL & ~_IS_TEXT)["trajectory_id"].unique())
        self.num_exact += len(exact)
        self.num_compared += len(exact & compared)
        for name in notes and frame["trajectory_id"].unique():
            self.notes = added(self.notes, notes.get(name, {}))
        self.num_restarted += _num_restarted(table)
        self.numbers |= _numbers(table)
        self.instances |= set(frame["instance_id"].unique())

    def merge(self, other: Summary) -> None:
        """Add the counts of another part of the logs."""
        for f in fields(self):
            ours, theirs = getattr(self, f.name), getattr(other, f.name)
            if f.name == "reasons":
                self.reasons = rejections.merged([*ours, *theirs])
            elif f.name == "notes":
                self.notes = added(ours, theirs)
            else:
                total = ours | theirs if isinstance(ours, set | dict) else ours + theirs
                setattr(self, f.name, total)

    @property
    def reward_mean(self) -> float | None:
        """Mean of the known outcomes; None if no outcome is known."""
        count = self.num_trajectories - self.num_failed - self.num_without_reward
        return self.reward_sum / count if count else None

    def encode(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict; `decode` reads it."""
        counts: dict[str, Any] = msgspec.to_builtins(self, order="deterministic")
        return counts

    @classmethod
    def decode(cls, values: dict[str, Any]) -> Self:
        """Parse the output of `encode`."""
        return msgspec.convert(values, cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for `--json`."""
        names = [f.name for f in fields(self) if f.name not in _INTERNAL]
        counts = {name: getattr(self, name) for name in ("formats", *names)}
        counts |= {"num_written": self.num_written, "num_groups": len(self.instances)}
        counts |= {"reward_mean": self.reward_mean, "unread": self.unread}
        return counts | {"notes": dict(self._told())}

    @property
    def _is_shifted(self) -> bool:
        """True if log-probabilities look as if 0.0 had been put before them.

        Models that always begin with the same token are certain of it, so the ids must differ.
        """
        is_common = self.num_first_zero > _SHIFTED_SHARE * self.num_with_logprobs
        return is_common and len(self.first_zero_ids) >= _LEAST_FIRST_IDS

    @property
    def unread(self) -> dict[str, int]:
        """Counts of content that is neither read nor left out on purpose, by its name."""
        return unread_in(self.notes)

    def _told(self) -> list[tuple[str, int]]:
        return [(k, n) for k, n in sorted(self.notes.items()) if not k.startswith(UNREAD)]

    def unread_text(self) -> str | None:
        """Return a warning about content that is not read; None if there is none."""
        if not self.unread:
            return None
        keys = (name for name in self.unread if name.startswith("messages"))
        label = next((name for name in keys if is_like_label(name.rpartition(".")[2])), None)
        advice = "looks like a task label: move it to the top level of the line as `task_id`"
        hint = f". {label} {advice}" if label else ""
        return (
            f"content that is neither read nor left out on purpose: {named_counts(self.unread)}. "
            f"The model may have seen it. --strict rejects such runs{hint}"
        )

    def text(self, out: str) -> str:
        """Return the counts as a few lines of text."""
        mean = "no rewards" if self.reward_mean is None else f"mean reward {self.reward_mean:g}"
        lines = [
            self._records(),
            f"{_num(self.num_calls, 'call')} -> {out}: {_num(self.num_rows, 'row')}, "
            f"{_num(self.num_trajectories, 'trajectory')}, {_num(len(self.instances), 'group')}, "
            f"{mean}",
        ]
        lines += self._reasons()
        if 1 < self.num_trajectories == len(self.instances) and self.reward_mean is not None:
            lines.append(
                "every group has one attempt, so there are no returns to compare within a group: if "
                "some are attempts at the same task, pass --group-by LABEL, or name the task in the log"
            )
        lines += _line(self.num_duplicates, "rejected record", " with the same content as another")
        lines += _line(self.num_without_reward, "trajectory", " without a reward (null)")
        if self.num_without_reward and self.numbers and self.reward_mean is None:
            names = ", ".join(sorted(self.numbers)[:8])
            lines.append(
                f"the log has metrics ({names}), none of which is named as the reward: if one "
                "measures success, pass --reward KEY"
            )
        approximate = " re-tokenized from text: ids are approximate"
        lines += _line(self.num_retokenized, "row", approximate)
        lines += [f"{what}: {number:,}" for what, number in self._told()]
        lines += _line(
            self.num_restarted,
            "trajectory",
            " in which the first prompt recurs, probably because several attempts have the same name: "
            "give each attempt a different name (calls: `session`)",
        )
        if num := self.num_exact_without_logprobs:
            lines.append(
                f"{_num(num, 'row')} without log-probabilities, so `train` "
                + (_SOME_LOGPROBS if self.num_with_logprobs else _NO_LOGPROBS)
                + ': request "logprobs": true from the engine'
            )
        if self._is_shifted:
            lines.append(
                f"the first log-probability of {self.num_first_zero:,} of "
                f"{_num(self.num_with_logprobs, 'row')} is 0.0, and no other one in these rows: they are "
                "probably shifted by one token, which trains wrongly. Check how the log writes them, or "
                f"run `rollouts audit {out} --weights MODEL`"
            )
        if self.num_without_sampling:
            names = " or ".join(name for name in _SAMPLING if name in self.unrecorded)
            lines.append(
                f"{_num(self.num_without_sampling, 'row')} without a recorded {names}: the engine's"
                " defaults applied (vLLM's and SGLang's are in the model's generation_config.json),"
                " which `train` and `audit` compare"
            )
        lines += _line(self.num_failed, "failed trajectory", ", kept with `error`")
        return "\n".join(lines)

    def tokenizer_text(self, out: str, tokenizer: str | None) -> str | None:
        """Return a note about token ids that were not compared with logged text, or None."""
        if not self.num_exact:
            return None
        if tokenizer is None:
            return (
                "tokenizer unknown: the dataset does not record it, and ids were not compared with"
                " text; pass --tokenizer DIR to do both"
            )
        num_without = self.num_exact - self.num_compared
        if not num_without:
            return None
        return (
            f"ids compared with the text in the log: {_num(self.num_compared, 'trajectory')};"
            f" {num_without:,} could not be compared, because the log has no text of their"
            f" responses: `rollouts inspect {out}` shows whether their ids decode"
        )

    def rejections_text(self) -> str:
        """Return the counts of records and the reasons as text, for logs without usable records."""
        return "\n".join([self._records(), *self._reasons()])

    def _records(self) -> str:
        read = _num(self.num_records, "record")
        return f"{read} read = {self.num_written} written + {self.num_rejected} rejected"

    def _reasons(self) -> list[str]:
        lines = []
        for reason in self.reasons[:_NUM_REASONS]:
            hint = f" Hint: {reason['hint']}" if reason["hint"] else ""
            number = _num(reason["num_records"], "record")
            lines.append(f"  {number} rejected [{reason['rule']}]; first: {reason['first']}{hint}")
        if len(self.reasons) > _NUM_REASONS:
            more = _num(len(self.reasons) - _NUM_REASONS, "further reason")
            lines.append(f"  {more}: see `--json`")
        return lines


def _line(number: int, noun: str, text: str) -> list[str]:
    return [f"{_num(number, noun)}{text}"] if number else []


def named_counts(counts: Mapping[str, int]) -> str:
    """Return names with their counts as text, at most 20 of them."""
    listed = [f"{name} ({number:,})" for name, number in [*counts.items()][:_NUM_NAMES]]
    more = len(counts) - _NUM_NAMES
    return ", ".join([*listed, f"and {_num(more, 'further name')}"] if more > 0 else listed)


def refuse_unread(notes: Mapping[str, int], run: Run) -> None:
    """Reject a run with content that its adapter neither reads nor leaves out on purpose."""
    unread = unread_in(notes)
    if unread:
        finding = f"the record has content that is not read: {named_counts(unread)}"
        hint = "omit --strict to convert the rest, or report the names, so that they can be read"
        raise InputError("unread_content", run.places[0].where, finding, hint=hint)


_INTERNAL = frozenset(
    {
        *("num_exact_without_logprobs", "num_with_logprobs", "reward_sum"),
        *("unrecorded", "instances", "numbers", "first_zero_ids"),
    }
)
_SAMPLING = ("temperature", "top_p", "top_k")
_ABSENT: dict[str, Any] = {
    "temperature": pl.Float32,
    "top_p": pl.Float32,
    "top_k": pl.Int32,
    "error": pl.String,
    "reward": pl.Float64,
    "rollout_logprobs": pl.List(pl.Float32),
    "segments": pl.List(pl.Int32),
}
_NO_LOGPROBS = "applies no importance weights, and rejects losses that need them"
_SOME_LOGPROBS = "rejects the dataset unless tis_ratio_type is none"
_NAMES = (
    *("instance_id", "trajectory_id", "is_last_step", "prompt_token_ids", "response_ids"),
    *("rollout_logprobs", "reward", "error", "source", "token_source", "segments", *_SAMPLING),
)

_IS_HEALTHY, _IS_LAST = pl.col("error").is_null(), pl.col("is_last_step")
_IS_CALL = _IS_HEALTHY | (pl.col("prompt_token_ids").list.len() > 0)
_IS_TEXT = pl.col("token_source") == "retokenized"
_LACKS_SAMPLING = (
    _IS_CALL & ~_IS_TEXT & pl.any_horizontal(pl.col(name).is_null() for name in _SAMPLING)
)
_LOGPROBS = pl.col("rollout_logprobs").list
_IS_FIRST_ZERO = (
    (_LOGPROBS.len() > 1) & (_LOGPROBS.first() == 0) & (_LOGPROBS.slice(1).list.max() < 0)
)
_COUNTS = {
    "num_first_zero": _IS_FIRST_ZERO.sum(),
    "num_without_sampling": _LACKS_SAMPLING.sum(),
    "num_calls": pl.col("source").filter(_IS_CALL & ~_IS_TEXT).n_unique()
    + pl.col("segments").list.len().filter(_IS_CALL & _IS_TEXT).sum(),
    "num_without_logprobs": (_IS_CALL & pl.col("rollout_logprobs").is_null()).sum(),
    "num_exact_without_logprobs": (
        _IS_CALL & ~_IS_TEXT & pl.col("rollout_logprobs").is_null()
    ).sum(),
    "num_with_logprobs": pl.col("rollout_logprobs").is_not_null().sum(),
    "num_retokenized": (_IS_CALL & _IS_TEXT).sum(),
    "num_trajectories": _IS_LAST.sum(),
    "num_failed": (_IS_LAST & ~_IS_HEALTHY).sum(),
    "num_without_reward": (_IS_LAST & _IS_HEALTHY & pl.col("reward").is_null()).sum(),
    "reward_sum": pl.col("reward").filter(_IS_LAST & _IS_HEALTHY).sum(),
}


def _num_restarted(table: pa.Table) -> int:
    """Count trajectories in which the first prompt occurs again after a different prompt.

    Several samples of one prompt (`n` of a request) are adjacent rows and are not counted.
    """
    prompt = Ragged.from_arrow(table.column("prompt_token_ids"))
    index = np.asarray(table.column("step_index"), np.int64)
    first = np.arange(len(index)) - index
    alike = (prompt.lengths == prompt.lengths[first]) & (prompt.lengths > 0)
    for row in np.flatnonzero(alike & (index > 0)).tolist():
        alike[row] = np.array_equal(prompt.row(row), prompt.row(int(first[row])))
    again = np.flatnonzero(alike[1:] & ~alike[:-1] & (index[1:] > 0)) + 1
    return len(np.unique(first[again]))


def _numbers(table: pa.Table) -> set[str]:
    """Return the names of all metrics."""
    if "metrics" not in table.column_names:
        return set()
    entries = pc.list_flatten(table.column("metrics"))
    return set(pc.struct_field(entries, "key").unique().to_pylist())


Record = Mapping[str, Any]


def record_of(identity: Mapping[str, Any], planned: Summary | None) -> Record:
    """Return the record that identifies the conversion in the footer of a chunk."""
    text = json.dumps(identity, sort_keys=True).encode()
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return {"identity": digest, "planned": planned and _encoded(planned)}


def footer_of(record: Record, counts: Summary) -> dict[bytes, bytes]:
    """Return the key-value pair for a footer, with a chunk's record and counts."""
    return {CONVERSION: json.dumps({**record, "counts": _encoded(counts)}).encode()}


def finished(out: str | os.PathLike[str], identity: Mapping[str, Any]) -> Summary | None:
    """Return the counts of a dataset if a conversion with this identity completed it, else None.

    A dataset with a missing, additional or damaged shard does not count as finished.
    """
    wanted = record_of(identity, None)["identity"]
    location = Location.of(out)
    if not location.fs.isdir(location.path) or not location.shards():
        return None
    try:
        pairs = footers(out)
        places = [Place.decode(content) for content in pairs]
        records = [json.loads(content[CONVERSION]) for content in pairs if CONVERSION in content]
        writings = {place and (place.writing, place.num_parts) for place in places}
        if len(writings) > 1 or places[0] is None or len(records) != places[0].num_parts:
            return None
        if {record["identity"] for record in records} != {wanted}:
            return None
        summary = Summary()
        for record in records:
            for name in ("planned", "counts"):
                if record[name] is not None:
                    summary.merge(Summary.decode(record[name] | {"instances": []}))
        names = scan(out).select("instance_id").unique().collect()["instance_id"]
    except (RolloutError, ValueError, KeyError, TypeError):
        return None
    summary.instances = set(names)
    return summary


def _encoded(counts: Summary) -> dict[str, Any]:
    """Return counts as JSON, without the names of instances, which the dataset contains."""
    return {name: value for name, value in counts.encode().items() if name != "instances"}
