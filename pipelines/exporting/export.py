"""Write rollouts as supervised samples, preference pairs or labelled samples.

Steps that continue each other are merged first, so that a sequence is written once and its
environment tokens are known. Token formats copy the ids of the table; nothing is tokenized again.

TRL's DPO and KTO trainers train every token of a completion. A completion is therefore one step:
all of its tokens were sampled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.exporting.pairs import UNKNOWN, labelled, pairs, selected
from pipelines.exporting.samples import COLUMNS, PICTURED, Messages, Tokens, index_steps, num_shown
from pipelines.merging.merge import merge_table
from pipelines.rewards import trajectory_returns
from rollout_io.dataset.checking import checked_tables
from rollout_io.dataset.reader import iter_tables, scan
from rollout_io.dataset.storage import PathLike
from rollout_io.dataset.trajectory_facts import dataset_outcome
from rollout_io.formats.exporting import (
    IMAGES,
    Exported,
    Failed,
    Failures,
    ParquetFile,
    PictureBytes,
    new_export,
)
from rollout_io.redaction.tables import REDACTED
from schemas.errors import count
from schemas.ragged import Ragged, list_lengths
from schemas.types import cast_table

Sample = dict[str, Any]

PICTURES = (
    "with pictures or other parts that are not text"
    " (sft_images, dpo_images, kto_images and openai_sft have pictures)"
)
NOT_SHOWN = (
    "with parts that trainers do not show: documents, sounds, pictures in tool results, and"
    " pictures that are not stored"
)
UNPLACED = "with pictures whose tokens are unknown, so that prompts cannot be compared"
SECRETS = "with redacted answers, whose text would train (token formats train around it)"
NO_TEXT = "without messages, or without the text of an answer"
UNTRAINED = "that train no token"
NO_FORK = "at no fork of their group"
NO_PREFERENCE = "at forks, but in no pair"
NO_STEP = "without a step whose tokens all train"

ROW_GROUP_IDS = 1 << 20
"""Number of token ids after which a row group is written."""
ID_BYTES = 4
"""Size of a token id: as many bytes of pictures count as one."""

_MESSAGES = pa.list_(pa.json_())
_IDS, _NAME = pa.list_(pa.int32()), pa.string()
_FACTS = {"instance_id": _NAME, "trajectory_id": _NAME, "return": pa.float64()}
_SIDES = {
    f"{side}_{name}": kind
    for side in ("chosen", "rejected")
    for name, kind in _FACTS.items()
    if name != "instance_id"
}
SCHEMAS = {
    "sft": {"input_ids": _IDS, "assistant_masks": pa.list_(pa.int8()), **_FACTS},
    "dpo": {
        **dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), _IDS),
        "instance_id": _NAME,
        **_SIDES,
    },
    "kto": {"prompt_ids": _IDS, "completion_ids": _IDS, "label": pa.bool_(), **_FACTS},
}
"""Columns of the token formats."""
PICTURE_SCHEMAS = {
    "sft": {"messages": _MESSAGES, "images": IMAGES, "tools": _NAME, **_FACTS},
    "dpo": {
        **dict.fromkeys(("prompt", "chosen", "rejected"), _MESSAGES),
        "images": IMAGES,
        "instance_id": _NAME,
        **_SIDES,
    },
    "kto": {
        **dict.fromkeys(("prompt", "completion"), _MESSAGES),
        "images": IMAGES,
        "label": pa.bool_(),
        **_FACTS,
    },
}
"""Columns of the formats with pictures."""
_FEATURES = {"images": {"feature": {"_type": "Image"}, "_type": "List"}}
"""Makes `datasets` decode pictures."""


class _Lines:
    """A file with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = self._path.open("w", encoding="utf-8", errors="backslashreplace")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, sample: Sample) -> None:
        self._file.write(json.dumps(sample, ensure_ascii=False) + "\n")


class _Columns:
    """A Parquet file of samples."""

    def __init__(self, path: Path, kinds: Mapping[str, pa.DataType]) -> None:
        features = json.dumps({"info": {"features": _FEATURES}}).encode()
        metadata = {b"huggingface": features} if "images" in kinds else None
        self._file, self._kinds = ParquetFile(path, metadata), kinds
        self._ids = [name for name, kind in kinds.items() if kind == _IDS]
        self._samples, self._num_ids = list[Sample](), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._file.__exit__(*error)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._num_ids += sum(len(sample[name]) for name in self._ids)
        self._num_ids += sum(len(image["bytes"]) // ID_BYTES for image in sample.get("images", ()))
        if self._num_ids > ROW_GROUP_IDS:
            self._flush()

    def _flush(self) -> None:
        columns = {
            name: _array([sample.get(name) for sample in self._samples], kind)
            for name, kind in self._kinds.items()
        }
        self._file.write(pa.table(columns))
        self._samples, self._num_ids = [], 0


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind != _MESSAGES:
        return pa.array(values, kind)
    texts = [[json.dumps(message) for message in messages] for messages in values]
    return pa.array(texts, pa.list_(pa.string())).cast(kind)


class _Writing:
    """One export: the sequences of the dataset, the file, and the counts."""

    def __init__(
        self,
        dataset: PathLike,
        failed: Failed,
        kind: str,
        dialect: str | None,
        file: _Lines | _Columns,
    ) -> None:
        self._file, self.done, self._kind = file, Exported(num_samples=0), kind
        self._dataset, self._dialect, self._pictures = dataset, dialect, PictureBytes(dataset)
        self._failures = Failures.of(dataset, failed)

    def returns(self) -> pl.DataFrame:
        """Return instance_id, trajectory_id and return of the trajectories that are not masked."""
        masked = pl.col("trajectory_id").is_in(self._failures.trajectories.to_pylist())
        masked |= pl.col("instance_id").is_in(self._failures.groups.to_pylist())
        found = trajectory_returns(scan(self._dataset), dataset_outcome(self._dataset))
        return found.filter(~masked).select("instance_id", "trajectory_id", "return").collect()

    def sequences(self, done: Exported, *, is_checked: bool) -> Iterator[pa.Table]:
        """Yield merged rows that can be written, and count all rows."""
        read = iter_tables if is_checked else checked_tables
        for piece in read(self._dataset, decode=False):
            rows = merge_table(cast_table(piece))
            table = self._failures.leave_out(rows, done)
            if "pictures" in table.column_names:
                kept = list_lengths(table.column("pictures")) == 0
                for row in np.flatnonzero(~kept):
                    reason = self._why_not_shown(table.slice(row, 1))
                    kept[row] = reason is None
                    done.take_back(reason or "", int(not kept[row]))
                table = table.filter(pa.array(kept)).combine_chunks()
            if self._dialect is not None and REDACTED in table.column_names:
                marks = Ragged.from_arrow(table.column(REDACTED))
                rows = np.unique(marks.row_of(np.flatnonzero(marks.values)))
                done.take_back(SECRETS, len(rows))
                kept = np.setdiff1d(np.arange(table.num_rows), rows)
                table = table.take(pa.array(kept)).combine_chunks()
            yield table

    def _why_not_shown(self, table: pa.Table) -> str | None:
        """Return why a sequence with pictures cannot be written; None if it can."""
        if self._dialect not in PICTURED:
            return PICTURES
        names = {*COLUMNS, "pictures"} & {*table.column_names}
        (row,) = table.select(sorted(names)).to_pylist()
        if num_shown(row) not in (None, len(row["pictures"])):
            return NOT_SHOWN
        has_unknown = any(entry["start"] is None for entry in row["pictures"])
        return UNPLACED if has_unknown and self._kind == "dpo" else None

    def texts(self, table: pa.Table, tokens: Tokens) -> Tokens | Messages:
        """Return the contents of sequences in the form of this format."""
        if self._dialect is None:
            return tokens
        return Messages(table, tokens, self._dialect, self._pictures)

    def add(self, sample: Sample, facts: Sample) -> None:
        """Write a sample; OpenAI's and ShareGPT's have no fields for ids and returns."""
        self._file.add(sample | facts if self._dialect in (None, "trl", "images") else sample)
        self.done.num_samples = (self.done.num_samples or 0) + 1


def write(
    dataset: PathLike,
    out: PathLike,
    failed: Failed,
    select: str,
    *,
    kind: str,
    dialect: str | None,
) -> Exported:
    """Write a file of samples, reading the dataset once (pairs: twice), one row group at a time.

    Memory grows with the number of trajectories (pairs: of steps), and with the pairs of which only
    one side was read yet: with one group, if the attempts of a group are stored together.

    Args:
        dataset: The rollout dataset, merged or not.
        out: Path of the new file.
        failed: If a trajectory failed: leave out its entire `group`, or only the `trajectory`.
        select: One of the `SELECTIONS` of the kind.
        kind: `sft`, `dpo` or `kto`.
        dialect: Form of the messages, one of `DIALECTS`; None: token ids, as Parquet.

    Returns:
        Counts of merged rows and of samples.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: `out` exists, or no sample can be written.
    """
    with new_export(out, dataset) as path:
        columns = {None: SCHEMAS, "images": PICTURE_SCHEMAS}.get(dialect)
        sink = _Lines(path) if columns is None else _Columns(path, columns[kind])
        with sink as file:
            writing = _Writing(dataset, failed, kind, dialect, file)
            _WRITERS[kind](writing, select)
        done = writing.done
        done.close(dataset)
    num_stored = scan(dataset).select(pl.len()).collect().item()
    if num_stored != done.num_rows_read:
        rows = count(done.num_rows_read, "sequence")
        done.remarks.append(f"{count(num_stored, 'row')} merged into {rows}, which are counted")
    return done


def _write_sft(writing: _Writing, select: str) -> None:
    done, failing = writing.done, Counter[str]()
    for texts, _, kept in _chosen(writing, selected(writing.returns(), select)):
        for row, facts, _ in kept:
            sample = texts.whole(row)
            if sample is None:
                done.take_back(NO_TEXT, 1)
                continue
            writing.add(sample, facts)
            failing[facts["trajectory_id"]] += facts["return"] is not None and facts["return"] <= 0
    if select == "best":
        num, num_attempts = failing.total(), sum(map(bool, failing.values()))
        done.counts = {"num_attempts_not_passing": num_attempts, "num_samples_not_passing": num}
        if num and done.num_samples:
            done.remarks.append(
                f"{count(num_attempts, 'chosen attempt')} of {len(failing):,} did not pass (return <= 0):"
                f" {num / done.num_samples:.0%} of the samples; best_passing leaves them out"
            )


def _write_kto(writing: _Writing, select: str) -> None:
    sides: dict[bool, list[int]] = {True: [], False: []}
    for texts, tokens, kept in _chosen(writing, labelled(writing.returns(), select)):
        prompt, completion = (f"{name}{texts.suffix}" for name in ("prompt", "completion"))
        for row, facts, label in kept:
            steps = tokens.trained(row)
            found = [parts for i in steps if (parts := texts.step(row, i)) is not None]
            if not found:
                writing.done.take_back(NO_TEXT if steps else NO_STEP, 1)
            for before, answer, shown in found:
                writing.add({prompt: before, completion: answer, "label": label} | shown, facts)
            sides[label] += [tokens.spans(row)[i][1] for i in steps][: len(found)]
    for word, lengths in (("desirable", sides[True]), ("undesirable", sides[False])):
        writing.done.counts |= {f"num_{word}": len(lengths), f"num_{word}_tokens": sum(lengths)}
        mean = f", {sum(lengths) / len(lengths):,.1f} tokens each on average" if lengths else ""
        writing.done.remarks.append(f"{word}: {count(len(lengths), 'sample')}{mean}")


def _chosen(
    writing: _Writing, chosen: pl.DataFrame
) -> Iterator[tuple[Tokens | Messages, Tokens, list[tuple[int, Sample, bool]]]]:
    """Yield sequences: their contents, and the rows to write with facts and labels."""
    known = {name: rest for name, *rest in chosen.drop("instance_id").iter_rows()}
    for table in writing.sequences(writing.done, is_checked=False):
        tokens, kept = Tokens(table), []
        names = zip(*(table.column(n).to_pylist() for n in list(_FACTS)[:2]), strict=True)
        for row, (instance, trajectory) in enumerate(names):
            value, reason, label = known[trajectory]
            if reason is None and not tokens.masks.row(row).any():
                reason = UNTRAINED
            if reason is not None:
                writing.done.take_back(reason, 1)
                continue
            facts = dict(zip(_FACTS, (instance, trajectory, value), strict=True))
            kept.append((row, facts, label))
        yield writing.texts(table, tokens), tokens, kept


def _write_pairs(writing: _Writing, select: str) -> None:
    frames, num_rows = [], 0
    for table in writing.sequences(writing.done, is_checked=False):
        frames.append(index_steps(table, num_rows))
        num_rows += table.num_rows
    returns = writing.returns().select("trajectory_id", "return")
    steps = pl.concat(frames).join(returns, on="trajectory_id", how="left", maintain_order="left")
    found, chosen = pairs(steps, select)
    at_fork = set(steps.join(found, on=["instance_id", "context"], how="semi")["row"])
    written = _write_chosen(writing, chosen)
    wanted = {side["row"] for name in ("chosen", "rejected") for side in chosen[name]}
    done, is_known = writing.done, pl.col("return").is_finite()
    unknown = set(steps["row"]) - set(steps.filter(is_known)["row"])
    done.take_back(UNKNOWN, len(unknown))
    done.take_back(NO_FORK, num_rows - len(at_fork | unknown))
    done.take_back(NO_TEXT, len(wanted - written))
    done.take_back(NO_PREFERENCE, len(at_fork - wanted))
    done.counts = {
        "num_forks": len(found),
        "num_forks_of_equal_return": int(found["is_equal"].sum()),
    }
    equal = f"{done.counts['num_forks_of_equal_return']:,} of equal return"
    done.remarks.append(
        f"{count(len(found), 'fork')}, {equal}; {count(len(chosen), 'pair')} chosen"
    )
    for name in ("chosen", "rejected") if len(chosen) else ():
        side = chosen[name].struct.unnest()
        num_tokens, num_cut = int(side["num_tokens"].sum()), int(side["is_cut_off"].sum())
        done.counts |= {f"num_{name}_tokens": num_tokens, f"num_{name}_cut_off": num_cut}
        done.remarks.append(
            f"{name}: {num_tokens / len(chosen):,.1f} tokens on average, {num_cut / len(chosen):.0%} cut off"
        )
    untrained = len(steps) - int(steps["trains"].sum())
    if untrained:
        done.remarks.append(f"{count(untrained, 'step')} with tokens that do not train, in no pair")


def _write_chosen(writing: _Writing, chosen: pl.DataFrame) -> set[int]:
    """Write each pair when its second side is read; return the rows that are in a written pair."""
    wanted = chosen.select("instance_id", "chosen", "rejected").to_dicts()
    sides: dict[int, list[tuple[int, str]]] = {}
    for number, pair in enumerate(wanted):
        for name in ("chosen", "rejected"):
            sides.setdefault(pair[name]["row"], []).append((number, name))
    read, written, row = dict[int, Any](), set[int](), -1
    for table in writing.sequences(Exported(), is_checked=True):
        texts = writing.texts(table, Tokens(table))
        for index in range(table.num_rows):
            row += 1
            for number, name in sides.get(row, ()):
                pair = wanted[number]
                parts = texts.step(index, pair[name]["step"])
                if parts is None:
                    continue
                if number not in read:
                    read[number] = parts[1]
                    continue
                both = {"rejected": read.pop(number), "chosen": parts[1]}
                if name == "rejected":
                    both = {"rejected": both["chosen"], "chosen": both["rejected"]}
                written |= {pair["chosen"]["row"], pair["rejected"]["row"]}
                sample = {f"{key}{texts.suffix}": value for key, value in both.items()}
                facts = {"instance_id": pair["instance_id"]}
                facts |= {
                    f"{side}_{fact}": pair[side][fact]
                    for side in both
                    for fact in ("trajectory_id", "return")
                }
                writing.add({f"prompt{texts.suffix}": parts[0]} | sample | parts[2], facts)
    return written


_WRITERS = {"sft": _write_sft, "dpo": _write_pairs, "kto": _write_kto}
