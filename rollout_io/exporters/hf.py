"""Hugging Face: a dataset folder, for `datasets.load_dataset(folder)` and the Hub.

`data/train-*.parquet` hold the whole logical table (layout `full`), README.md is the dataset card with
the configuration, features and size that `datasets` reads (5.2.0).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pyarrow as pa

from rollout_io.exporters.card import Statistics, card
from rollout_io.exporters.files import ParquetFile, whole, without_maps
from rollout_io.exporters.rows import Exported, Failed, PathLike, checked_tables
from rollout_io.reader import read_metadata
from rollout_io.writer import SHARD_BYTES
from schemas.metadata import DatasetMetadata


def write(dataset: PathLike, out: PathLike, failed: Failed = "group") -> Exported:
    """Write the folder, streaming: memory holds one row group.

    Every row and column is there, failed trajectories too. Maps (`metrics`) are lists of {key, value},
    for `datasets` has no maps; `rollouts` reads `out/data` as it reads any dataset.

    Args:
        dataset: The rollout dataset.
        out: A folder that is not there yet.
        failed: Masks nothing here.

    Raises:
        ValidationError: The dataset breaks an invariant.
        RolloutError: A taken `out`, no rows.
    """
    del failed
    statistics, schema = Statistics(), pa.schema([])
    metadata = read_metadata(dataset)
    with whole(out) as folder:
        folder.mkdir()
        (folder / "data").mkdir()
        with _Shards(folder / "data", metadata) as shards:
            for piece in checked_tables(dataset):
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
    """Parquet files of a size that downloads well; `num_bytes` in memory of all rows so far."""

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
