"""Export to a Hugging Face dataset folder, for `datasets.load_dataset(folder)` and the Hub.

`data/train-*.parquet` contain the complete logical table (layout `full`); README.md is the dataset
card with the configuration, features and sizes that `datasets` 5.2.0 reads.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pyarrow as pa

from rollout_io.dataset.reader import read_metadata
from rollout_io.dataset.writer import SHARD_BYTES
from rollout_io.formats.exporting.card import Statistics, card
from rollout_io.formats.exporting.export_files import ParquetFile, new_export, without_maps
from rollout_io.formats.exporting.export_rows import Exported, Failed, PathLike, declared_tables
from schemas.metadata import DatasetMetadata


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Stream the dataset into a new folder, one row group at a time.

    All rows and columns are exported, including failed trajectories. Maps (`metrics`) become lists
    of {key, value}, as `datasets` has no maps. `rollouts` can read `out/data` like any dataset.

    Args:
        dataset: The rollout dataset.
        out: Path of the new folder.
        failed: Ignored, since nothing is masked.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: `out` exists or is inside the dataset, or the dataset has no rows.
    """
    del failed
    statistics, schema = Statistics(), pa.schema([])
    with new_export(out, dataset) as folder:
        metadata = read_metadata(dataset)
        folder.mkdir()
        (folder / "data").mkdir()
        with _Shards(folder / "data", metadata) as shards:
            for piece in declared_tables(dataset):
                table = without_maps(piece)
                statistics.add(table)
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
