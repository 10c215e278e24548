"""Datasets, and tables of verdicts and shares about their rows."""

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io import RolloutWriter
from rollout_io.dataset.trajectory_facts import with_stored_digest
from schemas.records import UPDATE_SHARE_COLUMNS, VERDICT_COLUMNS

ROWS = (("t_0", 0, [5, 6, 7, 8]), ("t_0", 1, [9, 9]), ("t_1", 0, [4, 4, 4]), ("u_0", 0, [7]))
"""trajectory_id, step_index, response_ids of each row."""
IDS = pa.list_(pa.int32())


def write_dataset(path, rows=ROWS, **columns):
    names = [name for name, _, _ in rows]
    is_last = [name != after for name, after in zip(names, [*names[1:], None], strict=True)]
    table = pa.table(
        {
            "instance_id": [name.split("_")[0] for name in names],
            "repetition_id": pa.array([int(name.split("_")[1]) for name in names], pa.int32()),
            "trajectory_id": names,
            "step_index": pa.array([step for _, step, _ in rows], pa.int32()),
            "is_last_step": is_last,
            "prompt_token_ids": pa.array([[1, 2, step] for _, step, _ in rows], IDS),
            "response_ids": pa.array([ids for _, _, ids in rows], IDS),
            "loss_mask": [[True] * len(ids) for _, _, ids in rows],
            "token_source": ["engine"] * len(rows),
            "reward": [1.0] * len(rows),
            **columns,
        }
    )
    with RolloutWriter(path) as writer:
        writer.write(table)
    return path


def digest_of(prompt, ids, reward=1.0):
    """The digest of a row that trains its whole response."""
    values = {"prompt_token_ids": prompt, "response_ids": ids, "reward": reward}
    row = pl.LazyFrame([values | {"loss_mask": [True] * len(ids)}])
    return with_stored_digest(row).collect()["row_digest"].item()


def _table(columns, rows):
    schema = pa.schema([pa.field(c.name, c.type) for c in columns])
    return pa.Table.from_pylist(rows, schema=schema)


def verdict(dataset, name, step, ids, **values):
    """One verdict about a row, of its whole response unless told otherwise."""
    known = {"dataset": str(dataset), "instance_id": name.split("_")[0], "trajectory_id": name}
    known |= {"step_index": step, "num_response_tokens": len(ids), "span": 0}
    known |= {"row_digest": digest_of([1, 2, step], ids)}
    return (
        known
        | {"start": 0, "end": len(ids), "num_tokens": len(ids), "kind": "as_labelled"}
        | values
    )


def share(dataset, name, step, ids, value, **values):
    """The share of a row in update 3 of a run: half of it is the first token's, and so on."""
    known = {"run": "run", "global_step": 3, "dataset": str(dataset)}
    known |= {"instance_id": name.split("_")[0], "trajectory_id": name, "step_index": step}
    tokens = [value * 0.5 ** min(at + 1, len(ids) - 1) for at in range(len(ids))]
    known |= {"row_digest": digest_of([1, 2, step], ids)}
    return known | {"share": value, "token_shares": tokens} | values


def write_verdicts(path, rows):
    pq.write_table(_table(VERDICT_COLUMNS, rows), path)
    return path


def write_shares(path, rows, **columns):
    frame = pl.from_arrow(_table(UPDATE_SHARE_COLUMNS, rows))
    path.parent.mkdir(exist_ok=True)
    frame.with_columns(**{n: pl.Series(v) for n, v in columns.items()}).write_parquet(path)
    return path
