"""Export to a Hugging Face dataset folder, for `datasets.load_dataset(folder)` and the Hub.

`data/train-*.parquet` contain the complete logical table (layout `full`); README.md is the dataset
card whose configuration, features and sizes `datasets` writes itself. Pictures are in
`data.blobs/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.blobs import Blobs, carry, names_in
from rollout_io.dataset.storage import PathLike
from rollout_io.dataset.writer import SHARD_BYTES
from rollout_io.formats.exporting import (
    Exported,
    Failed,
    ParquetFile,
    declared_tables,
    new_export,
    without_maps,
)
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import count
from schemas.imports import requires_extra
from schemas.metadata import DatasetMetadata
from schemas.rules import RULES

with requires_extra("hf", "export --format hf"):
    from datasets import DatasetInfo, Features
    from datasets.info import DatasetInfosDict
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

DATA_FILES = "data/*.parquet"

ROW = """\
A row is one sequence: the token ids of one call of a language model (its prompt and the response
sampled for it), or of several calls merged into one. The rows of one trajectory (one run of one
task) are adjacent and in order. The trajectories of one `instance_id` form a group."""


@dataclass(slots=True)
class _Statistics:
    num_rows: int = 0
    num_trained_tokens: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    rewards: list[float] = field(default_factory=list)
    group_sizes: dict[str, int] = field(default_factory=dict)

    def add(self, table: pa.Table) -> None:
        """Add the counts of a table of complete trajectories."""
        self.num_rows += table.num_rows
        for name in ("prompt_token_ids", "response_ids"):
            self.num_tokens += pc.sum(pc.list_value_length(table.column(name))).as_py() or 0
        self.num_trained_tokens += pc.sum(pc.list_flatten(table.column("loss_mask"))).as_py() or 0
        last = table.filter(table.column("is_last_step"))
        for name in last.column("instance_id").to_pylist():
            self.group_sizes[name] = self.group_sizes.get(name, 0) + 1
        if "error" in last.column_names:
            healthy = pc.is_null(last.column("error"))
            self.num_failed += last.column("error").length() - (pc.sum(healthy).as_py() or 0)
            last = last.filter(healthy)
        if "reward" in last.column_names:
            self.rewards += pc.drop_null(last.column("reward")).to_pylist()

    def lines(self) -> Iterator[str]:
        """Yield the counts as lines of text."""
        num = sum(self.group_sizes.values())
        sizes = self.group_sizes.values() or [0]
        trajectories = f"{num:,} trajector{'y' if num == 1 else 'ies'}"
        failed = f"{self.num_failed:,} failed, kept with `error`"
        yield f"{count(self.num_rows, 'row')}, {trajectories} ({failed})"
        most = f" to {max(sizes)}" if max(sizes) > min(sizes) else ""
        groups = count(len(self.group_sizes), "group")
        yield f"{groups}, trajectories per group: {min(sizes)}{most}"
        yield f"{count(self.num_tokens, 'token')}, {self.num_trained_tokens:,} trained on"
        rewards = self.rewards
        unknown = num - self.num_failed - len(rewards)
        if rewards:
            mean = sum(rewards) / len(rewards)
            yield f"outcome rewards: mean {mean:g}, from {min(rewards):g} to {max(rewards):g}"
        if unknown:
            yield f"trajectories without a reward (null): {unknown:,}"


def card(
    schema: pa.Schema, statistics: _Statistics, num_bytes: int, metadata: DatasetMetadata
) -> str:
    """Return the text of README.md."""
    front = _front(schema, statistics.num_rows, num_bytes)
    parts = [f"---\n{front}\n---", "# Rollouts", ROW]
    parts += ["## Numbers", "\n".join(f"- {line}" for line in statistics.lines())]
    parts += ["## Columns", "\n".join(_columns(schema))]
    rules = [f"- `{rule.name}`: {rule.meaning}" for rule in RULES.values()]
    parts += ["## Invariants", "`rollouts validate data/` checks them.", "\n".join(rules)]
    parts += ["## How it was made", "\n".join(_made(metadata))]
    return "\n\n".join(parts) + "\n"


def _front(schema: pa.Schema, num_rows: int, num_bytes: int) -> str:
    """Return the metadata of the card, which `datasets` writes."""
    split = {"name": "train", "num_bytes": num_bytes, "num_examples": num_rows}
    features = Features.from_arrow_schema(schema.remove_metadata())
    info = DatasetInfo(features=features, splits=[split], dataset_size=num_bytes)
    data = DatasetCardData(tags=["reinforcement-learning", "rollouts"])
    DatasetInfosDict(default=info).to_dataset_card_data(data)
    files = {"data_files": [{"split": "train", "path": DATA_FILES}]}
    MetadataConfigs(default=files).to_dataset_card_data(data)
    return str(data.to_yaml())


def _columns(schema: pa.Schema) -> Iterator[str]:
    yield from ("| column | type | meaning |", "|---|---|---|")
    for f in schema:
        column = COLUMN_BY_NAME.get(f.name)
        meaning = "user column" if column is None else column.meaning
        kind = re.sub(r"\b(item|element|child): ", "", str(f.type)).replace(" not null", "")
        yield f"| {f.name} | {kind} | {meaning} |"


def _made(metadata: DatasetMetadata) -> Iterator[str]:
    yield f"- tokenizer: {metadata.tokenizer or 'unknown'}"
    yield f"- log-probabilities: {metadata.logprobs_mode or 'unknown'}"
    for step in metadata.made_by:
        yield f"- `{json.dumps(step)}`"


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Stream the dataset into a new folder, one row group at a time.

    All rows and columns are exported, including failed trajectories. Maps (`metrics`) become lists
    of {key, value}, as `datasets` has no maps. `rollouts` can read `out/data` like any dataset.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: `out` exists or is inside the dataset, or the dataset has no rows.
    """
    from rollout_io.dataset.reader import read_metadata

    del failed
    statistics, schema = _Statistics(), pa.schema([])
    with new_export(out, dataset) as folder:
        metadata = read_metadata(dataset)
        folder.mkdir()
        (folder / "data").mkdir()
        blobs = Blobs.of(folder / "data")
        with _Shards(folder / "data", metadata) as shards:
            for piece in declared_tables(dataset):
                table = without_maps(piece)
                statistics.add(table)
                carry(names_in(table), [dataset], blobs)
                shards.write(table)
                schema = table.schema
        done = Exported(num_rows_read=statistics.num_rows, num_rows_written=statistics.num_rows)
        done.close(dataset)
        text = card(schema, statistics, shards.num_bytes, metadata)
        (folder / "README.md").write_text(text, encoding="utf-8")
    return done


class _Shards:
    """Shards of about `SHARD_BYTES`; `num_bytes` is the in-memory size of all rows written."""

    def __init__(self, folder: Path, metadata: DatasetMetadata) -> None:
        self.num_bytes = 0
        self._folder, self._pairs = folder, metadata.encode("full")
        self._num_shards, self._file = 0, ExitStack()
        self._shard_end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, table: pa.Table) -> None:
        if self.num_bytes >= self._shard_end:
            self._file.close()
            path = self._folder / f"train-{self._num_shards:05d}.parquet"
            self._shard = self._file.enter_context(ParquetFile(path, self._pairs))
            self._num_shards += 1
            self._shard_end = self.num_bytes + SHARD_BYTES
        self._shard.write(table)
        self.num_bytes += table.nbytes
